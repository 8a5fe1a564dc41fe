"""What is exported is what transformers reads: ids, and where texts begin and end."""

import importlib
import json

import jax
import pytest
import tokenizers
from flax import nnx

import pretrained
from configs import GPT2Config, ModelConfig, RobertaConfig
from gpt2 import Gpt2
from llama import Llama
from roberta import Roberta
from tokenizer import load_saved, load_tokenizer, special_ids

TEXTS = ["the cat sat on the mat\n" * 20, 'the "hat"']


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return importlib.import_module("transformers")


def export(model_class, cfg, tokenizer, folder):
    model = nnx.eval_shape(lambda: model_class(cfg, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), state)
    folder.mkdir(exist_ok=True)
    pretrained.save(nnx.merge(graphdef, zeros), tokenizer, folder)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_documents_of_a_decoder_end_where_they_did(kind, transformers, tmp_path):
    tokenizer = load_tokenizer("bpe:300", TEXTS)
    size = {"vocab_size": tokenizer.vocab_size, "width": 32, "ff": 48, "layers": 1}
    if kind == "llama":
        export(Llama, ModelConfig(**size, heads=4), tokenizer, tmp_path)
    else:
        export(Gpt2, GPT2Config(**size, heads=4, max_seq=16), tokenizer, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.eos_token_id == tokenizer.eot
    assert config.bos_token_id == (None if kind == "llama" else tokenizer.eot)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    [ours] = tokenizer.encode([TEXTS[1]])
    assert theirs(TEXTS[1]).input_ids == ours.tolist()
    assert theirs.eos_token_id == tokenizer.eot and len(theirs) == tokenizer.vocab_size
    assert theirs.decode(ours) == TEXTS[1]
    assert set(theirs(TEXTS[1])) == {"input_ids", "attention_mask"}
    length = theirs.model_max_length
    assert length == config.max_position_embeddings
    assert len(theirs("the hat" * 5000, truncation=True).input_ids) == length


def test_a_robertas_texts_and_pairs_have_their_ends(transformers, tmp_path):
    tokenizer = load_tokenizer("roberta:300", TEXTS)
    cfg = RobertaConfig(
        vocab_size=tokenizer.vocab_size,
        width=32,
        ff=48,
        layers=1,
        heads=4,
        max_seq=16,
        **special_ids(tokenizer),
    )
    export(Roberta, cfg, tokenizer, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    first, second = (ids.tolist() for ids in tokenizer.encode(["the cat", "the hat"]))
    assert theirs("the cat").input_ids == [0, *first, 2]
    assert theirs("the cat", "the hat").input_ids == [0, *first, 2, 2, *second, 2]
    cut = theirs("the cat " * 50, truncation=True)
    assert set(cut) == {"input_ids", "attention_mask"}
    assert len(cut.input_ids) == 16  # of 18 positions
    kinds = ("bos", "eos", "cls", "sep", "pad", "unk", "mask")
    found = [getattr(theirs, f"{kind}_token_id") for kind in kinds]
    assert found == [0, 2, 0, 2, 1, 3, 4]
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 2, 1)
    assert config.attention_probs_dropout_prob == 0  # of hidden states alone
    assert config.hidden_dropout_prob == cfg.dropout > 0


def test_a_robertas_vocabulary_may_have_the_end_of_text_of_gpt2(tmp_path):
    load_tokenizer("roberta:300", TEXTS).save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()  # roberta-base's says nothing of it
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_tokens(["<|endoftext|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    first = load_saved(tmp_path)
    first.save(tmp_path)
    again = load_saved(tmp_path)
    assert first.eot == again.eot == first.token_id("</s>") and first.name == again.name
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert said["eos_token"] == said["sep_token"] == "</s>"


def test_a_folder_that_says_what_ends_documents(transformers, tmp_path):
    """Going on from it, and exporting again, leaves that as it was."""
    special = ("<|endoftext|>", "<|begin_of_text|>", "<|done|>")
    vocab = {"a": 0, "b": 1, "[UNK]": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.add_special_tokens(list(special))
    inner.save(str(tmp_path / "tokenizer.json"))
    said = tmp_path / "tokenizer_config.json"
    plain = load_tokenizer(tmp_path / "tokenizer.json")
    for end in ("<|done|>", {"content": "<|done|>", "lstrip": False}):
        said.write_text(json.dumps({"eos_token": end}))
        tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
        assert (plain.eot, tokenizer.eot) == (3, 5) and plain.name != tokenizer.name
    cfg = ModelConfig(vocab_size=6, width=32, ff=48, layers=1, heads=4)
    export(Llama, cfg, tokenizer, tmp_path / "new")
    again = load_saved(tmp_path / "new")
    assert (again.eot, again.name) == (5, tokenizer.name)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (4, 5)
    for broken in (
        "[]",
        "{",
        "[" * 100_000,
        '{"eos_token": 3}',
        '{"eos_token": "<none>"}',
    ):
        said.write_text(broken)
        assert load_tokenizer(tmp_path / "tokenizer.json").eot == 3
