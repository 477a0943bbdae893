"""Loads a YAML file (or a TOML file) or a dict as a checked `Config`, and saves it as YAML.

Only a safe part of YAML is supported: no tags, anchors, aliases or repeated keys, at most 256 KiB. Numbers and booleans
are read as in YAML 1.2, so that `1e-3` is a number and `no` is text.
"""

import os
import re
import tomllib
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from jaxmem.config.adapter import LOW_RANK, Adapter
from jaxmem.config.check import check
from jaxmem.config.explain import explain
from jaxmem.config.hub import is_tokenizer_of, local_directory
from jaxmem.config.networks import Decoder
from jaxmem.config.optimizers import HYPERPARAMETERS, OPTIMIZERS, Optimizer
from jaxmem.config.presets import PRESETS, preset_of, refuse_preset
from jaxmem.config.sections import Config
from jaxmem.config.user import UserObjects
from jaxmem.errors import UserError, as_yaml, nearest
from jaxmem.machine.files import write_file
from jaxmem.typing import JsonDict, JsonView

MAX_BYTES = 256 * 1024  # of the text of a config
MAX_DEPTH = 16  # nested YAML collections
COMPLETE_SHARE = 1 / 30  # of the learning rate of a new model, for all weights of a trained model
LOW_RANK_SHARE = 2 / 3  # of the learning rate of a new model, for low-rank adapters of a trained model
LINE_BREAKS = "\n\r\x85\u2028\u2029"

SCALARS = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "tag:yaml.org,2002:int": (r"[-+]?(?:0|[1-9][0-9_]*)", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan",
        list("-+.0123456789"),
    ),
}


def _error(problem: str, place: Any) -> yaml.MarkedYAMLError:
    """An error at an event or a node."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=place.start_mark)


class YamlLoader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012, filled below
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if event.anchor is not None:
            raise _error("anchors and aliases are not supported; write the value out", event)
        if getattr(event, "tag", None) is not None:
            raise _error(f"tag {event.tag} is not supported; remove it", event)
        if self.depth == MAX_DEPTH:
            raise _error(f"nested deeper than {MAX_DEPTH}", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """As in JSON, the escapes of a surrogate pair are one character. PyYAML reads two."""
        value: str = super().construct_scalar(node)
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(self.construct_object(key, deep=True), str):
                raise _error("a key must be text; put it in quotes", key)
            if key.value in seen:
                raise _error(f"{key.value} is set twice; remove one", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class YamlDumper(yaml.SafeDumper):
    """Quotes text that `YamlLoader` would read as another type."""

    yaml_implicit_resolvers = {}  # noqa: RUF012, filled below

    def choose_scalar_style(self) -> str:
        """Text with line breaks is written with escapes in double quotes, since other styles change it."""
        event: Any = self.event
        return '"' if set(event.value) & set(LINE_BREAKS) else super().choose_scalar_style()


for _tag, (_pattern, _first) in SCALARS.items():
    for _class in (YamlLoader, YamlDumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first)


ConfigSource = str | os.PathLike[str] | JsonView  # a file, or the settings


def load_config(source: ConfigSource, overrides: Iterable[str] = (), *, is_run: bool = False) -> Config:
    """The config of a file or dict with `key=value` overrides. Checks that need the number of devices run later.
    `is_run`: the file is that of a run, whose model stays if `model.hf` names the new place of its directory."""
    return config_of(read_config(source, overrides, is_run=is_run))


def read_config(source: ConfigSource, overrides: Iterable[str] = (), *, is_run: bool = False) -> JsonDict:
    """The settings of a file or dict with `key=value` overrides, unchecked. `is_run`: as in `load_config`."""
    raw = _copy(source) if isinstance(source, Mapping) else _read(Path(source))
    overrides = [*overrides]
    if changed := _changed_model(raw, overrides):
        _remove_tokenizer(raw)
        if "preset" in changed or not is_run:
            del raw["model"]
    _forget_hyperparameters(raw, overrides)
    for override in overrides:
        _override(raw, override)
    return raw


def config_of(raw: JsonDict, user: UserObjects | None = None) -> Config:
    """The checked config of these settings, whose short forms are expanded in place. `user`: what a script passed."""
    _expand(raw)
    try:
        cfg = Config.model_validate(raw)
    except ValidationError as error:
        raise UserError(explain(error, raw)) from None
    return check(cfg if user is None else cfg.with_user(user))


def save_config(cfg: Config, path: str | os.PathLike[str]) -> None:
    """Writes all fields, so that the file keeps its meaning when defaults change. The write is atomic."""
    _save(cfg.model_dump(mode="json"), Path(path))


def save_settings(cfg: Config, path: str | os.PathLike[str]) -> None:
    """Writes the fields that differ from the defaults, and from those of the model's preset or directory."""
    raw = cfg.model_dump(mode="json", exclude_defaults=True)
    model = cfg.model.model_dump(mode="json")
    optimizer = cfg.optimizer.model_dump(mode="json")
    usual = Optimizer(name=cfg.optimizer.name).model_dump(mode="json")
    named = {key: model[key] for key in ("family", "preset", "hf") if model.get(key) not in (None, "decoder")}
    changed = {key: optimizer[key] for key in usual if optimizer[key] != usual[key]}
    raw["optimizer"] = {"name": usual["name"], "learning_rate": optimizer["learning_rate"]} | changed
    raw["model"] = named | raw["model"]
    if {"preset", "hf"} & named.keys():
        implied = config_of({"name": "implied", "model": dict(named), "train": {"steps": 1}})
        known = implied.model.model_dump(mode="json")
        raw["model"] = named | {key: model[key] for key in known if model[key] != known[key]}
        raw.setdefault("data", {})["tokenizer"] = cfg.data.tokenizer
        if cfg.data.tokenizer == implied.data.tokenizer:
            del raw["data"]["tokenizer"]
    if cfg.adapter.hf:
        raw["adapter"] = cfg.adapter.model_dump(mode="json")
    _save(raw, Path(path))


def _save(raw: JsonDict, path: Path) -> None:
    write_file(path, yaml.dump(raw, None, YamlDumper, sort_keys=False, allow_unicode=True))


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _check_size(text: str, origin: str) -> None:
    if len(text) > MAX_BYTES:
        raise UserError(f"{origin}: larger than {MAX_BYTES // 1024} KiB, the limit for a config; use a YAML file")


def _parse_toml(text: str, origin: str) -> JsonDict:
    """The settings of a TOML file, such as one of torchtitan, whose keys are then explained like those of YAML."""
    _check_size(text, origin)
    try:
        raw = tomllib.loads(text)
    except ValueError as error:  # also a number of thousands of digits
        raise UserError(f"{origin}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UserError(f"{origin}: nested deeper than {MAX_DEPTH}") from None
    level: list[Any] = [raw]
    for _ in range(MAX_DEPTH + 1):
        sections = [value for value in level if isinstance(value, dict | list)]
        level = [item for value in sections for item in (value.values() if isinstance(value, dict) else value)]
    if level:
        raise UserError(f"{origin}: nested deeper than {MAX_DEPTH}")
    return raw


def _parse(text: str, origin: str, *, is_file: bool = True) -> Any:
    _check_size(text, origin)
    try:
        return yaml.load(text, YamlLoader)  # noqa: S506, a SafeLoader made stricter
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = str(error.problem).replace("'<stream end>'", "the end of the text")
        if mark is None:
            raise UserError(f"{origin}: {error}") from None
        place = f"{origin}:{mark.line + 1}:{mark.column + 1}" if is_file else f"{origin} (column {mark.column + 1})"
        raise UserError(f"{place}: {problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # characters that YAML forbids; a number of thousands of digits
        raise UserError(f"{origin}: {str(error).splitlines()[0]}") from None


def _read(path: Path) -> JsonDict:
    if not path.exists():
        if not path.parent.is_dir():
            raise UserError(f"{path}: the directory {path.parent} does not exist; check the path")
        others = [str(file) for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml")]
        hint = nearest(path, others) if others else "; use a YAML file such as configs/demo.yaml"
        raise UserError(f"{path}: no such file{hint}")
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {reason}") from None
    raw = _parse_toml(text, str(path)) if path.suffix == ".toml" else _parse(text, str(path))
    if not isinstance(raw, dict):
        given = "is empty" if raw is None else f"contains {as_yaml(raw)[:60]}"
        raise UserError(f"{path} {given}; write `key: value` lines, see configs/demo.yaml")
    return raw


def _override(raw: JsonDict, text: str) -> None:
    """Sets the value of `a.b=value`; `objective: classify` becomes a section for `objective.z_loss=...`."""
    key, equals, value = text.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not all([*sections, last]):
        raise UserError(f"{as_yaml(text)} must be KEY=VALUE, such as mesh.fsdp=8")
    here = raw
    for depth, part in enumerate(sections, start=1):
        inner = here.get(part)
        if inner is None:
            inner = {}
        elif part == "objective" and here is raw and isinstance(inner, str):
            inner = {"name": inner}
        elif not isinstance(inner, dict):
            given = f"{'.'.join(sections[:depth])}={as_yaml(inner)}"
            raise UserError(f"{key} cannot be set: {given} is a value, not a section; check the key")
        here[part] = inner
        here = inner
    here[last] = _parse(value, text.strip(), is_file=False)


def _changed_model(raw: JsonDict, overrides: Iterable[str]) -> set[str]:
    """The keys `hf` and `preset` of a saved config, which has all fields, that overrides set to another model."""
    model = raw.get("model")
    if not isinstance(model, dict) or not set(Decoder.model_fields) <= set(model):
        return set()
    return {field for field in ("hf", "preset") if _value_of(f"model.{field}", overrides) not in (None, model[field])}


def _value_of(key: str, overrides: Iterable[str]) -> Any:
    """The value of a key after these overrides; None if none sets it."""
    values = [value for name, _, value in (text.partition("=") for text in overrides) if name.strip() == key]
    return _parse(values[-1], key, is_file=False) if values else None


def _forget_hyperparameters(raw: JsonDict, overrides: Iterable[str]) -> None:
    """Removes the hyperparameters of a saved config, which has all fields, if overrides name another optimizer: it has
    defaults of its own."""
    optimizer = raw.get("optimizer")
    if not isinstance(optimizer, dict) or not set(Optimizer.model_fields) <= set(optimizer):
        return
    if _value_of("optimizer.name", overrides) not in (None, optimizer["name"]):
        for key in HYPERPARAMETERS:
            del optimizer[key]


def _remove_tokenizer(raw: JsonDict) -> None:
    """Removes the tokenizer of a saved config if it is that of the model's directory."""
    directory = raw["model"]["hf"]
    data = raw.get("data")
    if directory and isinstance(data, dict) and is_tokenizer_of(str(data.get("tokenizer", "")), str(directory)):
        del data["tokenizer"]


def _expand(raw: JsonDict) -> None:
    """Expands short forms. Values of a wrong type stay, for pydantic to report."""
    if isinstance(raw.get("objective"), str):
        raw["objective"] = {"name": raw["objective"]}
    model = raw.get("model")
    if not isinstance(model, dict):
        return
    model.setdefault("family", "decoder")
    preset = model.get("preset")
    if model["family"] == "decoder" and preset is not None:
        known = preset_of(str(preset))
        if known is None:
            refuse_preset(str(preset), f"model.preset={as_yaml(preset)} is unknown")
        raw["model"] = _merge(PRESETS[known], {**model, "preset": known})
    for section in ("model", "adapter"):
        fields = raw.get(section)
        if isinstance(fields, dict) and isinstance(fields.get("hf"), str):
            raw[section] = {**fields, "hf": local_directory(fields["hf"], f"{section}.hf")}
    if model["family"] == "decoder" and isinstance(model.get("hf"), str):
        _expand_hf(raw, model["hf"])
    adapter = raw.get("adapter")
    if isinstance(adapter, dict) and isinstance(adapter.get("hf"), str) and set(Adapter.model_fields) - set(adapter):
        _expand_adapter(raw, adapter["hf"])  # a saved config has all fields


def _expand_hf(raw: JsonDict, name: str) -> None:
    """Adds the shape of the model and its tokenizer from a Hugging Face directory. A saved config has them already.
    `name`: the directory, the GGUF file or the id that the config named."""
    model = raw["model"]
    directory = model["hf"]
    if not set(Decoder.model_fields) <= set(model):
        from jaxmem.config.hugging_face import decoder_fields

        raw["model"] = _merge(decoder_fields(directory), model)
        optimizer = raw.setdefault("optimizer", {})
        adapter = raw.get("adapter")
        if isinstance(optimizer, dict):
            optimizer.setdefault("learning_rate", fine_tuning_rate(optimizer, adapter))
    data = raw.setdefault("data", {})
    if isinstance(data, dict) and data.get("tokenizer", name) == name:
        data["tokenizer"] = directory


def fine_tuning_rate(optimizer: JsonDict, adapter: Any) -> float:
    """The default of the largest learning rate of a run that begins with trained weights. With AdamW 1e-5 for complete
    weights and 2e-4 for low-rank adapters, as their papers use."""
    entry = OPTIMIZERS.get(str(optimizer.get("name", "adamw")), OPTIMIZERS["adamw"])
    is_low_rank = isinstance(adapter, dict) and (adapter.get("kind") in LOW_RANK or bool(adapter.get("hf")))
    share = LOW_RANK_SHARE if is_low_rank else COMPLETE_SHARE
    return float(f"{share * entry.learning_rate:.1g}")


def _expand_adapter(raw: JsonDict, directory: str) -> None:
    """Adds the settings of an adapter, and the weights that it trains completely, from a PEFT directory."""
    try:
        model = Decoder.model_validate(raw["model"])
    except ValidationError:  # reported with the other errors of the config
        return
    from jaxmem.config.peft import adapter_fields

    fields, trainable = adapter_fields(directory, model)
    raw["adapter"] = {**fields, **raw["adapter"]}
    if trainable:
        optimizer = raw.setdefault("optimizer", {})
        if isinstance(optimizer, dict):
            optimizer.setdefault("trainable", trainable)


def _merge(base: JsonView, over: JsonView) -> JsonDict:
    """`base` updated with `over`, section by section: setting `rope.theta` keeps the `rope.scaling` of a preset."""
    merged = {**base, **over}
    for key in base.keys() & over.keys():
        if isinstance(base[key], Mapping) and isinstance(over[key], Mapping):
            merged[key] = _merge(base[key], over[key])
    return merged
