"""`python scripts/bench.py step [CONFIG]`: the command `jaxmem bench`."""

import sys

from jaxmem.cli import main

if __name__ == "__main__":  # what is measured apart starts with this file too
    main(["bench", *sys.argv[1:]])
