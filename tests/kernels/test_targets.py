"""The kernels beside attention's as Triton and ptxas compile them for GPUs that are not here: each within its shared
memory, with no register spilled. What they compute is tested interpreted, in a file for each."""

import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jax_triton
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.kernels import Moments8, adam8_update, attention, int8_add
from jaxmem.kernels.codes import KERNEL_FORMATS
from jaxmem.kernels.fused_attention import flash
from jaxmem.kernels.fused_attention.flash import BlockSizes
from jaxmem.kernels.grouped_matmul import sort_rows
from jaxmem.kernels.grouped_matmul.quantized_tiles import QuantizedMatrices, QuantizedScales
from jaxmem.kernels.grouped_matmul.triton import grouped_matmul
from jaxmem.kernels.quantized_update import IMPLEMENTATIONS as ADAM8_UPDATE
from jaxmem.planning.compile import without_cache
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.quant import quantize

TOKENS, INPUTS, OUTPUTS = 512, 1024, 768
# Compute capabilities 8.0, 9.0 and 12.0 (as 8.6 and 8.9). 10.0 has the shared memory of 9.0: fewer cases.
TARGETS = ("a100-40gb", "h100-80gb", "rtx5090-32gb")
UPDATES = {"adam8_update", "int8_add"}
GROUPED = {"grouped_matmul", "grouped_matmul_of_inputs", "grouped_matmul_of_weights"}
CALL = "triton_kernel_call"  # jax-triton's kernels in HLO
AXES = {"rows": -1, "columns": -2}  # the dimension of blocks that are updated


def updates(way, weight, blocks):
    options = {"axis": blocks.axis, "block_size": blocks.block_size, "implementation": way}
    state = Moments8(blocks.codes.astype(jnp.uint8), blocks.codes.astype(jnp.uint8), blocks.scale, blocks.scale)
    u, new = adam8_update(weight, state, jnp.ones(2, jnp.float32), **options)
    seeds = jnp.zeros(blocks.scale.shape, jnp.uint32)
    return new, int8_add(blocks.codes, blocks.scale, u, seeds, **options)


def compiled(way, along, target):
    mesh = Mesh(np.array(target_devices(parse_target(target), 8 * 2**30)[:1]), ("one",))
    place, whole = NamedSharding(mesh, PartitionSpec()), PartitionSpec()

    def made():
        w = jnp.zeros((INPUTS, OUTPUTS), jnp.float32)
        return w.astype(jnp.bfloat16), quantize(w, "int8", 128, AXES[along])

    run = functools.partial(updates, way)
    cut = jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), jax.eval_shape(made))
    with without_cache():  # jax cannot read a program for devices that are not installed from its cache
        return jax.jit(cut).lower(*arguments).compile(compiler_options={"xla_gpu_autotune_level": "0"})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("along", "target"),
    [*(("rows", target) for target in TARGETS), ("columns", "b200-180gb")],
)
def test_every_kernel_fits_each_gpu(along, target, tmp_path, monkeypatch):
    monkeypatch.setattr(jax_triton.triton_lib, "_JAX_TRITON_DUMP_DIR", str(tmp_path))
    compiled("triton", along, target)

    found = spills(tmp_path, target)
    assert set(found) == UPDATES
    assert all(set(stores) == {"0"} for stores in found.values()), found


@pytest.mark.exhaustive
def test_plain_jax_has_no_kernel_call():
    assert {*ADAM8_UPDATE} == {"reference", "triton"}
    assert CALL not in compiled("reference", "rows", TARGETS[0]).as_text()


LOWERED = """
import sys
import jax
import jax.numpy as jnp
import jax_triton
from jaxmem.kernels import int8_add, triton_launch

jax_triton.triton_lib._JAX_TRITON_DUMP_DIR = sys.argv[1]
shapes = ((256, 256), jnp.int8), ((1, 256), jnp.float32), ((256, 256), jnp.float32), ((1, 256), jnp.uint32)
for capability in (90, 103, 121):
    triton_launch.capability = lambda: capability
    run = jax.jit(lambda *arrays: int8_add(*arrays, implementation="triton"))
    run.trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).lower(lowering_platforms=("cuda",))
"""


@pytest.mark.exhaustive
def test_llvm_compiles_for_gpus_that_the_table_does_not_have(tmp_path):
    """In another process, since LLVM ends its process if the version of PTX is older than the GPU."""
    subprocess.run([sys.executable, "-c", LOWERED, tmp_path], check=True)
    texts = [source.read_text() for source in tmp_path.rglob("*.ptx")]
    pairs = {(re.search(r"\.target (\w+)", text)[1], re.search(r"\.version (\S+)", text)[1]) for text in texts}
    assert pairs == {("sm_90a", "8.7"), ("sm_103a", "8.8"), ("sm_121a", "8.8")}


def lowered(run, target, *shapes):
    """For one GPU, of arrays of these shapes and dtypes."""
    mesh = Mesh(np.array(target_devices(parse_target(target), 8 * 2**30)[:1]), ("one",))
    place, whole = NamedSharding(mesh, PartitionSpec()), PartitionSpec()
    cut = jax.shard_map(run, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(cut).lower(*(jax.ShapeDtypeStruct(*one, sharding=place) for one in shapes))


def held(run, *shapes):
    with without_cache():
        made = lowered(run, "h100-80gb", *shapes).compile(compiler_options={"xla_gpu_autotune_level": "0"})
    return made.memory_analysis().temp_size_in_bytes


@pytest.mark.exhaustive
def test_triton_says_what_has_no_room(monkeypatch):
    """160 KB and more, on a card of 99 and on one of 227."""
    monkeypatch.setitem(flash.BLOCKS, "forward", {(2, 128): BlockSizes(128, 128, 8, 3)})
    run = lambda q: attention(q, q, q, implementation="triton")  # noqa: E731
    shape = (1, 256, 1, 128), jnp.bfloat16
    with pytest.raises(
        ValueError, match=r"attention_forward: a block needs .* bytes of shared memory; compute capability 8.9 has"
    ):
        lowered(run, "rtx4090-24gb", shape)
    lowered(run, "h100-80gb", shape)


def grouped(x, chosen, g, weight):
    """A matmul of rows with the matrices of their groups, and its gradients."""
    groups = sort_rows(chosen, 16)

    def run(x, weight):
        return grouped_matmul(x, weight, None, None, groups, True)

    if isinstance(weight, QuantizedMatrices):
        y, pull = jax.vjp(lambda x: run(x, weight), x)
    else:
        y, pull = jax.vjp(run, x, weight)
    return y, pull(g)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("form", "dtype", "target"),
    [
        *((None, "bfloat16", target) for target in TARGETS),
        (None, "float32", "rtx4090-24gb"),
        (None, "bfloat16", "b200-180gb"),
        ("nf4", "bfloat16", "rtx4090-24gb"),
    ],
)
def test_grouped_matmuls_fit_each_gpu(form, dtype, target, tmp_path, monkeypatch):
    monkeypatch.setattr(jax_triton.triton_lib, "_JAX_TRITON_DUMP_DIR", str(tmp_path))

    def run(x, chosen, g, w):
        if form is None:
            return grouped(x, chosen, g, w)
        q = quantize(w, form, 64, -2, double_quant=True)
        scale = QuantizedScales(q.scale.codes, q.scale.scale, q.scale.offset)
        return grouped(x, chosen, g, QuantizedMatrices(q.codes, scale, KERNEL_FORMATS[form], 64, INPUTS, OUTPUTS))

    # 128 rows of each group and more: the largest tiles
    shapes = ((2 * TOKENS, INPUTS), dtype), ((2 * TOKENS, 4), jnp.int32), ((8 * TOKENS, OUTPUTS), dtype)
    lowered(run, target, *shapes, ((16, INPUTS, OUTPUTS), dtype))  # jax-triton compiles kernels for this
    found = spills(tmp_path, target)
    assert set(found) == (GROUPED if form is None else GROUPED - {"grouped_matmul_of_weights"})
    assert all(set(stores) == {"0"} for stores in found.values()), found


def spills(directory, target):
    """Bytes of register spills of each kernel that jax-triton compiled, by ptxas."""
    major, minor = parse_target(target).gpu.compute_capability.split(".")
    found = {}
    for source in directory.rglob("*.ptx"):
        text = source.read_text()
        name = re.search(rf"\.target (sm_{major}{minor}\w*)", text)[1]
        command = [ptxas(), "-v", f"--gpu-name={name}", source, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for entry in re.findall(r"\.entry (\w+)", text):
            found[entry] = re.findall(r"(\d+) bytes spill stores", said)
    return found


def ptxas():
    (found,) = importlib.util.find_spec("nvidia").submodule_search_locations[:1]
    return next(Path(found).rglob("bin/ptxas"))
