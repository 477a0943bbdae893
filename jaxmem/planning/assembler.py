"""Compiling for sizes alone: XLA does all that decides on memory and time, and no machine code is made of it.

XLA calls ptxas once for each kernel, some two hundred times for a decoder, after memory is assigned: half of a plan's
processor time. A search compiles dozens of programs that nobody runs, so it gives XLA a CUDA directory whose ptxas
writes empty files. The bytes that a program needs are the same to the last one (a test holds them together).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

# $1 is XLA's question for the version, which the real one answers; otherwise `-o FILE` says where the code should go.
_SCRIPT = """#!/bin/sh
case "$*" in *--version*) exec '{ptxas}' "$@" ;; esac
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then : > "$2"; fi
    shift
done
"""


@functools.cache
def sizes_only(*, on_gpu: bool) -> dict[str, bool | str]:
    """Compiler options for a program that will never run. LLVM, which comes after XLA, need not optimize anything: on a
    CPU that is half of the time. Where no CUDA directory is found, XLA makes the code after all."""
    quick: dict[str, bool | str] = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
    root = _cuda_root() if on_gpu else None
    if root is None:
        return quick
    # Kept as long as the process lives.
    directory = tempfile.TemporaryDirectory(prefix="jaxmem-assembler-")
    _directories.append(directory)
    place = Path(directory.name)
    (place / "bin").mkdir()
    (place / "nvvm").symlink_to(root / "nvvm")  # libdevice, which XLA still needs
    script = place / "bin" / "ptxas"
    script.write_text(_SCRIPT.format(ptxas=root / "bin" / "ptxas"))
    script.chmod(0o755)
    return quick | {"xla_gpu_cuda_data_dir": directory.name}


_directories: list[tempfile.TemporaryDirectory[str]] = []


def _cuda_root() -> Path | None:
    """Where ptxas and libdevice lie together: jax's wheels, or a toolkit of the system."""
    found = shutil.which("ptxas")
    roots = [
        *_wheel_roots(),
        *(Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)),
        Path("/usr/local/cuda"),
        *([Path(found).resolve().parents[1]] if found else []),
    ]
    return next((root for root in roots if (root / "bin" / "ptxas").exists() and (root / "nvvm").is_dir()), None)


def _wheel_roots() -> list[Path]:
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).resolve().parents[1] for file in files if file.name == "ptxas"]
