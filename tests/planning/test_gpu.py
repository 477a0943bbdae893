"""Plans for GPUs that are not here, from the program that would run there."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest

from jaxmem.planning.accuracy import published_range
from jaxmem.planning.hlo import BufferAssignmentProto
from jaxmem.planning.result import Plan, plan
from jaxmem.planning.targets import parse_target
from jaxmem.planning.timeline import timeline
from tests.planning.conftest import SMALL, config

ROOT = Path(__file__).parents[2]
# Large enough that XLA's alignment of buffers to 128 bytes is no part of the matter.
MODEL = {**SMALL, "layers": 4, "embed": 256, "mlp": 512, "head_dim": 64}
CONFIG = config(
    model=MODEL,
    data={"sequence_length": 256},
    batch={"global_size": 16},
    mesh={"fsdp": 4, "tensor": 2},
    memory={"remat": "full"},
)


@pytest.fixture(scope="module")
def planned() -> Plan:
    before = jax.live_arrays()  # held, so that none is freed meanwhile
    found = plan(CONFIG, "h100-80gb:2x4")
    assert len(jax.live_arrays()) == len(before), "a plan allocates no array"
    return found


@pytest.mark.exhaustive
def test_the_parts_are_the_whole(planned: Plan) -> None:
    parts = dict(planned.bytes_per_device)
    total = parts.pop("total")
    held = planned.compiled_step.sizes
    assert sum(parts.values()) == total
    assert total == held["arguments"] + held["outputs"] - held["aliased"] + held["temporaries"] + held["constants"]
    assert parts["other"] < 0.05 * total
    assert sum(item.size for item in planned.breakdown.buffers if item.category == "parameters") == parts["parameters"]


@pytest.mark.exhaustive
def test_the_peak_is_the_one_that_xla_allocates_for(planned: Plan) -> None:
    """So the lifetimes are XLA's own; what its packing could not use is a part of `other`."""
    temporaries = [item for item in planned.breakdown.buffers if item.kind not in ("argument", "result", "constant")]
    gaps = planned.breakdown.of_kind("gaps between buffers")
    held = sum(item.size for item in temporaries) - gaps
    assert held + gaps == planned.compiled_step.sizes["temporaries"]
    assert held == pytest.approx(_simulated_peak(planned.compiled_step.assignment), rel=0.01)


@pytest.mark.exhaustive
def test_attention_is_that_of_cudnn(planned: Plan) -> None:
    """Whose kernel the default of this GPU is, for packed rows too."""
    kernels = {one.proto.custom_call_target for one in planned.compiled_step.module.walk()}
    assert any(kernel.startswith("__cudnn$fmha") for kernel in kernels)
    assert planned.step_as_json()["kernels"]["memory.attention"]["implementation"] == "cudnn"


@pytest.mark.exhaustive
def test_states_are_sharded_over_all_devices(planned: Plan) -> None:
    count = planned.program.model.parameter_count
    assert planned.bytes_per_device["optimizer"] == pytest.approx(8 * count / 8, rel=0.02)
    assert planned.bytes_per_device["parameters"] == pytest.approx(4 * count / 8, rel=0.02)


@pytest.mark.exhaustive
def test_no_stack_of_weights_is_held_twice(planned: Plan) -> None:
    """Also of `down` and `o`, which are gathered along their last dimension: each layer is turned by itself."""
    assert planned.breakdown.of_kind("weights: copies") == 0


@pytest.mark.exhaustive
def test_no_schedule_is_faster_than_the_roofline(planned: Plan) -> None:
    assert planned.estimated_step_seconds is not None
    assert planned.estimated_step_seconds >= planned.timeline.roofline > 0
    # Each layer's forward pass runs twice; of the ideal 3 parts these are 4.
    assert 1.0 < planned.timeline.flops / planned.ideal_flops_per_device < 1.5


@pytest.mark.exhaustive
def test_the_printed_plan_says_how_published_runs_compare(planned: Plan) -> None:
    compared = published_range(planned.target)
    assert compared is not None
    assert f"{compared} than planned" in " ".join(str(planned).split())


@pytest.mark.exhaustive
def test_a_slower_gpu_and_a_slower_network_take_longer(planned: Plan) -> None:
    module, slower = planned.compiled_step.module, parse_target("a100-80gb:8").gpu
    on_one_host, on_two = (timeline(module, slower, 8, per_host) for per_host in (8, 4))
    faster_on_one_host = timeline(module, planned.target.gpu, 8, 8)
    assert faster_on_one_host.roofline < on_one_host.roofline
    assert on_one_host.network.seconds < on_two.network.seconds


@pytest.mark.exhaustive
def test_devices_stand_host_by_host(planned: Plan) -> None:
    """So that the mesh's last axes, whose devices talk most, lie within a host."""
    devices = list(planned.program.layout.mesh.devices.flat)
    assert [device.id for device in devices] == list(range(8))
    assert [device.process_index for device in devices] == [0, 0, 0, 0, 1, 1, 1, 1]


WITH_CODE = """
import json
from jaxmem.machine import devices
devices.use_cpu_without_gpu(only_compile=True)
import jax
from jaxmem.planning.compile import UNTIMED, compile_program, without_cache
from jaxmem.planning.targets import parse_target, target_devices
target = parse_target("rtx4090-24gb")
place = jax.sharding.SingleDeviceSharding(target_devices(target, target.memory)[0])
x = jax.ShapeDtypeStruct((256, 256), "float32", sharding=place)
lowered = jax.jit(lambda w, x: (w - jax.nn.softmax(x @ w) @ x).sum(0), donate_argnums=0).lower(x, x)
planned = compile_program(lowered, here=False)
with without_cache():
    held = lowered.compile(compiler_options=UNTIMED).memory_analysis()
made = (f"{part}_size_in_bytes" for part in ("argument", "output", "alias", "temp"))
print(json.dumps([list(planned.sizes.values())[:4], [getattr(held, name) for name in made]]))
"""


@pytest.mark.exhaustive
def test_machine_code_without_any_cuda_of_the_system(tmp_path: Path) -> None:
    """The wheels bring all that it takes: each assembler that XLA says it starts is theirs. A plan, which makes no
    code, says the same bytes."""
    environment = {name: value for name, value in os.environ.items() if "CUDA" not in name}
    environment |= {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path), "CUDA_PATH": str(tmp_path)}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "subprocess_compilation=3"}
    command = [sys.executable, "-c", WITH_CODE]
    process = subprocess.run(
        command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    planned, made = json.loads(process.stdout)
    assert planned == made
    arguments, *_, temporaries = made
    assert arguments == 2 * 4 * 256 * 256
    assert temporaries
    assemblers = re.findall(r"\] (\S+/ptxas) .*-arch=sm_89", process.stderr)
    assert assemblers, process.stderr
    assert all("site-packages" in Path(assembler).parts for assembler in assemblers)


def _simulated_peak(assignment: bytes) -> int:
    """Bytes in use at the fullest moment of XLA's own simulation of the heap, which it leaves in the assignment."""
    proto = BufferAssignmentProto.FromString(assignment)
    sizes = {one.id: one.size for one in proto.logical_buffers}
    used = peak = 0
    for trace in proto.heap_simulator_traces:
        place: dict[int, int] = {}  # of a value: the one whose memory it shares
        users: Counter[int] = Counter()
        for event in trace.events:
            kind, value, shared = event.kind, event.buffer_id, event.share_with_canonical_id
            if kind == 1:  # freed
                users[place[value]] -= 1
                used -= 0 if users[place[value]] else sizes[place[value]]
                continue
            place[value] = place[shared] if kind == 2 else value
            used += 0 if users[place[value]] else sizes[place[value]]
            users[place[value]] += 1
            peak = max(peak, used)
    return peak
