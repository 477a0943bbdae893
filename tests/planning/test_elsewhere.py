"""Compiling for GPUs that are not here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.models import vocab_slices
from jaxmem.planning import compile as compiling
from jaxmem.planning.breakdown import Breakdown
from jaxmem.planning.buffers import read_allocations, sizes_of
from jaxmem.planning.compile import (
    UNTIMED,
    compile_all,
    compile_elsewhere,
    compile_program,
    replicated_arrays,
    without_cache,
)
from jaxmem.planning.hlo import HloProto, read_module, total_flops
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.sharding import host
from jaxmem.step.programs import program
from tests.planning.conftest import SMALL, config

Lowered = jax.stages.Lowered


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    """Products, a reduction, a donated argument: of each something that a kernel would be made for."""
    place = jax.sharding.SingleDeviceSharding(target_devices(parse_target("h100-80gb"), 2**33)[0])
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=place)
    return jax.jit(lambda w, x: w - jax.nn.softmax(x @ w) @ x, donate_argnums=0).lower(x, x)


def test_it_ends_before_code_is_made_with_the_same_bytes(lowered: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    with without_cache():
        made = lowered.compile(compiler_options=UNTIMED).memory_analysis()
        ended: list[str] = []
        monkeypatch.setattr(Lowered, "compile", _watched(Lowered.compile, ended))
        module, assignment = compile_elsewhere(lowered)
    assert len(ended) == 1, "XLA went on and made the code: right, and five times as slow"
    assert made is not None
    sizes = sizes_of(assignment, on_host=False)
    assert sizes == {
        "arguments": made.argument_size_in_bytes,
        "outputs": made.output_size_in_bytes,
        "aliased": made.alias_size_in_bytes,
        "temporaries": made.temp_size_in_bytes,
        "constants": sizes["constants"],  # jax does not count them
    }
    assert made.alias_size_in_bytes == 256 * 256 * 4
    assert {"parameter", "fusion"} <= {one.opcode for one in read_module(module).walk()}


def test_arrays_that_a_function_captures_are_in_memory() -> None:
    """As constants of the program, such as the teacher of a script's loss."""
    place = jax.sharding.SingleDeviceSharding(target_devices(parse_target("h100-80gb"), 2**33)[0])
    captured = np.arange(2**22, dtype=np.float32).reshape(2048, 2048)
    x = jax.ShapeDtypeStruct((8, 2048), jnp.float32, sharding=place)
    step = compile_program(jax.jit(lambda x: (x @ captured).sum()).lower(x), here=False)
    assert step.total >= captured.nbytes
    buffers = Breakdown(step.module, read_allocations(step.module, step.assignment))
    assert buffers.of_kind("constant") >= captured.nbytes


def test_joined_weights_have_a_gradient_on_every_jax(capfd: pytest.CaptureFixture) -> None:
    """For which jax 0.11 has no default kernel, and says so in a page."""
    place = jax.sharding.SingleDeviceSharding(target_devices(parse_target("h100-80gb"), 2**33)[0])
    turned, key, x = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)
        for shape in ((16, 512, 32, 64), (8192, 1024), (8192, 4096))
    )

    def gradient(x: jax.Array, a: jax.Array, b: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q = jnp.concatenate([a, b], -1).reshape(8192, 4096)
        return jnp.concatenate([x.T @ q, x.T @ k, x.T @ v], 1)

    lowered = jax.jit(gradient).lower(x, turned, turned, key, key)
    with replicated_arrays():
        compiled = compile_program(lowered, here=False)
    assert total_flops(compiled.module) == 2 * 8192 * 4096 * 6144
    assert "config" not in capfd.readouterr().err


def test_what_xla_refuses_is_said(lowered: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(Lowered, "compile", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compile_elsewhere(lowered)


@pytest.mark.exhaustive
def test_frozen_matrices_that_stages_share_are_drawn_for_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA fails to compile the loop over slices of a matrix if the matrix has shards in host memory."""
    monkeypatch.setattr(vocab_slices, "SLICE_SIZE", 1024)
    monkeypatch.setattr(host, "CHUNK_ELEMENTS", 1024)
    cfg = config(
        model={**SMALL, "vocab": 512},
        batch={"global_size": 8, "accumulate": 2},
        mesh={"stage": 2},
        memory={"remat": "full", "offload": "frozen"},
        adapter={"kind": "lora"},
    )
    target = parse_target("h100-80gb:2")
    built = program(cfg, target_devices(target, target.memory))
    compiled = compile_program(built.lower_initialise(), here=False)
    stored = jax.tree.leaves(built.spec.host_state.params)
    assert compiled.sizes["outputs"] < compiled.host_total
    assert compiled.host_total >= sum(x.size * x.dtype.itemsize for x in stored) // 2


def _watched(compile_: Any, ended: list[str]) -> Any:
    def watched(*arguments: Any, **options: Any) -> Any:
        try:
            return compile_(*arguments, **options)
        except jax.errors.JaxRuntimeError as error:
            ended.append(str(error))
            raise

    return watched


def test_all_kernels_are_tried_if_a_matmul_has_no_default_kernel():
    """With the options that were given."""
    seen = []

    class Lowered:
        def compile(self, compiler_options):
            seen.append(compiler_options)
            if compiler_options["xla_gpu_autotune_level"] == "0":
                raise jax.errors.JaxRuntimeError("No supported config found for HLO: %gemm_fusion")
            dumped = Path(compiler_options["xla_dump_to"], "x.after_optimizations.hlo.pb")
            dumped.write_bytes(HloProto().SerializeToString())
            raise jax.errors.JaxRuntimeError("cannot read no-cache-of-kernels")

    compile_elsewhere(Lowered(), {"xla_option": True})
    assert [options["xla_gpu_autotune_level"] for options in seen] == ["0", "1"]
    assert all(options["xla_option"] for options in seen)


def test_a_program_from_jax_s_cache_without_assignment_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs may return it."""
    lowered = jax.jit(lambda x: (x @ x, x.sum())).lower(jnp.ones((64, 64)))
    right = compile_program(lowered, here=True)
    restored = SimpleNamespace(
        memory_analysis=lambda: SimpleNamespace(
            serialized_buffer_assignment_proto=b"",
            argument_size_in_bytes=right.sizes["arguments"],
            output_size_in_bytes=right.sizes["outputs"],
            alias_size_in_bytes=right.sizes["aliased"],
            temp_size_in_bytes=right.sizes["temporaries"],
        ),
        runtime_executable=jax.jit(lambda x: x).lower(1.0).compile().runtime_executable,
    )

    def again(_: Any, **__: Any) -> tuple[bytes, bytes]:
        assert not jax.config.jax_enable_compilation_cache
        return right.serialized_module, right.assignment

    lowered = SimpleNamespace(as_text=lowered.as_text, compile=lambda **_: restored)
    monkeypatch.setattr(compiling, "compile_elsewhere", again)
    step, totals = compile_all(lowered, {"evaluate": lambda: lowered}, here=True)
    for program_ in (step, compile_program(lowered, here=True)):
        assert (program_.serialized_module, program_.assignment) == (right.serialized_module, right.assignment)
        assert program_.executable is restored
        assert program_.total == right.total > 0
    assert totals == {"evaluate": right.total}
