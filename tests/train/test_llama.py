"""What makes the model a LLaMA, and what training relies on."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxcompact as jc
from configs import MODELS, ModelConfig
from llama import Llama, generate, rope, rope_tables
from loss import next_token_loss
from tests.cases import slow
from tests.draws import normal

CONFIG = ModelConfig(
    vocab_size=96, width=32, ff=48, layers=2, heads=4, kv_heads=2, max_seq=32
)
EPS = float(jnp.finfo(jnp.float32).eps)


def make(cfg=CONFIG, **kwargs):
    return Llama(cfg, **{"dtype": jnp.float32, "rngs": nnx.Rngs(0)} | kwargs)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, 17), 0, CONFIG.vocab_size)


@pytest.fixture(scope="module")
def model():
    return make()


def loss_of(model):
    """The loss as a function of the model's parameters, and these."""
    graphdef, params = nnx.split(model, nnx.Param)

    def loss(params, tokens):
        model = nnx.merge(graphdef, params)
        hidden = model.hidden(tokens[:, :-1])
        return next_token_loss(hidden, model.output_kernel(), tokens[:, 1:])

    return loss, params


def tolerance(expected, products=7 * CONFIG.layers + 1, width=CONFIG.width):
    """Each product in the chain rounds with a relative error of about eps sqrt(n)."""
    return EPS * math.sqrt(width) * products * float(jnp.abs(expected).max())


# --- parameters ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, millions",
    [
        ("tiny", 9.00),
        ("60m", 58.07),
        ("130m", 134.11),
        ("350m", 367.97),
        ("1b", 1339.53),  # the papers': 1339.08, whose ff is 5461
        ("7b", 6738.42),
    ],
)
def test_the_papers_models_have_the_papers_sizes(name, millions):
    cfg = MODELS[name]
    state = nnx.state(nnx.eval_shape(lambda: Llama(cfg, rngs=nnx.Rngs(0))))
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(state))
    d, f, v = cfg.width, cfg.ff, cfg.vocab_size
    assert count == 2 * v * d + cfg.layers * (4 * d * d + 3 * d * f + 2 * d) + d
    assert round(count / 1e6, 2) == millions


def test_parameter_paths_and_shapes(model):
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    leaves = jax.tree.leaves_with_path(params)
    shapes = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}
    assert {path: x.shape for path, x in shapes.items()} == {
        "embed/embedding": (96, 32),
        "layers/attn_norm/scale": (2, 32),
        "layers/attn/q/kernel": (2, 32, 32),
        "layers/attn/k/kernel": (2, 32, 16),
        "layers/attn/v/kernel": (2, 32, 16),
        "layers/attn/o/kernel": (2, 32, 32),
        "layers/mlp_norm/scale": (2, 32),
        "layers/mlp/gate/kernel": (2, 32, 48),
        "layers/mlp/up/kernel": (2, 32, 48),
        "layers/mlp/down/kernel": (2, 48, 32),
        "norm/scale": (32,),
        "head/kernel": (32, 96),
    }


def test_initial_weights_are_small_normal_and_differ_between_layers(model):
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    deviations = math.sqrt(2 * kernel.size)  # of the sample's standard deviation
    assert abs(float(kernel.std()) / 0.02 - 1) < 4 / deviations
    assert not np.array_equal(kernel[0], kernel[1])
    assert (params["layers"]["attn_norm"]["scale"] == 1).all()


def test_compute_in_bfloat16_keeps_parameters_and_gradients_in_float32(model, tokens):
    low = make(dtype=jnp.bfloat16)
    loss, params = loss_of(low)
    grads = jax.eval_shape(jax.grad(loss), params, tokens)
    assert {x.dtype for x in jax.tree.leaves((params, grads))} == {jnp.dtype("float32")}

    assert jax.eval_shape(low.hidden, tokens).dtype == jnp.bfloat16
    logits, exact = nnx.jit(low)(tokens), nnx.jit(model)(tokens)
    assert logits.dtype == jnp.float32
    bound = tolerance(exact) * float(jnp.finfo(jnp.bfloat16).eps) / EPS
    assert 0 < float(jnp.abs(logits - exact).max()) < bound


# --- the function ----------------------------------------------------------------


def test_a_later_token_changes_no_earlier_logits(model, tokens):
    model = nnx.jit(model)
    before = model(tokens)
    after = model(tokens.at[:, 9].set((tokens[:, 9] + 1) % CONFIG.vocab_size))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (jnp.abs(before - after)[:, 9:].max(axis=(0, 2)) > 0).all()


def test_scan_equals_a_loop_over_the_layers(model, tokens):
    graphdef, stack = nnx.split(model.layers)
    x = model.embed(tokens)
    tables = rope_tables(tokens.shape[1], CONFIG.head_dim, CONFIG.rope_theta)
    for i in range(CONFIG.layers):
        x = nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], stack))(x, *tables)
    expected = model.norm(x)
    np.testing.assert_allclose(
        model.hidden(tokens), expected, rtol=0, atol=tolerance(expected)
    )


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values(model, tokens):
    full = make(dataclasses.replace(CONFIG, kv_heads=None))
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for name in "kv":
        kernel = state["layers"]["attn"][name]["kernel"]
        heads = kernel.reshape(2, 32, 2, 8).repeat(2, axis=2)
        state["layers"]["attn"][name]["kernel"] = heads.reshape(2, 32, 32)
    nnx.update(full, state)
    expected = full(tokens)
    np.testing.assert_allclose(
        model(tokens), expected, rtol=0, atol=tolerance(expected)
    )


def test_a_tied_head_is_the_embedding(tokens):
    model = make(dataclasses.replace(CONFIG, tied=True))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    assert "head" not in params
    np.testing.assert_array_equal(model.output_kernel(), params["embed"]["embedding"].T)
    expected = model.hidden(tokens) @ params["embed"]["embedding"].T
    np.testing.assert_allclose(
        model(tokens), expected, rtol=0, atol=tolerance(expected, products=1)
    )


def test_rope_turns_the_halves_of_a_head_as_complex_numbers():
    x = normal(0, 2, 5, 3, 8)
    turned = rope(x, *rope_tables(5, 8, 100.0))
    frequencies = 100.0 ** (-np.arange(4) / 4)
    angles = np.arange(5)[:, None] * frequencies
    z = np.asarray(x[..., :4], np.complex128) + 1j * np.asarray(x[..., 4:])
    z *= np.exp(1j * angles)[None, :, None]
    # float32 angles up to 4, then a sum of two products
    expected = np.concatenate([z.real, z.imag], -1)
    np.testing.assert_allclose(turned, expected, rtol=0, atol=16 * EPS * 4)


def test_rope_sees_distances_alone():
    q, k = normal(0, 2, 16)
    tables = rope_tables(12, 16, 1e4)
    turn = lambda x: rope(jnp.tile(x, (1, 12, 1, 1)), *tables)[0, :, 0]  # noqa: E731
    scores = np.asarray(turn(q) @ turn(k).T)
    scale = float(jnp.linalg.norm(q) * jnp.linalg.norm(k))
    for distance in range(-11, 12):
        diagonal = np.diagonal(scores, distance)
        # angles are up to 11 radians, so rounding them costs 11 eps
        np.testing.assert_allclose(
            diagonal, diagonal[0], rtol=0, atol=4 * 11 * EPS * scale
        )
    assert np.ptp(scores[0]) > 0.1


@pytest.mark.slow
def test_generate_equals_choosing_the_likeliest_id_again_and_again(model):
    ids = [5, 7, 11]
    for _ in range(4):
        logits = model(jnp.array([ids], jnp.int32))[0, -1]
        ids.append(int(jnp.argmax(logits)))
    assert generate(model, [5, 7, 11], 4) == ids[3:]


def test_an_id_outside_the_vocabulary_shows(model, tokens):
    assert jnp.isnan(model(tokens.at[0, 3].set(CONFIG.vocab_size))[0, 3:]).all()


# --- training --------------------------------------------------------------------


def residual_bytes(loss, params, tokens):
    vjp = jax.eval_shape(lambda p: jax.vjp(lambda p: loss(p, tokens), p)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(vjp))


@pytest.mark.slow
def test_checkpoint_changes_what_is_saved_and_nothing_else(model, tokens):
    loss, params = loss_of(model)
    expected, expected_grads = jax.jit(jax.value_and_grad(loss))(params, tokens)
    saved = [residual_bytes(loss, params, tokens)]
    for policy in (jax.checkpoint_policies.dots_saveable, "nothing"):
        loss, params = loss_of(make(checkpoint=policy))
        value, grads = jax.jit(jax.value_and_grad(loss))(params, tokens)
        np.testing.assert_allclose(value, expected, rtol=4 * EPS)
        for a, b in zip(
            jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance(b))
        saved.append(residual_bytes(loss, params, tokens))
    assert saved[0] > saved[1] > saved[2]


@pytest.mark.slow
@pytest.mark.parametrize("bits, error", [slow(8, 0.02), (4, 0.3)])
def test_encoded_layers_leave_the_loss_and_little_of_the_bytes(
    model, tokens, bits, error
):
    """8 bits are 1/254 of a group's extreme; 4 bits 1/16, of many, through softmax."""
    loss, params = loss_of(model)
    expected, exact = jax.jit(jax.value_and_grad(loss))(params, tokens)
    saved = residual_bytes(loss, params, tokens)
    policy = jc.policies.compress(jc.Quantized(bits))
    loss, params = loss_of(make(checkpoint=policy))
    value, grads = jax.jit(jax.value_and_grad(loss))(params, tokens)
    np.testing.assert_allclose(value, expected, rtol=4 * EPS)
    found, exact = (
        jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
        for tree in (grads, exact)
    )
    assert 0 < jnp.linalg.norm(found - exact) < error * jnp.linalg.norm(exact)
    assert residual_bytes(loss, params, tokens) < 0.6 * saved


@pytest.mark.parametrize(
    "policy",
    [
        slow(None),
        slow("nothing"),
        jc.policies.int4(),
    ],
)
def test_kernels_in_a_subspace_pass_through_the_scan(tokens, policy):
    loss, params = loss_of(make(checkpoint=policy))
    rules = {"layers/(attn/[qkv]|mlp/(gate|up|down))/kernel": jc.Projection(rank=0.25)}
    subspace = jc.Subspace(rules, key=jax.random.key(0))
    value, grads = jax.jit(jc.value_and_grad(loss, subspace))(params, tokens, step=0)
    np.testing.assert_allclose(value, jax.jit(loss)(params, tokens), rtol=4 * EPS)
    grads = nnx.to_pure_dict(grads)
    assert grads["layers"]["attn"]["k"]["kernel"].shape == (2, 8, 16)
    assert grads["layers"]["mlp"]["down"]["kernel"].shape == (2, 12, 32)
    assert grads["layers"]["attn"]["o"]["kernel"].shape == (2, 32, 32)


# --- what is refused -------------------------------------------------------------


def test_a_sequence_longer_than_the_model_allows(model):
    with pytest.raises(ValueError, match="tokens_bt .* max_seq = 32 long, got 33"):
        model.hidden(jnp.zeros((1, 33), jnp.int32))


@pytest.mark.parametrize(
    "argument, rule",
    [
        ({"checkpoint": "everything"}, "checkpoint must be None, .* got 'everything'"),
        ({"attention": "flash"}, "attention must be None, .* got 'flash'"),
    ],
)
def test_wrong_arguments(argument, rule):
    with pytest.raises(ValueError, match=rule):
        make(**argument)
