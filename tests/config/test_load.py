"""A file, its overrides and its short forms become one config; what cannot be read is refused in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.config import Convnet, Decoder, load_config, save_config, save_settings
from jaxmem.config.hugging_face import config_json
from jaxmem.errors import UserError
from jaxmem.typing import JsonDict

TINY = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 10}}
PICTURES = {"name": "x", "model": {"family": "convnet"}, "train": {"steps": 10}, "data": {"source": "digits"}}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def hf_directory(tmp_path: Path) -> str:
    """Of a model of two layers, without weights."""
    settings = config_json(load_config({**TINY, "model": {"preset": "tiny", "layers": 2}}).model)
    directory = tmp_path / "hf"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(settings))
    return str(directory)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "a.yaml", "name: x\nmodel: {preset: tiny, layers: 2}\ntrain: {steps: 10}\n")


def refused(source, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        load_config(source, overrides)
    return str(error.value)


def test_importing_the_config_imports_no_jax():
    code = "import sys, jaxmem.config; sys.exit(any(m.split('.')[0] in ('jax', 'flax', 'numpy') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------ values and overrides


def test_fields_beside_a_preset_override_it(file):
    model = load_config(file).model
    assert isinstance(model, Decoder)
    assert (model.preset, model.layers, model.embed, model.family) == ("tiny", 2, 128, "decoder")


def test_a_section_beside_a_preset_is_merged_into_the_presets():
    rope = load_config({**TINY, "model": {"preset": "llama3.2-1b"}}, ["model.rope.factor=8"]).model.rope
    assert (rope.factor, rope.scaling, rope.theta) == (8.0, "llama3", 500_000.0)


@pytest.mark.parametrize(
    ("optimizer", "new", "complete", "low_rank"),
    [("adamw", 3e-4, 1e-5, 2e-4), ("lion", 1e-4, 3e-6, 7e-5), ("adafactor", 1e-2, 3e-4, 7e-3)],
)
def test_the_default_learning_rate_is_that_of_the_optimizer_and_of_the_task(
    optimizer: str, new: float, complete: float, low_rank: float, hf_directory: str
) -> None:
    def rate(**sections: object) -> float:
        return load_config({**TINY, "optimizer": {"name": optimizer}, **sections}).optimizer.learning_rate

    assert rate() == new
    assert rate(model={"hf": hf_directory}) == complete
    assert rate(model={"hf": hf_directory}, adapter={"kind": "lora"}) == low_rank
    assert rate(model={"hf": hf_directory}, optimizer={"name": optimizer, "learning_rate": 0.5}) == 0.5


def test_a_learning_rate_that_is_a_default_elsewhere_is_saved(hf_directory: str, tmp_path: Path) -> None:
    cfg = load_config({**TINY, "model": {"hf": hf_directory}, "optimizer": {"learning_rate": 3e-4}})
    save_settings(cfg, tmp_path / "settings.yaml")
    assert load_config(tmp_path / "settings.yaml").optimizer.learning_rate == 3e-4


def test_another_optimizer_for_a_saved_config_has_its_own_hyperparameters(tmp_path: Path) -> None:
    optimizer = {"name": "apollo", "learning_rate": 0.5, "beta1": 0.8}
    save_config(load_config({**TINY, "optimizer": optimizer}), tmp_path / "a.yaml")
    other = load_config(tmp_path / "a.yaml", ["optimizer.name=apollo_mini", "optimizer.beta2=0.7"]).optimizer
    assert (other.scale, other.beta1, other.beta2, other.learning_rate) == (128.0, 0.9, 0.7, 0.5)
    assert load_config(tmp_path / "a.yaml", [' optimizer.name ="lion"']).optimizer.epsilon is None
    same = load_config(tmp_path / "a.yaml", ["optimizer.name=apollo"]).optimizer
    assert (same.scale, same.beta1) == (1.0, 0.8)


def test_overrides_make_sections_and_the_last_one_wins(file):
    cfg = load_config(file, ["mesh.fsdp=2", "mesh.fsdp=4", "data={sequence_length: 64}", "optimizer.clip=null"])
    assert (cfg.mesh.fsdp, cfg.data.sequence_length, cfg.optimizer.clip) == (4, 64, None)


def test_overrides_leave_what_was_given_alone():
    given_before = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 10}}
    load_config(given_before, ["train.steps=5", "mesh.fsdp=2"])
    assert given_before == TINY


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("3E+2", 300.0), ("1.5e-4", 1.5e-4), (".5", 0.5), ("2.", 2.0), ("1", 1.0), ("1_0.5", 10.5)],
)
def test_numbers(text, value):
    assert load_config(TINY, [f"optimizer.learning_rate={text}"]).optimizer.learning_rate == value


def test_whole_numbers_may_have_underscores():
    cfg = load_config(TINY, ["train={tokens: 1_000_000}"])
    assert cfg.train.tokens == 1_000_000
    assert cfg.steps == 123  # 8 x 1024 tokens an update, rounded up


@pytest.mark.parametrize("text", ["no", "on", "2024-01-01", "1:30", "010", "1.2.3", "0x1f", "e5"])
def test_text_that_yaml_1_1_takes_for_something_else(text):
    assert load_config(TINY, [f"data.tokenizer={text}"]).data.tokenizer == text


@pytest.mark.parametrize("path", ["runs/🚀", "runs/\udcff", "C:\\x"])
def test_text_in_json_is_the_same_text(path):
    """JSON escapes a character beyond 16 bits as two, and a byte of a path that is not UTF-8 as one."""
    assert load_config(TINY, [f"output={json.dumps(path)}"]).output == path


@pytest.mark.parametrize("override", ["objective=classify", "objective={name: classify}", "objective.name=classify"])
def test_objective_short_form(override):
    cfg = load_config(PICTURES, [override, "objective.label_smoothing=0.1"])
    assert (cfg.objective.name, cfg.objective.label_smoothing) == ("classify", 0.1)


def test_a_short_form_in_the_file_takes_settings_on_top():
    cfg = load_config({**PICTURES, "objective": "classify"}, ["objective.z_loss=1e-4"])
    assert (cfg.objective.name, cfg.objective.z_loss) == ("classify", 1e-4)


@pytest.mark.parametrize("override", ["mesh.fsdp", "=3", "mesh.=3", ".fsdp=3", "mesh..fsdp=3"])
def test_malformed_overrides(override):
    assert refused(TINY, override).startswith(f"{override} must be KEY=VALUE")


def test_an_override_below_a_value():
    assert refused(TINY, "train.steps.fast=1").startswith("train.steps.fast cannot be set: train.steps=10 is a value")


# ------------------------------------------------------------------ files


def test_missing_file_names_the_nearest(file):
    assert refused(file.with_name("aa.yaml")) == f"{file.with_name('aa.yaml')}: no such file; did you mean {file}?"
    nowhere = file.parent / "none" / "a.yaml"
    assert refused(nowhere).startswith(f"{nowhere}: the directory {nowhere.parent} does not exist")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", " is empty; write `key: value` lines"),
        ("- 1\n", " contains [1]; write `key: value` lines"),
        ("a: 1\nb: 2\na: 3\n", ":3:1: a is set twice"),
        ("mesh: {fsdp: 1, fsdp: 2}", ":1:17: fsdp is set twice"),
        ("1: 2\n", ":1:1: a key must be text"),
        ("? [a]\n: 2\n", ":1:3: a key must be text"),
        ("a: &x 1\nb: *x\n", ":1:4: anchors and aliases are not supported"),
        ("a: !!python/object:os.system {}\n", ":1:4: tag tag:yaml.org,2002:python/object:os.system is not supported"),
        ("a: !!int x\n", ":1:4: tag tag:yaml.org,2002:int is not supported"),
        ("a: " + "[" * 10_000, ":1:19: nested deeper than 16"),
        ("a: 1\n\tb: 2\n", ":2:1: found character '\\t' that cannot start any token"),
        ("a: \x00\n", ": unacceptable character #x0000: special characters are not allowed"),
        ("a: 1\n---\nb: 1\n", ":2:1: but found another document"),
        ("a: " + "9" * 5000, ": Exceeds the limit (4300 digits)"),
        ("a: " + "x" * 300_000, ": larger than 256 KiB"),
    ],
)
def test_unreadable_files(tmp_path, text, expected):
    path = write(tmp_path / "bad.yaml", text)
    message = refused(path)
    assert message.startswith(f"{path}{expected}")
    assert "\n" not in message


def test_not_a_file_and_not_text(tmp_path):
    assert "cannot be read" in refused(tmp_path)
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"name: \xff\xfe")
    assert refused(path).startswith(f"{path}: cannot be read")


# ------------------------------------------------------------------ saving


@pytest.mark.parametrize(
    ("source", "overrides"),
    [
        (TINY, ["mesh.fsdp=-1", "optimizer.learning_rate=1e-5", "optimizer.clip=null", "train.profile=[2, 3]"]),
        (PICTURES, ["objective=classify", "objective.label_smoothing=0.1", "model.stages=[8, 16]"]),
        (TINY, ["data.mixture=[{source: stdlib, weight: 0.25}, {source: text, path: '*.txt'}]"]),
    ],
)
def test_a_saved_config_is_the_same_config(tmp_path, source, overrides):
    cfg = load_config(source, overrides)
    save_config(cfg, tmp_path / "run" / "config.yaml")
    again = load_config(tmp_path / "run" / "config.yaml")
    assert again == cfg
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["config.yaml"]


def test_a_saved_config_says_everything(tmp_path):
    save_config(load_config(PICTURES, ["objective=classify"]), tmp_path / "c.yaml")
    saved = yaml.safe_load((tmp_path / "c.yaml").read_text())
    assert saved["model"].keys() == Convnet.model_fields.keys()
    assert saved["objective"]["temperature"] == 0.1


@pytest.mark.exhaustive
@settings(max_examples=60)
@given(
    text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(["1e-3", "no", "null", "~", "1_0", ".inf", "-.5e3", "0o7", "=", "<<"])
)
def test_any_text_survives_saving(tmp_path_factory, text):
    cfg = load_config({**TINY, "data": {"tokenizer": text}})
    path = tmp_path_factory.mktemp("text") / "c.yaml"
    save_config(cfg, path)
    assert load_config(path).data.tokenizer == text


@pytest.mark.exhaustive
@settings(max_examples=60)
@given(rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_any_number_survives_saving(tmp_path_factory, rate):
    cfg = load_config({**TINY, "optimizer": {"learning_rate": rate}})
    path = tmp_path_factory.mktemp("number") / "c.yaml"
    save_config(cfg, path)
    assert load_config(path).optimizer.learning_rate == rate


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = write(tmp_path / "c.yaml", "old")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        save_config(load_config(TINY), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


FORMS = [  # every field that is a list, a mapping or a section of its own
    "adapter={kind: lora, targets: {'*.mlp.*': 2, '*.q': 5}}",
    "adapter={kind: lora, targets: ['*.q']}",
    "data.mixture=[{source: stdlib}, {source: text, path: a}]",
    "memory.remat={save: [mlp_hidden]}",
    "memory={remat: full, offload: [activations, optimizer]}",
    "optimizer.trainable=['head.*']",
    "rules.mlp=[tensor, fsdp]",
    "train={steps: 5, profile: [1, 2], trackers: [tensorboard]}",
]


@pytest.mark.parametrize("override", FORMS)
def test_a_config_is_hashable_in_every_form(override, tmp_path):
    cfg = load_config(TINY, [override])
    save_config(cfg, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    assert again == cfg
    assert hash(again) == hash(cfg)
    assert {cfg: 1}[again] == 1


def test_configs_whose_patterns_have_another_order_differ():
    """The first pattern that matches applies."""
    ranks = ["'*.q': 2, '*': 5", "'*': 5, '*.q': 2"]
    first, second = (load_config(TINY, [f"adapter={{kind: lora, targets: {{{text}}}}}"]) for text in ranks)
    assert first != second
    assert first.adapter.targets != second.adapter.targets
    assert not first.adapter.targets == second.adapter.targets  # noqa: SIM201


def test_importing_sections_loads_nothing_that_reads_or_checks_them():
    code = (
        "import sys, jaxmem.config.sections; print(*sorted(m for m in sys.modules if m.startswith('jaxmem.config.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.removeprefix("jaxmem.config.") for name in done.stdout.split()}
    assert loaded == {
        "adapter",
        "base",
        "mesh",
        "names",
        "networks",
        "optimizers",
        "user",
        "recompute",
        "sections",
    }


def test_another_preset_replaces_the_model_of_a_saved_config(file, tmp_path):
    """A saved config has all fields, and those of the other preset would have no effect."""
    save_config(load_config(file), tmp_path / "saved.yaml")
    for source in (tmp_path / "saved.yaml", load_config(file).model_dump(mode="json")):
        assert load_config(source, ["train.steps=5"]).model.layers == 2
        assert load_config(source, ["model.preset=tiny"]).model.layers == 2  # the same preset
        cfg = load_config(source, ["model.preset=llama3-8b", "model.vocab=512"])
        assert cfg.model == load_config({**TINY, "model": {"preset": "llama3-8b", "vocab": 512}}).model
    assert load_config(file, ["model.preset=llama3-8b"]).model.layers == 2  # set by the file, for any preset


def test_another_directory_replaces_the_model_and_its_tokenizer(tmp_path):
    for name, layers in (("a", 2), ("b", 3)):
        shape = {"vocab": 512, "layers": layers, "embed": 64, "mlp": 128, "heads": 4, "kv_heads": 2, "head_dim": 16}
        (tmp_path / name).mkdir()
        write(tmp_path / name / "config.json", json.dumps(config_json(Decoder.model_validate(shape))))
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    for tokenizer, expected in ((first, second), ("bytes", "bytes")):
        raw = {"name": "x", "model": {"hf": first}, "data": {"tokenizer": tokenizer}, "train": {"steps": 10}}
        save_config(load_config(raw), tmp_path / "saved.yaml")
        cfg = load_config(tmp_path / "saved.yaml", [f"model.hf={second}"])
        assert (cfg.model.hf, cfg.model.layers, cfg.data.tokenizer) == (second, 3, expected)
        assert load_config(tmp_path / "saved.yaml", ["model.hf=null"]).model.layers == 2


@pytest.mark.parametrize(
    ("settings", "balance_loss"),
    [
        ({}, 0.0),
        ({"router_aux_loss_coef": 0.02}, 0.0),
        ({"output_router_logits": True}, 0.001),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.02}, 0.02),
    ],
)
def test_the_loss_of_routers_is_that_of_transformers(settings: JsonDict, balance_loss: float, tmp_path: Path) -> None:
    shape = {"preset": "tiny", "experts": {"count": 4, "top_k": 2, "renormalize": True}}
    written = config_json(load_config({**TINY, "model": shape}).model)
    (tmp_path / "config.json").write_text(json.dumps({**written, **settings}))
    model = load_config({**TINY, "model": {"hf": str(tmp_path)}}).model
    assert isinstance(model, Decoder)
    assert model.experts is not None
    assert model.experts.balance_loss == balance_loss
