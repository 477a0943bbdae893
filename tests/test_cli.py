"""The command line: what it prints where, its exit codes, and that it fits a narrow terminal."""

import contextlib
import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxmem.cli import main, planning, training
from jaxmem.cli.start import load, print_text
from jaxmem.config import load_config
from jaxmem.data.loader import Loader
from jaxmem.errors import TemporaryError, UserError
from jaxmem.machine import devices
from jaxmem.machine.terminal import filtered_stderr
from jaxmem.planning.result import plan
from jaxmem.search.knobs import DEFAULT_ALLOW
from jaxmem.training.memory_check import DoesNotFitError

ROOT = Path(__file__).parents[1]


def jaxmem(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of one command, in this process."""
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a very small decoder on a text of its own, trained by the command; its config lies beside it."""
    place = tmp_path_factory.mktemp("cli")
    (place / "texts").mkdir()
    for number in range(40):
        (place / "texts" / f"{number}.txt").write_text(
            f"text {number} says that {number} and {number} are the same\n" * 5
        )
    (place / "small.yaml").write_text(
        f"""
        name: small
        output: {place}
        model: {{family: decoder, vocab: 257, layers: 2, embed: 16, mlp: 32, heads: 2, kv_heads: 2, head_dim: 8}}
        data: {{source: text, path: {place}/texts, sequence_length: 32, held_out: 0.2}}
        mesh: {{fsdp: -1}}
        train: {{steps: 4, log_every: 2, evaluate_every: 4}}
        """
    )
    with pytest.raises(SystemExit) as exit_:
        main(["train", str(place / "small.yaml"), "optimizer.learning_rate=1e-2", "--simulate", "8"])
    assert exit_.value.code == 0
    return place / "small"


def test_train_leaves_a_run_that_can_be_run_again(run: Path) -> None:
    again = load_config(run / "config.yaml")
    assert again.optimizer.learning_rate == 1e-2
    assert again.mesh.fsdp == 8
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()][:2] == [2, 4]
    moved = load(run.rename(run.with_name("moved")), ["train.steps=6"], 8)
    run.with_name("moved").rename(run)
    assert (moved.name, moved.output, moved.train.steps) == ("moved", os.path.relpath(run.parent), 6)
    with pytest.raises(UserError, match="contains no config"):
        load(run.parent, None, 8)


def test_a_renamed_run_does_not_begin_again_without_its_checkpoints_elsewhere(tmp_path: Path) -> None:
    run = tmp_path / "after"
    run.mkdir()
    settings = {"name": "before", "model": {"preset": "tiny"}, "train": {"steps": 1}, "checkpoint": {"path": "kept"}}
    (run / "config.yaml").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"after was renamed from before, .* in kept; name it before again"):
        load(run, None, 8)
    assert load(run, ["name=other"], 8).name == "other"


def test_a_finished_run_names_the_settings_that_it_ignores(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "report.html").stat()
    changes = ("optimizer.learning_rate=0.5", "train.steps=3")
    code, out, _ = jaxmem("train", str(run), *changes, "--simulate", "8", capsys=capsys)
    assert code == 0
    assert "optimizer.learning_rate was 0.01, is 0.5" in out
    assert "train.steps was 4, is 3" in out
    assert out.count("\n") == 1
    assert (run / "report.html").stat() == before


@pytest.mark.exhaustive
def test_a_report_that_fails_does_not_change_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jaxmem.report.report_run", fail)
    training._write_report(tmp_path)
    assert "warning: the run is saved, but its report is not written: " in capsys.readouterr().err


def test_report(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train` ends with the very page that the command makes."""
    page = tmp_path / "again.html"
    assert jaxmem("report", str(run), "--html", str(page), capsys=capsys) == (0, f"{page}\n", "")
    assert page.read_text() == (run / "report.html").read_text()


@pytest.mark.exhaustive
def test_generate_continues_the_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", str(run), "--prompt", "text 4", "--tokens", "5", "--temperature", "0")
    code, out, err = jaxmem(*arguments, capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith("text 4")
    assert jaxmem(*arguments, capsys=capsys) == (0, out, "")


@pytest.mark.exhaustive
def test_evaluate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = jaxmem("evaluate", str(run), "--json", capsys=capsys)
    assert (code, err) == (0, "")
    loss = json.loads(out)["loss"]
    assert 0 < loss < 6
    _, out, _ = jaxmem("evaluate", str(run), capsys=capsys)
    assert f"loss {loss:.4g}" in out


@pytest.mark.exhaustive
def test_json_has_null_for_a_loss_that_is_not_finite(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxmem.inference.evaluate.evaluate", lambda *_: {"loss": float("nan"), "perplexity": 2.0})
    _, out, _ = jaxmem("evaluate", str(run), "--json", capsys=capsys)
    assert json.loads(out) == {"loss": None, "perplexity": 2.0}


def test_evaluate_on_the_whole_of_one_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one file.txt"
    file.write_text("text 4 and nothing else")
    code, out, err = jaxmem("evaluate", str(run), "--data", str(file), "--json", capsys=capsys)
    assert (code, err) == (0, "")
    assert json.loads(out)["loss"] > 0


def test_a_run_that_does_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it could be an id of the hub, which is not asked."""
    monkeypatch.chdir(tmp_path)
    for command in (["generate", "--prompt", "x"], ["evaluate"], ["chat"], ["export"]):
        for name in ("none", "runs/none"):
            target = ["exported"] if command == ["export"] else []
            code, out, err = jaxmem(*command, name, *target, capsys=capsys)
            assert (code, out) == (2, "")
            assert err.startswith(f"error: {name} does not exist; use the directory of a run")
    (tmp_path / "empty").mkdir()
    assert "empty is neither a run" in jaxmem("evaluate", "empty", capsys=capsys)[2]


def test_plan(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, figure = tmp_path / "plan.html", tmp_path / "plan.png"
    drawn = ("--html", str(page), "--png", str(figure))
    code, out, err = jaxmem("plan", str(run / "config.yaml"), "--simulate", "8", "--json", *drawn, capsys=capsys)
    assert (code, err.count("compiling")) == (0, 1)
    assert "Memory over a step" in page.read_text()
    assert figure.stat().st_size > 10_000
    planned = json.loads(out)
    assert planned["target"]["devices"] == 8
    assert planned == json.loads((run / "plan.json").read_text()) | {"seconds": planned["seconds"]}


@pytest.mark.exhaustive
def test_a_plan_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a preset, without a config."""
    written = tmp_path / "run.yaml"
    options = ("--method", "qlora", "--sequence-length", "64", "--write", str(written), "--simulate", "8", "--json")
    code, out, err = jaxmem("plan", "tiny", "memory.budget=1e-5", *options, capsys=capsys)
    assert code == 3
    assert json.loads(out)["fits"] is False
    given = ["--sequence-length", "64", "memory.budget=1e-5", "--method", "qlora", "--target", "cpu:8"]
    assert f"jaxmem fit tiny {' '.join(given)}\n" in err
    assert f"wrote {written}" in err
    assert f"jaxmem train {written}" not in err, "it does not fit"
    assert "trackers" not in written.read_text(), "only what differs from the defaults"
    cfg = load_config(written)
    assert (cfg.adapter.kind, cfg.data.sequence_length, cfg.batch.global_size) == ("qlora", 64, 8)


def test_the_first_plan_for_gpus_names_what_other_scripts_need(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = SimpleNamespace(as_json=dict, fits=True, target=SimpleNamespace(gpu="h100-80gb"))
    monkeypatch.setattr("jaxmem.planning.result.plan", lambda *_, **__: planned)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ("plan", str(run / "config.yaml"), "--target", "h100-80gb:8", "--json")
    notes = [jaxmem(*command, capsys=capsys)[2].count("JAX_PLATFORMS=cpu") for _ in range(2)]
    assert notes == [1, 0]


def test_a_run_that_does_not_fit_names_the_command_of_the_search(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise DoesNotFitError("it does not fit; `jaxmem fit CONFIG` searches for settings that fit")

    monkeypatch.setattr("jaxmem.training.run.run", refuse)
    code, _, err = jaxmem("train", str(run), "memory.remat=full", "--simulate", "8", capsys=capsys)
    assert code == 3
    assert f"`jaxmem fit {run / 'config.yaml'} memory.remat=full --target cpu:8`" in err


def test_a_plan_writes_the_config_before_it_prints(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is complete even if the output is closed early, as by `| head`."""
    written = tmp_path / "written.yaml"
    order = []
    planned = SimpleNamespace(as_json=dict, fits=True, target=SimpleNamespace(gpu=None))
    monkeypatch.setattr("jaxmem.planning.result.plan", lambda *_, **__: planned)
    monkeypatch.setattr("jaxmem.cli.planning.show", lambda _: order.append(written.exists()))
    assert jaxmem("plan", str(run / "config.yaml"), "--write", str(written), "--json", capsys=capsys)[0] == 0
    assert order == [True]


def test_plan_for_a_target(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    planned = SimpleNamespace(as_json=dict, fits=True, target=SimpleNamespace(gpu=None))
    monkeypatch.setattr("jaxmem.planning.result.plan", lambda _, target, **__: asked.append(target) or planned)
    for arguments in ([], ["--target", "h100-80gb:8"]):
        assert jaxmem("plan", str(run / "config.yaml"), *arguments, "--json", capsys=capsys)[:2] == (0, "{}\n")
    assert asked == [None, "h100-80gb:8"]


def test_a_preset_of_a_similar_name_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory of a Hugging Face model that does not exist could be a typing error."""
    monkeypatch.chdir(tmp_path)
    planned = SimpleNamespace(as_json=dict, fits=True, target=SimpleNamespace(gpu=None))
    monkeypatch.setattr("jaxmem.planning.result.plan", lambda *_, **__: planned)
    note = "llama-3-8b: no such directory; planning the preset llama3-8b with random weights\n"
    assert jaxmem("plan", "llama-3-8b", "--json", capsys=capsys)[2] == note
    assert jaxmem("plan", "llama3-8b", "--json", capsys=capsys)[2] == ""


def test_tokenize_writes_what_training_reads(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(run / "config.yaml")
    code, out, err = jaxmem("tokenize", config, "--output", str(tmp_path / "cache"), capsys=capsys)
    assert code == 0, err
    assert f"data.source=tokens data.path={tmp_path / 'cache'}" in out
    cfg = load_config(config, ["data.source=tokens", f"data.path={tmp_path / 'cache'}"])
    with Loader(cfg) as cached, Loader(load_config(config)) as direct:
        assert (next(cached)["inputs"] == next(direct)["inputs"]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'? (see jaxmem --help)"),
        (["train"], "Missing argument 'CONFIG' (see jaxmem train --help)"),
        (["fit", "llama3-8b", "--write", "."], "--write . is a directory; use the path of a file"),
        (["plan", "x", "--mesh.fsdp", "4"], "No such option: --mesh.fsdp; write mesh.fsdp=4 (see jaxmem plan --help)"),
        (["plan", "x", "--mesh.fsdp=4"], "No such option: --mesh.fsdp; write mesh.fsdp=4 (see jaxmem plan --help)"),
        (
            ["train", "x", "--max-tokens", "4"],
            "No such option: --max-tokens; --tokens is an option of jaxmem generate or chat (see jaxmem train --help)",
        ),
        (["plan", "x", "--jsn"], "No such option: --jsn (Possible options: --json, --png) (see jaxmem plan --help)"),
        (["plan", "x", "--simulate", "many"], "Invalid value for '--simulate': "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = jaxmem(*arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_a_missing_config_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = jaxmem("train", str(tmp_path / "no.yaml"), "--simulate", "8", capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "no.yaml" in err
    assert err.count("\n") == 1


def test_no_command_is_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = jaxmem(capsys=capsys)
    assert (code, err) == (0, "")
    for command in (
        "train",
        "plan",
        "generate",
        "evaluate",
        "tokenize",
        "launch",
        "report",
        "doctor",
        "schema",
    ):
        assert f"\n  {command} " in out


@pytest.mark.exhaustive
def test_json_is_all_that_stands_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = jaxmem("doctor", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["packages"]["jax"]


def test_what_a_library_prints_does_not_spoil_the_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxmem.machine.doctor.examine", lambda: print("by the way") or {"fine": True})
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

    monkeypatch.setattr("jaxmem.machine.doctor.examine", refuse)
    assert jaxmem("doctor", capsys=capsys) == (2, "", "error: mesh.fsdp is 3; 8 devices allow 1, 2, 4, 8\n")


def test_an_interrupt_is_quiet_and_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxmem.machine.doctor.examine", interrupt)
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


def test_errors_of_the_machine_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raised: list[int] = []

    def fail(*_: object) -> None:
        raise OSError(raised[-1], os.strerror(raised[-1]), "/runs/x")

    monkeypatch.setattr("jaxmem.cli.training.load", fail)
    for number, text in (
        (errno.EROFS, "/runs/x: Read-only file system"),
        (errno.ENOSPC, "/runs/x: No space left on device"),
        (errno.EMFILE, "too many open files: raise the limit with `ulimit -n 4096`"),
    ):
        raised.append(number)
        assert jaxmem("train", "x.yaml", capsys=capsys) == (2, "", f"error: {text}\n")
    raised.append(errno.EBADF)
    with pytest.raises(OSError, match="Bad file"):
        main(["train", "x.yaml"])


def test_an_error_of_the_machine_that_is_explained_keeps_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/x")
        except OSError as error:
            raise TemporaryError("checkpoint 8 could not be written (last complete checkpoint: step 4)") from error

    monkeypatch.setattr("jaxmem.cli.training.load", fail)
    code, _, text = jaxmem("train", "x.yaml", capsys=capsys)
    assert (code, text) == (75, "error: checkpoint 8 could not be written (last complete checkpoint: step 4)\n")
    (tmp_path / "x.yaml").touch()
    _, _, text = jaxmem("report", str(tmp_path / "x.yaml"), capsys=capsys)
    assert "no such run directory; for a config use jaxmem plan CONFIG --html FILE" in text


FEW_FILES = """
import resource, sys
from jaxmem.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
main(["train", sys.argv[1], "--simulate", "1", "name=few"])
"""


@pytest.mark.exhaustive
def test_too_few_file_descriptors(run: Path) -> None:
    command = [sys.executable, "-c", FEW_FILES, str(run.parent / "small.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: too many open files: raise the limit with `ulimit -n 4096`"]


def test_tokens_cannot_control_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_text("a\x1b[31m\tb\n\x9b")
    assert capsys.readouterr().out == "a\\x1b[31m\tb\n\\x9b"


def test_a_gguf_file_is_a_model_not_a_config() -> None:
    with pytest.raises(UserError, match=r"x.gguf is a model, not a config; write a config first"):
        load(Path("x.gguf"), None, None)


def test_the_status_line_moves_while_the_output_of_xla_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    terminal, side = os.openpty()
    before = os.dup(2)
    os.dup2(side, 2)
    try:
        with planning._status() as progress, filtered_stderr(lambda _: b""):
            os.set_blocking(terminal, False)
            progress("compiling small ...")
            shown = b""
            end = time.monotonic() + 5
            while b"compiling small" not in shown and time.monotonic() < end:
                time.sleep(0.05)
                with contextlib.suppress(BlockingIOError):
                    shown += os.read(terminal, 4096)
    finally:
        os.dup2(before, 2)
        for descriptor in (terminal, side, before):
            os.close(descriptor)
    assert b"compiling small" in shown


def test_progress_of_a_plan_is_printed_before_it_compiles() -> None:
    """Not into the log of XLA, which is printed later."""
    places = []
    small = load_config({"name": "x", "model": {"preset": "tiny", "layers": 1}, "train": {"steps": 1}})

    def stop(_: str) -> None:
        places.append(os.fstat(2).st_ino)
        raise UserError("stopped")

    with pytest.raises(UserError, match="stopped"):
        plan(small, "cpu:1", progress=stop)
    assert places == [os.fstat(2).st_ino]


def test_the_default_batch_counts_the_gpus_that_jax_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nvidia_gpus", lambda: [{"memory": 80 << 30}] * 8)
    monkeypatch.setattr(planning, "take_devices", lambda *_, **__: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    options = {"method": "qlora", "sequence_length": None, "batch": None}
    one = planning._config("llama3-8b", [], None, None, **options).batch.global_size
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert planning._config("llama3-8b", [], None, None, **options).batch.global_size == 8 * one


def test_help_names_words_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = jaxmem("fit", "--help", capsys=capsys)
    words = re.search(r"separated by\W+commas:\s+([a-z,]+)", re.sub(r"[│|\s]+", " ", out))
    assert words is not None
    assert {*words[1].strip(",").split(",")} <= {*DEFAULT_ALLOW}


@pytest.mark.parametrize("option", [["--allow", "remat"], ["--compiles", "3"]])
def test_a_comparison_of_methods_has_no_options_of_one_method(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = jaxmem("fit", "tiny", "--target", "cpu:2", *option, capsys=capsys)
    assert code == 2
    assert f"{' '.join(option)} supports a single method only" in err


def test_a_search_for_the_largest_value_has_no_limit_of_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("fit", "tiny", "--target", "cpu:2", "--maximize", "model.layers", "--compiles", "3")
    code, _, err = jaxmem(*arguments, capsys=capsys)
    assert code == 2
    assert "--compiles 3 has no effect with --maximize; remove --compiles" in err
