"""What a checkpoint can't do is refused by name: second derivatives, host calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import jaxcompact as jc
from tests.cases import slow
from tests.checkpoint.functions import (
    AGAIN,
    LOSSY,
    Q8,
    SAVE,
    ULPS,
    W,
    X,
    branch,
    gradients,
    loop,
    mlp,
    weighted,
)
from tests.errors import relative


@pytest.mark.parametrize("fun", [mlp, loop, slow(branch)])
def test_second_derivatives(fun):
    small = jc.checkpoint(fun, policy=LOSSY, params=0)

    def slope(f):
        return lambda w, x: weighted(jax.grad(weighted(f)))(w, x)

    with pytest.raises(NotImplementedError, match=f"{fun.__name__}.*second derivative"):
        jax.grad(slope(small))(W, X)
    for policy in (SAVE, AGAIN):
        exact = jc.checkpoint(fun, policy=policy, params=0)
        got = jax.grad(slope(exact))(W, X)
        # Second derivatives of tanh and gelu cancel: more digits are lost.
        assert relative(got, jax.grad(slope(fun))(W, X)) < 10 * ULPS


def test_mixed_second_derivatives():
    """What is outside differentiates by the weights, inside by x alone."""

    def penalty(f):
        return lambda w: jnp.mean(jax.grad(weighted(f), 1)(w, X) ** 2)

    with pytest.raises(NotImplementedError, match="second derivative"):
        jax.grad(penalty(jc.checkpoint(mlp, policy=LOSSY, params=0)))(W)
    for policy in (SAVE, AGAIN):
        got = jax.grad(penalty(jc.checkpoint(mlp, policy=policy, params=0)))(W)
        assert relative(got, jax.grad(penalty(mlp))(W)) < 10 * ULPS


def test_a_gradient_that_is_a_constant():
    """An adversarial step: nothing outside differentiates it, if it is told so."""

    def trained(f, given):
        def loss(w):
            away = jnp.sign(jax.grad(weighted(f), 1)(given(w), X))
            return weighted(f)(w, X + 0.1 * jax.lax.stop_gradient(away))

        return jax.grad(loss)(W)

    small = jc.checkpoint(mlp, policy=LOSSY, params=0)
    with pytest.raises(NotImplementedError, match="stop_gradient of the parameters"):
        trained(small, lambda w: w)
    exact = trained(mlp, lambda w: w)
    # 8 bits err by 0.5 %; where a sign has flipped the step was another one.
    assert relative(trained(small, jax.lax.stop_gradient), exact) < 0.03


def test_a_gradient_of_any_length():
    """The function itself can be exported so."""
    small = jc.checkpoint(mlp, policy=LOSSY, params=0)
    (length,) = jax.export.symbolic_shape("n")
    w = jax.eval_shape(lambda: W)
    x = jax.ShapeDtypeStruct((length, X.shape[-1]), X.dtype)
    exported = jax.export.export(jax.jit(small))(w, x)
    np.testing.assert_array_equal(exported.call(W, X), small(W, X))
    with pytest.raises(NotImplementedError, match=r"'mlp'.* got float32\[n,"):
        jax.export.export(jax.jit(jax.grad(weighted(small))))(w, x)


@pytest.mark.parametrize("policy", [SAVE, AGAIN, LOSSY])
def test_what_is_printed_is_printed_once(policy, capsys):
    def block(w, x):
        jax.debug.print("mean {}", (x @ w[0]).mean())
        return mlp(w, x)

    small = jc.checkpoint(block, policy=policy, params=0)
    jax.grad(weighted(small), (0, 1))(W, X)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("mean") == 1


def test_calls_of_the_host_are_refused_by_name():
    def called(w, x):
        return mlp(w, x) * io_callback(lambda: np.float32(2), X[0, 0].aval)

    with pytest.raises(NotImplementedError, match="called.*io_callback"):
        jc.checkpoint(called, policy=LOSSY)(W, X)


def test_a_largest_of_an_empty_batch():
    w, x = jnp.ones((8, 8)), jnp.zeros((0, 8))
    small = jc.checkpoint(lambda w, x: jnp.max(x @ w, -1), policy=LOSSY)
    assert not jax.grad(lambda w: small(w, x).sum())(w).any()


def in_a_branch(fun):
    return lambda w, x: jax.lax.cond(x[0, 0] < 9, fun, lambda w, x: x @ w[0], w, x)


def in_a_loop(fun):
    def call(w, x):
        return jax.lax.scan(lambda y, _: (y + fun(w, x), None), x @ w[0], length=2)[0]

    return call


@pytest.mark.parametrize("inside", [lambda fun: fun, in_a_branch, in_a_loop])
def test_mutable_references_are_refused_by_name(inside):
    """In a branch gradients would be zero, in a loop NaN."""

    def referring(w, x):
        count = jax.new_ref(jnp.zeros(()))
        count[...] += x.sum()
        return x @ w[0] * count[...]

    def counted(w, x):
        return inside(referring)(w, x)

    with pytest.raises(NotImplementedError, match="'counted'.* mutable references"):
        jc.checkpoint(counted, policy=LOSSY)(W, X)


def test_arrays_in_the_hosts_memory_cross_as_they_are():
    """In one branch only, and where `jax.checkpoint` has put them there."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def offloading(w, x):
        inner = jax.checkpoint(
            lambda x: jnp.sin(checkpoint_name(jnp.sin(x @ w[0]), "h")) @ w[1],
            policy=policy,
        )
        return inner(x)

    exact = gradients(offloading, W, X)
    for codec in (jc.Offload(), Q8):
        small = jc.checkpoint(offloading, policy=jc.policies.uniform(codec), params=0)
        assert relative(gradients(small, W, X), exact) < 0.03
    small = jc.checkpoint(branch, policy=jc.policies.uniform(jc.Offload()), params=0)
    assert relative(gradients(small, W, X), gradients(branch, W, X)) < ULPS


def test_forward_mode_is_refused_by_name():
    small = jc.checkpoint(mlp, policy=AGAIN)
    with pytest.raises(TypeError, match="checkpoint of 'mlp' .* forward mode"):
        jax.jvp(small, (W, X), (W, X))
    unnamed = jc.checkpoint(lambda x: x * x)
    with pytest.raises(TypeError, match=r"'lambda at test_refusals.py:\d+'"):
        jax.jvp(unnamed, (X,), (X,))
    with pytest.raises(TypeError, match=r"'lambda at test_refusals.py:\d+'"):
        jax.jvp(jc.checkpoint(jax.jit(lambda x: x * x)), (X,), (X,))
