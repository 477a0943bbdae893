"""Who was started together, by what each scheduler says; and that a lone process stays alone."""

import os
from pathlib import Path

import pytest

from jaxmem.distributed import cluster
from jaxmem.distributed.cluster import Cluster, find, visible_gpus
from jaxmem.errors import UserError

WORDS = ("JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS_ID", "JAX_LOCAL", "SLURM", "OMPI", "PMI", "KUBERNETES", "JOB_")
TORCH = ("WORLD_SIZE", "RANK")
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
URI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_VERSION": "4.1.6"}
GIVEN = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(WORDS) or name in (*TORCH, "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(cluster, "visible_gpus", lambda: 0)


def among(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], gpus: int = 0) -> Cluster | None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster, "visible_gpus", lambda: gpus)
    return find()


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find() is None
    assert among(monkeypatch, {"JAX_NUM_PROCESSES": "1"}) is None


def test_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    found = among(monkeypatch, GIVEN)
    assert found == Cluster("node1:1234", 2, 1)
    assert (found.host, found.port) == ("node1", 1234)
    assert among(monkeypatch, SLURM | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, gpus=8).devices == (2, 3)
    with pytest.raises(UserError, match="JAX_LOCAL_DEVICE_IDS=all must be numbers of GPUs, such as 0,1"):
        among(monkeypatch, {"JAX_LOCAL_DEVICE_IDS": "all"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_NUM_PROCESSES is set without JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID"),
        (GIVEN | {"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID=2 is out of range; use 0 to 1"),
        (GIVEN | {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two is not an integer"),
        (GIVEN | {"JAX_COORDINATOR_ADDRESS": "node1"}, "=node1 must be HOST:PORT"),
        ({"PMI_SIZE": "4", "PMI_RANK": "2"}, "PMI_SIZE=4, but the addresses of these processes are unknown"),
        ({"WORLD_SIZE": "4", "RANK": "2"}, "WORLD_SIZE=4, but the addresses of these processes are unknown; set JAX_C"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"},
            "are unknown; run pip install kubernetes",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, r"Open MPI does not identify .* \(OMPI_COMM_WORLD_RANK is not set\)"),
        (OPEN_MPI, "Open MPI 5 does not report the address of process 0; run pip install mpi4py"),
    ],
)
def test_what_is_not_whole_is_refused(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        among(monkeypatch, given)
    assert "\n" not in str(refused.value)


def test_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert among(monkeypatch, SLURM) == Cluster("node07:61441", 8, 5)
    assert among(monkeypatch, {"JAX_COORDINATOR_PORT": "5000"}).address == "node07:5000"


def test_a_shell_inside_an_allocation_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX itself would wait there for seven more."""
    shell = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert among(monkeypatch, shell) is None


@pytest.mark.parametrize(
    ("change", "gpus", "devices"),
    [
        ({}, 4, (1,)),  # one for each task
        ({}, 8, (2, 3)),
        ({}, 1, None),  # Slurm shows each task its own
        ({"SLURM_GPUS_PER_TASK": "4"}, 4, None),
        ({"SLURM_GPUS_PER_TASK": "a100:4"}, 4, None),
        ({"SLURM_GPUS_PER_TASK": "1"}, 4, (1,)),  # with --gpu-bind=none
        ({"SLURM_GPUS_ON_NODE": "16"}, 4, None),  # with --gpu-bind=closest
        ({"SLURM_GPUS_ON_NODE": "4"}, 4, (1,)),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0"}, 8, None),  # the host to itself
    ],
)
def test_gpus_of_a_host_are_shared(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], gpus: int, devices: tuple[int, ...] | None
) -> None:
    assert among(monkeypatch, SLURM | change, gpus).devices == devices


@pytest.mark.parametrize(
    ("shown", "count"), [("", 0), ("3", 1), ("0, 2,", 2), ("GPU-1a,GPU-2b", 2), ("-1", 0), ("0,-1,1", 1)]
)
def test_visible_gpus_are_counted_without_the_driver(monkeypatch: pytest.MonkeyPatch, shown: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert visible_gpus() == count


def test_all_gpus_of_the_driver_are_visible_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for address in ("0000:17:00.0", "0000:3d:00.0"):
        (tmp_path / address).mkdir()
    monkeypatch.setattr(cluster, "Path", lambda _: tmp_path)
    assert visible_gpus() == 2


def test_gpus_that_cannot_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="4 processes on this host cannot share 6 GPUs equally"):
        among(monkeypatch, SLURM, gpus=6)


def test_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    found = among(monkeypatch, OPEN_MPI | URI, gpus=2)
    assert (found.host, found.processes, found.process, found.devices) == ("10.96.0.1", 4, 3, (1,))


def test_mpirun_in_a_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other hosts, mpirun's daemon is a task of a step, whose variables the processes inherit."""
    daemon = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    found = among(monkeypatch, SLURM | daemon | OPEN_MPI | URI, gpus=2)
    assert (found.host, found.processes, found.process, found.devices) == ("10.96.0.1", 4, 3, (1,))


def test_open_mpi_5_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    here = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-1"}
    one = among(monkeypatch, here)
    assert (one.host, one.process) == ("localhost", 3)
    assert among(monkeypatch, {"PMIX_NAMESPACE": "prterun-2"}).port != one.port


def test_a_pod_that_is_not_of_an_indexed_job_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert among(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    assert among(monkeypatch, pod | GIVEN) == Cluster("node1:1234", 2, 1)
