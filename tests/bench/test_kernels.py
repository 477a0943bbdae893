"""The kernels' benchmark works without a GPU, says what it could not run, and notices a wrong implementation."""

import jax.numpy as jnp
import pytest

from jaxmem.bench import kernels
from jaxmem.errors import UserError
from jaxmem.kernels import attention as operation
from jaxmem.kernels.attention import IMPLEMENTATIONS


def test_every_contestant_has_a_row(monkeypatch):
    def never(*_):
        raise ValueError("attention: never")

    def wrong(q, k, v, options, extras):
        out, lse = operation(q, k, v, causal=options.causal, return_lse=True, implementation="reference")
        return out + jnp.ones((), q.dtype), lse

    names = {"reference": IMPLEMENTATIONS["reference"], "never": never, "wrong": wrong}
    for name in IMPLEMENTATIONS.copy():
        monkeypatch.delitem(IMPLEMENTATIONS, name)
    for name, function in names.items():
        monkeypatch.setitem(IMPLEMENTATIONS, name, function)
    found = kernels.bench_kernels(["long"], seconds=0.01)
    assert found["dry_run"]
    assert all(number > 0 for number in found["ceilings"].values())
    rows = {(row["contestant"], row.get("pass")): row for row in found["rows"]}
    assert rows["never", None]["why_not"] == "attention: never"
    assert rows["wrong", "forward"]["error"] > 20
    assert rows["jax.nn xla", "backward"]["tflops"] > 0
    assert "why_not" in rows["torch flash", None]


def test_the_reference_is_right():
    shape = kernels._cut(kernels.SHAPES["mistral-7b"])
    assert kernels._error(shape, "reference") < 2


def test_an_unknown_shape_names_the_nearest():
    with pytest.raises(UserError, match=r"no shape 'lomg'.*long"):
        kernels.bench_kernels(["lomg"])
