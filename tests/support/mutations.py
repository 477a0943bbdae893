"""Do the tests notice? Faults planted in the numerics one by one, in a copy, and the tests that must fail.

    python -m tests.support.mutations            # all; ten seconds each on one core
    python -m tests.support.mutations lora rope  # some

Each is a line that a tired person might write. One that no test notices is a hole in the tests: exit code 1.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COPIED = ("jaxmem", "kernels", "tests", "scripts", "configs", "docs", "pyproject.toml")


class Fault(NamedTuple):
    what: str
    file: str
    right: str
    wrong: str
    tests: str  # which must fail


FAULTS = {
    "adam": Fault(
        "the wrong sign in the bias correction of Adam's moments",
        "jaxmem/optim/rules/plain.py",
        "return 1 - jnp.float32(beta) ** count.astype(jnp.float32)",
        "return 1 + jnp.float32(beta) ** count.astype(jnp.float32)",
        "tests/optim/test_quantized.py::test_quantized_adam_follows_adam",
    ),
    "lora": Fault(
        "LoRA without its scale",
        "jaxmem/config/adapter.py",
        "LowRank(rank, alpha, alpha / (math.sqrt(rank) if settings.rslora else rank))",
        "LowRank(rank, alpha, 1.0)",
        "tests/adapters/test_lora.py",
    ),
    "galore": Fault(
        "a projection that is never found anew",
        "jaxmem/optim/rules/galore.py",
        "due = turn | (context.count == 1)",
        "due = context.count == 1",
        "tests/optim/test_galore.py::test_layers_refresh_their_projections_at_different_steps",
    ),
    "segments": Fault(
        "packed documents that see each other",
        "jaxmem/models/attention.py",
        '"segment_ids": ids, "sinks"',
        '"segment_ids": None, "sinks"',
        "tests/models/test_decoder.py::test_packed_documents_do_not_attend_to_each_other",
    ),
    "micro-batch": Fault(
        "the last micro-batch dropped",
        "jaxmem/step/gradients.py",
        "looped = (batch, keys) if local is None else",
        "looped = jax.tree.map(lambda x: x[:-1], (batch, keys)) if local is None else",
        "tests/step/test_step.py::test_micro_batches_add_up_to_the_large_batch",
    ),
    "axes": Fault(
        "two mesh axes exchanged in a rule: what the optimizer holds is split as for a lower ZeRO stage",
        "jaxmem/sharding/table.py",
        "optimizer=state if zero >= 1 else tensor",
        "optimizer=tensor if zero >= 1 else state",
        "tests/step/test_layouts.py::test_every_table_covers_the_same_axes "
        "tests/step/test_layouts.py::test_every_layout_trains_as_one_device_in_the_bytes_of_its_table",
    ),
    "mask": Fault(
        "the mask of the loss counted twice",
        "jaxmem/step/objective.py",
        '"count": jnp.sum(mask)}',
        '"count": 2 * jnp.sum(mask)}',
        "tests/step/test_step.py::test_the_update_is_adamw_on_clipped_mean_gradients",
    ),
    "rope": Fault(
        "a rotation that is none",
        "jaxmem/models/rope.py",
        "b * cos + a * sin",
        "b * cos - a * sin",
        "tests/models/test_rope.py",
    ),
    "window": Fault(
        "a window that sees one key too many",
        "kernels/fused_attention/arguments.py",
        "seen & (distance < window)",
        "seen & (distance <= window)",
        "tests/models/test_decoder.py::test_a_window_masks_earlier_tokens",
    ),
    "rounding": Fault(
        "stochastic rounding that always rounds down",
        "jaxmem/quant/precision.py",
        "noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)",
        "noise = jnp.zeros(x.shape, jnp.uint32)",
        "tests/quant/test_precision.py::test_stochastic_rounding_returns_a_neighbour_and_is_unbiased",
    ),
    "dropout": Fault(
        "what dropout keeps is not made larger",
        "jaxmem/models/layers.py",
        "x / (1.0 - rate)",
        "x",
        "tests/models/test_decoder.py::test_dropout_scales_what_it_keeps",
    ),
    "smoothing": Fault(
        "label smoothing the wrong way round",
        "jaxmem/models/losses.py",
        "partition - (1.0 - s) * label_logit - s * mean()",
        "partition - s * label_logit - (1.0 - s) * mean()",
        "tests/models/test_losses.py",
    ),
}


def copy_code(to: Path) -> Path:
    """A copy of what tests of changed code need."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def caught(fault: Fault, at: Path) -> bool:
    """Whether a test fails with this fault planted; the copy is as it was afterwards."""
    file = at / fault.file
    right = file.read_text()
    if right.count(fault.right) != 1:
        raise SystemExit(f"{fault.file} has {right.count(fault.right)} times {fault.right!r}; once is needed")
    file.write_text(right.replace(fault.right, fault.wrong))
    try:
        ended = _tested(fault, at)
    finally:
        file.write_text(right)
    if ended.returncode not in (0, 1):  # 1: tests failed
        raise SystemExit(f"{fault.tests}: could not be run\n{ended.stdout[-2000:]}")
    return ended.returncode == 1


def _tested(fault: Fault, at: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *fault.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(at), "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)}; all by default")
    names = parser.parse_args().names or list(FAULTS)
    if unknown := [name for name in names if name not in FAULTS]:
        parser.error(f"no fault {unknown[0]!r}; known: {', '.join(FAULTS)}")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        at = copy_code(Path(folder))
        for name in names:
            found = caught(FAULTS[name], at)
            missed += not found
            print(f"{'caught' if found else 'MISSED'}  {name}: {FAULTS[name].what}", flush=True)
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
