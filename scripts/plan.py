"""`python scripts/plan.py CONFIG [key=value ...]`: the command `jaxmem plan`."""

import sys

from jaxmem.cli import main

main(["plan", *sys.argv[1:]])
