"""Golden files: what transformers and llama2.c compute, and what is refused."""

import json
import math
import re
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import pretrained
from configs import ModelConfig
from llama import Llama, generate
from weights import load_llama, load_llama2c, save_llama

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
EPS = float(jnp.finfo(jnp.float32).eps)


def tolerance(cfg, logits):
    """Each product in the chain rounds with a relative error of about eps sqrt(n)."""
    products = 7 * cfg.layers + 1
    return EPS * math.sqrt(cfg.width) * products * np.abs(logits).max()


def assert_equal_parameters(a, b):
    a, b = (nnx.to_pure_dict(nnx.state(model, nnx.Param)) for model in (a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden model, to be damaged."""
    return shutil.copytree(GOLDEN / "llama_gqa", tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not ...}
    path.write_text(json.dumps(kept))


def edit_tensors(folder, **changes):
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


# --- Hugging Face ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_gqa", "llama_tied"])
def test_logits_equal_those_of_transformers(name):
    model = load_llama(GOLDEN / name, dtype=jnp.float32)
    golden = np.load(GOLDEN / name / "logits.npz")
    np.testing.assert_allclose(
        nnx.jit(model)(golden["tokens"]),
        golden["logits"],
        rtol=0,
        atol=tolerance(model.cfg, golden["logits"]),
    )


def test_the_config_is_read():
    assert load_llama(GOLDEN / "llama_gqa").cfg == ModelConfig(
        vocab_size=64,
        width=32,
        ff=40,
        layers=2,
        heads=4,
        kv_heads=2,
        max_seq=64,
        rope_theta=5e5,
        norm_eps=1e-5,
    )
    assert load_llama(GOLDEN / "llama_tied").cfg.tied


@pytest.mark.parametrize(
    "name, dtype", [("llama_gqa", jnp.float32), ("llama_tied", jnp.bfloat16)]
)
def test_what_is_written_is_what_was_read(name, dtype, tmp_path):
    model = load_llama(GOLDEN / name, param_dtype=dtype)
    save_llama(model, tmp_path / "new" / "folder")
    theirs, ours = (
        load_file(folder / "model.safetensors")
        for folder in (GOLDEN / name, tmp_path / "new" / "folder")
    )
    assert theirs.keys() == ours.keys()
    for tensor, expected in theirs.items():
        assert ours[tensor].dtype == expected.dtype == dtype
        np.testing.assert_array_equal(ours[tensor], expected)
    again = load_llama(tmp_path / "new" / "folder", param_dtype=dtype)
    assert again.cfg == model.cfg
    assert_equal_parameters(again, model)


def test_a_new_model_survives_the_round_trip(tmp_path):
    cfg = ModelConfig(vocab_size=48, width=32, ff=40, layers=3, heads=4)
    model = Llama(cfg, rngs=nnx.Rngs(0))
    save_llama(model, tmp_path)
    assert_equal_parameters(load_llama(tmp_path), model)


def test_files_that_are_written_have_the_modes_that_umask_gives(tmp_path):
    save_llama(load_llama(GOLDEN / "llama_gqa"), tmp_path / "new")
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "new").iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode}


def test_weights_that_cannot_be_written_leave_nothing(folder, tmp_path):
    model = load_llama(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "file").touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # bytes of a file
    try:
        for where in (tmp_path / "new" / "folder", folder, tmp_path / "file" / "new"):
            path = re.escape(str(where / "model.safetensors"))
            with pytest.raises(OSError, match=f"^{path} cannot be written: "):
                save_llama(model, where)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "new").exists()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_shards_are_read(folder):
    whole = load_llama(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(shards.values()):
        part = {name: x for name, x in tensors.items() if shards[name] == shard}
        save_file(part, folder / shard)
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal_parameters(load_llama(folder), whole)
    whole.embed.embedding[...] *= 2
    save_llama(whole, folder)  # into the same folder
    assert_equal_parameters(load_llama(folder), whole)


def test_folders_of_older_transformers_are_read(folder):
    new = load_llama(folder)
    edit_config(folder, rope_parameters=..., rope_theta=5e5, rope_scaling=None)
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, **{frequencies: np.ones(4, np.float32)})
    old = load_llama(folder)
    assert old.cfg == new.cfg
    assert_equal_parameters(old, new)


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("model_type", "mistral", "must be 'llama', got 'mistral'"),
        ("hidden_act", "gelu", "must be 'silu', got 'gelu'"),
        ("attention_bias", True, "must be False, got True"),
        ("mlp_bias", True, "must be False, got True"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "must be None, got"),
        ("rope_parameters", {"rope_type": "llama3"}, "rope_type 'default'.*llama3"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, "no more than rope_theta"),
        ("quantization_config", {"bits": 4}, "must be None, got"),
        ("head_dim", 16, "hidden_size / num_attention_heads = 8, got 16"),
        ("intermediate_size", ..., "is missing"),
        ("hidden_size", True, r"in .*config\.json must be an int, got True"),
        ("rms_norm_eps", "1e-6", r"in .*config\.json must be a number, got '1e-6'"),
        ("rope_theta", None, r"in .*config\.json must be a number, got None"),
        ("rope_parameters", 5, r"in .*config\.json must be an object or null, got 5"),
        ("tie_word_embeddings", 1, r"in .*config\.json must be true or false, got 1"),
        ("head_dim", "8", r"in .*config\.json must be an int or null, got '8'"),
    ],
)
def test_config_fields_that_are_not_supported(folder, field, value, rule):
    edit_config(folder, **{field: value})
    with pytest.raises(ValueError, match=f"{field}.*{rule}"):
        load_llama(folder)


def test_a_config_that_fits_no_model_names_the_file(folder):
    edit_config(folder, num_key_value_heads=3)
    with pytest.raises(ValueError, match=r"config\.json: kv_heads must divide heads"):
        load_llama(folder)


def test_a_base_of_the_angles_that_is_no_number_names_the_file(folder):
    edit_config(folder, rope_parameters={"rope_theta": "x"})
    with pytest.raises(ValueError, match=r"config\.json: rope_theta must .* got 'x'"):
        load_llama(folder)


@pytest.mark.parametrize(
    "text, rule",
    [
        ("[]", r"config\.json must be an object of JSON, got \[\]"),
        ("{", r"config\.json is no JSON: Expecting"),
        ("[" * 100_000, r"config\.json is no JSON: maximum recursion"),
        ("\udcff", r"config\.json is no JSON: .* can't decode"),
    ],
)
def test_a_config_that_is_no_object_names_the_file(folder, text, rule):
    (folder / "config.json").write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(ValueError, match=rule):
        load_llama(folder)
    with pytest.raises(ValueError, match=rule):
        pretrained.load(str(folder), "float32")


def test_a_model_type_that_is_no_name_is_refused(folder):
    edit_config(folder, model_type=[])
    with pytest.raises(ValueError, match=r"must be one of llama, gpt2, got \[\]"):
        pretrained.load(str(folder), "float32")


@pytest.mark.parametrize(
    "text, rule",
    [
        ("{}", "^weight_map in .* must be an object of file names, got None"),
        ('{"weight_map": 5}', "^weight_map in .* of file names, got 5"),
        ('{"weight_map": {"a": 5}}', "^weight_map in .* of file names, got {'a': 5}"),
        ("[]", r"must be an object of JSON, got \[\]"),
        ("no", "is no JSON"),
    ],
)
def test_an_index_without_files_is_named(folder, text, rule):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=rule) as error:
        load_llama(folder)
    assert f"{folder}/model.safetensors.index.json" in str(error.value)


def test_a_tied_head_may_lie_in_the_file_if_it_is_the_embedding(tmp_path):
    folder = shutil.copytree(GOLDEN / "llama_tied", tmp_path / "model")
    words = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(folder, **{"lm_head.weight": words})
    assert_equal_parameters(load_llama(folder), load_llama(GOLDEN / "llama_tied"))
    edit_tensors(folder, **{"lm_head.weight": words + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight .* must be model\.embed_"):
        load_llama(folder)


@pytest.mark.parametrize(
    "name, tensor, rule",
    [
        ("model.norm.weight", None, "lacks model.norm.weight"),
        ("lm_head.bias", np.zeros(64), "tensors of no LLaMA: lm_head.bias"),
        (
            "model.layers.1.mlp.up_proj.weight",
            np.zeros((32, 40)),
            r"layers\.1\.mlp\.up_proj\.weight .* shape \(40, 32\) .* got \(32, 40\)",
        ),
        ("model.norm.weight", np.zeros(32, np.int8), "of floating dtype, got int8"),
        ("model.norm.weight", np.zeros((1, 32)), r"shape \(32,\) .* got \(1, 32\)"),
    ],
)
def test_tensors_that_do_not_fit_the_config(folder, name, tensor, rule):
    edit_tensors(folder, **{name: tensor})
    with pytest.raises(ValueError, match=rule):
        load_llama(folder)


def test_a_dtype_that_numpy_lacks(folder):
    path = folder / "model.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    tensor = header["model.norm.weight"]
    tensor["dtype"], tensor["shape"] = "F8_E4M3", [32 * 4]
    header = json.dumps(header).encode()
    content = path.read_bytes()[8 + size :]
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)
    told = "model.norm.weight in .* must be of a dtype that numpy has, got F8_E4M3"
    with pytest.raises(ValueError, match=told):
        load_llama(folder)


def test_a_layer_too_many_is_counted_and_not_listed_whole(folder):
    edit_config(folder, num_hidden_layers=3)
    with pytest.raises(ValueError, match="lacks (model.layers.2.* ){3}and 6 more"):
        load_llama(folder)


def test_a_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_llama(folder)


# --- llama2.c --------------------------------------------------------------------


@pytest.mark.slow
def test_stories_generates_its_golden_ids(data_dir):
    folder = data_dir / "stories260k"
    golden = json.loads((folder / "golden.json").read_text())
    model = load_llama2c(folder / "stories260K.bin", dtype=jnp.float32)
    ids = golden["greedy_ids"]
    assert generate(model, golden["prompt_ids"], len(ids)) == ids

    logits = model(jnp.array([golden["prompt_ids"]], jnp.int32))[0, -1]
    expected = np.array(golden["logits_after_bos_first8_float64"])
    np.testing.assert_allclose(
        logits[:8], expected, rtol=0, atol=tolerance(model.cfg, expected)
    )


def write_llama2c(path, cfg, floats):
    sizes = (cfg.width, cfg.ff, cfg.layers, cfg.heads, cfg.num_kv_heads)
    vocab = cfg.vocab_size if cfg.tied else -cfg.vocab_size
    header = np.array([*sizes, vocab, cfg.max_seq], "<i4")
    path.write_bytes(header.tobytes() + np.asarray(floats, "<f4").tobytes())


def test_an_untied_head_comes_last(tmp_path):
    cfg = ModelConfig(
        vocab_size=6, width=4, ff=3, layers=1, heads=1, max_seq=5, norm_eps=1e-5
    )
    before_tables = 6 * 4 + 4 + 4 * 16 + 4 + 3 * 12 + 4
    tables, head = 5 * 4, 6 * 4
    write_llama2c(tmp_path / "m.bin", cfg, range(before_tables + tables + head))
    model = load_llama2c(tmp_path / "m.bin")
    assert not model.cfg.tied
    np.testing.assert_array_equal(
        model.output_kernel().T.reshape(-1), before_tables + tables + np.arange(head)
    )
    np.testing.assert_array_equal(
        model.norm.scale[...], before_tables - 4 + np.arange(4)
    )


def test_files_that_are_no_llama2c_checkpoint(tmp_path):
    path = tmp_path / "m.bin"
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="m.bin is no llama2.c checkpoint"):
        load_llama2c(path)
    path.write_bytes(bytes(28))
    with pytest.raises(ValueError, match="m.bin is no llama2.c .* vocab_size must be"):
        load_llama2c(path)
    write_llama2c(path, ModelConfig(width=4, heads=1, vocab_size=2), [1, 2, 3])
    with pytest.raises(ValueError, match="must hold .* floats by its header, got 3"):
        load_llama2c(path)
