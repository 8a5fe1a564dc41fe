"""What a compressed layer can't do is said by name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcompact as jc
from tests.linear.layers import M, N, layer_input, layer_params, subspace


def test_a_kernel_that_does_not_fit_the_input():
    with pytest.raises(
        ValueError, match=r"kernel must have shape \(n, m\).*got kernel"
    ):
        jc.linear(jnp.ones((2, 3)), jnp.ones((4, 5)))


READERS = {
    "dot": lambda k: jnp.dot(jnp.ones(N), k),
    "matmul": lambda k: jnp.ones(N) @ k,
    "einsum": lambda k: jnp.einsum("nm->m", k),
    "times": lambda k: k * 2.0,
    "times a kernel": lambda k: 2.0 * k,
    "less a kernel": lambda k: 1.0 - k,
    "above": lambda k: k > 0,
    "negative": lambda k: -k,
    "item": lambda k: k[0],
    "numpy": np.asarray,
    "transposed": lambda k: k.T,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_layer_that_knows_no_sketches_says_so(read):
    def plain(params, x):
        return jnp.sum(x) + jnp.sum(read(params["kernel"]))

    told = "'kernel' is in the subspace, but the layer"
    with pytest.raises((ValueError, AttributeError), match=told):
        jc.value_and_grad(plain, subspace())(
            {"kernel": jnp.ones((N, M))}, layer_input(), step=0
        )


TREE_READERS = {
    "cast": lambda p: jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)["bias"],
    "scaled": lambda p: jax.tree.map(lambda w: w * 2, p)["bias"],
    "clipped": lambda p: jax.tree.map(lambda w: jnp.clip(w, -1, 1), p)["bias"],
    "penalty": lambda p: sum(jnp.sum(w**2) for w in jax.tree.leaves(p)),
    "norm": optax.tree.norm,
    "product": lambda p: jax.lax.dot(jnp.ones((1, N)), p["kernel"]),
}


@pytest.mark.parametrize("read", TREE_READERS.values(), ids=TREE_READERS)
def test_a_tree_that_is_read_as_arrays_says_what_it_is(read):
    def loss(params, x):
        return jnp.sum(jc.linear(x, params["kernel"])) + jnp.sum(read(params))

    with pytest.raises(Exception, match="In the subspace are kernel: each is a weight"):
        jc.value_and_grad(loss, subspace())(layer_params(), layer_input(), step=0)


@pytest.mark.slow
def test_a_loop_that_reads_a_sketched_kernel_leaks_nothing():
    """What is shared between kernels is a tracer of the loop's body."""
    params, x = layer_params(), layer_input(n=M)
    params["kernel"] = jnp.eye(M) / 2

    def looped(params, x):
        def body(x, _):
            return jnp.sin(jc.linear(x, params["kernel"], params["bias"])), None

        return jnp.sum(jax.lax.scan(body, x, length=3)[0])

    grad = jc.value_and_grad(looped, subspace())
    expected = grad(params, x, step=0)
    with jax.checking_leaks():
        found = grad(params, x, step=0)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
