"""Doctests run as users would: optax's ``decay ** count`` is not strict.

And not on every jax: what they show has its own tests.
"""

import jax
import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--one-case",
        action="store_true",
        help="of a test with several cases run the first that is left",
    )
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="run slow cases too of tests that other cases are run of",
    )


def pytest_itemcollected(item):
    if isinstance(item, pytest.DoctestItem):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # after the markers' choice
def pytest_collection_modifyitems(config, items):
    """Of each test at least one case is left."""
    if config.getoption("all_cases"):
        return
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    one, kept = config.getoption("one_case"), set()
    for cases in tests.values():
        fast = [] if one else [i for i in cases if i.get_closest_marker("slow") is None]
        kept |= set(fast or cases[:1])
    config.hook.pytest_deselected(items=[i for i in items if i not in kept])
    items[:] = [i for i in items if i in kept]


@pytest.fixture(autouse=True)
def standard_promotion_in_doctests(request):
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
