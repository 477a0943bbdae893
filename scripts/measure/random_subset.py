"""Training a random subset of the weights at several learning rates: see `jaxmem.lab.tour.random_subset`.

python scripts/measure/random_subset.py
"""

from jaxmem.lab.tour.random_subset import STEPS, compare
from jaxmem.lab.tour.table import Table

if __name__ == "__main__":
    rates = (1e-3, 1e-2, 1e-1)
    rows = list(compare(rates))
    print(Table(f"{STEPS} updates, the best of the learning rates {rates}", rows).markdown())
