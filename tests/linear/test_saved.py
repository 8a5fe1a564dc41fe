"""What a compressed layer saves is what is said: a sketch for each input."""

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.ad_checkpoint import saved_residuals

import jaxcompact as jc
from jaxcompact.subspace import with_sketches
from tests.linear.layers import N, layer_input, layer_params, subspace


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


def test_in_a_checkpoint_what_makes_a_sketch_is_not_stored():
    """Two layers in a row: of what lies between the backward pass reads z alone."""
    space, x = subspace("up|down", rank=0.25), jnp.ones((64, 64))
    params = {"up": jnp.ones((64, 128)), "down": jnp.ones((128, 64))}

    def twice(params, x):
        return jnp.tanh(jc.linear(jc.linear(x, params["up"]), params["down"]))

    kept = jc.checkpoint(twice, policy=jc.Policy(default=jc.Save()), params=0)
    saved = residuals(lambda p, x: kept(p, x).sum(), space, params, x)
    assert sorted(shape for _, shape, _ in saved) == [(64, 16), (64, 32), (64, 64)]
    said, tree = with_sketches(lambda p, x: jc.explain(kept, p, x), space, params, 0)
    rows = {row.name: row for row in said(tree, x).rows}
    assert rows["x"].stored == rows["custom_vjp_call.0"].stored == 0
