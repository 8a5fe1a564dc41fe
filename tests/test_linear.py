"""The compressed linear op: what is exact is exact, what is saved is what is said."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.ad_checkpoint import saved_residuals

import jaxcompact as jc
from jaxcompact.subspace import with_sketches

N, M = 24, 10
KINDS = ("gaussian", "rademacher", "sparse", "countsketch", "orthonormal")


def layer_params(dtype=jnp.float32, n=N, m=M):
    kw, kb = jax.random.split(jax.random.key(1))
    return {
        "kernel": jax.random.normal(kw, (n, m), dtype),
        "bias": jax.random.normal(kb, (m,), dtype),
    }


def layer_input(dtype=jnp.float32, n=N):
    return jax.random.normal(jax.random.key(2), (4, 6, n), dtype)


def loss(params, x):
    y = jc.linear(x, params["kernel"], params["bias"])
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


def subspace(rules="kernel", period=10, rank=8, **kwargs) -> jc.Subspace:
    rules = {rules: jc.Projection(rank=rank, **kwargs)}
    return jc.Subspace(rules, key=jax.random.key(7), period=period)


def matrix_of(space: jc.Subspace, params, path="kernel", step=0):
    """P itself, for a kernel without layer axes."""
    slot = space.slots(params)[path]
    key = slot.keys(space.key, space.generation(step))
    return slot.projection.matrix(key, slot.width)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_output_dx_and_bias_gradient_are_the_plain_layers(kind, dtype):
    params, x = layer_params(dtype), layer_input(dtype)
    value, (exact, dx) = jax.value_and_grad(loss, argnums=(0, 1))(params, x)

    def sketched(x):
        value, grads = jc.value_and_grad(loss, subspace(kind=kind))(params, x, step=0)
        return value, grads

    (got, grads), got_dx = jax.value_and_grad(sketched, has_aux=True)(x)
    np.testing.assert_array_equal(got, value)
    np.testing.assert_array_equal(got_dx, dx)
    np.testing.assert_array_equal(grads["bias"], exact["bias"])
    assert got_dx.dtype == grads["bias"].dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_sketch_is_p_transposed_times_the_full_gradient(kind):
    params, x = layer_params(), layer_input()
    space = subspace(kind=kind)
    _, grads = jc.value_and_grad(loss, space)(params, x, step=0)
    full = jax.grad(loss)(params, x)["kernel"]
    expected = matrix_of(space, params).T @ full
    assert grads["kernel"].shape == (8, M) and grads["kernel"].dtype == jnp.float32
    # Both sum over 24 tokens and 24 inputs, in another order.
    tolerance = (24 + N) * np.finfo(np.float32).eps * float(jnp.abs(full).max()) * N
    np.testing.assert_allclose(grads["kernel"], expected, atol=tolerance)


@pytest.mark.parametrize("bits", [4, 8])
def test_sketch_through_a_codec(bits):
    """Tight: z^T dy, z decoded by hand. Loose: within the codec's error of exact."""
    params, x = layer_params(), layer_input()
    codec = jc.Quantized(bits=bits, group_size=4)
    space = subspace(codec=codec)
    _, grads = jc.value_and_grad(loss, space)(params, x, step=0)
    z = x @ matrix_of(space, params)
    dy = jnp.cos(jc.linear(x, params["kernel"], params["bias"]))
    by_hand = jnp.einsum("btr,btm->rm", codec.decode(codec.encode(z)), dy)
    np.testing.assert_allclose(grads["kernel"], by_hand, rtol=1e-4, atol=1e-4)
    exact = jnp.einsum("btr,btm->rm", z, dy)
    error = jnp.linalg.norm(grads["kernel"] - exact) / jnp.linalg.norm(exact)
    # Uniform rounding error of a step max|z| / q, against the rms of z.
    step = jnp.abs(z).max() / (2 ** (bits - 1) - 1)
    assert 0 < error < float(step / z.std())


# --- what is saved -----------------------------------------------------------------


def block(params, x):
    """LLaMA's block without attention: q, k, v read one tensor, gate, up another."""
    a = jnp.sin(x)
    q, k, v = (jc.linear(a, params["attn"][n]["kernel"]) for n in "qkv")
    x = x + jnp.tanh(q * k + v)
    b = jnp.cos(x)
    h = jc.linear(b, params["mlp"]["gate"]["kernel"])
    h = h * jc.linear(b, params["mlp"]["up"]["kernel"])
    return x + jc.linear(h, params["mlp"]["down"]["kernel"])


def block_params(d=16, ff=40, layers=()):
    shapes = {
        "attn": {"q": (d, d), "k": (d, d), "v": (d, d)},
        "mlp": {"gate": (d, ff), "up": (d, ff), "down": (ff, d)},
    }
    return jax.tree.map(
        lambda shape: {"kernel": jnp.ones((*layers, *shape)) / 16},
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def residuals(fun, space, params, *args) -> list[tuple]:
    """(dtype, shape, by whom) of all that is saved for the backward pass.

    Arguments and the weights, which the caller holds anyway, are left out.
    """
    fun, tree = with_sketches(fun, space, params, step=0)
    saved = saved_residuals(fun, tree, *args)
    weights = sorted(leaf.shape for leaf in jax.tree.leaves(params))
    assert sorted(a.shape for a, s in saved if s == "from a constant") == weights
    held = ("argument", "constant")
    saved = [(a, s) for a, s in saved if not any(word in s for word in held)]
    return [(a.dtype.name, a.shape, s) for a, s in saved]


def test_one_layer_saves_z_and_the_weight_and_nothing_else():
    params, x = {"kernel": layer_params()["kernel"]}, layer_input()

    def product(params, x):
        return jnp.sum(jc.linear(x, params["kernel"]))

    [z] = residuals(product, subspace(), params, x)
    assert z[:2] == ("float32", (4, 6, 8)) and SKETCH in z[2]
    saved = residuals(product, subspace(codec=jc.Quantized(4)), params, x)
    # 192 entries, whose short rows are merged: 96 bytes of codes and three scales.
    assert sorted(s[:2] for s in saved) == [("bfloat16", (3,)), ("uint8", (96,))]
    plain = [(a.shape, s) for a, s in saved_residuals(product, params, x)]
    assert ((4, 6, N), "from the argument x") in plain


SKETCH = "sketched_input"  # the function that makes sketches
BLOCK = r"attn/./kernel|mlp/.*/kernel"


def test_a_block_saves_one_sketch_an_input_and_no_linear_input():
    """By name: what the products save is a sketch; the rest is the elementwise ops'."""
    space, x = subspace(BLOCK, rank=0.25), jnp.ones((2, 8, 16))
    saved = residuals(lambda p, x: block(p, x).sum(), space, block_params(), x)
    sketches = [shape for _, shape, source in saved if SKETCH in source]
    # One for q, k, v, one for gate and up, one for down.
    assert sketches == [(2, 8, 4), (2, 8, 4), (2, 8, 10)]
    others = [(shape, source) for _, shape, source in saved if SKETCH not in source]
    # d cos, q and k, d tanh, d sin at width 16; gate and up at width 40. The inputs of
    # the products, sin(x), cos(x) and gate * up, are not among them.
    assert sorted(shape for shape, _ in others) == [(2, 8, 16)] * 5 + [(2, 8, 40)] * 2
    made_by = {source.split(" from ")[0] for _, source in others}
    assert "output of mul" not in made_by


def test_a_scan_over_layers_stacks_one_sketch_an_input_and_no_weight():
    space, x = subspace(BLOCK, rank=0.25), jnp.ones((2, 8, 16))

    def layers(params, x):
        return jax.lax.scan(lambda x, p: (block(p, x), None), x, params)[0].sum()

    saved = residuals(layers, space, block_params(layers=(3,)), x)
    assert sorted(shape for _, shape, _ in saved) == sorted(
        [(3, 2, 8, 4)] * 2 + [(3, 2, 8, 10)] + [(3, 2, 8, 16)] * 5 + [(3, 2, 8, 40)] * 2
    )


def test_checkpoint_can_keep_the_sketches_alone():
    """`jax.checkpoint` by name: only sketches and the block's input cross over."""
    space, x = subspace(BLOCK, rank=0.25), jnp.ones((2, 8, 16))
    policy = jax.checkpoint_policies.save_only_these_names("sketch")
    kept = jax.checkpoint(block, policy=policy)
    saved = residuals(lambda p, x: kept(p, x).sum(), space, block_params(), x)
    assert sorted(shape for _, shape, _ in saved) == [(2, 8, 4), (2, 8, 4), (2, 8, 10)]
    fun, tree = with_sketches(block, space, block_params(), 0)
    kept_fun, _ = with_sketches(kept, space, block_params(), 0)
    exact = jax.grad(lambda t: jnp.sum(fun(t, x) ** 2))(tree)
    got = jax.grad(lambda t: jnp.sum(kept_fun(t, x) ** 2))(tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), exact, got)


def test_checkpoint_policies_see_the_products():
    """Under "save dots", y and z are kept, and no product is made a second time."""
    space, x = subspace(BLOCK, rank=0.25), jnp.ones((2, 8, 16))
    kept = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    saved = residuals(lambda p, x: kept(p, x).sum(), space, block_params(), x)
    # q, k, v, gate, up, and the sketches of their inputs and of down's.
    assert sorted(shape for _, shape, _ in saved) == sorted(
        [(2, 8, 16)] * 3 + [(2, 8, 40)] * 2 + [(2, 8, 4)] * 2 + [(2, 8, 10)]
    )
    fun, tree = with_sketches(lambda p, x: kept(p, x).sum(), space, block_params(), 0)
    _, backward = jax.vjp(fun, tree, x)
    text = str(jax.make_jaxpr(backward)(jnp.ones(())))
    assert text.count("dot_general[") == 2 * 6  # dx and the sketch, of six kernels


def test_no_array_of_the_kernels_shape_is_made_in_the_backward_pass():
    space = subspace(BLOCK, rank=0.25)
    fun, tree = with_sketches(
        lambda p, x: block(p, x).sum(), space, block_params(d=16, ff=40), 0
    )
    x = jnp.ones((2, 8, 16))
    _, backward = jax.vjp(fun, tree, x)
    text = str(jax.make_jaxpr(backward)(jnp.ones(())))
    made = [
        line for line in text.splitlines() if "dot_general" in line or "= add" in line
    ]
    assert made
    # W^T is read for dx; nothing else may have the shape of a kernel.
    assert not [line for line in made if "f32[16,40]" in line or "f32[40,16]" in line]
    plain = str(jax.make_jaxpr(jax.grad(lambda p: block(p, x).sum()))(block_params()))
    assert "f32[16,40] = dot_general" in plain or "f32[40,16] = dot_general" in plain


# --- sharing -----------------------------------------------------------------------


def gradients(fun, space, params, *args):
    return jc.value_and_grad(fun, space)(params, *args, step=0)[1]


def test_kernels_of_two_layers_on_one_input_keep_their_own_projection():
    """An ensemble taken from a stack by hand: same module, same input, another P."""
    names = ("q", "k")
    kernels = jax.random.normal(jax.random.key(0), (2, 2, N, M))
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
    params = {"w": jax.random.normal(jax.random.key(3), (3, N, N)) / 4}
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


# --- errors ------------------------------------------------------------------------


def test_a_kernel_that_does_not_fit_the_input():
    with pytest.raises(
        ValueError, match=r"kernel must have shape \(n, m\).*got kernel"
    ):
        jc.linear(jnp.ones((2, 3)), jnp.ones((4, 5)))


READERS = {
    "dot": lambda k: jnp.dot(jnp.ones(N), k),
    "matmul": lambda k: jnp.ones(N) @ k,
    "einsum": lambda k: jnp.einsum("nm->m", k),
    "times": lambda k: k * 2.0,
    "times a kernel": lambda k: 2.0 * k,
    "less a kernel": lambda k: 1.0 - k,
    "above": lambda k: k > 0,
    "negative": lambda k: -k,
    "item": lambda k: k[0],
    "numpy": np.asarray,
    "transposed": lambda k: k.T,
    "astype": lambda k: k.astype(jnp.bfloat16),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_layer_that_knows_no_sketches_says_so(read):
    def plain(params, x):
        return jnp.sum(x) + jnp.sum(read(params["kernel"]))

    told = "'kernel' is in the subspace, but the layer"
    with pytest.raises((ValueError, AttributeError), match=told):
        jc.value_and_grad(plain, subspace())(
            {"kernel": jnp.ones((N, M))}, layer_input(), step=0
        )


TREE_READERS = {
    "cast": lambda p: jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)["bias"],
    "penalty": lambda p: sum(jnp.sum(w**2) for w in jax.tree.leaves(p)),
    "norm": optax.tree.norm,
    "product": lambda p: jax.lax.dot(jnp.ones((1, N)), p["kernel"]),
}


@pytest.mark.parametrize("read", TREE_READERS.values(), ids=TREE_READERS)
def test_a_tree_that_is_read_as_arrays_says_what_it_is(read):
    def loss(params, x):
        return jnp.sum(jc.linear(x, params["kernel"])) + jnp.sum(read(params))

    with pytest.raises(Exception, match="In the subspace are kernel: each is a weight"):
        jc.value_and_grad(loss, subspace())(layer_params(), layer_input(), step=0)


def test_a_loop_that_reads_a_sketched_kernel_leaks_nothing():
    """What is shared between kernels is a tracer of the loop's body."""
    params, x = layer_params(), layer_input(n=M)
    params["kernel"] = jnp.eye(M) / 2

    def looped(params, x):
        def body(x, _):
            return jnp.sin(jc.linear(x, params["kernel"], params["bias"])), None

        return jnp.sum(jax.lax.scan(body, x, length=3)[0])

    grad = jc.value_and_grad(looped, subspace())
    expected = grad(params, x, step=0)
    with jax.checking_leaks():
        found = grad(params, x, step=0)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
