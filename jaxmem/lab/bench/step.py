"""Tokens per second of the compiled training step, against the same model in PyTorch.

The peer is Hugging Face's LlamaForCausalLM with fused attention, all cores, eager and through torch.compile. It starts
from the same weights and does the same AdamW steps with the same clipping on the same batches, so the losses must
agree. The runners take turns (`contest.py`), and every ratio is of steps that ran after each other: whatever else
the machine does slows all of them.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxmem.config import Config, Decoder
from jaxmem.errors import UserError
from jaxmem.lab.bench.contest import Contestant, take_turns
from jaxmem.machine.devices import package_versions
from jaxmem.step import Program, program

AGREE = 1e-4  # nats per token

Batch = dict[str, np.ndarray]
Step = Callable[[int, Batch], float]  # (updates done, batch) -> loss


def bench_step(cfg: Config, *, seconds: float = 60.0) -> dict[str, Any]:
    """Tokens per second (medians), the ratios (medians over turns), their spread, and whether all losses agree."""
    from jaxmem.lab.bench import torch_peer  # torch is not a dependency: only this command needs it

    torch_peer.require()
    built = program(cfg, jax.devices()[:1])
    _check(built.cfg)
    state = built.initialise()
    peer = partial(torch_peer.stepper, built, state.params)
    steps = {"torch_eager": peer(compiled=False), "torch_compile": peer(compiled=True)}  # before the state is donated
    steps = {"jaxmem": _jaxmem(built, state), **steps}
    versions = package_versions((*torch_peer.PACKAGES, "jax"))
    return _compare(built, steps, seconds) | {"versions": versions}


def _check(cfg: Config) -> None:
    model = cfg.model
    if not isinstance(model, Decoder) or cfg.objective.name != "next_token":
        raise UserError("bench step measures decoders on next_token; set model.family=decoder and objective=next_token")
    biases = model.attention_bias or model.output_bias or model.mlp_bias
    if biases or model.qk_norm or model.window or model.rope.scaling != "none" or model.dropout:
        raise UserError(
            "bench step supports what Hugging Face's Llama has by default: no biases, model.qk_norm, window, dropout"
            " or rope.scaling"
        )
    if cfg.batch.accumulate != 1 or cfg.precision.compute == "bfloat16" or cfg.precision.parameters != "float32":
        raise UserError("bench step measures batch.accumulate 1 in float32")


def _jaxmem(built: Program, state: Any) -> Step:
    compiled = built.lower_step().compile()
    current = [state]

    def step(_: int, batch: Batch) -> float:
        current[0], metrics = compiled(current[0], built.place(batch))
        jax.block_until_ready(current[0])
        return float(metrics["loss"])

    return step


def _batches(built: Program, count: int = 4) -> list[Batch]:
    """Random tokens in the form of the program's batches, every row one document."""
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
            raise UserError(f"bench step: {one.name} failed: {one.failed}")
    apart = max(abs(a - b) for own in losses.values() for a, b in zip(losses["jaxmem"], own, strict=False))
    tokens = built.spec.batch["inputs"].size
    return _speeds(runners, tokens) | {
        "losses_agree": apart <= AGREE,
        "largest_loss_difference": apart,
        "losses": {name: [own[0], own[-1]] for name, own in losses.items()},
        "rounds": len(runners[0].seconds),
        "parameters": built.model.parameters,
        "tokens_per_step": tokens,
    }


def _speeds(runners: Sequence[Contestant], tokens: int) -> dict[str, Any]:
    """Of each runner tokens per second, of each peer the ratio to it, and the quartiles of both."""
    first = runners[0]
    values = {one.name: [tokens / taken for taken in one.seconds] for one in runners}
    for peer in runners[1:]:
        turns = zip(first.seconds, peer.seconds, strict=True)
        values[peer.name.replace("torch_", "ratio_")] = [theirs / own for own, theirs in turns]
    spread = {name: [float(x) for x in np.quantile(each, (0, 0.25, 0.75, 1))] for name, each in values.items()}
    return {name: statistics.median(each) for name, each in values.items()} | {"spread": spread}
