"""The tests' ground rules, set before jax starts: 8 CPU devices, strict dtypes, shapes checked as annotated."""

import atexit
import gc
import importlib.metadata
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxtyping
import pytest
from hypothesis import settings

from jaxmem.machine.devices import collect_garbage_rarely, simulate

# The programs are small and run a few times: what LLVM gains at run time it takes twice in compiling, and so do several
# modules of LLVM for each program. HLO is the same.
quick = " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + quick
# jax 0.10 has an older way to emit fusions, too: in half the time. It would fuse products and sums here and not there,
# so that what is equal to the bit would not be: AVX alone has no such instruction.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
simulate(8)

# Tests compile many like programs, here and in the processes they start: each is compiled once a run, a third of
# the suite's time saved. The cache goes with the run, and so does what searches found; set JAX_COMPILATION_CACHE_DIR to
# keep one between runs.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.TemporaryDirectory(prefix="jaxmem-tests-")
    atexit.register(cache.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["XDG_CACHE_HOME"] = cache.name
os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is not a directory asks no server
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.04"  # writing a smaller program takes longer
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

# Arguments and results of these functions are checked against their annotations. Functions inside functions are not:
# beartype would compile a check at each definition, which took 4 % of the time of tests/step and 8 % of a plan.
check_calls = jaxtyping.jaxtyped


def check_outer_calls(*, typechecker: Any) -> Any:
    return lambda made: made if "<locals>" in made.__qualname__ else check_calls(made, typechecker=typechecker)


jaxtyping.jaxtyped = check_outer_calls
jaxtyping.install_import_hook(
    [
        "jaxmem.kernels",
        "jaxmem.models",
        "jaxmem.pipeline",
        "jaxmem.quant.precision",
        "jaxmem.stack",
    ],
    "beartype.beartype",
)

import jax  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
collect_garbage_rarely()


def pytest_configure(config: pytest.Config) -> None:
    """Kernels that no compiler makes code of for CPUs are interpreted. The imports take 3 s, so the process that only
    distributes tests does without, and the others start sooner."""
    if getattr(config.option, "numprocesses", None):
        return
    from jaxmem.kernels import triton_launch
    from tests.kernels import interpreter

    triton_launch.INTERPRETER = interpreter.interpret


# Rooms whose tests compile many programs, and never read from them which lines of Python their operations come from,
# nor named scopes, which are lost too: without the scopes of `run_count` in a schedule, FLOPs would be wrong.
WITHOUT_FRAMES = ("adapters", "checkpoint", "hf", "inference", "kernels", "models", "optim", "quant", "step")


@pytest.fixture(autouse=True, scope="module")
def short_locations(request: pytest.FixtureRequest) -> Iterator[None]:
    """For those rooms an operation names one line instead of its call stack: an eighth of the time to compile less. A
    plan divides bytes by call stacks, so these programs are cached apart."""
    if request.path.parent.name not in WITHOUT_FRAMES:
        yield
        return
    before = jax.config.jax_compilation_cache_dir
    for full, folder in ((False, f"{before}/without-frames"), (True, before)):
        jax.config.update("jax_include_full_tracebacks_in_locations", full)
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
        if not full:
            yield


# Rooms whose tests start runs and read no predicted bytes of their plans: predicting traces the layers again, a sixth
# of the time of such a run.
WITHOUT_PREDICTION = ("checkpoint", "inference", "scripts", "training")


@pytest.fixture(autouse=True, scope="module")
def no_predictions(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.parent.name not in WITHOUT_PREDICTION:
        yield
        return
    from jaxmem.planning import result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result, "predict", lambda _: Counter())
        yield


@pytest.fixture(autouse=True, scope="module")
def garbage_of_one_file() -> Iterator[None]:
    """Collections search only what this file made. Programs of all files before are millions of objects, and a failed
    restore collects: 2 s instead of 0.1 s."""
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_sessionfinish() -> None:
    """pytest's last collections do not search the objects of all tests: 8 s per process. Python's last one does, or
    else the bindings of Triton would report everything that is left as leaked."""
    gc.freeze()
    atexit.register(gc.unfreeze)


# Files that take most of the time of a run, of both tiers. They come first: with the longest last, one process of two
# would wait for it (the Makefile says --no-loadscope-reorder, or else files with the fewest tests would be last).
LONGEST = (
    "docs/test_typed.py",
    "scripts/course/test_run.py",
    "step/test_experts.py",
    "step/test_pipeline.py",
    "planning/test_volume.py",
    "training/test_user_layers.py",
    "kernels/test_attention_targets.py",
    "training/test_run.py",
    "kernels/test_targets.py",
    "step/test_layouts.py",
    "step/test_fp8.py",
    "step/test_save_dtype.py",
    "step/test_update_during.py",
    "scripts/test_programs.py",
    "training/test_processes.py",
    "training/test_user_parts.py",
    "scripts/bench/test_first_gpu.py",
    "kernels/test_attention.py",
    "hf/test_convert.py",
    "hf/test_peers.py",
    "scripts/test_quality.py",
    "planning/test_property.py",
    "estimate/test_memory.py",
    "search/test_fastest.py",
    "hf/test_peft.py",
    "step/test_pairs.py",
    "step/test_layer_types.py",
    "training/test_digits.py",
    "step/test_step.py",
    "step/test_adapters.py",
    "step/test_networks.py",
    "search/test_comparison.py",
    "search/test_largest.py",
    "step/test_loss_scale.py",
    "kernels/test_grouped_matmul.py",
    "hf/test_peft_experts.py",
    "test_cli.py",
    "step/test_in_codes.py",
    "optim/test_layouts.py",
    "step/test_trainable.py",
    "kernels/test_context.py",
    "quant/test_quantize.py",
    "hf/test_quantized.py",
    "distributed/test_together.py",
    "inference/test_generate.py",
    "models/test_networks.py",
    "test_contributing.py",
    "models/test_decoder.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


# The same examples in every run, and no database left in the checkout.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def compare() -> ModuleType:
    """The tiny models whose outputs transformers has computed; their weights follow from a formula."""
    from tests.hf import transformers_reference

    return transformers_reference
