"""What rounding does to gradients: predicted against measured, and at equal bytes."""

import dataclasses
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcompact as jc
from jaxcompact.memory import devices
from jaxcompact.planner.block import block_of
from jaxcompact.planner.milp import solve
from jaxcompact.planner.problem import named, problem, without_host
from jaxcompact.planner.sensitivity import CODECS
from tests.cases import slow
from tests.draws import normal
from tests.planner.gradients import (
    PARAMS,
    TARGET,
    X,
    block,
    flat,
    gradient,
    make_gradient,
)


@pytest.fixture(scope="module")
def found():
    return jc.sensitivity(make_gradient)


@pytest.fixture(scope="module")
def exact():
    return gradient(jc.Policy())


@pytest.mark.slow
def test_what_is_encoded_is_what_is_measured(found):
    (names,) = {tuple(found.effects)}
    products = tuple(f"dot_general.{i}" for i in (0, 1, 2, 6, 7))
    assert {*names} == {"x", "add.1", *products}  # with the stream behind attention
    assert found.block == "block"
    for name, effect in found.effects.items():
        axis = -1 if name in products else -2  # of the stream channels are apart
        codecs = {dataclasses.replace(codec, axis=axis) for codec in CODECS}
        assert codecs <= set(effect.errors)
        scores = name in ("dot_general.0", "dot_general.1")
        assert len(effect.errors) == len(CODECS) * (1 + scores)


@pytest.mark.slow
def test_each_tensor_alone(found, exact):
    """Predicted for each tensor, with the policy's codec; measured with it alone.

    To first order, within 5 %: the signs of 4 probes give 1 to 2 %.
    """
    for name, effect in found.effects.items():
        codec, predicted = next(iter(effect.errors.items()))
        rules = dict.fromkeys(found.effects, jc.Save()) | {name: codec}
        g = gradient(jc.Policy(rules, default=found.base))
        measured = jnp.linalg.norm(g - exact) / jnp.linalg.norm(exact)
        assert predicted**0.5 == pytest.approx(float(measured), rel=0.05), name


@pytest.mark.slow
@pytest.mark.parametrize("bits", [*(slow(b) for b in (2, 3, 8)), 4])
def test_all_tensors_together(found, exact, bits):
    """The total variance within 10 %, of a bound of twice."""
    codec = {c.bits: c for c in CODECS}[bits]
    policy = jc.Policy(dict.fromkeys(found.effects, codec), default=found.base)
    error = jnp.linalg.norm(gradient(policy) - exact) / jnp.linalg.norm(exact)
    assert found.error(dict(policy.rules)) == pytest.approx(float(error), rel=0.1)


@pytest.mark.slow
def test_against_the_jacobian():
    """Of one layer, where the gradient as a function of what is stored is by hand."""
    keys = jax.random.split(jax.random.key(1), 3)
    w = jax.random.normal(keys[0], (2, 8, 8)) / 8**0.5
    x, target = (jax.random.normal(k, (6, 8)) for k in keys[1:])
    codec = jc.Quantized(4, group_size=8)

    def small(w, x):
        return jnp.tanh(x @ w[0]) @ w[1]

    def make_gradient(policy):
        wrapped = jc.checkpoint(small, policy=policy, params=0)
        # x is differentiated, as a block's input is: else it is no candidate.
        loss = lambda wx: jnp.sum((wrapped(*wx) - target) ** 2)  # noqa: E731
        return jax.grad(loss), ((w, x),)

    def by_hand(stored):
        dy = 2 * (small(w, x) - target)
        h = jnp.tanh(stored["dot_general.0"])
        da = (dy @ w[1].T) * (1 - h**2)
        return flat([stored["x"].T @ da, h.T @ dy, da @ w[0].T])

    stored = {"x": x, "dot_general.0": x @ w[0]}
    g, jacobian = by_hand(stored), jax.jacobian(by_hand)(stored)
    found = jc.sensitivity(make_gradient, codecs=[codec], probes=400)
    for name, value in stored.items():
        noise = codec.decode(codec.encode(value)) - value
        expected = jnp.sum((jacobian[name] * noise[None]) ** 2) / jnp.sum(g**2)
        # (v J)_k^2 has a standard deviation of at most sqrt(2) times its mean: over 400
        # probes 7 %, less for the sum; four of these.
        assert found.effects[name].errors[codec] == pytest.approx(
            float(expected), rel=0.28
        )


@pytest.mark.slow
def test_it_is_one_pass_for_all():
    traced = []

    def counted(w, x):
        traced.append(x)
        return block(w, x)

    made = []

    def make(policy):
        made.append(policy)
        return make_gradient(policy, counted)

    jc.sensitivity(make, codecs=CODECS[:2], probes=8)
    assert len(made) <= 3 and len(traced) <= 6  # of 7 tensors, 16 codecs, 8 probes


@pytest.mark.slow
def test_masks_slopes_and_loops_are_left_alone():
    """A block with dropout, relu and a loop: exact codecs are not measured."""

    def other(w, x):
        y = jax.nn.relu(x @ w["q"])
        keep = jax.random.bernoulli(jax.random.key(3), 0.9, y.shape)
        y = jnp.where(keep, y / 0.9, 0.0)
        y, _ = jax.lax.scan(lambda y, _: (jnp.sin(y @ w["k"]), None), y, length=2)
        return x + jax.nn.gelu(y @ w["v"]) @ w["o"]

    found = jc.sensitivity(lambda policy: make_gradient(policy, other))
    # relu keeps a bit, and what the loop is of follows from the mask.
    assert set(found.effects) == {"x", "scan.0", "dot_general.1"}
    assert all(e > 0 for f in found.effects.values() for e in f.errors.values())


@pytest.mark.slow
def test_noise_in_what_has_no_gradient(exact):
    """It moves the gradients of others."""

    def stopped(w, x):
        y = x @ w["q"]
        return x + (y @ w["o"]) * jax.lax.stop_gradient(jnp.sin(x @ w["k"]))

    def make(policy):
        return make_gradient(policy, stopped)

    found = jc.sensitivity(make)
    of, args = make(jc.policies.int4())
    g, e = flat(of(*args)), flat(make(jc.Policy())[0](*args))
    error = jnp.linalg.norm(g - e) / jnp.linalg.norm(e)
    codecs = {n: next(iter(f.errors)) for n, f in found.effects.items()}
    assert found.error(codecs) == pytest.approx(float(error), rel=0.1)


@pytest.mark.parametrize("limit", [0.0, 0.02, 0.1])
def test_a_plan_counts_with_it(found, exact, limit):
    """What the solver bounds is the gradient's error."""
    base = jc.policies.int4()
    traces = block_of(make_gradient, base, "make_gradient")
    asked = without_host(problem(traces, base, (), devices()["h200"], found))
    items = []
    for item in asked.items:  # as when it was measured
        stored = item.tensor.name in found.effects or item.tensor.divisor
        options = item.options if stored else ()
        items.append(dataclasses.replace(item, again=not stored, options=options))
    asked = dataclasses.replace(asked, items=tuple(items))
    solution = solve(asked, noise=limit**2, smallest=True)
    actions = asked.actions | named(asked.items, solution.chosen)
    assert solution.noise**0.5 <= limit * (1 + 1e-6)
    assert solution.noise**0.5 == pytest.approx(found.error(actions))
    error = jnp.linalg.norm(gradient(jc.Policy(actions)) - exact)
    assert float(error / jnp.linalg.norm(exact)) == pytest.approx(
        found.error(actions), rel=0.1, abs=1e-5
    )
    # At 0.02 all are in 8 bits, which err by 0.009; any one's next codec, by more.
    assert (solution.noise > 0.15 * limit**2) == (limit > 0)


def test_modules_are_arguments():
    """As their states are."""
    model, x = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), X[0, :, :16]
    graphdef, state = nnx.split(model)

    def loss(policy):
        block = jc.checkpoint(lambda x, w: jnp.tanh(x @ w), policy=policy, params=1)
        return lambda model, x: jnp.sum(block(jnp.sin(x), model.kernel[...]) ** 2)

    def of_state(policy):
        def gradient(state, x):
            return jax.grad(lambda s: loss(policy)(nnx.merge(graphdef, s), x))(state)

        return gradient, (state, x)

    found = jc.sensitivity(lambda policy: (nnx.grad(loss(policy)), (model, x)))
    assert found == jc.sensitivity(of_state) and found.effects


def test_static_arguments():
    """Of a jitted gradient, as `jc.memory.peak` takes them."""

    def made(jitted, *how):
        def make_gradient(policy):
            block = jc.checkpoint(lambda w, x: jnp.tanh(x @ w), policy=policy, params=0)

            def gradient(w, x, how):
                assert how in (2, "twice")
                return jax.grad(lambda w: jnp.sum(2 * block(w, jnp.sin(x)) ** 2))(w)

            return jitted(gradient), (X[0, :16, :16], X[0, :, :16], *how)

        return jc.sensitivity(make_gradient)

    expected = made(lambda gradient: lambda w, x: gradient(w, x, 2))
    for how in (2, "twice"):
        found = made(lambda gradient: jax.jit(gradient, static_argnums=2), how)
        assert found == expected


@pytest.mark.slow
def test_automatic_beats_uniform(found, exact):
    """At the bytes of uniform codecs, on the gradient itself."""
    for codec in CODECS[1::2]:
        uniform = dict.fromkeys(found.effects, codec)
        policy = found.policy(found.bits(uniform))
        errors = [
            jnp.linalg.norm(gradient(p) - exact)
            for p in (policy, jc.Policy(uniform, default=found.base))
        ]
        assert errors[0] <= errors[1] * 1.01, codec


# --- what is refused ---


def test_a_gradient_that_is_not_finite():
    def bad(w, x):
        return x + jnp.sin(x @ w["q"]) @ w["o"] / jnp.zeros(())

    with pytest.raises(ValueError, match="sensitivity of 'x' in 'bad' is nan: the gra"):
        jc.sensitivity(lambda policy: make_gradient(policy, bad))


@pytest.mark.slow
def test_a_policy_of_rules_and_another_dtype():
    """What it finds is a policy for the same block."""
    base = jc.Policy({"*": jc.Quantized(4)}, default=jc.Save())

    def make(policy):
        w, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS, X))
        wrapped = jc.checkpoint(linear, policy=policy, params=0)
        loss = lambda w, x: wrapped(w, x).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss), ({"q": w["q"][0], "o": w["o"][0]}, x)

    def linear(w, x):
        return x + jax.nn.softmax(jnp.sin(x @ w["q"]), axis=-1) @ w["o"]

    found = jc.sensitivity(make, policy=base)
    of, args = make(found.policy(4.25))
    assert jnp.isfinite(flat(of(*args))).all()


@pytest.mark.slow
def test_rows_that_are_alike_err_alike():
    """As padding does: where a loss takes their mean, all of them together."""
    w = {n: w[0] for n, w in PARAMS.items()}
    rows = jnp.broadcast_to(X[:, :1], X.shape) + 0.01 * X

    def block(w, x):
        return x + jnp.tanh(x @ w["q"]) @ w["o"]

    def make(policy):
        wrapped = jc.checkpoint(block, policy=policy, params=0)

        def loss(w, x):
            return jnp.square(wrapped(w, x).mean(1) - TARGET[:, 0]).mean()

        return jax.grad(loss), (w, rows)

    def gradient(policy):
        of, args = make(policy)
        return flat(jax.jit(of)(*args))

    exact = gradient(jc.Policy())
    found = jc.sensitivity(make, probes=16)
    for codec in (jc.Quantized(4), jc.Quantized(2, group_size=32)):
        only = {"dot_general.0": codec}
        moved = gradient(jc.Policy(only, default=jc.Save())) - exact
        real = float(jnp.linalg.norm(moved) / jnp.linalg.norm(exact))
        # Of 16 random signs the mean square is known to 35 %, the root to 18.
        assert found.error(only) == pytest.approx(real, rel=0.4)
        # What is found by a gradient is no less than that.
        measured = found.under({"x": jc.Save()} | only).error(only)
        assert real * 0.99 < measured < 1.6 * real


@pytest.mark.slow
def test_the_gradient_alone_is_measured():
    """What else is returned would count as a part of it that no rounding moves."""
    w = {"up": normal(0, 2, 32, 64) / 6, "down": normal(1, 2, 64, 32) / 8}
    args = w, normal(2, 64, 32), jnp.float32(1)

    def make(of, *args, **options):
        def make_gradient(policy):
            @partial(jc.checkpoint, policy=policy, params=0)
            def block(w, x):
                return x + jnp.tanh(x @ w["up"]) @ w["down"]

            def loss(w, x, scale):
                y, _ = jax.lax.scan(lambda x, w: (block(w, x), None), x, w)
                value = scale * jnp.square(y).mean()
                return (value, y) if options.get("has_aux") else value

            return of(loss, **options), args

        return make_gradient

    found = jc.sensitivity(make(jax.grad, *args))
    for of in (
        make(jax.grad, *args, has_aux=True),
        make(jax.value_and_grad, *args),
        make(jax.value_and_grad, *args, has_aux=True),
    ):
        with pytest.raises(ValueError, match="the gradient alone, as jax.grad does"):
            jc.sensitivity(of)
    several = jc.sensitivity(make(jax.grad, *args, argnums=(0, 1)))
    assert several.effects.keys() >= found.effects.keys()

    def of_a_tuple(policy):
        """Whose last part is a bias that no rounding moves."""
        wrapped = jc.checkpoint(
            lambda w, x: jnp.tanh(x @ w[0]) @ w[1] + w[2], policy=policy, params=0
        )
        w = normal(0, 32, 64) / 6, normal(1, 64, 32) / 8, jnp.zeros((1, 32))
        return jax.grad(lambda w, x: wrapped(w, x).sum()), (w, normal(2, 64, 32))

    assert jc.sensitivity(of_a_tuple).effects


def test_one_that_is_pickled(found):
    again = pickle.loads(pickle.dumps(found))
    assert again == found and again.under({}) is again


def test_what_is_refused(found):
    with pytest.raises(
        ValueError, match=r"must return arrays, .* got Shape.* at args/0/down"
    ):
        shapes = jax.eval_shape(lambda: (PARAMS, X))
        jc.sensitivity(lambda p: (make_gradient(p)[0], shapes))
    with pytest.raises(ValueError, match="policy must encode something of 'block'"):
        jc.sensitivity(make_gradient, policy=jc.Policy())
    with pytest.raises(ValueError, match="probes must be a positive int, got 0"):
        jc.sensitivity(make_gradient, probes=0)
    with pytest.raises(ValueError, match="make_gradient must return .* got none"):
        jc.sensitivity(lambda policy: (jax.grad(jnp.sum), (X,)))
    with pytest.raises(ValueError, match=r"must return \(gradient, args\), .*got int"):
        jc.sensitivity(lambda policy: 3)
    with pytest.raises(ValueError, match=r"codecs must be codecs, .* got \['x'\]"):
        jc.sensitivity(make_gradient, codecs=["x"])
    with pytest.raises(ValueError, match=r"bits must be 2.50 or more, .*; got 2"):
        found.policy(2)
    with pytest.raises(ValueError, match="bits must be .*got nan"):
        found.policy(float("nan"))
    for bits in ("4", None):
        with pytest.raises(ValueError, match=f"bits must be a number, got {bits!r}"):
            found.policy(bits)
    with pytest.raises(ValueError, match="actions must map each of x, .*to a codec"):
        found.bits({"x": jc.Quantized(4)})
    for read in (found.error, found.under):
        with pytest.raises(ValueError, match="actions must map names to actions, got"):
            read({"x": 4})


def test_it_can_be_read(found):
    lines = str(found).splitlines()
    assert lines[0] == "block" and len(lines) == 1 + len(found.effects)
    assert lines[1].split()[0] == "x" and "%" in lines[1]
    assert dataclasses.replace(found, block="other") != found
