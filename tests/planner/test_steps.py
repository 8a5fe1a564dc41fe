"""Plans of steps of one's own, and steps that have none."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import jaxcompact as jc
from jaxcompact import linen as clinen
from jaxcompact.planner import candidates, trials
from jaxcompact.planner.block import block_of
from jaxcompact.planner.scan import scan_step
from tests.planner.blocks import LAYERS, MIB, PARAMS, D, X, block, of


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
    traced, counted, sized, *compiled = seen
    assert len(compiled) == len(lines) and found in compiled
    assert found.peak_bytes <= 160 * MIB


@pytest.mark.parametrize("train", [True, "on"])
def test_static_arguments_of_a_step(train):
    def make_step(policy):
        wrapped = jc.checkpoint(block, policy=policy, params=0)

        def step(params, x, train):
            assert train in (True, "on")
            return jax.grad(lambda p: wrapped(p, x).sum().astype(jnp.float32))(params)

        return jax.jit(step, static_argnums=2), (PARAMS, X, train)

    found = jc.plan_step(make_step, budget="160MiB", progress=lambda line: None)
    assert found.peak_bytes <= 160 * MIB


# The block's layers can store 0 (with the host's help), 14.125, 55.625, 64.375, ...,
# 231.625, 240.125, 278.625, ... and 416.125 MiB, the more the faster, beside 41 MiB of
# arguments.
@pytest.mark.parametrize(
    ("budget", "beside", "stored"),
    [
        pytest.param(500, [41], [416.125], id="all fits"),
        pytest.param(
            970.5, [905, 905, 905], [416.125, 55.625, 64.125], id="with a margin"
        ),
        pytest.param(382, [141, 141], [278.625, 240.125], id="much left by a margin"),
        pytest.param(
            382, [141, 143, 143], [278.625, 240.125, 231.625], id="just above"
        ),
        pytest.param(
            382, [141, 160, 160], [278.625, 240.125, 193.125], id="by the most beside"
        ),
        pytest.param(
            382,
            [141, 160, 200, 200],
            [278.625, 240.125, 193.125, 14.125],
            id="not understood",
        ),
        pytest.param(382, [91, 91], [278.625], id="the first fits"),
        pytest.param(382, [61, 61], [278.625], id="a faster one would not"),
        pytest.param(500, [600, 485], [416.125, 14.125], id="just possible"),
        pytest.param(500, [600, 490, 480], [416.125, 14.125, 17.125], id="the next"),
        pytest.param(
            500,
            [600, 490, 490, 490, 490],
            [416.125, 14.125, 17.125, 55.625, 0],
            id="with the host",
        ),
        pytest.param(
            500,
            [100, 490, 480, 480],
            [416.125, 369.125, 14.125, 17.125],
            id="not with the host",
        ),
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

    steps, scanned = [], scan_step(block, (PARAMS, X), LAYERS, 0)
    monkeypatch.setattr(trials, "peak", peak)
    monkeypatch.setattr(candidates, "alive", stored_alone)
    found = jc.plan_step(make_step, layers=LAYERS, budget=f"{budget}MiB")
    powers = LAYERS * X.shape[-1] / MIB  # of x, where it is encoded
    assert tried == pytest.approx(stored, abs=powers)
    assert found.nbytes * LAYERS / MIB == tried[-1]


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


def test_modules_in_a_loop():
    """Each is traced by itself, and the first one's input is not differentiated."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.gelu(nn.Dense(128)(nn.LayerNorm()(x)))
            return x + nn.Dense(64)(y)

    def make(policy):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                for i in range(3):
                    x = clinen.checkpoint(Block, policy=policy)(name=f"layer{i}")(x)
                return x

        model, x = Model(), jnp.ones((8, 64))
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        return jax.grad(lambda v, x: model.apply(v, x).sum()), (variables, x)

    traces = block_of(make, jc.policies.int4(), "make")
    assert "max.0.choice" in traces.names()  # of the norm of what is differentiated


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
