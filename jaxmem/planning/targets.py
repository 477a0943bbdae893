"""The devices that a plan is for: GPUs by name, count and hosts; simulated devices of a CPU; or local devices.

    rtx4090-24gb   a100-40gb:8   h100-80gb:16x8 (16 hosts)   h100-80gb:128 (hosts of 8)   my-gpu.yaml:4   cpu:8

A GPU that is not in the table is a YAML file with the fields of `machine.gpus.Gpu`, in the same units; `like` names a
GPU of the table that has the other fields.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxmem.config import Memory
from jaxmem.distributed import join
from jaxmem.errors import UserError, as_yaml, nearest
from jaxmem.machine import devices, gpus
from jaxmem.machine.files import read_file
from jaxmem.machine.gpus import GPUS, Gpu
from jaxmem.typing import JsonDict

PER_HOST = 8  # GPUs per host, if a target does not name hosts


@dataclass(frozen=True)
class Target:
    """Devices of one kind. `gpu` is None for a CPU, and for GPUs that are not in the table."""

    name: str
    gpu: Gpu | None
    count: int
    per_host: int
    memory: int  # bytes of one device, as its driver reports them
    host_memory: int  # bytes of host memory per device
    here: tuple[Any, ...] | None = None  # jax's devices of this machine; None: another machine
    withheld: int | None = None  # bytes of a device that jax may not use; None: the device reports no limit

    @property
    def is_cpu(self) -> bool:
        return self.gpu is None and (self.here is None or self.here[0].platform == "cpu")

    @property
    def platform(self) -> str:
        """cpu or gpu."""
        return "cpu" if self.is_cpu else "gpu"

    @property
    def is_here(self) -> bool:
        """Whether programs for these devices can run on this machine."""
        return self.here is not None or self.gpu is None

    @property
    def hosts(self) -> int:
        return -(-self.count // self.per_host)


def parse_target(text: str) -> Target:
    """The target of a name.

    >>> target = parse_target("h100-80gb:16x8")
    >>> target.count, target.hosts, target.per_host, target.gpu.kind
    (128, 16, 8, 'H100')
    """
    name, _, amount = text.partition(":")
    match = re.fullmatch(r"(?:(\d{1,6})x)?(\d{1,6})", amount or "1")
    hosts = int(match[1] or 1) if match else 0
    size = int(match[2]) if match else 0
    if not match or not hosts * size:
        raise UserError(f"target {text}: {amount} must be a number of devices above 0, or HOSTSxDEVICES such as 16x8")
    if name == "cpu":
        if match[1]:
            raise UserError(f"target {text}: simulated devices share one host; use cpu:{hosts * size}")
        share = devices.host_memory()["total"] // size
        return Target(text, None, size, size, share, share)
    gpu = _from_file(Path(name)) if name.endswith((".yaml", ".yml")) else GPUS.get(name)
    if gpu is None:
        count_first = re.fullmatch(r"(\d+)x(.+)", text)
        if count_first and count_first[2] in GPUS:
            raise UserError(
                f"target {text}: the number of GPUs is last; did you mean {count_first[2]}:{count_first[1]}?"
            )
        raise UserError(f"target {text}: unknown device {name}{nearest(name, [*GPUS, 'cpu'])}")
    per_host = size if match[1] else min(size, PER_HOST)
    count = hosts * size
    if count % per_host:
        near = f"{name}:{count - count % per_host}"
        raise UserError(
            f"target {text}: {count} is not divisible by {per_host} GPUs per host; use {near}, or {name}:HOSTSxGPUS"
        )
    return Target(text, gpu, count, per_host, gpu.memory, gpu.host_memory)


def local_target(local: Sequence[Any], gather: Callable[[int], list[int]] = lambda value: [value]) -> Target:
    """The target of local devices, of this process or of all processes of a run. `gather` returns the values of all
    processes, for a target that is the same in all of them: with the least memory of a device and of a host."""
    import jax

    first = local[0]
    here = next((device for device in local if device.process_index == jax.process_index()), first)
    count = len(local)
    names = join.hosts()  # several processes may share a host
    hosts = [names[device.process_index] if names else device.process_index for device in local]
    per_host = hosts.count(hosts[0])
    share = min(gather(devices.host_memory()["total"] // per_host))
    if first.platform == "cpu":
        return Target(f"cpu:{count}", None, count, per_host, share, share, tuple(local))
    # jax raises an error for a device of another process.
    reported = min(gather((here.memory_stats() or {}).get("bytes_limit", 0)))
    gpu = gpus.find(first.device_kind, reported)
    # jax reports the bytes that it may use; the table of GPUs has the total.
    memory = max(gpu.memory, reported) if gpu else reported
    name = gpu.name if gpu else first.device_kind
    withheld = memory - reported if reported else None
    amount = count if per_host == min(count, PER_HOST) else f"{-(-count // per_host)}x{per_host}"
    return Target(f"{name}:{amount}", gpu, count, per_host, memory, share, tuple(local), withheld)


def reserved_memory(target: Target, gib: float | None = None) -> int:
    """Bytes of a device that no program can use; for a local device, at least the bytes that jax is configured to leave
    free."""
    if target.is_cpu:
        return 0
    if target.withheld is not None:
        return max(target.withheld, gpus.reserved(target.count, gib or 0))
    return gpus.reserved(target.count, gib)


def usable_memory(target: Target, memory: Memory, reserve_gib: float | None = None) -> int:
    """Bytes of a device that this run may use: all but the reserved bytes, or `memory.budget`."""
    free = target.memory - reserved_memory(target, reserve_gib)
    budget = memory.budget
    return free if budget is None else min(free, int(budget * gpus.GIB))


def target_config(gpu: Gpu, usable: int) -> str:
    """The GPU's description for XLA's compiler: a text protobuf, `stream_executor.GpuTargetConfigProto`.

    XLA recomputes by itself if a program needs more than 80 % of `device_memory_size`. The size is set to `usable` /
    0.8, so that XLA recomputes at the real limit. jax 0.10 reads the version of cuDNN from `dnn_version_info`, later
    versions from `dnn_version`.
    """
    major, minor = (int(part) for part in gpu.compute_capability.split("."))
    cores = CORES[gpu.compute_capability]
    accelerated = "ACCELERATED_FEATURES" if major in (9, 10) else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {cores.shared_memory}
  shared_memory_per_block_optin: {cores.shared_memory_of_block}
  threads_per_core_limit: {cores.threads}
  core_count: {gpu.cores}
  fpus_per_core: {cores.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.bandwidth_gb_s * 1e9)}
  l2_cache_size: {int(gpu.l2_mib * 2**20)}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {int(usable / 0.8)}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {accelerated} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  runtime_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA {gpu.kind} like {cores.example}"
"""


class Cores(NamedTuple):
    """The multiprocessors of a compute capability (CUDA programming guide, "compute capabilities")."""

    shared_memory: int  # bytes per multiprocessor
    shared_memory_of_block: int  # the limit in bytes
    threads: int  # the most resident threads of a multiprocessor
    lanes: int  # of float32 per multiprocessor, each of which adds and multiplies per clock
    example: str  # a GPU by name, from which kernels derive the capability


# CUDA 13 does not support older capabilities.
CORES = {
    "8.0": Cores(167936, 166912, 2048, 64, "NVIDIA A100"),
    "8.6": Cores(102400, 101376, 1536, 128, "NVIDIA A10"),
    "8.9": Cores(102400, 101376, 1536, 128, "NVIDIA L4"),
    "9.0": Cores(233472, 232448, 2048, 128, "NVIDIA H100"),
    "10.0": Cores(233472, 232448, 2048, 128, "NVIDIA B200"),
    "12.0": Cores(102400, 101376, 1536, 128, "NVIDIA RTX PRO 6000"),
}


def target_devices(target: Target, usable: int) -> Sequence[Any]:
    """jax's devices of a target, or descriptions of devices that only the compiler can use."""
    if target.here is not None:
        return target.here
    if target.gpu is None:
        try:
            devices.simulate(target.count)  # before jax is imported
        except UserError:  # jax has started: if it has enough devices, the first of them are used
            import jax

            if jax.devices()[0].platform != "cpu" or len(jax.devices()) < target.count:
                raise
        import jax

        return jax.devices()[: target.count]
    check_compiler(target)
    import jax
    from jax.experimental import topologies

    config: Any = jax.config
    if not devices.has_nvidia_gpu() and not config.jax_platforms:
        config.update("jax_platforms", "cpu")  # otherwise the plugin searches a driver, and jax prints a traceback
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="planned",
            target_config=target_config(target.gpu, usable),
            topology=f"1x{target.hosts}x{target.per_host}",
        )
    except NotImplementedError as error:
        raise UserError(
            f"target {target.name}: this process already uses jax without its CUDA plugin, which compiles for GPUs; set"
            " JAX_PLATFORMS=cpu before jax starts, or plan before anything else uses jax"
        ) from error
    return topology.devices


def check_compiler(target: Target) -> None:
    """Refuses a target of GPUs if this machine cannot compile for them."""
    if not target.is_here and (remedy := devices.gpu_compiler_remedy()):
        raise UserError(f"target {target.name}: {remedy}, or use cpu:N")


def _from_file(path: Path) -> Gpu:
    try:
        settings = yaml.safe_load(read_file(path, 1 << 20).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"target {path}: cannot be read: {reason}") from error
    if not isinstance(settings, dict):
        raise UserError(f"target {path}: expected fields such as memory_gib: 24, not {as_yaml(settings)}")
    spec: JsonDict = {"name": path.stem, "kind": path.stem, "link_group": Gpu.link_group}
    if (like := settings.pop("like", None)) is not None:
        if like not in GPUS:
            raise UserError(f"target {path}: like={as_yaml(like)} is unknown{nearest(like, GPUS)}")
        spec = dataclasses.asdict(GPUS[like]) | {"name": path.stem}
    spec |= settings
    fields: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Gpu)}
    for key, value in spec.items():
        if key not in fields:
            raise UserError(f"target {path}: unknown field {key}{nearest(str(key), fields)}")
        kinds = int | float if fields[key] is float else fields[key]
        if kinds is not str and (isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf):
            kind = "a whole number" if kinds is int else "a number"
            raise UserError(f"target {path}: {key} must be {kind} above 0, not {as_yaml(value)}")
    if missing := [key for key in fields if key not in spec]:
        raise UserError(f"target {path}: missing {', '.join(missing)}; docs/plan.md has an example")
    capability = spec["compute_capability"] = str(spec["compute_capability"])
    if capability not in CORES:
        raise UserError(f"target {path}: unknown compute_capability {capability}; expected one of {', '.join(CORES)}")
    return Gpu(**spec)
