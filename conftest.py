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


def pytest_itemcollected(item):
    if isinstance(item, pytest.DoctestItem):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # after the markers' choice
def pytest_collection_modifyitems(config, items):
    if config.getoption("one_case"):
        tests = {}
        for item in items:
            tests.setdefault(item.nodeid.partition("[")[0], item)
        kept = set(tests.values())
        config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = tests.values()


@pytest.fixture(autouse=True)
def standard_promotion_in_doctests(request):
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
