"""Between Hugging Face directories and runs.

An imported directory is a run of no steps: its config, a checkpoint of the weights alone, the tokenizer. It is
generated from, evaluated and exported like any run, and `jaxmem train` begins from its weights. To train once from a
Hugging Face directory nothing need be imported: `model.hf` reads it.
"""

from __future__ import annotations

from pathlib import Path

from flax import nnx

from jaxmem import hf
from jaxmem.checkpoint import Checkpoints
from jaxmem.config import LOW_RANK, Config, Decoder, save_config
from jaxmem.config.peft import is_adapter
from jaxmem.errors import UserError
from jaxmem.inference.load import BESIDE, config_of, is_run, open_model
from jaxmem.machine.atomic_directory import atomic_directory


def import_model(source: str | Path, target: str | Path) -> None:
    """A Hugging Face directory as a run. Costs the memory of its weights on the devices, one tensor on the host."""
    if is_run(source):
        raise UserError(f"{source}: is a run already (it has config.yaml)")
    if is_adapter(source):
        raise UserError(f"{source}: has adapters alone; import the model that they belong to, or train with adapter.hf")
    target = Path(target)
    with atomic_directory(target) as place:
        program, params = open_model(source)
        cfg = program.cfg
        model = cfg.model.model_copy(update={"hf": None})
        data = cfg.data.model_copy(update={"tokenizer": str(target / BESIDE), "held_out": 0.02})
        whole = {"name": target.name, "output": str(target.parent), "model": model, "data": data}
        cfg = cfg.model_copy(update=whole)
        hf.copy_metadata(source, place / BESIDE)
        save_config(cfg, place / "config.yaml")
        with Checkpoints(place / "checkpoints") as checkpoints:
            checkpoints.save(0, {"params": params}, {}, cfg.model_dump(mode="json"), force=True)


def export_model(
    run: str | Path, target: str | Path, dtype: str | None = None, adapter: bool = False, merge: bool = False
) -> str:
    """A run as a Hugging Face directory, in the dtype that it came in, that its weights rest in, or another. Of one
    with adapters either these alone, as PEFT keeps them, or all weights with them merged in, tensor by tensor. What
    was written is said."""
    if not is_run(run):
        raise UserError(f"{run}: no run is there (no config.yaml); give the directory that `jaxmem train` wrote")
    _refuse(run, config_of(run), adapter, merge)
    program, params = open_model(run)
    cfg, own = program.cfg, Path(run, BESIDE)
    order = None if program.model.pipeline is None else program.model.pipeline.order.tolist()
    if adapter and isinstance(cfg.model, Decoder):
        ranks = hf.save_adapter(params, cfg.adapter, target, layers=cfg.model.layers, base=cfg.model.hf, order=order)
        differ = "; its ranks differ, and vLLM knows one scale for all layers: give it what --merge writes"
        return f"{target}: what PEFT opens{differ if len(set(ranks.values())) > 1 else ''}"
    hf.save(
        nnx.merge(program.model.graphdef, params),
        target,
        base=own if own.is_dir() else None,
        tokenizer=cfg.data.tokenizer,
        dtype=dtype,
        length=cfg.data.sequence_length,
        order=order,
    )
    return f"{target}: config.json, *.safetensors and the tokenizer"


def _refuse(run: str | Path, cfg: Config, adapter: bool, merge: bool) -> None:
    if adapter and merge:
        raise UserError(
            "--adapter and --merge: adapters by themselves, or merged into the weights; give one of the two"
        )
    kind, beside = cfg.adapter.kind, cfg.adapter.kind in (*LOW_RANK, "prompt")
    if (adapter or merge) and not beside:
        raise UserError(f"{run}: has no adapters; leave out {'--adapter' if adapter else '--merge'}")
    if merge and kind == "prompt":
        raise UserError(f"{run}: a prompt stands before what is read, and has no weight to go into; give --adapter")
    if beside and not (adapter or merge):
        raise UserError(f"{run}: has adapters beside its weights; give --adapter for these alone, or --merge")
    if adapter and not isinstance(cfg.model, Decoder):
        raise UserError(f"{run}: PEFT has no form for adapters of family {cfg.model.family}, only of decoder")
