"""Text to token ids and back: bytes, or any `tokenizer.json` through `tokenizers`. No network, ever.

A document is encoded as [what the tokenizer puts before a text, e.g. Llama's <|begin_of_text|>] + its
tokens + [the end-of-document token]. Special tokens written out in a text are text, nothing else: no
document can end itself or forge a turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from jaxmem.config.hugging_face import read_json
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
    def ends(self) -> frozenset[int]:
        """Ids after which an answer is over: `end`, and what the model's own settings name."""
        ...

    @property
    def special(self) -> Mapping[str, int]:
        """Tokens that no text has, by how they are written: what begins and ends a turn."""
        ...

    @property
    def directory(self) -> Path | None:
        """Where its files are, the chat template among them."""
        ...

    @property
    def identity(self) -> str:
        """The same for tokenizers that give the same ids."""
        ...

    def encode(self, text: bytes | str) -> np.ndarray: ...

    def encode_many(self, texts: Sequence[bytes | str]) -> list[np.ndarray]: ...

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a text in which special tokens are written out, and where in it each begins and ends, in characters:
        what a chat template gives. Nothing is put in front."""
        ...

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
    ends = frozenset({256})
    special: Mapping[str, int] = MappingProxyType({END_TEXT: 256})
    directory = None

    def encode(self, text: bytes | str) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def encode_many(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        at = 0
        for part in re.split(f"({re.escape(END_TEXT)})", text):
            if part == END_TEXT:
                ids.append(self.end)
                places.append((at, at + len(part)))
            else:
                for n, letter in enumerate(part, at):
                    encoded = letter.encode()
                    ids += encoded
                    places += [(n, n + 1)] * len(encoded)
            at += len(part)
        return np.array(ids, np.int32), np.array(places, np.int64).reshape(-1, 2)

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
        self._content, self.directory = content, file.parent
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {token.content: int(number) for number, token in added.items() if token.special}
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end = self._end_token(path, file.with_name("tokenizer_config.json"))
        self.ends = frozenset({self.end, *self._other_ends()})
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

    def _other_ends(self) -> list[int]:
        """What the model that the tokenizer lies beside ends its answers with."""
        found: list[int] = []
        for name in ("config.json", "generation_config.json"):
            file = self.directory / name
            if file.is_file():
                eos = read_json(file).get("eos_token_id")
                found += [one for one in (eos if isinstance(eos, list) else [eos]) if isinstance(one, int)]
        return found

    @cached_property
    def _marked(self) -> Any:
        """One more of the same, since the setting that tells special tokens from text is one of the whole."""
        from tokenizers import Tokenizer as Implementation

        made = Implementation.from_buffer(self._content)
        made.no_truncation()
        made.no_padding()
        return made

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

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        found = self._marked.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.int32), np.array(found.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))
