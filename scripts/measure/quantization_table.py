"""Every format's bits, error and time, as the table in docs/quantization.md.

python scripts/measure/quantization_table.py [--json]
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp

from jaxmem.machine.devices import stay_on_cpu_without_gpu
from jaxmem.quant import FORMATS, quantize

SHAPE = (4096, 4096)
ROUNDS = 5


def seconds(call, *args):
    jax.block_until_ready(call(*args))  # compiles
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        taken.append(time.perf_counter() - start)
    return min(taken)


def rows():
    x = jax.random.normal(jax.random.key(0), SHAPE, jnp.float32)
    for name in FORMATS:
        given = jnp.abs(x) if name.startswith("udynamic") else x
        for double in (False, True):
            make = jax.jit(lambda x, name=name, double=double: quantize(x, name, 64, double_quant=double))
            back = jax.jit(lambda q: q.dequantize())
            q = make(given)
            error = back(q) - given
            yield {
                "format": name,
                "double": double,
                "bits": q.nbytes * 8 / x.size,
                "mean_error": float(jnp.mean(jnp.abs(error))),
                "mean_square_error": float(jnp.mean(error**2)),
                "quantize_gb_s": 4 * x.size / seconds(make, given) / 1e9,
                "dequantize_gb_s": 4 * x.size / seconds(back, q) / 1e9,
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    stay_on_cpu_without_gpu()
    found = list(rows())
    if wanted.json:
        device = jax.devices()[0].device_kind
        print(
            json.dumps({"device": device, "jax": jax.__version__, "shape": SHAPE, "block": 64, "rows": found}, indent=2)
        )
        return
    print("| format | constants | bits | mean error | mean square | to GB/s | from GB/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in found:
        print(
            f"| {row['format']} | {'8 bits' if row['double'] else 'float32'} | {row['bits']:.3f} "
            f"| {row['mean_error']:.4f} | {row['mean_square_error']:.5f} "
            f"| {row['quantize_gb_s']:.2f} | {row['dequantize_gb_s']:.2f} |"
        )


if __name__ == "__main__":
    main()
