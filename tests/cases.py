"""Cases that `make test` leaves to `make test-all`, where their test has others."""

from typing import Any

import pytest


def slow(*values: Any, **options: Any):
    return pytest.param(*values, marks=pytest.mark.slow, **options)
