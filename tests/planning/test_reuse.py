"""Nothing is held that could be reused: by the live ranges of compiled steps and of inference."""

import jax
import pytest

from jaxmem.estimate.state import bytes_on_device
from jaxmem.planning.breakdown import STATE_COPIES
from jaxmem.planning.buffers import Lifetimes, Temporaries, read_allocations
from jaxmem.planning.compile import compile_program
from jaxmem.planning.result import Plan
from jaxmem.step.categories import COPIES, SAVED
from jaxmem.step.programs import program
from tests.planning.conftest import SMALL, config

ROWS, TIME, EMBED = 4, 64, SMALL["embed"]
RESIDUAL = 4 * ROWS * TIME * EMBED  # bytes of what goes from layer to layer


def inference(layers: int) -> tuple[int, int]:
    """Bytes of temporaries, and how many arrays as large as the residual stream there are at most at once."""
    cfg = config(
        model={**SMALL, "layers": layers, "heads": 6, "mlp": 96},  # so that nothing else is as large
        data={"sequence_length": TIME},
        batch={"global_size": ROWS},
    )
    compiled = compile_program(program(cfg, jax.devices()[:1]).lower_evaluate(), here=True, runs=False)
    found = read_allocations(compiled.module, compiled.assignment)
    (allocation,) = [one for one in found if one.kind == "temporary"]
    lives = Lifetimes(compiled.module)
    temporaries = Temporaries(allocation, lives)
    assert temporaries.peak.unused < 0.02 * temporaries.size
    places = [sum(one.size == RESIDUAL for one in temporaries.at(moment).regions) for moment in range(lives.end)]
    return temporaries.size, max(places)


@pytest.mark.exhaustive
def test_inference_holds_two_arrays_and_what_is_added_at_any_depth() -> None:
    """A layer reads one and writes the next one: the third is what its half adds to the residual stream."""
    few, many = inference(2), inference(12)
    assert few == many
    assert few[1] == 3


def test_a_training_step_holds_what_is_used_again_and_its_state_once(cpu_plan: Plan) -> None:
    state = bytes_on_device(cpu_plan.program.spec.state)
    assert cpu_plan.compiled_step.sizes["aliased"] == state  # every leaf is updated where it lies
    assert cpu_plan.compiled_step.sizes["outputs"] - state < 1024  # beside it: metrics
    temporaries = cpu_plan.breakdown.temporaries
    assert temporaries.peak.unused < 0.05 * temporaries.size  # all else is used again after this moment
    assert cpu_plan.breakdown.of_kind(STATE_COPIES) + cpu_plan.breakdown.of_kind(COPIES) < 64  # counters
    # Of remat: full each layer's input is kept for the backward pass, and nothing else of a layer.
    rows, layers = 8 // 4, SMALL["layers"]
    assert cpu_plan.breakdown.kinds["activations"][SAVED] <= (layers + 1) * 4 * rows * 24 * EMBED
