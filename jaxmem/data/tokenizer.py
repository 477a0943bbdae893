"""Text to token ids and back: bytes, or any `tokenizer.json` through `tokenizers`. No network, ever.

A document is encoded as [what the tokenizer puts before a text, e.g. Llama's <|begin_of_text|>] + its
tokens + [the end-of-document token]. Special tokens written out in a text are text, nothing else: no
document can end itself or forge a turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxmem.data.text import Piece
from jaxmem.errors import UserError

# What tokenizers call the token that ends a document, most specific first.
END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "<|end▁of▁sentence|>", "</s>", "<eos>", "<|eos|>", "[EOS]")

END_TEXT = "<|endoftext|>"  # how the end is written where `bytes` is the tokenizer


class Tokenizer(Protocol):
    """What the rest of the library knows of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end(self) -> int:
        """Id of the end-of-document token."""
        ...

    @property
    def begin(self) -> tuple[int, ...]:
        """Ids in front of each document."""
        ...

    @property
    def identity(self) -> str:
        """The same for tokenizers that give the same ids."""
        ...

    def encode(self, text: bytes | str) -> np.ndarray: ...

    def encode_many(self, texts: Sequence[bytes | str]) -> list[np.ndarray]: ...

    def decode(self, ids: Iterable[int]) -> str: ...


def tokenizer_for(name: str) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json (or of a directory that holds one)."""
    return Bytes() if name == "bytes" else FromFile(name)


def document_tokens(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[np.ndarray]:
    """Token ids of records: a document's begin and end only where it begins and ends.

    >>> [tokens.tolist() for tokens in document_tokens(Bytes(), [Piece("a", True, False), Piece("b", False, True)])]
    [[97], [98, 256]]
    """
    begin, end = np.array(tokenizer.begin, np.int32), np.array([tokenizer.end], np.int32)
    none = end[:0]
    return [
        np.concatenate((begin if piece.first else none, ids, end if piece.last else none))
        for piece, ids in zip(pieces, tokenizer.encode_many([piece.text for piece in pieces]), strict=True)
    ]


class Bytes:
    """Each byte is a token; 256 ends a document.

    >>> Bytes().encode("hé").tolist(), Bytes().decode([104, 195, 169, 256])
    ([104, 195, 169], 'hé')
    """

    vocab_size, end, identity = 257, 256, "bytes"
    begin: tuple[int, ...] = ()

    def encode(self, text: bytes | str) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_many(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")


class FromFile:
    """A tokenizer.json as Hugging Face writes it."""

    def __init__(self, path: str) -> None:
        from tokenizers import Tokenizer as Implementation

        file = Path(path).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            content = file.read_bytes()
        except OSError as error:
            raise UserError(
                f"data.tokenizer {path}: {error.strerror} (allowed: bytes, or the path of a tokenizer.json)"
            ) from error
        try:
            self._tokenizer: Any = Implementation.from_buffer(content)
        except Exception as error:  # tokenizers raises plain Exception for a file that it cannot read
            raise UserError(f"data.tokenizer {path}: no valid tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end = self._end_token(path, file.with_name("tokenizer_config.json"))
        self.begin = self._begin_tokens()
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()},end={self.end}"

    def _end_token(self, path: str, config: Path) -> int:
        """A token known to end documents; otherwise the eos_token of the tokenizer_config.json beside."""
        names = list(END_NAMES)
        if config.is_file():
            try:
                eos = json.loads(config.read_bytes()).get("eos_token")
            except (ValueError, AttributeError, RecursionError) as error:
                raise UserError(f"{config}: no valid JSON object: {error}") from error
            eos = eos.get("content") if isinstance(eos, dict) else eos
            names += [eos] if isinstance(eos, str) else []
        for name in names:
            if (token := self._tokenizer.token_to_id(name)) is not None:
                return int(token)
        raise UserError(
            f"data.tokenizer {path}: no token that ends a document: none of {', '.join(END_NAMES)} is in it; "
            "name it as eos_token in a tokenizer_config.json beside it"
        )

    def _begin_tokens(self) -> tuple[int, ...]:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a").ids
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start])
        return ()

    def encode(self, text: bytes | str) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        """Encodes in parallel, on as many threads as there are cores."""
        decoded = [text.decode() if isinstance(text, bytes) else text for text in texts]
        found = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))
