"""Text to token ids and back: bytes, or any `tokenizer.json` through `tokenizers`. Nothing is downloaded.

A document is encoded as [begin tokens of the tokenizer, e.g. Llama's <|begin_of_text|>] + its tokens + [the
end-of-document token]. Special tokens written out in a text are plain text: no document can end itself or forge a turn.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from jaxmem.config.hf_values import read_json
from jaxmem.config.hub import local_directory
from jaxmem.errors import UserError
from jaxmem.machine.files import read_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Implementation

# Names of the end-of-document token, most specific first.
END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<|eos|>", "[EOS]")

END_TEXT = "<|endoftext|>"  # the end-of-document token of `bytes` in a text
MAX_TOKENIZER_BYTES = 256 << 20  # a limit above the size of all tokenizers, since the file is not trusted
MAX_GROWTH = 4096  # limit of the growth of a text by normalization; usual tokenizers at most double a text


def _valid(text: str) -> str:
    """The text; an error if it is not Unicode. (A command's argument that is not UTF-8 has halves of surrogate
    pairs.)"""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the text is not valid UTF-8 ({error}); use a UTF-8 terminal, or save the file as UTF-8"
        ) from error
    return text


class Bytes:
    """Each byte is a token; token 256 ends a document.

    >>> Bytes().encode("hé").tolist(), Bytes().decode([104, 195, 169, 256])
    ([104, 195, 169], 'hé')
    """

    vocab_size = 257
    end = 256  # id of the end-of-document token
    begin: tuple[int, ...] = ()  # ids before each document
    ends = frozenset({256})  # ids that end an answer: `end`, and those in the model's settings
    special: Mapping[str, int] = MappingProxyType({END_TEXT: 256})  # tokens that no text may contain, e.g. of turns
    directory: Path | None = None  # the directory of its files, with the chat template
    identity = "bytes"  # equal for tokenizers with the same ids

    def encode(self, text: bytes | str) -> np.ndarray:
        data = text if isinstance(text, bytes) else _valid(text).encode()
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_many(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a text in which special tokens are written out (the output of a chat template), and the first and last
        character of each token, [token, 2]. No begin tokens are added."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for match in re.finditer(f"{re.escape(END_TEXT)}|.", _valid(text), re.DOTALL):
            encoded = [self.end] if match[0] == END_TEXT else match[0].encode()
            ids += encoded
            offsets += [match.span()] * len(encoded)
        return np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json of Hugging Face, with the attributes of `Bytes`."""

    def __init__(self, path: str) -> None:
        file = Path(local_directory(path, "data.tokenizer")).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            self.content = read_file(file, MAX_TOKENIZER_BYTES)
        except OSError as error:
            raise UserError(
                f"data.tokenizer={path}: cannot read {file.absolute()}: {error.strerror}; use data.tokenizer=bytes"
                " or the path of a tokenizer.json"
            ) from error
        self.directory: Path | None = file.parent
        self._path = path
        self._tokenizer = self._read()
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self.special: Mapping[str, int] = {
            token.content: int(number) for number, token in added.items() if token.special
        }
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        eos = self._eos_token(file.with_name("tokenizer_config.json"))
        self.end = self._end_token(eos)
        self.ends = frozenset({self.end, *self._other_ends(file.parent, eos)})
        self.begin = self._begin_tokens()
        self.identity = f"sha256:{hashlib.sha256(self.content).hexdigest()},end={self.end}"

    def _read(self) -> Implementation:
        from tokenizers import Tokenizer as Implementation

        with self._errors_of_file():
            tokenizer = Implementation.from_buffer(self.content)
            for part in (tokenizer.normalizer, tokenizer.decoder):
                growth = 1.0 if part is None else _growth(json.loads(part.__getstate__()))
                if growth > MAX_GROWTH:
                    raise ValueError(f"it can make a text {growth:,.0f} times as long; the limit is {MAX_GROWTH} times")
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return tokenizer

    @contextmanager
    def _errors_of_file(self) -> Iterator[None]:
        """tokenizers raises plain Exception for a file that it cannot use, and its Rust code panics, which is a
        BaseException."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, MemoryError, UserError):
            raise
        except BaseException as error:
            raise UserError(f"data.tokenizer={self._path}: not a valid tokenizer.json: {error}") from error

    @cached_property
    def _with_special(self) -> Implementation:
        """A second tokenizer with another setting: it recognizes special tokens in a text."""
        return self._read()

    def _eos_token(self, config: Path) -> int | None:
        """The eos_token of the tokenizer_config.json next to the file."""
        eos = read_json(config).get("eos_token") if config.is_file() else None
        eos = eos.get("content") if isinstance(eos, dict) else eos
        return self._tokenizer.token_to_id(eos) if isinstance(eos, str) else None

    def _end_token(self, eos: int | None) -> int:
        """A special token known to end documents, or `eos`. Only without both a plain token may be it: `</s>` of Gemma
        ends struck text in HTML."""
        special = map(self.special.get, END_NAMES)
        plain = map(self._tokenizer.token_to_id, END_NAMES)
        for token in (*special, eos, *plain):
            if token is not None:
                return int(token)
        raise UserError(
            f"data.tokenizer={self._path}: no end-of-document token such as {', '.join(END_NAMES)}; "
            "set eos_token in tokenizer_config.json in the same directory"
        )

    def _other_ends(self, directory: Path, eos: int | None) -> list[int]:
        """The tokens that end an answer according to the settings of the tokenizer, and of the model in the same
        directory."""
        ends = [] if eos is None else [eos]
        for file in (directory / "config.json", directory / "generation_config.json"):
            if file.is_file():
                eos = read_json(file).get("eos_token_id")
                ends += [token for token in (eos if isinstance(eos, list) else [eos]) if isinstance(token, int)]
        return ends

    def _begin_tokens(self) -> tuple[int, ...]:
        with self._errors_of_file():
            plain = self._tokenizer.encode("a", add_special_tokens=False).ids
            full = self._tokenizer.encode("a").ids
            if max(full, default=0) >= self.vocab_size:
                raise ValueError(
                    f"its template has the token id {max(full)}, but the vocabulary has {self.vocab_size} tokens"
                )
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
        return ()

    def encode(self, text: bytes | str) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        """Encodes in parallel, on as many threads as there are cores."""
        decoded = [text.decode() if isinstance(text, bytes) else _valid(text) for text in texts]
        with self._errors_of_file():
            encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        with self._errors_of_file():
            encoding = self._with_special.encode(_valid(text), add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        with self._errors_of_file():
            return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))


Tokenizer: TypeAlias = Bytes | FileTokenizer


def tokenizer_for(name: str, vocab: int | None = None) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json (or of a directory that contains one). `vocab`: the number of embeddings
    of the model, which must be enough."""
    tokenizer = Bytes() if name == "bytes" else FileTokenizer(name)
    if vocab is not None and tokenizer.vocab_size > vocab:
        raise UserError(
            f"data.tokenizer={name} has {tokenizer.vocab_size} tokens, more than model.vocab={vocab}; use"
            f" model.vocab={tokenizer.vocab_size} or more, or the tokenizer of the model"
        )
    return tokenizer


def _growth(part: Any) -> float:
    """The largest factor by which a part of a tokenizer.json can lengthen a text."""
    match part:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return max(1.0, len(content) / max(len(pattern), 1))
        case {"type": "Replace", "content": text} | {"type": "Prepend", "prepend": text}:
            return 1.0 + len(text)  # a regex may match between any two characters
        case dict():
            return math.prod(map(_growth, part.values()))
        case list():
            return math.prod(map(_growth, part))
    return 1.0
