"""Kernels of one layer share a sketch of what they read; others have their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcompact as jc
from tests.cases import slow
from tests.draws import normal
from tests.linear.layers import M, N, layer_input, layer_params, loss, subspace


def gradients(fun, space, params, *args):
    return jc.value_and_grad(fun, space)(params, *args, step=0)[1]


def test_kernels_of_two_layers_on_one_input_keep_their_own_projection():
    """An ensemble taken from a stack by hand: same module, same input, another P."""
    names = ("q", "k")
    kernels = normal(0, 2, 2, N, M)
    params = {"attn": {n: {"kernel": w} for n, w in zip(names, kernels, strict=True)}}
    space, x = subspace(r"attn/./kernel"), layer_input()

    def by_kernel(params, x):
        return sum(
            jnp.sum(jnp.sin(jc.linear(x, one_layer(params, i)["attn"][n]["kernel"])))
            for n in names
            for i in range(2)
        )

    def by_layer(params, x):
        return sum(
            jnp.sum(jnp.sin(jc.linear(x, one_layer(params, i)["attn"][n]["kernel"])))
            for i in range(2)
            for n in names
        )

    full = jax.grad(by_layer)(params, x)
    slots = space.slots(params)
    for fun in (by_kernel, by_layer):
        got = gradients(fun, space, params, x)
        for n in names:
            slot = slots[f"attn/{n}/kernel"]
            keys = slot.keys(space.key, 0)
            for i in range(2):
                p = slot.projection.matrix(keys[i], N)
                expected = p.T @ full["attn"][n]["kernel"][i]
                np.testing.assert_allclose(
                    got["attn"][n]["kernel"][i], expected, rtol=1e-3, atol=1e-3
                )


def taken(kernel, *index):
    return jax.tree.map(lambda a: a[index], kernel)


def experts(params, x):
    """In each layer one that all tokens read, beside two that are taken by hand."""

    def layer(x, p):
        y = jc.linear(x, p["shared"])
        for e in range(2):
            y += jc.linear(x, taken(p["routed"], e))
        return jnp.tanh(y), None

    return jax.lax.scan(layer, x, params["mlp"])[0].sum()


def other_experts(params, x):
    """No scan: the shared one of a layer first, then experts of others."""
    y = jc.linear(x, taken(params["mlp"]["shared"], 1))
    for index in ((0, 1), (2, 0)):
        y += jc.linear(x, taken(params["mlp"]["routed"], *index))
    return jnp.tanh(y).sum()


@pytest.mark.parametrize("fun", [experts, other_experts])
@pytest.mark.parametrize("jitted", [False, True])
def test_kernels_share_no_sketch_but_of_one_layer(fun, jitted):
    """Of one module and width, stacked otherwise: keys of other numbers."""
    keys = jax.random.split(jax.random.key(3), 2)
    params = {
        "mlp": {
            "shared": jax.random.normal(keys[0], (3, N, N)) / 4,
            "routed": jax.random.normal(keys[1], (3, 2, N, N)) / 4,
        }
    }
    space, x = subspace("mlp/.*"), layer_input()
    grad = jc.value_and_grad(fun, space)
    got = (jax.jit(grad) if jitted else grad)(params, x, step=0)[1]
    full = jax.grad(fun)(params, x)
    for name, slot in space.slots(params).items():
        found, exact = (t["mlp"][name.split("/")[1]] for t in (got, full))
        p = [slot.projection.matrix(k, N) for k in slot.keys(space.key, 0).reshape(-1)]
        p = jnp.stack(p).reshape(*slot.stack, N, -1)
        expected = jnp.einsum("...nr,...nm->...rm", p, exact)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def two_streams(params, x):
    """Each asks the other: kernels are stacked over the two."""
    y = jnp.flip(x, 0) + 1
    loss = 0.0
    for i, (mine, other) in enumerate([(x, y), (y, x)]):
        kernels = one_layer(params, i)["attn"]
        q, k, v = (
            jc.linear(read, kernels[name]["kernel"])
            for name, read in zip("qkv", (mine, other, other), strict=True)
        )
        loss += jnp.sin(q * k).sum() + jnp.square(v).sum()
    return loss


def rolled(params, x):
    """A layer's q reads what k of the layer before reads."""
    kernels = params["attn"]
    before = jax.tree.map(lambda a: jnp.roll(a, 1, 0), kernels["k"])

    def layer(x, kernels):
        q, k = (jc.linear(x, kernel["kernel"]) for kernel in kernels)
        return jnp.tanh(x + (q * k).mean(-1, keepdims=True)), None

    return jax.lax.scan(layer, x, (kernels["q"], before))[0].sum()


@pytest.mark.parametrize(
    ("fun", "right"),
    [
        (two_streams, True),
        (jax.checkpoint(two_streams), False),
        (jc.checkpoint(two_streams, policy=jc.Policy(), params=0), False),
        (jax.jit(two_streams), False),
        (rolled, False),
    ],
)
def test_the_sketch_of_another_layer_is_no_gradient(fun, right):
    """Right, or NaN where only the compiled program knows which layers are read."""
    space, x = subspace("attn/./kernel"), layer_input()
    keys = jax.random.split(jax.random.key(3), 3)
    params = {
        "attn": {
            n: {"kernel": jax.random.normal(key, (2, N, M)) / 4}
            for n, key in zip("qkv", keys, strict=True)
        }
    }
    value, got = jc.value_and_grad(fun, space)(params, x, step=0)
    exact, full = jax.value_and_grad(fun)(params, x)
    np.testing.assert_allclose(value, exact, rtol=1e-6)
    seen = []
    for path, slot in space.slots(params).items():
        name = path.split("/")[1]
        for i, key in enumerate(slot.keys(space.key, 0)):
            found = got["attn"][name]["kernel"][i]
            expected = (
                slot.projection.matrix(key, N).T @ full["attn"][name]["kernel"][i]
            )
            seen.append(bool(jnp.isfinite(found).all()))
            if seen[-1]:
                np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
            else:
                assert jnp.isnan(found).all()
    assert all(seen) == right and any(seen)


def by_int(kernels):
    return taken(kernels[0], 0), taken(kernels[1], 1)


def by_roll(kernels):
    """All layers, of which the first is looked at."""
    return kernels[0], jax.tree.map(lambda a: jnp.roll(a, 1, 0), kernels[1])


@pytest.mark.parametrize("wrap", [jax.jit, slow(jax.checkpoint), jc.checkpoint])
@pytest.mark.parametrize("take", [by_int, by_roll, "by a traced index"])
def test_what_was_traced_before_is_no_excuse(wrap, take):
    """A layer that a scan had traced is then given kernels of two layers: NaN."""
    where = {"params": (0, 1)} if wrap is jc.checkpoint else {}
    both = wrap(lambda q, k, x: jc.linear(x, q) * jc.linear(x, k), **where)
    space, x = subspace("q|k"), layer_input()
    params = dict(zip("qk", normal(3, 2, 2, N, N) / 4, strict=True))

    def over(kernels, x):
        def layer(x, kernels):
            return jnp.tanh(both(*kernels, x)), None

        return jax.lax.scan(layer, x, kernels)[0]

    def fun(params, x, index):
        kernels = params["q"], params["k"]
        x = over(kernels, x)
        if take is by_int:
            x = both(*by_int(kernels), x)
        elif take is by_roll:
            x = over(by_roll(kernels), x)
        else:
            x = both(taken(kernels[0], index), taken(kernels[1], 1 - index), x)
        return x.sum()

    grad = jc.value_and_grad(fun, space)
    got = jax.jit(lambda *args: grad(*args, step=0))(params, x, 0)[1]
    assert np.isnan(got["k"]).any()

    def ordinary(params, x):
        return over((params["q"], params["k"]), x).sum()

    got = jax.jit(lambda *args: jc.value_and_grad(ordinary, space)(*args, step=0))
    assert np.isfinite(got(params, x)[1]["k"]).all()


def test_a_real_kernel_may_read_a_complex_input():
    """Of the product's derivative the real part, as for a plain kernel; no warning."""
    space, kernel = subspace("w"), layer_params()["kernel"]
    x = jax.lax.complex(layer_input(), 2 * layer_input())

    def fun(params, x):
        return jnp.sum(jnp.abs(jc.linear(x, params["w"], dtype=jnp.complex64)) ** 2)

    found = jc.value_and_grad(fun, space)({"w": kernel}, x, step=0)[1]["w"]
    full = jax.grad(fun)({"w": kernel}, x)["w"]
    slot = space.slots({"w": kernel})["w"]
    p = slot.projection.matrix(slot.keys(space.key, 0), N)
    assert found.dtype == kernel.dtype
    np.testing.assert_allclose(found, p.T @ full, rtol=1e-3, atol=1e-3)


def looped(params, x):
    def layer(i, x):
        return jnp.tanh(jc.linear(x, taken(params["w"], i)))

    return jax.lax.fori_loop(0, 3, layer, x).sum()


def scanned(params, x):
    def layer(x, i):
        return jnp.tanh(jc.linear(x, taken(params["w"], i))), None

    return jax.lax.scan(layer, x, jnp.arange(3))[0].sum()


def routed(params, x):
    """By the first token, to one of several."""
    return jnp.tanh(jc.linear(x, taken(params["w"], jnp.argmax(x[0, 0]) % 3))).sum()


def reordered(params, x):
    def layer(x, kernel):
        return jnp.tanh(jc.linear(x, kernel)), None

    return jax.lax.scan(layer, x, taken(params["w"], jnp.array([2, 0, 1])))[0].sum()


@pytest.mark.parametrize("fun", [looped, scanned, routed, reordered])
@pytest.mark.parametrize("jitted", [False, True])
def test_layers_may_be_taken_by_a_traced_index(fun, jitted):
    params = {"w": normal(3, 3, N, N) / 4}
    space, x = subspace("w"), layer_input()
    grad = jc.value_and_grad(fun, space)
    got = (jax.jit(grad) if jitted else grad)(params, x, step=0)[1]["w"]
    full = jax.grad(fun)(params, x)["w"]
    slot = space.slots(params)["w"]
    for found, exact, key in zip(got, full, slot.keys(space.key, 0), strict=True):
        expected = slot.projection.matrix(key, N).T @ exact
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_layers_taken_by_hand_share_their_sketch():
    """As those of a scan do: q and k of one layer, one z; also where all is traced."""
    space, x = subspace(r"attn/./kernel"), layer_input()
    kernel = jnp.ones((2, N, M)) / N
    params = {"attn": {n: {"kernel": kernel} for n in "qk"}}

    def fun(params, x):
        read = (one_layer(params, 1)["attn"][n]["kernel"] for n in "qk")
        return sum(jnp.sum(jnp.sin(jc.linear(x, k))) for k in read)

    grad = jc.value_and_grad(fun, space)
    traced = jax.make_jaxpr(lambda params: grad(params, x, step=0))(params)
    assert str(traced).count("name=sketch") == 1


def test_no_derivative_is_taken_within_the_function():
    """Of what is a sketch in its backward pass there would be none: zeros, silently."""
    params = layer_params()

    def force(params, x):
        value, moved = jax.value_and_grad(loss, argnums=1)(params, x)
        return value + jnp.sum(moved**2)

    def value_alone(params, x):
        return jax.vjp(lambda x: loss(params, x), x)[0]

    for fun in (force, value_alone):
        with pytest.raises(NotImplementedError, match="has no second derivative"):
            jc.value_and_grad(fun, subspace())(params, layer_input(), step=0)


def one_layer(params, i):
    return jax.tree.map(lambda a: a[i], params)


def test_what_numpy_changes_in_place_is_read_again():
    kernels = normal(0, 2, N, M)
    params = {"attn": {n: {"kernel": w} for n, w in zip("qk", kernels, strict=True)}}

    def fun(params, x):
        y = jc.linear(x, params["attn"]["q"]["kernel"]).sum()
        x *= 2
        return y + jc.linear(x, params["attn"]["k"]["kernel"]).sum()

    space, x = subspace(r"attn/./kernel"), layer_input()
    a, b = (gradients(fun, space, params, f(x)) for f in (np.array, jnp.array))
    np.testing.assert_array_equal(a["attn"]["k"]["kernel"], b["attn"]["k"]["kernel"])


def test_a_sketch_does_not_leave_the_trace_it_was_made_in():
    """x is shared by an inner jit and the outer function; z must be made in both."""
    params = {"attn": {n: {"kernel": jnp.ones((N, M)) / N} for n in "qk"}}
    space = subspace(r"attn/./kernel")

    def fun(params, x):
        inner = jax.jit(lambda p: jnp.sum(jnp.sin(jc.linear(x, p))))
        first = inner(params["attn"]["q"]["kernel"])
        return first + jnp.sum(jnp.sin(jc.linear(x, params["attn"]["k"]["kernel"])))

    got = jax.jit(lambda p, x: gradients(fun, space, p, x))(params, layer_input())
    assert jnp.isfinite(got["attn"]["q"]["kernel"]).all()
    np.testing.assert_allclose(
        got["attn"]["q"]["kernel"], got["attn"]["k"]["kernel"], rtol=1e-5
    )
