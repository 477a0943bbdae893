"""The same decoder, weights and optimizer in PyTorch and Hugging Face transformers, to compare with."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxmem.config import Config, Decoder
from jaxmem.config.hugging_face import config_json
from jaxmem.errors import UserError
from jaxmem.hf.names import decoder_weights

PACKAGES = ("torch", "transformers")


def require() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"bench step compares with PyTorch: pip install {' '.join(missing)}")


def stepper(
    cfg: Config, weights: Any, learning_rate: Callable[[int], Any], *, compiled: bool
) -> Callable[[int, dict[str, np.ndarray]], float]:
    """One update of its own copy of the weights: (updates done, batch) -> loss."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network = network_of(cfg, weights)
    run = torch.compile(network) if compiled else network
    optimizer = _optimizer(cfg, network)

    def step(number: int, batch: dict[str, np.ndarray]) -> float:
        tokens, targets = (torch.from_numpy(batch[name][0].astype(np.int64)) for name in ("inputs", "targets"))
        for group in optimizer.param_groups:
            group["lr"] = float(learning_rate(number))
        optimizer.zero_grad(set_to_none=True)
        logits = run(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        if cfg.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), cfg.optimizer.clip)
        optimizer.step()
        return loss.item()

    return step


def network_of(cfg: Config, weights: Any) -> Any:
    """A LlamaForCausalLM with these weights, by the names and settings that jaxmem.hf writes into files."""
    import torch
    import transformers

    model = cfg.model
    assert isinstance(model, Decoder)
    settings = config_json(model, length=cfg.data.sequence_length)
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings, attn_implementation="sdpa"))
    named = {name: torch.from_numpy(x) for name, x in _tensors(model, weights).items()}
    absent, unknown = network.load_state_dict(named, strict=False)
    if unknown or set(absent) - {"lm_head.weight" if model.tie_embeddings else ""}:
        raise RuntimeError(f"weights do not fit Hugging Face's Llama: missing {absent}, unknown {unknown}")
    return network.train()


def _tensors(model: Decoder, weights: Any) -> dict[str, np.ndarray]:
    """Copies under Hugging Face's names; its linear layers are [out, in]."""
    found = {}
    for weight, leaf in decoder_weights(weights):
        for layer in range(model.layers) if weight.is_stacked else (0,):
            x = np.asarray(leaf[layer] if weight.is_stacked else leaf)
            found[weight.tensor_name(layer)] = np.array(x.T if weight.is_transposed else x, order="C")
    return found


def _optimizer(cfg: Config, network: Any) -> Any:
    """AdamW in torch's fused form, its fastest here; only matrices decay, as in jaxmem."""
    import torch

    own = cfg.optimizer
    parameters = list(network.parameters())
    decay = own.weight_decay if own.name == "adamw" else 0.0
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(own.beta1, own.beta2), eps=own.epsilon, fused=True)
