"""GaLore here beside galore-torch: configs/quality.yaml with the same first weights, batches and settings.

In an environment with jaxmem, torch, transformers and galore-torch:

    python scripts/measure/galore_torch.py [SEED ...]       # ten minutes of one core for each seed

A record a run goes to docs/benchmarks/optimizer-quality.jsonl, where `scripts/measure/optimizer_quality.py table` reads
them beside the runs of jaxmem: torch's own AdamW first, to show that the two train alike.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch

import jaxmem
from jaxmem.data import Loader
from jaxmem.lab.bench.torch_peer import network_of
from jaxmem.step import program

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs" / "benchmarks" / "optimizer-quality.jsonl"
METHODS = {
    "adamw, torch": "",
    "galore, galore-torch": "optimizer.name=galore_adamw optimizer.learning_rate=2e-2 optimizer.refresh_every=50",
}


def trained(method: str, seed: int) -> dict[str, Any]:
    overrides = [*METHODS[method].split(), f"seed={seed}", f"name=quality-{seed}"]
    cfg = jaxmem.load_config(ROOT / "configs" / "quality.yaml", overrides)
    built = program(cfg, jax.devices()[:1])
    network = network_of(cfg, built.initialise().params)
    optimizer = _optimizer(cfg, network)
    rate, curve = built.spec.learning_rate, []
    loader = Loader(cfg, "train")
    for step, batch in enumerate(islice(loader, cfg.steps), 1):
        for group in optimizer.param_groups:
            group["lr"] = float(rate(step - 1))
        optimizer.zero_grad(set_to_none=True)
        total, count = _loss(network, batch)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), cfg.optimizer.clip)
        optimizer.step()
        if step % cfg.train.log_every == 0:
            curve.append((step, total.item() / count))
            print(f"{method}, seed {seed}: step {step}, loss {curve[-1][1]:.4f}", flush=True)
    loader.close()
    return {
        "method": method,
        "seed": seed,
        "overrides": METHODS[method],
        "held_out": _held_out(cfg, network),
        "curve": curve,
        "steps": cfg.steps,
        "date": dt.date.today().isoformat(),
        "device": "cpu",
        "torch": torch.__version__,
        "galore-torch": importlib.metadata.version("galore-torch"),
        "python": platform.python_version(),
    }


def _optimizer(cfg: Any, network: Any) -> Any:
    """Matrices of layers projected, the rest Adam's, vectors without decay: as jaxmem has it."""
    own = cfg.optimizer
    named = list(network.named_parameters())
    hidden = [p for name, p in named if p.ndim > 1 and ".layers." in name]
    tables = [p for name, p in named if p.ndim > 1 and ".layers." not in name]
    decayed = [{"params": hidden}, {"params": tables}]
    if own.name == "galore_adamw":
        from galore_torch import GaLoreAdamW

        # One rank for all: each matrix's smaller side is the width of the model.
        rank = cfg.model.embed // 4
        decayed[0] |= {"rank": rank, "update_proj_gap": own.refresh_every, "scale": own.scale, "proj_type": "std"}
        make = GaLoreAdamW
    else:
        make = torch.optim.AdamW
    groups = [
        *({**group, "weight_decay": own.weight_decay} for group in decayed),
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]
    extra = {"no_deprecation_warning": True} if own.name == "galore_adamw" else {}
    return make(groups, lr=own.learning_rate, betas=(own.beta1, own.beta2), eps=own.epsilon, **extra)


def _loss(network: Any, batch: dict[str, np.ndarray]) -> tuple[Any, float]:
    """(sum, how many) over the tokens of one batch, documents apart from each other."""
    arrays = {name: torch.from_numpy(np.asarray(x[0])) for name, x in batch.items()}
    segments, time = arrays["segment_ids"], arrays["inputs"].shape[1]
    seen = (segments[:, None, :, None] == segments[:, None, None, :]) & torch.ones(time, time).tril().bool()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits = network(
        input_ids=arrays["inputs"].long(), position_ids=arrays["positions"].long(), attention_mask=mask, use_cache=False
    ).logits
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), arrays["targets"].long().flatten(), reduction="none")
    return (each * arrays["mask"].flatten()).sum(), float(arrays["mask"].sum())


def _held_out(cfg: Any, network: Any) -> float:
    with torch.no_grad():
        sums = [_loss(network, batch) for batch in _batches(cfg)]
    return sum(total.item() for total, _ in sums) / sum(count for _, count in sums)


def _batches(cfg: Any) -> Iterator[dict[str, np.ndarray]]:
    loader = Loader(cfg, "held_out")
    yield from islice(loader, cfg.train.evaluate_batches)
    loader.close()


def main(seeds: list[int]) -> None:
    for seed in seeds:
        for method in METHODS:
            record = trained(method, seed)
            with RECORDS.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main([int(seed) for seed in sys.argv[1:]] or [0, 1, 2])
