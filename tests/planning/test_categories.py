"""What the core computes says what it is for in the names of the compiled step; shapes are the fallback."""

import re
from pathlib import Path

import jax
import pytest

from jaxmem.config import load_config
from jaxmem.planning.breakdown import Breakdown, known_shapes
from jaxmem.planning.buffers import read_allocations
from jaxmem.planning.compile import compile_program
from jaxmem.planning.targets import local_target, parse_target, target_devices
from jaxmem.step.programs import program

CONFIGS = Path(__file__).parents[2] / "configs"
MAX_SHARE = 0.02


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["digits-mlp", "digits-vit"])
def test_few_bytes_of_a_config_are_classified_by_their_shapes(name: str) -> None:
    file = CONFIGS / f"{name}.yaml"
    named = re.search(r"--target (\S+)", file.read_text(encoding="utf-8"))
    target = parse_target(named[1]) if named else local_target(jax.devices()[:1])
    cfg = load_config(file)
    if cfg.memory.remat == "auto":  # which compiles several steps
        cfg = cfg.replace(memory={"remat": "full"})
    built = program(cfg, target_devices(target, target.memory))
    step = compile_program(built.lower_step(), here=target.is_here, runs=False)
    breakdown = Breakdown(step.module, read_allocations(step.module, step.assignment), known_shapes(built))
    share = sum(buffer.size for buffer in breakdown.buffers if buffer.by_shape) / step.total
    print(f"{name}: {share:.2%} of {step.total:,} bytes by shape")
    assert share < MAX_SHARE
