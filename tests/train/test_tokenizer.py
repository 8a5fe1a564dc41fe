import json

import numpy as np
import pytest
import tokenizers

from readers import DataError
from tokenizer import (
    PIECE,
    fingerprint,
    load_saved,
    load_tokenizer,
    pieces,
    special_ids,
)

TEXT = "Grüße, 世界! 🐍\n\tif x:  pass\x00 <|endoftext|>"


def bpe(size: int = 300):
    return load_tokenizer(f"bpe:{size}", ["the cat sat on the mat\n" * 20, "the hat"])


def tokenizer_json(tmp_path, *special: str):
    vocab = {"a": 0, "b": 1, "[UNK]": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(special))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[UNK] $A", special_tokens=[("[UNK]", 2)]
    )
    inner.enable_truncation(4)
    inner.enable_padding(length=4)
    path = tmp_path / "any.json"
    inner.save(str(path))
    return path


def test_bytes_round_trip():
    tokenizer = load_tokenizer("bytes")
    first, second = tokenizer.encode([TEXT, ""])
    assert first.tolist() == list(TEXT.encode())
    assert second.size == 0
    assert tokenizer.decode(first) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.name) == (257, 256, "bytes")
    assert tokenizer.decode([104, 105, 256, 33]) == "hi!"


def test_bpe_is_trained_on_the_spot():
    tokenizer = bpe()
    (ids,) = tokenizer.encode(["the cat"])
    assert len(ids) < len("the cat")
    assert 257 < tokenizer.vocab_size <= 300
    assert tokenizer.eot < 300
    (ids,) = tokenizer.encode([TEXT])
    assert tokenizer.decode(ids) == TEXT
    assert ids.max() < tokenizer.vocab_size
    assert bpe().name == tokenizer.name != bpe(260).name


def test_bpe_reads_no_more_than_it_needs(monkeypatch):
    monkeypatch.setattr("tokenizer.BPE_TRAINING_CHARACTERS", 1000)
    texts = iter(["the cat " * 200, "read", "never"])
    load_tokenizer("bpe:260", texts)
    assert next(texts) == "read"


def test_quoted_end_of_text_does_not_end_a_document(tmp_path):
    (ids,) = bpe().encode(["a <|endoftext|> b"])
    assert bpe().eot not in ids


@pytest.mark.parametrize(
    ("special", "eot"),
    [
        (("[SEP]", "<|endoftext|>"), "<|endoftext|>"),
        (("<eos>", "</s>"), "</s>"),
        (("<eos>", "[SEP]"), "<eos>"),
        (("[SEP]",), "[SEP]"),
        (("<|begin_of_text|>", "<|end_of_text|>"), "<|end_of_text|>"),
        (("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), "<｜end▁of▁sentence｜>"),
    ],
)
def test_end_of_text_of_a_tokenizer_json(tmp_path, special, eot):
    path = tokenizer_json(tmp_path, *special)
    vocab = {"a": 0, "b": 1, "[UNK]": 2} | {t: 3 + i for i, t in enumerate(special)}
    tokenizer = load_tokenizer(path)
    assert tokenizer.eot == vocab[eot]
    assert tokenizer.vocab_size == len(vocab)


def test_a_tokenizer_json_without_an_end_of_text(tmp_path):
    """Its words may be read; documents are not ended by whatever its first id is."""
    tokenizer = load_tokenizer(tokenizer_json(tmp_path))
    with pytest.raises(DataError, match=r"any.json: it must have one of <\|endoftext"):
        tokenizer.eot  # noqa: B018


def test_a_tokenizer_json_neither_cuts_nor_pads_nor_adds(tmp_path):
    tokenizer = load_tokenizer(tokenizer_json(tmp_path))
    long, short = tokenizer.encode(["a b " * 50, "b"])
    assert long.tolist() == [0, 1] * 50
    assert short.tolist() == [1]


def test_ids_with_gaps(tmp_path):
    path = tokenizer_json(tmp_path)
    parsed = json.loads(path.read_text())
    parsed["model"]["vocab"]["b"] = 900
    path.write_text(json.dumps(parsed))
    assert load_tokenizer(path).vocab_size == 901


@pytest.mark.parametrize("make", [lambda: load_tokenizer("bytes"), bpe])
def test_saved_and_loaded(tmp_path, make):
    tokenizer = make()
    tokenizer.save(tmp_path)
    again = load_saved(tmp_path)
    assert (again.name, again.eot) == (tokenizer.name, tokenizer.eot)
    np.testing.assert_array_equal(*(t.encode([TEXT])[0] for t in (tokenizer, again)))


def test_gpt2(data_dir):
    path = data_dir / "tokenizers" / "gpt2_hf_tokenizer" / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    assert (tokenizer.vocab_size, tokenizer.eot) == (50257, 50256)
    (ids,) = tokenizer.encode(["Hello world"])
    assert ids.tolist() == [15496, 995]
    (ids,) = tokenizer.encode([TEXT])
    assert tokenizer.decode(ids) == TEXT


def test_the_fingerprint_of_a_file_is_its_content(tmp_path):
    path = tokenizer_json(tmp_path)
    before = fingerprint(path)
    assert fingerprint(path.rename(tmp_path / "moved.json")) == before
    assert fingerprint(tokenizer_json(tmp_path, "<eos>")) != before
    assert fingerprint("bpe:300") == "bpe:300" != fingerprint("bpe:301")


def test_robertas_tokens_come_first_and_no_text_makes_them(tmp_path):
    made = load_tokenizer("roberta:300", ["the cat sat on the mat\n" * 20])
    expected = {"bos_id": 0, "pad_id": 1, "eos_id": 2, "mask_id": 4}
    assert special_ids(made) == expected
    assert made.eot == 2  # documents end as sentences do
    [ids] = made.encode(["<s><pad></s><unk><mask> the cat"])
    assert ids.min() > 4
    assert made.decode(ids) == "<s><pad></s><unk><mask> the cat"
    made.save(tmp_path)
    assert special_ids(load_saved(tmp_path)) == expected
    with pytest.raises(DataError, match="N of roberta:N must be a number above 260"):
        load_tokenizer("roberta:260")


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_other_tokenizers_lack_robertas_tokens(spec):
    made = load_tokenizer(spec) if spec == "bytes" else bpe()
    with pytest.raises(DataError, match="no <s>, <pad>, </s>, <mask>: .*roberta:N"):
        special_ids(made)


@pytest.mark.parametrize(
    "spec", ["bpe:", "bpe:many", "bpe:-5", "bpe:256", "bpe:1048577", "bpe"]
)
def test_a_wrong_bpe_size_is_an_error(spec):
    with pytest.raises(DataError, match=f"'{spec}'.*above 256 .* at most 2\\^20"):
        load_tokenizer(spec)


@pytest.mark.parametrize("call", [load_tokenizer, fingerprint])
def test_a_missing_tokenizer_json_is_an_error(tmp_path, call):
    with pytest.raises(DataError, match="byte.*neither 'bytes' nor 'bpe:N'"):
        call("byte")
    with pytest.raises(DataError, match="neither"):
        call(tmp_path)


def test_a_wrong_tokenizer_json_is_an_error(tmp_path):
    path = tmp_path / "tokenizer.json"
    for text in ("{", '{"version": "1.0"}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer\.json"):
            load_tokenizer(path)


@pytest.mark.parametrize(
    ("vocab", "told"), [({}, "its vocabulary is empty"), ({"a": 0}, "cannot encode")]
)
def test_a_tokenizer_json_that_cannot_encode_is_an_error(tmp_path, vocab, told):
    path = tmp_path / "tokenizer.json"
    model = tokenizers.models.WordLevel(vocab, unk_token="[UNK]")
    path.write_text(tokenizers.Tokenizer(model).to_str())
    with pytest.raises(DataError, match=f"tokenizer.json: {told}"):
        load_tokenizer(path).encode(["a b"])


def test_pieces_end_with_lines():
    text = ("x" * 70 + "\n") * 5000 + "y" * (2 * PIECE) + "\nend"
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert max(map(len, cut)) <= PIECE
    assert all(piece.endswith("\n") for piece in cut[:3])
    assert list(pieces("short")) == ["short"]
