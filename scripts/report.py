"""`python scripts/report.py RUN`: the command `jaxmem report`."""

import sys

from jaxmem.cli import main

main(["report", *sys.argv[1:]])
