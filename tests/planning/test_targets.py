"""Targets by name and by file, and one clear line for each that is wrong."""

import io
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console

from jaxmem.config import Memory
from jaxmem.distributed import join
from jaxmem.errors import UserError
from jaxmem.machine import devices, gpus
from jaxmem.machine.gpus import GIB, GPUS
from jaxmem.planning.result import plan
from jaxmem.planning.table import target_table
from jaxmem.planning.targets import local_target, parse_target, target_config, target_devices, usable_memory

OWN = """
memory_gib: 24
bandwidth_gb_s: 1000
bf16_tflops: 100
link_gb_s: 32
network_gb_s: 3
host_link_gb_s: 32
host_memory_gib: 64
compute_capability: 8.9
cores: 100
clock_ghz: 2.0
l2_mib: 48
"""


@pytest.mark.parametrize(
    ("text", "gpu", "count", "hosts"),
    [
        ("rtx4090-24gb", "RTX 4090", 1, 1),
        ("a100-40gb:8", "A100", 8, 1),
        ("a100-80gb:4", "A100", 4, 1),
        ("h100-80gb:16x8", "H100", 128, 16),
        ("h100-80gb:128", "H100", 128, 16),
        ("h200-141gb:2x4", "H200", 8, 2),
        ("b200-180gb:1x3", "B200", 3, 1),
    ],
)
def test_names(text: str, gpu: str, count: int, hosts: int) -> None:
    target = parse_target(text)
    assert target.gpu is not None
    assert (target.gpu.kind, target.count, target.hosts, target.hosts * target.per_host) == (gpu, count, hosts, count)
    assert not target.is_cpu
    assert not target.is_here


def test_the_names_of_the_issue_are_all_there() -> None:
    names = """rtx3080-10gb rtx3090-24gb rtx4060ti-16gb rtx4090-24gb rtx5090-32gb a6000-48gb l40s-48gb a100-40gb
        a100-80gb h100-80gb h200-141gb b200-180gb"""
    assert set(names.split()) <= set(GPUS)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_facts_are_of_the_right_size(gpu: gpus.Gpu) -> None:
    said = int(gpu.name.rpartition("-")[2].removesuffix("gb"))
    assert 0.85 * said < gpu.memory_gib * GIB / 1e9 < 1.08 * said
    assert 200 < gpu.bandwidth_gb_s < 10_000
    assert 40 < gpu.bf16_tflops < 3000
    assert gpu.network_gb_s <= gpu.link_gb_s <= gpu.bandwidth_gb_s
    # Multiprocessors do a power of two of operations a clock; some data sheets count with a lower one.
    each = gpu.flops / (gpu.cores * gpu.clock_ghz * 1e9)
    assert any(0.86 * power < each < 1.02 * power for power in (512, 1024, 2048, 4096, 8192))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100-81gb", "did you mean h100-80gb"),
        ("8xh100-80gb", "did you mean h100-80gb:8"),
        ("zzz", "expected one of a100-40gb"),
        ("h100-80gb:0", "must be a number"),
        ("h100-80gb:2x", "must be a number"),
        ("h100-80gb:x8", "must be a number"),
        ("h100-80gb:-1", "must be a number"),
        ("h100-80gb:9", "not divisible by 8 GPUs per host"),
        ("cpu:2x4", "use cpu:8"),
        ("nothing.yaml", "cannot be read"),
    ],
)
def test_what_is_no_target_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        parse_target(text)
    assert "\n" not in str(error.value)
    assert repr(text) in str(error.value) or text in str(error.value)


def test_a_gpu_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(OWN)
    target = parse_target(f"{tmp_path}/mine.yaml:2x4")
    assert target.gpu is not None
    assert (target.count, target.per_host, target.memory, target.gpu.name) == (8, 4, 24 * GIB, "mine")
    assert "minor: 9" in target_config(target.gpu, target.memory)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("memory_gib: 24\n", ""), "missing memory_gib;"),
        (("cores: 100\nclock_ghz: 2.0\n", ""), "missing cores, clock_ghz;"),
        (("cores: 100", "core: 100"), "unknown field core; did you mean cores"),
        (("cores: 100", "cores: many"), "cores must be a whole number above 0, not many"),
        (("cores: 100", "cores: 2.5"), "cores must be a whole number above 0, not 2.5"),
        (("memory_gib: 24", "memory_gib: .inf"), "memory_gib must be a number above 0, not inf"),
        (("memory_gib: 24", "memory_gib: true"), "memory_gib must be a number above 0, not true"),
        (("memory_gib: 24", "memory_gib: -1"), "memory_gib must be a number above 0, not -1"),
        (("8.9", "7.0"), "unknown compute_capability 7.0; expected one of 8.0"),
        ((OWN, "[1, 2]"), "expected fields such as"),
        ((OWN, "a: [1"), "cannot be read"),
    ],
)
def test_a_file_with_a_mistake_is_one_line(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(UserError, match=said) as error:
        parse_target(str(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_cpu_targets_are_this_process_s_devices() -> None:
    seen = jax.devices()
    assert target_devices(parse_target("cpu:4"), 0) == seen[:4]
    with pytest.raises(UserError, match="cannot simulate 16 devices"):
        target_devices(parse_target("cpu:16"), 0)


def test_the_local_target() -> None:
    target = local_target(jax.devices()[:2])
    assert (target.count, target.is_cpu, target.is_here) == (2, True, True)
    assert target.memory == target.host_memory == devices.host_memory()["total"] // 2


@pytest.mark.parametrize(("limit", "name"), [(30 * GIB, "a100-40gb"), (60 * GIB, "a100-80gb")])
def test_a_local_gpu_is_found_by_name_and_memory(limit: int, name: str) -> None:
    """jax reports three quarters of the memory by default."""
    one = SimpleNamespace(
        device_kind="NVIDIA A100-SXM4-80GB",
        platform="gpu",
        process_index=0,
        memory_stats=lambda: {"bytes_limit": limit},
    )
    target = local_target([one, one])
    assert target.gpu is GPUS[name]
    assert (target.name, target.memory) == (f"{name}:2", GPUS[name].memory)


def local_gpus(count: int, per_process: int) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(
            device_kind="NVIDIA A100-SXM4-80GB",
            platform="gpu",
            process_index=device // per_process,
            memory_stats=lambda: {"bytes_limit": 75 * GIB},
        )
        for device in range(count)
    ]


def test_processes_of_one_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = local_target(local_gpus(8, 8))
    monkeypatch.setattr(join, "hosts", lambda: ["node1"] * 8)
    shared = local_target(local_gpus(8, 1))
    assert (shared.hosts, shared.per_host, shared.host_memory) == (1, 8, alone.host_memory)
    monkeypatch.setattr(join, "hosts", lambda: ["node1"] * 4 + ["node2"] * 4)
    assert local_target(local_gpus(8, 1)).hosts == 2


def test_each_process_asks_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax: "MemoryStats is only supported for addressable PjRt devices"."""

    def refuse() -> None:
        raise RuntimeError("MemoryStats is only supported for addressable PjRt devices.")

    seen = local_gpus(8, 4)
    for device in seen[:4]:
        device.memory_stats = refuse
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    target = local_target(seen)
    assert target.withheld == target.memory - 75 * GIB


def test_processes_with_different_memory_have_one_target() -> None:
    """Otherwise they would choose other recompute policies, and the collectives of different programs would mix."""
    alone = local_target(local_gpus(8, 8))
    together = local_target(local_gpus(8, 8), lambda value: [value, value * 9 // 10])
    assert usable_memory(alone, Memory()) == 75 * GIB
    assert usable_memory(together, Memory()) == 75 * GIB * 9 // 10
    assert together.host_memory == alone.host_memory * 9 // 10


@pytest.mark.parametrize(("count", "name"), [(4, "a100-80gb:4"), (8, "a100-80gb:8"), (10, "a100-80gb:1x10")])
def test_local_gpus_have_the_name_of_a_target(count: int, name: str) -> None:
    local = local_target(local_gpus(count, count))
    named = parse_target(local.name)
    assert local.name == name
    assert (named.count, named.per_host) == (count, count)


def test_without_the_plan_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cuda_wheels", dict)
    with pytest.raises(
        UserError, match=r"h100-80gb.*requires jax's CUDA plugin; run pip install 'jaxmem\[plan\]', or use cpu:N"
    ):
        target_devices(parse_target("h100-80gb"), GIB)


def test_a_plugin_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = {"jax-cuda13-plugin": jax.__version__, "jax-cuda13-pjrt": "0.1.2"}
    monkeypatch.setattr(devices, "cuda_wheels", lambda: wheels)
    with pytest.raises(UserError, match=f"jax-cuda13-pjrt 0.1.2 and jax {jax.__version__} must have the same version"):
        target_devices(parse_target("h100-80gb"), GIB)


def test_without_an_assembler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "cuda_wheels", lambda: {"jax-cuda13-plugin": jax.__version__})
    monkeypatch.setattr(devices, "package_versions", lambda _: {})
    monkeypatch.setattr(devices.shutil, "which", lambda _: None)
    monkeypatch.setattr(devices, "Path", lambda *_: tmp_path / "nothing")
    with pytest.raises(UserError, match="ptxas, the assembler of GPU programs, is not installed"):
        target_devices(parse_target("h100-80gb"), GIB)


def test_the_list_shows_every_target_whole_in_80_columns() -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(target_table())
    text = console.file.getvalue()
    assert all(name in text for name in GPUS)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.exhaustive
def test_a_model_larger_than_this_cpu_is_planned_for_a_target() -> None:
    with pytest.raises(UserError, match=r"llama3-70b needs .* more than this machine .* --target h100-80gb:8"):
        plan("llama3-70b")


def test_a_file_may_name_a_gpu_that_has_the_other_fields(tmp_path: Path) -> None:
    file = tmp_path / "big-host.yaml"
    file.write_text("like: rtx4090-24gb\nhost_memory_gib: 128\n")
    target = parse_target(f"{file}:2")
    assert target.host_memory == 128 * GIB
    assert target.memory == GPUS["rtx4090-24gb"].memory
    file.write_text("like: rtx4090\n")
    with pytest.raises(UserError, match=r"like=rtx4090 is unknown; did you mean rtx4090-24gb\?"):
        parse_target(str(file))
