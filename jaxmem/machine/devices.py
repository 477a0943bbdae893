"""What jax may see of this machine, decided before it starts, and how fast a device can be.

jax settles its platform and its number of CPU devices once, at the first use: `simulate` and `stay_on_cpu_without_gpu`
only set what it will read then, and importing this module starts nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem.errors import UserError
from jaxmem.machine import gpus

if TYPE_CHECKING:
    import jax

# Eight devices share a few cores, so one may be many seconds behind the others at a collective: XLA's 40 s are too few.
_PATIENCE = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 1200,
}


def simulate(count: int) -> None:
    """Make jax see `count` CPU devices on this machine, whatever else it has.

    >>> simulate(8)  # the tests run on 8 already
    >>> simulate(3)
    Traceback (most recent call last):
    ...
    jaxmem.errors.UserError: cannot simulate 3 devices: jax has already started with 8 cpu devices
    """
    keep_freed_memory()
    os.environ.update(simulated(count))
    if "jax" not in sys.modules:
        return
    import jax

    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # jax has started: the count below tells whether that matters
        os.environ["JAX_NUM_CPU_DEVICES"] = str(len(jax.devices()))
    seen = jax.devices()
    if len(seen) != count or seen[0].platform != "cpu":
        raise UserError(
            f"cannot simulate {count} devices: jax has already started with {len(seen)} {seen[0].platform} devices"
        )


@contextlib.contextmanager
def lowering_for(device: jax.Device) -> Iterator[None]:
    """While jax lowers a program for a device that need not be here. Since jax 0.11 Pallas asks for which GPU its
    kernels are, and within `jax.shard_map` the mesh says so; elsewhere this does."""
    import jax

    if device.platform != "gpu" or jax.__version_info__ < (0, 11):
        yield
        return
    kind: Any = jax.sharding.AbstractDevice(
        device_kind=device.device_kind, num_cores=device.core_count, platform=device.platform
    )
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind)):
        yield


def simulated(count: int) -> dict[str, str]:
    """The environment in which jax starts with `count` CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    given = {flag.split("=")[0] for flag in flags}
    return {
        "XLA_FLAGS": " ".join(flags + [f"{name}={s}" for name, s in _PATIENCE.items() if name not in given]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(count),
        # XLA has a thread for each device. A program that waits to start takes some of them, and a collective of the
        # one before then waits for its last participant forever (jax 0.10): so there are more.
        "PJRT_NPROC": os.environ.get("PJRT_NPROC", str(3 * count)),
    }


def keep_freed_memory() -> None:
    """On a CPU, XLA takes its temporaries from malloc at each step, from whatever thread, and glibc maps large blocks
    anew each time and clears every page: a fifth of a small step. From here on it keeps what is freed, in one pool for
    all threads; so call it before jax starts its own."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        arenas, mmap_threshold, trim_threshold = -8, -3, -1  # M_ARENA_MAX and so on, of malloc.h
        for option, value in ((arenas, 1), (mmap_threshold, 1 << 30), (trim_threshold, 2**31 - 1)):
            mallopt(option, value)


def seldom_look_for_garbage() -> None:
    """jax traces a step into millions of objects that stay, and at Python's own pace a sixth of a plan's time goes in
    looking for garbage among them."""
    gc.set_threshold(100_000, 20, 20)


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver runs here (/dev/dxg is its door under WSL)."""
    return any(Path(door).exists() for door in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"))


def cuda_wheels() -> dict[str, str]:
    """jax's CUDA plugin wheels that are installed, name to version: {"jax-cuda13-plugin": "0.10.2"}."""
    found = {}
    for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def stay_on_cpu_without_gpu(*, only_compile: bool = False) -> None:
    """Where no GPU is, settle on the CPU. With its CUDA wheels installed jax would print a traceback about cuDNN.

    `only_compile`: nothing will run there. XLA's compiler takes small blocks from many threads, which wait for each
    other at a single pool: planning 8 B parameters for 8 GPUs took a third more of processor time with one.
    """
    if not has_nvidia_gpu():
        if not only_compile:
            keep_freed_memory()
        if cuda_wheels():
            os.environ.setdefault("JAX_PLATFORMS", "cpu")


def keep_compiled(output: str | Path) -> None:
    """What is compiled for accelerators is kept in `output/.compiled`, so that a run that starts again, on these hosts
    or others that share the place, does not compile again. JAX_COMPILATION_CACHE_DIR names another place, and
    JAX_ENABLE_COMPILATION_CACHE=false turns it off. Not for CPUs: there compiling is quick, and bound to one CPU's
    instructions."""
    import jax

    config: Any = jax.config
    if jax.default_backend() != "cpu" and config.jax_compilation_cache_dir is None:
        config.update("jax_compilation_cache_dir", str(Path(output, ".compiled").absolute()))


def nvidia_gpus() -> list[dict[str, Any]]:
    """The GPUs as the driver knows them, with the memory that all processes together have in use; jax is not asked."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = ["--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader,nounits"]
    child = subprocess.run([program, *query], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    if child.returncode != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in child.stdout.splitlines()]
    return [
        {"name": name, "driver": driver, "memory_in_use": int(used) << 20, "memory": int(total) << 20}
        for name, driver, used, total in rows
    ]


def memory_here() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


_UNIFIED = "TF_FORCE_UNIFIED_MEMORY"  # XLA's own name, from when it was a part of TensorFlow
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"


def spill_to_host() -> None:
    """Let jax take CUDA's unified memory, beyond what a GPU has: the driver moves pages to host memory when the GPU is
    full, and back when a kernel touches them. XLA reads this once, when jax starts, and only its own pool of memory
    (`bfc`) heeds it; a share of a GPU's memory above 1 is how much that pool may grow to."""
    found = nvidia_gpus() if has_nvidia_gpu() else []
    if not found:
        return  # a plan for GPUs elsewhere; what would run here is refused where it is known what that is
    if Path("/dev/dxg").exists():
        raise UserError("memory.spill: unified: under WSL, CUDA gives no more memory than the GPU has; use none")
    if (allocator := os.environ.setdefault(_ALLOCATOR, "bfc").lower()) not in ("bfc", "default"):
        raise UserError(f"{_ALLOCATOR}={allocator}: never spills (memory.spill: unified); leave it out, or use bfc")
    for name in _FRACTIONS:
        if (share := os.environ.get(name)) is not None and float(share) <= 1:
            raise UserError(f"{name}={share}: leaves nothing to spill to (memory.spill: unified); leave it out")
    count, least = _visible(found), min(gpu["memory"] for gpu in found)
    room = least - gpus.reserved(count) + gpus.spillable(memory_here() // count)
    if not any(name in os.environ for name in _FRACTIONS):
        os.environ[_FRACTIONS[0]] = f"{room / least:.4f}"
    os.environ[_UNIFIED] = "true"


def spills() -> bool:
    """Whether `spill_to_host`, or the user, has asked for unified memory."""
    return os.environ.get(_UNIFIED, "").lower() in ("1", "true")


def _visible(found: list[dict[str, Any]]) -> int:
    """How many of these GPUs jax may see."""
    return len([one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]) or len(found)


def take_all_but_reserved() -> None:
    """Let jax, which would take three quarters of each GPU, take all but `gpus.reserved`: the number that a plan's
    `fits` takes off. A fraction that the user gave stays, and plans then take off what it leaves."""
    if not has_nvidia_gpu() or any(name in os.environ for name in _FRACTIONS):
        return
    if found := nvidia_gpus():
        least = min(gpu["memory"] for gpu in found)
        share = 1 - gpus.reserved(_visible(found)) / least
        os.environ[_FRACTIONS[0]] = f"{share:.4f}"


def peak_flops(device: jax.Device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, the denominator of MFU; None where it is not known."""
    gpu = gpus.find(device.device_kind)
    return gpu.flops if gpu else None
