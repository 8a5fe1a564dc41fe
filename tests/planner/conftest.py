import pytest

from jaxcompact.kernels import choice


@pytest.fixture(scope="module", autouse=True)
def xla():
    """What a step takes is modelled of XLA's code, to what these tests ask for."""
    with choice.using("xla"):
        yield
