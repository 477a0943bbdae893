"""Small runs of `jaxmem train`, for their results alone: nothing of them is printed or kept."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem.config import load_config

if TYPE_CHECKING:
    from jaxmem.training.run import Result

# A language model of bytes that learns in seconds.
DECODER: Mapping[str, Any] = {
    "family": "decoder", "vocab": 257, "layers": 2, "embed": 64, "mlp": 192, "heads": 4, "kv_heads": 4, "head_dim": 16,
}  # fmt: skip


def trained(given: Mapping[str, Any], overrides: Sequence[str] = (), place: str | Path | None = None) -> Result:
    """What `jaxmem train` comes to on one device; its directory is `place`, or gone."""
    import jax

    from jaxmem.training.run import run

    steps = given["train"]["steps"]
    train = {**given["train"], "evaluate_every": steps, "log_every": steps}
    with tempfile.TemporaryDirectory() as gone, contextlib.redirect_stdout(io.StringIO()):
        run_at = Path(place or Path(gone) / "run")
        own = {"name": run_at.name, "output": str(run_at.parent), "train": train}
        return run(load_config({**given, **own}, overrides), jax.devices()[:1])
