"""Effects that are made up: the bits that tensors get by them, and what these cost."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from jaxcompact.planner.effects import Effect, noise
from jaxcompact.planner.sensitivity import CODECS


def made_up(errors, sizes, codecs=CODECS):
    """Effects of tensors whose error is ``errors`` times that of the codec."""
    effects = {
        f"t{i}": Effect((size,), jnp.float32, {c: e * 4.0**-c.bits for c in codecs})
        for i, (e, size) in enumerate(zip(errors, sizes, strict=True))
    }
    return jc.Sensitivity("made_up", jc.policies.int4(), effects)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_other_bits_are_better(seed):
    rng = np.random.default_rng(seed)
    count = 4
    found = made_up(10 ** rng.uniform(-3, 3, count), rng.integers(1, 9, count) * 256)
    bits = rng.uniform(2.6, 8)
    rules = dict(found.policy(bits).rules)
    assert found.bits(rules) <= bits
    entries = sum(effect.entries for effect in found.effects.values())
    each = (
        [(e.nbytes(c), e.errors[c]) for c in CODECS] for e in found.effects.values()
    )
    choices = (zip(*choice, strict=True) for choice in itertools.product(*each))
    best = min(sum(e) for size, e in choices if 8 * sum(size) / entries <= bits)
    assert found.error(rules) ** 2 <= 1.05 * best
    # Nothing that is left would give any tensor its next codec.
    sizes = sorted(c.nbytes((256,), jnp.float32) for c in CODECS)
    room = (bits - found.bits(rules)) * sum(
        math.prod(e.shape) for e in found.effects.values()
    )
    for name, codec in rules.items():
        more = [s for s in sizes if s > codec.nbytes((256,), jnp.float32)]
        size = math.prod(found.effects[name].shape) / 256
        step = more and (more[0] - codec.nbytes((256,), jnp.float32)) * size
        assert not more or 8 * step > room


def test_bits_count_scales():
    found = made_up([1, 1], [256, 768])
    assert found.bits({"t0": jc.Quantized(8), "t1": jc.Quantized(4)}) == (
        0.25 * (8 + 16 / 64) + 0.75 * (4 + 16 / 64)
    )


def test_what_was_not_measured_counts_in_proportion():
    (effect,) = made_up([1.0], [256], codecs=[jc.Quantized(4)]).effects.values()
    ratio = effect.error(jc.Quantized(8)) / effect.error(jc.Quantized(4))
    assert ratio == pytest.approx(15**2 / 255**2, rel=0.3)  # of the steps
    assert effect.error(jc.Offload()) == 0
    only = dataclasses.replace(effect, errors={jc.Offload(): 0.0})
    assert only.error(jc.Quantized(4)) == 0


@pytest.mark.parametrize("inside", [0.0, 0.1, math.nan])
@pytest.mark.parametrize("moved", [0.0, 0.5, math.nan, math.inf])
def test_effects_are_no_less_than_all_do_together(moved, inside):
    """With what loops add, which is known by itself."""
    codec = jc.Quantized(4)
    errors = [e * 4**codec.bits for e in (0.01, 0.03)]
    found = made_up(errors, [64, 64], [codec]).in_all(moved, inside)
    total = found.error(dict.fromkeys(found.effects, codec)) ** 2
    finite = moved < 1 and inside < 1
    assert total == pytest.approx(max(0.04 + inside, moved) if finite else 1e6)
    assert found.inside == (inside if inside < 1 else 1e6)


def test_what_loops_add_is_all_there_is():
    found = jc.Sensitivity("made_up", jc.policies.int4(), {}).in_all(0.04, 0.04)
    assert found.error({"scan.0/x": jc.Quantized(4)}) == pytest.approx(0.2)


def test_what_moves_nothing_is_not_counted():
    """As of an output that nothing reads: compiled, it is not stored."""
    found, alone = made_up([1, 0, 10], [256, 4096, 256]), made_up([1, 10], [256, 256])
    rules, wanted = (dict(f.policy(4.25).rules) for f in (found, alone))
    assert (rules["t0"], rules["t2"]) == (wanted["t0"], wanted["t1"])
    assert rules["t1"] == jc.Quantized(2, 32)
    assert found.bits(rules) == alone.bits(wanted)
    none = made_up([0, 0], [256, 256])
    assert none.bits(dict(none.policy(4.25).rules)) <= 4.25


def test_what_there_is_is_used():
    """GACT's own allocation uses 2.75 of 4 bits here."""
    found = made_up([1e10, 1, 1, 1, 1, 1, 1, 1], [4096] * 8)
    rules = dict(found.policy(4.25).rules)
    assert 0.95 * 4.25 <= found.bits(rules) <= 4.25
    assert rules["t0"].bits == 8


def test_equal_tensors_get_equal_bits():
    for codec in CODECS:
        found = made_up([3.0] * 6, [512] * 6)
        bits = 8 * codec.nbytes((512,), jnp.float32) / 512
        assert set(dict(found.policy(bits).rules).values()) == {codec}


def test_who_matters_more_gets_no_fewer_bits():
    found = made_up([1, 10, 100, 1000, 10000], [256] * 5)
    for bits in (2.6, 3.2, 4.25, 5.0, 7.0):
        each = [c.bits for c in dict(found.policy(bits).rules).values()]
        assert each == sorted(each)


def test_no_less_than_another():
    four, eight = jc.Quantized(4), jc.Quantized(8)

    def of(**errors):
        effects = {name: Effect((8, 64), jnp.float32, e) for name, e in errors.items()}
        return jc.Sensitivity("made_up", jc.policies.int4(), effects)

    known = {four: 4.0, eight: 1.0}
    small = of(a=known, b=known)
    other = of(a={four: 2.0}, b={four: 12.0}, c={four: 1.0}, d={jc.Offload(): 0.0})
    found = small.no_less_than(other, (four, eight)).effects
    assert found["a"].errors == {four: 4.0, eight: 1.0}
    assert found["b"].errors == {four: 12.0, eight: 3.0}
    assert "d" not in found  # it is exact
    ratio = noise(eight) / noise(four)
    assert found["c"].errors == pytest.approx({four: 1.0, eight: ratio})
