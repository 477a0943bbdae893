"""A kernel is checked before a run uses it; one that is wrong on purpose is replaced by the next choice, in a line."""

import importlib
from types import SimpleNamespace

import jax
import pytest

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from jaxmem.kernels import grouped_matmul, quantized_update, triton_launch
from jaxmem.kernels.fused_attention import cudnn
from jaxmem.kernels.support import Request
from jaxmem.step import kernel_check
from jaxmem.step.kernel_check import checked_kernels, kernel_failure
from tests.kernels.test_cudnn import emulated

OPTIMIZER = {"optimizer": {"name": "adamw8bit"}, "train": {"steps": 1}}
CALL = Request("bfloat16", 4096, 4096, 32, 16, has_segments=True, max_segments=32)


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.exhaustive
def test_a_right_kernel_passes_once(monkeypatch):
    monkeypatch.setattr(cudnn, "ON_CPU", emulated)
    assert kernel_failure("memory.attention", "cudnn", CALL) is None
    monkeypatch.setattr(kernel_check, "_difference_from_plain", lambda *_: pytest.fail("it was remembered"))
    assert kernel_failure("memory.attention", "cudnn", CALL) is None


def test_a_kernel_that_passed_is_checked_again_with_other_versions(monkeypatch):
    versions = {}
    monkeypatch.setattr(kernel_check, "package_versions", lambda names: {name: versions.get(name) for name in names})
    monkeypatch.setattr(kernel_check, "_difference_from_plain", lambda *_: None)
    assert kernel_failure("memory.attention", "cudnn", CALL) is None
    monkeypatch.setattr(kernel_check, "_difference_from_plain", lambda *_: "wrong")
    assert kernel_failure("memory.attention", "cudnn", CALL) is None
    for package in ("jax-triton", "triton", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc"):
        versions.clear()
        versions[package] = "9"
        assert kernel_failure("memory.attention", "cudnn", CALL) == "wrong"


def test_the_expected_results_are_of_full_precision(monkeypatch):
    """GPUs round operands in float32 to TF32 by default; the kernel is checked with the precision of a run."""
    precisions = {}

    def results(_, implementation):
        precisions[implementation] = jax.config.jax_default_matmul_precision
        return {}

    monkeypatch.setitem(kernel_check._CHECKS, "memory.experts", ("blockwise", results))
    assert kernel_failure("memory.experts", "triton", "dense float32") is None
    assert precisions == {"blockwise": "highest", "triton": None}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("output", "name"), [(0, "output"), (1, "dk")])
def test_a_wrong_kernel_is_found(output, name, monkeypatch):
    def wrong(target, call, arrays):
        found = emulated(target, call, arrays)
        if target.endswith("Backward") == (name != "output"):
            found[output] = found[output] * 1.1
        return found

    monkeypatch.setattr(cudnn, "ON_CPU", wrong)
    for _ in range(2):  # nothing that failed is remembered
        assert (kernel_failure("memory.attention", "cudnn", CALL) or "").startswith(
            f"its {name} differs from plain JAX's by"
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("setting", "kind", "module", "function", "output"),
    [
        ("memory.experts", "dense bfloat16", grouped_matmul.__name__ + ".triton", "_of_inputs", "gradient of tokens"),
        ("memory.experts", "mxfp4 float32", grouped_matmul.__name__ + ".triton", "_of_inputs", "gradient of tokens"),
        ("optimizer.kernel", "adamw8bit", quantized_update.__name__ + ".triton", "adam8", "update"),
        ("optimizer.kernel", "int8 weights", quantized_update.__name__ + ".triton", "int8_add", "codes"),
    ],
)
def test_own_kernels_pass_and_wrong_ones_are_found(setting, kind, module, function, output, monkeypatch):
    module = importlib.import_module(module)
    monkeypatch.setattr(kernel_check, "ROWS", 256)
    monkeypatch.setattr(kernel_check, "COLUMNS", 256)
    monkeypatch.setattr(kernel_check, "LENGTH", 64)
    assert kernel_failure(setting, "triton", kind) is None
    right = getattr(module, function)

    def wrong(*args):
        made = right(*args)
        return made * 1.1 if function.startswith(("of_", "_of_")) else (made[0] + made[0], *made[1:])

    monkeypatch.setattr(module, function, wrong)
    # The space makes it another call: passing is remembered per call.
    assert (kernel_failure(setting, "triton", kind + " ") or "").startswith(f"its {output} differs from plain JAX's by")


@pytest.mark.exhaustive
def test_a_kernel_that_raises_has_failed(monkeypatch):
    def broken(*_):
        raise RuntimeError("no engine\nand a page of reasons")

    monkeypatch.setattr(cudnn, "ON_CPU", broken)
    monkeypatch.setattr(kernel_check, "cudnn_remedy", lambda: None)
    assert kernel_failure("memory.attention", "cudnn", CALL) == "RuntimeError: no engine"
    monkeypatch.setattr(kernel_check, "cudnn_remedy", lambda: "nvidia-cudnn-cu13 is missing")
    assert kernel_failure("memory.attention", "cudnn", CALL) == "nvidia-cudnn-cu13 is missing"


def config(attention="auto"):
    raw = {"name": "x", "model": {"preset": "llama3-8b"}, **OPTIMIZER, "memory": {"attention": attention}}
    return for_devices(load_config(raw), 1)


def checked(cfg, **options):
    """`checked_kernels` on a Hopper GPU."""
    return checked_kernels(cfg, "gpu", 90, **options)


def test_a_wrong_kernel_is_replaced_by_the_next(monkeypatch):
    wrong = {
        ("memory.attention", "cudnn"): "it is off by 1",
        ("memory.attention", "triton"): "it does not compile",
        ("optimizer.kernel", "triton"): "it is off by 2",
    }
    monkeypatch.setattr(kernel_check, "kernel_failure", lambda key, name, _: wrong.get((key, name)))
    settings, lines = checked(config())
    for line, ((key, name), why) in zip(lines, wrong.items(), strict=True):
        assert line == f"warning: {key}={name} failed its check and is not used: {why}"
    assert settings == {"memory.attention": "blockwise", "optimizer.kernel": "none"}


def test_kernels_that_pass_leave_the_config_as_it_is(monkeypatch):
    monkeypatch.setattr(kernel_check, "kernel_failure", lambda *_: None)
    assert checked(config()) == ({}, [])


def test_a_cpu_refuses_kernels_of_gpus(monkeypatch):
    kernels = SimpleNamespace(
        memory=SimpleNamespace(attention="auto", experts="auto"),
        optimizer=SimpleNamespace(kernel="triton"),
    )
    monkeypatch.setattr(triton_launch, "INTERPRETER", None)
    with pytest.raises(UserError, match=r"optimizer.kernel=triton .*use optimizer.kernel=auto"):
        kernel_check.refuse_gpu_kernels(kernels, "cpu")


def test_a_failure_in_another_process_counts(monkeypatch):
    answers = iter([True, False, False])
    monkeypatch.setattr(kernel_check, "kernel_failure", lambda *_: None)
    _, (line,) = checked(config(), agree=lambda _: next(answers))
    assert "another process" in line


def test_a_kernel_that_is_named_is_not_replaced(monkeypatch):
    monkeypatch.setattr(kernel_check, "kernel_failure", lambda *_: "it is off")
    with pytest.raises(UserError, match=r"memory\.attention=cudnn failed its check .*: it is off; use .*=auto"):
        checked(config("cudnn"))
