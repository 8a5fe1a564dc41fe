"""The candidates of a function: their names, places and kinds."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcompact as jc
from jaxcompact.checkpoint import TRACERS
from jaxcompact.graph import graph_of
from tests.analysis.candidates import S, W, X, candidates


def line_of(fun, text):
    lines, first = inspect.getsourcelines(fun)
    (found,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_tensors.py:{first + found}"


# --- names and places ---


def test_operations_are_counted_by_kind_in_program_order():
    def fun(w, x):
        y = x @ w
        z = jnp.sort(y)
        return y @ w, z @ w

    names = set(candidates(fun, W, X))
    assert names == {"x", "dot_general.0", "sort.0", "dot_general.1", "dot_general.2"}


def test_a_jitted_part_is_named_as_if_it_were_not():
    def layer(w, x):
        return jnp.sort(x @ w) @ w

    def fun(layer):
        return lambda w, x: layer(w, layer(w, x))

    plain, jitted = (candidates(fun(f), W, X) for f in (layer, jax.jit(layer)))
    assert list(plain) == list(jitted)
    assert {"dot_general.3", "sort.1"} < set(plain)


def test_the_place_is_the_users_line():
    @jax.jit
    def inner(w, x):
        return jax.nn.silu(x @ w)  # first line

    def fun(w, x):
        y = inner(w, x)  # the call
        return jax.nn.dot_product_attention(*[y.reshape(1, 8, 2, 8)] * 3)  # attention

    found = candidates(fun, W, X)
    # The outermost line that is the function's: how a reader of a model finds it.
    assert found["dot_general.0"].where == line_of(fun, "# the call")
    assert found["dot_general.1"].where == line_of(fun, "# attention")
    assert str(found["dot_general.0"]) == (
        f"dot_general.0 [8,16] {line_of(fun, '# the call')}"
    )


def test_inputs_have_their_arguments_names():
    def fun(w, x, *rest, scale, **more):
        return x @ w * scale + rest[1]["b"][0] + more["c"]

    found = candidates(fun, W, X, X, {"b": (X, X)}, scale=S((), jnp.float32), c=X)
    inputs = [name for name, tensor in found.items() if tensor.kind == "input"]
    assert inputs == ["x", "argument.2", "argument.3/b/0", "argument.3/b/1"] + [
        "c",
        "scale",
    ]


def test_checkpoint_name_wins():
    def fun(w, x):
        y = checkpoint_name(x @ w, "up")
        return jnp.tanh(y) @ w

    found = candidates(fun, W, X)
    assert set(found) == {"x", "up", "tanh.0", "dot_general.1"}
    assert found["up"].kind == "op"
    assert not found["up"].cheap


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.reshape(2, 4, 16),
        lambda y: y.T,
        lambda y: y[None],
        lambda y: checkpoint_name(y, "up").reshape(4, 32),
        jax.lax.optimization_barrier,
    ],
)
def test_a_named_view_is_no_second_tensor(view):
    """A reshaped or renamed tensor has the same bytes: one candidate, the name's."""

    def fun(w, x):
        y = x @ w
        return y.sum() + (checkpoint_name(view(y), "view") ** 2).sum()

    found = candidates(fun, W, X)
    assert set(found) == {"x", "view"}
    assert found["view"].shape == (8, 16)


def test_a_named_cheap_tensor_is_a_candidate():
    def fun(w, x):
        return checkpoint_name(x * 2.0, "doubled") @ w

    found = candidates(fun, W, X)["doubled"]
    assert found.cheap
    assert found.kind == "op"


def test_a_name_on_a_parameter_makes_no_candidate():
    def fun(w, x):
        return x @ checkpoint_name(w, "weights")

    assert set(candidates(fun, W, X)) == {"x", "dot_general.0"}


# --- parameters ---


def test_what_follows_from_parameters_alone_is_no_candidate():
    def fun(w, x):
        square = (w["a"].T @ w["a"])[:, :16]
        both = checkpoint_name(square.astype(jnp.bfloat16), "both")
        return x @ both.astype(jnp.float32) + jnp.sort(w["a"]).sum()

    found = candidates(fun, {"a": S((16, 16), jnp.float32)}, X)
    assert set(found) == {"x", "dot_general.1"}


def test_without_params_inputs_are_candidates_that_are_kept():
    wrapped = jc.checkpoint(
        lambda w, x: jnp.tanh(x @ w), policy=jc.policies.int8(), params=None
    )
    traced, _ = TRACERS[wrapped]((W, X), {})
    replay = traced.plan((True, True)).replay
    chosen = {tensor.name: action for tensor, action, _ in replay.chosen.values()}
    assert chosen["w"] == chosen["x"] == jc.Save()
    assert [slot.tensor.name for slot in replay.slots] == ["dot_general.0"]


# --- kinds ---


def test_a_mask_that_chooses_is_a_candidate():
    def fun(w, x):
        y = x @ w
        return jnp.where((y > 0.0) & (y < 1.0), y, 0.0 * y)

    found = candidates(fun, W, X)
    # The two comparisons are made again from what stores their conjunction.
    masks = {name: t for name, t in found.items() if t.kind == "mask"}
    assert set(masks) == {"and.0"}
    assert masks["and.0"].discrete
    assert masks["and.0"].dtype == bool


def test_a_mask_of_positions_decides_nothing_by_data():
    def fun(w, x):
        y = x @ w
        row, column = (jax.lax.broadcasted_iota(jnp.int32, y.shape, i) for i in (0, 1))
        return jnp.where(row >= column, y, -1e9 * jnp.ones_like(y))

    masks = [t for t in candidates(fun, W, X).values() if t.kind == "mask"]
    assert not any(mask.discrete for mask in masks)


def test_integers_made_of_data_are_discrete_and_narrow_where_known():
    def fun(w, x):
        y = x @ w
        best = jnp.argmax(y, axis=-1)
        _, top = jax.lax.top_k(y, 2)
        codes = jnp.round(y).astype(jnp.int32)
        return w[best] + w[top].sum(1) + w[codes].sum(1)

    found = candidates(fun, W, X)
    limits = {
        name: t.limit for name, t in found.items() if t.kind == "op" and t.discrete
    }
    assert limits == {
        "argmax.0": 16,
        "top_k.0.1": 16,
        "round.0": None,  # the integers are stored in its place
        "convert_element_type.0": None,
    }


@pytest.mark.parametrize(
    ("name", "fun", "step"),
    [
        ("relu.0", jax.nn.relu, True),
        ("relu6.0", jax.nn.relu6, True),
        ("silu.0", jax.nn.silu, False),
        ("tanh.0", lambda y: 1.0 + 2.0 * jnp.tanh(3.0 * y), False),
        ("exp.0", lambda y: y * jnp.exp(y), False),
    ],
)
def test_elementwise_functions_of_one_tensor(name, fun, step):
    found = candidates(lambda w, x: fun(x @ w) @ w, W, X)
    functions = {n: t for n, t in found.items() if t.kind == "function"}
    assert list(functions) == [name]
    assert functions[name].step == step
    assert functions[name].shape == (8, 16)


def test_a_function_ends_where_a_second_tensor_comes_in():
    def fun(w, x):
        return 2.0 * jnp.sin(x @ w) * jnp.cos(x @ w.T) + 1.0

    found = candidates(fun, W, X)
    functions = [name for name, t in found.items() if t.kind == "function"]
    assert functions == ["sin.0", "cos.0"]


def test_elementwise_chains_are_no_candidates():
    def fun(w, x):
        y = x @ w
        y = y - y.mean(-1, keepdims=True)
        y = y / jnp.sqrt((y * y).mean(-1, keepdims=True))
        return jnp.concatenate([y, -y], -1)[:, 4:20].T

    found = {n: t for n, t in candidates(fun, W, X).items() if t.kind != "function"}
    assert set(found) == {"x", "dot_general.0", "div.1"}
    assert found["div.1"].shape == (8, 1) and found["div.1"].divisor


def test_a_product_read_in_bfloat16_alone_is_stored_so():
    def fun(w, x):
        y = jnp.dot(x, w, preferred_element_type=jnp.float32)
        return jnp.tanh(y.astype(jnp.bfloat16)) @ w

    half = [S(a.shape, jnp.bfloat16) for a in (W, X)]
    found = candidates(fun, *half)
    assert found["dot_general.0"].dtype == jnp.bfloat16
    assert found["dot_general.0"].nbytes == 8 * 16 * 2


# --- graphs ---


def test_a_graph_runs_as_its_function_does():
    @jax.jit
    def inner(x):
        return jnp.sin(x), 3

    def fun(x):
        y, n = inner(x)
        return inner(y)[0] * n, x

    x = jnp.arange(4.0)
    graph = graph_of(jax.make_jaxpr(fun)(x))
    assert [op.name for op in graph.ops][:2] == ["sin.0", "sin.1"]
    env = graph.run([x], lambda op, values, _: op.bind(*values))
    assert (env[graph.outputs[0]] == fun(x)[0]).all()
    assert (env[graph.outputs[1]] == x).all()
