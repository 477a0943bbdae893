"""`python scripts/generate.py RUN --prompt TEXT`: the command `jaxmem generate`."""

import sys

from jaxmem.cli import main

main(["generate", *sys.argv[1:]])
