"""The other kernels, all in one program, as Triton and ptxas compile them for GPUs that are not here: each within its
shared memory, with no register spilled. What they compute is tested interpreted, in a file for each."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.kernels import (
    Constants,
    Moments8,
    adam8_update,
    cross_entropy,
    dequant_matmul,
    int8_add,
    rms_norm,
    sliding_max,
)
from jaxmem.planning.hlo import read_module, total_flops
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.quant import quantize

TOKENS, INPUTS, OUTPUTS = 512, 1024, 768
# One GPU of each compute capability: 8.0, 8.6, 8.9, 9.0, 10.0, 12.0.
TARGETS = ("a100-40gb", "a6000-48gb", "rtx4090-24gb", "h100-80gb", "b200-180gb", "rtx5090-32gb")
LOSS = ("cross_entropy", "cross_entropy_of_logits")
WINDOWS = ("sliding_max_straight", "sliding_max_shared")
NORM = ("rms_norm", "rms_norm_backward")
NAMES = {"dequant_matmul", "dequant_matmul_of_activations", "adam8_update", "int8_add", *LOSS, *WINDOWS, *NORM}


def program(x, g, nf4, state, unbiased, int8, seeds):
    """Every kernel once."""
    double = Constants(nf4.scale.codes, nf4.scale.scale, nf4.scale.offset)
    product = lambda x: dequant_matmul(x, nf4.codes, double, format="nf4", block_size=64, implementation="pallas")  # noqa: E731
    y, pull = jax.vjp(product, x)
    wide = jnp.zeros((INPUTS, OUTPUTS), jnp.bfloat16)
    u, new = adam8_update(wide, state, unbiased, implementation="pallas")
    loss = lambda x, w: jnp.sum(cross_entropy(x, w, jnp.zeros(TOKENS, jnp.int32), implementation="pallas"))  # noqa: E731
    coded = int8_add(int8.codes, int8.scale, u, seeds, implementation="pallas")
    windows = [
        sliding_max(unbiased[0] * x[0].astype(jnp.float32), 64, implementation=i) for i in ("straight", "shared")
    ]
    norm = lambda x: rms_norm(x, x[0], residual=x, implementation="pallas")  # noqa: E731
    normal, back = jax.vjp(norm, x)
    return y, pull(g), new, coded, jax.value_and_grad(loss, (0, 1))(x, wide), windows, back(normal)


def arguments(place):
    def made():
        w = jnp.zeros((INPUTS, OUTPUTS), jnp.float32)
        m, v = quantize(w, "dynamic8", 256, -1), quantize(w, "udynamic8", 256, -1)
        state = Moments8(m.codes, v.codes, m.scale, v.scale)
        nf4, int8 = quantize(w, "nf4", 64, -2, double=True), quantize(w, "int8", 256, -2)
        tokens = (jnp.zeros((TOKENS, size), jnp.bfloat16) for size in (INPUTS, OUTPUTS))
        return (*tokens, nf4, state, jnp.zeros(2, jnp.float32), int8, jnp.zeros(int8.scale.shape, jnp.uint32))

    shapes = jax.eval_shape(made)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_fits_each_gpu(target, tmp_path):
    mesh = Mesh(np.array(target_devices(parse_target(target), 8 * 2**30)[:1]), ("one",))
    whole = PartitionSpec()
    cut = jax.shard_map(program, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    dump = {"xla_gpu_autotune_level": "0", "xla_dump_to": str(tmp_path), "xla_dump_emitter_re": "ptx"}
    dump["xla_backend_optimization_level"] = "3"  # as it would run: the tests' own level spills a few registers
    lowered = jax.jit(cut).lower(*arguments(NamedSharding(mesh, whole)))
    made = lowered.compile(compiler_options=dump)

    major, minor = parse_target(target).gpu.compute_capability.split(".")
    found, shared = {}, set()
    for source in tmp_path.glob("*.ptx"):
        text = source.read_text()
        entries = set(re.findall(r"\.entry (\w+)", text)) & NAMES
        if not entries:
            continue
        name = re.search(rf"\.target (sm_{major}{minor}\w*)", text)[1]
        command = [ptxas(), "-v", f"--gpu-name={name}", source, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        shared |= entries if "ld.shared" in text else set()
        found |= {entry: re.findall(r"(\d+) bytes spill stores", said) for entry in entries}
    assert set(found) == NAMES
    assert all(set(spills) == {"0"} for spills in found.values()), found
    assert shared & set(WINDOWS) == {"sliding_max_shared"}  # numbers go between threads through shared memory
    # What they say of themselves is what a plan counts: two products, and four of the loss.
    module = read_module(made.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    assert total_flops(module) == pytest.approx((2 + 4) * 2 * TOKENS * INPUTS * OUTPUTS, rel=1e-6)


def ptxas():
    (found,) = importlib.util.find_spec("nvidia").submodule_search_locations[:1]
    return next(Path(found).rglob("bin/ptxas"))
