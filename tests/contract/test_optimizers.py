"""What `in_subspace` promises around any optax transform."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcompact as jc
from tests.cases import slow
from tests.draws import normal

pytestmark = pytest.mark.usefixtures("optax_promotion")

INNERS = {
    "adam": lambda: optax.scale_by_adam(),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "adafactor with momentum": lambda: optax.adafactor(
        0.1, min_dim_size_to_factor=2, momentum=0.9
    ),
    "lion": lambda: optax.scale_by_lion(),
    "sgd with momentum": lambda: optax.trace(0.9),
    "adamw": lambda: optax.adamw(0.1),
    "multisteps": lambda: optax.MultiSteps(optax.scale_by_adam(), 2),
    "clipping": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam()
    ),
    "limiter": lambda: optax.chain(optax.scale_by_adam(), jc.limit_norm_growth()),
}
N, M, R = 12, 6, 4


@pytest.fixture(params=INNERS)
def inner(request):
    return INNERS[request.param]()


def params(dtype=jnp.float32):
    kernel = jax.random.normal(jax.random.key(0), (2, N, M), dtype)
    return {"a": {"kernel": kernel}, "bias": jnp.ones(M, dtype)}


def gradients(step, dtype=jnp.float32):
    ka, kb = jax.random.split(jax.random.key(step))
    return {
        "a": {"kernel": jax.random.normal(ka, (2, R, M))},
        "bias": jax.random.normal(kb, (M,), dtype),
    }


def subspace() -> jc.Subspace:
    return jc.Subspace({"a/kernel": jc.Projection(R)}, jax.random.key(1), period=2)


# Dtypes are cast before and after whatever is done with the moments.
@pytest.mark.parametrize(
    ("moment", "dtype"),
    [("keep", jnp.bfloat16), slow("reset", jnp.float32), ("transfer", jnp.bfloat16)],
)
def test_shapes_and_dtypes_are_stable_and_it_compiles_once(inner, moment, dtype):
    chex.clear_trace_counter()
    tx, tree = jc.in_subspace(subspace(), inner, moment=moment), params(dtype)
    update = jax.jit(chex.assert_max_traces(tx.update, n=1))
    state = first = tx.init(tree)
    for step in range(5):
        updates, state = update(gradients(step, dtype), state, tree)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, tree)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, first)
        chex.assert_tree_all_finite(updates)
    floats = [
        m for m in jax.tree.leaves(state) if jnp.issubdtype(m.dtype, jnp.floating)
    ]
    assert {m.dtype for m in floats} <= {jnp.dtype(jnp.float32)}


def test_no_state_has_the_kernels_shape(inner):
    state = jc.in_subspace(subspace(), inner).init(params())
    largest = max((m.size for m in jax.tree.leaves(state)), default=0)
    assert largest <= 2 * R * M


def test_equals_the_inner_transform_alone_and_a_lift(inner):
    """Before the first new P: lift(inner(sketch))."""
    space, tree = subspace(), params()
    tx = jc.in_subspace(space, inner)
    slot = space.slots(tree)["a/kernel"]
    keys = slot.keys(space.key, 0)
    p = jnp.stack([slot.projection.matrix(k, N) for k in keys])
    sketched = {
        "a": {"kernel": jnp.einsum("lnr,lnm->lrm", p, tree["a"]["kernel"])},
        "bias": tree["bias"],
    }
    expected, _ = inner.update(gradients(0), inner.init(sketched), sketched)
    got, _ = tx.update(gradients(0), tx.init(tree), tree)
    lifted = jnp.einsum("lnr,lrm->lnm", p, expected["a"]["kernel"])
    np.testing.assert_allclose(got["a"]["kernel"], lifted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got["bias"], expected["bias"], rtol=1e-5)


def test_sharded_state_stays_sharded():
    """Columns of a kernel over two devices: its moments too, and the same updates."""
    tx, tree = jc.scale_by_subspace_adam(subspace()), params()
    expected, _ = tx.update(gradients(0), tx.init(tree), tree)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    columns = NamedSharding(mesh, P(None, None, "model"))
    place = lambda t: {  # noqa: E731
        "a": {"kernel": jax.device_put(t["a"]["kernel"], columns)},
        "bias": jax.device_put(t["bias"], NamedSharding(mesh, P())),
    }
    with jax.set_mesh(mesh):
        tree, grads = place(tree), place(gradients(0))
        state = jax.jit(tx.init)(tree)
        updates, state = jax.jit(tx.update)(grads, state, tree)
    assert state.inner.mu["a"]["kernel"].sharding.is_equivalent_to(columns, 3)
    assert updates["a"]["kernel"].sharding.is_equivalent_to(columns, 3)
    np.testing.assert_allclose(
        updates["a"]["kernel"], expected["a"]["kernel"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["gaussian", "countsketch", "orthonormal"])
def test_converges_on_a_linear_regression(kind):
    """Least squares through value_and_grad: P changes, and the loss goes to zero."""
    x = normal(0, 64, N)
    target = x @ normal(1, N, M)
    space = jc.Subspace({"kernel": jc.Projection(R, kind)}, jax.random.key(2), period=5)
    tx = jc.in_subspace(space, optax.sgd(0.05))

    def loss(tree, x):
        return jnp.mean((jc.linear(x, tree["kernel"]) - target) ** 2)

    @jax.jit
    def step(tree, state):
        value, grads = jc.value_and_grad(loss, space)(
            tree, x, step=jc.update_count(state)
        )
        updates, state = tx.update(grads, state, tree)
        return optax.apply_updates(tree, updates), state, value

    tree = {"kernel": jnp.zeros((N, M))}
    state = tx.init(tree)
    for _ in range(600):
        tree, state, value = step(tree, state)
    assert value < 1e-3 * jnp.mean(target**2)
