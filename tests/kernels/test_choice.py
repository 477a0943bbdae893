"""Which implementation runs, and when its module is imported."""

import importlib
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.kernels import fused_attention, support, triton_launch
from jaxmem.kernels.support import triton_refusal
from jaxmem.kernels.triton_launch import load_programs


def test_a_call_that_names_no_implementation_runs_the_portable_one(monkeypatch):
    def implementation(value):
        return SimpleNamespace(attend=lambda q, *_: (q + value, jnp.zeros((1, 1, 2))))

    for name, value in (("blockwise", 1.0), ("triton", 2.0)):
        monkeypatch.setitem(fused_attention.IMPLEMENTATIONS, name, implementation(value))
    q = jnp.zeros((1, 2, 1, 8))
    assert fused_attention.attention(q, q, q)[0, 0, 0, 0] == 1
    assert fused_attention.attention(q, q, q, implementation="triton")[0, 0, 0, 0] == 2


def test_a_named_implementation_that_does_not_support_the_call_is_an_error():
    q = jnp.zeros((1, 2, 1, 8))
    with pytest.raises(ValueError, match="attention: q is float32; the cudnn implementation supports bfloat16"):
        fused_attention.attention(q, q, q, implementation="cudnn")


def test_a_call_that_is_not_supported_is_refused_before_its_sharding():
    """Else the advice to use jax.shard_map would lead to another error."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    q = jax.device_put(jnp.zeros((2, 2, 1, 8)), NamedSharding(mesh, PartitionSpec("d")))
    with pytest.raises(ValueError, match="attention: q is float32; the cudnn implementation supports bfloat16"):
        fused_attention.attention(q, q, q, implementation="cudnn")


@pytest.mark.parametrize(
    ("capability", "reason"), [(None, "no NVIDIA GPU"), (75, "compute capability is 7.5"), (80, None), (120, None)]
)
def test_triton_needs_a_gpu_from_ampere_on(capability, reason):
    why = triton_refusal(capability)
    assert why is None if reason is None else reason in why


def test_triton_needs_jax_triton(monkeypatch):
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda _: None)
    assert "requires jax-triton" in triton_refusal(90)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(ValueError, match="grouped_matmul: the triton implementation requires jax-triton"):
        load_programs("jaxmem.kernels.grouped_matmul.triton_programs")


def test_triton_programs_need_triton(monkeypatch):
    """jax-triton may be installed without it."""
    monkeypatch.delitem(sys.modules, "jaxmem.kernels.grouped_matmul.triton_programs", raising=False)
    monkeypatch.setitem(sys.modules, "jax_triton", SimpleNamespace(__spec__=ModuleSpec("jax_triton", None)))
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="grouped_matmul: the triton implementation requires jax-triton"):
        load_programs("jaxmem.kernels.grouped_matmul.triton_programs")


@pytest.mark.parametrize(("platform", "number"), [("gpu", 90), ("cpu", None)])
def test_the_capability_is_that_of_the_device(platform, number):
    assert support.capability(SimpleNamespace(platform=platform, compute_capability="9.0")) == number


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("NVIDIA RTX 5000 Ada Generation", 89),  # installed; its name begins like that of an RTX 5090
        ("NVIDIA RTX 5090 like NVIDIA RTX PRO 6000", 120),
        ("NVIDIA A100 like NVIDIA A10", 86),
        ("NVIDIA A100 like NVIDIA A100", 80),
        ("NVIDIA L40S like NVIDIA L4", 89),
        ("cpu", None),
    ],
)
def test_the_name_of_a_gpu_counts_only_if_it_is_not_installed(kind, number, monkeypatch):
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA RTX 5000 Ada Generation", compute_capability="8.9")
    monkeypatch.setattr(jax, "devices", lambda: [card])
    mesh = SimpleNamespace(abstract_device=SimpleNamespace(device_kind=kind))
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    assert support.capability() == number


def test_both_spellings_of_jax_triton(monkeypatch):
    """0.4 renames two arguments, and takes the unused parameters by name."""
    told = []

    def newer(*_, out_type, **options):
        told.append(options | {"outputs": out_type})
        return [jnp.zeros(x.shape, x.dtype) for x in out_type]

    def older(*_, out_shape, **options):
        told.append(options | {"outputs": out_shape})
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    kernel = lambda: None  # noqa: E731
    kernel.arg_names = ["x", "y", "unused", "s"]
    how = triton_launch.Launch(grid=(1,), static=None, in_place=(0,))
    array = jnp.zeros(4)
    monkeypatch.setattr(triton_launch, "_on_each_platform", lambda *_, gpu, **__: gpu)
    for call in (newer, older):
        monkeypatch.setattr(triton_launch, "_triton_call", lambda call=call: call)
        outputs = triton_launch.launch(kernel, [array], [jax.ShapeDtypeStruct((2,), jnp.float32)], how)
        assert [x.shape for x in outputs] == [(2,), (4,)]
    assert [options["input_output_aliases"] for options in told] == [{0: 1}, {0: 1}]
    assert told[0]["backend_options"] == {"enable_fp_fusion": True}
    assert "unused" in told[0]
    assert told[1]["enable_fp_fusion"] is True


def test_ptx_has_the_version_that_the_gpu_needs(monkeypatch):
    """Not Triton's newest, which needs a newer ptxas. The compute capability is passed by jax-triton 0.3, the target by
    0.4."""
    versions = []

    def compiled(module, backend, options, *_):
        versions.append(options.ptx_version)
        return SimpleNamespace(name="kernel", shared_mem_bytes=0)

    library = importlib.import_module("jax_triton.triton_lib")
    monkeypatch.setattr(library, "compile_ttir_inplace", compiled)
    triton_launch._triton_call.__wrapped__()
    for target in (80, 120, SimpleNamespace(arch=103), SimpleNamespace(arch=110)):
        library.compile_ttir_inplace(None, None, library.cb.CUDAOptions(), target)
    assert versions == [87, 87, 88, 90]


@pytest.mark.exhaustive
def test_an_implementation_is_imported_when_it_is_called():
    """And an operation when it is used."""
    code = """
import sys
import jaxmem.kernels
assert not [name for name in sys.modules if name.startswith("jaxmem.kernels.")]
from jaxmem.kernels import adam8_update, attention
loaded = {name.rpartition(".")[2] for name in sys.modules if name.startswith("jaxmem.kernels.")}
assert not loaded & {"triton", "ring", "blockwise", "reference", "flash"}, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)
