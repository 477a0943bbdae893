"""Opens a run or a Hugging Face directory: its config, and its weights on this machine's devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import KeyPath

from jaxmem import adapters, hf
from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.checkpoint.paths import checkpoint_directory
from jaxmem.checkpoint.record import DamagedError
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import LOW_RANK, Config, Decoder, Mesh, Pipeline
from jaxmem.config.hf_values import read_json
from jaxmem.config.hub import is_tokenizer_of, local_directory
from jaxmem.config.hugging_face import different_field
from jaxmem.config.load import load_config
from jaxmem.config.mesh import MESH_AXES
from jaxmem.config.names import LAYER_RANGE
from jaxmem.config.networks import Network
from jaxmem.config.peft import base_of, is_adapter, is_prompt
from jaxmem.config.user import UserObjects
from jaxmem.data.chat_template import template_in
from jaxmem.distributed.agree import any_process
from jaxmem.errors import UserError, as_yaml, one_of
from jaxmem.hf.peft import add_adapters, read_base
from jaxmem.machine.devices import reserve_gpu_memory
from jaxmem.models import user
from jaxmem.sharding.host import fetch_from_host
from jaxmem.sharding.table import is_stacked
from jaxmem.sharding.weights import is_encoded, store
from jaxmem.step.programs import Program, program
from jaxmem.step.state import TrainState
from jaxmem.typing import JsonDict, Tree

T = TypeVar("T")
STORED_FIELDS = ("parameters", "block_size")  # fields of `precision` that are the stored format of the weights
HF_FOLDER = "hf"  # settings and tokenizer, in a run that began from a Hugging Face directory


def open_model(directory: str | Path, overrides: Sequence[str] = (), *, computes: bool = True) -> tuple[Program, Tree]:
    """(program, parameters) of a run, or of a Hugging Face directory. `computes`: false if only weights are used; then
    kernels are not checked."""
    if is_run(directory):
        return open_run(directory, overrides, computes=computes)
    cfg = model_config(directory, overrides)
    if cfg.checkpoint.step is not None:
        raise UserError(f"checkpoint.step={cfg.checkpoint.step}: {directory} is not a run and has no checkpoints")
    built = _program(cfg, computes)
    return built, add_adapters(built, read_base(built))


def is_run(directory: str | Path) -> bool:
    return Path(directory, "config.yaml").is_file()


def model_config(directory: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a run, or a config with which a Hugging Face directory or a model of the hub can be opened."""
    directory = Path(local_directory(str(directory), "model"))
    if is_run(directory):
        cfg = load_config(directory / "config.yaml", overrides, is_run=True)
        hf_files = directory / HF_FOLDER
        hf_model = getattr(cfg.model, "hf", None)
        if hf_model and is_tokenizer_of(cfg.data.tokenizer, hf_model) and (hf_files / "tokenizer.json").is_file():
            cfg = cfg.replace(data={"tokenizer": str(hf_files)})
        return cfg
    if (directory / "config.json").is_file():
        return load_config(_hf_config(directory), overrides)
    if is_adapter(directory):
        return _adapter_config(directory, overrides)
    if not directory.exists():
        raise UserError(
            f"{directory} does not exist; use the directory of a run or of a Hugging Face model, or org/name"
        )
    raise UserError(
        f"{directory} is neither a run (no config.yaml) nor a Hugging Face model (no config.json); use a directory "
        "that `jaxmem train` wrote, or a directory with config.json and *.safetensors"
    )


def _hf_config(directory: Path) -> JsonDict:
    stored = hf.storage_dtype(directory)
    return {
        "name": "model",
        "model": {"hf": str(directory)},
        "data": {"tokenizer": str(directory), "held_out": 0.0},
        # float16 is read as float32, which represents all its values.
        "precision": {"parameters": "bfloat16" if stored == "bfloat16" else "float32"},
        "batch": {"global_size": 1},
        "train": {"steps": 1},
    }


def _adapter_config(directory: Path, overrides: Sequence[str]) -> Config:
    """A config of an adapter's base model with the adapter."""
    raw = _hf_config(base_of(directory))
    if is_prompt(directory):  # a soft prompt comes before each text, so texts are not packed
        raw["data"]["packing"] = False
    settings = directory / "tokenizer_config.json"  # the adapter's tokenizer may have tokens that the model lacks
    if (template := directory / hf.CHAT_TEMPLATE).is_file():
        raw["data"]["chat_template"] = str(template)
    elif settings.is_file() and template_in(read_json(settings)) is not None:
        raw["data"]["chat_template"] = str(settings)
    cfg = load_config({**raw, "adapter": {"hf": str(directory)}}, overrides)
    some_layers = any(map(LAYER_RANGE.search, cfg.trainable_patterns))
    is_given = any(word.startswith("precision.parameters=") for word in overrides)
    is_bfloat16 = cfg.precision.parameters == "bfloat16" and cfg.base_precision == cfg.precision
    if is_bfloat16 and not is_given and not some_layers:
        # Adapters are usually float32, also those of a base in bfloat16. If base weights of some layers are trained,
        # all layers must be stored in one format.
        cfg = cfg.replace(precision={"parameters": "float32"}, adapter={"base": "bfloat16"})
    return cfg


def _program(cfg: Config, computes: bool) -> Program:
    """The program of a config. In a single process, it is on one device if the mesh does not match the number of
    devices."""
    from jaxmem.step.kernel_check import with_passing_kernels

    reserve_gpu_memory()
    devices = jax.devices()
    mesh = cfg.mesh
    sizes = [getattr(mesh, axis) for axis in MESH_AXES]
    if -1 not in sizes and math.prod(sizes) != len(devices) and jax.process_count() == 1:
        # Pipeline stages and updates within a schedule need several devices.
        cfg = cfg.replace(mesh=Mesh(), pipeline=Pipeline(), memory={"update": "after"})
        devices = devices[:1]
    return program(with_passing_kernels(cfg, devices, any_process) if computes else cfg, devices)


def check_run(directory: str | Path, key: str = "") -> None:
    """Refuses a directory that is not a run. `key`: the config key that names it."""
    if not is_run(directory):
        setting = f"{key}={directory}" if key else str(directory)
        problem = "is not a run (no config.yaml)" if Path(directory).exists() else "does not exist"
        raise UserError(f"{setting} {problem}; use a directory that `jaxmem train` wrote")


def open_run(
    directory: str | Path, overrides: Sequence[str] = (), user: UserObjects | None = None, *, computes: bool = True
) -> tuple[Program, Tree]:
    """(program, parameters) of a checkpoint. `user`: the objects of the script that trained the run; `computes`: see
    `open_model`."""
    check_run(directory)
    cfg = model_config(directory, overrides)
    built = _program(cfg.with_user(user) if user else cfg, computes)

    def read(checkpoints: Checkpoints, step: int) -> tuple[Program, Tree]:
        saved = checkpoints.read(step)[1]["precision"]
        precision = built.cfg.precision.model_copy(update={field: saved[field] for field in STORED_FIELDS})
        as_saved = built.with_precision(precision)
        return as_saved, _saved_params(as_saved, checkpoints, step)

    as_saved, params = read_checkpoint(directory, cfg, read)
    return built, params if as_saved.cfg == built.cfg else _store_as(built, params)


def read_checkpoint(run: str | Path, cfg: Config, read: Callable[[Checkpoints, int], T]) -> T:
    """What `read` returns for the checkpoint `checkpoint.step`, by default the newest, and its step. If the run writes
    at the same time and has deleted this checkpoint, the next newest is read."""
    reserve_gpu_memory()  # opening checkpoints starts jax
    path = checkpoint_directory(run, cfg.checkpoint.path, cfg.name)
    while True:
        with Checkpoints(path, read_only=True) as checkpoints:
            step = _step_to_read(run, checkpoints, cfg.checkpoint.step)
            try:
                return read(checkpoints, step)
            except DamagedError:
                if (checkpoints.directory / str(step)).exists():
                    raise


def _step_to_read(run: str | Path, checkpoints: Checkpoints, step: int | str | None) -> int:
    """The step that `checkpoint.step` names."""
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{run}: has no checkpoint yet; wait for the first, or set a smaller checkpoint.every")
    if step is None:
        return steps[-1]
    if isinstance(step, int):
        if step not in steps:
            raise UserError(f"{run}: has no checkpoint of checkpoint.step={step}; use {one_of(steps)}")
        return step
    best = checkpoints.best()
    if best is None:
        raise UserError(
            f"{run}: no checkpoint has a held-out loss, which checkpoint.step=best requires; use a step"
            f" ({one_of(steps)})"
        )
    return best


def _saved_params(as_saved: Program, checkpoints: Checkpoints, step: int) -> Tree:
    """The weights of a checkpoint. `as_saved`: a program that stores them in the format of the checkpoint."""
    position, config = checkpoints.read(step)
    saved = SavedState(as_saved)
    saved.check_base(position, checkpoints.directory / str(step))
    return saved.complete_params(checkpoints.restore_params(step, saved.shapes_to_restore(config).params), config)


def base_params(built: Program, checkpoints: Checkpoints, step: int) -> Tree:
    """The base weights from another run's checkpoint, stored as this program stores them. A new classifier head
    replaces the old one."""
    where = checkpoints.directory / str(step)
    here = built.cfg
    saved = load_config(checkpoints.read(step)[1])
    if saved.adapter.kind in (*LOW_RANK, "prompt"):
        raise UserError(f"{where}: has adapters; export it with --merge, and set model.hf to the exported directory")
    same = {name: getattr(here, name) for name in ("mesh", "rules", "zero", "pipeline", "batch", "memory")}
    _check_model(where, here.model, saved.model)
    as_saved = dataclasses.replace(built, cfg=saved.model_copy(update=same))
    params = flatten_dict(_saved_params(as_saved, checkpoints, step))
    if here.adapter.kind == "head" and not isinstance(here.model, Decoder):
        params = {path: x for path, x in params.items() if path[0] != "head"} | built.new_module("head")
    model_params = flatten_dict(adapters.base_of(built.spec.state.params))
    for path in sorted(model_params.keys() | params.keys()):
        shape, expected = (list(tree[path].shape) if path in tree else "missing" for tree in (params, model_params))
        if shape != expected:
            raise UserError(
                f"{where}: {'.'.join(path)} has shape {shape}, but model requires {expected}; use the model of that run"
            )
    return _store_as(built, unflatten_dict(params))


def _check_model(where: object, model: Network, saved: Network) -> None:
    """Refuses weights of a decoder for another one, which may have weights of the same shapes."""
    if not (isinstance(model, Decoder) and isinstance(saved, Decoder)):
        return
    difference = different_field(model, saved)
    if difference is not None:
        name, value, saved_value = difference
        raise UserError(
            f"adapter.base_run: {name}={as_yaml(value)}, but {where} was trained with {as_yaml(saved_value)}; use the"
            " model of that run"
        )


def initial_state(built: Program) -> TrainState:
    """A new state, from the weights of `adapter.base_run` or `model.hf` if one is set, otherwise random weights."""
    run = built.cfg.adapter.base_run
    if run is not None:
        check_run(run, "adapter.base_run")
        saved = load_config(Path(run, "config.yaml"))
        base = read_checkpoint(run, saved, partial(base_params, built))
    elif getattr(built.cfg.model, "hf", None) is not None:
        base = read_base(built)
    else:
        return built.initialise()
    return built.begin(add_adapters(built, base))


def _store_as(built: Program, params: Tree) -> Tree:
    """Weights in the formats in which this program stores them. They are converted one by one: at most one exists in
    both formats."""
    store_weight = store if built.model.flax_model is None else user.store_flax
    axes = flatten_dict(built.model.axes)
    placed = flatten_dict(built.spec.state.params)
    left = flatten_dict(params)
    params.clear()

    def stored(path: KeyPath) -> Tree:
        stacked = is_stacked(axes[path])
        weight_axes = axes[path][1:] if stacked else axes[path]

        def convert(w: Tree) -> Tree:
            w = fetch_from_host(w)
            full = w.dequantize(jnp.float32) if is_encoded(w) else w
            return store_weight(full, weight_axes, built.spec.initial_weights.storage(path))

        target = placed[path]
        if _format_of(left[path]) == _format_of(target):
            return left.pop(path)
        places = jax.tree.map(lambda x: x.sharding, target)
        return jax.jit(jax.vmap(convert) if stacked else convert, out_shardings=places)(left.pop(path))

    return unflatten_dict({path: stored(path) for path in list(left)})


def _format_of(w: Tree) -> tuple[object, ...]:
    """Structure, shapes, dtypes and shardings of a weight."""
    return jax.tree.structure(w), [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(w)]
