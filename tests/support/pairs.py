"""Every two settings together: a config with both trains to the plain config's loss, or is refused in one line.

    python -m tests.support.pairs                      # all pairs: about 100 configs, an hour on two cores
    python -m tests.support.pairs --rows 10 --seed 7   # some others
    python -m tests.support.pairs --try memory.remat=sqrt precision.parameters=int8

A row is a config with a setting for many fields, drawn so that it has many pairs that no row before it has (a covering
array). It makes two updates of a tiny model; its losses must be those of the same row on one device without any of the
settings that change memory and communication only (NEUTRAL). With --reduce a row that fails is reduced to the fewest
settings that still fail.
"""

import argparse
import gc
import itertools
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if __name__ == "__main__":
    from jaxmem.machine.devices import simulate

    # As in tests/conftest.py: compiled fast rather than fast.
    fast = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {fast}"
    simulate(8)

import jax

from jaxmem.config import Config, load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.mesh import MESH_AXES
from jaxmem.errors import UserError
from jaxmem.kernels import triton_launch
from jaxmem.step import program
from tests.kernels import interpreter
from tests.step.golden import rows as batch_rows

triton_launch.INTERPRETER = interpreter.interpret

BASE: dict[str, Any] = {
    "name": "pairs",
    "model": {"preset": "tiny", "vocab": 264, "layers": 5, "embed": 32, "mlp": 64, "heads": 8, "kv_heads": 4,
              "head_dim": 8},
    "data": {"sequence_length": 24},
    "batch": {"global_size": 8},
    "optimizer": {"learning_rate": 1e-2},
    "train": {"steps": 10},
}  # fmt: skip
PICTURES = (
    "model={family:\\ vit,layers:\\ 5,embed:\\ 32,mlp:\\ 64,heads:\\ 4,outputs:\\ 1} data={source:\\ digits}"
).replace("\\ ", "\0")
# One setting a line: an override, and others that it requires. Values without an entry are the defaults.
SETTINGS = f"""
memory.remat=full
memory.remat=dots
memory.remat=sqrt
memory.remat=recursive
memory.remat=constant
memory.remat=every_2
memory.remat=slots_2
memory.remat={{"save":[attention,mlp_hidden]}}
memory.offload=activations memory.remat=full
memory.offload=optimizer
memory.offload=frozen adapter.kind=lora
memory.offload=[attention_out] memory.remat={{"save":[attention_out]}}
memory.offload=[activations,optimizer] memory.remat=full
memory.update=during
memory.attention=blockwise
memory.attention=reference
memory.loss_chunk=50
memory.mlp_chunk=5
memory.head_groups=2
precision.parameters=bfloat16
precision.parameters=int8
precision.parameters=nf4
precision.parameters=int4
precision.parameters=uint8
precision.parameters=fp8_e4m3
precision.block_size=16 precision.parameters=int8
precision.compute=float32
precision.compute=bfloat16
precision.compute=float16
precision.gradients=float32
precision.gradients=bfloat16
precision.master=float32 precision.parameters=bfloat16
precision.master=remainder16 precision.parameters=bfloat16
precision.master=remainder8 precision.parameters=bfloat16
precision.rounding=nearest
precision.rounding=stochastic precision.parameters=bfloat16
precision.loss_scale=dynamic precision.compute=float16
precision.loss_scale=128 precision.compute=float16
optimizer.name=adam
optimizer.name=sgd
optimizer.name=lion
optimizer.name=adafactor
optimizer.name=adam_mini
optimizer.name=muon
optimizer.name=adamw8bit
optimizer.name=adamw4bit
optimizer.name=lion8bit
optimizer.name=momentum8bit
optimizer.name=galore_adamw
optimizer.name=galore_adamw8bit
optimizer.name=qgalore
optimizer.name=apollo
optimizer.name=apollo_mini
optimizer.learning_rate=1e-3
optimizer.schedule=linear
optimizer.schedule=constant
optimizer.warmup=2
optimizer.min_lr_ratio=0
optimizer.clip=null
optimizer.clip=0.1
optimizer.trainable=[blocks.*]
optimizer.trainable=["blocks[-2:].*"]
optimizer.clip_by=previous
optimizer.clip_by=weight
optimizer.kernel=triton optimizer.name=adamw8bit
optimizer.beta1=0.8
optimizer.beta2=0.9
optimizer.epsilon=1e-3
optimizer.momentum=0.5 optimizer.name=sgd
optimizer.rank=4 optimizer.name=apollo
optimizer.refresh_every=1 optimizer.name=apollo
optimizer.scale=0.5 optimizer.name=apollo
optimizer.project_embeddings=true optimizer.name=apollo
optimizer.similarity=0.9 optimizer.name=qgalore
optimizer.residual=true optimizer.name=galore_adamw
optimizer.weight_decay=0.3
adapter.kind=lora
adapter.kind=dora
adapter.kind=qlora
adapter.kind=prompt data.packing=false
adapter.kind=head
adapter.kind=last_layers
adapter.kind=patterns adapter.targets=[blocks.attention.*]
adapter.rank=4 adapter.kind=lora
adapter.alpha=4 adapter.kind=lora
adapter.alpha_pattern={{"*.mlp.*":8}} adapter.kind=lora
adapter.token_indices=[1,2] adapter.kind=lora
adapter.rslora=true adapter.kind=lora
adapter.targets=[blocks.*,embedding,head] adapter.kind=lora
adapter.targets={{"*.mlp.*":8,"blocks.*":4}} adapter.kind=lora
adapter.dropout=0.2 adapter.kind=lora
adapter.base=bfloat16 adapter.kind=lora
adapter.base=int8 adapter.kind=qlora
adapter.double_quant=false adapter.kind=qlora
adapter.lora_bias=true adapter.kind=lora
adapter.lora_plus_ratio=4 adapter.kind=lora
adapter.virtual_tokens=8 adapter.kind=prompt data.packing=false
adapter.layers=2 adapter.kind=last_layers
mesh.stage=2
mesh.replica=2
mesh.fsdp=2
mesh.context=2
mesh.context_method=ring mesh.context=2
mesh.context_method=all_gather mesh.context=2
mesh.tensor=2
pipeline.rounds=2 mesh.stage=2 batch.accumulate=2
pipeline.schedule=gpipe mesh.stage=2 batch.accumulate=2
zero=0
zero=1
zero=2
batch.accumulate=2
batch.accumulate=4
objective.name=dpo data.source=preference data.path=x data.packing=false
objective.name=classify model.outputs=10 {PICTURES}
objective.name=binary {PICTURES}
objective.name=regress_l1 {PICTURES}
objective.name=regress_l2 {PICTURES}
objective.name=contrastive {PICTURES}
objective.label_smoothing=0.1
objective.z_loss=1e-3
objective.temperature=0.5 objective.name=contrastive {PICTURES}
objective.beta=0.5 objective.name=dpo data.source=preference data.path=x data.packing=false
""".strip().splitlines()
# Fields without a setting above, and why.
UNTRIED = {
    "memory.budget": "planning replaces it by a policy of memory.remat",
    "memory.spill": "CUDA only",
    "adapter.hf": "reads a directory",
    "adapter.experts": "a mixture of experts: tests/step/test_experts.py",
    "adapter.shared_a": "a mixture of experts: tests/step/test_experts.py",
    "memory.experts": "a mixture of experts: tests/step/test_experts.py",
    "memory.expert_groups": "a mixture of experts: tests/step/test_experts.py",
    "mesh.expert": "a mixture of experts: tests/step/test_experts.py",
    "adapter.base_run": "reads a directory",
}
# Settings of memory and communication: the loss is the same without them.
NEUTRAL = ("memory.", "mesh.", "pipeline.", "zero=", "batch.accumulate=", "optimizer.kernel=")
SLOW = "galore"  # compiles up to ten times as long: only in rows that begin with it
LONGEST = 20  # settings of a row
UPDATES = 2
DEVICES = 8  # at most

Row = tuple[str, ...]  # settings, at most one per field


def field(setting: str) -> str:
    return setting.partition("=")[0]


def overrides(row: Row) -> list[str]:
    """What the settings of a row require, then the settings."""
    words = [setting.split(" ") for setting in row]
    texts = [word for own in words for word in own[1:]] + [own[0] for own in words]
    return [text.replace("\0", " ") for text in sorted(texts, key=lambda text: field(text).count("."))]


def config(given: list[str]) -> Config:
    """The config of some overrides for as many devices as its mesh has."""
    cfg = load_config(BASE, given)
    devices = math.prod(getattr(cfg.mesh, axis) for axis in MESH_AXES)
    if devices > DEVICES:
        raise UserError(f"{devices} devices")
    return for_devices(cfg, devices)


def is_refused(row: Row) -> bool:
    """Whether the config refuses these settings, each problem in one line."""
    try:
        config(overrides(row))
    except UserError as error:
        for line in str(error).splitlines():
            assert 10 <= len(line) <= 400, line
        return True
    return False


def covering_rows(seed: int, note: Callable[[int], None] = lambda _: None) -> Iterator[Row]:
    """Rows until every pair of settings is in one, or is refused. `note` is called with the pairs that are left."""
    draw = random.Random(seed)
    left = {frozenset(pair) for pair in itertools.combinations(SETTINGS, 2) if field(pair[0]) != field(pair[1])}
    order = sorted(map(sorted, left))
    draw.shuffle(order)
    fields = sorted({field(setting) for setting in SETTINGS})
    refused = {setting for setting in SETTINGS if is_refused((setting,))}
    assert not refused, refused
    for first in order:
        if frozenset(first) not in left:
            continue
        left.discard(frozenset(first))
        row = tuple(first)
        if is_refused(row):
            continue
        for name in draw.sample(fields, len(fields)):
            if len(row) == LONGEST or any(field(setting) == name for setting in row):
                continue
            new = {
                setting: sum(frozenset((setting, other)) in left for other in row) + draw.random()
                for setting in SETTINGS
                if field(setting) == name
            }
            for setting in sorted(new, key=new.__getitem__, reverse=True)[:3]:
                is_slow = SLOW in setting and not any(SLOW in other for other in row)
                if new[setting] >= 1 and not is_slow and not is_refused((*row, setting)):
                    row = (*row, setting)
                    break
        left -= {frozenset(pair) for pair in itertools.combinations(row, 2)}
        note(len(left))
        yield row


def trained(given: list[str]) -> list[float]:
    """The losses of two updates, and the loss after them."""
    cfg = config(given)
    built = program(cfg, jax.devices()[: math.prod(getattr(cfg.mesh, axis) for axis in MESH_AXES)])
    state, losses = built.initialise(), []
    step = built.lower_step().compile()
    for update in range(UPDATES + 1):
        batch = batch_rows(built, update)
        if cfg.objective.name == "binary":
            batch["targets"] %= 2
        state, metrics = step(state, built.place(batch))
        losses.append(float(metrics["loss"]))
    return losses


def tolerance(row: Row) -> float:
    """Of the losses: rounding, and with stored or computed values of few bits what rounding decides."""
    cfg = config(overrides(row))
    if cfg.precision.compute in ("bfloat16", "float16") or cfg.precision.gradients == "bfloat16":
        return 2e-2
    is_coarse = cfg.precision.parameters != "float32"
    return 5e-3 if is_coarse or cfg.optimizer.name != "sgd" else 1e-4


def failure(row: Row) -> str | None:
    """What is wrong with a row; None: it trains to the loss of the plain config."""
    given = overrides(row)
    try:
        mine = trained(given)
        plain = trained([text for text in given if not text.startswith(NEUTRAL)])
    except UserError as error:  # some settings are refused when the model is known
        return None if len(str(error).splitlines()) == 1 else str(error)
    except Exception as error:  # noqa: BLE001, whatever it is, it is a fault
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if any("loss_scale=dynamic" in text for text in given):  # the scale of a micro-batch decides which updates overflow
        mine, plain = mine[:1], plain[:1]
    if any("optimizer.name=apollo" in text for text in given):  # it scales a gradient by its norm: noise if that is 0
        mine, plain = mine[:2], plain[:2]
    off = max(abs(a / b - 1) for a, b in zip(mine, plain, strict=True))
    first = abs(mine[0] / plain[0] - 1)
    wrong = not (off < tolerance(row) and first < min(tolerance(row), 1e-2))
    return f"loss: {mine} where the plain config has {plain}" if wrong else None


def reduced(row: Row, kind: str) -> Row:
    """The fewest settings of a row that still fail alike."""
    size = len(row) // 2
    while size:
        for start in range(0, len(row), size):
            fewer = row[:start] + row[start + size :]
            found = None if is_refused(fewer) else failure(fewer)
            if found is not None and found.partition(":")[0] == kind:
                row = fewer
                break
        else:
            size //= 2
        size = min(size, len(row) // 2)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reduce", action="store_true", help="a row that fails to the fewest settings that still fail")
    parser.add_argument("--try", nargs="+", dest="row", metavar="KEY=VALUE", help="this row only")
    args = parser.parse_args()
    left: list[int] = [0]
    rows: Iterator[Row] = iter([tuple(args.row)]) if args.row else covering_rows(args.seed, left.append)
    failed = 0
    for number, row in enumerate(itertools.islice(rows, args.rows)):
        start = time.monotonic()
        jax.clear_caches()
        gc.collect()
        wrong = failure(row)
        print(f"{number}: {len(row)} settings, {left[-1]} pairs left, {time.monotonic() - start:.0f} s", flush=True)
        if wrong is not None:
            failed += 1
            print(f"  {wrong}\n  {' '.join(overrides(row))}", flush=True)
            if args.reduce:
                fewest = reduced(row, wrong.partition(":")[0])
                print(f"  reduced to: {' '.join(overrides(fewest))}\n  {failure(fewest)}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
