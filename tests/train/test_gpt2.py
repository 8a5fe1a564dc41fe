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
import training
from configs import MODELS, GPT2Config
from dropout import noise_of
from gpt2 import Gpt2, Text
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


def flat(tree) -> jax.Array:
    return jnp.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


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


def test_a_sequence_longer_than_the_model_allows():
    with pytest.raises(ValueError, match="at most max_seq = 16 long, got 17"):
        model()(jnp.zeros((1, 17), jnp.int32))


# --- dropout ---------------------------------------------------------------------


DROPPING = dataclasses.replace(CFG, dropout=0.5)


@functools.cache
def dropping():
    """A training with much dropout, its parameters, jitted gradients and loss."""
    job = make(cfg=DROPPING)
    gradients, loss = jax.jit(job.gradients), jax.jit(job.loss)
    return job, jax.jit(job.init)().params, gradients, loss


@pytest.mark.slow
def test_dropout_is_a_function_of_step_and_microbatch():
    _, params, gradients, loss = dropping()
    same = jnp.stack([TOKENS[0]] * 2)
    at = {n: float(loss(params, Text(TOKENS[0], jnp.int32(n)))) for n in (0, 1, 6, 7)}
    assert min(abs(at[0] - at[1]), abs(at[6] - at[7]), abs(at[0] - at[6])) > 1e-3
    for step, noises in ((0, (0, 1)), (3, (6, 7))):
        state = State(jnp.int32(step), params, None)
        mean, grads = gradients(state, same)
        close(mean, sum(at[n] for n in noises) / 2)
        again = gradients(state, same)
        jax.tree.map(np.testing.assert_array_equal, again, (mean, grads))


def test_dropout_is_of_the_runs_seed(monkeypatch):
    seen = []

    def watched(seed, step, microbatches):
        seen.append((seed, microbatches))
        return noise_of(seed, step, microbatches)

    monkeypatch.setattr(training, "noise_of", watched)
    job = make(seed=7)
    jax.eval_shape(job.gradients, job.abstract, TOKENS)
    assert seen == [(7, 2)]


def test_nothing_drops_out_of_validation():
    job, params, _, loss = dropping()
    tokens, noise = TOKENS[0], jnp.int32(1)
    plain = loss(params, tokens)
    undropped = make(cfg=dataclasses.replace(CFG, dropout=0.0))
    close(plain, undropped.loss(params, Text(tokens, noise)))
    assert abs(plain - loss(params, Text(tokens, noise))) > 1e-3


def test_embeddings_and_both_parts_of_a_layer_drop_out(monkeypatch):
    seen = []

    def watched(rate, noise, place):
        return lambda x, n: (seen.append((type(place), n)), x)[1]

    monkeypatch.setattr(gpt2, "dropout", watched)
    model().hidden(TOKENS[0, :, :16], jnp.int32(0))
    (outside, n), *layer = seen  # of a scan, which traces its layer once or more
    assert (outside, n) == (int, 0)
    assert [n for _, n in layer] == [0, 1] * (len(layer) // 2) and layer


@pytest.mark.slow
def test_devices_that_share_a_batch_drop_the_same():
    """Up to the order of sums."""
    job, params, gradients, _ = dropping()
    mesh = sharding.make_mesh("fsdp=2,tensor=2")
    state = State(jnp.int32(3), params, None)
    _, alone = gradients(state, TOKENS)
    state = jax.device_put(
        state, jax.tree.map(lambda x: x.sharding, sharding.placed(state, mesh))
    )
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P(None, sharding.BATCH)))
    with jax.set_mesh(mesh):
        _, together = jax.jit(job.gradients)(state, tokens)
    close(flat(together), flat(alone))


# --- training --------------------------------------------------------------------


def test_what_drops_out_forwards_drops_out_backwards():
    """4 bits make 1 % of error in the gradient, other masks several tenths."""
    _, params, gradients, _ = dropping()
    state = State(jnp.int32(3), params, None)
    loss, exact = gradients(state, TOKENS)
    job = make(Method(checkpoint="int4"), DROPPING)
    found_loss, found = jax.jit(job.gradients)(state, TOKENS)
    close(found_loss, loss)
    error = jnp.linalg.norm(flat(found) - flat(exact))
    assert 1e-3 < error / jnp.linalg.norm(flat(exact)) < 0.1


# Each way that there is: kept, recomputed, encoded, attention run again, on the host.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, checkpoint",
    [
        ("exact", "none"),
        ("exact", "nothing"),
        ("exact", "int3"),
        ("exact", "offload"),
        ("compact", "none"),
        ("compact", "int4"),
        ("galore", "dots"),
    ],
)
def test_each_method_and_checkpoint_trains(name, checkpoint):
    job = make(Method(name, checkpoint=checkpoint))
    step, state, losses = jax.jit(job.step), jax.jit(job.init)(), []
    for _ in range(4):
        state, measured = step(state, TOKENS[:1])
        losses.append(float(measured["loss"]))
    assert state.step == 4
    assert losses[-1] < losses[0] - 0.1


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
