"""What XLA makes by itself of norms, gates and rotations: the bytes that its kernels read and write, in the compiled
module of a GPU that need not be here, beside the least that any kernel could. The table of docs/kernels.md.

    python scripts/measure/fusion_bytes.py [TARGET]        # half a minute

8,192 tokens of Llama 3 8B in bfloat16. `with backward`: both passes, as where a layer is made again for its gradient.
"""

from __future__ import annotations

import sys

from jaxmem.machine import devices

devices.stay_on_cpu_without_gpu(only_compile=True)

from jaxmem.lab.tour.fusion import chains  # noqa: E402
from jaxmem.planning.targets import parse_target, target_devices  # noqa: E402


def main(target: str = "h100-80gb") -> None:
    print("| | pass | kernels | MB moved | least | |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for row in chains(target_devices(parse_target(target), 8 * 2**30)[0]):
        moved, least, of = row["moved"], row["least"], "with backward" if row["back"] else "forward"
        numbers = f"{row['kernels']} | {moved / 1e6:.0f} | {least / 1e6:.0f} | {moved / least:.2f} x"
        print(f"| {row['name']} | {of} | {numbers} |")


if __name__ == "__main__":
    main(*sys.argv[1:])
