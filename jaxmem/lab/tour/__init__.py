"""Each technique with its number: `jaxmem tour TOPIC`. A stop is a line of STOPS and a module of this folder with its
name, which is imported when the stop is visited."""

from __future__ import annotations

from jaxmem.errors import UserError, nearest
from jaxmem.lab.tour.stop import Stop
from jaxmem.lab.tour.table import Table

_ALL = (
    Stop(
        "networks",
        "four network families and five objectives, each trained here",
        "devices",
        config=["model.family=vit", "objective=classify"],
        read=["jaxmem/models/decoder.py", "jaxmem/models/losses.py"],
    ),
    Stop(
        "gpu",
        "its memories; a sliding window, a matmul, a training step: the bytes they move, and times",
        "devices",
        config=["optimizer.kernel=triton"],
        read=["jaxmem/lab/sliding_max/triton.py", "jaxmem/planning/timeline.py"],
    ),
    Stop(
        "memory",
        "one technique after the other, and the memory that each leaves",
        "compiler",
        config=["memory.update=during", "optimizer.name=apollo_mini", "precision.parameters=int8"],
        read=["jaxmem/lab/tour/memory.py", "jaxmem/planning/predict.py"],
        duration="about a minute, or seconds once it is compiled,",
    ),
    Stop(
        "precision",
        "what number formats can represent, and what training in each of them loses",
        "devices",
        config=["precision.parameters=bfloat16", "precision.rounding=stochastic", "precision.loss_scale=dynamic"],
        read=["jaxmem/quant/precision.py", "jaxmem/optim/master.py", "jaxmem/step/step.py"],
        duration="about a minute",
    ),
    Stop(
        "parallel",
        "every way to shard a model over eight GPUs: memory, communication, what is exposed",
        "compiler",
        config=["mesh.fsdp=8", "zero=3", "mesh.tensor=8", "mesh.context=8", "mesh.stage=8"],
        read=["jaxmem/sharding/table.py", "jaxmem/stack/pipeline.py", "jaxmem/lab/parameter_server.py"],
    ),
    Stop(
        "adapters",
        "parameter-efficient fine-tuning: frozen layers, head, soft prompt, LoRA, a random subset",
        "devices",
        config=["adapter.kind=lora", "optimizer.trainable=['*norm*']"],
        read=["jaxmem/adapters/low_rank.py", "jaxmem/optim/selection.py", "jaxmem/lab/tour/random_subset.py"],
    ),
    Stop(
        "quantization",
        "70 B weights in 35 GB: bits, errors, and what a trained network loses",
        "devices",
        config=["precision.parameters=nf4", "precision.block_size=64", "adapter.double_quant=true"],
        read=["jaxmem/quant/qtensor.py", "jaxmem/quant/formats.py", "jaxmem/quant/packing.py"],
    ),
    Stop(
        "qlora",
        "adapters beside frozen weights in bfloat16, int8 and nf4: memory and arithmetic of a step",
        "compiler",
        config=["adapter.kind=qlora", "adapter.base=nf4", "adapter.double_quant=true"],
        read=["jaxmem/adapters/low_rank.py", "jaxmem/quant/qtensor.py", "jaxmem/sharding/weights.py"],
    ),
    Stop(
        "galore",
        "all weights trained with a low-rank optimizer state: GaLore, Q-GaLore, APOLLO",
        "devices",
        config=["optimizer.name=galore_adamw8bit", "optimizer.rank=1024", "memory.update=during"],
        read=["jaxmem/optim/rules/galore.py", "jaxmem/optim/rules/apollo.py", "jaxmem/optim/rules/projection.py"],
        duration="a little over a minute",
    ),
    Stop(
        "checkpointing",
        "activation checkpointing with N, sqrt N, log N boundaries: bytes against recompute; offloading",
        "devices",
        config=["memory.remat=sqrt", "memory.offload=activations"],
        read=["jaxmem/stack/schedule.py", "jaxmem/stack/scheduled.py", "jaxmem/sharding/host.py"],
    ),
    Stop(
        "attention",
        "the score matrix stored or computed in blocks: bytes, time, numerical error",
        "devices",
        config=["memory.attention=triton", "memory.attention=blockwise"],
        read=[
            "kernels/fused_attention/reference.py",
            "kernels/fused_attention/blockwise.py",
            "kernels/fused_attention/triton.py",
        ],
    ),
    Stop(
        "fusion",
        "chains that the compiler fuses, and matmuls in chunks: bytes moved, bytes stored",
        "devices",
        config=["memory.loss_chunk=auto", "memory.mlp_chunk=1024"],
        read=["jaxmem/models/cross_entropy.py", "jaxmem/models/chunking.py"],
    ),
    Stop(
        "stack",
        "one run as a bare loop, with the library's parts, and by config: what each adds",
        "simulated",
        config=["mesh.fsdp=8", "checkpoint.every=30", "checkpoint.resume=auto"],
        read=["jaxmem/lab/tour/stack.py", "jaxmem/step/step.py", "jaxmem/training/run.py"],
    ),
    Stop(
        "frontier",
        "the largest model that fits, from a laptop's GPU to 1,024 H100s",
        "compiler",
        config=["memory.update=during", "adapter.kind=qlora", "mesh.fsdp=-1"],
        read=["jaxmem/search/largest.py", "jaxmem/planning/predict.py"],
    ),
    Stop(
        "finetune",
        "a small model pretrained, fine-tuned by QLoRA, exported and asked, here",
        "devices",
        config=["adapter.kind=qlora"],
        read=["jaxmem/lab/tour/finetune.py", "jaxmem/adapters/low_rank.py"],
        duration="about a minute",
    ),
)
STOPS = {stop.topic: stop for stop in _ALL}


def find_stop(topic: str) -> Stop:
    if topic not in STOPS:
        raise UserError(f"tour: unknown topic {topic!r}{nearest(topic, STOPS)}")
    return STOPS[topic]


def list_stops() -> Table:
    return Table("", [{"jaxmem tour": stop.topic, "shows": stop.about} for stop in STOPS.values()])
