"""The attention kernels as Triton and ptxas compile them for GPUs that are not here: they fit, hold nothing square and
spill nothing. Whether they compute the right thing is tests/kernels/test_attention.py's."""

import importlib.util
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.kernels import attention
from jaxmem.kernels.fused_attention.arguments import pairs
from jaxmem.planning.hlo import read_module, total_flops
from jaxmem.planning.targets import parse_target, target_devices

LENGTH, HEADS = 2048, 4
EVERYTHING = {"causal": True, "window": 900, "soft_cap": 30.0, "segments": True}
# Compute capabilities 8.0, 9.0, and 8.9 and 12.0 with 99 KB of shared memory, in which each width of head has to fit;
# 10.0 has that of 9.0.
HOPPER = ("triton", "h100-80gb", 128, "bfloat16", {"causal": True})
CASES = [
    ("triton", "a100-40gb", 128, "bfloat16", EVERYTHING),
    ("triton", "rtx5090-32gb", 64, "float16", EVERYTHING),
    ("triton", "rtx4090-24gb", 256, "bfloat16", {}),
    ("triton", "rtx4090-24gb", 64, "float32", {"causal": True}),
    HOPPER,
]


def compiled(implementation, target, dim, dtype, options, folder):
    """The gradient of attention for one GPU, and the assembler's sources."""
    mesh = Mesh(np.array(target_devices(parse_target(target), 8 * 2**30)[:1]), ("one",))
    place = NamedSharding(mesh, PartitionSpec())
    q, k = (jax.ShapeDtypeStruct((1, LENGTH, n, dim), dtype, sharding=place) for n in (HEADS, HEADS // 2))
    ids = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32, sharding=place)
    options = dict(options)
    segments = options.pop("segments", False)

    def gradient(q, k, v, ids):
        def loss(q, k, v):
            out = attention(q, k, v, segment_ids=ids if segments else None, implementation=implementation, **options)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    cut = jax.shard_map(gradient, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    # Since jax 0.11 XLA writes no PTX unasked.
    dump = {"xla_gpu_autotune_level": "0", "xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax_triton.triton_lib, "_JAX_TRITON_DUMP_DIR", str(folder))
        made = jax.jit(cut).lower(q, k, k, ids).compile(compiler_options=dump)
    return made, [file for file in folder.rglob("*.ptx") if "attention_" in file.read_text()]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("implementation", "target", "dim", "dtype", "options"),
    CASES,
    ids=[" ".join(map(str, case[:4])) for case in CASES],
)
def test_it_fits_each_gpu(implementation, target, dim, dtype, options, tmp_path):
    made, sources = compiled(implementation, target, dim, dtype, options, tmp_path)
    one = LENGTH * HEADS * dim * jnp.dtype(dtype).itemsize
    assert made.memory_analysis().temp_size_in_bytes < 4 * one  # output, its cotangent, and rows: nothing square
    assert sources
    if target == "h100-80gb":  # what the kernels say of themselves is what a plan counts
        module = read_module(made.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
        seen = pairs(LENGTH, LENGTH, causal=True, window=None)
        assert total_flops(module) == pytest.approx((4 + 14) * HEADS * seen * dim, rel=1e-6)
    if dtype == "float32":
        return  # 32-bit products take the registers that they take
    major, minor = parse_target(target).gpu.compute_capability.split(".")
    for source in sources:
        name = re.search(rf"\.target (sm_{major}{minor}\w*)", source.read_text())[1]
        said = subprocess.run(
            [ptxas(), "-v", f"--gpu-name={name}", source, "-o", "/dev/null"], capture_output=True, text=True, check=True
        ).stderr
        stores = [int(count) for count in re.findall(r"(\d+) bytes spill stores", said)]
        assert stores
        assert not any(stores), said


def ptxas():
    (found,) = importlib.util.find_spec("nvidia").submodule_search_locations[:1]
    return next(Path(found).rglob("bin/ptxas"))
