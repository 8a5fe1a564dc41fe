"""The methods: what each keeps, and that they are what they are called."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals

import methods
from configs import ModelConfig
from jaxcompact.paths import map_named
from jaxcompact.subspace import with_sketches
from llama import Llama
from methods import Method
from options import MethodOptions
from tests.cases import slow

pytestmark = pytest.mark.usefixtures("optax_promotion")

CONFIG = ModelConfig(vocab_size=64, width=32, ff=64, layers=2, heads=4)


@pytest.fixture(scope="module", params=["state", "dict"])
def params(request):
    params = nnx.state(Llama(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0)), nnx.Param)
    return params if request.param == "state" else nnx.to_pure_dict(params)


def optimizer(method: Method, **kwargs):
    return methods.optimizer(method, method.subspace(0), 1e-2, width=32, **kwargs)


def gradients(method: Method, params):
    """Random ones, in the shapes that the method's own gradient has."""
    subspace = method.subspace(0)
    slots = {} if subspace is None else subspace.slots(params)

    def leaf(name, x):
        slot = slots.get(name)
        shape = x.shape if slot is None else slot.sketch_shape
        return jax.random.normal(jax.random.key(x.size), shape)

    return map_named(leaf, params)


def sizes(state) -> int:
    return sum(x.size for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    "name",
    [slow("exact"), slow("remat"), "compact", "galore"],
)
def test_updates_have_the_parameters_shapes(name, params):
    method = Method(name)
    tx = optimizer(method)
    grads = gradients(method, params)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    shapes = jax.tree.map(jnp.shape, updates)
    assert jax.tree.leaves(shapes) == jax.tree.leaves(jax.tree.map(jnp.shape, params))
    assert all(bool(u.any()) for u in jax.tree.leaves(updates))


def test_remat_recomputes_whatever_the_others_keep():
    options = MethodOptions("exact,remat", checkpoint="int4")
    options.check()
    found = [options.of(name).checkpoint for name in options.names]
    assert found == ["int4", "nothing"]


def test_galore_projects_every_matrix_and_nothing_else(params):
    state = optimizer(Method("galore", rank=0.25)).init(params)
    found = [
        node
        for node in jax.tree.leaves(
            state, is_leaf=lambda n: isinstance(n, optax.contrib.GaLoreState)
        )
        if isinstance(node, optax.contrib.GaLoreState)
    ]
    projectors = [p.shape for p in jax.tree.leaves(found[0].projector) if p.size]
    # 7 matrices less attention's output, of 2 layers; the larger side is projected.
    assert sorted(projectors) == [(32, 8)] * 6 + [(64, 8)] * 6


def test_galore_update_of_a_layer_is_optaxs(params):
    grads = gradients(Method("galore"), params)
    tx = optimizer(Method("galore", rank=8, alpha=0.5), clip=1e9)
    updates, _ = tx.update(grads, tx.init(params), params)
    g, got = (dict_of(t)["layers"]["mlp"]["up"]["kernel"][1] for t in (grads, updates))
    alone = optax.contrib.scale_by_galore(8)
    expected, _ = alone.update({"w": g}, alone.init({"w": g}))
    np.testing.assert_allclose(got, -1e-2 * 0.5 * expected["w"], rtol=1e-3, atol=1e-6)


def dict_of(tree):
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def test_compact_state_is_smaller_by_the_rank(params):
    exact, compact = (
        sizes(optimizer(Method(n)).init(params)) for n in ("exact", "compact")
    )
    matrices = 2 * (3 * 32 * 32 + 3 * 32 * 64)
    assert exact - compact == 2 * matrices * 3 // 4 - (2 + 1 + 1)  # key, two counters


def test_a_llama_block_keeps_three_sketches_and_no_linear_input():
    """All that crosses from forward to backward, stacked over the layers, by shape.

    Exact training keeps the three tensors that q, k, v, gate and up, and down read;
    compact keeps z of each in their place, r = 8, 8 and 16 wide, and nothing else new.
    """
    model = Llama(CONFIG, dtype=jnp.float32, attention="xla", rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    tokens_bt = jnp.zeros((3, 20), jnp.int32)

    def hidden(params):
        return jnp.sum(nnx.merge(graphdef, params).hidden(tokens_bt))

    def saved(fun, at):
        shapes = [a.shape for a, _ in saved_residuals(fun, at)]
        return Counter(shape for shape in shapes if shape[:3] == (2, 3, 20))

    subspace = Method("compact", rank=0.25).subspace(0)
    exact = saved(hidden, params)
    compact = saved(*with_sketches(hidden, subspace, params, 0))
    sketches = Counter({(2, 3, 20, 8): 2, (2, 3, 20, 16): 1})
    assert {shape: compact[shape] for shape in sketches} == dict(sketches)
    assert not compact - exact - sketches
    gone = exact - compact
    assert gone[2, 3, 20, 32] >= 2 and gone[2, 3, 20, 64] == 1


def test_alphas_scale_their_matrices_alone(params):
    grads = gradients(Method("exact"), params)

    def updates(**kwargs):
        tx = optimizer(Method("exact", **kwargs))
        return dict_of(tx.update(grads, tx.init(params), params)[0])

    plain, scaled = updates(), updates(alpha=0.5, output_alpha=0.25)
    ratios = jax.tree.map(lambda a, b: round(float((a / b).mean()), 4), scaled, plain)
    assert ratios["layers"]["attn"]["q"]["kernel"] == 0.5
    assert ratios["layers"]["mlp"]["down"]["kernel"] == 0.5
    assert ratios["layers"]["attn"]["o"]["kernel"] == 0.25
    assert ratios["embed"]["embedding"] == ratios["head"]["kernel"] == 1.0


def test_state_is_float32_for_bfloat16_parameters(params):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    for name in ("exact", "compact", "galore"):
        method = Method(name)
        tx = optimizer(method)
        state = tx.init(low)
        moments = [m for m in jax.tree.leaves(state) if m.dtype == jnp.bfloat16]
        assert not moments, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "lora"}, "name must be one of exact, .*, got 'lora'"),
        ({"checkpoint": "all"}, "checkpoint must be one of none, .*, got 'all'"),
        ({"bits": 3}, "bits must be one of 16, 8, 4, got 3"),
        ({"moment": "drop"}, "moment must be one of .*, got 'drop'"),
        ({"name": "galore", "period": 2**31}, "period must be .* - 1, got 2147483648"),
        ({"rank": 2.0}, "rank must be an int, or a fraction"),
        ({"kind": "dct"}, "kind must be one of"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Method(**arguments)
