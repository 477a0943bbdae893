"""The same decoder, weights and optimizer in PyTorch and Hugging Face transformers, to compare with."""

import importlib.util
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.hf import save
from jaxmem.step import Program

PACKAGES = ("torch", "transformers")


def require() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"bench step compares with PyTorch: pip install {' '.join(missing)}")


def stepper(built: Program, params: Any, *, compiled: bool) -> Callable[[int, dict[str, np.ndarray]], float]:
    """One update of its own copy of the weights: (updates done, batch) -> loss."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network, cfg = network_of(built, params), built.cfg
    run = torch.compile(network) if compiled else network
    optimizer = _optimizer(cfg, network)

    def step(number: int, batch: dict[str, np.ndarray]) -> float:
        tokens, targets = (torch.from_numpy(batch[name][0].astype(np.int64)) for name in ("inputs", "targets"))
        for group in optimizer.param_groups:
            group["lr"] = float(built.spec.learning_rate(number))
        optimizer.zero_grad(set_to_none=True)
        logits = run(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        if cfg.optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), cfg.optimizer.clip)
        optimizer.step()
        return loss.item()

    return step


def network_of(built: Program, params: Any) -> Any:
    """A LlamaForCausalLM with these weights, through the files that `jaxmem.hf.save` writes."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as place:
        save(nnx.merge(built.model.graphdef, params), place, length=built.cfg.data.sequence_length)
        network = transformers.LlamaForCausalLM.from_pretrained(place, attn_implementation="sdpa", dtype=torch.float32)
    return network.train()


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
