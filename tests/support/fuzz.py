"""Bad input of every kind that jaxmem reads: it must be read, or refused by one clear error, soon and in little memory.

    python -m tests.support.fuzz                      # every kind of input, a minute each
    python -m tests.support.fuzz safetensors -n 5000  # one kind, that many inputs
    python -m tests.support.fuzz --seed 7 --keep DIR  # other inputs; those that fail are written there

Inputs are made from good ones (`tests/support/untrusted.py`) by mutation of bytes, and of values where they are JSON.
One that reaches a line of jaxmem for the first time joins the corpus that the next are made from. The same seed makes
the same inputs.
"""

import argparse
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxmem.errors import UserError
from tests.support.untrusted import ROOT, Kind, encoded, kinds, safetensors

SOURCE = str(ROOT / "jaxmem")
SECONDS = 5  # of a processor that one input may take
MEMORY = 1 << 30  # bytes that one input may take beyond what the process has
LARGEST = 1 << 20  # bytes of an input
ODD_VALUES: list[Any] = [
    *(None, True, -1, 0, 2**60, 10**400, 1e308, float("nan")),
    *("", "\0", "..", "../../etc/passwd", "/etc/passwd", "\ud800"),
    *("!!python/object/apply:os.system ['true']", "{{ ''.__class__ }}"),
    *([], {}, [[]] * 9),
]
ODD_KEYS = ["", "\0", "__class__", "x" * 300]
FRAGMENTS = [
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x80", "\u2028".encode(), b"\n", b"\t", b"..", b"=", b": "),
    *(b"[" * 100_000, b'{"a":' * 20_000, b"9" * 5000, b"NaN", b"-Infinity", struct.pack("<Q", 1 << 60)),
    *(b"&a [*a, *a]", b"!!python/name:os.system"),
]


class Mutator:
    """Makes bad inputs out of those of a corpus, which may grow meanwhile."""

    def __init__(self, draw: random.Random, corpus: list[bytes]) -> None:
        self._draw, self._corpus = draw, corpus
        # A value is mutated twice as often as anything else.
        self._mutations = (self._value, self._value, self._byte, self._insert, self._cut, self._repeat, self._splice)

    def __call__(self) -> bytes:
        data = self._draw.choice(self._corpus)
        for _ in range(self._draw.choice((1, 1, 2, 4))):
            data = self._draw.choice(self._mutations)(data)
        return data[:LARGEST]

    def _value(self, data: bytes) -> bytes:
        """A value or key of JSON replaced or removed; also in the header of a safetensors file."""
        start = 8 if data[8:9] == b"{" else 0
        end = data.rfind(b"}") + 1 if start else len(data)
        try:
            document = json.loads(data[start:end])
        except (ValueError, RecursionError):
            return self._byte(data)
        if not isinstance(document, dict | list) or not (entries := list(_entries(document))):
            return data
        container, key = self._draw.choice(entries)
        match self._draw.randrange(4):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[self._draw.choice(ODD_KEYS)] = container.pop(key)
            case _:
                container[key] = self._draw.choice(ODD_VALUES)
        return safetensors(encoded(document), data[end:]) if start else encoded(document)

    def _byte(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + bytes([self._draw.randrange(256)]) + data[at + 1 :]

    def _insert(self, data: bytes) -> bytes:
        at = self._place(data)
        return data[:at] + self._draw.choice(FRAGMENTS) + data[at:]

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


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object or list inside, with each of its keys."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _entries(inner)


class Coverage:
    """The lines of jaxmem that were executed inside `with`."""

    def __init__(self) -> None:
        self.lines: set[tuple[CodeType, int]] = set()

    def __enter__(self) -> None:
        sys.settrace(self._trace_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace_call(self, frame: FrameType, *_: object) -> Any:
        return self._trace_line if frame.f_code.co_filename.startswith(SOURCE) else None

    def _trace_line(self, frame: FrameType, *_: object) -> Any:
        self.lines.add((frame.f_code, frame.f_lineno))
        return self._trace_line


class OutOfTimeError(BaseException):
    """Not an Exception, so that nothing on the way catches it."""


def _out_of_time(*_: object) -> None:
    raise OutOfTimeError


def failure(kind: Kind, data: bytes, at: Path) -> str | None:
    """What went wrong with an input; None: it was read, or refused by a clear error."""
    signal.signal(signal.SIGPROF, _out_of_time)  # unhandled it would end the process
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        kind.read(data, at)
    except UserError as error:
        text = str(error if isinstance(error, UserError) else UserError(str(error)))
        is_clear = text.strip() and max(map(len, text.splitlines())) < 1000
        return None if is_clear else f"an error that is empty or too long: {text[:80]}"
    except OutOfTimeError:
        return f"took more than {SECONDS} s of a processor"
    except MemoryError:
        return f"took more than {MEMORY >> 30} GiB"
    except BaseException as error:  # noqa: BLE001, which is what is looked for
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(SOURCE)]
        where = f" at {Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else ""
        return f"{type(error).__name__}{where}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def fuzz(name: str, kind: Kind, seed: int, inputs: Iterator[Any], keep: Path | None = None) -> dict[str, Any]:
    """Try one input after the other for as long as `inputs` has entries; write what fails into the directory `keep`."""
    corpus, coverage = list(kind.examples), Coverage()
    mutated = Mutator(random.Random(f"{seed} {name}"), corpus)
    failures: dict[str, bytes] = {}
    tried = 0
    with tempfile.TemporaryDirectory() as folder:
        for tried, _ in enumerate(inputs, 1):
            data = kind.examples[tried - 1] if tried <= len(kind.examples) else mutated()
            before = len(coverage.lines)
            with coverage:
                wrong = failure(kind, data, Path(folder))
            if wrong is not None:
                failures.setdefault(wrong, data)
            if len(coverage.lines) > before and len(data) < 1 << 16:
                corpus.append(data)
    for number, data in enumerate(failures.values() if keep else ()):
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{name.replace(' ', '-')}-{number}").write_bytes(data)
    counts = {"tried": tried, "corpus": len(corpus), "lines": len(coverage.lines)}
    return {"input": name, **counts, "failures": list(failures)}


def until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = kinds()
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("-n", type=int, metavar="INPUTS", help="of each kind, instead of a time")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind (60)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where inputs that fail are written")
    args = parser.parse_args()
    if unknown := [name for name in args.kinds if name not in known]:
        parser.error(f"unknown kind {unknown[0]!r}; expected one of {', '.join(known)}")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    failed = False
    for name in args.kinds or known:
        inputs = iter(range(args.n)) if args.n is not None else until(args.seconds)
        found = fuzz(name, known[name], args.seed, inputs, args.keep)
        failed |= bool(found["failures"])
        print(json.dumps(found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
