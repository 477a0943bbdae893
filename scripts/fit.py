"""`python scripts/fit.py CONFIG [key=value ...] --target T`: the command `jaxmem fit`."""

import sys

from jaxmem.cli import main

main(["fit", *sys.argv[1:]])
