"""These checks run under `make test-gpu`, on the device that is there."""

import os

import pytest


def pytest_collection_modifyitems(items):
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if not os.environ.get("JAXCOMPACT_TEST_GPU"):
                item.add_marker(pytest.mark.skip(reason="make test-gpu runs it"))
