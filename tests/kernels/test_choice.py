"""Which implementation runs, and when its module is imported."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxmem.kernels.choice import Operation, triton_refusal


def named(name):
    return SimpleNamespace(name=name)


OPERATION = Operation("op", {"plain": named("plain"), "fused": named("fused")}, "plain")


def test_a_call_that_names_no_implementation_runs_the_portable_one():
    assert OPERATION.run(None, lambda module: module.name, ()) == "plain"
    assert OPERATION.run("fused", lambda module: module.name, ()) == "fused"


def test_a_named_implementation_that_does_not_support_the_call_is_an_error():
    with pytest.raises(ValueError, match="op: fused needs more rows"):
        OPERATION.run("fused", lambda module: module.name, (), lambda name: f"{name} needs more rows")


@pytest.mark.parametrize(
    ("capability", "reason"), [(None, "no NVIDIA GPU"), (75, "compute capability is 7.5"), (80, None), (120, None)]
)
def test_triton_needs_a_gpu_from_ampere_on(capability, reason):
    why = triton_refusal(capability)
    assert why is None if reason is None else reason in why


def test_an_implementation_is_imported_when_it_is_called():
    """And an operation when it is used."""
    code = """
import sys
import jaxmem.kernels
assert not [name for name in sys.modules if name.startswith("jaxmem.kernels.")]
from jaxmem.kernels import adam8_update, attention
loaded = {name.rpartition(".")[2] for name in sys.modules if name.startswith("jaxmem.kernels.")}
assert not loaded & {"mosaic", "triton", "ring", "blockwise", "reference", "flash"}, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
