"""safetensors files, read as if they were hostile, and written tensor by tensor.

A file is 8 bytes of length, a JSON header that says of each tensor dtype, shape and place, and the values. The header
is checked against the file's size before anything is opened, with Python's integers, so that no claim of a file
allocates memory. Values are then read by the `safetensors` library, slice by slice: what is held is one slice.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import ml_dtypes
import numpy as np

from jaxmem.config.hugging_face import read_json
from jaxmem.errors import UserError

MAX_HEADER = 100 << 20  # bytes; the library's own limit
SHARD = 5 << 30  # bytes of values in a file that is written
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Sizes of what may stand in a file and is no weight here, so that its place can be checked too.
OTHER_SIZES = {"F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
LONGEST_NAME = 255  # of file systems
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Entry:
    """What a header says of a tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class Tensors:
    """All tensors of a directory, in one file or several with an index."""

    def __init__(self, directory: str | Path, single: str | None = None) -> None:
        """`single`: the name of the only file, where there can be no other."""
        self.directory = Path(directory).expanduser()
        self._opened = ExitStack()
        self._handles: dict[Path, Any] = {}
        self.entries: dict[str, Entry] = {}
        for file in _files(self.directory) if single is None else [self.directory / single]:
            found = read_header(file)
            if twice := sorted(found.keys() & self.entries.keys()):
                raise UserError(f"{file}: {_few(twice)} stand in {self.entries[twice[0]].file.name} too")
            self.entries |= found

    def expect(
        self, wanted: Mapping[str, tuple[int, ...]], ignored: Callable[[str], bool], config: str = "config.json"
    ) -> None:
        """Refuse a directory that lacks a tensor, has one too many, or one of another shape or an unknown dtype."""
        there = {name for name in self.entries if name in wanted or not ignored(name)}
        problems = []
        if missing := [name for name in wanted if name not in there]:
            problems.append(f"missing: {_few(missing)}")
        if extra := sorted(there - wanted.keys()):
            problems.append(f"not of this model: {_few(extra)}")
        if problems:
            raise UserError(f"{self.directory}: tensors {'; '.join(problems)}")
        for name, shape in wanted.items():
            entry = self.entries[name]
            if entry.shape != shape:
                raise UserError(
                    f"{entry.file}: {name} is {list(entry.shape)}, but {config} makes it {list(shape)}; "
                    "one of the two is of another model"
                )
            if entry.dtype not in DTYPES:
                raise UserError(f"{entry.file}: {name} is {entry.dtype}; weights are read as {', '.join(DTYPES)}")

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, in its own dtype."""
        return self._handle(self.entries[name].file).get_slice(name)[index]

    def metadata(self) -> dict[str, str]:
        """What a header says beside its tensors."""
        found: dict[str, str] = {}
        for file in {entry.file for entry in self.entries.values()}:
            found |= self._handle(file).metadata() or {}
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()
        self._opened.close()

    def _handle(self, file: Path) -> Any:
        if file not in self._handles:
            from safetensors import safe_open

            self._handles[file] = self._opened.enter_context(safe_open(file, framework="numpy"))
        return self._handles[file]


def read_header(file: Path) -> dict[str, Entry]:
    """What a file says that it holds, checked against what it is."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))[0]
            if size < 8 or length > min(MAX_HEADER, size - 8):
                raise UserError(f"{file}: truncated or no safetensors file: {size} bytes, its header says {length}")
            text = opened.read(length)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text, object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise TypeError("no object")
        header.pop("__metadata__", None)
        places = sorted((*_place(name, said), name) for name, said in header.items())
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: damaged header: {error}") from error
    end = 0
    for start, stop, name in places:
        if start != end:
            raise UserError(f"{file}: damaged header: {name} begins at byte {start} of the values, not at {end}")
        end = stop
    if end != size - 8 - length:
        raise UserError(f"{file}: truncated: {size - 8 - length} bytes of values, its header says {end}")
    return {name: Entry(file, said["dtype"], tuple(said["shape"])) for name, said in header.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _place(name: str, said: Any) -> tuple[int, int]:
    """Where a tensor begins and ends, if that is as long as its shape."""
    shape, (start, stop) = said["shape"], said["data_offsets"]
    numbers = [*shape, start, stop]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{name}: shape and offsets must be whole numbers of at least 0")
    width = DTYPES[said["dtype"]].itemsize if said["dtype"] in DTYPES else OTHER_SIZES.get(said["dtype"])
    if width is None:
        raise ValueError(f"{name}: dtype {said['dtype']!r} is not known")
    if stop - start != math.prod(shape) * width:
        raise ValueError(f"{name}: {said['dtype']} of shape {shape} does not take {stop - start} bytes")
    return start, stop


def _files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    if (directory / INDEX).is_file():
        named = read_json(directory / INDEX).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise UserError(f"{directory / INDEX}: has no weight_map")
        files = sorted({str(name) for name in named.values()})
        if outside := [name for name in files if Path(name).name != name or len(name) > LONGEST_NAME]:
            raise UserError(f"{directory / INDEX}: {_few(outside)} is not the name of a file beside it")
        if absent := [name for name in files if not (directory / name).is_file()]:
            raise UserError(f"{directory / INDEX}: points to files that are not there: {_few(absent)}")
        return [directory / name for name in files]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    names = sorted(file.name for file in directory.iterdir())
    if several := [name for name in names if name.endswith(".safetensors")]:
        raise UserError(f"{directory}: {_few(several)} without {INDEX}; one file must be called {SINGLE}")
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        raise UserError(
            f"{directory}: only pickled weights ({_few(pickled)}), which can run code when they are read; convert them "
            'where you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
            "M.from_pretrained('DIR').save_pretrained('NEW')\""
        )
    raise UserError(f"{directory}: no *.safetensors is there")


@dataclass(frozen=True)
class Given:
    """A tensor to write; its values are asked for when it is their turn."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    directory: Path,
    given: Sequence[Given],
    shard: int = SHARD,
    single: str = SINGLE,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """In files of at most `shard` bytes, with an index where they are several. One tensor is held at a time.
    `metadata`: what else their headers say."""
    parts = list(_shards(given, shard))
    names = (
        [single] if len(parts) == 1 else [f"model-{n + 1:05}-of-{len(parts):05}.safetensors" for n in range(len(parts))]
    )
    for name, part in zip(names, parts, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
        end = 0
        for one in part:
            header[one.name] = {"dtype": NAMES[one.dtype], "shape": one.shape, "data_offsets": [end, end + one.nbytes]}
            end += one.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for one in part:
                file.write(np.ascontiguousarray(one.values()).reshape(-1).view(np.uint8).data)
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(one.nbytes for one in given)},
            "weight_map": {one.name: name for name, part in zip(names, parts, strict=True) for one in part},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(given: Sequence[Given], most: int) -> Iterator[list[Given]]:
    part: list[Given] = []
    for one in given:
        if part and sum(other.nbytes for other in part) + one.nbytes > most:
            yield part
            part = []
        part.append(one)
    yield part


def _few(names: Sequence[str], most: int = 4) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
