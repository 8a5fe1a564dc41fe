"""Plans, as a user makes, reads and edits them; their steps are compiled for a card."""

import dataclasses
import json
import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcompact as jc
from jaxcompact.kernels import choice
from tests.errors import relative
from tests.planner.blocks import FF, LAYERS, MIB, PARAMS, D, X, block, of

HUGE = 10**400  # no float
MADE_UP = jc.Plan("block", {"x": jc.Save()}, "h200", 2**30, 0.0, 2**20, 0.0, 2**21)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """`jc.plan` of the block; plans and compiles are kept between tests."""
    folder = tmp_path_factory.mktemp("cache")

    @cache
    def plan(budget, **options):
        lines = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAXCOMPACT_CACHE", str(folder))
            options = {"layers": LAYERS, "progress": lines.append} | options
            found = jc.plan(block, PARAMS, X, budget=budget, **options)
        assert 1 <= len(lines) <= 6
        times = [int(re.search(r"(\d+) us", line)[1]) for line in lines]
        for i, line in enumerate(lines[2:], 2):  # corrected by then
            sizes = re.findall(r"([\d.]+) MiB[:;]? (?:\d+ us|expected)", line)
            peak, expected = map(float, sizes)
            # What is on its way to the host, in plans that take so long, is not
            # modelled: of this one or of that which corrected it up to one array.
            on_its_way = 8192 * FF * 2 / MIB if max(times[i - 1 : i + 1]) > 500 else 0
            assert abs(expected - peak) < max(0.05 * peak, on_its_way), lines
        return found

    return plan


def gradient(policy):
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        name: jax.random.normal(key, s.shape) / s.shape[0] ** 0.5
        for key, (name, s) in zip(keys, PARAMS.items(), strict=False)
    }
    x = jax.random.normal(keys[3], (64, D))
    fun = block if policy is None else jc.checkpoint(block, policy=policy, params=0)
    return jax.grad(lambda p: jnp.square(fun(p, x)).mean())(params)


@pytest.mark.slow
def test_budgets_are_kept_and_used(plan):
    """More memory is never slower, and what is over is too little for a better plan."""
    plans = [plan(f"{mib}MiB") for mib in (190, 250, 300, 400, 1000)]
    for found in plans:
        assert found.peak_bytes <= found.budget
    times = [found.seconds for found in plans]
    assert times == sorted(times, reverse=True) and times[-1] < times[0] / 2
    assert all(p.peak_bytes > 0.85 * p.budget for p in plans[:-1])
    assert plans[-1].peak_bytes < 0.6 * plans[-1].budget and plans[-1].error == 0


@pytest.mark.slow
def test_budgets_are_kept_with_a_cards_kernels(tmp_path, monkeypatch):
    """Those of an H200 need other memory beside what is stored."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    with choice.using(None):
        found = jc.plan(block, PARAMS, X, layers=LAYERS, budget="250MiB")
    assert 0.7 * found.budget < found.peak_bytes <= found.budget


@pytest.mark.slow
def test_a_larger_budget_is_not_slower(tmp_path, monkeypatch):
    """Of a block whose sizes the model is far from."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))

    def mlp(w, x):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"]

    args = {"up": of(256, 1024), "down": of(1024, 256)}, of(4096, 256)
    asked = {"layers": 4, "device": "h100", "progress": lambda line: None}
    found = [
        jc.plan(mlp, *args, budget=f"{budget}MiB", **asked) for budget in (43, 49, 49.5)
    ]
    times = [each.seconds for each in found]
    assert times == sorted(times, reverse=True)


@pytest.mark.slow
def test_the_peak_is_the_programs(plan):
    found = plan("250MiB")
    wrapped = jc.checkpoint(block, policy=found, params=0, prevent_cse=False)

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, p: (wrapped(p, x), None), x, params)
        return jnp.sum(x, dtype=jnp.float32)

    stacked = jax.tree.map(lambda s: of(LAYERS, *s.shape), PARAMS)
    peak = jc.memory.peak(jax.grad(loss), stacked, X)
    assert abs(peak.peak_bytes / found.peak_bytes - 1) < 0.01


@pytest.mark.slow
def test_it_is_a_policy(plan):
    found = plan("250MiB")
    error = relative(gradient(found), gradient(None))
    assert 0.001 < error < 2 * found.error
    said = jc.explain(block, PARAMS, X, policy=found, params=0)
    assert said.stored == found.nbytes
    again = plan.__wrapped__("250MiB")
    assert found == again and hash(found) == hash(again)


@pytest.mark.slow
def test_without_error_it_is_exact(plan):
    found = plan("250MiB", max_error=0.0)
    assert found.error == 0 and found.seconds > plan("250MiB").seconds
    assert relative(gradient(found), gradient(None)) < 1e-5
    some = plan("250MiB", max_error=0.05)
    assert 0 < some.error <= 0.05


@pytest.mark.slow
def test_other_codecs(plan):
    found = plan("250MiB", codecs=(jc.Float8(),))
    used = {type(action) for action in found.actions.values()}
    assert jc.Float8 in used and jc.Quantized not in used


def test_as_json(plan, tmp_path):
    found = plan("250MiB")
    (tmp_path / "plan.json").write_text("{")  # is replaced
    found.save(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert jc.Plan.load(tmp_path / "plan.json") == found
    data = json.loads((tmp_path / "plan.json").read_text())
    data["actions"]["x"] = {"action": "Float8"}
    edited = jc.Plan.from_json(json.dumps(data))
    assert edited.actions["x"] == jc.Float8() and edited != found
    assert relative(gradient(edited), gradient(None)) < 0.5
    nested = {
        "x": jc.Chain(jc.Hadamard(64), jc.Quantized(4, 32)),
        "y": jc.Derivative(jc.BitMask()),
    }
    other = dataclasses.replace(found, actions=nested)
    assert jc.Plan.from_json(other.to_json()) == other


def test_how_its_error_is_known_is_printed():
    measured = dataclasses.replace(MADE_UP, error=0.125, measured=True)
    assert "gradient error 0.0% (modelled)" in str(MADE_UP)
    assert "gradient error 12.5% (measured)" in str(measured)
    assert "gradient error 12.5% (measured)" in str(
        jc.Plan.from_json(measured.to_json())
    )


def test_a_plan_that_cant_be_written_leaves_nothing(tmp_path):
    with pytest.raises(IsADirectoryError):
        MADE_UP.save(tmp_path)
    assert list(tmp_path.parent.glob(f"{tmp_path.name}*")) == [tmp_path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan: it is none: Expecting"),
        ("[]", "plan: it must have block, actions, .* and measured, got list"),
        ("{}", "plan: it must have block, .* and measured, got nothing"),
        ('{"actions": {}}', "plan: it must have block, .*, got actions$"),
    ],
)
def test_json_that_is_no_plan(text, message):
    with pytest.raises(ValueError, match=message):
        jc.Plan.from_json(text)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block", 3, "plan: block must be a string, got 3"),
        ("actions", [], r"plan: actions must be an object, got \[\]"),
        ("device", "h2o", "device must be one of .*, got 'h2o'"),
        ("budget", "7GiB", "plan: budget must be a whole number, got '7GiB'"),
        ("nbytes", 1.5, "plan: nbytes must be a whole number, got 1.5"),
        ("peak_bytes", True, "plan: peak_bytes must be a whole number, got True"),
        ("measured", 1, "plan: measured must be true or false, got 1"),
        ("seconds", None, "plan: seconds must be a number, got None"),
        ("error", "0", "plan: error must be a number, got '0'"),
        ("error", math.nan, "plan: NaN is no number"),
        ("error", HUGE, r"plan: error must be below 1e\+18"),
        ("budget", HUGE, r"plan: budget must be below 1e\+18"),
        ("seconds", math.inf, "plan: Infinity is no number"),
        ("name", "x", "plan: it must have block, .*, got .*, name"),
    ],
    ids=lambda value: "huge" if value is HUGE else None,
)
def test_json_with_another_field(name, value, message):
    with pytest.raises(ValueError, match=message):
        jc.Plan.from_json(json.dumps(json.loads(MADE_UP.to_json()) | {name: value}))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"action": "Zip"}, "must be one of Save, .*, got 'Zip'"),
        ({"action": "Codec"}, "must be one of Save, .*, got 'Codec'"),
        ({"action": ["Save"]}, r"must be one of Save, .*, got \['Save'\]"),
        ({"bits": 4}, "must be one of Save, .*, got None"),
        ("Save", "the action of 'x' must be an object such as"),
        ({"action": "Chain"}, r"codecs must be one or more codecs, got \(\)"),
        ({"action": "Chain", "codecs": 3}, "plan: the action of 'x': .*iterable"),
        ({"action": "Derivative", "codec": {}}, "must be one of Save, .*, got None"),
        ({"action": "Quantized", "bits": 5}, "plan: the action of 'x': bits must be"),
        ({"action": "Save", "bits": 5}, "plan: the action of 'x': .*bits"),
        ({"action": "Derivative"}, "plan: the action of 'x': .*codec"),
    ],
)
def test_json_with_another_action(action, message):
    data = json.loads(MADE_UP.to_json()) | {"actions": {"x": action}}
    with pytest.raises(ValueError, match=message):
        jc.Plan.from_json(json.dumps(data))


def test_of_another_function(plan):
    found = plan("250MiB")

    def other(params, x):
        return jnp.tanh(x @ params["gate"]) @ params["down"] @ jnp.ones((D, D), x.dtype)

    wrapped = jc.checkpoint(other, policy=found, params=0)
    x, params = jax.tree.map(lambda s: jnp.ones(s.shape), (X, PARAMS))
    with pytest.raises(ValueError, match="made for another function: 'block' had no"):
        jax.grad(lambda p: wrapped(p, x).sum())(params)

    def less(params, x):
        return x @ params["gate"] @ params["down"]

    wrapped = jc.checkpoint(less, policy=found, params=0)
    with pytest.raises(ValueError, match="matches no tensor of 'less'"):
        jax.grad(lambda p: wrapped(p, x).sum())(params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "20MiB"}, r"budget must be [\d.]+ MiB or more.*got 20.00 MiB"),
        ({"budget": "200GiB"}, "budget must be within the 140.40 GiB of 'h200'"),
        ({"budget": "7 apples"}, "budget must be"),
        ({"budget": "1GiB", "device": "h2o"}, "device must be one of"),
        ({"budget": "1GiB", "max_error": -1}, "max_error must be 0 or more, got -1"),
        ({"budget": "1GiB", "layers": 0}, "layers must be a positive int, got 0"),
    ],
)
def test_what_is_refused(plan, options, message):
    with pytest.raises(ValueError, match=message) as refused:
        plan(**options)
    assert refused.type is ValueError  # no name that users can't import


def test_a_block_that_is_checkpointed_already():
    with pytest.raises(ValueError, match="the function itself, got 'block', which jc"):
        jc.plan(jc.checkpoint(block, params=0), PARAMS, X, budget="1GiB")


def test_a_block_that_does_not_map_its_input_to_one_like_it():
    def head(params, x):
        return x @ params["gate"]

    with pytest.raises(ValueError, match="must map its argument 1 to one like it"):
        jc.plan(head, PARAMS, X, budget="1GiB")


@pytest.mark.parametrize(
    ("args", "params", "message"),
    [
        ((), 0, "args must hold one that is no parameter"),
        ((PARAMS,), 0, "args must hold one that is no parameter"),
        ((PARAMS, X), (), r"params must name an argument to train, got \(\)"),
        ((PARAMS, X), 5, "params must be below the number of arguments 2, got 5"),
        ((PARAMS, X), "params", "params must be argument numbers .*, got 'params'"),
    ],
)
def test_arguments_of_a_block(args, params, message):
    with pytest.raises(ValueError, match=message):
        jc.plan(block, *args, params=params)


def test_a_state_with_a_random_key():
    """What is differentiated of a block's input are its numbers."""

    def block(w, state):
        x, key = state
        return jnp.sin(x @ w), jax.random.split(key)[0]

    state = of(64, 64), jax.eval_shape(lambda: jax.random.key(0))
    found = jc.plan(block, of(64, 64), state, layers=2, budget="1GiB")
    assert found.error == 0


def test_a_number_is_an_argument():
    found = jc.plan(lambda w, x: jnp.sin(x * w), jnp.float32(2), 3.0, budget="1GiB")
    assert found.error == 0
    fun = lambda p, x: jnp.sin(x @ p["w"]) * p["scale"]  # noqa: E731
    params, x = {"w": jnp.ones((64, 64)), "scale": 2.0}, jnp.ones((64, 64))
    assert jc.plan(fun, params, x, budget="1GiB").error == 0


@pytest.mark.slow
def test_a_module_is_a_parameter(tmp_path, monkeypatch):
    """With what else it holds: counts and keys of random numbers."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))

    class Block(nnx.Module):
        def __init__(self, rngs):
            kind = {"param_dtype": jnp.bfloat16, "use_bias": False, "rngs": rngs}
            self.up, self.down = nnx.Linear(D, FF, **kind), nnx.Linear(FF, D, **kind)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.sin(self.up(x)))

    def plain(w, x):
        return x + jnp.sin(x @ w[0]) @ w[1]

    w = of(D, FF), of(FF, D)
    model = nnx.eval_shape(lambda: Block(nnx.Rngs(0)))
    quiet = {"layers": 2, "progress": lambda line: None}
    found = jc.plan(
        lambda m, x: m(x), model, of(4096, D), params=nnx.Param, budget="70MiB", **quiet
    )
    same = jc.plan(plain, w, of(4096, D), budget="70MiB", **quiet)
    assert found.seconds == same.seconds > 0 and found.nbytes == same.nbytes


@pytest.mark.parametrize("fun", [lambda w, x: x, lambda w, x: w])
def test_a_block_of_which_nothing_is_stored(fun, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    found = jc.plan(fun, X, X, progress=lambda line: None)
    assert found.nbytes == found.seconds == 0


@pytest.mark.slow
def test_the_budget_that_is_asked_for_is_enough(plan):
    with pytest.raises(ValueError, match="budget must be .* or more") as refused:
        plan("1MiB")
    [least] = re.findall(r"must be (.*) or more", str(refused.value))
    found = plan(least.replace(" ", ""))
    assert found.peak_bytes <= found.budget


def attention(w, x):
    scores = jnp.einsum("btd,bsd->bts", x @ w["q"], x @ w["k"])
    return x + jax.nn.softmax(scores / 8) @ x


@pytest.mark.parametrize(
    ("made", "used"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_of_another_dtype(made, used, monkeypatch, tmp_path):
    """A softmax is rounded between its functions, which are then one more."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    keys = jax.random.split(jax.random.key(0), 3)
    w = {"q": jax.random.normal(keys[0], (64, 64)) / 8}
    w["k"] = jax.random.normal(keys[1], (64, 64)) / 8
    x = jax.random.normal(keys[2], (2, 32, 64))

    def cast(tree, dtype):
        return jax.tree.map(lambda a: a.astype(dtype), tree)

    told = {"progress": lambda line: None, "device": "h200", "max_error": 0.0}
    found = jc.plan(attention, *cast((w, x), made), layers=2, **told)

    def gradient(policy):
        block = jc.checkpoint(attention, policy=policy, params=0)
        w_, x_ = cast((w, x), used)
        return jax.grad(lambda w: jnp.square(block(w, x_)).sum())(w_)

    assert relative(gradient(found), gradient(jc.Policy())) < 1e-6
