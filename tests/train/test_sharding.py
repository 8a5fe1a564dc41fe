"""Meshes, the rules of parameters, and what is sent; programs of this process."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import layers
import sharding
import summary
from configs import GPT2Config, ModelConfig, RobertaConfig
from jaxcompact.memory.collectives import collectives
from methods import Method
from tests.cases import slow
from training import Training

CFG = ModelConfig(vocab_size=64, width=32, ff=64, layers=2, heads=4)

pytestmark = pytest.mark.usefixtures("optax_promotion")


def make(name: str, cfg: ModelConfig = CFG, **keywords) -> Training:
    return Training(cfg, Method(name, **keywords), optax.constant_schedule(1e-2))


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        (None, (4, 1, 1)),
        ("fsdp=2", (2, 2, 1)),
        ("tensor=2,fsdp=2", (1, 2, 2)),
        ("data=2,tensor=2", (2, 1, 2)),
    ],
)
def test_data_takes_the_devices_that_are_left(text, shape):
    assert tuple(sharding.make_mesh(text).shape.values()) == shape


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fsdp=3", "must have as many .* devices, 4, got 'fsdp=3': 1 [*] 3 [*] 1"),
        ("fsdp=8", ".*got 'fsdp=8'"),
        (f"fsdp={2**32},tensor={2**32}", ".*: 1 [*] 4294967296 [*] 4294967296"),
        ("data=2", ".*got 'data=2'"),
        ("model=2", "must be sizes of data, fsdp, tensor, .* got 'model=2'"),
        ("fsdp=2,fsdp=2", ".*got 'fsdp=2,fsdp=2'"),
        ("fsdp=0", ".*got 'fsdp=0'"),
        ("fsdp", ".*got 'fsdp'"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(text, told):
    with pytest.raises(ValueError, match=f"--mesh {told}"):
        sharding.make_mesh(text)


@pytest.mark.parametrize("name", ["exact", "compact", "galore"])
def test_a_device_holds_its_share_of_weights_and_moments(name):
    """All but the norms' scales, and the head's outputs where 2 * 2 must divide."""
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    whole = part = 0
    for leaf in jax.tree.leaves(sharding.placed(make(name).abstract, mesh)):
        if leaf.ndim > 1 and leaf.shape != (CFG.layers, CFG.width):
            whole += leaf.size
            part += math.prod(leaf.sharding.shard_shape(leaf.shape))
    assert whole == 4 * part > 0


def test_an_axis_that_does_not_divide_is_left_out():
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    of = functools.partial(sharding.spec_of, "params/layers/mlp/up/kernel", mesh=mesh)
    assert of((2, 32, 64)) == jax.P(None, ("fsdp",), ("tensor",))
    assert of((2, 33, 64)) == jax.P(None, None, ("tensor",))
    assert of((32, 64)) == jax.P()


def test_each_part_is_read_once():
    mesh = sharding.make_mesh("data=2,tensor=2")
    rows = np.arange(24, dtype=np.int32).reshape(4, 6)
    place = jax.NamedSharding(mesh, jax.P(sharding.BATCH))
    read = []

    def part(start, stop):
        read.append((start, stop))
        return rows[start:stop]

    abstract = jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=place)
    array = sharding.from_parts(part, abstract, axis=0)
    assert sorted(read) == [(0, 2), (2, 4)]
    np.testing.assert_array_equal(array, rows)


@functools.cache
def sent(name: str, mesh: str, **keywords) -> tuple[dict[str, int], int, int]:
    """Bytes by collective of a step, those of gradients and those of parameters."""
    training, mesh = make(name, **keywords), sharding.make_mesh(mesh)
    state = sharding.placed(training.abstract, mesh)
    tokens_abt = jax.ShapeDtypeStruct(
        (1, 8, 17),
        jnp.int32,
        sharding=jax.NamedSharding(mesh, jax.P(None, sharding.BATCH)),
    )
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(training.step, donate_argnums=0, out_shardings=(shardings, None))
    with jax.set_mesh(mesh):
        text = step.lower(state, tokens_abt).compile().as_text()
    params = sum(4 * x.size for x in jax.tree.leaves(state.params))
    gradients = summary.held_bytes(training, tokens_abt, 8 * 16)["gradient_bytes"]
    return collectives(text), gradients, params


@pytest.mark.parametrize("name", ["exact", "compact"])
def test_copies_of_the_weights_send_gradients_and_nothing_else(name):
    """Compact's as sketches. 8 bytes are the loss and the number of its tokens."""
    found, gradients, _ = sent(name, "data=4")
    assert found == {"all-reduce": gradients + 8}
    assert (gradients < sent("exact", "data=4")[1] / 2) == (name == "compact")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "compact"])
def test_shares_of_the_weights_are_gathered_and_no_tokens_are(name):
    """A matrix of a layer in either pass, the others once; gradients as they are.

    The optimizer also gathers compact's updates, to lift them; down's it need not, of
    which a device has some of the columns.
    """
    found, gradients, params = sent(name, "fsdp=4")
    outside = 4 * (2 * CFG.vocab_size * CFG.width)
    scales = 4 * (2 * CFG.layers + 1) * CFG.width
    gathered = 2 * (params - outside - scales) + outside
    if name == "compact":
        # Attention's output, which has no sketch, and down's, of rank 64 / 4.
        kept = 4 * CFG.layers * (CFG.width**2 + CFG.ff // 4 * CFG.width)
        gathered += gradients - outside - scales - kept
    assert found["all-gather"] == gathered
    # XLA reduces more than it must to a scatter on a CPU; and some scalars, for norms.
    assert 0 <= found["all-reduce"] - gradients < 200
    assert set(found) == {"all-gather", "all-reduce"}


@pytest.mark.slow
def test_tensor_parallel_projections_send_nothing_where_they_are_in_blocks():
    """Without blocks, devices sum the sketches of the MLP's hidden tensor."""
    exact, _, _ = sent("exact", "tensor=4")
    assert sent("compact", "tensor=4", blocks=4)[0] == exact
    sketch = 4 * CFG.layers * 8 * 16 * CFG.ff // 4  # of 8 x 16 tokens, float32
    whole, _, _ = sent("compact", "tensor=4")
    assert whole["all-reduce"] - exact["all-reduce"] == sketch


# Widths of which a device has whole groups of 64, and whole heads.
LLAMA = ModelConfig(vocab_size=64, width=128, ff=256, layers=2, heads=2)
SHAPES = {"vocab_size": 64, "width": 128, "ff": 256, "layers": 2, "heads": 2}
# Two heads of keys for four devices.
GROUPED = replace(LLAMA, heads=4, kv_heads=2)
GPT2 = GPT2Config(**SHAPES, dropout=0.1)
ROBERTA = RobertaConfig(**SHAPES, mask_id=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cfg", "mesh", "keywords"),
    [
        pytest.param(LLAMA, "fsdp=2,tensor=2", {"bits": 8}, id="compact"),
        *(
            slow(*case, id=name)
            for name, case in {
                "exact": (LLAMA, "fsdp=4", {"name": "exact"}),
                "galore": (LLAMA, "fsdp=2,tensor=2", {"name": "galore"}),
                "int4": (GROUPED, "tensor=4", {"name": "exact", "checkpoint": "int4"}),
                "grouped": (GROUPED, "fsdp=2,tensor=2", {"name": "exact"}),
                "gpt2": (GPT2, "fsdp=2,tensor=2", {}),
                "roberta": (ROBERTA, "fsdp=2,tensor=2", {}),
            }.items()
        ),
    ],
)
def test_a_step_does_not_depend_on_the_mesh(cfg, mesh, keywords):
    """Gradients up to the order of sums."""
    job = make(**{"name": "compact", "cfg": cfg, "rank": 0.25} | keywords)
    tokens = jax.random.randint(jax.random.key(0), (2, 8, 17), 5, cfg.vocab_size)
    state = jax.jit(job.init)()
    both = jax.jit(lambda *args: (job.gradients(*args)[1], job.step(*args)))
    expected, (_, said) = both(state, tokens)
    mesh = sharding.make_mesh(mesh)
    places = jax.tree.map(lambda x: x.sharding, sharding.placed(job.abstract, mesh))
    place = jax.NamedSharding(mesh, jax.P(None, sharding.BATCH))
    with jax.set_mesh(mesh):
        found, (updated, measured) = both(
            *jax.device_put((state, tokens), (places, place))
        )
    change = jax.tree.map(np.subtract, *jax.device_get((found, expected)))
    # The codes of tensors that differ by rounding: a few of thousands are others.
    most = 1e-3 if job.method.checkpoint else 1e-5
    assert optax.tree.norm(change) < most * optax.tree.norm(expected)
    for name, value in said.items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-5)
    pairs = zip(jax.tree.leaves(updated), jax.tree.leaves(places), strict=True)
    assert all(x.sharding.is_equivalent_to(where, x.ndim) for x, where in pairs)


@pytest.mark.slow
def test_fused_attention_is_of_a_devices_heads_and_sequences(monkeypatch):
    """cuDNN's result has a type that says nothing, for which it would be gathered."""
    plain, shapes = jax.nn.dot_product_attention, []

    def fused(*operands, implementation, **mask):
        if implementation == "cudnn":
            shapes.append([x.shape for x in operands])
        return plain(*operands, **mask, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", fused)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(keys[i], (4, 16, (4, 2, 2)[i], 8)) for i in range(3))
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    for lengths in (), (jnp.array([3, 16, 1, 9]),):
        expected = layers.attend("xla", q, k, v, *lengths)
        with jax.set_mesh(mesh):
            of_heads = jax.P(sharding.BATCH, None, "tensor", None)
            here = jax.device_put((q, k, v), jax.NamedSharding(mesh, of_heads))
            where = jax.NamedSharding(mesh, jax.P(sharding.BATCH))
            here += tuple(jax.device_put(lengths, where))
            found = jax.jit(functools.partial(layers.attend, "cudnn"))(*here)
        assert shapes.pop() == [(2, 16, heads, 8) for heads in (2, 1, 1)]
        assert jax.typeof(found).sharding.spec == of_heads
        np.testing.assert_allclose(found, expected, atol=1e-6)
