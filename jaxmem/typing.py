"""Names for types that many modules share and Python cannot describe more exactly."""

from collections.abc import Mapping
from typing import Any

JsonDict = dict[str, Any]  # an object of JSON or YAML: a config, a row of a log, an entry of a report
JsonView = Mapping[str, Any]  # the same, read and never changed
Tree = Any  # nested dicts, tuples and dataclasses with arrays, shapes or logical axes as leaves
AxesTree = Any  # a tree of the logical axes of each leaf
