"""Plans, as a user makes, reads and edits them; their steps are compiled for a card."""

import dataclasses
import json
import math
import re
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxcompact as jc
from jaxcompact.planner import candidates, search
from jaxcompact.planner.block import block_of
from jaxcompact.planner.effects import noise
from jaxcompact.planner.milp import solve
from jaxcompact.planner.problem import CODECS, problem_of

MIB = 2**20
D, FF, LAYERS = 512, 1408, 8


def block(params, x):
    y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    h = jax.nn.silu(y @ params["gate"]) * (y @ params["up"])
    return x + h @ params["down"]


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


PARAMS = {"gate": of(D, FF), "up": of(D, FF), "down": of(FF, D)}
X = of(8192, D)
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
        assert 1 <= len(lines) <= 3
        for line in lines[2:]:  # corrected by then
            sizes = re.findall(r"([\d.]+) MiB[:;]? (?:\d+ us|expected)", line)
            peak, expected = map(float, sizes)
            # What is on its way to the host is not modelled: 4 % here, 1 % without it.
            assert abs(expected / peak - 1) < 0.05, lines
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


def relative(a, b):
    a, b = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


@pytest.mark.slow
def test_budgets_are_kept_and_used(plan):
    """More memory is never slower, and what is over is too little for a better plan."""
    plans = [plan(f"{mib}MiB") for mib in (190, 220, 300, 350, 400, 1000)]
    for found in plans:
        assert found.peak_bytes <= found.budget
    times = [found.seconds for found in plans]
    assert times == sorted(times, reverse=True) and times[-1] < times[0] / 2
    assert all(p.peak_bytes > 0.85 * p.budget for p in plans[:5])
    assert plans[-1].peak_bytes < 0.6 * plans[-1].budget and plans[-1].error == 0


def test_the_peak_is_the_programs(plan):
    found = plan("250MiB")
    wrapped = jc.checkpoint(block, policy=found, params=0, prevent_cse=False)

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, p: (wrapped(p, x), None), x, params)
        return jnp.sum(x, dtype=jnp.float32)

    stacked = jax.tree.map(lambda s: of(LAYERS, *s.shape), PARAMS)
    peak = jc.memory.peak(jax.grad(loss), stacked, X)
    assert abs(peak.peak_bytes / found.peak_bytes - 1) < 0.01


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
    some = plan("410MiB", max_error=0.05)
    assert 0 < some.error <= 0.05


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


def test_a_plan_that_cant_be_written_leaves_nothing(tmp_path):
    with pytest.raises(IsADirectoryError):
        MADE_UP.save(tmp_path)
    assert list(tmp_path.parent.glob(f"{tmp_path.name}*")) == [tmp_path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan: it is none: Expecting"),
        ("[]", "plan: it must have block, actions, .* and peak_bytes, got list"),
        ("{}", "plan: it must have block, .* and peak_bytes, got nothing"),
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
    with pytest.raises(ValueError, match=message):
        plan(**options)


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
        ((PARAMS, X), 5, "params must be below the number of arguments 2, got 5"),
        ((PARAMS, X), "params", "params must be argument numbers .*, got 'params'"),
    ],
)
def test_arguments_of_a_block(args, params, message):
    with pytest.raises(ValueError, match=message):
        jc.plan(block, *args, params=params)


def test_of_a_step_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    seen = []

    def make_step(policy):
        seen.append(policy)
        wrapped = jc.checkpoint(block, policy=policy, params=0)

        def step(params, x):
            grads = jax.grad(lambda p: wrapped(p, x).sum().astype(jnp.float32))(params)
            return jax.tree.map(lambda p, g: p - g, params, grads)

        return jax.jit(step, donate_argnums=0), (PARAMS, X)

    lines = []
    found = jc.plan_step(make_step, budget="160MiB", progress=lines.append)
    traced, sized, *compiled = seen
    assert len(compiled) == len(lines) and found in compiled
    assert found.peak_bytes <= 160 * MIB


# The block's layers can store 0 (with the host's help), 14.125, 55.625, 64.375, ...,
# 231.625, 240.125, 278.625, ... and 416.125 MiB, the more the faster, beside 41 MiB of
# arguments.
@pytest.mark.parametrize(
    ("budget", "beside", "stored"),
    [
        pytest.param(500, [41], [416.125], id="all fits"),
        pytest.param(970.5, [905, 905], [416.125, 55.625], id="with a margin"),
        pytest.param(382, [141, 141], [278.625, 240.125], id="much left by a margin"),
        pytest.param(
            382, [141, 143, 143], [278.625, 240.125, 231.625], id="just above"
        ),
        pytest.param(
            382, [141, 160, 160], [278.625, 240.125, 190.125], id="by the most beside"
        ),
        pytest.param(
            382,
            [141, 160, 200, 200],
            [278.625, 240.125, 190.125, 14.125],
            id="not understood",
        ),
        pytest.param(382, [91, 91], [278.625], id="the first fits"),
        pytest.param(382, [61, 61], [278.625], id="a faster one would not"),
        pytest.param(500, [600, 485], [416.125, 14.125], id="just possible"),
        pytest.param(500, [600, 490, 490], [416.125, 14.125, 0], id="with the host"),
    ],
)
def test_which_plans_are_compiled(monkeypatch, budget, beside, stored):
    """By what their programs take beside what they store."""
    tried = []

    def stored_alone(asked, chosen, layers):
        return layers * sum(option.nbytes for option in chosen if option)

    def peak(step, *args, device):
        tried.append(steps[-1].nbytes * LAYERS / MIB)
        return SimpleNamespace(
            peak_bytes=int((tried[-1] + beside[len(tried) - 1]) * MIB)
        )

    def make_step(policy):
        steps.append(policy)
        return scanned(policy)

    steps, scanned = [], search.scan_step(block, (PARAMS, X), LAYERS, 0)
    monkeypatch.setattr(search, "peak", peak)
    monkeypatch.setattr(candidates, "alive", stored_alone)
    found = jc.plan_step(make_step, layers=LAYERS, budget=f"{budget}MiB")
    assert tried == stored
    assert found.nbytes * LAYERS / MIB == stored[-1]


def test_arguments_lie_on_several_devices(tmp_path, monkeypatch):
    """Of what an optimizer knows, a fourth is here, and seen to fit at once."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=types)
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    moments = jax.ShapeDtypeStruct((2**14, 2**14), jnp.bfloat16, sharding=sharding)
    scanned = search.scan_step(block, (PARAMS, X), LAYERS, 0)

    def make_step(policy):
        step, args = scanned(policy)
        return lambda state, *args: (step(*args), state), (moments, *args)

    lines = []
    found = jc.plan_step(
        make_step, layers=LAYERS, budget="800MiB", progress=lines.append
    )
    assert found.seconds == 0 and len(lines) == 1  # 512 MiB, and 457 beside them


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_block_in_a_shard_map(kind, tmp_path, monkeypatch):
    """Whose weights two devices share; what rounding does to it is measured."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    types = (jax.sharding.AxisType[kind],)
    mesh = jax.make_mesh((2,), ("d",), axis_types=types)
    params = {
        "up": jax.random.normal(jax.random.key(0), (64, 256)) / 8,
        "down": jax.random.normal(jax.random.key(1), (256, 64)) / 16,
    }
    specs = {"up": jax.P(None, "d"), "down": jax.P("d")}

    def shared(w, x):
        return x + jax.lax.psum(jax.nn.gelu(x @ w["up"]) @ w["down"], "d")

    def make_step(policy):
        wrapped = jc.checkpoint(shared, policy=policy, params=0)
        mapped = jax.shard_map(wrapped, in_specs=(specs, jax.P()), out_specs=jax.P())
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(3 * mapped(w, x)))), args

    with jax.set_mesh(mesh):
        place = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
        x = jax.random.normal(jax.random.key(2), (128, 64))
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P()))
        args = jax.device_put(params, place), x
        found = jc.plan_step(make_step, budget="1GiB")
        assert found.actions["dot_general.0"] == jc.Save()
        if kind == "Explicit":  # jax does not take there what measures it
            return
        effects = jc.sensitivity(make_step)
        exact, rounded = (
            jax.jit(make_step(policy)[0])(*args)
            for policy in (jc.Policy(), jc.policies.int4())
        )
        actions = dict.fromkeys(effects.effects, jc.Quantized(4))
        # Measured by one probe of a sum of squares.
        assert relative(rounded, exact) == pytest.approx(
            effects.error(actions), rel=0.3
        )


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


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_weights_lie_on_several_devices(kind):
    """Each of two has half of the layers' weights, and of their gradients."""
    types = (jax.sharding.AxisType[kind],)
    mesh = jax.sharding.AbstractMesh((2,), ("tensor",), axis_types=types)

    def shared(x, *spec):
        place = jax.NamedSharding(mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    def of_types(params, x):
        place = jax.typeof(x).sharding
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        h = jax.nn.silu(y @ params["gate"]) * (y @ params["up"])
        return x + jnp.matmul(h, params["down"], out_sharding=place)

    params = {name: shared(PARAMS[name], None, "tensor") for name in ("gate", "up")}
    params["down"] = shared(PARAMS["down"], "tensor")
    fun = of_types if kind == "Explicit" else block
    [step, args] = search.scan_step(fun, (params, shared(X)), LAYERS, 0)(jc.Policy())
    weights = LAYERS * 3 * 2 * D * FF
    found = jc.memory.peak(step, *args)
    assert found.breakdown["inputs"] == weights // 2 + 2 * X.size
    pointers = 3 * 8
    assert found.breakdown["outputs"] == weights // 2 + pointers


@pytest.mark.parametrize("count", [4, 64])
def test_values_lie_on_several_devices(count):
    """Whose types say so: the problem is that of one device's part."""
    card = jc.memory.devices()["h200"]

    def asked(*args):
        make_step = search.scan_step(block, args, LAYERS, 0)
        return problem_of(make_step, card, 0.2, None, CODECS)[1]

    types = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.AbstractMesh((count,), ("data",), axis_types=types)

    def shared(x, *spec):
        place = jax.NamedSharding(mesh, jax.P(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    one = asked(PARAMS, X)
    parts = asked(jax.tree.map(shared, PARAMS), shared(of(count * 8192, D), "data"))
    assert [i.options for i in parts.items] == [i.options for i in one.items]
    assert [*parts.runs.values()] == [*one.runs.values()] and sum(one.runs.values()) > 0
    assert parts.stages.cotangents == one.stages.cotangents
    assert [*parts.stages.sizes.values()] == [*one.stages.sizes.values()]


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


def test_what_is_no_step():
    rule = r"make_step must return \(step, args\), a function and a tuple, got "
    with pytest.raises(ValueError, match=f"^{rule}int$"):
        jc.plan_step(lambda policy: 3)
    with pytest.raises(ValueError, match=rf"^{rule}\(.*, ShapeDtypeStruct\)$"):
        jc.plan_step(lambda policy: (jnp.sin, X))


def test_a_step_without_a_block():
    def make_step(policy):
        return jnp.sin, (X,)

    with pytest.raises(ValueError, match="checkpoints one block .*, got none"):
        jc.plan_step(make_step)


def test_a_step_of_two_blocks():
    def make_step(policy):
        def loss(w, x):
            for name in ("first", "second"):
                fun = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
                fun.__name__ = name
                x = jc.checkpoint(fun, policy=policy, params=0)(w, x)
            return x.sum().astype(jnp.float32)

        return jax.grad(loss), (of(D, D), X)

    with pytest.raises(ValueError, match="one block .* got 'first', 'second'"):
        jc.plan_step(make_step)


@pytest.mark.parametrize(("shapes", "one"), [((64, 64), True), ((64, 32), False)])
def test_layers_that_are_not_in_a_scan(shapes, one):
    """Alike, they share a plan."""

    def make(policy):
        def layer(w, x):
            return jnp.tanh(x @ w)

        def loss(ws, x):
            for w in ws:
                x = jc.checkpoint(layer, policy=policy, params=0)(w, x)
            return x.sum().astype(jnp.float32)

        return jax.grad(loss), ([of(64, n) for n in shapes], of(8, 64))

    if one:
        assert block_of(make, jc.policies.int4(), "make").traced.label == "layer"
    else:
        with pytest.raises(ValueError, match="one block .* got 'layer' in 2 forms"):
            block_of(make, jc.policies.int4(), "make")


def recurrent(w, x):
    """Time, batch and width; what is kept of its scan depends on what moves."""

    def cell(h, x):
        h = jnp.tanh(x @ w["in"] + h @ w["state"])
        return h, h

    _, hs = jax.lax.scan(cell, jnp.zeros_like(x[0]), x)
    return x + hs


def chunked(w, x):
    return x + jax.lax.map(lambda rows: jnp.sin(rows @ w["in"]) @ w["state"], x)


def branched(w, x):
    def other(x):
        return x + jnp.sin(x @ w["state"])

    return jax.lax.cond(x[0, 0, 0] > 0, lambda x: x + jnp.tanh(x @ w["in"]), other, x)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("fun", [recurrent, chunked, branched])
@pytest.mark.parametrize(
    "max_error", [0.0, *(pytest.param(e, marks=SLOW) for e in (0.02, 0.2))]
)
def test_blocks_with_loops_and_branches(fun, max_error, monkeypatch, tmp_path):
    """The layers of a scan, and one whose input is data."""
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    keys = jax.random.split(jax.random.key(0), 3)
    w = {
        n: jax.random.normal(k, (64, 64)) / 8
        for n, k in zip(["in", "state"], keys[:2], strict=True)
    }
    x = jax.random.normal(keys[2], (16, 4, 64))
    found = jc.plan(
        fun, w, x, layers=3, max_error=max_error, progress=lambda line: None
    )
    assert found.error <= max_error
    inside = {type(a) for n, a in found.actions.items() if "/" in n}
    assert (jc.Quantized in inside) == (max_error > 0)

    def gradients(policy, of):
        small = jc.checkpoint(fun, policy=policy, params=0)
        loss = lambda w, x: jnp.square(small(w, small(w, x))).mean()  # noqa: E731
        return jax.grad(loss, of)(w, x)

    for of in (0, 1, (0, 1)):
        error = relative(gradients(found, of), gradients(jc.Policy(), of))
        assert error < (2 * max_error or 1e-6), of


def test_without_error_loops_inside_are_exact_too():
    def looped(w, x):
        def step(y, _):
            return jnp.sin((x + y) @ w), None

        y, _ = jax.lax.scan(step, jnp.zeros_like(x), length=2)
        return x + y

    def make_step(policy):
        wrapped = jc.checkpoint(looped, policy=policy, params=0)
        loss = lambda w, x: wrapped(w, x).sum().astype(jnp.float32)  # noqa: E731
        return jax.grad(loss, (0, 1)), (of(64, 64), of(512, 64))

    def planned(max_error):
        card = jc.memory.devices()["h200"]
        _, asked = problem_of(make_step, card, max_error, None, CODECS)
        return asked, solve(asked, noise=max_error**2, smallest=True)

    exact, lossy = planned(0.0), planned(0.2)
    assert not any(isinstance(a, jc.Quantized) for a in exact[0].actions.values())
    assert any(isinstance(a, jc.Quantized) for a in lossy[0].actions.values())
    inside = [a for a in lossy[0].actions.values() if isinstance(a, jc.Quantized)]
    assert lossy[0].noise == pytest.approx(sum(map(noise, inside)))  # of each once
    assert exact[1].noise == 0 < lossy[0].noise <= lossy[1].noise
    assert solve(lossy[0], noise=lossy[0].noise / 2) is None
