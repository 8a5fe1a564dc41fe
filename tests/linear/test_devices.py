"""Compressed layers under explicit sharding: a step as on one device."""

import re
from contextlib import nullcontext
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxcompact as jc
from jaxcompact import nnx as cnnx
from jaxcompact.memory.collectives import collectives
from tests.cases import slow
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optax_promotion")

KEY = jax.random.key(0)
# How devices (data, tensor) share the layers' kernels, up and down, and x's examples.
BOTH = "fsdp and tensor"
LAYOUTS = {
    "copies": ((), (), "data"),
    "tensor parallel": ((None, None, "tensor"), (None, "tensor"), "data"),
    "fsdp": (
        (None, ("data", "tensor")),
        (None, None, ("data", "tensor")),
        ("data", "tensor"),
    ),
    BOTH: (
        (None, "data", "tensor"),
        (None, "tensor", "data"),
        "data",
    ),
}
# Of down's 96 inputs 24 columns: parts of 48 hold whole rows of a countsketch.
PROJECTIONS = {
    "countsketch": jc.Projection(0.25, "countsketch"),
    "countsketch, a last row in part": jc.Projection(20, "countsketch"),
    "gaussian, 8 bits": jc.Projection(16, codec=jc.Quantized(8)),
    "orthonormal, two blocks": jc.Projection(16, "orthonormal", blocks=2),
    "countsketch, two blocks": jc.Projection(16, "countsketch", blocks=2),
    "sparse": jc.Projection(16, "sparse"),
}
SHAPES = {"up": (3, 64, 96), "down": (3, 96, 64)}


def scaled(seed: int, *shape: int) -> jax.Array:
    return normal(seed, *shape, scale=shape[-1] ** -0.5)


def loss(params, x):
    of_x = jax.typeof(x).sharding if not jax.typeof(x).sharding.mesh.empty else None

    def layer(x, kernels):
        h = jax.nn.silu(jc.linear(x, kernels["up"]))
        return x + jc.linear(h, kernels["down"], out_sharding=of_x), None

    return jnp.sum(jnp.sin(jax.lax.scan(layer, x, params)[0]))


def training(projection):
    subspace = jc.Subspace({".*": projection}, jax.random.key(0), period=1)
    optimizer = jc.subspace_adamw(1e-2, subspace, moment="transfer")

    def step(params, state, x):
        count = jc.update_count(state)
        value, grads = jc.value_and_grad(loss, subspace)(params, x, step=count)
        updates, state = optimizer.update(grads, state, params)
        return value, grads, optax.apply_updates(params, updates), state

    return optimizer.init, step


def params_and_x():
    params = {k: scaled(i, *shape) for i, (k, shape) in enumerate(SHAPES.items())}
    return params, scaled(9, 8, 5, 64)


def two_steps(projection, params, x):
    init, step = map(jax.jit, training(projection))
    value, _, params, state = step(params, init(params), x)
    again, grads, params, state = step(params, state, x)
    return (value, again, grads, params, state)


@cache
def on_one_device(name):
    return jax.device_get(two_steps(PROJECTIONS[name], *params_and_x()))


def shared(layout, set_mesh=True, sizes=(2, 2)):
    count = np.prod(sizes)
    mesh = jax.make_mesh(sizes, ("data", "tensor"), devices=jax.devices()[:count])
    up, down, batch = LAYOUTS[layout]

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    params, x = params_and_x()
    params = {"up": put(params["up"], *up), "down": put(params["down"], *down)}
    return jax.set_mesh(mesh) if set_mesh else nullcontext(), params, put(x, batch)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("countsketch", BOTH),
        ("gaussian, 8 bits", "tensor parallel"),
        *[slow("countsketch", layout) for layout in LAYOUTS if layout != BOTH],
        *[slow(name, BOTH) for name in PROJECTIONS if name != "countsketch"],
    ],
)
def test_two_steps_are_those_of_one_device(name, layout):
    """Half of the projections on a mesh that is set, half that arrays alone know."""
    context, params, x = shared(layout, list(PROJECTIONS).index(name) % 2 == 0)
    with context:
        found = two_steps(PROJECTIONS[name], params, x)
    _, _, grads, updated, _ = found
    for key, kernel in params.items():
        for like in (grads[key], updated[key]):
            assert like.sharding.is_equivalent_to(kernel.sharding, 3)

    def close(a, b):
        # Sums in another order; a code of 8 bits may turn, a sign of Adam's may not.
        np.testing.assert_allclose(a, b, atol=2e-3 * np.abs(b).max() + 1e-7)

    jax.tree.map(close, jax.device_get(found), on_one_device(name))


@pytest.mark.parametrize(
    ("name", "set_mesh"),
    [
        ("countsketch", True),
        slow("countsketch", False),
        slow("orthonormal, two blocks", True),
        ("orthonormal, two blocks", False),
    ],
)
def test_a_mesh_of_one_device(name, set_mesh):
    """Whose types say as much as those of several."""
    context, params, x = shared("fsdp and tensor", set_mesh, sizes=(1, 1))
    init, step = map(jax.jit, training(PROJECTIONS[name]))
    with context:
        value, *_ = step(params, init(params), x)
    np.testing.assert_allclose(value, on_one_device(name)[0], rtol=1e-6)


def compiled_step(layout):
    context, params, x = shared(layout)
    init, step = training(PROJECTIONS["countsketch"])
    with context:
        state = jax.jit(init)(params)
        return jax.jit(step).lower(params, state, x).compile().as_text()


@pytest.mark.slow
def test_gradients_are_summed_as_sketches():
    """Of copies of the weights nothing else is sent but the loss."""
    text = compiled_step("copies")
    ranks = {"up": 16, "down": 24}
    sketches = sum(4 * layers * ranks[k] * m for k, (layers, _, m) in SHAPES.items())
    assert collectives(text) == {"all-reduce": sketches + 4}


@pytest.mark.slow
def test_updates_are_gathered_layer_by_layer():
    """Those of LLaMA-70B would be 38 GiB, on each of 64 cards."""
    text = compiled_step("fsdp")
    shapes = re.findall(r"f32\[([\d,]*)\]\S* all-gather\(", text)
    assert shapes and not [s for s in shapes if s.count(",") == 2 and s[0] != "1"]


def test_the_layer_of_nnx_knows_how_its_output_lies():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    model = cnnx.Linear(64, 32, rngs=nnx.Rngs(0))
    subspace = jc.Subspace({"kernel": jc.Projection(16)}, jax.random.key(0))
    graphdef, params = nnx.split(model)
    x = scaled(1, 8, 64)

    def gradient(params, x, out=None):
        def loss(model):
            return jnp.sum(jnp.sin(model(x, out_sharding=out)))

        return cnnx.value_and_grad(loss, subspace)(nnx.merge(graphdef, params), step=0)

    value, expected = jax.jit(gradient)(params, x)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, PartitionSpec("tensor"))
        params["kernel"].set_value(jax.device_put(params["kernel"].get_value(), place))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "tensor")))
        out = PartitionSpec("data")
        found = jax.jit(gradient, static_argnums=2)(params, x, out)
    np.testing.assert_allclose(found[0], value, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found[1], expected
    )


@pytest.mark.parametrize("spec", ["data", ("data", "tensor")], ids=str)
def test_a_bias_is_gathered_as_the_kernel_is(spec):
    """FSDP shares all parameters."""
    params = {"kernel": scaled(0, 64, 32), "bias": scaled(1, 32)}
    x, subspace = scaled(2, 8, 64), jc.Subspace({"kernel": jc.Projection(16)}, KEY)

    def gradient(params, x):
        def loss(p):
            return jnp.sum(jnp.sin(jc.linear(x, p["kernel"], p["bias"])))

        return jc.value_and_grad(loss, subspace)(params, step=0)

    value, expected = jax.jit(gradient)(params, x)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"))
    with jax.set_mesh(mesh):
        params["kernel"] = jax.device_put(params["kernel"], jax.P(None, spec))
        params["bias"] = jax.device_put(params["bias"], jax.P(spec))
        found = jax.jit(gradient)(params, jax.device_put(x, jax.P("data")))
    np.testing.assert_allclose(found[0], value, rtol=1e-6)
    assert jax.typeof(found[1]["bias"]).sharding.spec == jax.P(spec)
    for name, grad in expected.items():
        np.testing.assert_allclose(found[1][name], grad, atol=1e-5)


def test_the_key_may_be_made_on_another_mesh():
    """README's subspace, whose step is then compiled for other devices."""
    with shared("copies")[0]:
        init, step = training(PROJECTIONS["countsketch"])
        jax.jit(init)(params_and_x()[0])  # on four devices
    context, params, x = shared("fsdp and tensor", sizes=(1, 1))
    with context:
        value, *_ = jax.jit(step)(params, jax.jit(init)(params), x)
    np.testing.assert_allclose(value, on_one_device("countsketch")[0], rtol=1e-6)


@pytest.mark.parametrize("codec", [None, jc.Quantized(8)], ids=str)
@pytest.mark.parametrize("way", ["tokens shared", "from outside", "models apart"])
def test_in_a_shard_map_sketches_are_those_of_plain_gradients(way, codec):
    """With JAX's check of what varies over devices, and summed where its own are."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x = {"a": scaled(0, 16, 8), "b": scaled(1, 8, 8)}, scaled(2, 8, 16)
    projection = jc.Projection(rank=4, codec=codec)
    subspace = jc.Subspace({"a": projection}, key=jax.random.key(1))
    key = subspace.slots(params)["a"].keys(subspace.key, 0)
    p_nr = projection.matrix(key, 16)

    def loss(params, x):
        hidden = jc.linear(x, params["a"])
        return jnp.mean(jnp.tanh(jc.linear(hidden, params["b"])))

    def gradient(space):
        def of(fun):
            if space is None:
                return jax.grad(fun)
            return lambda params, x: jc.value_and_grad(fun, space)(params, x, step=0)[1]

        def of_one(params, x):
            found = of(loss)(jax.tree.map(lambda a: a[0], params), x)
            return jax.tree.map(lambda a: a[None], found)

        def mean(params, x):
            return jax.lax.pmean(loss(params, x), "d")

        shared, whole = jax.P("d"), jax.P()
        if way == "tokens shared":
            return jax.shard_map(
                of(loss), mesh=mesh, in_specs=(whole, shared), out_specs=whole
            )
        if way == "models apart":
            return jax.shard_map(
                of_one, mesh=mesh, in_specs=(shared, whole), out_specs=shared
            )
        return of(
            jax.shard_map(mean, mesh=mesh, in_specs=(whole, shared), out_specs=whole)
        )

    if way == "models apart":
        params = jax.tree.map(lambda a: jnp.stack([a, -a, 2 * a, a]), params)
    plain = jax.jit(gradient(None))(params, x)
    found = jax.jit(gradient(subspace))(params, x)
    expected = p_nr.T @ plain["a"]
    # With a codec: each entry of z is off by half a step of 127 at most.
    bound = 1e-6 if codec is None else float(jnp.abs(expected).max()) / 50
    np.testing.assert_allclose(found["a"], expected, rtol=0, atol=bound)
    np.testing.assert_allclose(found["b"], plain["b"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("axes", [slow("Auto"), "Explicit"])
@pytest.mark.parametrize("kernel", [(64, 96), (3, 64, 96), (64, 90)])
def test_the_state_lies_as_the_kernels_do(kernel, axes):
    """Also where types say nothing of it, from the beginning and after an update."""
    axis_type = getattr(jax.sharding.AxisType, axes)
    with jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=(axis_type,))):
        spec = PartitionSpec(*[None] * (len(kernel) - 2), "d")
        params = {"w": jax.device_put(scaled(0, *kernel), spec)}
        tx = jc.subspace_adamw(
            1e-3, jc.Subspace({"w": jc.Projection(16)}, jax.random.key(0))
        )
        state = tx.init(params)
        sketch = jax.device_put(jnp.ones((*kernel[:-2], 16, kernel[-1])), spec)
        _, later = jax.jit(tx.update)({"w": sketch}, state, params)
        for leaf in jax.tree.leaves((state, later)):
            if leaf.ndim > 1:
                assert leaf.sharding.is_equivalent_to(sketch.sharding, leaf.ndim)


def test_what_does_not_divide_is_not_shared():
    with jax.set_mesh(
        jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    ):
        params = {"w": jax.device_put(scaled(0, 64, 96), PartitionSpec("d"))}
        space = jc.Subspace({"w": jc.Projection(18)}, jax.random.key(0))
        state = jc.subspace_adamw(1e-3, space).init(params)
        assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state))
