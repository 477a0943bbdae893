"""Training a random subset of the weights, beside low-rank adapters: see `jaxmem.lab.tour.random_subset`.

python scripts/measure/random_subset.py
"""

from __future__ import annotations

from jaxmem.lab.tour.random_subset import RATES, STEPS, compare
from jaxmem.lab.tour.table import cell

if __name__ == "__main__":
    print(f"{STEPS} updates, the best of the learning rates {', '.join(map(str, RATES))}")
    for row in compare():
        held = f"state {cell(row['state'], 'bytes')}, temporary buffers {cell(row['temporary buffers'], 'bytes')}"
        print(f"{row['trainable']}: {row['parameters'] or 0:,} parameters, {held}, accuracy {row['accuracy']:.3f}")
