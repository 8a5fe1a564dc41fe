"""Doctests run as users would: optax's ``decay ** count`` is not strict."""

import jax
import pytest


@pytest.fixture(autouse=True)
def standard_promotion_in_doctests(request):
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
