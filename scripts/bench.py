"""`python scripts/bench.py step [CONFIG]`: the command `jaxmem bench`."""

import sys

from jaxmem.cli import main

if __name__ == "__main__":  # the processes that measure import this file too
    main(["bench", *sys.argv[1:]])
