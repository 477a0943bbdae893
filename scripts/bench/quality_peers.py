"""The same runs as quality.py with torch and the libraries that its users have: torch's AdamW, 8-bit AdamW and 4-bit
weights of bitsandbytes, PEFT's LoRA, galore-torch. Same weights, rows, learning rates, clipping and weight decay.

    python scripts/bench/quality_peers.py rows MODEL.gguf                  # with jaxmem: weights and rows
    python scripts/bench/quality_peers.py train METHOD --learning-rate X   # with the libraries; a JSON file per run

The first command writes runs/quality-135m/peers. The second needs torch, transformers, peft, bitsandbytes and
galore-torch in an environment of their own; METHOD is adamw, adamw8bit, galore, lora-16 or qlora-16, and X the learning
rate that quality.py chose for jaxmem's run. jaxmem is not needed there.
"""

import argparse
import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runs/quality-135m/peers"
RECORDS = ROOT / "docs/benchmarks/quality-135m/peers"
STEPS = 100
ROW_NAMES = ("inputs", "targets", "positions", "segment_ids", "mask")
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}  # jaxmem's defaults


# ---------------------------------------------------------------- with jaxmem


def write_rows(model: Path, folder: Path = FOLDER, steps: int = STEPS, seeds: tuple[int, ...] = (0, 1)) -> None:
    """Writes the model as a Hugging Face directory in float32, the rows of each update, the held-out rows, and the
    learning rate of each update relative to the peak."""
    import jaxmem
    from jaxmem import optim
    from jaxmem.inference.export import export_model
    from scripts.bench import quality

    corpus = quality.write_corpus()
    folder.mkdir(parents=True, exist_ok=True)
    export_model(model, folder / "model", dtype="float32")
    for seed in seeds:
        run = quality.Run("adamw", 1.0, seed, steps)
        cfg = jaxmem.load_config(quality.settings(run, model))
        with jaxmem.Loader(cfg) as loader:
            _save(folder / f"rows-{seed}.npz", islice(loader, steps))
    held_out = {"path": str(quality.WORK / "held-out.jsonl")}
    cfg = jaxmem.load_config(quality.settings(quality.Run("adamw", 1.0, 0, steps), model), _overrides(held_out))
    with jaxmem.Loader(cfg, "all") as loader:  # the rows of `jaxmem.evaluate`: others begin at other tokens
        _save(folder / "held-out.npz", loader)
    rate = optim.learning_rate_schedule(cfg.optimizer, steps)
    np.save(folder / "rates.npy", np.array([float(rate(step)) for step in range(steps)]))
    (folder / "corpus.json").write_text(json.dumps(corpus))


def _overrides(data: dict[str, Any]) -> list[str]:
    return [f"data.{name}={json.dumps(value)}" for name, value in data.items()]


def _save(file: Path, batches: Any) -> None:
    """The rows of batches as arrays [batches, rows, time]."""
    rows = [{name: np.asarray(batch[name])[0] for name in ROW_NAMES} for batch in batches]
    np.savez_compressed(file, **{name: np.stack([row[name] for row in rows]) for name in ROW_NAMES})


# ---------------------------------------------------------------- with the libraries


def train(method: str, learning_rate: float, seed: int, folder: Path = FOLDER, records: Path = RECORDS) -> float:
    """Trains, and returns the loss on the held-out rows, which the record states."""
    import torch

    torch.manual_seed(seed)
    model = network(method, folder / "model")
    optimizer = make_optimizer(method, model, learning_rate)
    rates = np.load(folder / "rates.npy")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    curve = []
    for step, (rate, rows) in enumerate(zip(rates, batches(folder / f"rows-{seed}.npz"), strict=True), 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * float(rate)
        total, count = summed_loss(model, rows)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 5 == 0:
            curve.append((step, total.item() / count))
            print(f"{method}, seed {seed}: step {step}, loss {curve[-1][1]:.4f}", flush=True)
    with torch.no_grad():
        sums = [summed_loss(model, rows) for rows in batches(folder / "held-out.npz")]
    loss = sum(total.item() for total, _ in sums) / sum(count for _, count in sums)
    libraries = ("torch", "transformers", "peft", "bitsandbytes", "galore-torch")
    record = {
        "method": method,
        "learning_rate": learning_rate,
        "seed": seed,
        "steps": len(rates),
        "evaluated": "held-out",
        "loss": loss,
        "curve": curve,
        "corpus": json.loads((folder / "corpus.json").read_text()),
        "versions": dict(_versions(libraries)),
    }
    records.mkdir(parents=True, exist_ok=True)
    (records / f"{method}-{learning_rate:g}-{len(rates)}-{seed}.json").write_text(json.dumps(record, indent=1) + "\n")
    return loss


def _versions(libraries: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in libraries:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def batches(file: Path) -> Iterator[dict[str, np.ndarray]]:
    arrays = np.load(file)
    columns = [arrays[name] for name in ROW_NAMES]
    for rows in zip(*columns, strict=True):
        yield dict(zip(ROW_NAMES, rows, strict=True))


def network(method: str, directory: Path) -> Any:
    import torch
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if method.startswith("qlora"):
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    if "lora" in method:
        import peft

        rank = int(method.rpartition("-")[2])
        settings = peft.LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    return model


def make_optimizer(method: str, model: Any, learning_rate: float) -> Any:
    """Matrices have weight decay, vectors have none. GaLore projects the matrices of layers."""
    import torch

    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    layers = [parameter for name, parameter in trained if parameter.ndim > 1 and ".layers." in name]
    others = [parameter for name, parameter in trained if parameter.ndim > 1 and ".layers." not in name]
    vectors = [parameter for _, parameter in trained if parameter.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": parameters, **settings}
        for parameters, settings in ((layers, {}), (others, {}), (vectors, {"weight_decay": 0.0}))
        if parameters
    ]
    if method == "galore":
        from galore_torch import GaLoreAdamW

        rank = model.config.hidden_size // 4
        groups[0] |= {"rank": rank, "update_proj_gap": 25, "scale": 0.25, "proj_type": "std"}
        return GaLoreAdamW(groups, lr=learning_rate, no_deprecation_warning=True, **ADAM)
    if method == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, lr=learning_rate, **ADAM)
    return torch.optim.AdamW(groups, lr=learning_rate, **ADAM)


def summed_loss(model: Any, rows: dict[str, np.ndarray]) -> tuple[Any, float]:
    """(sum, count) over the targets; documents of a row do not attend to each other."""
    import torch

    arrays = {name: torch.from_numpy(values) for name, values in rows.items()}
    time = arrays["inputs"].shape[1]
    same = arrays["segment_ids"][:, :, None] == arrays["segment_ids"][:, None, :]
    seen = same & torch.ones(time, time, dtype=torch.bool).tril()
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[:, None]  # [rows, 1, time, time]
    logits = model(
        input_ids=arrays["inputs"].long(), attention_mask=bias, position_ids=arrays["positions"].long(), use_cache=False
    ).logits
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), arrays["targets"].long().flatten(), reduction="none"
    )
    mask = arrays["mask"].float().flatten()
    return (losses * mask).sum(), mask.sum().item()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = options.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("rows")
    rows.add_argument("model", type=Path, metavar="MODEL.gguf")
    training = commands.add_parser("train")
    training.add_argument("method", choices=["adamw", "adamw8bit", "galore", "lora-16", "qlora-16"])
    training.add_argument("--learning-rate", type=float, required=True)
    training.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    # transformers looks for the package kernels, which the file kernels.py beside this one is not.
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parent]
    if args.command == "rows":
        write_rows(args.model)
    else:
        print(f"held-out loss {train(args.method, args.learning_rate, args.seed):.4f}")


if __name__ == "__main__":
    main()
