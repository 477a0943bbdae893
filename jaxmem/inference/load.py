"""Open what a run left behind, or a Hugging Face directory: its config, and the weights on the devices at hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import adapters, hf
from jaxmem.checkpoint import Checkpoints
from jaxmem.checkpoint.paths import checkpoint_directory
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import LOW_RANK, Config, Decoder, Mesh, load_config
from jaxmem.config.peft import adapter_fields, base_of, is_adapter
from jaxmem.data import tokenizer_for
from jaxmem.data.tokenizer import Tokenizer
from jaxmem.errors import UserError
from jaxmem.hf.initial import add_adapters, read_base
from jaxmem.sharding.host import fetch_from_host
from jaxmem.sharding.storage import store
from jaxmem.sharding.weights import is_quantized
from jaxmem.step import Program, program

RESTING = ("parameters", "block_size")  # of a config's `precision`: what weights are stored in
BESIDE = "hf"  # of a run that began from a Hugging Face directory: its settings and tokenizer


def open_model(directory: str | Path, overrides: Sequence[str] = ()) -> tuple[Program, Any]:
    """(program, parameters) of a run's newest checkpoint, or of a Hugging Face directory."""
    if is_run(directory):
        return open_run(directory, overrides)
    built = _program(config_of(directory, overrides))
    return built, add_adapters(built, read_base(built))


def is_run(directory: str | Path) -> bool:
    return Path(directory, "config.yaml").is_file()


def config_of(directory: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a run, or one that stands for a Hugging Face directory."""
    directory = Path(directory)
    if is_run(directory):
        cfg = load_config(directory / "config.yaml", overrides)
        own = directory / BESIDE
        if (own / "tokenizer.json").is_file() and cfg.data.tokenizer != "bytes":
            cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"tokenizer": str(own)})})
        return cfg
    if (directory / "config.json").is_file():
        return load_config(_standing_for(directory), overrides)
    if is_adapter(directory):
        standing = _standing_for(base_of(directory))
        if adapter_fields(str(directory))["kind"] == "prompt":  # which stands before one text in each row
            standing["data"]["packing"] = False
        return load_config({**standing, "adapter": {"hf": str(directory)}}, overrides)
    raise UserError(
        f"{directory}: no run is there (no config.yaml) and no Hugging Face model (no config.json); give the directory "
        "that `jaxmem train` wrote, or one with config.json and *.safetensors"
    )


def tokenizer_of(program: Program) -> Tokenizer:
    """What makes a model's tokens of texts."""
    name, vocab = program.cfg.data.tokenizer, getattr(program.cfg.model, "vocab", 0)
    found = tokenizer_for(name)
    if found.vocab_size > vocab:
        raise UserError(
            f"data.tokenizer {name} has {found.vocab_size} tokens, but the model knows {vocab}: it is another model's"
        )
    return found


def _standing_for(directory: Path) -> dict[str, Any]:
    stored = hf.storage_dtype(directory)
    return {
        "name": "model",
        "model": {"hf": str(directory)},
        "data": {"tokenizer": str(directory), "held_out": 0.0},
        # Half floats are read as float32, which holds each of them.
        "precision": {"parameters": "bfloat16" if stored == "bfloat16" else "float32"},
        "batch": {"global_size": 1},
        "train": {"steps": 1},
    }


def _program(cfg: Config) -> Program:
    """Where the mesh does not fit these devices, one of them holds the model."""
    devices, mesh = jax.devices(), cfg.mesh
    sizes = (mesh.replica, mesh.fsdp, mesh.tensor, mesh.context, mesh.stage)
    if -1 not in sizes and math.prod(sizes) != len(devices):
        cfg, devices = cfg.model_copy(update={"mesh": Mesh()}), devices[:1]
    return program(cfg, devices)


def open_run(directory: str | Path, overrides: Sequence[str] = ()) -> tuple[Program, Any]:
    """(program, parameters) of the newest checkpoint."""
    directory = Path(directory)
    if not is_run(directory):
        raise UserError(f"{directory}: no run is there (no config.yaml); give the directory that `jaxmem train` wrote")
    built = _program(config_of(directory, overrides))
    with Checkpoints(checkpoint_directory(built.cfg, directory), read_only=True) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise UserError(f"{directory}: no checkpoint is there yet")
        position, config = checkpoints.read(step)
        SavedState(built).check_base(position, directory)
        kept = {field: config["precision"][field] for field in RESTING}
        held = dataclasses.replace(
            built, cfg=built.cfg.model_copy(update={"precision": built.cfg.precision.model_copy(update=kept)})
        )
        params = checkpoints.restore_params(step, SavedState(held).shapes(config).params)
        params = SavedState(held).restored_params(params, config)
    return built, params if held.cfg == built.cfg else _brought_to_rest(built, params)


def base_from(built: Program, checkpoints: Checkpoints, step: int) -> Any:
    """The model's own weights out of another run's checkpoint, as this program keeps them. For a new classifier all but
    the old one."""
    where = checkpoints.directory / str(step)
    position, config = checkpoints.read(step)
    saved, here = load_config(config), built.cfg
    if saved.adapter.kind in (*LOW_RANK, "prompt"):
        raise UserError(f"{where}: has adapters beside its weights; export it with --merge, and give model.hf")
    same = {name: getattr(here, name) for name in ("mesh", "rules", "zero", "pipeline", "batch", "memory")}
    held = dataclasses.replace(built, cfg=saved.model_copy(update=same))
    SavedState(held).check_base(position, where)
    read = checkpoints.restore_params(step, SavedState(held).shapes(config).params)
    params = flatten_dict(SavedState(held).restored_params(read, config))
    if here.adapter.kind == "head" and not isinstance(here.model, Decoder):
        params = {path: x for path, x in params.items() if path[0] != "head"} | built.new_module("head")
    wanted = flatten_dict(adapters.base_of(built.spec.state.params))
    for path in sorted(wanted.keys() | params.keys()):
        given, expected = (tuple(tree[path].shape) if path in tree else None for tree in (params, wanted))
        if given != expected:
            name = ".".join(path)
            raise UserError(
                f"{where}: {name} is {given}, but the config's model makes it {expected}; give the same model"
            )
    return _brought_to_rest(built, unflatten_dict(params))


def base_of_run(built: Program, run: str | Path) -> Any:
    """`base_from` the newest checkpoint of a run."""
    if not is_run(run):
        raise UserError(f"adapter.base_run: {run}: no run is there (no config.yaml); give what `jaxmem train` wrote")
    with Checkpoints(checkpoint_directory(load_config(Path(run, "config.yaml")), run), read_only=True) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise UserError(f"adapter.base_run: {run}: no checkpoint is there yet")
        return base_from(built, checkpoints, step)


def _brought_to_rest(built: Program, params: Any) -> Any:
    """Weights in the form that this program keeps them in, one after the other: beside those that were read, what is
    made of them."""
    axes, placed = flatten_dict(built.model.axes), flatten_dict(built.spec.state.params)
    left = flatten_dict(params)
    params.clear()

    def one(path: Any) -> Any:
        stacked = axes[path][:1] == ("layer",)
        own = axes[path][1:] if stacked else axes[path]

        def rest(w: Any) -> Any:
            w = fetch_from_host(w)
            return store(w.dequantize(jnp.float32) if is_quantized(w) else w, own, built.model.storage(path))

        wanted = placed[path]
        if _alike(left[path], wanted):
            return left.pop(path)
        places = jax.tree.map(lambda x: x.sharding, wanted)
        return jax.jit(jax.vmap(rest) if stacked else rest, out_shardings=places)(left.pop(path))

    return unflatten_dict({path: one(path) for path in list(left)})


def _alike(one: Any, other: Any) -> bool:
    """Whether two weights rest in the same, where that is said of their arrays."""

    def kind(w: Any) -> tuple[Any, ...]:
        return jax.tree.structure(w), [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(w)]

    return kind(one) == kind(other)
