"""The encoder: padding, dropout, masked words, and what the methods do to it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxcompact as jc
from configs import MODELS, RobertaConfig
from dropout import dropout
from masking import MASKED, mask_words
from methods import MATRICES, Method
from roberta import Examples, Roberta
from tests.cases import slow
from tests.draws import normal
from training import Training

pytestmark = pytest.mark.usefixtures("optax_promotion")

CFG = RobertaConfig(
    vocab_size=64,
    width=32,
    ff=48,
    layers=2,
    heads=4,
    max_seq=32,
    init_std=0.3,
    labels=3,
    mask_id=4,
)
WORDS = dataclasses.replace(CFG, labels=0)
SLOW = pytest.mark.slow
EPS = float(jnp.finfo(jnp.float32).eps)
LENGTHS = (7, 12, 3)


def model(cfg=CFG, **keywords) -> Roberta:
    return Roberta(cfg, dtype=jnp.float32, rngs=nnx.Rngs(0), **keywords)


def tokens(length: int) -> jax.Array:
    """Texts of `LENGTHS`, the longer ones cut, padded to a length."""
    random = jax.random.randint(jax.random.key(1), (len(LENGTHS), length), 5, 64)
    random = random.at[:, 0].set(CFG.bos_id)
    real = jnp.arange(length)[None] < jnp.array(LENGTHS)[:, None]
    return jnp.where(real, random, CFG.pad_id)


def examples(length: int = 16) -> Examples:
    """As `Training.gradients` takes them."""
    target, noise = jnp.array([[0, 2, 1]], jnp.int32), jnp.array([5], jnp.int32)
    return Examples(tokens(length)[None], target, noise)


def close(a, b):
    """Of values near 1 after 14 products over 32 terms, each off by eps sqrt(32)."""
    np.testing.assert_allclose(a, b, rtol=0, atol=14 * 32**0.5 * EPS * jnp.abs(b).max())


# --- padding ---------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [CFG, WORDS], ids=["classes", "words"])
def test_padding_changes_no_logit(cfg):
    net = nnx.jit(model(cfg))
    together = net(tokens(16))
    for row, length in enumerate(LENGTHS):
        alone = net(tokens(16)[row : row + 1, :length])[0]
        close(together[row] if cfg.labels else together[row, :length], alone)


def test_the_text_does_change_the_logits():
    net = nnx.jit(model())
    other = tokens(16).at[0, LENGTHS[0] - 1].set(6)
    assert float(jnp.abs(net(other) - net(tokens(16)))[0].max()) > 1e-3
    swapped = tokens(16).at[0, 1].set(tokens(16)[0, 2]).at[0, 2].set(tokens(16)[0, 1])
    assert float(jnp.abs(net(swapped) - net(tokens(16)))[0].max()) > 1e-3


def test_the_longest_sequence_and_one_more():
    net = model()
    assert net(jnp.full((1, 32), 5)).shape == (1, 3)
    with pytest.raises(ValueError, match="at most max_seq = 32 long, got 33"):
        net(jnp.full((1, 33), 5))


# --- dropout ---------------------------------------------------------------------


@pytest.mark.slow
def test_dropout_is_a_function_of_the_noise_and_absent_without():
    net = nnx.jit(lambda m, t, n: m(t, n))
    a, again, b = (net(model(), tokens(16), jnp.int32(n)) for n in (1, 1, 2))
    np.testing.assert_array_equal(a, again)
    assert float(jnp.abs(a - b).max()) > 1e-3
    plain = model()(tokens(16))
    assert float(jnp.abs(a - plain).max()) > 1e-3
    undropped = model(dataclasses.replace(CFG, dropout=0.0))
    close(net(undropped, tokens(16), jnp.int32(1)), plain)


# --- masked words ----------------------------------------------------------------


def test_masks_are_as_many_and_of_the_kinds_that_they_should_be():
    text = jax.random.randint(jax.random.key(2), (256, 512), 5, 64)
    text = text.at[:, 0].set(WORDS.bos_id).at[:, 100].set(WORDS.eos_id)
    text = text.at[:, 500:].set(WORDS.pad_id)
    changed, targets = jax.jit(functools.partial(mask_words, WORDS))(text)
    chosen = np.asarray(targets) >= 0
    special = np.asarray(text) < 5
    assert not chosen[special].any()
    np.testing.assert_array_equal(targets[chosen], text[chosen])
    np.testing.assert_array_equal(changed[~chosen], text[~chosen])
    cleared = np.asarray(changed)[chosen] == WORDS.mask_id
    same = np.asarray(changed == text)[chosen]
    words, n = (~special).sum(), chosen.sum()

    def assert_share(found, expected, of):
        assert abs(found - expected) < 4 * (expected * (1 - expected) / of) ** 0.5

    assert_share(n / words, MASKED, words)
    # Of the tenth that is replaced by any word, one in 64 is <mask> or the same again.
    assert_share(cleared.mean(), 0.8 + 0.1 / 64, n)
    assert_share(same.mean(), 0.1 + 0.1 / 64, n)


def test_no_word_is_replaced_by_padding():
    """Which attention leaves out, and with it the last word in its place."""
    read, _ = mask_words(WORDS, jnp.clip(tokens(64), 5).repeat(200, axis=0))
    assert not (read == WORDS.pad_id).any()


def test_masks_are_a_function_of_the_text():
    text = tokens(32).repeat(20, axis=0)
    first, again = mask_words(WORDS, text), mask_words(WORDS, text)
    np.testing.assert_array_equal(first[1], again[1])
    other = mask_words(WORDS, jnp.roll(text, 1, axis=1))
    assert ((other[1] >= 0) != (first[1] >= 0)).any()


@pytest.mark.slow
def test_microbatches_count_by_their_masked_words(monkeypatch):
    """As the whole batch where the same words are masked, in one text of it none."""

    def mask_words(cfg, tokens_bt):
        chosen = (tokens_bt >= 5) & (tokens_bt % 3 == 0)
        read = jnp.where(chosen, jnp.int32(cfg.mask_id), tokens_bt)
        return read, jnp.where(chosen, tokens_bt, jnp.int32(-1))

    monkeypatch.setattr("roberta.mask_words", mask_words)
    text = tokens(17)
    text = text.at[0].set(jnp.where(text[0] >= 5, 7, text[0]))
    text = text.at[2, 1].set(6).at[2, 2].set(7)
    counts = [int((mask_words(WORDS, row)[1] >= 0).sum()) for row in text]
    assert counts[0] == 0 < counts[2] < counts[1]
    job = make(WORDS)
    state = jax.jit(job.init)()
    found, expected = (
        jax.jit(job.gradients)(state, batch) for batch in (text[:, None], text[None])
    )
    flat = lambda tree: jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])  # noqa: E731
    close(found[0], expected[0])
    close(flat(found[1]), flat(expected[1]))
    nothing, _ = jax.jit(job.gradients)(state, text[:1, None].repeat(2, axis=0))
    assert nothing == 0


def test_the_loss_is_of_the_masked_words_alone():
    """As the logits say, with the bias that the loss hides in its matrix."""
    net = model(WORDS)
    net.words.bias[...] = normal(3, 64)
    text = tokens(17)
    changed, targets = mask_words(WORDS, text[:, :-1])
    logits = jax.nn.log_softmax(net(changed))
    chosen = targets >= 0
    assert chosen.any()
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    expected = -jnp.where(chosen, picked, 0).sum() / chosen.sum()
    np.testing.assert_allclose(net.loss(text), expected, rtol=1e-5)


# --- methods ---------------------------------------------------------------------


def make(cfg=CFG, method=Method(), **keywords) -> Training:  # noqa: B008
    return Training(cfg, method, optax.constant_schedule(1e-2), **keywords)


def test_compact_compresses_what_the_paper_says():
    subspace = Method("compact", rank=4, kind="gaussian").subspace(0)
    slots = subspace.slots(make().abstract.params)
    assert set(slots) == {
        *(f"layers/attn/{name}/kernel" for name in "qkv"),
        *("layers/mlp/up/kernel", "layers/mlp/down/kernel"),
    }
    assert {slot.sketch_shape[-2] for slot in slots.values()} == {4}
    assert len({slots[f"layers/attn/{name}/kernel"].family for name in "qkv"}) == 1
    assert MATRICES  # the names are those of LLaMA's


@pytest.mark.slow
def test_galore_learns_a_batch():
    job = make(method=Method("galore", rank=4))
    step, state, losses = jax.jit(job.step), jax.jit(job.init)(), []
    for _ in range(15):
        state, measured = step(state, examples())
        losses.append(float(measured["loss"]))
    assert losses[-1] < losses[0] / 2
    assert step._cache_size() == 1


@functools.cache
def gradient(checkpoint: str):
    cfg = dataclasses.replace(CFG, init_std=0.02)
    job = make(cfg, method=Method(checkpoint=checkpoint))
    loss, grads = jax.jit(job.gradients)(jax.jit(job.init)(), examples())
    return loss, jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)])


# Each way that there is: recomputed, encoded, attention run again, on the host.
@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoint",
    ["int4", *(slow(c) for c in ("nothing", "int3", "offload"))],
)
def test_a_checkpoint_has_the_exact_loss_and_nearly_the_gradient(checkpoint):
    """Dropout is drawn again in the backward pass as it was in the forward pass."""
    loss, exact = gradient("none")
    found_loss, found = gradient(checkpoint)
    close(found_loss, loss)
    error = float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact))
    # Rounding of so small a model's tensors to 4 bits makes 1 %, to 3 bits 4 %;
    # other masks than the forward pass's make several tenths.
    assert (0.001 < error < 0.1) if checkpoint.startswith("int") else error < 1e-5


def test_int4_takes_care_of_what_attention_reads():
    net = model()
    graphdef, stack = nnx.split(net.layers)
    block = jax.tree.map(lambda x: x[0], stack)

    def layer(block, x_btd, length_b, noise):
        drop = dropout(CFG.dropout, noise, 0)
        return nnx.merge(graphdef, block)(x_btd, length_b, drop)

    small = jc.checkpoint(layer, policy=jc.policies.int4(), params=0)
    x = jnp.ones((8, 16, 32))
    said = str(jc.explain(small, block, x, jnp.full(8, 12), jnp.int32(0)))
    lines = [line for line in said.splitlines() if "operand of scores" in line]
    assert len(lines) == 2 and all("bits=8" in line for line in lines)


@pytest.mark.slow
def test_microbatches_add_up():
    job = make(dataclasses.replace(CFG, dropout=0.0))
    state = jax.jit(job.init)()
    whole = examples()
    split = Examples(
        whole.tokens_bt[0][:, None], whole.target_b[0][:, None], jnp.arange(3)
    )
    (loss, grads), (loss_3, grads_3) = (
        jax.jit(job.gradients)(state, batch) for batch in (whole, split)
    )
    close(loss_3, loss)
    # All leaves together: that of k's bias is nothing but rounding.
    close(
        *(
            jnp.concatenate([x.ravel() for x in jax.tree.leaves(g)])
            for g in (grads_3, grads)
        )
    )


def test_a_rating_is_trained_by_its_squared_error():
    net = model(dataclasses.replace(CFG, labels=1, dropout=0.0))
    target = jnp.array([0.5, 5.0, 2.0])
    batch = Examples(tokens(16), target, jnp.int32(0))
    expected = jnp.mean((net(tokens(16))[:, 0] - target) ** 2)
    np.testing.assert_allclose(net.loss(batch), expected, rtol=1e-5)


def test_each_of_several_classes_has_a_loss_of_its_own():
    cfg = dataclasses.replace(CFG, multi_label=True, dropout=0.0)
    net, target = model(cfg), np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1]], bool)
    probability = 1 / (1 + np.exp(-np.asarray(net(tokens(16)), np.float64)))
    expected = -np.log(np.where(target, probability, 1 - probability)).mean()
    batch = Examples(tokens(16), jnp.asarray(target), jnp.int32(0))
    np.testing.assert_allclose(net.loss(batch), expected, rtol=1e-5)


# --- shapes ----------------------------------------------------------------------


def test_roberta_base_has_its_125_million_weights():
    shapes = nnx.eval_shape(lambda: Roberta(MODELS["roberta-base"], rngs=nnx.Rngs(0)))
    weights = sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param)))
    embeddings = (50265 + 514 + 1) * 768
    layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    head = 768 * 768 + 768 + 50265 + 2 * 768
    assert weights == embeddings + 12 * layer + 2 * 768 + head == 124_697_433


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("heads", 5, r"width must be divisible by heads \(5\), got 768"),
        ("labels", -1, "labels must be 0 or more, got -1"),
        ("dropout", 1.0, r"dropout must be in \[0, 1\), got 1.0"),
        ("layers", 0, "layers must be a positive int, got 0"),
    ],
)
def test_impossible_shapes_are_refused(field, value, rule):
    with pytest.raises(ValueError, match=rule):
        RobertaConfig(**{field: value})
