"""The command line: what it prints where, its exit codes, and that it fits a narrow terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmem.cli import main
from jaxmem.errors import UserError


def jaxmem(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of one command, in this process."""
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "error: No such command 'trian'. Did you mean 'train'?\n"),
        (["train"], "error: Missing argument 'CONFIG'.\n"),
        (["train", "x.yaml", "--simulat", "8"], "error: No such option: --simulat (Possible options: --simulate)\n"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert jaxmem(*arguments, capsys=capsys) == (2, "", said)


def test_a_missing_config_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = jaxmem("train", str(tmp_path / "no.yaml"), "--simulate", "8", capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "no.yaml" in err
    assert err.count("\n") == 1


def test_no_command_is_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = jaxmem(capsys=capsys)
    assert (code, err) == (0, "")
    for command in ("train", "plan", "generate", "evaluate", "tokenize", "bench", "doctor", "schema"):
        assert f"\n  {command} " in out


def test_json_is_all_that_stands_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = jaxmem("doctor", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["packages"]["jax"]


def test_what_a_library_prints_does_not_spoil_the_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxmem.doctor.examine", lambda: print("by the way") or {"fine": True})
    assert jaxmem("doctor", "--json", capsys=capsys) == (0, '{\n  "fine": true\n}\n', "by the way\n")


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = jaxmem("schema", capsys=capsys)
    assert (code, err) == (0, "")
    assert {"name", "model", "mesh", "train"} <= set(json.loads(out)["properties"])


def test_a_user_error_of_the_library_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> dict:
        raise UserError("mesh.fsdp is 3; 8 devices allow 1, 2, 4, 8")

    monkeypatch.setattr("jaxmem.doctor.examine", refuse)
    assert jaxmem("doctor", capsys=capsys) == (2, "", "error: mesh.fsdp is 3; 8 devices allow 1, 2, 4, 8\n")


def test_an_interrupt_is_quiet_and_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxmem.doctor.examine", interrupt)
    assert jaxmem("doctor", capsys=capsys) == (130, "", "")


def test_help_fits_a_narrow_terminal_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from jaxmem.cli import app; app(['plan', '--help'], standalone_mode=False);"
        "assert not {'jax', 'numpy', 'rich'} & set(sys.modules)"
    )
    environment = os.environ | {"COLUMNS": "40"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert max(map(len, done.stdout.splitlines())) <= 40
    assert "--simulate" in done.stdout
