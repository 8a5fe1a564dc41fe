"""`jc.checkpoint` composes as `jax.checkpoint` does, and changes nothing if exact."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.cases import slow
from tests.checkpoint.functions import (
    AGAIN,
    FUNCTIONS,
    LOSSY,
    Q8,
    SAVE,
    ULPS,
    W,
    X,
    attention,
    branch,
    by_name,
    equal,
    gradients,
    loop,
    mlp,
    plain,
    weighted,
)
from tests.errors import relative


@by_name
@pytest.mark.parametrize("policy", [slow(SAVE), AGAIN])
@pytest.mark.parametrize("params", [0, slow(None)])
def test_exact_actions_give_the_exact_gradient(name, policy, params):
    small = jc.checkpoint(FUNCTIONS[name], policy=policy, params=params)
    assert relative(gradients(small, W, X), plain(name)) < ULPS


@by_name
def test_encoded_gradients_are_close(name):
    """8 bits err by 0.6 % of a normal tensor's norm, and a few of them add up.

    More where they are amplified: y^7, y^3, the exponential of a norm of 5.
    """
    small = jc.checkpoint(FUNCTIONS[name], policy=LOSSY, params=0)
    limit = {"cumulative": 0.1, "custom_jvp": 0.1, "expm": 0.2}.get(name, 0.04)
    assert relative(gradients(small, W, X), plain(name)) < limit


@pytest.mark.parametrize("stochastic", [False, True])
def test_tensors_share_no_noise(stochastic):
    """Of equal values too: their gradients are equal where rounding is to nearest."""

    def fun(p, x):
        return sum(
            scale[None] * (x @ w) for scale, w in zip(p, (W[0], +W[0]), strict=True)
        )

    policy = jc.policies.uniform(jc.Quantized(4, stochastic=stochastic))
    small = jc.checkpoint(fun, policy=policy, params=0)
    first, second = jax.grad(weighted(small))([jnp.ones(W.shape[-1])] * 2, X)
    assert bool((first == second).all()) != stochastic


@pytest.mark.parametrize("policy", [slow(SAVE), AGAIN, LOSSY])
@pytest.mark.parametrize("fun", [slow(mlp), loop, branch])
def test_under_transformations(policy, fun):
    """The gradient of a batch is the gradients of its members."""
    small = jc.checkpoint(fun, policy=policy, params=0)
    xs = jnp.stack([X, 2.0 * X, -X])
    grad = jax.grad(weighted(small), argnums=(0, 1))
    one_by_one = [grad(W, x) for x in xs]
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *one_by_one)
    mapped = jax.jit(jax.vmap(grad, in_axes=(None, 0)))(W, xs)
    # A product that fuses otherwise may turn a code: a 2^-7th of a group's largest.
    near = 1e-3 if policy is LOSSY else ULPS
    assert relative(mapped, stacked) < near

    def summed(w, xs):
        return jax.vmap(lambda x: weighted(small)(w, x))(xs).sum()

    w_grad, x_grads = jax.grad(summed, argnums=(0, 1))(W, xs)
    expected = stacked[0].sum(0), stacked[1]
    assert relative((w_grad, x_grads), expected) < near

    def accumulate(total, x):
        return jax.tree.map(jnp.add, total, grad(W, x)[0]), None

    accumulated, _ = jax.lax.scan(accumulate, jnp.zeros_like(W), xs)
    assert relative(accumulated, stacked[0].sum(0)) < near


@pytest.mark.parametrize("outer", [jax.checkpoint, jc.checkpoint])
def test_inside_a_checkpoint(outer):
    """What the outer one makes again is encoded and decoded as it was."""
    small = jc.checkpoint(mlp, policy=LOSSY, params=0)
    alone = gradients(small, W, X)
    assert relative(gradients(outer(small), W, X), alone) < 1e-3


def test_layers_inside_a_scan_of_blocks():
    small = jc.checkpoint(mlp, policy=LOSSY, params=0, prevent_cse=False)

    def model(block):
        return lambda w, x: jax.lax.scan(lambda x, w: (block(w, x), None), x, w)[0]

    w = jnp.stack([W, 0.5 * W, -W])
    assert relative(gradients(model(small), w, X), gradients(model(mlp), w, X)) < 0.04


@pytest.mark.parametrize("dtype", [jnp.bfloat16, slow(jnp.float16)])
@jax.numpy_dtype_promotion("standard")  # jax.nn's attention mixes dtypes
def test_half_precision(dtype):
    args = W.astype(dtype), X.astype(dtype)
    half_attention = attention if dtype == jnp.bfloat16 else mlp  # not on CPUs
    for fun in (mlp, loop, half_attention):
        small = jc.checkpoint(fun, policy=LOSSY, params=0)
        equal(jax.jit(small)(*args), jax.jit(fun)(*args))
        got, exact = gradients(small, *args), gradients(fun, *args)
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
        # 8 bits of mantissa and 8 of code: both round at 2^-9 of the largest.
        assert relative(got, exact) < 0.06


def test_inputs_that_are_not_differentiated_are_kept_as_they_are():
    """A mask of infinities would spoil its groups, and is nobody's residual."""
    mask = jnp.where(jnp.tril(jnp.ones((8, 8))) > 0, 0.0, -jnp.inf)

    def fun(w, x, mask):
        q, k, v = (x @ w[i] for i in range(3))
        return jax.nn.softmax(q @ k.T + mask) @ v

    small = jc.checkpoint(fun, policy=LOSSY, params=0)
    assert relative(gradients(small, W, X, mask), gradients(fun, W, X, mask)) < 0.04
    _, backward = jax.vjp(lambda w, x: small(w, x, mask), W, X)
    assert any(leaf is mask for leaf in jax.tree.leaves(backward))
    # A rule is obeyed; the infinities are then what the codec makes of them.
    policy = jc.Policy({"mask": Q8}, default=LOSSY)
    obeyed = jc.checkpoint(fun, policy=policy, params=0)
    _, backward = jax.vjp(lambda w, x: obeyed(w, x, mask), W, X)
    assert not any(leaf is mask for leaf in jax.tree.leaves(backward))


def test_infinities_written_into_a_tensor_are_no_residual():
    def fun(w, x):
        return jax.nn.softmax((x @ w[0]).at[:, 3].set(-jnp.inf)) @ w[1]

    small = jc.checkpoint(fun, policy=LOSSY, params=0)
    assert relative(gradients(small, W, X), gradients(fun, W, X)) < 0.04


@pytest.mark.parametrize("fill", [1e9, jnp.inf])
def test_nor_are_the_extremes_of_what_is_masked_whole(fill):
    """Triplets of the farthest and nearest, of which some examples have none.

    Beside a difference of 1e9 nothing was left of others: 0.4 off, or not a number.
    """
    owner = jnp.arange(len(X)) // 2
    owner = owner.at[-1].set(-1)  # the last two have no other
    same = (owner[:, None] == owner[None]) & ~jnp.eye(len(X), dtype=bool)

    def fun(w, x):
        z = jnp.tanh(x @ w[0]) @ w[1]
        d = jnp.sqrt(jnp.square(z[:, None] - z[None]).sum(-1) + 1e-6)
        far = -jnp.where(same, -d, fill).min(-1)
        near = -jnp.where(same | jnp.eye(len(X), dtype=bool), -fill, -d).max(-1)
        return jnp.where(same.any(-1), jax.nn.softplus(far - near), 0)

    small = jc.checkpoint(fun, policy=LOSSY, params=0)
    assert relative(gradients(small, W, X), gradients(fun, W, X)) < 0.04


@cache
def plain_outputs(name):
    return jax.jit(FUNCTIONS[name])(W, X)


@pytest.mark.usefixtures("optimized")
@by_name
@pytest.mark.parametrize(
    "policy",
    [
        *map(slow, (SAVE, AGAIN, LOSSY)),
        jc.policies.int4(),
    ],
)
def test_the_outputs_are_those_of_the_function(name, policy):
    small = jc.checkpoint(FUNCTIONS[name], policy=policy, params=0)
    equal(jax.jit(small)(W, X), plain_outputs(name))
