"""What does not fit a subspace is refused, by name."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxcompact as jc
from tests.optimizers.sketched import M, N, R, gradients, params, subspace

pytestmark = pytest.mark.usefixtures("optax_promotion")


def test_a_sketch_that_another_transform_gets_is_refused(optax_promotion):
    tree = {name: {"kernel": jnp.ones((16, 4))} for name in "ab"}
    space = jc.Subspace({"./kernel": jc.Projection(1)}, jax.random.key(0))
    labels = {"a": {"kernel": "sketched"}, "b": {"kernel": "other"}}
    inside = {"sketched": jc.subspace_adamw(0.1, space), "other": optax.sgd(0.1)}
    told = "'b/kernel' is in the subspace, but optax.partition .* leave it out"
    with pytest.raises(ValueError, match=told):
        optax.partition(inside, labels).init(tree)
    inside["sketched"] = jc.subspace_adamw(
        0.1, jc.Subspace({"a/kernel": jc.Projection(1)}, jax.random.key(0))
    )
    optax.partition(inside, labels).init(tree)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tx, s, t: tx.update(gradients(0), s), "params must be given"),
        (
            lambda tx, s, t: tx.update(t, s, t),
            r"gradient of 'a/kernel' must be its sketch of shape \(4, 5\), as "
            r"jaxcompact.*, got \(12, 5\) \(optax.MultiSteps goes inside",
        ),
    ],
)
def test_bad_updates(call, message):
    tx, tree = jc.scale_by_subspace_adam(subspace()), params()
    with pytest.raises(ValueError, match=message):
        call(tx, tx.init(tree), tree)


@pytest.mark.parametrize("rank", [1, R])
def test_a_sketch_of_another_subspace_is_refused(rank):
    """One of rank 1 would broadcast over the kernel."""
    tree = {"a": {"kernel": jnp.ones((N, M))}, "b": {"kernel": jnp.ones((M, 3))}}
    space = jc.Subspace({"b/kernel": jc.Projection(2)}, jax.random.key(0))
    tx = jc.in_subspace(space, optax.scale_by_adam())
    grads = {"a": {"kernel": jnp.ones((rank, M))}, "b": {"kernel": jnp.ones((2, 3))}}
    with pytest.raises(ValueError, match="'a/kernel' must have the.*partition"):
        tx.update(grads, tx.init(tree), tree)


def test_bad_moment():
    with pytest.raises(
        ValueError, match="moment must be one of keep, reset, transfer, got 'x'"
    ):
        jc.in_subspace(subspace(), optax.identity(), moment="x")


@pytest.mark.parametrize("moment", ["reset", "transfer", "keep"])
@pytest.mark.parametrize("inner", [optax.adam(0.1), optax.sgd(0.1, momentum=0.9)])
def test_a_state_of_another_rank_is_refused(inner, moment, optax_promotion):
    """Moments of rank 1 would broadcast to any other."""
    params = {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)}

    def of_rank(rank):
        subspace = jc.Subspace({"kernel": jc.Projection(rank)}, jax.random.key(0))
        tx = jc.in_subspace(subspace, inner, moment=moment)
        return tx, {"kernel": jnp.ones((rank, 8)), "bias": jnp.ones(8)}

    (one, of_one), (four, of_four) = of_rank(1), of_rank(4)
    for update in (four.update, jax.jit(four.update)):
        _, state = one.update(of_one, one.init(params), params)
        with pytest.raises(ValueError, match=r"kernel' must have the shape \(4, 8\)"):
            update(of_four, state, params)
        _, state = update(of_four, four.init(params), params)
        update(of_four, state, params)


def test_accumulations_of_several_lengths():
    """Of one P would change in the middle of the other."""
    parts = {"a": optax.MultiSteps(optax.sgd(1.0), 2), "b": optax.sgd(1.0)}
    labels = jax.tree.map_with_path(lambda path, _: path[0].key, params())
    labels = jax.tree.map(lambda name: name if name == "a" else "b", labels)
    jc.in_subspace(subspace(), optax.partition(parts, labels)).init(params())
    parts["b"] = optax.MultiSteps(optax.sgd(1.0), 3)
    with pytest.raises(ValueError, match="inner must hold one optax.MultiSteps.*got 2"):
        jc.in_subspace(subspace(), optax.partition(parts, labels)).init(params())
