"""The lines before the first step and after the last."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import optax
import pytest

from jaxmem.config import load_config
from jaxmem.config.base import setting
from jaxmem.config.networks import FAMILIES, Mlp
from jaxmem.config.optimizers import OPTIMIZERS, AdamWSettings, Entry
from jaxmem.config.user import UserObjects
from jaxmem.errors import UserError
from jaxmem.inference.export import _check_adapters, export_model
from jaxmem.training.lines import data_line, last_line
from jaxmem.training.run import run

MODEL = {"vocab": 257, "layers": 2, "embed": 16, "mlp": 32, "heads": 2, "kv_heads": 2, "head_dim": 8}


def config(**sections: Any) -> Any:
    return load_config({"name": "a", "model": MODEL, "train": {"steps": 500}, **sections})


@pytest.mark.parametrize("kind", ["none", "lora", "qlora", "prompt"])
def test_the_commands_after_a_run_work(kind: str) -> None:
    """Each export command has the option that a run with such adapters needs."""
    cfg = config(adapter={} if kind == "none" else {"kind": kind}, data={"packing": kind != "prompt"})
    exports = [line for line in last_line(cfg, 500, Path("runs/a")).splitlines() if "export" in line]
    assert exports
    for line in exports:
        _check_adapters("runs/a", cfg.adapter.kind, cfg.model.family, "--adapter" in line, "--merge" in line)


@pytest.mark.parametrize(
    ("target", "dtype", "said"),
    [("a.gguf", None, "not a.gguf; use a directory"), ("a", "float16", "does not support --dtype float16")],
)
def test_an_adapter_is_exported_as_it_is_stored(
    target: str, dtype: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxmem.inference.export.model_config", lambda *_: config(adapter={"kind": "lora"}))
    with pytest.raises(UserError, match=said):
        export_model("runs/a", target, dtype, adapter=True)


def test_no_command_is_proposed_for_what_only_a_script_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Perceptron(Mlp):
        family: Literal["perceptron"] = setting("perceptron", "kind of network")  # type: ignore[assignment]

    monkeypatch.setitem(FAMILIES, "perceptron", Perceptron)
    monkeypatch.setitem(OPTIMIZERS, "mine", Entry(AdamWSettings, optax.scale_by_adam, ""))
    of_family = load_config(
        {
            "name": "a",
            "model": {"family": "perceptron"},
            "objective": "classify",
            "data": {"source": "digits"},
            "train": {"steps": 500},
        }
    )
    for cfg in (of_family, config(optimizer={"name": "mine"}), config().with_user(UserObjects(loss=lambda *_: 0))):
        assert last_line(cfg, 500, Path("runs/a")) == "done: 500 steps, saved in runs/a"
        assert "jaxmem" not in last_line(cfg, 5, Path("runs/a"))
    assert "jaxmem train runs/a" in last_line(config(), 5, Path("runs/a"))


def test_chat_is_proposed_for_a_run_with_a_template() -> None:
    pairs = {"source": "preference", "path": "pairs.jsonl"}
    chats = {"source": "chat", "path": "chats.jsonl"}
    template = {"chat_template": "chat.jinja"}
    for data, objective, is_chat in (
        ({**pairs, "packing": False}, "dpo", False),
        ({**pairs, "packing": False, **template}, "dpo", True),
        ({"mixture": [chats, {"source": "stdlib"}], **template}, "next_token", True),
    ):
        line = last_line(config(data=data, objective=objective), 500, Path("runs/a"))
        assert ("jaxmem chat runs/a" in line) == is_chat


def test_the_end_of_the_data_is_the_end_of_a_run() -> None:
    ended = last_line(config(data={"epochs": 2}), 7, Path("runs/a"), data_ended=True)
    assert ended.startswith("done: the data ended after step 7 of 500 (data.epochs=2), saved in runs/a; next:\n")
    assert "jaxmem generate runs/a" in ended


def test_the_step_of_the_best_checkpoint_is_named() -> None:
    line = last_line(config(), 500, Path("runs/a"), best=200)
    assert line.startswith("done: 500 steps, saved in runs/a; lowest held-out loss: step 200 (checkpoint.step=best); n")


def test_training_has_no_checkpoint_to_choose() -> None:
    with pytest.raises(
        UserError, match=r"train does not support checkpoint.step=best, which is for evaluate, generate"
    ):
        run(config(checkpoint={"step": "best"}))


def test_the_same_command_would_not_continue_a_run_that_never_resumes() -> None:
    line = last_line(config(checkpoint={"resume": "never"}), 5, Path("runs/a"))
    assert "run the same command again with checkpoint.resume=auto, or jaxmem train runs/a" in line


def test_how_often_a_run_reads_its_data() -> None:
    def line(tokens: float, documents: int, batch: int = 16, **data: Any) -> str:
        fields = {"noun": "conversations", "documents_per_record": 1, "__len__": lambda _: documents}
        cfg = config(data={"sequence_length": 2048, "held_out": 0.0, **data}, batch={"global_size": batch})
        corpus: Any = SimpleNamespace(sources=[type("Source", (), fields)()])
        return data_line(cfg.data, batch, cfg.steps, corpus, tokens) or ""

    many = line(30, 400)
    assert "400 conversations of about 30 tokens" in many
    assert "620 passes" in many, "31 of 400 in each of 16 x 500 rows"
    assert "data.sequence_length=930" in many
    assert "data.documents_per_row=68" in many
    assert "train.steps=4" in many
    assert "warning" not in line(1500, 100_000)
    assert "about 1.0 passes" in line(500, 100_000, 200, packing=False)
    assert "about 1.0 passes" in line(20_000, 100_000, 200, packing=False), "only the beginning of each is read"
    assert "about 2.0 passes" in line(30, 400, epochs=2)
    assert "ends after about 2 of 500 updates, before the learning rate has decreased; use train.steps=2" in line(
        30, 400, epochs=2
    )
    assert "decreased" not in line(30, 400, epochs=1000)
