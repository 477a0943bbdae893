"""Do the tests notice? Faults are planted one by one in a copy of the code, and the tests of their room must fail.

    make mutations                               # all faults
    python -m tests.support.mutations lora rope  # some

First the tests of `make test` run; if they pass, those of `make test-all`. A fault that no test notices is a hole in
the tests: exit code 1, as if `make test` misses more than a tenth.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from tests.support.planted_faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
COPIED = ("jaxmem", "kernels", "tests", "scripts", "configs", "docs", "pyproject.toml")
TIERS = {"fast": ["-m", "not exhaustive"], "all": ["-m", "exhaustive"]}  # "all" runs after "fast"
LIBRARIES = (
    "pytest",
    "jax",
    "flax.nnx",
    "optax",
    "orbax.checkpoint",
    "pydantic",
)  # but plugins of pytest, which it must load
# As in tests/conftest.py: jax reads them when it is imported.
JAX_SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.04",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}
NO_TESTS = 5  # pytest's exit code if all are deselected


class Result(NamedTuple):
    noticed_by: str  # a tier; "": no test
    minutes: dict[str, float]  # of each tier that ran


def copy_code(to: Path) -> Path:
    """A copy of what tests of changed code need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def plant(fault: Fault, at: Path) -> Result:
    """Runs the tests with a fault planted in the copy; the copy is as it was afterwards."""
    file = at / fault.file
    right = file.read_text()
    if right.count(fault.right) != 1:
        raise SystemExit(f"{fault.file} contains {fault.right!r} {right.count(fault.right)} times; expected once")
    file.write_text(right.replace(fault.right, fault.wrong))
    minutes = {}
    try:
        for tier, options in TIERS.items():
            begin = time.monotonic()
            has_failed = fails([*options, *fault.tests.split()], at)
            minutes[tier] = (time.monotonic() - begin) / 60
            if has_failed:
                return Result(tier, minutes)
    finally:
        file.write_text(right)
    return Result("", minutes)


def fails(arguments: list[str], at: Path) -> bool:
    """Whether a test fails, in a process that has imported the libraries already."""
    log = at / "log"
    if (child := os.fork()) == 0:
        code = 3
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(at)
            sys.path[:] = [str(at), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
            for name in [name for name in sys.modules if name.partition(".")[0] in ("jaxmem", "tests")]:
                del sys.modules[name]
            import pytest

            code = pytest.main(["-xq", "-p", "no:cacheprovider", *arguments])
        except BaseException:  # noqa: BLE001 - reported in the log
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1, NO_TESTS):
        raise SystemExit(f"{' '.join(arguments)}: could not be run\n{log.read_text()[-2000:]}")
    return code == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)}; all by default")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON; faults that it has are not planted again")
    options = parser.parse_args()
    names = options.names or list(FAULTS)
    if unknown := [name for name in names if name not in FAULTS]:
        parser.error(f"unknown fault {unknown[0]!r}; expected one of {', '.join(FAULTS)}")
    results: dict[str, Result] = {}
    if options.results and options.results.exists():
        results = {name: Result(*result) for name, result in json.loads(options.results.read_text()).items()}
    with tempfile.TemporaryDirectory() as folder:
        at = copy_code(Path(folder) / "code")
        os.environ |= {"PYTHONPATH": str(at), "PYTHONDONTWRITEBYTECODE": "1", **JAX_SETTINGS}
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
        os.environ.setdefault("XDG_CACHE_HOME", f"{folder}/cache")
        for library in LIBRARIES:
            importlib.import_module(library)
        for name in (name for name in names if name not in results):
            results[name] = plant(FAULTS[name], at)
            if options.results:
                options.results.write_text(json.dumps(results, indent=1))
            print(row(name, results[name]), flush=True)
    return summarize({name: results[name] for name in names})


def row(name: str, result: Result) -> str:
    minutes = ", ".join(f"{tier} {minutes:.1f} min" for tier, minutes in result.minutes.items())
    verdict = f"noticed by {result.noticed_by}" if result.noticed_by else "MISSED"
    return f"{verdict:16} {FAULTS[name].room:10} {name}: {FAULTS[name].what} ({minutes})"


def summarize(results: dict[str, Result]) -> int:
    """Prints how many faults each tier notices; returns the exit code."""
    fast, total = sum(result.noticed_by == "fast" for result in results.values()), len(results)
    noticed = sum(bool(result.noticed_by) for result in results.values())
    spent = {tier: sum(result.minutes.get(tier, 0.0) for result in results.values()) for tier in TIERS}
    print(f"of {total} faults make test notices {fast}, make test-all {noticed}; minutes: {spent}")
    return int(noticed < total or fast < 0.9 * total)


if __name__ == "__main__":
    sys.exit(main())
