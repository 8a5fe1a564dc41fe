"""The chunked loss is the plain one, and no tensor has the logits' size."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import loss as loss_module
import sharding
from loss import next_token_loss

B, T, D, V = 4, 12, 16, 40
EPS = float(jnp.finfo(jnp.float32).eps)


@pytest.fixture(scope="module")
def inputs():
    hidden, kernel, targets = jax.random.split(jax.random.key(0), 3)
    targets = jax.random.randint(targets, (B, T), 0, V)
    return (
        jax.random.normal(hidden, (B, T, D)),
        jax.random.normal(kernel, (D, V)),
        targets.at[1, 3:9].set(-1).at[2].set(-1),
    )


def plain(hidden, kernel, targets):
    """The definition, with all logits at once."""
    losses = -jax.nn.log_softmax(hidden @ kernel)
    losses = jnp.take_along_axis(losses, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    kept = targets >= 0
    return jnp.where(kept, losses, 0).sum() / kept.sum().astype(jnp.float32)


def value_and_grads(fun, inputs, **kwargs):
    hidden, kernel, targets = inputs
    scaled = lambda h, k: 3 * fun(h, k, targets, **kwargs)  # noqa: E731
    return jax.jit(jax.value_and_grad(scaled, (0, 1)))(hidden, kernel)


# 5, 7 and 11 do not divide the 12 tokens.
@pytest.mark.parametrize("chunks", [None, 1, 2, 5, 7, 11, 12])
def test_equals_the_plain_loss_and_its_gradients(inputs, chunks):
    value, grads = value_and_grads(next_token_loss, inputs, chunks=chunks)
    expected, expected_grads = value_and_grads(plain, inputs)
    alone = 3 * next_token_loss(*inputs, chunks=chunks)
    # sums of D products, then of V exponentials, then of B T losses
    rtol = EPS * (math.sqrt(D) + math.sqrt(V) + math.sqrt(B * T))
    np.testing.assert_allclose([value, alone], [expected] * 2, rtol=rtol)
    for grad, expected in zip(grads, expected_grads, strict=True):
        atol = rtol * float(jnp.abs(expected).max())
        np.testing.assert_allclose(grad, expected, rtol=0, atol=atol)


def test_bfloat16_hidden_states_give_bfloat16_gradients_within_their_rounding(inputs):
    hidden, kernel, targets = inputs
    value, grads = value_and_grads(
        next_token_loss, (hidden.astype(jnp.bfloat16), kernel, targets), chunks=3
    )
    rounded = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (hidden, kernel)]
    expected, expected_grads = value_and_grads(plain, (*rounded, targets))
    assert (value.dtype, grads[0].dtype, grads[1].dtype) == (
        jnp.float32,
        jnp.bfloat16,
        jnp.float32,
    )
    np.testing.assert_allclose(value, expected, rtol=16 * EPS)
    # Rounded to bfloat16, by half an ulp each: dlogits, dhidden, and dhidden times 3.
    ulp = float(jnp.finfo(jnp.bfloat16).eps)
    dlogits = jnp.abs(3 * jax.grad(plain)(rounded[0] @ rounded[1], jnp.eye(V), targets))
    sums = (
        dlogits @ jnp.abs(rounded[1]).T,
        jnp.einsum("btd,btv->dv", jnp.abs(rounded[0]), dlogits),
    )
    for grad, expected, sum_ in zip(grads, expected_grads, sums, strict=True):
        error = jnp.abs(grad.astype(jnp.float32) - expected)
        assert (error <= ulp / 2 * (sum_ + 2 * jnp.abs(expected)) + 64 * EPS).all()


def test_one_left_out_adds_nothing(inputs):
    hidden, kernel, targets = inputs
    value, (dhidden, _) = value_and_grads(next_token_loss, inputs, chunks=4)
    changed = hidden.at[2].mul(7)
    again, _ = value_and_grads(next_token_loss, (changed, kernel, targets), chunks=4)
    assert value == again
    assert (dhidden[2] == 0).all() and (dhidden[0] != 0).any()


def test_nothing_to_predict_is_a_loss_of_zero(inputs):
    hidden, kernel, targets = inputs
    nothing = jnp.full_like(targets, -1)
    value, grads = value_and_grads(next_token_loss, (hidden, kernel, nothing))
    assert value == 0 and all((g == 0).all() for g in grads)


def test_a_target_outside_the_vocabulary_shows(inputs):
    hidden, kernel, targets = inputs
    assert jnp.isnan(next_token_loss(hidden, kernel, targets.at[0, 0].set(V)))


@pytest.mark.parametrize("sizes", [(4, 1, 1), (1, 2, 2), (1, 1, 1)])
def test_where_types_say_how_arrays_lie(inputs, sizes):
    """Explicit axes, of one device too; an id outside shows, and no column's value."""
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, sharding.AXES, devices=devices)
    specs = (sharding.BATCH,), ("fsdp", "tensor"), (sharding.BATCH,)
    with jax.set_mesh(mesh):
        here = [
            jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
            for x, spec in zip(inputs, specs, strict=True)
        ]
        value, grads = value_and_grads(next_token_loss, here, chunks=3)
        hidden, kernel, targets = here
        outside = jax.device_put(inputs[2].at[0, 0].set(V), targets.sharding)
        assert jnp.isnan(jax.jit(next_token_loss)(hidden, kernel, outside))
        for grad, like in zip(grads, here, strict=False):
            assert grad.sharding.is_equivalent_to(like.sharding, grad.ndim)
    expected = value_and_grads(next_token_loss, inputs, chunks=3)
    # Sums of up to V or B T terms in another order.
    for a, b in zip((value, *grads), (expected[0], *expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=B * T * EPS * np.abs(b).max())


def shapes(jaxpr):
    """Of all that a program makes, in its loops and calls too."""
    for equation in jaxpr.eqns:
        yield from (v.aval.shape for v in equation.outvars)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from shapes(inner)


def largest(fun, inputs, **kwargs):
    hidden, kernel, targets = inputs
    programs = (
        lambda h, k: fun(h, k, targets, **kwargs),
        jax.grad(lambda h, k: fun(h, k, targets, **kwargs), (0, 1)),
    )
    jaxprs = [jax.make_jaxpr(p)(hidden, kernel).jaxpr for p in programs]
    return [max(map(math.prod, shapes(jaxpr))) for jaxpr in jaxprs]


def test_the_logits_never_exist_whole(inputs):
    assert largest(plain, inputs) == [B * T * V] * 2  # so the search does find them
    expected = max(B * T * V // 4, D * V, B * T * D)
    assert largest(next_token_loss, inputs, chunks=4) == [expected] * 2


def test_chunks_are_chosen_by_the_logits_bytes(inputs, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * B * V * 3)
    assert largest(next_token_loss, inputs)[0] == max(B * 3 * V, B * T * D)


@pytest.mark.parametrize(
    "length, megabytes, chunks",
    [
        (256, 1, 1),
        (256, 128, 1),
        (256, 129, 2),
        (256, 7810, 64),  # 62 would do, 64 divides
        (12, 128 * 5, 6),
        (13, 128 * 5, 5),  # a prime: no divisor near
        (4, 128 * 100, 4),  # a token at a time is the least
    ],
)
def test_the_number_of_chunks(length, megabytes, chunks):
    assert loss_module._chunks(length, megabytes * 2**20) == chunks


def test_a_batch_over_devices_gives_the_same(inputs):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    hidden, kernel, targets = inputs
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    placed = [
        jax.device_put(x, s)
        for x, s in ((hidden, split), (kernel, whole), (targets, split))
    ]
    value, grads = value_and_grads(next_token_loss, placed, chunks=3)
    expected, expected_grads = value_and_grads(next_token_loss, inputs, chunks=3)
    np.testing.assert_allclose(value, expected, rtol=16 * EPS)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=16 * EPS)


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"chunks": 0}, r"chunks must be from 1 to 12 \(t\), got 0"),
        ({"chunks": 13}, r"chunks must be from 1 to 12 \(t\), got 13"),
        ({"kernel_dv": jnp.ones((V, D))}, r"kernel_dv .*\(40, 16\) and hidden_btd"),
        ({"targets_bt": jnp.ones((B, T - 1), int)}, r"targets_bt .*\(4, 11\) and hid"),
    ],
)
def test_wrong_arguments(inputs, change, rule):
    arguments = dict(
        zip(("hidden_btd", "kernel_dv", "targets_bt"), inputs, strict=True)
    )
    with pytest.raises(ValueError, match=rule):
        next_token_loss(**arguments | change)
