"""`python scripts/bench.py step [CONFIG]`: the command `jaxmem bench`."""

import sys

from jaxmem.cli import main

main(["bench", *sys.argv[1:]])
