"""Commands, each in a process of its own that has imported what all of them import and has not started jax."""

import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

import jaxmem.hf
import jaxmem.training.run  # noqa: F401
from jaxmem.cli import main
from jaxmem.data import text
from jaxmem.planning import result
from scripts.course import docstrings, memory

SERVER = multiprocessing.get_context("forkserver")


def command(words: Sequence[str], place: Path, devices: Mapping[str, str], asked: str) -> tuple[int, str]:
    """Its exit code and what it said, run in `place` with `asked` on standard input."""
    SERVER.set_forkserver_preload([__name__])
    with TemporaryDirectory() as name:
        Path(name, "asked").write_text(asked)
        process = SERVER.Process(target=_run, args=(words, place, devices, Path(name)))
        process.start()
        process.join()
        return process.exitcode or 0, Path(name, "said").read_text()


def _run(words: Sequence[str], place: Path, devices: Mapping[str, str], files: Path) -> None:
    os.dup2(os.open(files / "asked", os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(files / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(place)
    os.environ.update(devices)
    jax.config.update("jax_platforms", devices["JAX_PLATFORMS"])  # which it has read already
    jax.config.update("jax_num_cpu_devices", int(devices["JAX_NUM_CPU_DEVICES"]))
    _do_less()
    main([*words])


def _do_less() -> None:
    """A part of the standard library is text enough. Tours have no settings: fewer updates, and fewer rows."""
    files = text.stdlib_files()[::30]
    text.TextFiles.default_files = docstrings.stdlib_files = lambda *_: files
    result.predict = lambda _: Counter()  # a sixth of the time of such a run; tests/planning predicts
    rows = memory.ROWS[0], memory.ROWS[-3]
    memory.measure.__defaults__ = (memory.BASE, rows)
