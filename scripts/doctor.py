"""`python scripts/doctor.py`: the command `jaxmem doctor`."""

import sys

from jaxmem.cli import main

main(["doctor", *sys.argv[1:]])
