"""The stop of fusion: what operations move one by one is counted, and a table without a compiler's numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmem.errors import UserError
from scripts.course import STOPS, fusion
from scripts.course.fusion import one_by_one


def test_each_operation_reads_and_writes() -> None:
    x = jnp.zeros((64, 256))
    moved = one_by_one(jax.make_jaxpr(lambda x: jnp.exp(x) * x - x)(x).jaxpr)
    each = 4 * x.size
    assert moved == (2 + 3 + 3) * each
    silu = one_by_one(jax.make_jaxpr(jax.nn.silu)(x).jaxpr)
    assert silu >= (2 + 3) * each  # within functions that jax calls by name


def test_rows_and_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_formula(_: Any) -> Any:
        for name, moved in (
            ("rms_norm", 4),
            ("rms_norm, with backward", 4),
            ("swiglu", 2),
            ("swiglu, with backward", 2),
        ):
            yield {"chain": name, **dict(zip(fusion.MOVED, (10_000.0, moved, 2), strict=True)), "kernels": 1}

    monkeypatch.setattr(fusion, "chains", by_formula)
    monkeypatch.setattr(fusion, "_chunked", lambda name, _: {"in chunks": name, "activations, GiB": 1.0})
    found = fusion.measure("rtx4090-24gb")
    assert len(found.tables[0].rows) == 4
    assert [row["in chunks"] for row in found.tables[1].rows] == list(fusion.CHUNKS)


def test_a_cpu_has_no_such_kernels() -> None:
    with pytest.raises(UserError, match="fusion does not support --target cpu:8: it has no GPU"):
        STOPS["fusion"].visit("cpu:8")
