"""The processes of a run, from JAX's own variables, Slurm, Open MPI or Kubernetes.

JAX reads the variables of schedulers. This module only corrects cases that JAX does not handle:

- a shell inside an allocation of four tasks (`salloc`, `srun --pty`) is one process, but JAX would wait for three more;
- JAX would look up the Job of every Kubernetes pod, although only the pods of an Indexed Job have others;
- JAX would assign one GPU to the only process of a host, the one with its number on that host; a task to which Slurm
  shows a single GPU would look for the GPU with its own number, which does not exist;
- processes of an unknown launcher would each train the entire run and overwrite each other's files.
"""

import importlib.util
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmem.errors import UserError

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Process count and number, from launchers that JAX does not support.
UNSUPPORTED = (("PMI_SIZE", "PMI_RANK"), ("PMIX_SIZE", "PMIX_RANK"), ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"))


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


def find(timeout: float = 300) -> Cluster | None:
    """The processes that were started together with this one; None for a single process. `timeout`: seconds until
    Kubernetes must know the name of process 0."""
    given = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    count = _number(given, "JAX_NUM_PROCESSES")
    if count == 1:
        return None
    scheduler = _scheduler(is_given=count is not None and "JAX_PROCESS_ID" in given)
    process = _number(given, "JAX_PROCESS_ID")
    if scheduler is not None:
        count = scheduler.processes() if count is None else count
        if count == 1:
            return None
        process = scheduler.process() if process is None else process
    address = given.get("JAX_COORDINATOR_ADDRESS")
    if address is None and scheduler is not None and count is not None:
        address = scheduler.address(timeout)
    if address is None and count is None and process is None:
        return None
    if missing := [name for name, value in zip(VARIABLES, (address, count, process), strict=True) if value is None]:
        raise UserError(
            f"{', '.join(given)} without {', '.join(missing)}; set all of {', '.join(VARIABLES)}, or none of them"
        )
    assert address is not None and count is not None and process is not None  # noqa: PT018
    if not re.fullmatch(r".+:\d+", address):
        raise UserError(f"JAX_COORDINATOR_ADDRESS={address!r} is not HOST:PORT")
    if not 0 <= process < count:
        raise UserError(f"JAX_PROCESS_ID={process} is out of range; expected 0 to {count - 1}")
    return Cluster(address, count, process, _own_devices(scheduler))


class _Scheduler:
    """One of JAX's cluster environments, with the corrections of this module."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def processes(self) -> int:
        return int(self._ask("get_process_count"))

    def process(self) -> int:
        return int(self._ask("get_process_id"))

    def address(self, timeout: float) -> str:
        port = os.environ.get("JAX_COORDINATOR_PORT")
        return str(self._ask("get_coordinator_address", int(timeout), port))

    def here(self) -> tuple[int, int] | None:
        """(number of this process on its host, number of processes on it); None: a single process, or unknown."""
        return None

    def _ask(self, question: str, *arguments: Any) -> Any:
        try:
            return getattr(self._environment, question)(*arguments)
        except (RuntimeError, KeyError, ValueError, OSError) as error:
            text = " ".join(str(error).split())
            raise UserError(f"{self._environment.__name__}: {text}; or set {', '.join(VARIABLES)}") from error


class _Slurm(_Scheduler):
    def processes(self) -> int:
        """The number of processes of this step. In a shell inside an allocation, SLURM_NTASKS counts the entire
        allocation."""
        step = os.environ.get("SLURM_STEP_NUM_TASKS")
        return int(step) if step else super().processes()

    def here(self) -> tuple[int, int] | None:
        counts = _expanded(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = int(os.environ.get("SLURM_NODEID", "0"))
        if node >= len(counts) or os.environ.get("SLURM_GPUS_PER_TASK"):  # a task sees only its own GPUs
            return None
        return int(os.environ["SLURM_LOCALID"]), counts[node]


class _OpenMpi(_Scheduler):
    def processes(self) -> int:
        return int(os.environ["OMPI_COMM_WORLD_SIZE"])

    def process(self) -> int:
        return int(os.environ["OMPI_COMM_WORLD_RANK"])

    def address(self, timeout: float) -> str:
        if "OMPI_MCA_orte_hnp_uri" in os.environ:  # Open MPI 4
            return super().address(timeout)
        if os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == os.environ["OMPI_COMM_WORLD_SIZE"]:
            job = os.environ.get("PMIX_NAMESPACE", "")
            port = os.environ.get("JAX_COORDINATOR_PORT") or 61440 + zlib.crc32(job.encode()) % 4096
            return f"localhost:{port}"
        if importlib.util.find_spec("mpi4py") is None:
            raise UserError(
                "Open MPI 5 does not report the address of process 0; pip install mpi4py, or set "
                "JAX_COORDINATOR_ADDRESS=HOST:PORT of process 0 (mpirun -x JAX_COORDINATOR_ADDRESS=...)"
            )
        from jax._src.clusters import Mpi4pyCluster

        self._environment = Mpi4pyCluster
        return super().address(timeout)

    def here(self) -> tuple[int, int] | None:
        return int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]), int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])


def _scheduler(is_given: bool) -> _Scheduler | None:
    """The scheduler that started this process. `is_given`: whether process numbers are set, so that none is needed."""
    from jax._src import clusters  # what jax.distributed.initialize uses; not public

    if clusters.SlurmCluster.is_env_present():
        return _Slurm(clusters.SlurmCluster)
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return _OpenMpi(clusters.OmpiCluster)
    if is_given:
        return None
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        if importlib.util.find_spec("kubernetes") is None:
            raise UserError(
                "the other pods of this Indexed Job of Kubernetes are unknown; pip install kubernetes, or set "
                f"{', '.join(VARIABLES)}; JAX_NUM_PROCESSES=1 for a single process"
            )
        clusters.K8sCluster.is_env_present()  # also connects
        return _Scheduler(clusters.K8sCluster)
    for size, rank in UNSUPPORTED:
        if rank in os.environ and int(os.environ.get(size, "1")) > 1:
            raise UserError(
                f"{rank}={os.environ[rank]} of {os.environ[size]} processes, but their addresses are unknown; "
                f"set {', '.join(VARIABLES)}; JAX_NUM_PROCESSES=1 for independent processes"
            )
    return None


def _own_devices(scheduler: _Scheduler | None) -> tuple[int, ...] | None:
    """An equal share of the visible GPUs, in order of the process numbers on this host."""
    if given := os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return tuple(int(number) for number in given.split(","))
    place = scheduler.here() if scheduler else None
    seen = visible_gpus()
    if place is None or place[1] == 1 or seen < place[1]:
        return None
    which, of = place
    if seen % of:
        raise UserError(f"{of} processes on this host cannot share {seen} GPUs equally; start one for each GPU or host")
    each = seen // of
    return tuple(range(which * each, (which + 1) * each))


def visible_gpus() -> int:
    """The number of NVIDIA GPUs that this process may use; does not start the driver."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([name for name in shown.split(",") if name.strip()])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _expanded(counts: str) -> list[int]:
    """Tasks per node, as Slurm writes them.

    >>> _expanded("4(x2),3")
    [4, 4, 3]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _number(environment: dict[str, str], name: str) -> int | None:
    if name not in environment:
        return None
    if not environment[name].isdigit():
        raise UserError(f"{name}={environment[name]!r} is not an integer")
    return int(environment[name])
