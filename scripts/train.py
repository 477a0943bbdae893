"""`python scripts/train.py CONFIG [key=value ...]`: the command `jaxmem train`."""

import sys

from jaxmem.cli import main

main(["train", *sys.argv[1:]])
