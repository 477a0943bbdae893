"""Writes the model of a run, or of a Hugging Face directory, as a Hugging Face directory or as a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flax import nnx

from jaxmem import hf
from jaxmem.config import LOW_RANK, Data, Decoder
from jaxmem.config.hf_values import read_json
from jaxmem.config.hub import is_gguf
from jaxmem.config.hugging_face import config_json, decoder_fields, different_field
from jaxmem.data.chat import end_of_answer
from jaxmem.data.chat_template import template_for
from jaxmem.data.tokenizer import tokenizer_for
from jaxmem.errors import UserError, as_yaml
from jaxmem.inference.load import HF_FOLDER, is_run, model_config, open_model


def export_model(
    run: str | Path,
    target: str | Path,
    dtype: str | None = None,
    adapter: bool = False,
    merge: bool = False,
    overrides: Sequence[str] = (),
) -> str:
    """Writes a model as a Hugging Face directory or as a GGUF file.

    Args:
        run: The directory of a run, or a Hugging Face directory.
        target: The directory to write; FILE.gguf for a GGUF file.
        dtype: By default the dtype of the files of `model.hf` or, without, the stored dtype; for a GGUF file float16.
        adapter: Write only the adapters, in PEFT's format.
        merge: Write all weights with the adapters merged, tensor by tensor.
        overrides: Settings that replace those of the run, such as `checkpoint.step=best`.

    Returns:
        A line that describes the result.
    """
    saved_cfg = model_config(run, overrides)
    _check_adapters(run, saved_cfg.adapter.kind, saved_cfg.model.family, adapter, merge)
    if adapter and is_gguf(target):
        raise UserError(f"export: --adapter writes a directory for PEFT, not {target}; use a directory, or --merge")
    if adapter and dtype is not None:
        raise UserError(
            f"export: --adapter does not support --dtype {dtype}; adapters keep their dtype; remove --dtype"
        )
    if adapter and isinstance(saved_cfg.model, Decoder):
        _check_base(saved_cfg.model, saved_cfg.adapter.kind)
    program, params = open_model(run, overrides, computes=False)
    cfg = program.cfg
    base_files = Path(run, HF_FOLDER) if is_run(run) else Path(getattr(cfg.model, "hf", ""))
    indices = program.model.execution.layer_indices
    if adapter and isinstance(cfg.model, Decoder):
        saved = hf.saved_names(program)
        ranks = hf.save_adapter(
            params,
            cfg.adapter,
            target,
            base=cfg.model.hf,
            indices=indices,
            saved=saved,
            chat_template=cfg.data.chat_template,
        )
        note = "; vLLM does not support several ranks or base weights in an adapter; use --merge for vLLM"
        is_plain = len(ranks) == 1 and not saved
        return f"{target}: an adapter for PEFT{'' if is_plain else note}"
    model = nnx.merge(program.model.graphdef, params)
    ends = _ends_of_answers(cfg.data)
    trained_length = cfg.data.sequence_length if is_run(run) else None
    if is_gguf(target):
        base = read_json(base_files / "config.json") if base_files.is_dir() else None
        settings = config_json(model.cfg, base, trained_length)
        hf.save_gguf(
            model,
            target,
            tokenizer=cfg.data.tokenizer,
            kind=dtype or "float16",
            length=settings.get("max_position_embeddings", cfg.data.sequence_length),
            indices=indices,
            chat_template=cfg.data.chat_template,
            ends=ends,
        )
        return f"{target}: a GGUF file for llama.cpp"
    hf.save(
        model,
        target,
        base=base_files if base_files.is_dir() else None,
        tokenizer=cfg.data.tokenizer,
        chat_template=cfg.data.chat_template,
        dtype=dtype,
        length=trained_length,
        indices=indices,
        ends=ends,
    )
    return f"{target}: config.json, *.safetensors and the tokenizer"


def _ends_of_answers(data: Data) -> frozenset[int]:
    """The token that ends an answer, if the data are conversations."""
    if not data.has_conversations:
        return frozenset()
    tokenizer = tokenizer_for(data.tokenizer)
    try:
        return end_of_answer(tokenizer, template_for(tokenizer, data.chat_template))
    except UserError:  # pairs of texts need no template
        return frozenset()


def _check_adapters(run: str | Path, kind: str, family: str, adapter: bool, merge: bool) -> None:
    if adapter and merge:
        raise UserError("export: --adapter and --merge are both set; use one of them")
    has_adapters = kind in (*LOW_RANK, "prompt")
    if (adapter or merge) and not has_adapters:
        raise UserError(f"{run}: has no adapters; remove {'--adapter' if adapter else '--merge'}")
    if merge and kind == "prompt":
        raise UserError(
            f"{run}: adapter.kind=prompt does not support --merge (there is no weight to merge into); use --adapter"
        )
    if has_adapters and not (adapter or merge):
        raise UserError(
            f"{run}: has adapters; use --adapter to export only the adapters, or --merge to export the merged weights"
        )
    if adapter and family != "decoder":
        raise UserError(f"{run}: model.family={family} does not support --adapter; PEFT has adapters of decoders only")


def _check_base(model: Decoder, kind: str) -> None:
    """Refuses an adapter whose base model is not that of its directory, whose config.json PEFT reads."""
    if model.hf is None:
        return
    difference = different_field(model, Decoder.model_validate(decoder_fields(model.hf)))
    if difference is not None:
        name, value, base_value = difference
        remedy = f"train with {name}={as_yaml(base_value)}" if kind == "prompt" else "use --merge"
        raise UserError(
            f"export: {name}={as_yaml(value)} does not support --adapter, because PEFT reads {as_yaml(base_value)} from"
            f" {model.hf}/config.json; {remedy}"
        )
