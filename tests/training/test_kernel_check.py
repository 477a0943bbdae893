"""A kernel is checked before a run uses it; one that is wrong on purpose is replaced by the next choice, in a line."""

from types import SimpleNamespace

import pytest

from jaxmem.errors import UserError
from jaxmem.kernels import choice, triton_launch
from jaxmem.kernels.fused_attention import cudnn
from jaxmem.kernels.fused_attention.support import Request, choose
from jaxmem.training import kernel_check
from jaxmem.training.kernel_check import checked_attention, failure
from tests.kernels.test_cudnn import emulated

CALL = Request("bfloat16", 4096, 4096, 32, 16, has_segments=True, max_segments=32)


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "FAILURES", {})


def test_a_right_kernel_passes_once(monkeypatch):
    monkeypatch.setattr(cudnn, "ON_CPU", emulated)
    assert failure("cudnn", CALL) is None
    monkeypatch.setattr(kernel_check, "_difference", lambda *_: pytest.fail("it was remembered"))
    assert failure("cudnn", CALL) is None


@pytest.mark.parametrize(("output", "name"), [(0, "output"), (1, "dk")])
def test_a_wrong_kernel_is_found(output, name, monkeypatch):
    def wrong(target, call, arrays):
        found = emulated(target, call, arrays)
        if target.endswith("Backward") == (name != "output"):
            found[output] = found[output] * 1.1
        return found

    monkeypatch.setattr(cudnn, "ON_CPU", wrong)
    for _ in range(2):  # nothing that failed is remembered
        assert (failure("cudnn", CALL) or "").startswith(f"its {name} differs from plain JAX's by")


def test_a_kernel_that_raises_has_failed(monkeypatch):
    def broken(*_):
        raise RuntimeError("no engine\nand a page of reasons")

    monkeypatch.setattr(cudnn, "ON_CPU", broken)
    assert failure("cudnn", CALL) == "RuntimeError: no engine"


def built(attention="auto"):
    """A program on a Hopper GPU, as far as the check looks at it."""
    named = SimpleNamespace(memory=SimpleNamespace(attention=attention))
    chosen = choose(CALL, 90, "H100")
    model = SimpleNamespace(attention=chosen, attention_request=CALL)
    return SimpleNamespace(platform="gpu", cfg=named, model=model)


def test_a_wrong_kernel_is_replaced_by_the_next(monkeypatch):
    wrong = {"cudnn": "it is off by 1", "mosaic": "it does not compile"}
    monkeypatch.setattr(kernel_check, "failure", lambda name, _: wrong.get(name))
    lines = list(checked_attention(built))
    assert [("cudnn" in line, "mosaic" in line) for line in lines] == [(True, False), (False, True)]
    assert all(line.startswith("warning: ") for line in lines)
    assert built().model.attention.implementation == "triton"
    assert "it is off by 1" in built().model.attention.why


def test_a_cpu_refuses_kernels_of_gpus(monkeypatch):
    kernels = SimpleNamespace(
        memory=SimpleNamespace(attention="auto"),
        optimizer=SimpleNamespace(kernel="triton"),
        adapter=SimpleNamespace(matmul="auto"),
    )
    monkeypatch.setattr(triton_launch, "INTERPRETER", None)
    with pytest.raises(UserError, match=r"optimizer.kernel=triton .*use optimizer.kernel=none"):
        kernel_check.refuse_gpu_kernels(kernels)


def test_a_failure_in_another_process_counts(monkeypatch):
    answers = iter([True, False])
    monkeypatch.setattr(kernel_check, "failure", lambda *_: None)
    (line,) = checked_attention(built, agree=lambda _: next(answers))
    assert "another process" in line


def test_a_kernel_that_is_named_is_not_replaced(monkeypatch):
    monkeypatch.setattr(kernel_check, "failure", lambda *_: "it is off")
    with pytest.raises(UserError, match=r"memory\.attention=cudnn failed its check .*: it is off; use auto"):
        list(checked_attention(lambda: built("cudnn")))
