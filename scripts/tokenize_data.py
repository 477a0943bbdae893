"""`python scripts/tokenize_data.py CONFIG --output DIR`: the command `jaxmem tokenize`."""

import sys

from jaxmem.cli import main

main(["tokenize", *sys.argv[1:]])
