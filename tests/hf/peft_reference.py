"""What PEFT makes of adapters on a tiny model, and how it trains them: the reference of tests/hf/test_peft.py.

Weights follow from their names by a formula, so that the suite builds the same directories without torch; the names
and shapes are those of PEFT (data/peft.json). In an environment with torch, transformers 5, peft, safetensors and
numpy:

    python -m tests.hf.peft_reference record tests/hf/data
    python -m tests.hf.peft_reference opens DIR    # PEFT opens what jaxmem wrote: same logits, same greedy tokens

and before the last, where jaxmem is installed:

    python -m tests.hf.peft_reference write DIR

Recorded with torch 2.13.0, transformers 5.24.0, peft 0.21.2, on a CPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.hf.transformers_reference import NEW, ROWS, values, write_directory

BASE = "llama3"
PRODUCTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 6, "target_modules": [*PRODUCTS, "embed_tokens"], "rank_pattern": {"q_proj": 2}},
    "dora": {"r": 3, "lora_alpha": 2, "target_modules": ["q_proj", "down_proj"], "use_rslora": True, "use_dora": True},
    "patterns": {
        "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {r"layers\.1\.self_attn\..*": 2, "down_proj": 3},
        "alpha_pattern": {"model.layers.0.mlp.down_proj": 9, r".*v_proj": 2.5},
    },
    "names": {
        "r": 3, "lora_alpha": 5, "use_dora": True,
        "target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj"],
    },
    "regex": {"r": 3, "lora_alpha": 5, "target_modules": r"model\.layers\.1\..*(q|o)_proj|.*\.0\.mlp\.up_proj"},
    "layers": {
        "r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "k_proj", "v_proj"], "layers_to_transform": [1],
        "layers_pattern": "layers", "exclude_modules": ["self_attn.k_proj"],
    },
    "all-linear": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "exclude_modules": r".*\.1\.mlp\..*"},
    "saved": {
        "r": 2, "lora_alpha": 3, "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"],
    },
    "biases": {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "up_proj"], "bias": "all", "lora_bias": True},
    "dora-embedding": {"r": 2, "lora_alpha": 3, "target_modules": ["v_proj", "embed_tokens"], "use_dora": True},
    # In transformers 5 the routed experts are no linear layers, so these are shared experts and an MLP without experts.
    "shared": {"r": 2, "lora_alpha": 3, "target_modules": ["gate_proj", "up_proj", "down_proj"]},
}  # fmt: skip
BASES = {"biases": "llama-biases", "shared": "qwen2-moe-dense"}  # others have the base BASE
TRAINED = ("lora", "patterns", "saved", "names")  # cases whose losses are recorded
SHAPES = Path(__file__).parent / "data" / "peft.json"
LEARNING = {"lr": 5e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
STEPS = 8


def adapter_config(case: str) -> dict[str, Any]:
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None}
    return {**settings, "lora_dropout": 0.0, "bias": "none", "inference_mode": True, **CASES[case]}


def base_of(case: str) -> str:
    return (BASES | MIXTURES).get(case, BASE)


def tensors(case: str) -> dict[str, np.ndarray]:
    """As PEFT names and shapes them."""
    found = {name: values(name, tuple(shape)) for name, shape in json.loads(SHAPES.read_text())[case].items()}
    return {name: 2 + x if "vector" in name else x for name, x in found.items()}


def write_adapter(case: str, place: Path) -> None:
    from safetensors.numpy import save_file

    place.mkdir(parents=True, exist_ok=True)
    (place / "adapter_config.json").write_text(json.dumps(adapter_config(case), indent=1))
    save_file(tensors(case), place / "adapter_model.safetensors", metadata={"format": "pt"})


def opened(adapter: Path, base: Path, *, trainable: bool = False) -> Any:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(model, str(adapter), is_trainable=trainable).eval()


def logits(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor(ROWS)).logits.numpy()


def losses(model: Any) -> list[float]:
    """Of so many updates on the same rows, each before it."""
    import torch

    adamw = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], **LEARNING)
    rows, found = torch.tensor(ROWS), []
    for _ in range(STEPS):
        loss = model(input_ids=rows, labels=rows).loss
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        found.append(loss.item())
    return found


def recorded_shapes(place: Path) -> dict[str, dict[str, list[int]]]:
    """The names and shapes of the tensors that PEFT saves of each case."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    found = {}
    for case, settings in CASES.items():
        model = AutoModelForCausalLM.from_pretrained(place / base_of(case), dtype=torch.float32)
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        found[case] = {name: list(x.shape) for name, x in peft.get_peft_model_state_dict(model).items()}
    return found


def record(target: Path) -> None:
    import tempfile

    import peft

    found = {}
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        for base in {BASE, *BASES.values()}:
            write_directory(base, place / base)
        SHAPES.write_text(json.dumps(recorded_shapes(place), indent=0) + "\n")
        for case in CASES:
            write_adapter(case, place / case)
            model = opened(place / case, place / base_of(case), trainable=True)
            found[f"{case}.logits"] = logits(model)
            if case in TRAINED:
                found[f"{case}.losses"] = np.array(losses(model))
            print(case, np.abs(found[f"{case}.logits"]).mean(), found.get(f"{case}.losses"))
    np.savez_compressed(target / "peft.npz", **found)
    print(peft.__version__)


OURS: dict[str, list[str]] = {  # of each adapter, how it is asked for
    "lora": ["adapter.kind=lora", "adapter.rank=3", "adapter.alpha=8", 'adapter.targets=["blocks.*", "embedding"]'],
    "rslora": ["adapter.kind=lora", 'adapter.targets={"*.mlp.*": 2, "*.q": 5}', "adapter.rslora=true"],
    "dora": ["adapter.kind=dora", "adapter.rank=4"],
    "layers": [
        "adapter.kind=lora",
        'adapter.targets={"blocks[-1:].attention.q": 2, "blocks.*.[qk]": 3, "blocks[:1].mlp.*": 4}',
        'adapter.alpha_pattern={"blocks[:1].mlp.up": 5}',
    ],
    "weights": [
        "adapter.kind=lora",
        'optimizer.trainable=["head.*", "embedding.*", "blocks[:1].*norm.scale", "norm.*"]',
    ],
    "prompt": ["adapter.kind=prompt", "adapter.virtual_tokens=5", "data.packing=false"],
}  # fmt: skip
MIXTURES = {f"{base}-lora": base for base in ("mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v2-groups")}
OURS |= {key: ["adapter.kind=lora", "adapter.rank=3", 'adapter.targets=["blocks.*"]'] for key in MIXTURES}
OURS["deepseek-v2-groups-lora"][-1] = (
    'adapter.targets={"blocks.attention.*": 4, "blocks.mlp.[gud]*": 3, "blocks.mlp.shared.*": 2}'
)


def write(place: Path) -> None:
    """Bases, adapters of our own whose weights are random, what jaxmem computes with them, read back from there; and
    PEFT's adapters, read and written again."""
    import jax
    from flax import nnx
    from flax.traverse_util import flatten_dict, unflatten_dict

    from jaxmem import hf
    from jaxmem.inference.load import open_model
    from tests.support.generation import generate

    for base in {BASE, *BASES.values(), *MIXTURES.values()}:
        write_directory(base, place / base)
    found = {}
    for case in CASES:
        write_adapter(case, place / "given" / case)
        built, params = open_model(base := place / base_of(case), [f"adapter.hf={place / 'given' / case}"])
        saved, target = hf.saved_names(built), place / "again" / case
        target.parent.mkdir(exist_ok=True)
        hf.save_adapter(params, built.cfg.adapter, target, base=str(base), saved=saved)
    for case, overrides in OURS.items():
        built, params = open_model(base := place / base_of(case), overrides)
        flat = flatten_dict(params)
        own = sorted(path for path, x in flatten_dict(built.model.select(params)).items() if x is not None)
        draws = np.random.default_rng(3)
        flat |= {
            path: flat[path] + 0.1 * jax.numpy.asarray(draws.normal(size=flat[path].shape), "float32") for path in own
        }
        written = unflatten_dict(flat)
        saved = hf.saved_names(built)
        hf.save_adapter(written, built.cfg.adapter, place / case, base=str(base), saved=saved)
        built, params = open_model(place / case)
        network = nnx.merge(built.model.graphdef, params)
        found[f"{case}.logits"] = np.asarray(jax.jit(network)(jax.numpy.asarray(ROWS, "int32")))
        found[f"{case}.greedy"] = np.array(list(generate(built, params, ROWS[0], NEW)))
    np.savez(place / "expected.npz", **found)


def opens(place: Path) -> bool:
    import torch

    expected, good = np.load(place / "expected.npz"), True
    recorded = np.load(SHAPES.with_name("peft.npz"))
    for case in CASES:
        off = np.abs(logits(opened(place / "again" / case, place / base_of(case))) - recorded[f"{case}.logits"]).max()
        print(f"{case}, read and written again: logits {off:.1e} apart")
        good = good and off < 2e-4
    for case in OURS:
        model = opened(place / case, place / base_of(case))
        rows = torch.tensor(ROWS[:1])
        said = model.generate(input_ids=rows, attention_mask=torch.ones_like(rows), max_new_tokens=NEW, do_sample=False)
        same = said[0, -NEW:].tolist() == expected[f"{case}.greedy"].tolist()
        off = [np.abs(logits(model)[:, -ROWS.shape[1] :] - expected[f"{case}.logits"]).max()]
        if case != "prompt":
            off.append(np.abs(logits(model.merge_and_unload()) - expected[f"{case}.logits"]).max())
        print(
            f"{case}: logits, and merged there, {', '.join(f'{x:.1e}' for x in off)} apart, greedy tokens same: {same}"
        )
        good = good and same and max(off) < 1e-4
    return good


def main(command: str, place: str) -> None:
    if command == "record":
        record(Path(place))
    elif command == "write":
        write(Path(place))
    elif not opens(Path(place)):
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
