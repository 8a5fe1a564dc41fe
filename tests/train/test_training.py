import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcompact as jc
import training
from configs import ModelConfig
from methods import Method
from tests.cases import slow
from training import Training

CFG = ModelConfig(vocab_size=64, width=32, ff=48, layers=2, heads=4)
SLOW = pytest.mark.slow
METHODS = [
    slow("exact"),
    slow("remat"),
    "compact",
    slow("galore"),
]
EITHER = pytest.mark.parametrize("name", METHODS[::2])

pytestmark = pytest.mark.usefixtures("optax_promotion")


def make(name: str, **keywords) -> Training:
    method = Method(name, period=3) if name in ("compact", "galore") else Method(name)
    return Training(CFG, method, optax.constant_schedule(1e-2), **keywords)


def tokens_abt(a: int, b: int, t: int = 17) -> jax.Array:
    return jax.random.randint(jax.random.key(5), (a, b, t), 0, CFG.vocab_size)


def assert_close(a, b, tolerance: float) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@functools.cache
def stepping(name: str):
    """A job, and its step, which is compiled once for all tests."""
    job = make(name)
    return job, jax.jit(job.step)


@functools.cache
def trained(name: str):
    """First parameters, last state, losses, compilations of 12 steps on one batch."""
    job, step = stepping(name)
    state, losses = jax.jit(job.init)(), []
    first = jax.device_get(state.params)
    for _ in range(12):
        state, measured = step(state, tokens_abt(1, 4))
        losses.append(float(measured["loss"]))
    return first, state, losses, step._cache_size()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_repeated_batch_is_learned_with_one_compilation(name):
    _, state, losses, compilations = trained(name)
    assert losses[0] == pytest.approx(np.log(CFG.vocab_size), abs=0.1)
    assert losses[-1] < losses[0] - 0.5
    assert compilations == 1
    assert state.step == 12


def test_the_step_is_the_count_of_updates():
    state = trained("compact")[1]
    assert state.step == jc.update_count(state.opt_state)


@SLOW
@pytest.mark.parametrize("name", METHODS)
def test_methods_begin_with_the_same_weights_and_loss(name):
    """The loss up to the order of float32 sums, which is each program's own."""
    jax.tree.map(np.testing.assert_array_equal, trained(name)[0], trained("exact")[0])
    assert trained(name)[2][0] == pytest.approx(trained("exact")[2][0], rel=1e-5)


@functools.cache
def gradients_of_8_sequences(name: str):
    job = make(name)
    state = jax.jit(job.init)()
    gradients = jax.jit(job.gradients)
    return job, state, gradients, gradients(state, tokens_abt(1, 8))


@pytest.mark.slow
@EITHER
def test_microbatches_add_up_to_the_batch(name):
    """Means over 8 sequences, or over 4 of the means over 2: float32 sums reordered."""
    job, state, _, whole = gradients_of_8_sequences(name)
    parts = jax.jit(job.gradients)(state, tokens_abt(1, 8).reshape(4, 2, -1))
    assert_close(whole, parts, 1e-5)


def test_the_projection_changes_with_the_period():
    _, state, gradients, (_, at_0) = gradients_of_8_sequences("compact")
    for step, changed in ((2, False), (3, True)):
        later = state._replace(step=jnp.int32(step))
        _, grads = gradients(later, tokens_abt(1, 8))
        for kernel in ("q", "o"):
            a, b = (g["layers"]["attn"][kernel]["kernel"] for g in (at_0, grads))
            assert (a == b).all() == (kernel == "o" or not changed)


def test_microbatches_are_summed_in_float32_and_in_the_sketch():
    job = make("compact", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    state = jax.eval_shape(job.init)
    _, grads = jax.eval_shape(job.gradients, state, tokens_abt(2, 2))
    assert {x.dtype.name for x in jax.tree.leaves(grads)} == {"float32"}
    assert grads["layers"]["attn"]["q"]["kernel"].shape == (2, 8, 32)
    jaxpr = str(jax.make_jaxpr(job.gradients)(state, tokens_abt(2, 2)))
    weight = "f32[2,48,32]"  # an accumulator of mlp/down would have this shape
    assert weight not in jaxpr and "f32[2,12,32]" in jaxpr


@pytest.mark.slow
@EITHER
def test_devices_that_share_a_batch_find_the_gradients_of_one(name):
    """Up to the order of sums. Updates may differ more: Adam magnifies it near 0."""
    job, state, _, alone = gradients_of_8_sequences(name)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    everywhere, shared = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "data"))
    together = jax.jit(job.gradients, out_shardings=everywhere)(
        jax.device_put(state, everywhere), jax.device_put(tokens_abt(1, 8), shared)
    )
    assert_close(alone, together, 1e-5)


@EITHER
def test_a_step_without_a_finite_loss_changes_nothing(name):
    """An id outside the vocabulary makes it NaN. The fourth step has a new P."""
    job, step = stepping(name)
    state = jax.jit(job.init)()
    for _ in range(3):
        state, _ = step(state, tokens_abt(1, 4))
    after, measured = step(state, tokens_abt(1, 4).at[0, 0, 0].set(CFG.vocab_size))
    assert jnp.isnan(measured["loss"])
    jax.tree.map(np.testing.assert_array_equal, after, state)
    after, measured = step(after, tokens_abt(1, 4))
    assert jnp.isfinite(measured["loss"]) and after.step == 4


@pytest.mark.parametrize("name", ["exact", "compact"])
def test_bfloat16_parameters_have_float32_moments(name):
    job = make(name, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    state, _ = jax.eval_shape(job.step, job.abstract, tokens_abt(1, 2))
    assert state == job.abstract
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 1]
    assert moments and {x.dtype.name for x in moments} == {"float32"}


def test_a_state_with_one_nan_is_not_finite():
    state = make("exact").init()
    assert training.all_finite(state)
    params = state.params | {"norm": {"scale": jnp.ones(32).at[7].set(jnp.nan)}}
    assert not training.all_finite(state._replace(params=params))


def test_a_rank_above_the_width_is_said_at_once():
    with pytest.raises(ValueError, match="rank must not be above.*32, got 33"):
        Training(CFG, Method("compact", rank=33), optax.constant_schedule(1e-3))


def test_the_rate_rises_then_falls_to_a_tenth():
    schedule = training.warmup_cosine(1.0, steps=20, warmup=0.25)
    rates = [float(schedule(i)) for i in range(21)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[5] == pytest.approx(1.0)
    assert rates[20] == pytest.approx(0.1)
    assert sorted(rates[5:], reverse=True) == rates[5:]
    assert float(training.warmup_cosine(1.0, steps=1, warmup=0.9)(0)) == 1.0
