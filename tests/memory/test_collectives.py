import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcompact.memory.collectives import collectives


def text_of(fun, *specs):
    """The program of 4 devices for float32 arrays (8, 16)."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    args = [
        jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec in specs
    ]
    out = NamedSharding(mesh, P())
    return jax.jit(fun, out_shardings=out).lower(*args).compile().as_text()


def test_a_sum_over_devices_is_an_all_reduce_of_its_result():
    assert collectives(text_of(lambda x: x.sum(0), P("d"))) == {"all-reduce": 16 * 4}


def test_a_gather_counts_what_is_gathered():
    assert collectives(text_of(lambda x: x, P("d"))) == {"all-gather": 8 * 16 * 4}


def test_what_is_in_a_loop_counts_as_often_as_it_goes_round():
    def fun(x, y):  # the sum depends on the carry, or it would leave the loop
        return jax.lax.scan(
            lambda c, _: (jnp.sin((x * c[None]).sum(0) + y[0]), None), y[0], length=5
        )[0]

    text = text_of(fun, P("d"), P())
    assert collectives(text) == {"all-reduce": 5 * 16 * 4}
    with pytest.raises(ValueError, match="how often a loop goes round is unknown"):
        collectives(text.replace("known_trip_count", "unknown"))


def test_of_the_branches_of_a_conditional_the_one_with_most_counts():
    def fun(x, y):
        some, more = lambda: x.sum(), lambda: x.sum(0).sum() + (x @ x.T).sum()
        return jax.lax.cond(y[0, 0] > 0, some, more)

    alone = text_of(lambda x, _: x.sum(0).sum() + (x @ x.T).sum(), P("d"), P())
    assert collectives(text_of(fun, P("d"), P())) == collectives(alone)


GPU = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (p: bf16[8,4], q: f32[6]) -> f32[] {
  %p = bf16[8,4]{1,0} parameter(0)
  %q = f32[6]{0} parameter(1)
  %g = (bf16[8,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%p), dimensions={0}
  %gd = bf16[16,4]{1,0} all-gather-done(%g)
  %r = ((bf16[8,4]{1,0}), bf16[8,4]{1,0}) all-reduce-start(%p), to_apply=%add
  %rd = bf16[8,4]{1,0} all-reduce-done(%r)
  %s = ((bf16[8,4]{1,0}, f32[6]{0}), (bf16[4,4]{1,0}, /*index=1*/f32[3]{0})) \
reduce-scatter-start(%p, %q), to_apply=%add
  %sd = (bf16[4,4]{1,0}, f32[3]{0}) reduce-scatter-done(%s)
}
"""


def test_operations_that_are_started_and_awaited_count_once():
    expected = {"all-gather": 128, "all-reduce": 64, "reduce-scatter": 64 + 24}
    assert collectives(GPU) == expected
