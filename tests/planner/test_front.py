"""Plans beside `jax.checkpoint`'s policies, by bytes and operations known by hand."""

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.memory import devices
from jaxcompact.planner.front import JAX_POLICIES, front

B, D, FF = 4096, 512, 1536
CARD = devices()["h200"]
# Two thirds of the data sheet's rate, as the model has it.
PRODUCT = 2 * B * D * FF / (CARD.flops * 2 / 3)


def mlp(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def make_step(policy, block=mlp):
    block = jc.checkpoint(block, policy=policy, params=0)
    params = {"up": of(4, D, FF), "down": of(4, FF, D)}

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (block(w, x), None), x, params)
        return jnp.sum(x, dtype=jnp.float32)

    return jax.jit(jax.grad(loss)), (params, of(B, D))


@pytest.fixture(scope="module")
def found():
    return front(make_step, layers=4)


def test_jax_policies_by_hand(found):
    """x is stored by all; what else, and how many products both passes make."""
    x, hidden = 2 * B * D, 2 * B * FF
    by_hand = {
        "nothing_saveable": (x, 7),  # 2 forward, 4 backward, and the first again
        "dots_saveable": (x + hidden, 6),
        "dots_with_no_batch_dims_saveable": (x + hidden, 6),
    }
    others = {point.name: point for point in found.others}
    assert set(others) == set(JAX_POLICIES)
    for name, (nbytes, products) in by_hand.items():
        assert others[name].nbytes == nbytes
        assert others[name].seconds == pytest.approx(products * PRODUCT)
    assert others["everything_saveable"].nbytes >= x + hidden
    away = others["offload_dot_with_no_batch_dims"]
    assert away.nbytes == x
    assert away.seconds == pytest.approx(6 * PRODUCT + 2 * hidden / CARD.host_bandwidth)


def test_no_policy_of_jax_is_before_the_front(found):
    for plans in (found.plans, found.exact):
        for other in found.others:
            fits = [p for p in plans if p.nbytes <= other.nbytes]
            if "offload" not in other.name or plans is found.plans:
                best = min(p.seconds for p in fits)
                assert best <= other.seconds * (1 + 1e-6), other.name


def test_as_fast_as_without_checkpointing():
    """In a fraction of the memory: elementwise operations and sums are not stored."""

    def block(w, x):
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        p = jax.nn.softmax((jnp.sin(y @ w["up"])).astype(jnp.float32), axis=-1)
        return x + p.astype(x.dtype) @ w["down"]

    found = front(lambda policy: make_step(policy, block), layers=4)
    (whole,) = (p for p in found.others if p.name == "everything_saveable")
    for plans in (found.plans, found.exact):
        assert plans[-1].seconds == pytest.approx(whole.seconds)
        assert plans[-1].nbytes < whole.nbytes / 3


def test_it_is_a_front(found):
    for plans in (found.plans, found.exact):
        sizes, seconds = [p.nbytes for p in plans], [p.seconds for p in plans]
        assert sizes == sorted(set(sizes)) and len(plans) > 1
        assert seconds == sorted(set(seconds), reverse=True)
    assert all(p.error == 0 for p in found.exact)
    assert 0 < max(p.error for p in found.plans) <= 0.2


@pytest.mark.parametrize("name", ["count", "layers"])
def test_wrong_numbers_are_refused(name):
    for wrong in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"{name} must be a positive int"):
            front(make_step, **{name: wrong})


def test_its_plans_are_the_planners(found, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXCOMPACT_CACHE", str(tmp_path))
    plan = jc.plan_step(make_step, layers=4, progress=lambda line: None)
    assert found.plans[-1].nbytes == plan.nbytes
    keep = found.plans[-1].seconds - plan.seconds
    assert keep == pytest.approx(6 * PRODUCT)


def test_as_text_and_as_a_picture(found, tmp_path):
    lines = str(found).splitlines()
    assert lines[0] == "mlp, 4 layers on NVIDIA H200"
    assert len(lines) == 2 + len(found.others) + len(found.plans)
    found.plot(tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
