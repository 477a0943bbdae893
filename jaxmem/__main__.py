"""`python -m jaxmem` is the command `jaxmem`."""

from jaxmem.cli import main

main()
