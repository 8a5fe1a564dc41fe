"""Policies: values that choose an action for every tensor, or refuse early."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.actions import is_exact, written
from jaxcompact.analysis.tensor import Tensor
from jaxcompact.checkpoint import TRACERS
from jaxcompact.compress import Compress

Q4, Q8 = jc.Quantized(4), jc.Quantized(8)
Q8_ASYMMETRIC = jc.Quantized(8, symmetric=False)
OF_GELU = replace(Q8, bound=(-2.6, None))
W = jnp.eye(16)
X = jnp.linspace(-1.0, 1.0, 8 * 16).reshape(8, 16)
PLAIN = Tensor("dot_general.0", "op", (8, 16), jnp.dtype("float32"))


def layer(w, x):
    return jax.nn.gelu(x @ w) @ w


def actions(fun, policy, *args, params=0):
    """Name -> action and reason."""
    wrapped = jc.checkpoint(fun, policy=policy, params=params)
    traced, inputs = TRACERS[wrapped](args, {})
    plan = traced.plan((True,) * len(inputs))
    return {t.name: (action, why) for t, action, why in plan.replay.chosen.values()}


# --- a policy is a value ---


@pytest.mark.parametrize(
    "make",
    [
        lambda: jc.Policy(),
        lambda: jc.Policy({"a*": Q8, "b": jc.Save()}, default=jc.policies.int4()),
        lambda: jc.Policy({"tanh.*": jc.Derivative(Q4, value=Q8)}, default=Q4),
        jc.policies.int8,
        jc.policies.int4,
        jc.policies.int3,
        lambda: jc.policies.uniform(jc.Offload()),
        lambda: jc.policies.compress(jc.OutlierQuantized(4)),
    ],
)
def test_equal_hashable_and_printed_as_it_is_written(make):
    policy = make()
    assert policy == make()
    assert hash(policy) == hash(make())
    names = {**vars(jc), "Compress": Compress}
    assert eval(repr(policy), names) == policy
    assert policy != jc.Policy({"no such name": Q8})


def test_changing_the_rules_afterwards_changes_nothing():
    rules = {"a": Q8}
    policy = jc.Policy(rules)
    rules["a"] = Q4
    assert policy == jc.Policy({"a": Q8})
    assert jc.Policy({"a": Q8, "*": Q4}) != jc.Policy({"*": Q4, "a": Q8})


@pytest.mark.parametrize(
    ("rules", "default", "message"),
    [
        ({"a": 4}, Q4, "rules must map names .* got 'a': 4"),
        ({"a": jc.Quantized}, Q4, "rules must map names"),
        ({"a": jc.policies.int4()}, Q4, "rules must map names"),
        ({3: Q4}, Q4, "rules must map names .* got 3"),
        ({}, "int4", "default must be an action or a policy, got 'int4'"),
        ([], Q4, r"rules must map names to actions, got \[\]"),
        ({}, jc.Policy, "default must be an action or a policy, got <class"),
        ({}, None, "default must be an action or a policy, got None"),
    ],
)
def test_what_is_no_policy_is_refused(rules, default, message):
    with pytest.raises(ValueError, match=message):
        jc.Policy(rules, default=default)


@pytest.mark.parametrize(
    "policy",
    [None, "int4", Q4, jax.checkpoint_policies.dots_saveable, jc.policies.int4],
)
def test_checkpoint_refuses_what_is_no_policy(policy):
    """And says what is one."""
    expected = r"policy must be .*, as jaxcompact.policies.int4\(\), got "
    with pytest.raises(ValueError, match=expected):
        jc.checkpoint(layer, policy=policy)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jc.policies.uniform(8), "codec of Compress must be .* Codec, got 8"),
        (
            lambda: jc.policies.compress(jc.Quantized),
            "codec of Compress must be Save or",
        ),
        (lambda: jc.Derivative(4), "codec of Derivative must be Codec, got 4"),
        (
            lambda: jc.Derivative(Q4, 8),
            "value of Derivative must be Save or Codec or None, got",
        ),
        (lambda: Compress(Q4, scores=8), "scores of Compress must be .*None, got 8"),
        (lambda: Compress(Q4, attention=8), "attention of Compress must be .* got 8"),
    ],
)
def test_what_is_no_codec_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- which rule decides ---


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"dot_general.*": Q8, "dot_general.0": Q4}, (Q8, "rule 'dot_general.*'")),
        ({"dot_general.0": Q4, "dot_general.*": Q8}, (Q4, "rule 'dot_general.0'")),
        ({"dot_general.[1-9]": Q8}, (jc.Save(), "default")),
        ({"DOT_GENERAL.0": Q8}, (jc.Save(), "default")),
        ({"dot_general": Q8}, (jc.Save(), "default")),
    ],
)
def test_the_first_pattern_that_matches_the_whole_name(rules, expected):
    assert jc.Policy(rules, default=jc.Save()).decide(PLAIN) == expected


def test_a_codec_or_a_policy_as_default():
    inner = jc.Policy({"dot_general.1": jc.Save()}, default=Q8)
    outer = jc.Policy({"dot_general.2": jc.Recompute()}, default=inner)
    assert outer.decide(PLAIN)[0] == Q8
    assert outer.decide(replace(PLAIN, name="dot_general.1"))[0] == jc.Save()
    assert outer.decide(replace(PLAIN, name="dot_general.2"))[0] == jc.Recompute()
    integers = replace(PLAIN, dtype=jnp.dtype("int32"))
    assert outer.decide(integers)[0] == jc.Save()


def test_a_policy_of_ones_own():
    @dataclass(frozen=True)
    class Large:
        least: int

        def decide(self, tensor):
            if tensor.floating and tensor.nbytes >= self.least:
                return Q8, "large"
            return jc.Save(), "small"

    assert actions(layer, Large(512), W, X)["dot_general.0"] == (OF_GELU, "large")
    assert actions(layer, Large(513), W, X)["dot_general.0"] == (jc.Save(), "small")


# --- what Compress makes of each kind of tensor ---


@pytest.mark.parametrize(
    ("fields", "policy", "action"),
    [
        ({}, jc.policies.int4(), Q4),
        ({}, jc.policies.int8(), Q8),
        ({}, jc.policies.int3(), jc.Quantized(3, group_size=32)),
        ({"kind": "input"}, jc.policies.int4(), Q4),
        ({"cheap": True}, jc.policies.int4(), jc.Recompute()),
        ({"kind": "residual", "statistic": True}, jc.policies.int4(), jc.Save()),
        ({"kind": "residual"}, jc.policies.int4(), Q4),
        ({"divisor": True}, jc.policies.int4(), jc.Save()),
        ({"divisor": True, "cheap": True}, jc.policies.int4(), jc.Recompute()),
        (
            {"kind": "choice", "limit": 3, "dtype": jnp.dtype("int32")},
            jc.policies.int4(),
            jc.Narrow(3),
        ),
        ({"terms": 128}, jc.policies.int4(), jc.Recompute()),
        ({"terms": 129}, jc.policies.int4(), Q4),
        ({"terms": 256, "exponent": True}, jc.policies.int4(), jc.Recompute()),
        ({"terms": 257, "exponent": True}, jc.policies.int4(), Q8_ASYMMETRIC),
        ({"exponent": True}, jc.policies.int3(), Q8_ASYMMETRIC),
        ({"exponent": True}, jc.policies.int8(), Q8_ASYMMETRIC),
        ({"exponent": True}, jc.policies.uniform(Q4), Q4),
        ({"dtype": jnp.dtype("float8_e5m2")}, jc.policies.int8(), jc.Save()),
        ({"dtype": jnp.dtype("float8_e5m2")}, jc.policies.int4(), Q4),
        ({"kind": "function"}, jc.policies.int4(), jc.Recompute()),
        ({"kind": "function", "step": True}, Compress(Q4), jc.Derivative(jc.BitMask())),
        # q and k: groups along the tokens, which are two axes from the end or first
        ({"scores": 0}, jc.policies.int8(), jc.Save()),
        (
            {"scores": 0},
            jc.policies.int4(),
            jc.Quantized(8, symmetric=False, axis=-2),
        ),
        (
            {"scores": 1},
            jc.policies.int4(),
            jc.Quantized(8, symmetric=False, axis=-1),
        ),
        ({"scores": 0}, jc.policies.uniform(Q4), Q4),
        ({"fused": "operand"}, jc.policies.int4(), Q8),
        ({"fused": "result"}, jc.policies.int4(), Q8),
        ({"fused": "result"}, jc.policies.int3(), jc.Recompute()),
        (
            {"fused": "operand"},
            jc.policies.int3(),
            jc.Quantized(3, group_size=32),
        ),
        # what is no number keeps its value
        ({"dtype": jnp.dtype("int32")}, jc.policies.int4(), jc.Save()),
        ({"dtype": jnp.dtype("int32"), "limit": 9}, Compress(Q4), jc.Narrow(9)),
        ({"discrete": True, "limit": 8, "least": -8}, Compress(Q4), jc.Narrow(8, -8)),
        ({"discrete": True, "limit": 8}, Compress(Q4), jc.Narrow(8, 0)),
        ({"discrete": True, "limit": 2**17}, Compress(Q4), jc.Save()),
        ({"dtype": jnp.dtype(bool), "kind": "input"}, Compress(Q4), jc.BitMask()),
        (
            {"dtype": jnp.dtype(bool), "kind": "mask", "discrete": True},
            Compress(Q4),
            jc.BitMask(),
        ),
        ({"dtype": jnp.dtype(bool), "kind": "mask"}, Compress(Q4), jc.Recompute()),
    ],
)
def test_compress_by_kind_of_tensor(fields, policy, action):
    chosen, reason = policy.decide(replace(PLAIN, **fields))
    assert chosen == action
    assert reason


def test_an_integer_input_is_not_narrowed_by_what_is_not_known():
    tokens = Tensor("tokens", "input", (8,), jnp.dtype("int32"))
    assert jc.policies.int4().decide(tokens)[0] == jc.Save()


# --- a policy meets a function ---


def test_a_pattern_that_matches_nothing_is_refused_with_the_names():
    policy = jc.Policy({"dot_general.0": Q8, "dots.*": Q4})
    small = jc.checkpoint(layer, policy=policy, params=0)
    message = "policy: 'dots.*' matches no tensor of 'layer'; the names are dot_gen.* x"
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda w: small(w, X).sum())(W)


def test_patterns_of_a_default_policy_are_refused_too():
    policy = jc.Policy({"x": Q8}, default=jc.Policy({"attn_out": Q4}))
    with pytest.raises(ValueError, match="'attn_out' matches no tensor"):
        actions(layer, policy, W, X)


def test_a_pattern_for_what_an_earlier_one_takes_is_no_error():
    policy = jc.Policy({"dot_general.*": Q8, "dot_general.0": Q4})
    assert actions(layer, policy, W, X)["dot_general.0"][0] == OF_GELU


def loops(w, x, y):
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=2)
    return h + y @ w


def test_whether_a_pattern_matches_does_not_depend_on_what_is_differentiated():
    """A policy for a loop is no error in a block whose loop happens to be frozen."""
    policy = jc.Policy({"scan.0/dot_general.0": Q8}, default=jc.Save())

    def fun(frozen, w, x, y):
        return loops(frozen, x, y) + y @ w

    small = jc.checkpoint(fun, policy=policy, params=(0, 1))
    assert jax.grad(lambda w: small(W, w, X, X).sum())(W).shape == W.shape


def test_names_inside_loops_and_branches():
    def fun(w, x):
        x = loops(w, x, x)
        return jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x @ w @ w, x)

    patterns = ["scan.0/dot_general.0", "cond.0.0/dot_general.1", "cond.0.1/*"]
    policy = jc.Policy(dict.fromkeys(patterns, Q8), default=jc.Save())
    assert {"scan.0", "cond.0", "add.0"} <= set(actions(fun, policy, W, X))


@pytest.mark.parametrize(
    ("action", "name", "message"),
    [
        (
            jc.BitMask(),
            "dot_general.0",
            r"BitMask\(\) can't store dot_general.0 \[8,16",
        ),
        (
            jc.Quantized(8, axis=-3),
            "dot_general.0",
            r"Quantized.* can't store dot_general.0 \[8,16\].*: axis -3 needs",
        ),
        (jc.Narrow(9), "x", r"Narrow\(limit=9, .*can't store x \[8,16\] of float32"),
        (Q8, "argmax.0", r"Quantized.* can't store argmax.0 \[8\].* of int32"),
        (
            jc.Derivative(Q8),
            "dot_general.0",
            "Derivative is for elementwise functions of one tensor, but dot_general.0",
        ),
        (jc.Derivative(Q8), "x", "Derivative is for elementwise functions"),
    ],
)
def test_actions_that_do_not_fit_a_tensor_are_refused(action, name, message):
    def fun(w, x):
        y = x @ w
        return jnp.tanh(y) + w[jnp.argmax(y, -1)]

    small = jc.checkpoint(fun, policy=jc.Policy({name: action}), params=0)
    with pytest.raises(ValueError, match=f"policy: .*{message}"):
        jax.grad(lambda w, x: small(w, x).sum(), argnums=(0, 1))(W, X)


def test_a_rule_for_nothing_is_refused_each_time():
    small = jc.checkpoint(
        lambda w, x: (x @ w).sum(), policy=jc.Policy({"nothing": Q8}), params=0
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="'nothing' matches no tensor"):
            jax.grad(small)(W, X)


def test_decisions_beside_a_value_that_is_rounded():
    """A derivative's value is as much as a tensor of a rule's own."""

    def fun(w, x):
        y = jnp.tanh(x @ w)
        return jnp.where(y > 0.3, y * y, 0.0) @ w

    policy = jc.Policy({"tanh.0": jc.Derivative(Q8, value=Q4)})
    (mask,) = (a for n, (a, _) in actions(fun, policy, W, X).items() if "gt" in n)
    assert mask == jc.BitMask()


@pytest.mark.parametrize("default", [jc.Policy(), jc.Policy(default=jc.Save())])
def test_a_policy_as_default_knows_that_a_rule_rounds(default):
    def fun(w, x):
        return jnp.where(x @ w > 0.3, jnp.sin(x @ w), 0.0)

    for outer in (default, jc.Policy(default=default)):
        found = actions(fun, jc.Policy({"dot_general.0": Q4}, default=outer), W, X)
        (mask,) = (a for n, (a, _) in found.items() if "gt" in n)
        assert mask in (jc.BitMask(), jc.Save())


@dataclass(frozen=True)
class WithStatistics:
    statistics = True

    def decide(self, tensor):
        return jc.Save(), "all"

    def unused(self, names):
        return ["stale"]


def test_a_default_policy_has_all_that_it_has_by_itself():
    policy = jc.Policy({"x": jc.Save()}, default=WithStatistics())
    assert policy.statistics and not jc.Policy().statistics
    assert policy.unused({"x"}) == ["stale"]


def test_numbers_and_what_has_no_entries():
    """A number that scales what a norm is of has no rows; of no entries none is the
    largest."""

    def fun(w, x, scale):
        scale, ys = jax.lax.scan(
            lambda c, row: (c + (row @ w) @ row, (row @ w) * c), scale, x
        )
        y = ys * scale
        none = jax.lax.top_k((x @ w)[:, :0], 0)[0].sum()
        return jnp.sum(y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)) + none

    args = W, X, jnp.float32(2)
    found = jax.grad(jc.checkpoint(fun, policy=jc.policies.int4(), params=0))(*args)
    expected = jax.grad(fun)(*args)
    assert jnp.linalg.norm(found - expected) < 0.15 * jnp.linalg.norm(expected)


def test_a_chain_of_exact_codecs_is_exact():
    exact, lossy = jc.Chain(jc.BitMask(), jc.Offload()), jc.Chain(Q8, jc.Offload())
    assert is_exact(exact) and is_exact(jc.Chain(exact)) and not is_exact(lossy)


def test_a_chain_is_printed_as_it_is_written():
    chain = jc.Chain(jc.Hadamard(16), Q4, jc.Offload())
    assert written(chain) == "Chain(Hadamard(block=16), Quantized(bits=4), Offload())"
    assert eval(written(chain), vars(jc)) == chain
