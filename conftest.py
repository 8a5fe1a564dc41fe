"""Doctests run as users would: optax's ``decay ** count`` is not strict.

And not on every jax: what they show has its own tests.
"""

import jax
import pytest


def pytest_itemcollected(item):
    if isinstance(item, pytest.DoctestItem):
        item.add_marker("slow")


@pytest.fixture(autouse=True)
def standard_promotion_in_doctests(request):
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
