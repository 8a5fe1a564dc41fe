"""The candidates of a function: their names, places and kinds."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxcompact as jc
from jaxcompact.checkpoint import TRACERS
from jaxcompact.graph import graph_of
from jaxcompact.tensors import Tensors

S = jax.ShapeDtypeStruct
W = S((16, 16), jnp.float32)
X = S((8, 16), jnp.float32)


def candidates(fun, *args, params=0, **kwargs):
    """Name -> `Tensor`, of a function whose first argument is its parameters."""
    wrapped = jc.checkpoint(fun, policy=jc.Policy(), params=params)
    traced, _ = TRACERS[wrapped](args, kwargs)
    found = Tensors(traced.graph, traced.names, traced.known).found.values()
    names = [tensor.name for tensor in found]
    assert len(set(names)) == len(names), names
    return {tensor.name: tensor for tensor in found}


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


# --- attention ---


def attention(w, x):
    q, k, v = (y.reshape(2, 4, 2, 8) for y in jnp.split(x @ w["qkv"], 3, axis=-1))
    q, k, v = (checkpoint_name(y, name) for y, name in ((q, "q"), (k, "k"), (v, "v")))
    return jax.nn.dot_product_attention(q, k, v)


def test_the_operands_of_softmax_scores():
    w = {"qkv": S((16, 48), jnp.float32)}
    found = candidates(attention, w, S((2, 4, 16), jnp.float32))
    # [batch, tokens, heads, channels]: groups run along the tokens.
    scores = {n: t.scores for n, t in found.items() if t.scores is not None}
    assert (scores["q"], scores["k"]) == (1, 1)
    assert "v" not in scores
    terms = {n: t.terms for n, t in found.items() if t.terms is not None}
    assert sorted(terms.values()) == [4, 8]  # tokens; channels


def test_logits_of_a_loss_are_no_scores():
    def fun(w, x):
        return jax.nn.log_softmax(x @ w)

    assert all(t.scores is None for t in candidates(fun, W, X).values())


@jax.custom_vjp
def fused(q, k, v):
    return fused_forward(q, k, v)[0]


def fused_forward(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    out = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - lse), v)
    return out, (q, k, v, out, lse)


fused.defvjp(fused_forward, lambda res, ct: res[:3])


def shared(op):
    """Of each device's heads, as a kernel is called on several devices."""
    place = jax.P(None, None, "tensor")
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("tensor",), kinds, devices=jax.devices()[:2])
    return jax.shard_map(op, mesh=mesh, in_specs=(place,) * 3, out_specs=place)


@pytest.mark.parametrize(
    "op", [fused, shared(fused), shared(jax.nn.dot_product_attention)]
)
def test_fused_attention_is_told_from_one_that_makes_its_softmax_again(op):
    """Which is what a `jax.shard_map` does not."""

    def fun(op):
        def call(w, x):
            q, k, v = (y.reshape(2, 4, 2, 8) for y in (x @ w, x @ w.T, x @ w @ w))
            return op(q, k, v)

        return call

    x = S((2, 4, 16), jnp.float32)
    found = candidates(fun(op), W, x)
    assert [t.fused for t in found.values()].count("result") == 1
    operands = [n for n, t in found.items() if t.fused == "operand"]
    assert operands == ["dot_general.0", "dot_general.1", "dot_general.3"]
    scores = [n for n, t in found.items() if t.scores is not None]
    assert scores == ["dot_general.0", "dot_general.1"]
    found = candidates(fun(jax.nn.dot_product_attention), W, x)
    assert all(t.fused is None for t in found.values())


# --- divisors ---


@jax.custom_vjp
def by_hand(y):
    return jnp.log(y)


by_hand.defvjp(lambda y: (jnp.log(y), 2 * y), lambda y, c: (2 * c / y,))


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: x / y,
        lambda x, y: x / (y[:, :1] + 1e-6),
        lambda x, y: x / jnp.maximum(y.T.reshape(x.shape), 1e-6),
        lambda x, y: x * jnp.log(2.0 * y),
        lambda x, y: x * jax.lax.rsqrt(y.astype(jnp.bfloat16)).astype(jnp.float32),
        lambda x, y: x * y**-2,
        lambda x, y: x / y[jnp.arange(8) % 3],
        lambda x, y: jnp.hypot(x, y),
        lambda x, y: x * jax.scipy.special.logit(y),
        # distances: of pairs of points, and of points in three dimensions
        lambda x, y: (
            x[:, :8] * jnp.sqrt((x * x).sum(-1)[:, None] + 4.0 - 2.0 * y[:, :8])
        ),
        lambda x, y: x[:, :1] * jnp.linalg.norm(y[:, :3], axis=-1, keepdims=True),
        # sums that may be small as a whole, products
        lambda x, y: x / y.sum(-1, keepdims=True),
        lambda x, y: x * jnp.log(jnp.prod(y, -1, keepdims=True)),
        # steep elsewhere than at zero
        lambda x, y: x * jnp.log2(y),
        lambda x, y: x * jnp.log1p(-0.9 * y),
        lambda x, y: x * jnp.arccosh(1 + y),
        lambda x, y: x * jnp.log(1.0 + y),
        # what is zero where y is: by itself, and beside one
        lambda x, y: x / jnp.tanh(y),
        lambda x, y: x * jnp.log(1 - jnp.exp(-jnp.abs(y))),
        lambda x, y: x * jnp.log(jnp.sort(y)),
        lambda x, y: x[:, :1] * jnp.linalg.norm(y - y[::-1], axis=-1, keepdims=True),
        lambda x, y: jnp.fmod(x, y),
        # inside of loops, branches, other transforms; and what goes through them
        lambda x, y: x * jax.lax.map(jnp.log, y),
        lambda x, y: jax.lax.scan(lambda c, v: (c + v[0] / v[1], 0), x[0], (x, y))[0],
        lambda x, y: jax.lax.scan(lambda c, x: (x / c, 0), y[0], x)[0],
        lambda x, y: jax.lax.scan(lambda c, y: (y, 1 / c), x[0], y)[1],
        lambda x, y: jax.lax.cond(x[0, 0] < 0, jnp.divide, jnp.multiply, x, y),
        lambda x, y: x * jax.checkpoint(jnp.log)(y),
        lambda x, y: x / jax.checkpoint(lambda y: 2 * y)(y),
        lambda x, y: x * jc.checkpoint(jnp.log)(y),
        lambda x, y: x * by_hand(y),
    ],
)
def test_what_is_divided_by(use):
    found = candidates(lambda w, x: use(jnp.cos(x), x @ w), W, X)
    kept = [n for n, t in found.items() if t.divisor and not t.cheap]
    assert kept == ["dot_general.0"]


def test_what_an_op_keeps_that_divides_is_no_substitute_either():
    @jax.custom_vjp
    def product(y):
        return jnp.log(y) @ y.T

    @jax.custom_vjp
    def tempered(t, y):
        return (y / t) @ y.T

    product.defvjp(lambda y: (product(y), 2 * y), lambda y, c: (c @ y / (y * y),))
    tempered.defvjp(
        lambda t, y: (tempered(t, y), (t, 2 * y)),
        lambda kept, c: (kept[0], c @ kept[1] / kept[0]),
    )

    def action(fun, residual):
        said = jc.explain(fun, W, X, policy=jc.policies.int4(), params=0)
        actions = {row.name: row.action for row in said.rows}
        return actions[f"custom_vjp_call.0.residual{residual}"]

    assert action(lambda w, x: product(x @ w), 0) == "Save()"
    # A parameter is no tensor that is rounded.
    assert action(lambda w, x: tempered(w[0, 0], x @ w), 1) == "Quantized(bits=4)"


def test_matrices_of_solves_and_factorizations_are_divisors():
    def solve(w, x):
        y = x @ w
        return jax.scipy.linalg.solve_triangular(y[:, :8], y[:, 8:])

    found = candidates(solve, W, X)
    assert [n for n, t in found.items() if t.divisor] == [
        "dot_general.0",
        "triangular_solve.0",
    ]
    found = candidates(lambda w, x: jnp.linalg.qr(x @ w), W, X)
    assert [n for n, t in found.items() if t.divisor] == ["qr.0.0", "qr.0.1"]


@pytest.mark.parametrize(
    ("use", "shape"),
    [
        (lambda y: y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6), (8, 1)),
        (lambda y: (y - y.mean()) / y.std(), ()),
        (lambda y: y / jnp.linalg.norm(y), ()),
        (
            lambda y: (
                y * jax.lax.rsqrt((y**2).mean(-1) - y.mean(-1) ** 2 + 1e-6)[:, None]
            ),
            (8,),
        ),
        (lambda y: y / jnp.abs(y).max(-1, keepdims=True), (8,)),
        (lambda y: jnp.arccosh(1 + (y * y).sum(-1)), (8,)),
    ],
)
def test_norms_are_kept_and_not_what_is_normalized(use, shape):
    found = candidates(lambda w, x: use(x @ w), W, X)
    (norm,) = (t for t in found.values() if t.divisor)
    assert norm.shape == shape and not norm.cheap


@pytest.mark.parametrize(
    "use",
    [
        lambda y: jax.lax.map(lambda row: row / row.std(), y),
        lambda y: jax.nn.softplus(y) + jax.nn.logsumexp(y) + jax.nn.log_softmax(y),
        jax.checkpoint(jax.nn.softmax),
        lambda y: jax.nn.softmax(y),
        lambda y: jnp.exp(y) / jnp.exp(y).sum(-1, keepdims=True),
        lambda y: y / 3.0,
        lambda y: 1.0 / (1.0 + y * y),
    ],
)
def test_what_is_normalized_is_no_divisor(use):
    found = candidates(lambda w, x: use(x @ w), W, X)
    assert not [n for n, t in found.items() if t.divisor]


def test_a_softmax_over_segments_is_made_again_as_a_whole():
    """Its terms rounded and its sum not, it would not be normalized."""

    def fun(w, x, segments):
        logits = x @ w
        largest = jax.ops.segment_max(logits, segments, 4)
        terms = jnp.exp(logits - largest[segments])
        return terms / jax.ops.segment_sum(terms, segments, 4)[segments]

    found = candidates(fun, W, X, S((8,), jnp.int32))
    assert {
        n for n, t in found.items() if t.kind in ("op", "input") and t.floating
    } == {
        "x",
        "dot_general.0",
        "scatter-add.0",
    }
    assert found["scatter-add.0"].cheap


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
