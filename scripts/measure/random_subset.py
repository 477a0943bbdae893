"""A random subset of the weights, beside low-rank adapters of as many parameters: see `jaxmem.lab.tour.subset`.

python scripts/measure/random_subset.py
"""

from __future__ import annotations

from jaxmem.lab.tour.subset import RATES, STEPS, learnt

if __name__ == "__main__":
    print(f"{STEPS} updates, the best of the rates {', '.join(map(str, RATES))}")
    for row in learnt():
        held = f"state {row['state'] / 1024:.0f} KiB, temporaries {row['temporaries'] / 1024:.0f} KiB"
        print(f"{row['name']}: {row['learns']:,} numbers learn, {held}, accuracy {row['accuracy']:.3f}")
