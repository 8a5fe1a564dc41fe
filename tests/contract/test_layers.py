"""What every compressed layer promises, whatever framework it is written in.

A case gives one model twice, of the plain layers and of ours, as pure functions of one
parameter tree. The model is an MLP of two layers with biases whose first kernel (n, m)
is stacked where the case scans.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcompact as jc
from jaxcompact import linen as clinen
from jaxcompact import nnx as cnnx
from jaxcompact.paths import map_named
from tests.cases import slow

BATCH, LENGTH, N, M = 4, 6, 21, 10  # odd sizes: ranks and groups do not divide them
RULE = r".*first/kernel"


@dataclass(frozen=True)
class Case:
    params: Any
    plain: Callable  # (params, x) -> y
    ours: Callable


def functional(dtype, remat: bool, scan: bool) -> Case:
    def make(product):
        def model(params, x):
            h = product(x, params["first"]["kernel"], params["first"]["bias"])
            return product(
                jnp.tanh(h), params["second"]["kernel"], params["second"]["bias"]
            )

        return over_layers(model) if scan else model

    def over_layers(model):
        def scanned(params, x):
            return jax.lax.scan(lambda x, p: (model(p, x), None), x, params)[0]

        return scanned

    def plain(x, w, b):
        # As Flax's layers. `x @ w` sums its gradient in another order on some CPUs.
        return jax.lax.dot_general(x, w, (((2,), (0,)), ((), ()))) + b[None, None]

    keys = jax.random.split(jax.random.key(0), 2)
    outputs = N if scan else 3
    stack = (2,) if scan else ()
    params = {
        "first": {
            "kernel": jax.random.normal(keys[0], (*stack, N, M), dtype),
            "bias": jnp.ones((*stack, M), dtype),
        },
        "second": {
            "kernel": jax.random.normal(keys[1], (*stack, M, outputs), dtype),
            "bias": jnp.zeros((*stack, outputs), dtype),
        },
    }
    wrap = jax.checkpoint if remat else lambda f: f
    return Case(params, wrap(make(plain)), wrap(make(jc.linear)))


def of_nnx(dtype, remat: bool, scan: bool) -> Case:
    def make(layer):
        class Model(nnx.Module):
            def __init__(self, rngs):
                outputs = N if scan else 3
                self.first = layer(N, M, dtype=dtype, param_dtype=dtype, rngs=rngs)
                self.second = layer(
                    M, outputs, dtype=dtype, param_dtype=dtype, rngs=rngs
                )

            def __call__(self, x):
                return self.second(jnp.tanh(self.first(x)))

        def forward(model, x):
            return model(x)

        forward = nnx.remat(forward) if remat else forward
        if scan:
            model = nnx.split_rngs(splits=2)(nnx.vmap(Model))(nnx.Rngs(0))
            axes = nnx.StateAxes({nnx.Param: 0, ...: None})
            forward = nnx.scan(forward, in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
        else:
            model = Model(nnx.Rngs(0))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        return params, lambda p, x: forward(nnx.merge(graphdef, p, rest), x)

    params, plain = make(nnx.Linear)
    ours_params, ours = make(cnnx.Linear)
    chex.assert_trees_all_equal(nnx.to_pure_dict(params), nnx.to_pure_dict(ours_params))
    return Case(params, plain, ours)


def of_linen(dtype, remat: bool, scan: bool) -> Case:
    def make(layer):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                kwargs = {"dtype": dtype, "param_dtype": dtype}
                h = jnp.tanh(layer(M, name="first", **kwargs)(x))
                y = layer(N if scan else 3, name="second", **kwargs)(h)
                return (y, None) if scan else y

        model = nn.remat(Model) if remat else Model
        if scan:
            model = nn.scan(
                model,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
        model = model()
        params = model.init(jax.random.key(0), jnp.ones((BATCH, LENGTH, N), dtype))
        call = lambda p, x: model.apply(p, x)  # noqa: E731
        return params, (lambda p, x: call(p, x)[0]) if scan else call

    params, plain = make(nn.Dense)
    ours_params, ours = make(clinen.Dense)
    chex.assert_trees_all_equal(params, ours_params)
    return Case(params, plain, ours)


CASES = {"functional": functional, "nnx": of_nnx, "linen": of_linen}


@pytest.fixture(params=CASES)
def make_case(request):
    return CASES[request.param]


def inputs(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(3), (BATCH, LENGTH, N), dtype)


def subspace(**kwargs) -> jc.Subspace:
    projection = jc.Projection(**({"rank": 8} | kwargs))
    return jc.Subspace({RULE: projection}, key=jax.random.key(1), period=4)


def loss_of(apply):
    return lambda params, x: jnp.mean(apply(params, x).astype(jnp.float32) ** 2)


def expected_grads(case, space, x):
    """The plain model's gradients, with P^T G for the kernel in the subspace."""
    grads = jax.grad(loss_of(case.plain))(case.params, x)
    slots = space.slots(case.params)

    def sketched(name, g):
        slot = slots.get(name)
        if slot is None:
            return g
        project = lambda k, g: slot.projection.project(k, g.T).T  # noqa: E731
        sketch = slot.map_layers(project, space.key, 0, g.astype(jnp.float32))
        return sketch.astype(g.dtype)

    return map_named(sketched, grads)


def assert_close(got, expected, rtol):
    """rtol of the largest entry: entries that cancel have no precision of their own."""
    chex.assert_trees_all_equal_structs(got, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)

    def close(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= rtol * np.abs(b).max()

    jax.tree.map(close, got, expected)


@pytest.mark.parametrize(
    ("remat", "scan"),
    [(False, False), slow(True, False), slow(False, True), (True, True)],
    ids=["as it is", "remat", "scan", "remat in a scan"],
)
def test_gradients(make_case, remat, scan):
    case, space, x = make_case(jnp.float32, remat, scan), subspace(), inputs()
    np.testing.assert_array_equal(case.ours(case.params, x), case.plain(case.params, x))
    value, grads = jax.jit(
        lambda p, x: jc.value_and_grad(loss_of(case.ours), space)(p, x, step=0)
    )(case.params, x)
    np.testing.assert_allclose(value, loss_of(case.plain)(case.params, x), rtol=1e-6)
    # float32 sums of up to 24 * 21 terms in another order.
    assert_close(grads, expected_grads(case, space, x), rtol=2e-5)


def test_without_a_subspace_it_is_plain_training(make_case):
    case, x = make_case(jnp.float32, False, False), inputs()
    got = jax.value_and_grad(loss_of(case.ours))(case.params, x)
    expected = jax.value_and_grad(loss_of(case.plain))(case.params, x)
    chex.assert_trees_all_equal(got, expected)


def test_evaluation_makes_no_projection(make_case):
    case, x = make_case(jnp.float32, False, False), inputs()
    text = str(jax.make_jaxpr(case.ours)(case.params, x))
    assert "random" not in text and "custom_vjp" not in text


def test_bfloat16(make_case):
    case, space = make_case(jnp.bfloat16, False, False), subspace()
    x = inputs(jnp.bfloat16)
    np.testing.assert_array_equal(case.ours(case.params, x), case.plain(case.params, x))
    _, grads = jc.value_and_grad(loss_of(case.ours), space)(case.params, x, step=0)
    # z, P and dy have 8 bits each: three roundings of 2^-8, added up as noise. A sum
    # of these is rounded once on both sides.
    assert_close(grads, expected_grads(case, space, x), rtol=3 * 2**-8)


def test_vmap_over_inputs(make_case):
    case, space, x = make_case(jnp.float32, False, False), subspace(), inputs()
    grad = lambda x: jc.value_and_grad(loss_of(case.ours), space)(  # noqa: E731
        case.params, x, step=0
    )
    got = jax.vmap(lambda x: grad(x[None]))(x)
    expected = [grad(row[None]) for row in x]
    expected = jax.tree.map(lambda *rows: jnp.stack(rows), *expected)
    assert_close(got, expected, rtol=2e-5)


def test_gradients_of_some_inputs_only(make_case):
    """With respect to x alone, no sketch is asked for and dx is exact."""
    case, x = make_case(jnp.float32, False, False), inputs()
    expected = jax.grad(loss_of(case.plain), argnums=1)(case.params, x)
    value = lambda x: jc.value_and_grad(loss_of(case.ours), subspace())(  # noqa: E731
        case.params, x, step=0
    )[0]
    assert_close(jax.grad(value)(x), expected, rtol=1e-6)


def test_the_second_step_does_not_compile_again(make_case):
    chex.clear_trace_counter()
    case, space = make_case(jnp.float32, False, False), subspace()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, x, step):
        return jc.value_and_grad(loss_of(case.ours), space)(params, x, step=step)

    results = [step(case.params, inputs(), i) for i in range(6)]
    same, other = results[3][1], results[4][1]  # a new P at step 4
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (same, other)), strict=True)
    ]
    assert sum(changed) == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_over_two_devices(make_case, axis_type):
    case, space, x = (
        make_case(jnp.float32, False, False),
        subspace(codec=jc.Quantized(8, LENGTH * 8)),  # one group of an example's z
        inputs(),
    )
    grad = jax.jit(
        lambda p, x: jc.value_and_grad(loss_of(case.ours), space)(p, x, step=0)
    )
    expected = grad(case.params, x)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        replicated = jax.device_put(case.params, NamedSharding(mesh, P()))
        got = grad(replicated, jax.device_put(x, NamedSharding(mesh, P("data"))))
        for leaf in jax.tree.leaves(got):
            assert leaf.sharding.is_fully_replicated
    assert_close(jax.device_get(got), jax.device_get(expected), rtol=2e-5)
