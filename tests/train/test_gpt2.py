"""What makes the model a GPT-2: its function, its dropout, and how it trains."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gpt2
import sharding
from configs import MODELS, GPT2Config
from gpt2 import Gpt2
from llama import generate
from methods import Method
from training import State, Training

pytestmark = pytest.mark.usefixtures("optax_promotion")

CFG = GPT2Config(
    vocab_size=64, width=32, ff=48, layers=2, heads=4, max_seq=16, init_std=0.1
)
EPS = float(jnp.finfo(jnp.float32).eps)
TOKENS = jax.random.randint(jax.random.key(1), (2, 4, 17), 0, CFG.vocab_size)


def model(cfg=CFG, **keywords) -> Gpt2:
    return Gpt2(cfg, dtype=jnp.float32, rngs=nnx.Rngs(0), **keywords)


def make(method=Method(), cfg=CFG, **keywords) -> Training:  # noqa: B008
    return Training(cfg, method, optax.constant_schedule(1e-2), **keywords)


def close(a, b):
    """After 8 L + 1 products over 32 terms, each off by eps sqrt(32)."""
    atol = 17 * 32**0.5 * EPS * float(jnp.abs(b).max())
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


# --- the function ----------------------------------------------------------------


@pytest.mark.parametrize("name, weights", [("gpt2", 124.44), ("gpt2-medium", 354.82)])
def test_the_published_models_have_their_sizes(name, weights):
    cfg = MODELS[name]
    shapes = nnx.eval_shape(lambda: Gpt2(cfg, rngs=nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param)))
    d, f = cfg.width, cfg.ff
    layer = 4 * (d * d + d) + 2 * d * f + f + d + 4 * d
    assert count == (50257 + 1024) * d + cfg.layers * layer + 2 * d
    assert round(count / 1e6, 2) == weights


def test_what_ends_in_the_residual_stream_begins_narrower():
    params = nnx.to_pure_dict(nnx.state(model(), nnx.Param))["layers"]
    for part, wide, narrow in (("attn", "q", "o"), ("mlp", "up", "down")):
        for name, std in ((wide, 0.1), (narrow, 0.1 / math.sqrt(4))):
            kernel = params[part][name]["kernel"]
            assert abs(float(kernel.std()) / std - 1) < 4 / math.sqrt(2 * kernel.size)
    assert not params["attn"]["q"]["bias"].any()


def test_a_later_token_changes_no_earlier_logits():
    net, tokens = nnx.jit(model()), TOKENS[0, :, :16]
    before = net(tokens)
    after = net(tokens.at[:, 9].set((tokens[:, 9] + 1) % CFG.vocab_size))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (jnp.abs(before - after)[:, 9:].max(axis=(0, 2)) > 0).all()


def test_positions_are_told_apart():
    """The same token everywhere: without them all logits would be equal."""
    logits = model()(jnp.full((1, 16), 5))
    assert float(jnp.abs(logits[0, 1:] - logits[0, :1]).max(axis=-1).min()) > 1e-3


def test_it_generates_and_refuses_what_is_too_long():
    net = model()
    ids = [5, 7]
    for _ in range(2):
        ids.append(int(jnp.argmax(net(jnp.array([ids], jnp.int32))[0, -1])))
    assert generate(net, [5, 7], 2) == ids[2:]
    with pytest.raises(ValueError, match="at most max_seq = 16 long, got 17"):
        net(jnp.zeros((1, 17), jnp.int32))


# --- dropout ---------------------------------------------------------------------


@functools.cache
def losses(dropout: float = 0.5):
    """A training, parameters, and ``(step, tokens_abt) -> loss, gradients``."""
    job = make(cfg=dataclasses.replace(CFG, dropout=dropout))
    params = jax.jit(job.init)().params

    @jax.jit
    def gradients(step, tokens_abt):
        return job.gradients(State(step, params, None), tokens_abt)

    return job, params, lambda step, tokens: gradients(jnp.int32(step), tokens)


def test_dropout_is_a_function_of_step_and_microbatch():
    _, _, gradients = losses()
    (a, grads), (b, other) = (gradients(step, TOKENS[:1]) for step in (3, 4))
    again, same = gradients(3, TOKENS[:1])
    assert a == again != b
    jax.tree.map(np.testing.assert_array_equal, grads, same)
    # One microbatch twice: were the draws alike, it would be that of one alone.
    twice, _ = gradients(0, jnp.stack([TOKENS[0]] * 2))
    first, second = (gradients(step, TOKENS[:1])[0] for step in (0, 1))
    close(twice, (first + second) / 2)  # noises 0 and 1 either way
    assert abs(first - second) > 1e-3


def test_another_seed_has_other_draws():
    job, params, gradients = losses()
    other = make(cfg=job.cfg, seed=1)
    loss, _ = other.gradients(State(jnp.int32(0), params, None), TOKENS[:1])
    assert abs(loss - gradients(0, TOKENS[:1])[0]) > 1e-3


def test_nothing_drops_out_of_validation():
    job, params, gradients = losses()
    plain = job.loss(params, TOKENS[0])
    close(plain, losses(0.0)[2](0, TOKENS[:1])[0])
    assert abs(plain - gradients(0, TOKENS[:1])[0]) > 1e-3
    assert plain == job.model(params).loss(TOKENS[0])


def test_embeddings_and_both_parts_of_a_layer_drop_out(monkeypatch):
    seen = []

    def watched(rate, noise, place):
        return lambda x, n: (seen.append((type(place), n)), x)[1]

    monkeypatch.setattr(gpt2, "dropout", watched)
    model().hidden(TOKENS[0, :, :16], jnp.int32(0))
    (outside, n), *layer = seen  # of a scan, which traces its layer once or more
    assert (outside, n) == (int, 0)
    assert [n for _, n in layer] == [0, 1] * (len(layer) // 2) and layer


def test_devices_that_share_a_batch_drop_the_same():
    """Up to the order of sums."""
    job, params, gradients = losses()
    _, alone = gradients(3, TOKENS)
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    state = State(jnp.int32(3), params, None)
    state = jax.device_put(
        state, jax.tree.map(lambda x: x.sharding, sharding.placed(state, mesh))
    )
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P(None, sharding.BATCH)))
    with jax.set_mesh(mesh):
        _, together = jax.jit(job.gradients)(state, tokens)
    a, b = (
        jnp.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
        for tree in (alone, together)
    )
    close(b, a)


# --- training --------------------------------------------------------------------


@functools.cache
def stepped(name: str, checkpoint: str):
    """Losses and norms of the gradient of three steps on a batch."""
    job = make(Method(name, checkpoint=checkpoint))
    step, state, found = jax.jit(job.step), jax.jit(job.init)(), []
    for _ in range(3):
        state, measured = step(state, TOKENS[:1])
        found.append((float(measured["loss"]), float(measured["gradient_norm"])))
    assert state.step == 3 and step._cache_size() == 1
    return found


# Each way that there is: kept, recomputed, encoded, attention run again, on the host.
@pytest.mark.parametrize(
    "name, checkpoint",
    [
        ("exact", "int4"),
        ("compact", "int4"),
        pytest.param("exact", "nothing", marks=pytest.mark.slow),
        pytest.param("compact", "none", marks=pytest.mark.slow),
        pytest.param("galore", "dots", marks=pytest.mark.slow),
        pytest.param("exact", "int3", marks=pytest.mark.slow),
        pytest.param("exact", "offload", marks=pytest.mark.slow),
    ],
)
def test_each_method_and_checkpoint_trains(name, checkpoint):
    """What drops out forwards drops out backwards: the first gradients agree."""
    exact, found = stepped("exact", "none"), stepped(name, checkpoint)
    assert found[0][0] == pytest.approx(exact[0][0], rel=1e-5)
    assert found[2][0] < found[0][0]
    if name == "exact":  # 4 bits make 1 % of error, another mask several tenths
        assert found[0][1] == pytest.approx(exact[0][1], rel=0.05)


def test_compact_compresses_what_the_paper_says():
    slots = Method("compact", rank=4).subspace(0).slots(make().abstract.params)
    attn, mlp = (f"layers/{part}/{{}}/kernel".format for part in ("attn", "mlp"))
    assert set(slots) == {*map(attn, "qkv"), mlp("up"), mlp("down")}
    assert len({slots[attn(name)].family for name in "qkv"}) == 1


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("heads", 5, r"width must be divisible by heads \(5\), got 768"),
        ("dropout", 1.0, r"dropout must be in \[0, 1\), got 1.0"),
        ("layers", 0, "layers must be a positive int, got 0"),
    ],
)
def test_impossible_shapes_are_refused(field, value, rule):
    with pytest.raises(ValueError, match=rule):
        GPT2Config(**{field: value})
