"""What `python scripts/bench/kernels.py` prints."""

import pytest

from scripts.bench import kernels


def test_rows_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"device": "cpu", "driver": None, "time": "now", "dry_run": True}
    timed = {"rate": 1.5, "spread": [1.25, 1.75], "unit": "TFLOP/s", "by_host": False, "ratios": {"jax.nn cudnn": 1.04}}
    rows: list[dict[str, object]] = [
        {"contestant": "triton", "pass": "forward", "check": "float16", "right": True, "error": 0.4},
        {"contestant": "cudnn", "pass": "forward", "check": "float16", "right": False, "error": None},
        {"contestant": "triton", "pass": "forward", **timed},
        {"contestant": "cudnn", "pass": "backward", "why_not": "compute capability is 8.0"},
    ]
    rows = [{"operation": "attention", "shape": "long", **row} for row in rows]
    selections = []
    monkeypatch.setattr(kernels, "bench_kernels", lambda selection, **_: selections.append(selection) or [here, *rows])
    kernels.main(["long", "--only", "cudnn", "--only", "triton forward"])
    assert selections == [kernels.BenchSelection(("long",), only=("cudnn", "triton forward"))]
    out = capsys.readouterr().out
    assert out.startswith("cpu, now: a dry run on small shapes")
    assert "triton         forward  right, float16, error 0.4 steps" in out
    assert "cudnn          forward  WRONG, float16, error infinite" in out
    assert "1.500 (1.250 to 1.750) TFLOP/s  1.04 x jax.nn cudnn" in out
    assert "not: compute capability is 8.0" in out


def test_unknown_names_end_the_program() -> None:
    with pytest.raises(SystemExit, match=r"error: unknown operation atention.*attention"):
        kernels.main(["--operation", "atention"])
