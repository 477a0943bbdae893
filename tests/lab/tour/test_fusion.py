"""The stop of fusion: what operations move one by one is counted, and a table without a compiler's numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxmem.errors import UserError
from jaxmem.lab.tour import fusion
from jaxmem.lab.tour.fusion import by_chain, one_by_one


def test_each_operation_reads_and_writes() -> None:
    x = jnp.zeros((64, 256))
    moved = one_by_one(jax.make_jaxpr(lambda x: jnp.exp(x) * x - x)(x).jaxpr)
    each = 4 * x.size
    assert moved == (2 + 3 + 3) * each
    silu = one_by_one(jax.make_jaxpr(jax.nn.silu)(x).jaxpr)
    assert silu >= (2 + 3) * each  # within functions that jax calls by name


def test_rows_and_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_formula(_: Any) -> Any:
        for name, moved in (("rms_norm, with the residual", 4), ("swiglu", 2)):
            for back in (False, True):
                yield {"name": name, "back": back, "apart": 10 * 10**9, "moved": moved, "least": 2, "kernels": 1}

    monkeypatch.setattr(fusion, "chains", by_formula)
    monkeypatch.setattr(fusion, "_chunked", lambda name, _: {"name": name, "activations": 2**30, "total": 2**31})
    found = by_chain("rtx4090-24gb")
    assert len(found.tables[0].rows) == 4
    assert [row["name"] for row in found.tables[1].rows] == list(fusion.CHUNKS)
    assert "One by one these chains move 40.0 GB" in found.note
    assert "2.00 times the least" in found.note


def test_a_cpu_has_no_such_kernels() -> None:
    with pytest.raises(UserError, match="tour fusion reads what a GPU's kernels move; give one, as h100-80gb"):
        by_chain("cpu:8")
