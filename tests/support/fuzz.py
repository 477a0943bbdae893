"""Bad input of every kind that jaxmem reads: what must come of it is an answer or one clear error, soon and in little
memory.

    python -m tests.support.fuzz                      # every class of input, a minute each
    python -m tests.support.fuzz safetensors -n 5000  # one, so many inputs
    python -m tests.support.fuzz --seed 7 --keep DIR  # others; what fails is kept there

Inputs are made from good ones by mutation: bytes, and values of JSON where they are that. One that reaches a line of
jaxmem that none had reached before joins those that the next are made from. The same seed makes the same inputs.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from jaxmem.checkpoint import Checkpoints
from jaxmem.config import load_config
from jaxmem.config.hugging_face import decoder_fields
from jaxmem.config.peft import adapter_fields, base_directory
from jaxmem.data.chat import conversation, messages_of
from jaxmem.data.jsonl import JsonLines
from jaxmem.data.long_line import BrokenLineError
from jaxmem.data.template import ChatTemplate, TemplateError
from jaxmem.data.tokenizer import Bytes, tokenizer_for
from jaxmem.errors import UserError
from jaxmem.hf.files import byte_tokenizer
from jaxmem.hf.tensors import Tensors, open_file
from jaxmem.planning.targets import parse_target

ROOT = Path(__file__).parents[2]
OURS = str(ROOT / "jaxmem")
SECONDS = 5  # of a processor that one input may take
MEMORY = 1 << 30  # bytes that one may take beside what is there
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**60,
    10**400,
    1e308,
    float("nan"),
    "",
    "\0",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "\ud800",
    "!!python/object/apply:os.system ['true']",
    "{{ ''.__class__ }}",
    [],
    {},
    [[]] * 9,
]
PIECES = [
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b"9" * 5000,
    b"&a [*a, *a]",
    b"!!python/name:os.system",
    b"..",
    b"=",
    b": ",
    b"\n",
    b"\t",
    b"\x80",
    "\u2028".encode(),
    b"NaN",
    b"-Infinity",
    struct.pack("<Q", 1 << 60),
]


class Class:
    """One kind of input: good examples, and what reads it. `slow`: a tenth of a second of a processor."""

    def __init__(self, examples: list[bytes], read: Callable[[bytes, Path], object], *, slow: bool = False) -> None:
        self.examples, self.read, self.slow = examples, read, slow


def classes() -> dict[str, Class]:
    configs = [file.read_bytes() for file in sorted((ROOT / "configs").glob("*.yaml"))]
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"format": "pt"}}
    tensors = _safetensors(header, bytes(24))
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 257,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    adapter |= {"base_model_name_or_path": "somewhere"}
    chat = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "system": "short"},
        {"instruction": "say", "input": "it", "output": "it"},
    ]
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors"}}
    gpu = (
        "memory_gib: 24\ncompute_capability: 8.9\nbandwidth: 1.0e12\nhost_memory_gib: 64\nmultiprocessors: 128\n"
        "bf16_flops: 1.6e14\nlink: 2.5e10\nnetwork: 1.2e10\n"
    )
    checkpoint = _checkpoint()
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}", "here", {})
    return {
        "config": Class(configs, lambda data, at: load_config(_file(at, "x.yaml", data))),
        "override": Class(
            [b"mesh.fsdp=8", b"memory.remat={save: [mlp_up]}", b"objective.z_loss=1e-4", b"model={preset: tiny}"],
            lambda data, _: load_config(ROOT / "configs" / "demo.yaml", [data.decode(errors="surrogateescape")]),
        ),
        "target": Class(
            [b"h100-80gb:16x8", b"cpu:8", b"rtx4090-24gb"], lambda data, _: parse_target(data.decode(errors="replace"))
        ),
        "target file": Class([gpu.encode()], lambda data, at: parse_target(str(_file(at, "x.yaml", data)))),
        "safetensors": Class([tensors], lambda data, at: open_file(_file(at, "x.safetensors", data))),
        "safetensors index": Class(
            [_json(index)],
            lambda data, at: (
                _file(at, "one.safetensors", tensors),
                Tensors(_file(at, "model.safetensors.index.json", data).parent),
            ),
        ),
        "model config.json": Class(
            [_json(llama)], lambda data, at: decoder_fields(str(_file(at, "config.json", data).parent))
        ),
        "adapter_config.json": Class(
            [_json(adapter)], lambda data, at: _adapter(_file(at, "adapter_config.json", data))
        ),
        "tokenizer.json": Class(
            [_json(byte_tokenizer())],
            lambda data, at: tokenizer_for(str(_file(at, "tokenizer.json", data))).encode_marked("some text"),
        ),
        "chat line": Class([*map(_json, chat)], lambda data, _: conversation(messages_of(data), Bytes(), template)),
        "chat template": Class(
            [b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"],
            lambda data, _: ChatTemplate(data.decode(errors="replace"), "here", {}).render(messages_of(_json(chat[0]))),
        ),
        "jsonl": Class(
            [b"\n".join(_json({"text": text}) for text in ("one", "two", "three" * 50))],
            lambda data, at: _all(JsonLines([_file(at, "x.jsonl", data)], "text", 64)),
        ),
        **{
            f"checkpoint {name}": Class(
                [(checkpoint / file).read_bytes()],
                lambda data, at, file=file: _restored(checkpoint, at, file, data),
                slow=True,
            )
            for name, file in PARTS.items()
        },
    }


# Of a checkpoint: jaxmem's own record, Orbax's description of the arrays, TensorStore's of its files.
PARTS = {"record": "1/run/metadata", "metadata": "1/state/_METADATA", "manifest": "1/state/manifest.ocdbt"}


@cache
def _checkpoint() -> Path:
    """A whole one, of step 1."""
    folder = tempfile.TemporaryDirectory(prefix="jaxmem-fuzz-")
    atexit.register(folder.cleanup)
    with Checkpoints(folder.name) as checkpoints:
        checkpoints.save(1, {"x": jnp.arange(8.0)}, {"step": 1}, {"name": "x"}, force=True)
    return Path(folder.name)


def _restored(whole: Path, at: Path, file: str, data: bytes) -> Any:
    """With another content of one of its files."""
    place, array = at / "checkpoints", jnp.arange(8.0)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(whole, place)
    (place / file).write_bytes(data)
    with Checkpoints(place, read_only=True) as checkpoints:
        wanted = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        return checkpoints.restore(1, {"x": wanted})


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _safetensors(header: Any, values: bytes) -> bytes:
    text = _json(header)
    return struct.pack("<Q", len(text)) + text + values


def _file(directory: Path, name: str, data: bytes) -> Path:
    path = directory / name
    path.write_bytes(data)
    return path


def _adapter(file: Path) -> None:
    base_directory(file.parent)
    adapter_fields(str(file.parent))


def _all(records: JsonLines) -> None:
    try:
        for index in range(len(records)):
            records[index]
    finally:
        records.close()


# ------------------------------------------------------------------ inputs


class Mutations:
    """Ways to spoil an input; `corpus` is what parts of others come from."""

    def __init__(self, draw: random.Random, corpus: list[bytes]) -> None:
        self._draw, self._corpus = draw, corpus
        self._ways = (self._value, self._value, self._flip, self._insert, self._cut, self._repeat, self._splice)

    def __call__(self) -> bytes:
        data = self._draw.choice(self._corpus)
        for _ in range(self._draw.choice((1, 1, 2, 4))):
            data = self._draw.choice(self._ways)(data)
        return data[: 1 << 20]

    def _value(self, data: bytes) -> bytes:
        """A value of JSON replaced, or a key; also of the header of a safetensors file."""
        start = 8 if data[8:9] == b"{" else 0
        end = data.rfind(b"}") + 1 if start else len(data)
        try:
            found = json.loads(data[start:end])
        except (ValueError, RecursionError):
            return self._flip(data)
        if not isinstance(found, dict | list) or not (places := list(_places(found))):
            return data
        one, key = self._draw.choice(places)
        match self._draw.randrange(4):
            case 0:
                del one[key]
            case 1 if isinstance(one, dict):
                one[self._draw.choice(["", "\0", "__class__", "x" * 300])] = one.pop(key)
            case _:
                one[key] = self._draw.choice(ODD)
        text = _json(found)
        return struct.pack("<Q", len(text)) + text + data[end:] if start else text

    def _flip(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + bytes([self._draw.randrange(256)]) + data[at + 1 :]

    def _insert(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + self._draw.choice(PIECES) + data[at:]

    def _cut(self, data: bytes) -> bytes:
        at, to = sorted((self._place(data), self._place(data)))
        return data[:at] + data[to:]

    def _repeat(self, data: bytes) -> bytes:
        at, to = sorted((self._place(data), self._place(data)))
        return data[:to] + data[at:to] * self._draw.choice((1, 2, 50)) + data[to:]

    def _splice(self, data: bytes) -> bytes:
        other = self._draw.choice(self._corpus)
        return data[: self._place(data)] + other[self._place(other) :]

    def _place(self, data: bytes) -> int:
        return self._draw.randrange(len(data) + 1)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object or list inside, with each of its keys."""
    inner = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, one in inner:
        yield value, key
        if isinstance(one, dict | list):
            yield from _places(one)


# ------------------------------------------------------------------ running


class Lines:
    """The lines of jaxmem that were reached, while it lasts."""

    def __init__(self) -> None:
        self.reached: set[tuple[CodeType, int]] = set()

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, *_: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame: FrameType, *_: object) -> Any:
        self.reached.add((frame.f_code, frame.f_lineno))
        return self._line


class TooLongError(BaseException):
    """Not an Exception, so that nobody catches it on the way."""


def _too_long(*_: object) -> None:
    raise TooLongError


def outcome(one: Class, data: bytes, at: Path) -> str | None:
    """What is wrong with what came of an input; None: it was read, or refused by a clear error."""
    signal.signal(signal.SIGPROF, _too_long)  # which would end the process
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        one.read(data, at)
    except (UserError, BrokenLineError, TemplateError) as error:
        told = str(error if isinstance(error, UserError) else UserError(str(error)))
        clear = told.strip() and max(map(len, told.splitlines())) < 1000
        return None if clear else f"an error that is no line to read: {told[:80]}"
    except TooLongError:
        return f"took more than {SECONDS} s of a processor"
    except MemoryError:
        return f"took more than {MEMORY >> 30} GiB"
    except BaseException as error:  # noqa: BLE001, which is what is looked for
        last = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(OURS)][-1:]
        where = "".join(f" at {Path(frame.filename).relative_to(ROOT)}:{frame.lineno}" for frame in last)
        return f"{type(error).__name__}{where}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def fuzz(name: str, one: Class, seed: int, number: int | None, seconds: float, keep: Path | None) -> dict[str, Any]:
    corpus, lines = list(one.examples), Lines()
    another = Mutations(random.Random(f"{seed} {name}"), corpus)
    failures: dict[str, bytes] = {}
    tried, end = 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        while tried < number if number is not None else time.monotonic() < end:
            data = one.examples[tried] if tried < len(one.examples) else another()
            before = len(lines.reached)
            with lines:
                wrong = outcome(one, data, Path(folder))
            tried += 1
            if wrong is not None and wrong not in failures:
                failures[wrong] = data
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{name.replace(' ', '-')}-{tried}").write_bytes(data)
            if len(lines.reached) > before and len(data) < 1 << 16:
                corpus.append(data)
    return {"class": name, "tried": tried, "kept": len(corpus), "lines": len(lines.reached), "failed": list(failures)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = classes()
    parser.add_argument("names", nargs="*", metavar="CLASS", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("-n", type=int, metavar="INPUTS", help="so many of each class, in place of a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each class (60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where inputs that failed are written")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"no class {unknown[0]!r}; known: {', '.join(known)}")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    failed = 0
    for name in args.names or known:
        found = fuzz(name, known[name], args.seed, args.n, args.seconds, args.keep)
        failed += len(found["failed"])
        print(json.dumps(found), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
