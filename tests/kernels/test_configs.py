"""All that `benchmarks/kernels.py --tune` tries on a card compiles for one."""

import pytest

from benchmarks.kernel_cases import SHAPES, cases
from benchmarks.kernels import CONFIGS
from jaxcompact.kernels import choice
from tests.kernels.machine_code import resources

TRIED = [
    pytest.param(op, config, id=f"{op}-{'-'.join(map(str, config.values()))}")
    for op in CONFIGS
    for config in CONFIGS[op]
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "config"), TRIED)
def test_each_config_compiles_without_spills(op, config):
    """At a width of which the last group is in part, but for products."""
    shape = "350m" if op in ("weight_gradient", "project") else "350m_mlp"
    _, n, m = SHAPES[shape]
    tokens = 36864  # of no other test: a process compiles a kernel once
    names = [f"{shape}_{kind}" for kind in ("int4", "int4_swiglu", "int8")]
    some = [c for c in cases(shape, tokens, n, m) if c.op == op and c.name in names]
    case = min(some, key=lambda case: names.index(case.name))
    with choice.using("mosaic_gpu", config):
        found = resources(case.fun, *case.args)
    assert len(found) == 1 and not found[0][1], found
