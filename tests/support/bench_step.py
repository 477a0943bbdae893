"""Tokens per second of the compiled training step, compared with the same model in PyTorch.

In an environment with jaxmem, torch and transformers, for a config of a decoder:

    python -m tests.support.bench_step [CONFIG] [KEY=VALUE ...]    # by default configs/bench.yaml

The peer is Hugging Face's LlamaForCausalLM with fused attention on all cores, eager and with torch.compile. It has the
same initial weights and does the same AdamW steps with the same clipping on the same batches, so the losses must agree.
The steps alternate (`contest.py`), and every ratio is that of two consecutive steps: other load on the machine slows
both.
"""

import importlib.util
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxmem.config import Config, Decoder, load_config
from jaxmem.config.hugging_face import config_json
from jaxmem.errors import UserError
from jaxmem.hf import save
from jaxmem.machine.devices import package_versions, use_cpu_without_gpu
from jaxmem.step import Program, program
from scripts.bench.contest import Contestant, take_turns

PEER = ("torch", "transformers")  # not dependencies of jaxmem
AGREE = 1e-4  # nats per token

Batch = dict[str, np.ndarray]
Step = Callable[[int, Batch], float]  # (updates done, batch) -> loss


def bench_step(cfg: Config, *, seconds: float = 60.0) -> dict[str, Any]:
    """Tokens per second (medians), the ratios (medians over turns), their spread, and whether all losses agree."""
    if missing := [name for name in PEER if importlib.util.find_spec(name) is None]:
        raise UserError(f"bench_step compares with PyTorch: pip install {' '.join(missing)}")
    built = program(cfg, jax.devices()[:1])
    _check(built.cfg)
    state = built.initialise()
    peer = partial(torch_step, built, state.params)
    steps = {"torch_eager": peer(compiled=False), "torch_compile": peer(compiled=True)}  # before the state is donated
    steps = {"jaxmem": _jaxmem_step(built, state), **steps}
    return _compare(built, steps, seconds) | {"versions": package_versions((*PEER, "jax"))}


def _check(cfg: Config) -> None:
    model = cfg.model
    if not isinstance(model, Decoder) or cfg.objective.name != "next_token":
        raise UserError("bench_step measures decoders on next_token; set model.family=decoder and objective=next_token")
    if config_json(model)["model_type"] != "llama" or model.rope.scaling != "none" or model.dropout:
        raise UserError(
            "bench_step supports the defaults of Hugging Face's Llama; leave out biases, model.qk_norm, window, dropout"
            " and rope.scaling"
        )
    if cfg.batch.accumulate != 1 or cfg.precision.compute == "bfloat16" or cfg.precision.parameters != "float32":
        raise UserError(
            "bench_step measures float32 without gradient accumulation; set batch.accumulate=1,"
            " precision.parameters=float32 and precision.compute=float32"
        )


def _jaxmem_step(built: Program, state: Any) -> Step:
    compiled = built.lower_step().compile()
    current = [state]

    def step(_: int, batch: Batch) -> float:
        current[0], metrics = compiled(current[0], built.place(batch))
        jax.block_until_ready(current[0])
        return float(metrics["loss"])

    return step


def torch_step(built: Program, params: Any, *, compiled: bool) -> Step:
    """The step of PyTorch, with a copy of the weights. AdamW is torch's fused one, the fastest here; only matrices have
    weight decay, as in jaxmem."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network, cfg = torch_network(built, params), built.cfg
    run, own = torch.compile(network) if compiled else network, cfg.optimizer
    decay, parameters = own.weight_decay if own.name == "adamw" else 0.0, list(network.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(own.beta1, own.beta2), eps=own.epsilon, fused=True)

    def step(number: int, batch: Batch) -> float:
        tokens, targets = (torch.from_numpy(batch[name][0].astype(np.int64)) for name in ("inputs", "targets"))
        for group in optimizer.param_groups:
            group["lr"] = float(built.spec.learning_rate(number))
        optimizer.zero_grad(set_to_none=True)
        logits = run(input_ids=tokens, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        if own.clip is not None:
            torch.nn.utils.clip_grad_norm_(network.parameters(), own.clip)
        optimizer.step()
        return loss.item()

    return step


def torch_network(built: Program, params: Any) -> Any:
    """A LlamaForCausalLM with these weights, from the files that `jaxmem.hf.save` writes."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as place:
        save(nnx.merge(built.model.graphdef, params), place, length=built.cfg.data.sequence_length)
        network = transformers.LlamaForCausalLM.from_pretrained(place, attn_implementation="sdpa", dtype=torch.float32)
    return network.train()


def _batches(built: Program, count: int = 4) -> list[Batch]:
    """Batches of random tokens, one document per row."""
    assert isinstance(built.cfg.model, Decoder)
    *rows, length = built.spec.batch["inputs"].shape
    draws = np.random.default_rng(built.cfg.seed)
    tokens = draws.integers(0, built.cfg.model.vocab, (count, *rows, length + 1), np.int32)
    shape = (*rows, length)
    fixed = {
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape),
        "segment_ids": np.ones(shape, np.int32),
        "mask": np.ones(shape, np.float32),
    }
    return [{"inputs": one[..., :-1], "targets": one[..., 1:], **fixed} for one in tokens]


def _compare(built: Program, steps: dict[str, Step], seconds: float) -> dict[str, Any]:
    losses: dict[str, list[float]] = {name: [] for name in steps}
    batches = _batches(built)

    def next_step(name: str) -> None:
        number = len(losses[name])
        losses[name].append(steps[name](number, batches[number % len(batches)]))

    runners = [Contestant(name, "step", partial(next_step, name), wait=lambda _: None) for name in steps]
    take_turns(runners, seconds, lambda _: None)
    for one in runners:
        if one.failed is not None:
            raise UserError(f"{one.name} failed: {one.failed}")
    difference = max(abs(a - b) for own in losses.values() for a, b in zip(losses["jaxmem"], own, strict=False))
    tokens = built.spec.batch["inputs"].size
    return _speeds(runners, tokens) | {
        "losses_agree": difference <= AGREE,
        "largest_loss_difference": difference,
        "losses": {name: [own[0], own[-1]] for name, own in losses.items()},
        "rounds": len(runners[0].seconds),
        "parameters": built.model.parameter_count,
        "tokens_per_step": tokens,
    }


def _speeds(runners: Sequence[Contestant], tokens: int) -> dict[str, Any]:
    """Tokens per second of each runner, the ratio to each peer, and the range and quartiles of both."""
    first = runners[0]
    values = {one.name: [tokens / seconds for seconds in one.seconds] for one in runners}
    for peer in runners[1:]:
        turns = zip(first.seconds, peer.seconds, strict=True)
        values[peer.name.replace("torch_", "ratio_")] = [theirs / own for own, theirs in turns]
    spread = {name: [float(x) for x in np.quantile(each, (0, 0.25, 0.75, 1))] for name, each in values.items()}
    return {name: statistics.median(each) for name, each in values.items()} | {"spread": spread}


if __name__ == "__main__":
    config, overrides = (sys.argv[1:2] or ["configs/bench.yaml"])[0], sys.argv[2:]
    use_cpu_without_gpu()
    print(json.dumps(bench_step(load_config(config, overrides)), indent=2))
