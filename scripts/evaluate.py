"""`python scripts/evaluate.py RUN`: the command `jaxmem evaluate`."""

import sys

from jaxmem.cli import main

main(["evaluate", *sys.argv[1:]])
