"""The doctor says what is true here, and for machines that this one is not, what would mend them."""

import importlib.metadata
import json
import subprocess
import sys

import pytest
from rich.console import Console

from jaxmem.machine import devices, doctor


def machine(**changes: object) -> dict:
    """Findings of a machine where GPUs work, with changes."""
    return {
        "packages": {"jax": "0.10.2"},
        "cuda_wheels": {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"},
        "driver": "580.65.06",
        "devices": [{"kind": "NVIDIA H100 80GB HBM3", "platform": "gpu", "memory": None}],
        "devices_error": None,
    } | changes


@pytest.fixture(scope="module")
def findings() -> dict:
    return doctor.examine()


@pytest.mark.exhaustive
def test_this_machine(findings: dict) -> None:
    assert json.loads(json.dumps(findings)) == findings
    assert findings["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert findings["packages"]["jax"] == importlib.metadata.version("jax")
    assert 0 < findings["host_memory"]["available"] <= findings["host_memory"]["total"]
    works = {check["what"]: check["works"] for check in findings["works"]}
    assert works["simulated devices"]
    assert works["tokenizers"]
    assert works["GPU"] == any(device["platform"] != "cpu" for device in findings["devices"])


@pytest.mark.exhaustive
def test_what_does_not_work_says_what_would_mend_it(findings: dict) -> None:
    for check in findings["works"]:
        assert check["works"] == (check["cure"] is None), check


@pytest.mark.parametrize("width", [40, 100])
def test_the_screen_is_no_wider_than_the_terminal(findings: dict, width: int) -> None:
    console = Console(width=width, record=True, quiet=False, file=None)
    with console.capture() as screen:
        console.print(doctor.table(findings))
    lines = screen.get().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 60
    assert any("parquet" in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"driver": "570.1", "cuda_wheels": {}}, "pip install 'jaxmem[cuda12]'"),
        ({"driver": "580.1", "cuda_wheels": {}}, "pip install 'jaxmem[cuda13]'"),
        ({"driver": "470.1"}, "driver 470.1 is too old; install version 525"),
        (
            {"cuda_wheels": {"jax-cuda13-plugin": "0.10.1"}},
            "same version; run pip install 'jax[cuda13-local]==0.10.2'",
        ),
        (
            {"cuda_wheels": {"jax-cuda12-plugin": "0.10.1"}},
            "same version; run pip install 'jax[cuda12-local]==0.10.2'",
        ),
        ({"devices_error": "RuntimeError: out of memory"}, "RuntimeError: out of memory"),
    ],
)
def test_a_gpu_that_jax_does_not_see(monkeypatch: pytest.MonkeyPatch, changes: dict, cure: str) -> None:
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: True)
    check = doctor._gpu_check(machine(devices=[], **changes))
    assert not check["works"]
    assert cure in check["cure"]


def test_a_driver_whose_program_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: True)
    cure = doctor._gpu_check(machine(devices=[], driver=None))["cure"]
    assert cure == "nvidia-smi fails; check the installation of the NVIDIA driver"


def test_no_gpu_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: False)
    assert doctor._gpu_check(machine(devices=[], driver=None))["cure"].startswith("this machine has no NVIDIA driver")
    assert doctor._gpu_check(machine())["works"]


@pytest.mark.parametrize(
    ("wheels", "remedy"),
    [
        ({}, "pip install 'jaxmem[plan]'"),
        ({"jax-cuda12-plugin": "0.9.0"}, "jax-cuda12-plugin 0.9.0 and jax"),
        ({"jax-cuda13-plugin": importlib.metadata.version("jax")}, None),
    ],
)
def test_planning_for_gpus_needs_the_plugin_in_the_version_of_jax(
    monkeypatch: pytest.MonkeyPatch, wheels: dict[str, str], remedy: str | None
) -> None:
    monkeypatch.setattr(devices, "cuda_wheels", lambda: wheels)
    monkeypatch.setattr(devices.shutil, "which", lambda _: "/usr/bin/ptxas")
    found = devices.gpu_compiler_remedy()
    assert (found is None) == (remedy is None)
    assert (remedy or "") in (found or "")


def test_a_jax_that_does_not_start_is_a_line_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_PROBE", "import sys; print('noise', file=sys.stderr); raise RuntimeError('no device')"
    )
    assert doctor._see_devices({}) == ([], "RuntimeError: no device")

    def hangs(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(doctor.subprocess, "run", hangs)
    assert doctor._see_devices({}) == ([], "jax did not start within two minutes")


@pytest.mark.parametrize(("version", "found"), [(None, "is missing"), ("9.1.0.70", "is 9.1.0.70"), ("9.28.0", None)])
def test_cudnn_that_is_missing_or_too_old_names_the_package(monkeypatch, version, found) -> None:
    installed = {"jax-cuda13-plugin": "0.10.2"} | ({"nvidia-cudnn-cu13": version} if version else {})
    versions = lambda names: {name: installed[name] for name in names if name in installed}  # noqa: E731
    monkeypatch.setattr(devices, "package_versions", versions)
    remedy = devices.cudnn_remedy()
    expected = found and f"nvidia-cudnn-cu13 {found}; 9.6 or newer is required; run pip install -U nvidia-cudnn-cu13"
    assert remedy == expected
    [check] = doctor._cudnn_checks(machine(gpus=[{"name": "NVIDIA L4"}]))
    assert (check["works"], check["cure"]) == (expected is None, expected)
    assert doctor._cudnn_checks(machine(gpus=[])) == []
