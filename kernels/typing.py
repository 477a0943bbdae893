"""Names for types of values that exist only while a kernel is traced."""

from typing import Any

Tree = Any  # nested tuples, dicts and dataclasses of arrays
Index = Any  # an integer, known or traced
