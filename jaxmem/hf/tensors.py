"""safetensors files: read slice by slice, written tensor by tensor.

The `safetensors` library checks a header (syntax, dtypes, shapes, offsets, size of the file) before it returns any
data, and does not allocate sizes that only the header states; then it reads one slice at a time. jaxmem has its own
writer, which needs one tensor in memory; the writer of the library needs all tensors of a file.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxmem.config.gguf import FILE as GGUF_FILE
from jaxmem.config.hf_modules import Fused
from jaxmem.config.hf_values import read_json
from jaxmem.config.hub import fetch_weights
from jaxmem.errors import UserError, abridge
from jaxmem.typing import JsonDict

MAX_FILE_BYTES = 5 << 30  # bytes of values in a written file
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
MXFP4 = ("_blocks", "_scales")  # ends of the names of the two tensors of a matrix in MXFP4
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {np.dtype(np.uint8): "U8"}
LONGEST_NAME = 255  # longest file name of usual file systems
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
CONVERT = (
    "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('DIR').save_pretrained('NEW')\""
)
CONVERT_ADAPTER = (
    "python -c \"import torch, safetensors.torch as s; s.save_file(torch.load('adapter_model.bin', weights_only=True),"
    " 'adapter_model.safetensors')\""
)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as the header of a file describes it."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    # For a part of this tensor: every `step`-th index of a dimension, from `start` on.
    dim: int = 0
    start: int = 0
    step: int = 1


class Tensors:
    """All tensors of a directory, in one file or several with an index."""

    def __init__(self, directory: str | Path, single: str | None = None) -> None:
        """`single`: the name of the file, if the format has only one (adapters)."""
        self.directory = Path(directory).expanduser()
        self.entries: dict[str, TensorEntry] = {}
        files = _files(self.directory, single)
        self._open = {file: open_file(file) for file in files}
        for file, opened in self._open.items():
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if name in self.entries:
                    other = self.entries[name].file.name
                    raise UserError(
                        f"{file}: tensor {name} is also in {other}; remove the file that belongs to another model"
                    )
                header = opened.get_slice(name)
                self.entries[name] = TensorEntry(file, name, header.get_dtype(), tuple(header.get_shape()))

    def expect(
        self, expected: Mapping[str, tuple[int, ...]], is_ignored: Callable[[str], bool], config: str = "config.json"
    ) -> None:
        """Refuses a directory in which a tensor is missing, unexpected, of another shape or of an unknown dtype."""
        present = {name for name in self.entries if name in expected or not is_ignored(name)}
        missing = [name for name in expected if name not in present]
        extra = sorted(present - expected.keys())
        if missing or extra:
            lists = ("missing", missing), ("unexpected", extra)
            problems = ", ".join(f"{what} tensors: {abridge(names)}" for what, names in lists if names)
            raise UserError(f"{self.directory}: {problems}; use the weights and {config} of the same model")
        for name, shape in expected.items():
            entry = self.entries[name]
            if entry.shape != shape:
                raise _wrong_shape(entry, shape, config)
            if entry.dtype not in (("U8",) if name.endswith(MXFP4) else DTYPES):
                raise UserError(f"{entry.file}: {name} has dtype {entry.dtype}; save the model in {', '.join(DTYPES)}")

    def rename(self, new_name: Callable[[str], str | None]) -> None:
        """Renames all tensors, and drops those whose new name is None."""
        named = {new_name(name): entry for name, entry in self.entries.items()}
        self.entries = {name: entry for name, entry in named.items() if name is not None}

    def split(self, fused: Mapping[str, Fused], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Splits each fused tensor into its parts. `fused`: the parts, by the suffix of the fused name.
        `shapes`: the shapes of the parts."""
        for name, entry in list(self.entries.items()):
            end = next((end for end in fused if name.endswith(f".{end}")), None)
            if end is None:
                continue
            how = fused[end]
            begin = name.removesuffix(end)
            parts = [f"{begin}{part}" for part in how.parts]
            if not shapes.keys() >= set(parts):
                continue  # `expect` refuses it
            sizes = [shapes[part][how.dim] for part in parts]
            full_shape = _with_size(shapes[parts[0]], how.dim, sum(sizes))
            if entry.shape != full_shape:
                raise _wrong_shape(entry, full_shape, "config.json")
            del self.entries[name]
            for i, part in enumerate(parts):
                start = i if how.is_interleaved else sum(sizes[:i])
                step = len(parts) if how.is_interleaved else 1
                self.entries[part] = replace(entry, shape=shapes[part], dim=how.dim, start=start, step=step)

    def read(self, name: str, shape: Sequence[int], index: tuple[slice, ...]) -> np.ndarray:
        """A slice of a tensor padded with zeros to `shape`, in the dtype of the file."""
        entry = self.entries[name]
        ranges = [range(size)[part] for size, part in zip(shape, index, strict=True)]
        inside = [range(r.start, min(r.stop, size)) for r, size in zip(ranges, entry.shape, strict=True)]
        if not all(inside):
            return np.zeros([len(r) for r in ranges], DTYPES.get(entry.dtype, np.uint8))
        part = [slice(r.start, r.stop) for r in inside]
        if inside:
            r = inside[entry.dim]
            step = entry.step
            part[entry.dim] = slice(entry.start + r.start * step, entry.start + (r.stop - 1) * step + 1)
        values = self._open[entry.file].get_slice(entry.name)[tuple(part)]
        if entry.step > 1:
            values = values[(*[slice(None)] * entry.dim, slice(None, None, entry.step))]
        missing = [(0, len(r) - size) for r, size in zip(ranges, values.shape, strict=True)]
        return np.pad(values, missing) if any(map(any, missing)) else values

    def read_entry(self, entry: TensorEntry) -> np.ndarray:
        """A complete tensor, in any dtype that numpy has."""
        return self._open[entry.file].get_tensor(entry.name)

    def replace(self, other: Tensors, rename: Callable[[str], str]) -> None:
        """Replaces every tensor that `other` has too. `rename` maps its name in `other` to its name here."""
        self._open |= other._open
        self.entries |= {rename(name): entry for name, entry in other.entries.items() if rename(name) in self.entries}

    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of all headers."""
        return {key: value for file in self._open.values() for key, value in (file.metadata() or {}).items()}


def _wrong_shape(entry: TensorEntry, shape: Sequence[int], config: str) -> UserError:
    return UserError(
        f"{entry.file}: {entry.name} has shape {list(entry.shape)}, but {config} requires {list(shape)}; "
        f"use the weights and {config} of the same model"
    )


def open_file(file: Path) -> Any:
    """A safetensors or GGUF file whose header is valid, memory mapped."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        problem = "is not a regular file" if file.exists() else "does not exist"
        raise UserError(f"{file.resolve()}: {problem}; copy the file to this place")
    if file.name == GGUF_FILE:
        from jaxmem.hf.gguf import GgufTensors

        return GgufTensors(file)
    try:
        return safe_open(file, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: damaged, truncated or not a safetensors file: {error}; copy it again") from error


def _files(directory: Path, single: str | None) -> list[Path]:
    if not directory.is_dir():
        raise UserError(f"{directory}: does not exist; use a directory with config.json and *.safetensors")
    files = _listed_files(directory, single)
    if not files or not all(file.is_file() for file in files):
        fetch_weights(directory)  # does nothing outside the cache of the hub
        files = _listed_files(directory, single)
    if absent := [file.name for file in files if file.name != GGUF_FILE and not file.is_file()]:
        raise UserError(
            f"{directory / INDEX}: points to missing files: {abridge(absent)}; copy them into the directory"
        )
    if files:
        return files
    names = sorted(file.name for file in directory.iterdir())
    if single is None and (several := [name for name in names if name.endswith(".safetensors")]):
        raise UserError(
            f"{directory}: has {abridge(several)}, but neither {INDEX} nor {SINGLE}; copy the index, "
            f"or rename a file with the complete model to {SINGLE}"
        )
    if pickled := [name for name in names if name.endswith(PICKLED)]:
        raise UserError(
            f"{directory}: contains only pickled weights ({abridge(pickled)}), which can run code; if you trust "
            f"them, convert them with: {CONVERT_ADAPTER if single else CONVERT}"
        )
    raise UserError(f"{directory}: contains no {single or '*.safetensors'}; copy the weights into the directory")


def _listed_files(directory: Path, single: str | None) -> list[Path]:
    """The files with the weights: one complete file, or the files that the index lists, also those that do not exist.
    Empty if the directory has neither."""
    complete = directory / (single or SINGLE)
    if complete.is_file():  # also beside an index, as in transformers
        return [complete]
    if single is not None:
        return []
    index = directory / INDEX
    if not index.is_file():
        link = directory / GGUF_FILE
        return [link] if link.is_symlink() else []
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: has no weight_map; copy the file again")
    names = sorted({str(name) for name in weight_map.values()})
    if outside := [name for name in names if Path(name).name != name or len(name) > LONGEST_NAME]:
        raise UserError(f"{index}: {abridge(outside)} is not the name of a file in this directory; copy it again")
    return [directory / name for name in names]


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write; `values` is called when the tensor is written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    values: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def fuse_tensors(tensors: Sequence[OutputTensor], fused: Mapping[str, Fused]) -> list[OutputTensor]:
    """The tensors, with the parts of each fused tensor joined to one: the inverse of `Tensors.split`."""
    known = {tensor.name: tensor for tensor in tensors}
    for end, how in fused.items():
        for name in [name for name in known if name.endswith(f".{how.parts[0]}")]:
            begin = name.removesuffix(how.parts[0])
            parts = [known.pop(f"{begin}{part}") for part in how.parts]
            shape = _with_size(parts[0].shape, how.dim, sum(part.shape[how.dim] for part in parts))
            values = partial(_fused_values, parts, how, shape)
            known[f"{begin}{end}"] = replace(parts[0], name=f"{begin}{end}", shape=shape, values=values)
    return list(known.values())


def _fused_values(parts: Sequence[OutputTensor], how: Fused, shape: tuple[int, ...]) -> np.ndarray:
    arrays = [part.values() for part in parts]
    if how.is_interleaved:
        return np.stack(arrays, axis=how.dim + 1).reshape(shape)
    return np.concatenate(arrays, axis=how.dim)


def _with_size(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def refuse_infinite(name: str, stored: np.ndarray) -> np.ndarray:
    """The values of a tensor as they are stored; an error if a value was too large for its dtype."""
    if np.isinf(stored).any():
        raise UserError(f"{name} has values that are too large for {stored.dtype}; use --dtype bfloat16")
    return stored


def write_tensors(
    directory: Path,
    tensors: Sequence[OutputTensor],
    shard: int = MAX_FILE_BYTES,
    single: str = SINGLE,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes files of at most `shard` bytes, with an index if there are several. One tensor is in memory at a time.
    `metadata`: added to the `__metadata__` of each header."""
    parts: list[list[OutputTensor]] = [[]]
    for tensor in tensors:
        if parts[-1] and sum(other.nbytes for other in parts[-1]) + tensor.nbytes > shard:
            parts.append([])
        parts[-1].append(tensor)
    names = [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    names = [single] if len(parts) == 1 else names
    for name, part in zip(names, parts, strict=True):
        header: JsonDict = {"__metadata__": {"format": "pt", **metadata}}
        end = 0
        for tensor in part:
            header[tensor.name] = {
                "dtype": NAMES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": [end, end + tensor.nbytes],
            }
            end += tensor.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (directory / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in part:
                file.write(np.ascontiguousarray(tensor.values()).reshape(-1).view(np.uint8).data)
    if len(parts) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
            "weight_map": {tensor.name: name for name, part in zip(names, parts, strict=True) for tensor in part},
        }
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
