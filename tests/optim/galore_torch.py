"""GaLore here, compared with galore-torch: configs/quality.yaml with the same first weights, batches and settings.

In an environment with jaxmem, torch, transformers and galore-torch:

    python -m tests.optim.galore_torch [SEED ...]       # ten minutes of one core per seed

Records go where `optimizer_quality.py table` reads them with the runs of jaxmem. torch's own AdamW comes first, to
show that the two train alike.
"""

import importlib.metadata
import os
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import torch
import transformers
from flax import nnx

from jaxmem.config import Config, load_config
from jaxmem.data.loader import Loader
from jaxmem.hf import save
from jaxmem.step.programs import Program, program

sys.path.append(str(Path(__file__).parents[2] / "scripts/bench"))

from optimizer_quality import CONFIG, METHODS, PEERS, add_record


def train(method: str, seed: int) -> None:
    overrides, _ = METHODS[PEERS[method]]
    cfg = load_config(CONFIG, [*overrides.split(), f"seed={seed}", f"name=quality-{seed}"])
    built = program(cfg, jax.devices()[:1])
    network = torch_network(built, built.initialise().params)
    optimizer = make_optimizer(cfg, network)
    curve = []
    loader = Loader(cfg, "train")
    for step, batch in enumerate(islice(loader, cfg.steps), 1):
        for group in optimizer.param_groups:
            group["lr"] = float(built.spec.learning_rate(step - 1))
        optimizer.zero_grad(set_to_none=True)
        total, count = summed_loss(network, batch)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), cfg.optimizer.clip)
        optimizer.step()
        if step % cfg.train.log_every == 0:
            curve.append((step, total.item() / count))
            print(f"{method}, seed {seed}: step {step}, loss {curve[-1][1]:.4f}", flush=True)
    loader.close()
    versions = {"device": "cpu", "torch": torch.__version__, "galore-torch": importlib.metadata.version("galore-torch")}
    add_record(method, seed, overrides, held_out=held_out(cfg, network), curve=curve, steps=cfg.steps, **versions)


def torch_network(built: Program, params: Any) -> Any:
    """A LlamaForCausalLM with these weights, from the files that `jaxmem.hf.save` writes."""
    with tempfile.TemporaryDirectory() as place:
        save(nnx.merge(built.model.graphdef, params), place, length=built.cfg.data.sequence_length)
        network = transformers.LlamaForCausalLM.from_pretrained(place, attn_implementation="sdpa", dtype=torch.float32)
    return network.train()


def make_optimizer(cfg: Config, network: Any) -> Any:
    """As jaxmem has it: the layers' matrices projected, the others Adam's, vectors without weight decay."""
    own = cfg.optimizer
    parameters = list(network.named_parameters())
    layers = {"params": [p for name, p in parameters if p.ndim > 1 and ".layers." in name]}
    others = {"params": [p for name, p in parameters if p.ndim > 1 and ".layers." not in name]}
    vectors = {"params": [p for _, p in parameters if p.ndim == 1], "weight_decay": 0.0}
    settings = {"lr": own.learning_rate, "betas": (own.beta1, own.beta2), "eps": own.epsilon}
    settings["weight_decay"] = own.weight_decay
    if own.name == "adamw":
        return torch.optim.AdamW([layers, others, vectors], **settings)
    from galore_torch import GaLoreAdamW

    # One rank for all: each matrix's smaller side is the width of the model.
    layers |= {"rank": cfg.model.embed // 4, "update_proj_gap": own.refresh_every, "scale": own.scale}
    layers |= {"proj_type": "std"}
    return GaLoreAdamW([layers, others, vectors], no_deprecation_warning=True, **settings)


def summed_loss(network: Any, batch: dict[str, np.ndarray]) -> tuple[Any, float]:
    """(sum, count) over the tokens of one batch; packed documents do not attend to each other."""
    arrays = {name: torch.from_numpy(np.asarray(x[0])) for name, x in batch.items()}
    segments, time = arrays["segment_ids"], arrays["inputs"].shape[1]
    seen = (segments[:, None, :, None] == segments[:, None, None, :]) & torch.ones(time, time).tril().bool()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits = network(
        input_ids=arrays["inputs"].long(), position_ids=arrays["positions"].long(), attention_mask=mask, use_cache=False
    ).logits
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), arrays["targets"].long().flatten(), reduction="none")
    return (each * arrays["mask"].flatten()).sum(), float(arrays["mask"].sum())


def held_out(cfg: Config, network: Any) -> float:
    loader = Loader(cfg, "held_out")
    with torch.no_grad():
        sums = [summed_loss(network, batch) for batch in islice(loader, cfg.train.evaluate_batches)]
    loader.close()
    return sum(total.item() for total, _ in sums) / sum(count for _, count in sums)


if __name__ == "__main__":
    for seed in [int(seed) for seed in sys.argv[1:]] or [0, 1, 2]:
        for method in PEERS:
            train(method, seed)
