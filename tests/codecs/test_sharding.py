"""Sharded tensors are encoded where they lie, under explicit sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcompact.codecs import BitMask, Chain, Float8, Hadamard, Narrow, Quantized

pytestmark = pytest.mark.usefixtures("optimized")

CODECS = [
    Quantized(4),
    Quantized(4, symmetric=False),
    Quantized(3, stochastic=True),
    Quantized(8, 16, axis=-2),
    Float8(),
    Chain(Hadamard(64), Quantized(4)),
    BitMask(),
    Narrow(2),
    Narrow(256),
]
COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute")


def compiled(codec, x):
    def round_trip(x):
        encoded = codec.encode(x)
        return encoded, codec.decode(encoded)

    program = jax.jit(round_trip).lower(x).compile()
    return program(x), program.as_text()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("axis", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_is_moved(codec, axis):
    """Axis 0 is the batch of data parallelism, axis 2 the width of a tensor parallel
    layer, in whole groups of 64."""
    if axis == 2 and codec in (BitMask(), Narrow(2)):
        pytest.skip("its lanes are slices of the whole width")
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.random.normal(jax.random.key(0), (4, 16, 256))
    if not codec.supports(x.dtype):
        x = (x > 0).astype(jnp.int32)
    (_, expected), _ = compiled(codec, x)
    spec = [None, None, None]
    spec[axis] = "d"
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P(*spec)))
        (encoded, decoded), text = compiled(codec, sharded)
    for leaf in jax.tree.leaves(encoded):
        assert leaf.sharding.spec[axis] == "d"
    assert decoded.sharding.spec[axis] == "d"
    assert not [name for name in COLLECTIVES if f"{name}(" in text]
    # A rotated block may be summed in another order, which may turn a code: a step of
    # about 0.4 in one rotated entry, an eighth of it in each of 64.
    atol = 0.2 if isinstance(codec, Chain) else 0
    np.testing.assert_allclose(decoded, expected, atol=atol, rtol=0)
