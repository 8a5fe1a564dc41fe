"""Golden files: what transformers computes, and what is refused."""

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from configs import GPT2Config
from gpt2_weights import load_gpt2, save_gpt2

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "gpt2"
EPS = float(jnp.finfo(jnp.float32).eps)


def assert_equal_parameters(a, b):
    a, b = (nnx.to_pure_dict(nnx.state(model, nnx.Param)) for model in (a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def folder(tmp_path):
    """A copy of the golden model, to be changed."""
    return shutil.copytree(GOLDEN, tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not ...}
    path.write_text(json.dumps(kept))


def edit_tensors(folder, rename=str, **changes):
    """Renamed first; those that become None are left out."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {rename(name): tensor for name, tensor in tensors.items()} | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


def test_logits_equal_those_of_transformers():
    model = load_gpt2(GOLDEN, dtype=jnp.float32)
    golden = np.load(GOLDEN / "logits.npz")
    # Each product in the chain rounds with a relative error of about eps sqrt(n).
    products = 8 * model.cfg.layers + 1
    np.testing.assert_allclose(
        nnx.jit(model)(golden["tokens"]),
        golden["logits"],
        rtol=0,
        atol=EPS * math.sqrt(32) * products * np.abs(golden["logits"]).max(),
    )


def test_the_config_is_read(folder):
    cfg = GPT2Config(vocab_size=64, width=32, ff=40, layers=2, heads=4, max_seq=32)
    assert load_gpt2(GOLDEN).cfg == cfg
    edit_config(folder, resid_pdrop=0.25)
    assert load_gpt2(folder).cfg.dropout == 0.25
    edit_config(folder, n_inner=None)
    with pytest.raises(ValueError, match=r"shape \(128, 32\) .* got \(40, 32\)"):
        load_gpt2(folder)


def test_what_is_written_is_what_was_read(tmp_path):
    model = load_gpt2(GOLDEN)
    new = tmp_path / "new" / "folder"
    save_gpt2(model, new)
    theirs, ours = (load_file(f / "model.safetensors") for f in (GOLDEN, new))
    assert theirs.keys() == ours.keys()
    for tensor, expected in theirs.items():
        assert ours[tensor].dtype == expected.dtype
        np.testing.assert_array_equal(ours[tensor], expected)
    again = load_gpt2(new)
    assert again.cfg == model.cfg
    assert_equal_parameters(again, model)
    theirs, ours = (json.loads((f / "config.json").read_text()) for f in (GOLDEN, new))
    assert set(ours) - set(theirs) <= {"torch_dtype"}  # of transformers 4
    # Attention's own weights have no dropout here, and a model knows no special ids.
    differ = {field for field in theirs.keys() & ours if theirs[field] != ours[field]}
    assert differ == {"attn_pdrop", "bos_token_id", "eos_token_id"}
    assert ours["attn_pdrop"] == 0 and ours["eos_token_id"] is None


def test_bfloat16_is_written_as_such(tmp_path):
    model = load_gpt2(GOLDEN, param_dtype=jnp.bfloat16)
    save_gpt2(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {x.dtype.name for x in tensors.values()} == {"bfloat16"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert_equal_parameters(load_gpt2(tmp_path, param_dtype=jnp.bfloat16), model)


def test_the_hubs_own_folder_is_read(folder):
    """Without a prefix, with the masks, and with the head though it is tied."""
    tensors = load_file(folder / "model.safetensors")
    mask = np.tril(np.ones((1, 1, 32, 32), np.float32))
    masks = {"h.0.attn.bias": mask, "h.1.attn.masked_bias": np.float32([-1e4])}
    head = {"lm_head.weight": tensors["transformer.wte.weight"]}
    edit_tensors(folder, lambda name: name.removeprefix("transformer."), **masks)
    assert_equal_parameters(load_gpt2(folder), load_gpt2(GOLDEN))
    edit_tensors(folder, lambda name: f"transformer.{name}", **head)
    assert_equal_parameters(load_gpt2(folder), load_gpt2(GOLDEN))
    edit_tensors(folder, **{"lm_head.weight": head["lm_head.weight"] + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight .* must be .*wte\.weight"):
        load_gpt2(folder)


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("model_type", "gptj", "must be 'gpt2', got 'gptj'"),
        ("activation_function", "relu", "must be 'gelu_new', got 'relu'"),
        ("scale_attn_by_inverse_layer_idx", True, "must be False, got True"),
        ("tie_word_embeddings", False, "must be True, got False"),
        ("quantization_config", {"bits": 4}, "must be None, got"),
        ("n_embd", ..., "is missing in"),
        ("n_embd", "x", r"in .*config\.json must be an int, got 'x'"),
        ("n_inner", "x", r"in .*config\.json must be an int or null, got 'x'"),
        ("resid_pdrop", None, r"in .*config\.json must be a number, got None"),
    ],
)
def test_config_fields_that_are_not_supported(folder, field, value, rule):
    edit_config(folder, **{field: value})
    with pytest.raises(ValueError, match=f"{field}.*{rule}"):
        load_gpt2(folder)


def test_a_config_that_fits_no_model_names_the_file(folder):
    edit_config(folder, n_head=3)
    with pytest.raises(ValueError, match=r"config\.json: width must be divisible"):
        load_gpt2(folder)


@pytest.mark.parametrize(
    "tensor, value, rule",
    [
        ("transformer.ln_f.bias", None, "lacks transformer.ln_f.bias"),
        ("score.weight", np.zeros((2, 32)), "tensors of no GPT-2: score.weight"),
        (  # as an nn.Linear has it
            "transformer.h.1.attn.c_attn.weight",
            np.zeros((96, 32)),
            r"h\.1\.attn\.c_attn\.weight .* shape \(32, 96\) .* got \(96, 32\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config(folder, tensor, value, rule):
    edit_tensors(folder, **{tensor: value})
    with pytest.raises(ValueError, match=rule):
        load_gpt2(folder)


def test_a_folder_of_pickled_weights_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no model\.safetensors.* are not read"):
        load_gpt2(folder)
