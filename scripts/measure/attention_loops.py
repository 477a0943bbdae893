"""Machine instructions of the loops of attention's Mosaic kernels, compiled for a Hopper GPU that need not be here: how
much of the time that its tensor cores take for a block goes to beginning instructions. Figures of docs/kernels.md.

    python scripts/measure/attention_loops.py [TARGET]    # a minute; without one: h200-141gb

A loop is what a warp goes through for one block; each scheduler has one warp of either warpgroup that computes, and
begins one instruction a cycle. The tensor cores of a multiprocessor do 4,096 operations a cycle in 16 bits, one
multiplication and one addition being two.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jaxmem.machine import devices, stderr

devices.stay_on_cpu_without_gpu(only_compile=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from kernel_instructions import gpu_of, listing  # noqa: E402

from jaxmem.errors import UserError  # noqa: E402
from jaxmem.kernels import attention  # noqa: E402
from jaxmem.kernels.attention.tuning import usual  # noqa: E402
from jaxmem.planning.targets import parse_target, target_devices  # noqa: E402

LENGTH, HEADS = 2048, 4
PRODUCTS = {"forward": 2, "gradients": 5, "d_queries": 3, "d_keys": 4}
OPERATIONS = 4096  # of a multiprocessor's tensor cores in a cycle


def sources(target: str, dim: int, *, deterministic: bool) -> Iterator[tuple[str, str]]:
    """What ptxas is given for each kernel that was not compiled before, and the kernel's name."""
    place = jax.sharding.SingleDeviceSharding(target_devices(parse_target(target), 8 * 2**30)[0])
    q = jax.ShapeDtypeStruct((1, LENGTH, HEADS, dim), jnp.bfloat16, sharding=place)
    run = partial(attention, implementation="mosaic", deterministic=deterministic)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(run(q, k, v).astype(jnp.float32) ** 2)

    with tempfile.TemporaryDirectory() as folder, devices.lowering_for(place.device_set.copy().pop()):
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q)
        with stderr.filtered(lambda _: b""):  # Mosaic looks for a disassembler elsewhere
            lowered.compile({"xla_gpu_autotune_level": "0"})
        for source in (file.read_text() for file in sorted(Path(folder).glob("*.ptx"))):
            (name,) = re.findall(r"\.entry (\w+)_mosaic_gpu_kernel", source)
            # jax 0.10 does not name a kernel that adds to what is there.
            yield name.removeprefix("attention_").replace("new_body", "gradients"), source


def longest_loop(source: str) -> list[str]:
    """The names of the instructions of the innermost loop with products that has the most of them."""
    found: list[list[str]] = []
    names: list[str] = []
    labels: dict[str, int] = {}
    for line in listing(source, "sm_90a").splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif one := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)(.*);", line):
            names.append(one[1])
            back = re.search(r"\.L_x_\d+", one[2]) if one[1] == "BRA" else None
            if back and back[0] in labels:
                found.append(names[labels[back[0]] :])
    inner = [loop for loop in found if "EXIT" not in loop]
    return max(inner, key=lambda loop: sum(name.startswith("HGMMA") for name in loop))


def main(target: str = "h200-141gb") -> None:
    if gpu_of(target).compute_capability != "9.0":
        raise UserError(f"target {target}: the Mosaic kernels are for compute capability 9.0, as h200-141gb's")
    print("| heads of | kernel | block | instructions | products | cycles to begin them | of the tensor cores |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for dim in (64, 128):
        for deterministic in (False, True):
            for of, source in sources(target, dim, deterministic=deterministic):
                blocks = usual("mosaic", of, dim, 2)
                loop = longest_loop(source)
                products = sum(name.startswith("HGMMA") for name in loop)
                cycles = PRODUCTS[of] * 2 * blocks.queries * blocks.keys * dim / OPERATIONS
                size = f"{blocks.queries} x {blocks.keys}"
                print(f"| {dim} | {of} | {size} | {len(loop)} | {products} | {2 * len(loop)} | {cycles:.0f} |")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
