"""Functions and arguments that `jc.checkpoint` takes, and what it says of others."""

from dataclasses import dataclass
from functools import partial, wraps

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.checkpoint.functions import (
    LOSSY,
    SAVE,
    ULPS,
    W,
    X,
    equal,
    mlp,
    weighted,
)
from tests.errors import relative


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": "w"}, "params must be argument numbers or types .* got 'w'"),
        ({"params": 1.5}, "params must be argument numbers or types .* got 1.5"),
        ({"params": True}, "params must be argument numbers or types .* got True"),
        ({"params": (0, None)}, "params must be argument numbers .* got None"),
        ({"params": 2}, "params must be below the number of arguments 2, got 2"),
        ({"params": -3}, "params must be below the number of arguments 2, got -3"),
        ({"params": dict}, r"params must be in the arguments, got dict.*: \(\) says"),
        ({"params": 1, "static_argnums": 1}, "1 is in params and static_argnums"),
        ({"policy": jc.Policy}, "policy must be a jaxcompact policy"),
    ],
)
def test_arguments_that_are_none(arguments, message):
    with pytest.raises(ValueError, match=message):
        jc.checkpoint(lambda x, n: x * n, **arguments)(2.0, 3)


def test_a_type_is_looked_for_in_each_argument():
    """Not in what holds them, which is a dict as well."""

    def fun(params, x):
        return jnp.sin(x @ params["w"]) @ params["w"]

    args = {"w": W[0]}, X
    by_type, by_number = (
        jc.explain(jc.checkpoint(fun, policy=LOSSY, params=params), *args)
        for params in (dict, 0)
    )
    assert by_type.stored == by_number.stored


def test_what_is_no_function_is_refused():
    with pytest.raises(ValueError, match="fun must be a function, got 3"):
        jc.checkpoint(3)
    small = jc.checkpoint(lambda *, x: x, params=0)
    with pytest.raises(ValueError, match="below the number of arguments 0, got 0"):
        small(x=1.0)


def test_an_argument_that_decides_is_named():
    def fun(w, x, train):
        return jnp.tanh(x @ w) if train else x

    small = jc.checkpoint(fun, policy=LOSSY, params=0)
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        small(W[0], X, True)
    function, argument = raised.value.__notes__[-2:]
    assert function == "checkpoint of 'fun'"
    assert "leaves[2] is train; " in argument and "static_argnums" in argument


def test_what_returns_no_array_is_named():
    def said(w, x):
        return w @ x, "done"

    with pytest.raises(TypeError, match="<class 'str'>") as told:
        jc.checkpoint(said, params=0)(jnp.eye(2), jnp.ones((2, 2)))
    assert "checkpoint of 'said'" in told.value.__notes__


def test_static_arguments_of_another_type_are_others():
    small = jc.checkpoint(lambda n: jnp.array(n), static_argnums=0)
    assert [small(n).dtype for n in (1, 1.0, True)] == ["int32", "float32", "bool"]


def test_an_argument_that_is_no_array_is_named():
    def fun(params, x, activation):
        return getattr(jax.nn, activation)(x @ params["w"])

    small = jc.checkpoint(fun, params=0, static_argnames="activation")
    params, x = {"w": jnp.ones((2, 2))}, jnp.ones((2, 2))
    assert small(params, x, activation="relu").shape == (2, 2)
    with pytest.raises(TypeError, match="activation must be an array, .* got 'relu'"):
        small(params, x, "relu")
    with pytest.raises(TypeError, match="params/w must be an array, .* got 'w'"):
        small({"w": "w"}, x, activation="relu")


def test_a_trace_under_other_settings_is_another():
    small = jc.checkpoint(lambda x: x @ x)

    def precision():
        return "HIGHEST" in str(jax.make_jaxpr(lambda x: small(x))(jnp.eye(2)))

    assert not precision()
    with jax.default_matmul_precision("highest"):
        assert precision()
    assert not precision()


def test_it_is_a_function_as_any_other():
    small = jc.checkpoint(mlp, policy=LOSSY, params=0)
    assert jax.eval_shape(small, W, X).shape == X.shape
    assert jax.make_jaxpr(small)(W, X).out_avals[0].shape == X.shape

    @wraps(small)
    def after(w, x):
        return jnp.sort(small(w, x))

    with pytest.raises(
        ValueError, match="policy must be given for a fun that jc.checkpoint has not"
    ):
        jc.explain(after, W, X)


def test_arguments_of_all_kinds():
    def fun(w, x, power, *, scale, shift=None, mode):
        y = x @ w["a"][0] * scale
        y = y if shift is None else y + shift["b"]
        return (y**power, None, {"y": jnp.sin(y) if mode == "sin" else y})

    small = jc.checkpoint(
        fun, policy=SAVE, params=0, static_argnums=2, static_argnames="mode"
    )
    w = {"a": (W[0], None)}

    def of(f):
        def loss(w, x, scale, shift):
            return weighted(f)(w, x, 2, scale=scale, shift=shift, mode="sin")

        return jax.grad(loss, argnums=(0, 1, 2, 3))(w, X, 1.5, {"b": X})

    assert relative(of(small), of(fun)) < ULPS
    assert small(w, X, -1, scale=2.0, mode="no")[0].shape == X.shape
    with pytest.raises(ValueError, match=r"must be hashable, got \[2\] for power"):
        small(w, X, [2], scale=2.0, mode="no")
    with pytest.raises(ValueError, match="static_argnums must be below .* 2, got 2"):
        small(w, X, scale=2.0, mode="no")


def test_parameters_that_are_given_by_their_name():
    def layer(x, w):
        return jnp.tanh(x @ w)

    small = jc.checkpoint(layer, policy=jc.policies.int4(), params=1)
    x, w = jnp.ones((2, 64)), jnp.ones((64, 8))
    named = jc.explain(small, x, w=w)
    assert named == jc.explain(small, x, w)
    assert named == jc.explain(small, w=w, x=x)
    with pytest.raises(ValueError, match="params must be below the number .* 1, got 1"):
        jc.checkpoint(lambda x, **rest: x, params=1)(x, w=w)


def test_negative_argument_numbers():
    small = jc.checkpoint(
        lambda x, n, w: (x * n) @ w[0], policy=LOSSY, params=-1, static_argnums=-2
    )
    rows = jc.explain(small, X, 3, W).rows
    assert [row.name for row in rows if row.kind == "parameter"] == ["w"]


def test_a_closure_is_differentiated_and_never_stale():
    def loss(w, x):
        small = jc.checkpoint(lambda x: mlp(w, x), policy=SAVE)
        return weighted(small)(x)

    assert relative(jax.grad(loss)(W, X), jax.grad(weighted(mlp))(W, X)) < ULPS

    state = {"w": W}
    small = jc.checkpoint(lambda x: mlp(state["w"], x), policy=SAVE)
    first = small(X)
    state["w"] = 2.0 * W
    again = jax.jit(mlp)(2.0 * W, X)
    equal(small(X), again)
    assert (again != first).any()


def test_what_closes_over_an_array_is_traced_once_for_all_layers():
    """As a table of positions or a mask, which may change from one step to the next."""
    traced, table = [], {"positions": jnp.ones_like(X)}

    def block(w, x):
        traced.append(x)
        return mlp(w, x * table["positions"])

    small = jc.checkpoint(block, policy=LOSSY, params=0)

    def loss(w):
        return small(w, small(w, small(w, X))).sum()

    first = jax.grad(loss)(W)
    assert len(traced) == 1
    assert relative(jax.jit(jax.grad(loss))(W), first) < ULPS
    assert len(traced) == 2
    table["positions"] *= 2.0
    assert relative(jax.grad(loss)(W), first) > 0.1


def test_methods_and_partial_functions():
    class Block:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, w, x):
            return mlp(w, x) * self.scale

    for fun in (Block(2.0), Block(2.0).__call__, partial(mlp, W)):
        args = (X,) if isinstance(fun, partial) else (W, X)
        small = jc.checkpoint(fun, policy=LOSSY)
        equal(jax.jit(small)(*args), jax.jit(fun)(*args))


def test_functions_without_a_name_are_called_by_their_functions_or_their_types():
    """Not by what they hold: that differs from process to process, and is long."""

    @dataclass
    class Block:
        scale: jax.Array

        def __call__(self, w, x):
            return mlp(w, x) * self.scale

    policy = jc.Policy({"none": SAVE.default})
    for fun, name in (partial(partial(mlp), x=X), "mlp"), (Block(X), "Block"):
        small = jc.checkpoint(fun, policy=policy, params=0)
        args = (W,) if isinstance(fun, partial) else (W, X)
        with pytest.raises(ValueError, match=f"no tensor of '{name}'"):
            jax.grad(weighted(small))(*args)
    with pytest.raises(ValueError, match="policy must be given"):
        jc.explain(Block(X), W, X)  # which has no hash
