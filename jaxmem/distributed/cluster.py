"""Which processes there are, as whoever started them says: by JAX's own variables, Slurm, Open MPI or Kubernetes.

Slurm's and the others' variables are read by JAX's own detection. This file only keeps it from what it would do wrong:

- a shell inside an allocation of four tasks (`salloc`, `srun --pty`) is one process, but JAX would wait for three more;
- every pod of Kubernetes would be asked for its Job, although only those of an Indexed one have others;
- one process for each host would be given one of the host's GPUs, by its number on that host; and a task to which
  Slurm shows one GPU alone would look for the one of its own number, which is not there;
- processes that were started by what JAX does not know would each train the whole run, over each other's files.
"""

from __future__ import annotations

import importlib.util
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxmem.errors import UserError

OURS = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# What a launcher that JAX cannot ask says of its processes: how many, which.
UNKNOWN = (("PMI_SIZE", "PMI_RANK"), ("PMIX_SIZE", "PMIX_RANK"), ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"))


@dataclass(frozen=True)
class Cluster:
    """This process among the others."""

    address: str  # HOST:PORT of process 0
    processes: int
    process: int
    devices: tuple[int, ...] | None = None  # of this host's GPUs, those of this process; None: all that it sees

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")


def find(timeout: float = 300) -> Cluster | None:
    """Those who were started together with this process; None if it is alone. `timeout`: seconds for Kubernetes to
    know the name of process 0."""
    given = {name: os.environ[name] for name in OURS if os.environ.get(name)}
    count = _number(given, "JAX_NUM_PROCESSES")
    if count == 1:
        return None
    scheduler = _scheduler(asked=count is not None and "JAX_PROCESS_ID" in given)
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
    if missing := [name for name, value in zip(OURS, (address, count, process), strict=True) if value is None]:
        raise UserError(
            f"{', '.join(missing)}: missing beside {', '.join(given)}; give all of {', '.join(OURS)}, or none"
        )
    assert address is not None and count is not None and process is not None  # noqa: PT018
    if not re.fullmatch(r".+:\d+", address):
        raise UserError(f"JAX_COORDINATOR_ADDRESS: {address!r} is not HOST:PORT")
    if not 0 <= process < count:
        raise UserError(f"JAX_PROCESS_ID: {process} is not one of the {count} processes, 0 to {count - 1}")
    return Cluster(address, count, process, _own_devices(scheduler))


class _Scheduler:
    """One of JAX's own cluster environments, and what it leaves out."""

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
        """(which of this host's processes, how many there are); None: a host to itself, or not known."""
        return None

    def _ask(self, question: str, *arguments: Any) -> Any:
        try:
            return getattr(self._environment, question)(*arguments)
        except (RuntimeError, KeyError, ValueError, OSError) as error:
            text = " ".join(str(error).split())
            raise UserError(f"{self._environment.__name__}: {text}; or give {', '.join(OURS)}") from error


class _Slurm(_Scheduler):
    def processes(self) -> int:
        """Those of this step: SLURM_NTASKS is the whole allocation's in a shell inside it."""
        step = os.environ.get("SLURM_STEP_NUM_TASKS")
        return int(step) if step else super().processes()

    def here(self) -> tuple[int, int] | None:
        counts = _expanded(os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = int(os.environ.get("SLURM_NODEID", "0"))
        if node >= len(counts) or os.environ.get("SLURM_GPUS_PER_TASK"):  # what a task sees is its own
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
                "Open MPI 5 does not say where process 0 is: pip install mpi4py, or give "
                "JAX_COORDINATOR_ADDRESS=HOST:PORT of process 0 (mpirun -x JAX_COORDINATOR_ADDRESS=...)"
            )
        from jax._src.clusters import Mpi4pyCluster

        self._environment = Mpi4pyCluster
        return super().address(timeout)

    def here(self) -> tuple[int, int] | None:
        return int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]), int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])


def _scheduler(asked: bool) -> _Scheduler | None:
    """Who started this process. `asked`: its number and theirs were given, so that nobody need be known."""
    from jax._src import clusters  # the only way to what jax.distributed.initialize itself would find

    if clusters.SlurmCluster.is_env_present():
        return _Slurm(clusters.SlurmCluster)
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        return _OpenMpi(clusters.OmpiCluster)
    if asked:
        return None
    if "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ:
        if importlib.util.find_spec("kubernetes") is None:
            raise UserError(
                "this is a pod of an Indexed Job of Kubernetes, and who the others are is not known without "
                f"`pip install kubernetes`, or {', '.join(OURS)}; JAX_NUM_PROCESSES=1 if it is alone"
            )
        clusters.K8sCluster.is_env_present()  # which also connects
        return _Scheduler(clusters.K8sCluster)
    for size, rank in UNKNOWN:
        if rank in os.environ and int(os.environ.get(size, "1")) > 1:
            raise UserError(
                f"{rank} is {os.environ[rank]} of {os.environ[size]} processes, but not who the others are; "
                f"give {', '.join(OURS)}; JAX_NUM_PROCESSES=1 if each is to be alone"
            )
    return None


def _own_devices(scheduler: _Scheduler | None) -> tuple[int, ...] | None:
    """An equal part of the GPUs that this host's processes see, in order of their number on it."""
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
    """NVIDIA GPUs that this process may use; starts no driver."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return len([name for name in shown.split(",") if name.strip()])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _expanded(counts: str) -> list[int]:
    """
    >>> _expanded("4(x2),3")
    [4, 4, 3]
    """

    def each() -> Iterator[int]:
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
            yield from [int(count)] * int(times or 1)

    return list(each())


def _number(given: dict[str, str], name: str) -> int | None:
    if name not in given:
        return None
    if not given[name].isdigit():
        raise UserError(f"{name}: {given[name]!r} is not a whole number")
    return int(given[name])
