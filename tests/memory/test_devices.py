"""Peaks of one device of several."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxcompact as jc
from tests.memory.steps import F32, S, double, sgd, sharded


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_is_unsharded_divided(count, axis_type):
    whole = jc.memory.peak(double, S((4096, 4096), F32))
    found = jc.memory.peak(double, sharded(count, axis_type), devices=count)
    assert found.devices == count
    assert found.peak_bytes == whole.peak_bytes // count
    assert found.breakdown["inputs"] == whole.breakdown["inputs"] // count


def test_fully_sharded_parameters_are_gathered():
    """Each device holds an eighth of w and of x, and all of w while it is used."""
    x = sharded(8)
    found = jc.memory.peak(sgd, x, x, donate=0)
    assert found.breakdown["parameters"] == found.breakdown["inputs"] == 2**26 // 8
    assert found.breakdown["workspace"] >= 2**26
    assert sum(found.breakdown.values()) == found.peak_bytes


def test_tensor_parallel():
    mesh = AbstractMesh((2, 4), ("data", "tensor"))
    w = S((256, 4096), F32, sharding=NamedSharding(mesh, jax.P(None, "tensor")))
    x = S((4096, 256), F32, sharding=NamedSharding(mesh, jax.P("data")))
    found = jc.memory.peak(sgd, w, x, donate=0)
    assert found.breakdown["parameters"] == 4 * 256 * 4096 // 4
    # tanh(x w), of half the rows and a quarter of the columns
    assert "f32[2048,1024]" in {b.shape for b in found.buffers}
    assert max(b.nbytes for b in found.buffers) == 4 * 2048 * 1024


def test_arrays_on_a_mesh_of_this_machine():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, PartitionSpec("data")))
    found = jc.memory.peak(double, x)
    assert (found.devices, found.peak_bytes) == (4, 2 * 4 * 64 * 64 // 4)


def test_while_a_mesh_of_this_machine_is_set():
    """`jax.set_mesh` is left in place; types are the step's own."""
    mesh = jax.make_mesh((4,), ("data",))
    x = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, PartitionSpec("data")))

    def step(x):
        return jax.sharding.reshard(2 * x, PartitionSpec(None, "data"))

    with jax.set_mesh(mesh):
        found = jc.memory.peak(step, x)
        assert jax.sharding.get_mesh() == mesh
    assert found.devices == 4
    assert (
        found.peak_bytes == jc.memory.peak(step, x).peak_bytes >= 2 * 4 * 64 * 64 // 4
    )


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_that_is_set_is_that_of_plain_arguments(axis_type):
    """As it runs: what the step itself shares is shared."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))

    def step(x):
        return jax.shard_map(double, in_specs=jax.P("data"), out_specs=jax.P("data"))(x)

    with jax.set_mesh(mesh):
        x = S((64, 64), F32)
        if axis_type == AxisType.Explicit:  # which must say how it lies
            x = S(x.shape, F32, sharding=NamedSharding(mesh, jax.P("data")))
        found = jc.memory.peak(step, x)
    assert found.devices == 4
    assert found.output_bytes < 4 * 64 * 64
