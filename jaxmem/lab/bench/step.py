"""Tokens a second of the compiled training step, against the same model in PyTorch.

The peer is Hugging Face's LlamaForCausalLM with fused attention, all cores, eager and through torch.compile; it
starts from the same weights, sees the same batches and takes the same AdamW steps with the same clipping, so the
losses must agree. The runners take turns step by step, and every ratio is of steps that ran side by side: what
else the machine does meanwhile slows all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxmem.config import Config, Decoder
from jaxmem.errors import UserError
from jaxmem.step import Program, program

AGREE = 1e-4  # nats a token

Batch = dict[str, np.ndarray]
Step = Callable[[int, Batch], float]  # (updates done, batch) -> loss


@dataclass
class Runner:
    name: str
    step: Step
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __call__(self, number: int, batch: Batch, *, timed: bool) -> None:
        start = time.perf_counter()
        loss = self.step(number, batch)
        if timed:
            self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss)


def bench_step(cfg: Config, *, seconds: float = 60.0, rounds: int = 100, compiled_peer: bool = True) -> dict[str, Any]:
    """Measure for about so many seconds, at most so many rounds of one step for each runner.

    Gives tokens a second (medians), the ratios (medians over rounds), their spread, and whether all losses agree.
    """
    from jaxmem.lab.bench import torch_peer  # torch is no dependency: only this command asks for it

    torch_peer.require()
    built = program(cfg, jax.devices()[:1])
    _check(built.cfg)
    state = built.initialise()
    weights = jax.device_get(state.params)
    runners = [Runner("jaxmem", _jaxmem(built, state))]
    runners.append(
        Runner("torch_eager", torch_peer.stepper(built.cfg, weights, built.spec.learning_rate, compiled=False))
    )
    if compiled_peer:
        runners.append(
            Runner("torch_compile", torch_peer.stepper(built.cfg, weights, built.spec.learning_rate, compiled=True))
        )
    batches = _batches(built)
    _take_turns(runners, batches, seconds, rounds)
    return _result(built, runners) | {"versions": torch_peer.versions() | {"jax": jax.__version__}}


def _check(cfg: Config) -> None:
    model = cfg.model
    if not isinstance(model, Decoder) or cfg.objective.name != "next_token":
        raise UserError("bench step measures decoders on next_token; model.family and objective say otherwise")
    biases = model.attention_bias or model.output_bias or model.mlp_bias
    if biases or model.qk_norm or model.window or model.rope.scaling != "none" or model.dropout:
        raise UserError(
            "bench step measures what Hugging Face's Llama has by default: no biases, model.qk_norm, window, dropout"
            " or rope.scaling"
        )
    if cfg.batch.accumulate != 1 or cfg.precision.compute == "bfloat16" or cfg.precision.parameters != "float32":
        raise UserError("bench step measures batch.accumulate 1 in float32")


def _jaxmem(built: Program, state: Any) -> Step:
    compiled = built.lower_step().compile()
    kept = [state]

    def step(_: int, batch: Batch) -> float:
        kept[0], metrics = compiled(kept[0], built.place(batch))
        jax.block_until_ready(kept[0])
        return float(metrics["loss"])

    return step


def _batches(built: Program, count: int = 4) -> list[Batch]:
    """Random tokens in the form that the program takes, every row one document."""
    assert isinstance(built.cfg.model, Decoder)
    accumulate, rows, time_ = built.spec.batch["inputs"].shape
    tokens = np.random.default_rng(built.cfg.seed).integers(
        0, built.cfg.model.vocab, (count, accumulate, rows, time_ + 1), np.int32
    )
    shape = (accumulate, rows, time_)
    fixed = {
        "positions": np.broadcast_to(np.arange(time_, dtype=np.int32), shape),
        "segment_ids": np.ones(shape, np.int32),
        "mask": np.ones(shape, np.float32),
    }
    return [{"inputs": some[..., :-1], "targets": some[..., 1:], **fixed} for some in tokens]


def _take_turns(runners: list[Runner], batches: list[Batch], seconds: float, rounds: int) -> None:
    """Two rounds to warm up, then rounds in which the first to run changes."""
    end = None
    for number in range(rounds + 2):
        if number == 2:
            end = time.perf_counter() + seconds
        if end is not None and number > 4 and time.perf_counter() > end:
            return
        first = number % len(runners)
        for runner in runners[first:] + runners[:first]:
            runner(number, batches[number % len(batches)], timed=number >= 2)


def _result(built: Program, runners: list[Runner]) -> dict[str, Any]:
    ours, *peers = runners
    accumulate, rows, time_ = built.spec.batch["inputs"].shape
    tokens = accumulate * rows * time_
    found: dict[str, Any] = {r.name: tokens / statistics.median(r.seconds) for r in runners}
    spread: dict[str, Any] = {r.name: _quartiles([tokens / s for s in r.seconds]) for r in runners}
    apart = 0.0
    for peer in peers:
        name = peer.name.replace("torch_", "ratio_")
        ratios = [theirs / mine for mine, theirs in zip(ours.seconds, peer.seconds, strict=True)]
        found[name], spread[name] = statistics.median(ratios), _quartiles(ratios)
        apart = max(apart, *(abs(a - b) for a, b in zip(ours.losses, peer.losses, strict=True)))
    return found | {
        "losses_agree": apart <= AGREE,
        "largest_loss_difference": apart,
        "losses": {r.name: [r.losses[0], r.losses[-1]] for r in runners},
        "spread": spread,
        "rounds": len(ours.seconds),
        "parameters": built.model.parameters,
        "tokens_per_step": tokens,
    }


def _quartiles(values: list[float]) -> list[float]:
    """Smallest, lower quartile, upper quartile, largest."""
    return [float(x) for x in np.quantile(values, (0.0, 0.25, 0.75, 1.0))]
