"""The processes of a run, from JAX's own variables, Slurm, Open MPI or Kubernetes.

JAX reads the variables of schedulers. This module only corrects cases that JAX does not handle:

- a shell inside an allocation of four tasks (`salloc`, `srun --pty`) is one process, but JAX would wait for three more;
- JAX would look up the Job of every Kubernetes pod, although only the pods of an Indexed Job form a run together;
- JAX assigns to process i of a host only GPU i: the only process of a host would leave all GPUs but the first unused,
  and if Slurm shows each task a single GPU, task 1 would look for a second GPU that it does not have;
- processes of an unknown launcher would each train the entire run and overwrite each other's files.
"""

import importlib.util
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jaxmem.errors import UserError
from jaxmem.machine.devices import visible_count

Scheduler: TypeAlias = Any  # a subclass of ClusterEnv in jax._src.clusters, which is not public
VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
ALL = ", ".join(VARIABLES)
LAUNCH = "JAXMEM_LAUNCH"  # a variable with the id of a `jaxmem launch`, the same when it starts processes again
JOB = "JAXMEM_JOB"  # a variable for the id of the job of another scheduler, the same when it is started again
# Variables of launchers that JAX does not support: the number of processes, and the number of this process.
UNSUPPORTED = (
    *(("PMI_SIZE", "PMI_RANK"), ("PMIX_SIZE", "PMIX_RANK"), ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK")),
    ("WORLD_SIZE", "RANK"),  # torchrun, PyTorchJob
)


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, and the number of this process."""

    address: str  # HOST:PORT of process 0
    processes: int
    process: int
    devices: tuple[int, ...] | None = None  # GPUs of this process on its host; None: all visible GPUs

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")


def jobs(*, started_again: bool = False) -> list[str]:
    """The ids of the launch, of the Slurm job, and of the job of another scheduler (JOB) to which this process belongs.
    `started_again`: only if an earlier process may have belonged to it."""
    launch = os.environ.get(LAUNCH)
    job = os.environ.get(JOB)
    slurm = os.environ.get("SLURM_JOB_ID")
    if started_again and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        slurm = None
    ids = {"launch": launch, "slurm": slurm, "job": job}
    return [f"{kind} {number}" for kind, number in ids.items() if number]


def find(timeout: float = 300) -> Cluster | None:
    """The processes that were started together with this one; None for a single process. `timeout`: seconds until
    Kubernetes must know the name of process 0."""
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    count = _number(given, "JAX_NUM_PROCESSES")
    process = _number(given, "JAX_PROCESS_ID")
    address = given.get("JAX_COORDINATOR_ADDRESS")
    if count == 1:
        return None
    scheduler = _scheduler(is_given=count is not None and process is not None)
    if scheduler is not None:
        count = _process_count(scheduler) if count is None else count
        if count == 1:
            return None
        process = _process_id(scheduler) if process is None else process
        address = _address(scheduler, timeout) if address is None else address
    missing = [name for name, value in zip(VARIABLES, (address, count, process), strict=True) if value is None]
    if len(missing) == len(VARIABLES):
        return None
    if missing:
        raise UserError(f"{', '.join(given)} is set without {', '.join(missing)}; set all three, or unset all three")
    assert address is not None and count is not None and process is not None  # noqa: PT018
    if not re.fullmatch(r".+:\d+", address):
        raise UserError(f"JAX_COORDINATOR_ADDRESS={address} must be HOST:PORT, such as node1:1234")
    if not 0 <= process < count:
        raise UserError(f"JAX_PROCESS_ID={process} is out of range; use 0 to {count - 1}")
    return Cluster(address, count, process, _local_devices(scheduler))


def _scheduler(is_given: bool) -> Scheduler | None:
    """The scheduler that started this process, or None. `is_given`: whether process numbers are set, so that no
    scheduler is needed."""
    from jax._src import clusters  # not public; used by jax.distributed.initialize

    # First, as in JAX: on other hosts of a Slurm job, mpirun's processes have the variables of the daemon's step too.
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return clusters.OmpiCluster
    if clusters.SlurmCluster.is_env_present():
        return clusters.SlurmCluster
    if is_given:
        return None
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        if importlib.util.find_spec("kubernetes") is None:
            raise UserError(
                f"the other pods of this Kubernetes Job are unknown; run pip install kubernetes, or set {ALL}, or set"
                " JAX_NUM_PROCESSES=1 for a single process"
            )
        clusters.K8sCluster.is_env_present()  # this call also connects to the cluster
        return clusters.K8sCluster
    for size, rank in UNSUPPORTED:
        if rank in os.environ and os.environ.get(size, "").isdigit() and int(os.environ[size]) > 1:
            raise UserError(
                f"{size}={os.environ[size]}, but the addresses of these processes are unknown; set {ALL}, or set"
                " JAX_NUM_PROCESSES=1 for independent processes"
            )
    return None


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a cluster environment; its errors become one line."""
    try:
        return question(*arguments)
    except (RuntimeError, KeyError, ValueError, OSError) as error:
        name = question.__qualname__.partition("Cluster")[0]
        text = " ".join(str(error).split())
        raise UserError(f"{name} does not identify the processes of this run ({text}); set {ALL}") from error


def _process_id(scheduler: Scheduler) -> int:
    if scheduler.name == "ompi":
        return _ompi_number("OMPI_COMM_WORLD_RANK")
    return int(_ask(scheduler.get_process_id))


def _process_count(scheduler: Scheduler) -> int:
    if scheduler.name == "ompi":
        return _ompi_number("OMPI_COMM_WORLD_SIZE")
    # In a shell inside an allocation, SLURM_NTASKS counts the entire allocation.
    step = os.environ.get("SLURM_STEP_NUM_TASKS") if scheduler.name == "slurm" else None
    return int(step or _ask(scheduler.get_process_count))


def _ompi_number(name: str) -> int:
    """A number that every version of Open MPI sets. jax 0.11 asks mpi4py instead if the version is 5 or newer."""
    number = _number(os.environ, name)
    if number is None:
        raise UserError(f"Open MPI does not identify the processes of this run ({name} is not set); set {ALL}")
    return number


def _address(scheduler: Scheduler, timeout: float) -> str:
    port = os.environ.get("JAX_COORDINATOR_PORT")
    if scheduler.name == "ompi" and "OMPI_MCA_orte_hnp_uri" not in os.environ:  # Open MPI 5
        if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ["OMPI_COMM_WORLD_SIZE"]:
            job = os.environ.get("PMIX_NAMESPACE", "")
            return f"localhost:{port or 61440 + zlib.crc32(job.encode()) % 4096}"
        if importlib.util.find_spec("mpi4py") is None:
            raise UserError(
                "Open MPI 5 does not report the address of process 0; run pip install mpi4py, or set "
                "JAX_COORDINATOR_ADDRESS=HOST:PORT of process 0 (mpirun -x JAX_COORDINATOR_ADDRESS=...)"
            )
        from jax._src.clusters import Mpi4pyCluster

        scheduler = Mpi4pyCluster
    return str(_ask(scheduler.get_coordinator_address, int(timeout), port))


def _place_on_host(scheduler: Scheduler) -> tuple[int, int] | None:
    """(number of this process on its host, number of processes on it); None: a single process, or unknown."""
    if scheduler.name == "ompi":
        return int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]), int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    counts = _expanded(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = int(os.environ.get("SLURM_NODEID", "0"))
    if scheduler.name != "slurm" or node >= len(counts):
        return None
    return int(os.environ["SLURM_LOCALID"]), counts[node]


def _local_devices(scheduler: Scheduler | None) -> tuple[int, ...] | None:
    """An equal share of the visible GPUs, in order of the process numbers on this host."""
    if given := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", given):
            raise UserError(f"JAX_LOCAL_DEVICE_IDS={given} must be numbers of GPUs, such as 0,1; unset it to use all")
        return tuple(int(number) for number in given.split(","))
    place = _place_on_host(scheduler) if scheduler else None
    if place is None:
        return None
    index, processes = place
    seen = visible_gpus()
    if processes == 1 or seen < processes or _is_bound(seen):
        return None
    if seen % processes:
        raise UserError(
            f"{processes} processes on this host cannot share {seen} GPUs equally; start one per GPU, or one per host"
        )
    count = seen // processes
    return tuple(range(index * count, (index + 1) * count))


def _is_bound(seen: int) -> bool:
    """Whether Slurm shows this process its own GPUs only. `seen`: the number of GPUs that it shows."""
    of_task = os.environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]  # 4, or a100:4
    on_host = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return str(seen) == of_task or (on_host.isdigit() and seen < int(on_host))


def visible_gpus() -> int:
    """The number of NVIDIA GPUs that this process may use; does not start the driver."""
    return visible_count(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))


def _expanded(counts: str) -> list[int]:
    """Tasks per node, as Slurm writes them.

    >>> _expanded("4(x2),3")
    [4, 4, 3]
    """
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in groups for _ in range(int(times or 1))]


def _number(environment: Mapping[str, str], name: str) -> int | None:
    if name not in environment:
        return None
    if not environment[name].isdigit():
        raise UserError(f"{name}={environment[name]} is not an integer; use 0 or more")
    return int(environment[name])
