"""The common parts of all sources of data: records, documents, and invalid records."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from jaxmem.config.sections import Data, Source
from jaxmem.data.tokenizer import Tokenizer
from jaxmem.errors import UserError

Result = TypeVar("Result")
RecordIndex: TypeAlias = Any  # the number of a record; of files that are streamed: (file, number)


class InvalidRecordError(UserError):
    """The reason why a line or row contains no document, without the name of its file; see `data.on_invalid`."""


class EmptyDataError(UserError):
    """Files without a document."""

    def __init__(self, paths: Sequence[object]) -> None:
        others = f" and {len(paths) - 1} others" if len(paths) > 1 else ""
        super().__init__(f"{paths[0]}{others}: the data is empty; set data.path to files with documents")


class DocumentPiece(NamedTuple):
    """The text of a record: a complete document, or a part of one."""

    text: bytes | str
    is_first: bool  # the document begins here
    is_last: bool  # the document ends here


class Document(NamedTuple):
    """The tokens of a record."""

    tokens: np.ndarray  # int32
    is_target: np.ndarray | None = None  # bool for each token; None: all tokens are targets
    is_indivisible: bool = False  # whether it is never divided between two rows; then it is at most a row long


EMPTY = Document(np.zeros(0, np.int32), np.zeros(0, bool), is_indivisible=True)


@dataclass
class RecordCounts:
    """Counts of the records of a source that were read, cut, dropped or skipped."""

    kind: str
    read: int = 0
    invalid: int = 0
    dropped: int = 0
    cut: int = 0
    tokens_cut: int = 0

    def __str__(self) -> str:
        phrases = [f"{self.cut} cut, {self.tokens_cut:,} of their tokens lost"] if self.cut else []
        phrases += [f"{self.dropped} dropped as too long"] if self.dropped else []
        phrases += [f"{self.invalid} invalid ones skipped"] if self.invalid else []
        return f"of {self.read} {self.kind} read: {'; '.join(phrases)}" if phrases else ""


@dataclass(eq=False)
class RecordSource:
    """Documents with random access. A subclass reads the files of one kind of source (`SOURCES`)."""

    paths: Sequence[Path]
    source: Source
    data: Data
    tokenizer: Tokenizer
    # The lengths of the runs of records that are read together, e.g. row groups.
    blocks: np.ndarray | None = field(default=None, init=False)
    counts: RecordCounts = field(init=False)
    noun = "documents"  # the name of records in messages
    documents_per_record = 1

    def __post_init__(self) -> None:
        self.counts = RecordCounts(self.noun)
        self.open_files()

    def open_files(self) -> None:
        """Opens the files."""

    @staticmethod
    def default_files() -> list[Path]:
        """The files of a source without `data.path`."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def head(self, count: int) -> Sequence[RecordIndex]:
        """The first records."""
        return range(min(count, len(self)))

    def documents(self, index: int) -> Sequence[Document]:
        """The documents of a record; empty documents if the record is skipped."""
        raise NotImplementedError

    def where(self, index: int) -> str:
        """The file and place of a record, for messages."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the files."""

    def read_valid(self, index: int, read: Callable[[int], Result]) -> Result | None:
        """`read(index)`; with `data.on_invalid: skip`, None for an invalid record, which is counted."""
        self.counts.read += 1
        try:
            return read(index)
        except InvalidRecordError as error:
            if self.data.on_invalid == "stop":
                use = "correct it, or use data.on_invalid=skip"
                if self.counts.read == 1 and self.source.kind.contents != "text":  # so it may be another kind of file
                    use = (
                        f"data.source={self.source.source} needs a JSON object per line; use data.source=text for text"
                    )
                raise UserError(f"{self.where(index)}: {error}; {use}") from error
            self.counts.invalid += 1
            return None


class TokenizedText(RecordSource):
    """Text that is tokenized as it is read."""

    def piece(self, index: int) -> DocumentPiece:
        """The text of a record."""
        raise NotImplementedError

    def documents(self, index: int) -> Sequence[Document]:
        piece = self.read_valid(index, self.piece)
        return [EMPTY if piece is None else Document(document_tokens(self.tokenizer, [piece])[0])]

    def token_batches(self, characters: int) -> Iterator[tuple[int, list[np.ndarray]]]:
        """The tokens of all valid records in order, with the number of records read so far. About `characters` are
        tokenized in parallel at a time."""
        pieces: list[DocumentPiece] = []
        size = 0
        for index in range(len(self)):
            piece = self.read_valid(index, self.piece)
            if piece is not None:
                pieces.append(piece)
                size += len(piece.text)
            if pieces and (size >= characters or index == len(self) - 1):
                yield index + 1, document_tokens(self.tokenizer, pieces)
                pieces = []
                size = 0


def document_tokens(tokenizer: Tokenizer, pieces: Sequence[DocumentPiece]) -> list[np.ndarray]:
    """Token ids of records. Begin and end tokens are only where a document begins and ends.

    >>> from jaxmem.data.tokenizer import Bytes
    >>> pieces = [DocumentPiece("a", True, False), DocumentPiece("b", False, True)]
    >>> [tokens.tolist() for tokens in document_tokens(Bytes(), pieces)]
    [[97], [98, 256]]
    """
    begin = np.array(tokenizer.begin, np.int32)
    end = np.array([tokenizer.end], np.int32)
    none = end[:0]
    return [
        np.concatenate((begin if piece.is_first else none, ids, end if piece.is_last else none))
        for piece, ids in zip(pieces, tokenizer.encode_many([piece.text for piece in pieces]), strict=True)
    ]


def piece_bytes(sequence_length: int) -> int:
    """The largest size in bytes of a record of a text source: several rows, so that few documents are cut."""
    return max(16 * 1024, 8 * sequence_length)
