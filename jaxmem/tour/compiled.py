"""Steps compiled for a target, as many side by side as there are cores; what an earlier visit compiled is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmem.config import Config
from jaxmem.errors import UserError


def plans(target: str, cfgs: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
    """Of each by its name what `jaxmem plan --json` says of its step, with no limit on memory."""
    from jaxmem.planning.targets import parse_target
    from jaxmem.search.compilers import Compilers, RefusedError

    names = {id(cfg): name for name, cfg in cfgs.items()}
    found = {}
    with Compilers(parse_target(target)) as compilers:
        for cfg, answer in compilers.each(compilers.plan, cfgs.values()):
            if isinstance(answer, RefusedError):
                raise UserError(f"{names[id(cfg)]}: {answer}")
            found[names[id(cfg)]] = answer
    return {name: found[name] for name in cfgs}
