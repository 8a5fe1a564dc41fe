"""What the forward pass decided holds in the backward pass, whatever is decoded."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from tests.analysis.decision_cases import COARSE, NODES, ULPS, W, X, errors
from tests.draws import normal
from tests.residuals import weighted

Q1, Q2 = jc.Quantized(1), jc.Quantized(2)
COLUMNS = jnp.arange(64) * 7 % 6


def coded(codec, x):
    return codec.decode(codec.encode(x))


@jax.custom_jvp
def relu(y):
    """Of jax's name alone; its derivative is no step's."""
    return jnp.maximum(y, 0.0)


relu.defjvp(lambda y, t: (relu(*y), jnp.where(y[0] >= 0.0, t[0], 0.1 * t[0])))


def straight(decide):
    """With a rule of its own, by which gradients go straight through."""
    fun = jax.custom_vjp(decide)
    fun.defvjp(lambda y: (decide(y), None), lambda _, ct: (ct,))
    return lambda y: y * jax.lax.stop_gradient(fun(y))


@pytest.mark.parametrize(
    "decide",
    [
        jax.nn.relu,
        jax.nn.relu6,
        jax.nn.leaky_relu,
        jax.nn.hard_tanh,
        lambda y: jnp.where(y > 0.0, y, 0.1 * y),
        lambda y: y * (y > 0.0).astype(y.dtype),
        lambda y: y * jnp.sign(y),
        lambda y: y * jax.lax.stop_gradient(jnp.round(4 * y)),
        lambda y: y * (jnp.floor(y) + jnp.ceil(3 * y)),
        lambda y: y * (y // 0.5),
        straight(jnp.sign),
        straight(lambda y: jnp.where(y >= 0, 1.0, -1.0).astype(y.dtype)),
        straight(lambda y: jnp.where(y > 0, 0.5, jnp.where(y < -0.3, -0.5, 0.0)) * 2),
        straight(lambda y: jnp.where(y > 0, 1.0, -1.0) * jnp.abs(y).mean()),
        straight(lambda y: 2 * (y >= 0).astype(y.dtype) - 1),
        straight(lambda y: (4 * y).astype(jnp.int8).astype(y.dtype) / 4),
        lambda y: jnp.take_along_axis(y, jnp.argmax(y, -1, keepdims=True), -1),
        lambda y: jnp.take_along_axis(y, jnp.argsort(y, -1)[:, :8], -1),
        lambda y: y[:, jnp.argmax(y[0])],
        lambda y: jax.lax.cond((y > 0.0).sum() > 256, jnp.negative, lambda y: y, y),
        pytest.param(relu, id="of that name"),
        jax.checkpoint(jax.nn.relu),
        jax.checkpoint(lambda y: jnp.where(y > 0.0, y, jnp.maximum(0.1 * y, -0.05))),
        lambda y: jax.lax.cond(W.sum() < 1e9, jax.nn.hard_tanh, jax.nn.relu, y),
        lambda y: jax.lax.switch(1, [jnp.negative, straight(jnp.sign), jnp.abs], y),
        pytest.param(lambda y: jax.lax.top_k(y, 4)[0], id="top_k"),
        pytest.param(lambda y: jnp.sort(y, axis=-1), id="sort"),
        pytest.param(lambda y: jnp.maximum(y, 0.0), id="maximum"),
        pytest.param(lambda y: jnp.clip(y, -0.5, 0.5), id="clip"),
        pytest.param(jnp.abs, id="abs"),
        pytest.param(lambda y: y.max(axis=-1), id="max"),
        pytest.param(lambda y: jax.lax.cummax(y, axis=1), id="cummax"),
        pytest.param(
            lambda y: jax.lax.reduce_window(
                y, -jnp.inf, jax.lax.max, (1, 4), (1, 4), "VALID"
            ),
            id="max_pool",
        ),
        pytest.param(
            lambda y: y[:, (10.0 * y[0, 0]).astype(jnp.int32) % 64], id="index"
        ),
        pytest.param(lambda y: jax.ops.segment_max(y, NODES, 4), id="segment_max"),
        pytest.param(lambda y: jax.ops.segment_min(y.T, COLUMNS, 5), id="segment_min"),
        pytest.param(
            lambda y: jax.vmap(lambda row: jax.ops.segment_max(row, COLUMNS, 5))(y),
            id="vmapped segment_max",
        ),
        pytest.param(
            lambda y: y[:, :32].at[1:7, 4:20].max(y[2:, 32:48]), id="max of a window"
        ),
        pytest.param(
            lambda y: y[:, :8].at[:, 6:].min(y[:, 8:10]), id="min of two columns"
        ),
    ],
)
def test_the_gradient_follows_the_forwards_decisions(decide):
    """The function is linear but for the decision, and x is exact: so is dW."""
    for seed in range(2):
        x = normal(seed, 8, 64)
        assert ((coded(Q2, x @ W) > 0.0) != (x @ W > 0.0)).any()
        assert errors(lambda w, x: decide(x @ w), W, x) < ULPS


@pytest.mark.parametrize("made_by", [jax.custom_jvp, jax.custom_vjp])
def test_a_function_with_a_rule_may_give_a_constant(made_by):
    """And print, which has no result."""

    @made_by
    def fun(y):
        jax.debug.callback(lambda: None)
        return jnp.sin(y), 3.0

    if made_by is jax.custom_jvp:
        fun.defjvp(lambda y, t: (fun(*y), (t[0] * jnp.cos(y[0]), jnp.zeros(()))))
    else:
        fun.defvjp(lambda y: (fun(y), y), lambda y, ct: (ct[0] * jnp.cos(y),))

    def scaled(w, x):
        y, scale = fun(x @ w)
        return scale * y

    exact = jc.Policy(default=jc.Save())
    assert errors(scaled, W, normal(0, 8, 64), policy=exact) < ULPS
    assert errors(scaled, W, normal(0, 8, 64), policy=jc.policies.int8()) < 0.02


def test_corners_of_a_cell_are_made_again_of_the_place():
    """Places are whole: indices and what is inside need not be stored as well."""
    table = normal(5, 64)

    def interpolated(w, x):
        place = 32.0 + 8.0 * (x @ w)
        corner = jnp.floor(place)
        near = place - corner

        def read(i):
            inside = (i >= 8.0) & (i < 56.0)
            return jnp.where(inside, table[jnp.clip(i.astype(jnp.int32), 0, 63)], 0)

        return read(corner) * (1.0 - near) + read(corner + 1.0) * near

    assert errors(interpolated, W, X) < ULPS
    said = jc.explain(interpolated, W, X, policy=COARSE, params=0)
    assert {row.dtype for row in said.rows if row.stored} == {"float32"}


@pytest.mark.parametrize(
    "factorize",
    [
        lambda y: jnp.linalg.svd(y, full_matrices=False)[2],
        lambda y: jnp.linalg.qr(y.T)[0],
        lambda y: jax.scipy.linalg.lu(y)[2],
        lambda y: jnp.linalg.eigh(y[:, :8] + y[:, :8].T)[1],
        lambda y: jnp.linalg.solve(y[:, :8], jnp.ones(8)),
        lambda y: jnp.linalg.inv(y[:, :8]),
        lambda y: jnp.linalg.slogdet(y[:, :8])[1],
    ],
)
def test_factorizations_are_not_run_again_on_decoded_matrices(factorize):
    """Signs, pivots and what is nearly singular would come out otherwise."""
    assert errors(lambda w, x: factorize(x @ w), W, X) < 100 * ULPS  # conditioned


def test_nothing_to_choose_from():
    small = jc.checkpoint(lambda w, x: jnp.sort(x @ w, axis=0), policy=COARSE, params=0)
    assert not jax.grad(lambda w: small(w, X[:0]).sum())(W).any()


def test_exact_policies_choose_nothing():
    """What is saved or made again exactly is differentiated as it always is."""

    def fun(w, x):
        return jnp.maximum(x @ w, 0.0).max(-1)

    for policy in (jc.Policy(), jc.Policy(default=jc.Save())):
        rows = jc.explain(fun, W, X, policy=policy, params=0).rows
        assert not any(row.stored for row in rows if row.kind == "choice")
    rows = jc.explain(fun, W, X, policy=jc.policies.int4(), params=0).rows
    stored = {row.name: row.stored for row in rows if row.kind == "choice"}
    # 2 bits for 0.0, the product or both; one for the largest of a row, or not.
    assert stored == {"max.0.choice": 8 * 64 // 4, "reduce_max.0.choice": 8 * 64 // 8}


@pytest.mark.parametrize("default", [jc.Save(), jc.Recompute()])
@pytest.mark.parametrize(
    "fun",
    [
        jax.nn.relu,
        lambda y: jnp.maximum(y, 0.1),
        jnp.abs,
        lambda y: jnp.where(y > 0, y, 0.0),
        lambda y: jnp.sign(y) * y,
        lambda y: y.max(-1, keepdims=True),
    ],
)
def test_decisions_beside_a_rule_that_rounds(fun, default):
    """The product is read by them alone: its rounding then changes nothing."""
    policy = jc.Policy({"dot_general.0": Q2}, default=default)

    def gradient(f):
        return jax.grad(lambda w: jnp.sum(jnp.cos(3.0 * X[:, :1]) * f(w, X)))(W)

    found = gradient(jc.checkpoint(lambda w, x: fun(x @ w), policy=policy, params=0))
    expected = gradient(lambda w, x: fun(x @ w))
    assert jnp.linalg.norm(found - expected) < ULPS * jnp.linalg.norm(expected)


@pytest.mark.parametrize("loop", [False, True])
def test_the_branch_that_was_taken(loop):
    """A threshold between the sum of the products and that of the decoded ones."""
    y = X @ W
    threshold = 0.5 * float(y.sum() + coded(Q2, y).sum())

    def fun(w, x):
        y = x @ w

        def step(y, _):
            return jax.lax.cond(
                y.sum() > threshold, lambda y: 3.0 * y, lambda y: -2.0 * y, y
            ), None

        return jax.lax.scan(step, y, None, length=2)[0] if loop else step(y, None)[0]

    assert errors(fun, W, X) < ULPS


@pytest.mark.slow
def test_routing_goes_where_the_forward_went():
    """A mixture of experts: each token's gradient reaches the one that it went to."""

    def experts(w, x):
        chosen = jnp.argmax(x @ w["gate"], axis=-1)
        return jnp.einsum("bd,bde->be", x, w["experts"][chosen])

    w = {"gate": normal(13, 64, 3), "experts": normal(14, 3, 64, 64)}
    chosen = jnp.argmax(X @ w["gate"], -1)
    assert (jnp.argmax(coded(Q1, X @ w["gate"]), -1) != chosen).any()
    assert len(set(chosen.tolist())) > 1
    small = jc.checkpoint(experts, policy=jc.policies.uniform(Q1), params=0)
    for i in range(len(X)):
        moved = jax.grad(weighted(small))(w, X[i : i + 1])["experts"].any(axis=(1, 2))
        assert moved.tolist() == [e == chosen[i] for e in range(3)]


@pytest.mark.parametrize("action", [jc.Save(), jc.Narrow(3)])
def test_a_choice_that_is_saved_is_the_forwards(action):
    """Also by `Save`: made again of what is rounded it would be another, 0.4 off."""

    def fun(w, x):
        y = x @ w
        return jnp.minimum(y[:, ::2], y[:, 1::2]).sum()

    x = normal(0, 256, 64)
    w = normal(1, 64, 1)
    w += 0.05 * normal(2, 64, 64)
    policy = jc.Policy({"*.choice": action}, default=jc.policies.int4())
    small = jc.checkpoint(fun, policy=policy, params=0)
    found, exact = jax.grad(small)(w, x), jax.grad(fun)(w, x)
    # x is rounded; which entries are taken is not.
    assert jnp.linalg.norm(found - exact) < 0.1 * jnp.linalg.norm(exact)


def turned(w, x):
    """Rotary embeddings by complex numbers."""
    y = (x @ w).reshape(*x.shape[:-1], -1, 2)
    z = jax.lax.complex(y[..., 0], y[..., 1]) * jnp.exp(1j * jnp.arange(32.0))[None]
    return jnp.tanh(jnp.stack([z.real, z.imag], -1).reshape(x.shape))


def a_real_part(w, x):
    """Of a complex product, as of a state space with complex eigenvalues."""
    return jnp.tanh((x.astype(jnp.complex64) @ (w + 1j * w)).real)


@pytest.mark.parametrize("fun", [turned, a_real_part])
def test_a_complex_number_is_no_decision(fun, any_rank):
    """What a real one becomes without rounding, as an integer it does not."""
    with jax.numpy_dtype_promotion("standard"):
        said = jc.explain(fun, W, X, policy=jc.policies.int4(), params=0)
        assert errors(fun, W, X, policy=jc.policies.int4()) < 0.2
    assert all(row.action != "Save()" for row in said.rows if row.stored), said


@pytest.mark.parametrize("action", [jc.Quantized(2), jc.Save(), jc.Recompute()])
def test_a_rule_for_what_relu_leaves_keeps_its_mask(action):
    """It is no derivative of a step that is stored, and is not decided again."""
    policy = jc.Policy({"relu.*": action}, default=COARSE)
    assert errors(lambda w, x: jax.nn.relu(x @ w), W, X, policy=policy) < ULPS


@pytest.mark.parametrize(
    "decide",
    [
        lambda y: (y > 0).astype(y.dtype) * y,
        lambda y: (jnp.isfinite(y) & (y <= 0.1)).astype(y.dtype) * y,
    ],
)
def test_branches_decide_by_exact_values(decide):
    def fun(w, x):
        return jax.lax.cond(x.sum() < 1e9, decide, lambda y: 0.0 * decide(y), x @ w)

    assert errors(fun, W, X) < ULPS
