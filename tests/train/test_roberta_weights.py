"""Golden files: what transformers computes, and what is refused."""

import json
import math
import re
import shutil
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from configs import RobertaConfig
from huggingface import folder_of
from readers import DataError
from roberta_weights import load_roberta, read_config, save_roberta

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NAMES = ["roberta_classes", "roberta_words"]
EPS = float(jnp.finfo(jnp.float32).eps)


def parameters(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def assert_equal_parameters(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden model, to be damaged."""
    return shutil.copytree(GOLDEN / "roberta_classes", tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not ...}
    path.write_text(json.dumps(kept))


def edit_tensors(folder, **changes):
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(name):
    model = load_roberta(GOLDEN / name, dtype=jnp.float32)
    golden = np.load(GOLDEN / name / "logits.npz")
    assert (golden["tokens"] == 1).any()  # rows are padded
    # Each product in the chain rounds with a relative error of about eps sqrt(n).
    products = 8 * model.cfg.layers + 2
    np.testing.assert_allclose(
        nnx.jit(model)(golden["tokens"]),
        golden["logits"],
        rtol=0,
        atol=EPS * math.sqrt(32) * products * np.abs(golden["logits"]).max(),
    )


def test_the_config_is_read():
    assert read_config(GOLDEN / "roberta_words") == RobertaConfig(
        vocab_size=64, width=32, ff=40, layers=2, heads=4, max_seq=32
    )
    assert load_roberta(GOLDEN / "roberta_classes").cfg.labels == 3


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_was_read(name, tmp_path):
    model = load_roberta(GOLDEN / name)
    save_roberta(model, tmp_path / "new" / "folder", ["a", "b", "c"])
    theirs, ours = (
        load_file(folder / "model.safetensors")
        for folder in (GOLDEN / name, tmp_path / "new" / "folder")
    )
    assert theirs.keys() == ours.keys()
    for tensor, expected in theirs.items():
        assert ours[tensor].dtype == expected.dtype
        np.testing.assert_array_equal(ours[tensor], expected)
    again = load_roberta(tmp_path / "new" / "folder")
    assert again.cfg == model.cfg
    assert_equal_parameters(parameters(again), parameters(model))
    theirs, ours = (
        json.loads((folder / "config.json").read_text())
        for folder in (GOLDEN / name, tmp_path / "new" / "folder")
    )
    same = theirs.keys() & ours.keys() - {"id2label", "label2id"}
    same -= {"attention_probs_dropout_prob"}  # of it nothing drops out here
    assert {"architectures", "max_position_embeddings", "pad_token_id"} <= same
    assert {field: ours[field] for field in same} == {f: theirs[f] for f in same}
    assert ours.get("id2label", {"0": "a"})["0"] == "a"


@pytest.mark.slow
def test_a_new_head_is_the_seeds_and_the_body_the_folders():
    head = {}
    for seed in (0, 1):
        model = load_roberta(
            GOLDEN / "roberta_words", labels=2, rngs=nnx.Rngs(seed), dtype=jnp.float32
        )
        assert model(jnp.full((1, 4), 5)).shape == (1, 2)
        params = parameters(model)
        head[seed] = params.pop("head")["dense"]["kernel"]
        words = parameters(load_roberta(GOLDEN / "roberta_words"))
        words.pop("words")
        assert_equal_parameters(params, words)
    assert not np.array_equal(head[0], head[1])


def test_a_head_of_the_same_size_goes_on_and_another_is_new():
    there = parameters(load_roberta(GOLDEN / "roberta_classes"))["head"]
    same, other = (
        parameters(load_roberta(GOLDEN / "roberta_classes", labels=n))["head"]
        for n in (3, 2)
    )
    assert_equal_parameters(same, there)
    assert other["out"]["kernel"].shape == (32, 2)
    assert not np.array_equal(other["dense"]["kernel"], there["dense"]["kernel"])


def test_a_head_goes_on_for_classes_of_the_same_names(folder):
    """In the order that is asked for; roberta-large-mnli's is not GLUE's."""
    there = parameters(load_roberta(folder))["head"]
    edit_config(folder, id2label={"0": "CONTRADICTION", "1": "NEUTRAL", "2": "YES"})
    names = ("contradiction", "yes", "neutral")
    same = parameters(load_roberta(folder, labels=names))["head"]
    assert_equal_parameters(same["dense"], there["dense"])
    kernel = there["out"]["kernel"]
    order = np.array([0, 2, 1])
    np.testing.assert_array_equal(same["out"]["kernel"], kernel[:, order])
    np.testing.assert_array_equal(same["out"]["bias"], there["out"]["bias"][order])
    other = parameters(load_roberta(folder, labels=("a", "b", "c")))["head"]
    assert not np.array_equal(other["dense"]["kernel"], there["dense"]["kernel"])
    edit_config(folder, id2label={str(i): f"LABEL_{i}" for i in range(3)})
    nameless = parameters(load_roberta(folder, labels=("a", "b", "c")))["head"]
    assert_equal_parameters(nameless, there)


def test_a_folder_with_more_layers_than_its_config_is_refused(folder):
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(
        ValueError, match=r"num_hidden_layers .* is 1, but .*layer\.1\."
    ):
        load_roberta(folder)


def test_a_body_alone_is_read(folder):
    whole = parameters(load_roberta(folder, labels=2))
    tensors = load_file(folder / "model.safetensors")
    body = {
        name.removeprefix("roberta."): tensor
        for name, tensor in tensors.items()
        if name.startswith("roberta.")
    }
    save_file(body, folder / "model.safetensors")
    assert_equal_parameters(parameters(load_roberta(folder, labels=2)), whole)


def test_a_model_of_several_classes_a_text_is_known_again(folder, tmp_path):
    edit_config(folder, problem_type="multi_label_classification")
    model = load_roberta(folder)
    assert (model.cfg.labels, model.cfg.multi_label) == (3, True)
    save_roberta(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert load_roberta(tmp_path / "saved").cfg == model.cfg
    # What is asked for counts, as for the number of classes.
    assert not load_roberta(folder, labels=3).cfg.multi_label
    plain = load_roberta(GOLDEN / "roberta_classes", labels=3, multi_label=True)
    assert plain.cfg == model.cfg
    save_roberta(load_roberta(folder, labels=3), tmp_path / "one")
    assert "problem_type" not in json.loads((tmp_path / "one/config.json").read_text())


def test_parts_that_are_not_of_this_model_are_left():
    """The hub's roberta-base has a pooler, and the head of words beside no other."""
    model = load_roberta(GOLDEN / "roberta_words", labels=2)
    assert model.cfg.labels == 2 and not hasattr(model, "words")


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("model_type", "bert", "must be 'roberta', got 'bert'"),
        ("hidden_act", "relu", "must be 'gelu', got 'relu'"),
        ("type_vocab_size", 2, "must be 1, got 2"),
        ("position_embedding_type", "relative_key", "must be 'absolute'"),
        ("is_decoder", True, "must be False, got True"),
        ("intermediate_size", ..., "missing in"),
        ("pad_token_id", None, r"in .*config\.json must be an int, got None"),
        ("max_position_embeddings", "x", r"in .*json must be an int, got 'x'"),
        ("hidden_dropout_prob", "x", r"in .*json must be a number, got 'x'"),
        ("layer_norm_eps", True, r"in .*json must be a number, got True"),
    ],
)
def test_config_fields_that_are_not_supported(folder, field, value, rule):
    edit_config(folder, **{field: value})
    with pytest.raises(ValueError, match=f"{field}.*{rule}"):
        load_roberta(folder)


def test_a_config_that_fits_no_model_names_the_file(folder):
    edit_config(folder, num_attention_heads=3)
    with pytest.raises(ValueError, match=r"config\.json: width must be divisible"):
        load_roberta(folder)


def test_tensors_that_do_not_fit(folder):
    name = "roberta.encoder.layer.1.output.dense.weight"
    edit_tensors(folder, **{name: np.zeros((40, 32), np.float32)})
    with pytest.raises(ValueError, match=rf"{name} .* \(32, 40\) .* got \(40, 32\)"):
        load_roberta(folder)
    edit_tensors(folder, **{name: None})
    with pytest.raises(ValueError, match=f"lacks {name}"):
        load_roberta(folder)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_a_head_without_classes(folder, shape):
    edit_tensors(folder, **{"classifier.out_proj.bias": np.zeros(shape, np.float32)})
    told = f"classifier.out_proj.bias .* each class, got shape {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=told):
        load_roberta(folder, labels=2)


def test_a_folder_of_pickled_weights_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no model\.safetensors.* are not read"):
        load_roberta(folder)


# --- the hub ---------------------------------------------------------------------


def test_a_name_of_the_hub_is_downloaded_without_pickles(folder, monkeypatch):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert folder_of("hf:someone/roberta") == folder
    assert asked == [("someone/roberta", ["*.json", "*.safetensors"])]
    assert folder_of(str(folder)) == folder and len(asked) == 1


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch):
    def snapshot_download(name, allow_patterns):
        raise OSError("no route")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(DataError, match="hf:x/y: .*no network.*OSError: no route"):
        folder_of("hf:x/y")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match="pip install huggingface_hub"):
        folder_of("hf:x/y")
