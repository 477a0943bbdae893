"""A whole run: what it leaves, and that it can be killed, stopped, resumed, and moved to other devices."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.checkpoint.record import read_record
from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.inference.evaluate import Evaluator
from jaxmem.inference.load import open_run
from jaxmem.planning.result import plan_program
from jaxmem.step.programs import Program
from jaxmem.training.memory_check import DoesNotFitError
from jaxmem.training.run import run
from jaxmem.training.telemetry import Profile

MODEL = {"preset": "tiny", "layers": 2, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 4, "head_dim": 8}
EVERYWHERE = {"fsdp": 4, "tensor": 2}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Some documents, made here."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        words = (f"{(number * 7 + i * i) % 101} bottles" for i in range(60 + 5 * number))
        (folder / f"{number}.txt").write_text("\n".join(words))
    return folder


@pytest.fixture
def config(text, tmp_path):
    def make(**sections):
        base = {
            "name": "run",
            "output": str(tmp_path),
            "model": MODEL,
            "data": {"source": "text", "path": str(text), "sequence_length": 32, "held_out": 0.1},
            "batch": {"global_size": 8},
            "mesh": EVERYWHERE,
            "optimizer": {"schedule": "constant", "learning_rate": 1e-3},
            "train": {"steps": 12, "log_every": 1},
            "checkpoint": {"every": 4},
        }
        merged = {
            name: {**part, **sections.get(name, {})} if isinstance(part, dict) else part for name, part in base.items()
        }
        return load_config({**sections, **merged, **{k: v for k, v in sections.items() if not isinstance(v, dict)}})

    return make


def metrics(directory):
    """The logged rows, without what the clock says."""
    rows = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def leaves(state):
    return [bytes(jax.device_get(x)) for x in jax.tree.leaves(state)]


# ------------------------------------------------------------------ what a run leaves


@pytest.mark.exhaustive
def test_a_run_leaves_what_it_promises(config, capsys):
    cfg = config(train={"evaluate_every": 6, "evaluate_batches": 2})
    result = run(cfg)
    directory = result.directory
    left = {p.name for p in directory.iterdir()}
    assert left == {"checkpoints", "config.yaml", "memory.json", "metrics.jsonl", "plan.json"}
    rows = [row for row in metrics(directory) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["loss"] == result.metrics["loss"] < rows[0]["loss"]
    assert rows[-1]["tokens"] == 12 * 8 * 32
    unseen = {row["step"]: row["held_out_loss"] for row in metrics(directory) if "held_out_loss" in row}
    assert set(unseen) == {6, 12}
    assert unseen[12] == result.held_out["loss"] < unseen[6]
    plan = json.loads((directory / "plan.json").read_text())
    assert plan["bytes_per_device"]["total"] == result.plan.bytes_per_device["total"] > 0
    assert load_config(directory / "config.yaml") == cfg
    assert result.exit_code == 0
    told = capsys.readouterr().out
    assert "step 12/12" in told
    assert "held-out loss" in told
    held_out = {name: value for name, value in result.held_out.items() if name != "count"}
    assert run(cfg).held_out == held_out, "the run has finished"


@pytest.mark.exhaustive
def test_a_finished_run_is_left_alone(config, capsys, monkeypatch):
    """It ends at once, without compiling the step; a damaged last checkpoint is made again."""
    first = run(config())
    before = metrics(first.directory)
    with monkeypatch.context() as patch:
        patch.setattr("jaxmem.planning.result.plan_program", None)
        again = run(config())
    assert "12 steps are done" in capsys.readouterr().out
    assert again.step == 12
    assert leaves(again.state) == leaves(first.state)
    assert metrics(first.directory) == before
    assert again.metrics.items() >= first.metrics.items()
    shutil.rmtree(first.directory / "checkpoints/12/state")
    (first.directory / "checkpoints/50").mkdir()  # no checkpoint, beyond the last step
    repaired = run(config())
    assert repaired.step == 12
    assert leaves(repaired.state) == leaves(first.state)
    assert metrics(first.directory) == before


@pytest.mark.exhaustive
def test_a_profile_of_the_steps_asked_for(config):
    result = run(config(train={"steps": 4, "profile": [2, 3]}))
    assert list((result.directory / "profile").rglob("*.xplane.pb"))


def test_each_process_has_a_profile(tmp_path, monkeypatch):
    """JAX names the files by the host, which processes may share."""
    places = []
    monkeypatch.setattr(jax.profiler, "start_trace", places.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with Profile(tmp_path, (1, 2)) as profile:
            profile.before(1)
    assert len(set(places)) == 2


@pytest.mark.exhaustive
def test_the_best_checkpoint_is_kept(config):
    assess = {"evaluate_every": 2, "evaluate_batches": 2}
    keep = {"every": None, "keep": 1, "keep_best": True}
    run(config(train={"steps": 4, **assess}, checkpoint=keep))
    # From here on it can only get worse.
    result = run(config(optimizer={"learning_rate": 3.0}, train={"steps": 8, **assess}, checkpoint=keep))
    losses = {row["step"]: row["held_out_loss"] for row in metrics(result.directory) if "held_out_loss" in row}
    best = min(losses, key=losses.get)
    assert best != 8
    with Checkpoints(result.directory / "checkpoints", read_only=True) as checkpoints:
        assert set(checkpoints.steps()) == {best, 8}


@pytest.mark.exhaustive
def test_the_data_may_end_first(config, capsys, monkeypatch):
    few = {"epochs": 1, "held_out": 0.78}  # a fifth of the text to train on
    train = {"steps": 10_000, "log_every": 100, "evaluate_every": 5_000, "evaluate_batches": 2}
    cfg = config(data=few, train=train, checkpoint={"every": None, "resume": "never"})
    result = run(cfg)
    assert 0 < result.step < 10_000
    assert f"done: the data ended after step {result.step} of 10000 (data.epochs=1)" in capsys.readouterr().out
    assert result.held_out["loss"] > 0
    with Checkpoints(result.directory / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest() == result.step
    before = metrics(result.directory)
    assert max(row["step"] for row in before if "loss" in row) == result.step
    saved = load_config(result.directory / "config.yaml")
    assert saved.checkpoint.resume == "auto"
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("jaxmem.planning.result.plan_program", None)
        again = run(saved)
    assert again.step == result.step
    assert again.metrics.items() >= result.metrics.items()
    assert again.held_out["loss"] == result.held_out["loss"]
    assert "; to continue, use data.epochs above 1" in capsys.readouterr().out
    assert metrics(result.directory) == before, "nothing is left to train on, nor to evaluate"
    more = run(saved.replace(data={"epochs": 2}, train={"steps": result.step + 1}))
    assert more.step == result.step + 1


@pytest.mark.exhaustive
def test_data_without_a_target_token_stops_the_run(config, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n" * 20)
    data = {"source": "jsonl", "path": str(broken), "on_invalid": "skip", "epochs": 1, "held_out": 0.0}
    with pytest.raises(UserError, match="no step had a token to train on: of 20 documents read: 20 invalid ones"):
        run(config(data=data))
    assert not [*tmp_path.rglob("metadata")]  # no checkpoint


def test_a_broken_record_is_found_before_compiling(config, tmp_path, monkeypatch):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "good"}\n' * 9 + '{"text": 3}\n' + '{"text": "good"}\n' * 90)
    monkeypatch.setattr("jaxmem.planning.result.plan_program", None)
    with pytest.raises(UserError, match=r"broken\.jsonl, line 10: text must be a string"):
        run(config(data={"source": "jsonl", "path": str(broken)}))


@pytest.mark.exhaustive
def test_a_run_that_stopped_at_an_invalid_record_goes_on_without_it(config, tmp_path):
    lines = [json.dumps({"text": f"{i * i} bottles"}) for i in range(100)]
    lines[60] = "broken"
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    data = {"source": "jsonl", "path": str(tmp_path / "texts.jsonl"), "shuffle": False, "packing": False, "held_out": 0}
    with pytest.raises(UserError, match=r"texts\.jsonl, line 61: invalid JSON.*use data\.on_invalid=skip"):
        run(config(data=data))
    skipping = data | {"on_invalid": "skip"}
    resumed = metrics(run(config(data=skipping)).directory)
    expected = metrics(run(config(data=skipping, name="skipping")).directory)
    assert [(row["step"], row["loss"]) for row in resumed] == [(row["step"], row["loss"]) for row in expected]
    assert len(resumed) == 12


# ------------------------------------------------------------------ stopping and going on


def at_batch(monkeypatch, number, action):
    """Acts when the batch of this number, counted from now, is placed on the devices."""
    place, seen = Program.place, itertools.count(1)

    def placed(self, batch):
        if next(seen) == number:
            action()
        return place(self, batch)

    monkeypatch.setattr(Program, "place", placed)


def test_an_interrupted_run_resumes_bitwise(config, monkeypatch):
    """In the middle, between two checkpoints; step 3 is logged, and step 4 is saved. A process is killed in
    test_processes.py."""
    sparse = {"train": {"log_every": 3}}

    def fail():
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        at_batch(patch, 7, fail)
        with pytest.raises(RuntimeError, match="power cut"):
            run(config(**sparse))
    whole, resumed = run(config(name="whole", **sparse)), run(config(**sparse))
    assert leaves(resumed.state) == leaves(whole.state)
    assert metrics(resumed.directory) == metrics(whole.directory)


def test_the_time_of_evaluations_is_no_training_time(config, monkeypatch):
    evaluate = Evaluator.__call__
    cfg = config(train={"steps": 6, "log_every": 2, "evaluate_every": 3})
    logged_before = []

    def slow(self, *args):
        logged_before.append([row["step"] for row in metrics(Path(cfg.output, cfg.name))])
        time.sleep(0.5)
        return evaluate(self, *args)

    monkeypatch.setattr(Evaluator, "__call__", slow)
    done = run(cfg)
    assert logged_before == [[2], [2, 3, 4, 6]], "of step 3 the evaluation; a step is read before an evaluation begins"
    lines = (done.directory / "metrics.jsonl").read_text().splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines) if "tokens_per_second" in row}
    working = 2 * 8 * 32 / rows[4]["tokens_per_second"]
    assert rows[4]["seconds"] - rows[2]["seconds"] - working > 0.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("evaluate_every", [1, 100_000])
def test_sigterm_saves_and_ends_the_run(config, monkeypatch, capfd, evaluate_every):
    """It is saved before an evaluation, and an evaluation that is not due is left out."""
    at_batch(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    cfg = config(train={"steps": 100_000, "evaluate_every": evaluate_every}, checkpoint={"every": None})
    folder = Path(cfg.output, "run", "checkpoints")
    saved = []
    monkeypatch.setattr(
        Evaluator, "__call__", lambda *_: saved.append([path.name for path in folder.iterdir()]) or {"loss": 1.0}
    )
    result = run(cfg)
    assert saved == ([[]] * (result.step - 1) + [[str(result.step)]] if evaluate_every == 1 else [])
    assert result.exit_code == 0
    said = "".join(capfd.readouterr())
    assert "SIGTERM: finishing this step and saving" in said
    assert "run the same command again" in said
    assert 0 < result.step < 10
    with Checkpoints(result.directory / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest() == result.step
    saved_metrics = read_record(checkpoints.directory / str(result.step))["metrics"]
    assert saved_metrics == ({"loss": 1.0} if evaluate_every == 1 else {})


@pytest.mark.exhaustive
def test_other_meshes_resume_to_rounding(config):
    """8 devices, then 4 in another order, then 1: the losses of a run that never moved."""
    steady = run(config(name="steady", optimizer={"epsilon": 1e-3}, train={"steps": 9}))
    moves = [(3, EVERYWHERE, 8), (6, {"fsdp": 2, "tensor": 2}, 4), (9, {"fsdp": 1, "tensor": 1}, 1)]
    for steps, mesh, devices in moves:
        moved = run(config(optimizer={"epsilon": 1e-3}, train={"steps": steps}, mesh=mesh), jax.devices()[:devices])
    for one, other in zip(metrics(moved.directory), metrics(steady.directory), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.exhaustive
def test_changes_that_would_void_the_checkpoint_are_refused(config):
    directory = run(config(train={"steps": 2})).directory
    before = sorted(directory.rglob("*"))
    with pytest.raises(UserError, match=r"optimizer.name was adamw, is adam") as refused:
        run(config(optimizer={"name": "adam"}))
    assert "model" not in str(refused.value)
    with pytest.raises(UserError, match=r"model.layers was 2, is 3"):
        run(config(model={"layers": 3}))
    assert sorted(p for p in directory.rglob("*")) == before
    assert run(config(train={"steps": 3}, optimizer={"learning_rate": 1e-4}, memory={"remat": "full"})).step == 3


@pytest.mark.exhaustive
def test_other_data_is_refused(config, text, tmp_path):
    run(config(train={"steps": 1}))
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in text.iterdir():
        (changed / file.name).write_text(file.read_text() + "!")
    with pytest.raises(UserError, match="data files or the tokenizer have changed"):
        run(config(train={"steps": 2}, data={"path": str(changed)}))


@pytest.mark.exhaustive
def test_checkpoints_in_a_place_of_their_own(config, tmp_path):
    """What a bucket would be: another root, under which the run has its name."""
    elsewhere = {"checkpoint": {"path": str(tmp_path / "kept")}}
    directory = run(config(train={"steps": 2}, **elsewhere)).directory
    assert sorted(p.name for p in directory.iterdir()) == ["config.yaml", "memory.json", "metrics.jsonl", "plan.json"]
    again = run(config(train={"steps": 3}, **elsewhere))
    assert [row["step"] for row in metrics(directory)] == [1, 2, 3]
    built, params = open_run(directory)
    assert built.cfg.checkpoint.path == str(tmp_path / "kept")
    assert leaves(params) == leaves(again.state.params)
    run(config(train={"steps": 1}, checkpoint={"path": str(tmp_path / "kept"), "resume": "never"}))
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["run", "run.old-1"]


def test_a_bucket_whose_library_is_not_installed(config, tmp_path, monkeypatch):
    for library in ("gcsfs", "s3fs", "tensorflow", "fsspec"):
        monkeypatch.setitem(sys.modules, library, None)
    for bucket, library in (("gs://bucket/runs", "gcsfs"), ("s3://bucket/runs", "s3fs")):
        with pytest.raises(
            UserError, match=f"checkpoint.path={bucket} requires the package {library}; run pip install {library}"
        ):
            run(config(checkpoint={"path": bucket}))
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_never_resuming_puts_the_old_run_aside(config):
    first = run(config(train={"steps": 2}))
    again = run(config(train={"steps": 3}, checkpoint={"resume": "never"}))
    assert [row["step"] for row in metrics(again.directory)] == [1, 2, 3]
    aside = first.directory.with_name("run.old-1")
    assert [row["step"] for row in metrics(aside)] == [1, 2]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("first", "again", "resumes"),
    [
        ({"JAXMEM_LAUNCH": "a"}, {"JAXMEM_LAUNCH": "a"}, True),
        ({"JAXMEM_LAUNCH": "a"}, {"JAXMEM_LAUNCH": "b"}, False),
        ({"JAXMEM_JOB": "a"}, {"JAXMEM_JOB": "a"}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7"}, False),  # two commands of one allocation
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}, False),
    ],
)
def test_a_job_that_is_started_again_resumes_from_its_own_checkpoints(config, monkeypatch, first, again, resumes):
    for name in ("JAXMEM_LAUNCH", "JAXMEM_JOB", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for steps, variables in ((2, first), (3, again)):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        directory = run(config(train={"steps": steps}, checkpoint={"resume": "never"})).directory
    assert directory.with_name("run.old-1").exists() != resumes
    assert [row["step"] for row in metrics(directory)] == [1, 2, 3]


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.exhaustive
def test_a_non_finite_loss_stops_the_run(config):
    with pytest.raises(UserError, match=r"at step \d+, gradient norm nan; first non-finite: .* layer 1; lower"):
        run(config(optimizer={"learning_rate": 1e30, "clip": None}))


def test_processes_with_another_config_are_refused(config, monkeypatch):
    """Paths may differ between hosts."""
    there = {"seed": 1, "output": "/scratch"}
    monkeypatch.setattr("jaxmem.training.run.gather_objects", lambda mine: [mine, {**mine, **there}])
    with pytest.raises(
        UserError, match=r"^the config of process 1 differs from that of process 0: seed is 1, not 0; start all"
    ):
        run(config())


def test_processes_choose_by_the_least_memory_of_all(config, monkeypatch):
    def refuse(_, target):
        raise UserError(f"{target.memory} bytes")

    monkeypatch.setattr("jaxmem.planning.budget.resolve_remat", refuse)
    monkeypatch.setattr("jaxmem.training.run.gather_objects", lambda mine: [mine, 7 if isinstance(mine, int) else mine])
    with pytest.raises(UserError, match=r"^7 bytes"):
        run(config())


def test_nothing_is_written_when_it_cannot_run(config, tmp_path):
    with pytest.raises(UserError, match="mesh"):
        run(config(mesh={"fsdp": 3}))
    with pytest.raises(UserError, match="nowhere"):
        run(config(data={"path": str(tmp_path / "nowhere")}))
    assert not os.path.exists(tmp_path / "run")  # noqa: PTH110


def test_a_start_that_fails_leaves_no_directory(config, tmp_path, monkeypatch):
    """After the directory was made, too."""

    def fail(_):
        raise UserError("no weights")

    monkeypatch.setattr("jaxmem.inference.load.initial_state", fail)
    with pytest.raises(UserError, match="no weights"):
        run(config(train={"steps": 1}))
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()  # was there before
    (tmp_path / "run/notes").write_text("mine")
    with pytest.raises(UserError, match="no weights"):
        run(config(train={"steps": 1}))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes"]


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_allocated(config, tmp_path, monkeypatch):
    def cramped(*built):
        planned = plan_program(*built)
        return dataclasses.replace(planned, target=dataclasses.replace(planned.target, memory=100_000))

    monkeypatch.setattr("jaxmem.planning.result.plan_program", cramped)
    with pytest.raises(
        DoesNotFitError,
        match=r"phase step needs .* KiB per device, 97.7 KiB are available; .* is activations",
    ):
        run(config())
    assert DoesNotFitError.exit_code == 3
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_state_that_its_update_has_made_infinite_is_not_saved(config):
    """The loss and the gradients of the step are finite; the next loss would not be."""
    optimizer = {"name": "lion", "learning_rate": 3e38, "weight_decay": 100.0}
    cfg = config(optimizer=optimizer, checkpoint={"every": 1}, mesh={"fsdp": 1, "tensor": 1})
    with pytest.raises(UserError, match=r"the update of step 1 made \S+ infinite or NaN; lower optimizer"):
        run(cfg, jax.devices()[:1])
    with Checkpoints(Path(cfg.output, cfg.name, "checkpoints"), read_only=True) as checkpoints:
        assert checkpoints.steps() == []
