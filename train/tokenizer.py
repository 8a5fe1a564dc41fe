"""Text to token ids and back.

    tokenizer = load_tokenizer("bytes")      # or "bpe:8192", or "path/tokenizer.json"
    tokenizer = load_tokenizer("roberta:8192", texts)  # a BPE with RoBERTa's tokens
    [ids] = tokenizer.encode(["hello"])
    tokenizer.decode(ids)                    # "hello"

The package `tokenizers` is needed for all but bytes, and imported only there.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from readers import DataError, require

# What a `roberta:N` begins with, in RoBERTa's order, which puts <mask> last.
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
CONFIG = "tokenizer_config.json"
# What ends a document, where the tokenizer's folder says nothing of it.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
END_OF_TEXT += ("<｜end▁of▁sentence｜>",)  # DeepSeek's
BEGIN_OF_TEXT = ("<s>", "<|begin_of_text|>", "<bos>", "<｜begin▁of▁sentence｜>")

# A vocabulary of any size is settled long before this much text; all of C4 is not read.
BPE_TRAINING_CHARACTERS = 200_000_000
PIECE = 100_000  # characters: what one thread of `tokenizers` is given


class Tokenizer(Protocol):
    vocab_size: int
    eot: int  # the id that separates documents; DataError if none is known
    name: str  # tokenizers of one name give the same ids

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, without any special token; uint8 or uint32."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, leaving special tokens out."""

    def token_id(self, token: str) -> int | None:
        """The id of a special token, None if there is none of that name."""

    def save(self, folder: Path, max_length: int | None = None) -> None:
        """Leave in `folder` what `load_saved` needs.

        ``max_length``: the most tokens that the model takes, for other readers.
        """


def load_tokenizer(spec: str | os.PathLike, texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer named by `spec`; `texts` are what a `bpe:N` is trained on.

    `bytes`: 256 bytes and end of text. `bpe:N`: byte-level BPE of at most N ids, among
    them the end of text; `roberta:N`: the same with RoBERTa's five special tokens.
    Anything else is the path of a `tokenizer.json`. Raises DataError for a spec that is
    none of them.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if (size := bpe_size(spec)) is not None:
        special = ROBERTA if spec.startswith("roberta") else END_OF_TEXT[:1]
        return _train_bpe(texts, size, special)
    return JsonTokenizer(_read_json(spec), str(spec), _read_end(spec))


def load_saved(folder: Path) -> Tokenizer:
    """The tokenizer whose `save` wrote to `folder`."""
    path = folder / "tokenizer.json"
    return load_tokenizer(path if path.exists() else "bytes")


def fingerprint(spec: str | os.PathLike) -> str:
    """What a cache of tokens must match: of a file its content, not its path."""
    if spec == "bytes" or bpe_size(spec) is not None:
        return str(spec)
    return _content_name(_read_json(spec) + (_read_end(spec) or ""))


def bpe_size(spec: str | os.PathLike) -> int | None:
    """N of `bpe:N` and `roberta:N`, None of another spec."""
    kind, _, size = str(spec).partition(":")
    if kind not in ("bpe", "roberta"):
        return None
    least = 256 if kind == "bpe" else 260
    if not size.isdecimal() or not least < int(size) <= 2**20:
        raise DataError(
            f"tokenizer {str(spec)!r}: N of {kind}:N must be a number above {least} "
            "(the bytes and the special tokens) and at most 2^20"
        )
    return int(size)


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The fields of `RobertaConfig` that a tokenizer says.

    Raises DataError for one without RoBERTa's special tokens.
    """
    names = {"bos_id": "<s>", "pad_id": "<pad>", "eos_id": "</s>", "mask_id": "<mask>"}
    found = {field: tokenizer.token_id(token) for field, token in names.items()}
    if missing := [names[field] for field, number in found.items() if number is None]:
        raise DataError(
            f"the tokenizer has no {', '.join(missing)}: a RoBERTa needs roberta:N, or "
            f"a tokenizer.json with them"
        )
    return found


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of text."""

    vocab_size = 257
    eot = 256
    name = "bytes"

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def token_id(self, token: str) -> int | None:
        return None

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def save(self, folder: Path, max_length: int | None = None) -> None:
        pass


class JsonTokenizer:
    """A `tokenizer.json`, run by the package `tokenizers`.

    ``end``: the token that ends documents; by default RoBERTa's, if it has all of its
    tokens, or the first of `END_OF_TEXT`.
    """

    def __init__(
        self, text: str, origin: str = "tokenizer.json", end: str | None = None
    ):
        tokenizers = require("tokenizers", f"tokenizer {origin!r}")
        try:
            self._inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises no narrower class
            raise DataError(f"{origin}: not a tokenizer.json ({error})") from error
        # Such files may carry the limits of the model they were made for.
        self._inner.no_truncation()
        self._inner.no_padding()
        # A document that quotes "<|endoftext|>" does not end there.
        self._inner.encode_special_tokens = True
        self._text = text
        vocab = self._inner.get_vocab()
        if not vocab:
            raise DataError(f"{origin}: its vocabulary is empty")
        self._origin = origin
        self.vocab_size = max(vocab.values()) + 1  # ids may have gaps
        first = next(filter(vocab.__contains__, END_OF_TEXT), None)
        if vocab.keys() >= set(ROBERTA):  # it may have GPT-2's as well
            first = "</s>"
        self._end = end if end in vocab else first
        self.name = _content_name(text + (self._end or "") * (self._end != first))

    @property
    def eot(self) -> int:
        if self._end is None:
            raise DataError(
                f"{self._origin}: it must have one of {', '.join(END_OF_TEXT)}, or lie "
                f"beside a {CONFIG} whose eos_token it has, to end documents with"
            )
        return self._inner.token_to_id(self._end)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        try:
            encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # as one without an unknown token
            raise DataError(f"{self._origin}: cannot encode ({error})") from error
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def token_id(self, token: str) -> int | None:
        return self._inner.token_to_id(token)

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode([int(i) for i in ids])

    def save(self, folder: Path, max_length: int | None = None) -> None:
        (folder / "tokenizer.json").write_text(self._text, encoding="utf-8")
        vocab = self._inner.get_vocab()
        tokens = {"eos_token": self._end}
        tokens["bos_token"] = next(filter(vocab.__contains__, BEGIN_OF_TEXT), None)
        if vocab.keys() >= set(ROBERTA):
            kinds = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
            tokens |= zip(kinds, ROBERTA, strict=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            # Left out, types of segments are given too: GPT-2 embeds them as words.
            "model_input_names": ["input_ids", "attention_mask"],
            **({} if max_length is None else {"model_max_length": max_length}),
            **{kind: token for kind, token in tokens.items() if token is not None},
        }
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")


def pieces(text: str) -> Iterator[str]:
    """`text` cut behind line ends into pieces of at most PIECE characters."""
    start = 0
    while start < len(text):
        stop = start + PIECE
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _train_bpe(
    texts: Iterable[str], size: int, special: tuple[str, ...]
) -> JsonTokenizer:
    tokenizers = require("tokenizers", f"a BPE of {size} ids")
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(_first_characters(texts), trainer)
    if special == ROBERTA:  # for who reads it with them; here they are added by hand
        ends = (("</s>", 2), ("<s>", 0))
        inner.post_processor = processors.RobertaProcessing(
            *ends, trim_offsets=False, add_prefix_space=False
        )
    return JsonTokenizer(inner.to_str())


def _first_characters(texts: Iterable[str]) -> Iterator[str]:
    left = BPE_TRAINING_CHARACTERS
    for text in texts:
        for piece in pieces(text):
            yield piece
            left -= len(piece)
            if left <= 0:
                return


def _read_json(path: str | os.PathLike) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"tokenizer {str(path)!r}: neither 'bytes' nor 'bpe:N' nor "
            f"'roberta:N' nor a readable "
            f"tokenizer.json ({error})"
        ) from error


def _read_end(path: str | os.PathLike) -> str | None:
    """What ends documents, as Hugging Face's file beside the tokenizer's says."""
    try:
        found = json.loads((Path(path).parent / CONFIG).read_text(encoding="utf-8"))
        end = found.get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # none is there, or it is no object
    end = end.get("content") if isinstance(end, dict) else end
    return end if isinstance(end, str) else None


def _content_name(text: str) -> str:
    return "json-" + hashlib.sha256(text.encode()).hexdigest()[:16]
