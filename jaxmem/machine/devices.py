"""Sets which devices jax sees and how much of their memory it allocates, before jax starts.

jax reads its platform and its number of CPU devices at its first use; the functions of this module set them before.
Importing this module starts nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.metadata
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem.errors import UserError
from jaxmem.machine import gpus
from jaxmem.typing import JsonDict

if TYPE_CHECKING:
    import jax

# Simulated devices share a few cores, so one may reach a collective long after the others: XLA's limit of 40 s is
# short.
_PATIENCE = {
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": 120,
    "--xla_cpu_collective_call_terminate_timeout_seconds": 1200,
}
CUDNN_NEEDED = (9, 6)  # the oldest version that supports packed sequences


def simulate(count: int) -> None:
    """Make jax see `count` CPU devices on this machine, and nothing else.

    >>> simulate(8)  # the tests run on 8 already
    >>> simulate(3)
    Traceback (most recent call last):
    ...
    jaxmem.errors.UserError: cannot simulate 3 devices: jax already runs with 8 cpu devices; ...
    """
    keep_freed_memory()
    os.environ.update(simulation_environment(count))
    if "jax" not in sys.modules:
        return
    import jax

    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # jax has started; below, the number of its devices is checked
        os.environ["JAX_NUM_CPU_DEVICES"] = str(len(jax.devices()))
    seen = jax.devices()
    if len(seen) != count or seen[0].platform != "cpu":
        raise UserError(
            f"cannot simulate {count} devices: jax already runs with {len(seen)} {seen[0].platform} devices; simulate"
            " devices before the first use of jax"
        )


@contextlib.contextmanager
def lowering_for(device: jax.Device) -> Iterator[None]:
    """A context for lowering a program for a device that may be absent. Kernels ask the abstract mesh for the GPU
    (`kernels.support.capability`): within `jax.shard_map` the mesh has it, elsewhere this context, since jax 0.11."""
    import jax

    if device.platform != "gpu" or jax.__version_info__ < (0, 11):
        yield
        return
    kind: Any = jax.sharding.AbstractDevice(
        device_kind=device.device_kind, num_cores=device.core_count, platform=device.platform
    )
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=kind)):
        yield


def simulation_environment(count: int) -> dict[str, str]:
    """The environment in which jax starts with `count` CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    given = {flag.split("=")[0] for flag in flags}
    return {
        "XLA_FLAGS": " ".join(flags + [f"{name}={s}" for name, s in _PATIENCE.items() if name not in given]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(count),
        # XLA has one thread per device. A program that waits to start occupies some of them, and then a collective of
        # the previous program waits forever for its last participant (jax 0.10): hence more threads.
        "PJRT_NPROC": str(max(int(os.environ.get("PJRT_NPROC") or 0), 3 * count)),  # it may be set by the parent
    }


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, in one pool for all threads; call it before jax starts threads. On a CPU, XLA
    allocates its temporary buffers at each step; glibc would map and clear large blocks each time, which takes a fifth
    of the time of a small step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        # Of malloc.h: M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD.
        for option, value in ((-8, 1), (-3, 1 << 30), (-1, 2**31 - 1)):
            mallopt(option, value)


def collect_garbage_rarely() -> None:
    """Run Python's garbage collector less often: jax traces a step into millions of objects that stay, and scanning
    them takes a sixth of a plan's time by default, and over a second when the process ends."""
    gc.set_threshold(100_000, 20, 20)
    atexit.register(_skip_last_collection)


def _skip_last_collection() -> None:
    """Skips the last collection, except with Triton, whose bindings report objects that are not collected as leaks."""
    if "triton" not in sys.modules:
        gc.freeze()


def has_nvidia_gpu() -> bool:
    """Whether the NVIDIA driver runs here (under WSL as /dev/dxg)."""
    return any(Path(file).exists() for file in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"))


def cuda_wheels() -> dict[str, str]:
    """The installed CUDA plugin wheels of jax, name to version: {"jax-cuda13-plugin": "0.10.2"}."""
    return package_versions(("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"))


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def cudnn_remedy() -> str | None:
    """What is wrong with the cuDNN of jax's CUDA wheels, which computes attention, and the remedy; None: nothing, or
    jax uses the cuDNN of the system."""
    cuda = next((name.split("-")[1] for name in cuda_wheels() if name.endswith("plugin")), None)
    if cuda is None:
        return None
    package = f"nvidia-cudnn-{cuda.replace('cuda', 'cu')}"
    version = package_versions([package]).get(package)
    if version is not None and tuple(map(int, version.split(".")[:2])) >= CUDNN_NEEDED:
        return None
    state = f"is {version}" if version else "is missing"
    needed = ".".join(map(str, CUDNN_NEEDED))
    return f"{package} {state}; {needed} or newer is required; run pip install -U {package}"


def version_conflict(wheels: Mapping[str, str], version: str) -> str | None:
    """The first CUDA wheel of another version than that of jax, which jax refuses."""
    for wheel, wheel_version in wheels.items():
        if wheel_version != version:
            return f"{wheel} {wheel_version} and jax {version} must have the same version"
    return None


def gpu_compiler_remedy() -> str | None:
    """The package that is missing to compile for GPUs that are not installed, and the remedy; None: nothing is missing.
    Compiling needs jax's CUDA plugin in the version of jax, and ptxas from its wheel or from a CUDA toolkit, but no
    driver."""
    cure = "pip install 'jaxmem[plan]'"
    wheels = cuda_wheels()
    version = importlib.metadata.version("jax")
    if not any(wheel.endswith("plugin") for wheel in wheels):
        return f"compiling for GPUs requires jax's CUDA plugin; run {cure}"
    if conflict := version_conflict(wheels, version):
        return f"{conflict}; run {cure}"
    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    has_ptxas = shutil.which("ptxas") or any(root and Path(root, "bin", "ptxas").exists() for root in toolkits)
    if has_ptxas or package_versions(["nvidia-cuda-nvcc"]):
        return None
    return f"ptxas, the assembler of GPU programs, is not installed; run {cure}"


def use_cpu_without_gpu(*, only_compile: bool = False) -> None:
    """Use the CPU if there is no GPU; with CUDA wheels installed jax would print a traceback about cuDNN.

    `only_compile`: no program will run, so `keep_freed_memory` is not called: XLA's compiler allocates small blocks
    from many threads, and with a single pool planning 8 B parameters for 8 GPUs took a third more CPU time.
    """
    if not has_nvidia_gpu():
        if not only_compile:
            keep_freed_memory()
        if cuda_wheels():
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
            if "jax" in sys.modules:  # a script has imported jax, which reads the variable only once
                sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def cache_compiled_programs(output: str | Path) -> None:
    """Cache compiled programs in `output/.compiled`, so that restarts, on hosts that share the directory, do not
    compile again. JAX_COMPILATION_CACHE_DIR sets another directory, JAX_ENABLE_COMPILATION_CACHE=false turns the cache
    off."""
    import jax

    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        config.update("jax_compilation_cache_dir", str(Path(output, ".compiled").absolute()))


def nvidia_gpus() -> list[JsonDict]:
    """The GPUs as the driver reports them, with the memory in use by all processes. Does not start jax. nvidia-ml-py is
    not used, since it would save only ten lines."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = ["--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        child = subprocess.run([program, *query], capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:  # the driver hangs
        return []
    if child.returncode != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in child.stdout.splitlines()]
    return [
        {"name": name, "driver": driver, "memory_in_use": int(used) << 20, "memory": int(total) << 20}
        for name, driver, used, total in rows
        if used.isdigit() and total.isdigit()  # [N/A]: the GPU uses the memory of the host
    ]


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> dict[str, int]:
    """Bytes of main memory, total and available, or the lower limit of a container or a job of Slurm."""
    if not Path("/proc/meminfo").exists():  # macOS, where available memory is not well defined
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"total": total, "available": total}
    kib = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        kib[name] = int(amount.split()[0])
    total = kib["MemTotal"] << 10
    available = kib["MemAvailable"] << 10
    for limit, used in _cgroup_limits(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup")):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return {"total": total, "available": available}


def _cgroup_limits(groups: str, root: Path) -> Iterator[tuple[int, int]]:
    """The limit of the memory of each control group around a process, and the bytes in use there. `groups`: the lines
    of its /proc/self/cgroup, NUMBER:CONTROLLERS:PATH, without controllers in version 2."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        limit_name, used_name = CGROUP_V1 if controllers else CGROUP_V2
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            limit = folder / limit_name
            if folder.is_relative_to(top) and limit.is_file() and (text := limit.read_text().strip()) != "max":
                yield int(text), int((folder / used_name).read_text())


# The files of a control group: the limit of its memory, and the bytes in use.
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
CGROUP_V2 = ("memory.max", "memory.current")
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # of the pinned host memory of each GPU


def visible_count(present: int) -> int:
    """The number of these GPUs that jax may use: the entries of CUDA_VISIBLE_DEVICES before an empty one or -1."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return present
    return len(list(itertools.takewhile(lambda entry: entry.strip() not in ("", "-1"), listed.split(","))))


def reserve_gpu_memory(processes: int = 1) -> None:
    """Lets jax allocate all memory of each GPU except `gpus.reserved`, which plans subtract too, and nine tenths of the
    available host memory; jax's defaults are three quarters of a GPU and 64 GiB of host memory per GPU. A limit that
    the user has set does not change, and plans subtract what such a fraction leaves. `processes`: those of the run.
    Called wherever jax may start; has an effect the first time."""
    has_fraction = any(name in os.environ for name in _FRACTIONS)
    if not has_nvidia_gpu() or os.environ.get("JAX_PLATFORMS") == "cpu" or (has_fraction and HOST_LIMIT in os.environ):
        return
    present = nvidia_gpus()
    count = visible_count(len(present))
    sharing = max(count, min(processes, len(present)), 1)  # GPUs of the run that share the host
    host_gib = int(0.9 * host_memory()["available"] / sharing) >> 30
    os.environ.setdefault(HOST_LIMIT, str(max(64, host_gib)))
    if present and count and not has_fraction:
        least = min(gpu["memory"] for gpu in present)
        share = 1 - gpus.reserved(max(count, processes)) / least
        os.environ[_FRACTIONS[0]] = f"{share:.4f}"


def peak_flops(device: jax.Device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, the denominator of MFU; None: unknown."""
    gpu = gpus.find(device.device_kind)
    return gpu.flops if gpu else None
