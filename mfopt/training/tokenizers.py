"""Text to tokens: a Hugging Face ``tokenizer.json``, or a byte-level BPE trained on public text.

A tokenizer is released with the model: nothing here accepts a private store to train it on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mfopt._runtime import _check, _extras, _files
from mfopt._runtime._types import JsonObject
from mfopt.training.data.store import CONTEXT

with _extras.required():
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
CHAT_START, CHAT_END = "<|im_start|>", "<|im_end|>"  # of ChatML, around a message
_MOST_ENTRIES = 2**20  # the trainer reserves memory for all of them; GPT-2 has 50,257
FILE_NAME = "tokenizer.json"
SETTINGS = "tokenizer_config.json"  # beside it
_WAY_OUT = "Name the model's own, or train one on public text: `vocab_size=2048` with `public`."


class Piece(NamedTuple):
    """Part of a record. ``predicted``: it is learned; ``special``: it spells special tokens."""

    text: str
    predicted: bool = True
    special: bool = False


Content = str | tuple[Piece, ...]  # of a record


class Tokenizer:
    """A tokenizer with the digest that ties stores, models and runs to it.

    Truncation and padding of the ``backend`` are switched off. ``end_of_text``, the text of the
    token that ends a record, must be in its vocabulary.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end_of_text: str = END_OF_TEXT) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        end = backend.token_to_id(end_of_text)
        if end is None:
            rule = "is not in the vocabulary"
            way_out = "Name one that is, or the tokenizer that the data was built with."
            raise _check.reject("end_of_text", end_of_text, rule, way_out)
        self.end_id = end
        self.end_of_text = end_of_text

    @classmethod
    def load(cls, path: str | Path, end_of_text: str | None = None) -> Tokenizer:
        """Load a ``tokenizer.json``, or the one in a folder.

        ``end_of_text``: None: the end token of the model beside it, its own, or GPT-2's.
        """
        file = Path(path)
        if file.is_dir():
            file = file / FILE_NAME
        if not file.is_file():
            rule = f"holds no {FILE_NAME}" if Path(path).is_dir() else "is not a file or folder"
            raise _check.reject("tokenizer", str(path), rule, _WAY_OUT)
        # The library raises bare Exception for what is no tokenizer: nothing narrower exists.
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:
            raise _check.reject("tokenizer", str(file), f"is not a tokenizer: {error}") from error
        return cls(backend, end_of_text or _end_token(file.parent, backend))

    @classmethod
    def of_data(cls, path: str | Path, metadata: JsonObject) -> Tokenizer:
        """The tokenizer at ``path``; refused is another one than a token store was made with."""
        tokenizer = cls.load(path, metadata.get("end_of_text") or END_OF_TEXT)
        if tokenizer.digest != metadata["tokenizer_digest"]:
            rule = "is another tokenizer than the one that the data was built with"
            way_out = "Build the data with it, or put the data's own tokenizer.json there."
            raise _check.reject("tokenizer", str(path), rule, way_out)
        return tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, chats: bool = False) -> Tokenizer:
        """A byte-level BPE (Sennrich et al. 2016; GPT-2's splitting rule) on **public** texts.

        It has ``vocab_size`` entries, at least 257 (the 256 bytes and the end of a text), or fewer
        where the text has too few pairs to merge. ``texts`` are read once, streamed. For ``chats``
        two of them are the tokens of ChatML, and a text ends as the assistant's turn does.
        """
        special = [END_OF_TEXT, CHAT_START, CHAT_END] if chats else [END_OF_TEXT]
        smallest = 256 + len(special)
        _check.integer("vocab_size", vocab_size, at_least=smallest, at_most=_MOST_ENTRIES)
        trained = tokenizers.ByteLevelBPETokenizer()
        trained.train_from_iterator(
            iter(texts),
            vocab_size,
            min_frequency=0,
            show_progress=False,
            special_tokens=special,
        )
        return cls(tokenizers.Tokenizer.from_str(trained.to_str()), special[-1])

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def digest(self) -> str:
        """SHA-256 of the tokenizer's JSON in canonical form, hex."""
        canonical = json.dumps(json.loads(self.backend.to_str()), sort_keys=True)
        return hashlib.sha256(f"{canonical}\0{self.end_of_text}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[Content]) -> list[np.ndarray]:
        """The tokens of each text, with the end token behind them.

        A text that spells a special token out gets its ordinary bytes: a user cannot write an
        end of text. Tokens of pieces that are not predicted are ``CONTEXT`` larger, but for the
        last one before a predicted piece, and pieces that end in special tokens get no other end.
        """
        self.backend.encode_special_tokens = True
        plain = [text if isinstance(text, str) else "" for text in texts]
        encoded = self.backend.encode_batch_fast(plain, add_special_tokens=False)
        return [
            np.array([*tokens.ids, self.end_id], np.int64)
            if isinstance(text, str)
            else self._encode_pieces(text)
            for text, tokens in zip(texts, encoded, strict=True)
        ]

    def _encode_pieces(self, pieces: Sequence[Piece]) -> np.ndarray:
        spelled = any(piece.special for piece in pieces)
        if spelled and self.backend.token_to_id(CHAT_START) is None:
            rule = f"chats are written with {CHAT_START}, which this tokenizer does not have"
            way_out = "Begin from a model that has it (`model`), or write prompts and completions."
            raise _check.reject("messages", pieces[0].text, rule, way_out)
        tokens = []
        predicted = []
        for number, piece in enumerate(pieces, 1):
            self.backend.encode_special_tokens = not piece.special
            ids = self.backend.encode(piece.text, add_special_tokens=False).ids
            ids += [self.end_id] if number == len(pieces) and not piece.special else []
            tokens += ids
            predicted += [piece.predicted] * len(ids)
        learned = np.array(predicted, bool)
        learned[:-1] |= learned[1:]  # the token before a prediction is where it is made
        return np.array(tokens, np.int64) + np.where(learned, 0, CONTEXT)

    def save(self, path: str | Path) -> None:
        """Write ``tokenizer.json``, and its end token beside it where nothing there tells one."""
        path = Path(path)
        _files.write(path, self.backend.to_str(pretty=True))
        settings = path.with_name(SETTINGS)
        if not settings.is_file():
            end = {"eos_token": self.end_of_text}
            _files.write(settings, {"tokenizer_class": "PreTrainedTokenizerFast"} | end)


def _end_token(folder: Path, backend: tokenizers.Tokenizer) -> str:
    """The end token that the files of a model, or of a tokenizer, in a folder name; else GPT-2's.

    What is no token here is passed over: who reads the model says what is wrong with its folder.
    """
    for name, field in (("config.json", "eos_token_id"), (SETTINGS, "eos_token")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, OverflowError):
            end = json.loads((folder / name).read_bytes())[field]
            end = end[0] if isinstance(end, list) else end
            end = end["content"] if isinstance(end, dict) else end  # of a token with settings
            token: str = end if isinstance(end, str) else backend.id_to_token(end) or ""
            if backend.token_to_id(token) is not None:
                return token
    return END_OF_TEXT
