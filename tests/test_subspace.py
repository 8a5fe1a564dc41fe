"""Subspace: which kernels, which P, and what is refused before anything is traced."""

import copy
import pickle
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from tests.draws import normal

PARAMS = {
    "layers": {
        "attn": {
            "q": {"kernel": jnp.ones((3, 16, 16))},
            "k": {"kernel": jnp.ones((3, 16, 8))},
        },
        "mlp": {"down": {"kernel": jnp.ones((3, 40, 16)), "bias": jnp.ones((3, 16))}},
    },
    "head": {"kernel": jnp.ones((16, 32))},
}
EVERY = {r"layers/.*/kernel": jc.Projection(rank=0.25)}


def subspace(rules=None, **kwargs) -> jc.Subspace:
    arguments = {"key": jax.random.key(0), "period": 5} | kwargs
    return jc.Subspace(EVERY if rules is None else rules, **arguments)


def test_slots():
    slots = subspace().slots(PARAMS)
    assert {path: slot.sketch_shape for path, slot in slots.items()} == {
        "layers/attn/q/kernel": (3, 4, 16),
        "layers/attn/k/kernel": (3, 4, 8),
        "layers/mlp/down/kernel": (3, 10, 16),
    }
    q, k, down = (
        slots[f"layers/{name}/kernel"] for name in ("attn/q", "attn/k", "mlp/down")
    )
    assert q.family == k.family != down.family


def test_a_copy_is_the_same():
    space = subspace(period=7)
    for copied in (copy.deepcopy(space), pickle.loads(pickle.dumps(space))):
        assert copied.rules == space.rules and copied.period == 7
        assert jax.random.key_data(copied.key).tolist() == [0, 0]


def test_the_first_rule_that_matches_decides():
    rules = {r".*/q/kernel": jc.Projection(rank=2)} | EVERY
    slots = subspace(rules).slots(PARAMS)
    assert slots["layers/attn/q/kernel"].rank == 2
    assert slots["layers/attn/k/kernel"].rank == 4


def test_a_kernel_called_value_keeps_its_name():
    params = {"attn": {name: jnp.ones((16, 4)) for name in ("query", "value")}}
    slots = subspace({"attn/.*": jc.Projection(rank=4)}).slots(params)
    assert set(slots) == {"attn/query", "attn/value"}


@jax.tree_util.register_dataclass
@dataclass
class Attention:
    query: jax.Array
    value: jax.Array


def test_a_field_called_value_keeps_its_name():
    slots = subspace({"attn/.*": jc.Projection(rank=4)}).slots(
        {"attn": Attention(jnp.ones((16, 4)), jnp.ones((16, 4)))}
    )
    assert set(slots) == {"attn/query", "attn/value"}


def test_two_leaves_of_one_name_are_refused():
    params = {"a/b": jnp.ones((16, 8)), "a": {"b": jnp.ones((32, 8))}}
    with pytest.raises(ValueError, match="params: two leaves have the name 'a/b'"):
        subspace({"a/b": jc.Projection(4)}).slots(params)


def test_equal_ones_have_one_hash_and_the_order_of_rules_counts():
    one, two = jc.Projection(4), jc.Projection(8)
    space = subspace({"a": one, "b.*": two})
    assert space == subspace({"a": one, "b.*": two})
    assert hash(space) == hash(subspace({"a": one, "b.*": two}))
    assert space != subspace({"b.*": two, "a": one})
    assert space != subspace({"a": one, "b.*": two}, key=jax.random.key(1))
    assert space != subspace({"a": one, "b.*": two}, period=6)


def test_linens_variables_and_their_params_have_one_projection():
    space = subspace({r".*kernel": jc.Projection(4)})
    inner = {"d": {"kernel": jnp.ones((16, 8))}}
    (outer,) = space.slots({"params": inner}).values()
    (slot,) = space.slots(inner).values()
    assert outer.path == "params/d/kernel"
    assert (outer.keys(space.key, 0) == slot.keys(space.key, 0)).all()


@pytest.mark.parametrize(
    "step", [-1, 2**31, np.int32(-1), np.int64(2**31), np.uint32(2**31), 0.5, None]
)
def test_a_step_that_is_no_count_is_refused(step):
    with pytest.raises(ValueError, match="step must be the number of updates made"):
        subspace().generation(step)
    assert subspace().generation(np.int64(11)) == 2


def test_a_penalty_in_the_loss_has_no_gradient():
    """As value_and_grad's docstring says."""
    space = subspace({r"head/kernel": jc.Projection(rank=4)})
    penalty = lambda p: jnp.sum(p["head"]["kernel"].weight ** 2)  # noqa: E731
    value, grads = jc.value_and_grad(penalty, space)(PARAMS, step=0)
    assert value > 0 and not grads["head"]["kernel"].any()


def keys_of(space, path="layers/attn/q/kernel", step=0):
    slot = space.slots(PARAMS)[path]
    return jax.random.key_data(slot.keys(space.key, space.generation(step)))


def test_keys_depend_on_key_family_layer_and_generation_alone():
    space = subspace()
    base = keys_of(space)
    assert len(np.unique(base, axis=0)) == 3  # one a layer
    np.testing.assert_array_equal(base, keys_of(space, "layers/attn/k/kernel"))
    np.testing.assert_array_equal(base, keys_of(space, step=4))
    np.testing.assert_array_equal(base, jax.jit(lambda s: keys_of(space, step=s))(4))
    others = [
        keys_of(space, "layers/mlp/down/kernel"),
        keys_of(space, step=5),
        keys_of(subspace(key=jax.random.key(1))),
    ]
    for other in others:
        assert not (base == other).all(axis=1).any()


def linear_loss(params, x):
    return jnp.sum(jnp.sin(jc.linear(x, params["head"]["kernel"])))


def test_microbatches_of_one_update_add_up():
    """P is constant within a step, so sketches sum like gradients."""
    space = subspace({r"head/kernel": jc.Projection(rank=4)})
    x = normal(1, 8, 16)
    grad = jc.value_and_grad(linear_loss, space)
    for step in (0, 4):
        whole = grad(PARAMS, x, step=step)[1]["head"]["kernel"]
        halves = [
            grad(PARAMS, part, step=step)[1]["head"]["kernel"]
            for part in (x[:4], x[4:])
        ]
        np.testing.assert_allclose(sum(halves), whole, rtol=1e-4, atol=1e-5)
    other = grad(PARAMS, x, step=5)[1]["head"]["kernel"]
    assert not np.allclose(other, whole, atol=0.1)


@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_sketches_have_the_dtype_of_their_kernels(dtype, x_dtype):
    """As gradients have; what they are summed in is not coarser."""
    params = jax.tree.map(lambda a: a.astype(dtype), PARAMS)
    space = subspace({r"head/kernel": jc.Projection(rank=4)})
    x = normal(1, 4096, 16).astype(x_dtype)

    def loss(params, x):
        y = jc.linear(x, params["head"]["kernel"], dtype=x.dtype)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    def grads(params, x):
        return jc.value_and_grad(loss, space)(params, x, step=0)[1]["head"]

    sketch = grads(params, x)["kernel"]
    assert sketch.dtype == dtype
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))
    exact, full = grads(*wide)["kernel"], jax.grad(loss)(*wide)["head"]["kernel"]
    # Of 4096 terms, each rounded to no less than the coarser dtype's 8 bits, P among
    # them, whose products cancel, and the sum once more: a sum in bfloat16 would stand
    # still long before.
    slot = space.slots(params)["head/kernel"]
    p = slot.projection.matrix(slot.keys(space.key, 0), 16)
    atol = 2.0**-8 * float((jnp.abs(p).T @ jnp.abs(full)).max()) * 3
    np.testing.assert_allclose(sketch.astype(jnp.float32), exact, rtol=0, atol=atol)
    rounded = sketch.astype(jnp.bfloat16).astype(dtype)
    assert bool((rounded == sketch).all()) == (dtype == jnp.bfloat16)


def test_a_kernel_may_be_cast_first():
    """Its sketch's gradient is rounded to that dtype, and has its own again."""
    space = subspace({r"head/kernel": jc.Projection(rank=4)})
    x = jax.random.normal(jax.random.key(1), (64, 16), jnp.bfloat16)

    def sketch(cast):
        def loss(params):
            y = jc.linear(x, cast(params["head"]["kernel"]), dtype=x.dtype)
            return y.astype(jnp.float32).sum()

        return jc.value_and_grad(loss, space)(PARAMS, step=0)[1]["head"]["kernel"]

    found, by_itself = sketch(lambda w: w.astype(jnp.bfloat16)), sketch(lambda w: w)
    assert found.dtype == jnp.float32 and jnp.abs(found).max() > 1
    assert (abs(found - by_itself) <= 2.0**-8 * abs(by_itself)).all()


def test_has_aux_and_keyword_arguments():
    space = subspace({r"head/kernel": jc.Projection(rank=4)})

    def fun(params, *, x):
        return linear_loss(params, x), x.shape

    grad = jc.value_and_grad(fun, space, has_aux=True)
    (value, aux), _ = grad(PARAMS, x=jnp.ones((2, 16)), step=0)
    assert aux == (2, 16)
    np.testing.assert_allclose(value, linear_loss(PARAMS, jnp.ones((2, 16))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rules": {}}, "rules must hold at least one pattern"),
        (
            {"rules": {"(": jc.Projection(1)}},
            r"rules: '\(' must be a regular expression",
        ),
        ({"rules": {"a": 0.25}}, r"rules\['a'\] must be a Projection, got 0.25"),
        ({"key": 0}, r"key must be a typed PRNG key, jax.random.key\(seed\), got 0"),
        (
            {"key": jax.random.key_data(jax.random.key(0))},
            "key must be a typed PRNG key",
        ),
        (
            {"key": jax.random.split(jax.random.key(0))},
            r"one key, got an array of \(2,\)",
        ),
        ({"key": jax.random.key(0, impl="rbg")}, "impl 'threefry2x32'.*got 'rbg'"),
        ({"period": 0}, "period must be a positive int, got 0"),
        ({"period": 2.5}, "period must be a positive int, got 2.5"),
        ({"period": True}, "period must be a positive int, got True"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        subspace(**arguments)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"nothing/kernel": jc.Projection(4)},
            "'nothing/kernel' matches no parameter.*layers/attn/q/kernel",
        ),
        (
            EVERY | {".*/q/kernel": jc.Projection(4)},
            "'.*/q/kernel' matches no parameter .*earlier rule",
        ),
        (
            {r"layers/mlp/down/.*": jc.Projection(4)},
            None,
        ),
        (
            {"head/kernel": jc.Projection(17)},
            r"rules\['head/kernel'\] for 'head/kernel': rank must not be above "
            "the layer's input width 16, got 17",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused_before_tracing(rules, message):
    space = subspace(rules)

    def never(params):
        raise AssertionError("was traced")

    if message is None:  # a stacked bias looks like a kernel of one layer axis less
        params = {
            "layers": {
                "mlp": {"down": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}
            }
        }
        message = r"must match kernels only.*'layers/mlp/down/bias', float32\[4\]"
    else:
        params = PARAMS
    with pytest.raises(ValueError, match=message):
        jc.value_and_grad(never, space)(params, step=0)
    with pytest.raises(ValueError, match=message):
        jc.subspace_adamw(1e-3, space).init(params)


def test_an_integer_kernel_is_refused():
    with pytest.raises(ValueError, match=r"'head/kernel', int32\[4, 4\]"):
        subspace({"head/kernel": jc.Projection(2)}).slots(
            {"head": {"kernel": jnp.ones((4, 4), jnp.int32)}}
        )
