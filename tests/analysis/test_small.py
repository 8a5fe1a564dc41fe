"""What takes a hundredth of all that is stored: encoding it saves nothing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxcompact as jc
from jaxcompact.actions import written
from jaxcompact.analysis.small import find_small
from jaxcompact.analysis.tensor import Tensor
from tests.cases import slow
from tests.draws import normal

B, T, D = 2, 128, 64
POLICY = jc.policies.int4()
PARAMS = {
    "up": normal(0, D, 4 * D) / 8,
    "down": normal(1, 4 * D, D) / 16,
    "first": normal(2, D, D) / 8,
    "second": normal(3, D, 3 * D) / 8,
}
X, GIVEN, TARGET = normal(4, B, T, D), normal(5, B, D), normal(6, B, T, D)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def mlp(params, x):
    return jax.nn.gelu(jax.nn.standardize(x) @ params["up"]) @ params["down"]


def modulated(params, x, given):
    """A layer of a diffusion transformer (adaLN)."""
    rows = jax.nn.silu(given @ params["first"]) @ params["second"]
    scale, shift, gate = jnp.split(rows[:, None], 3, axis=-1)
    hidden = jax.nn.standardize(x) * (1 + scale) + shift
    return jnp.mean((x + gate * mlp(params, hidden) - TARGET) ** 2)


def pooled(params, x, given):
    """A model and its head in one."""
    rows = (x + mlp(params, x)).mean(axis=1) + given
    logits = jnp.tanh(rows @ params["first"]) @ params["second"]
    return -jax.nn.log_softmax(logits)[:, 0].mean()


@pytest.mark.parametrize(
    ("fun", "leaf", "most"),
    [(pooled, "first", 1e-5), (modulated, "second", 0.06)],
    ids=["pooled", "modulated"],
)
@pytest.mark.parametrize("bits", ["int4", slow("int8")])
def test_gradients_of_what_few_numbers_multiply(fun, leaf, most, bits):
    """Where these are rounded they are 0.021 and 0.100 off in 4 bits; what is left of
    the second, 0.046, is of the products that it multiplies. A tenth in 8."""
    policy = getattr(jc.policies, bits)()
    most *= 1 if bits == "int4" else 0.1
    small = jc.checkpoint(fun, policy=policy, params=0)
    exact, found = (jax.jit(jax.grad(f))(PARAMS, X, GIVEN)[leaf] for f in (fun, small))
    assert jnp.linalg.norm(found - exact) < most * jnp.linalg.norm(exact)


def test_they_are_told():
    found = jc.explain(modulated, PARAMS, X, GIVEN, policy=POLICY, params=0)
    small = [
        row for row in found.rows if row.reason == "small beside all that is stored"
    ]
    assert [row.shape for row in small] == [(B, D), (B, D), (B, 3 * D)]
    given, *made = small
    assert (given.name, given.stored) == ("given", 0)  # its owner's
    assert all(row.stored == row.nbytes for row in made)
    codec = jc.Quantized(8)
    rule = jc.Policy({small[-1].name: codec}, default=POLICY)
    found = jc.explain(modulated, PARAMS, X, GIVEN, policy=rule, params=0)
    assert {row.name: row.action for row in found.rows}[small[-1].name] == written(
        codec
    )


def test_the_largest_of_many_points_are_whole():
    """A network of clouds of points, in one: what its last layers read."""

    def fun(params, x, given):
        largest = jnp.tanh(mlp(params, x)).max(axis=1)
        return jnp.sum(jnp.tanh(largest @ params["first"]) * given)

    small = jc.checkpoint(fun, policy=POLICY, params=0)
    exact, found = (jax.grad(f)(PARAMS, X, GIVEN)["first"] for f in (fun, small))
    assert jnp.linalg.norm(found - exact) < 1e-5 * jnp.linalg.norm(exact)
    # Beside what they are the largest of, not by themselves.
    alone = jc.checkpoint(
        lambda p, x: jnp.sin((x + p).max(axis=1)), policy=POLICY, params=0
    )
    said = jc.explain(alone, GIVEN[:, None], X[:, :64])
    assert {r.name: r.action for r in said.rows}["reduce_max.0"] == "Recompute()"


def of(*sizes, **fields):
    """Tensors of so many float32, by their place."""
    each = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes)
    return {
        i: Tensor.of(aval, name=f"op.{i}", kind="op", **fields)
        for i, aval in enumerate(each)
    }


@pytest.mark.parametrize(
    ("sizes", "small"),
    [
        ((9, 1, 990), {0, 1}),
        ((9, 1, 989), {1}),
        ((8, 8, 984), set()),  # as large: both or none
        ((5, 5, 1, 989), {2}),
        ((0, 100), {0}),
        ((100,), set()),
        ((), set()),
    ],
)
def test_together_they_take_a_hundredth(sizes, small):
    assert find_small(of(*sizes), ()) == small


@pytest.mark.parametrize(
    "fields",
    [
        {"cheap": True},
        {"terms": 128},
        {"kind": "function"},
        {"dtype": jnp.dtype("int32")},
    ],
)
def test_what_is_not_stored_does_not_count(fields):
    tensors = of(9, 900)
    assert find_small(tensors, ()) == {0}
    for value, others in ((0, set()), (1, set())):
        changed = {**tensors, value: replace(tensors[value], **fields)}
        assert find_small(changed, ()) == others
    assert find_small(tensors, [1]) == set()
    cheap = {**tensors, 0: replace(tensors[0], cheap=True)}
    assert find_small(cheap, (), extremes=[0]) == {0}
    assert find_small(tensors, [0]) == set()


def test_in_a_loop_it_is_small_beside_what_that_stores():
    def fun(params, x):
        def layer(x, kernel):
            gate = jax.nn.sigmoid(x @ kernel["gate"])  # one number for a row
            return x + gate * jnp.tanh(x @ kernel["up"]), None

        return jax.lax.scan(layer, x, params)[0]

    params = {"gate": normal(0, 3, D, 1), "up": normal(1, 3, D, D)}
    found = jc.explain(fun, params, X, policy=POLICY, params=0)
    actions = {row.name: row.action for row in found.inside}
    assert actions["scan.0/dot_general.0"] == "Save()"
    assert "Quantized" in actions["scan.0/dot_general.1"]
