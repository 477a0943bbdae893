"""Train large models in JAX in little memory, and know the memory of a run before it starts.

    cfg = jaxmem.load_config("configs/demo.yaml", ["mesh.fsdp=-1"])
    plan = jaxmem.plan(cfg)      # bytes per device, without running
    result = jaxmem.train(cfg)

Everything is imported when it is first used: `import jaxmem` takes milliseconds and does not start jax,
so that a program can still choose its devices (`jaxmem.simulate(8)`). Without a GPU jax will use the CPU.

The packages: each imports only from those above it (tests/test_house.py), and its `__init__` describes it. Only
`machine.doctor` also runs code of config, kernels and step, in another process.
`*`: core, what a decoder with AdamW, FSDP and checkpoints needs.

      machine      devices, the table of GPUs, files, the terminal
    * config       what a run is; refuses what cannot be
      kernels      fused operations on plain arrays; jaxmem/kernels is a link to the folder kernels/
    * quant        quantized arrays
    * sharding     logical axes to mesh axes; stored weights, and their gathering for computation
    * stack        applying layers: scan, recompute, updates during the backward pass
      pipeline     pipeline stages
    * models       networks, the vocabulary loss
      adapters     LoRA and other parameters beside frozen weights
    * optim        optimizers as optax transformations
    * step         the compiled step: loss, gradients, update
      distributed  several processes: joining, agreeing, watching
    * data         batches, and the position to resume from
      hf           weights of Hugging Face and llama.cpp
    * checkpoint   saved and restored state
      estimate     bytes and seconds by arithmetic
      inference    generate, chat, evaluate, export
      planning     bytes and seconds of the compiled step
      report       a run as a page or a figure
    * training     the loop, from a config to a trained model
      search       configs that fit a target
      cli          the command line

The core also imports modules of packages without `*`. Besides `machine`:

    kernels       quant, stack, models, optim, step: every fused operation has an implementation in plain JAX
    pipeline      step/execution.py and checkpoint/saved_state.py: `stages`, the order of the layers
    adapters      step/model.py, programs.py and initial_weights.py: nothing is added without `adapter`
    distributed   data/loader.py, checkpoint/manager.py, training: agreement of the processes, also of a single one
    hf            checkpoint/saved_state.py: `peft`, the frozen weights that are not in a checkpoint
    inference     training/run.py: `load.initial_state` creates the state, `evaluate.Evaluator` evaluates it
    planning      training/run.py: `budget.resolve_remat` chooses the recompute policy, `result.plan_program` compiles
"""

import importlib
import importlib.util
import os
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; `__getattr__` imports the same names when they are first used
    from jaxmem.checkpoint.manager import Checkpoints
    from jaxmem.config.load import load_config
    from jaxmem.config.optimizers import register_optimizer
    from jaxmem.config.sections import Config
    from jaxmem.data.loader import Loader
    from jaxmem.errors import UserError
    from jaxmem.inference.evaluate import evaluate
    from jaxmem.machine.devices import simulate
    from jaxmem.models import register_model
    from jaxmem.planning.result import plan
    from jaxmem.search.fit import fit
    from jaxmem.step.programs import program
    from jaxmem.training.run import run as train

__version__ = "0.2.0"
__all__ = [
    "Checkpoints", "Config", "Loader", "UserError", "evaluate", "fit", "load_config", "plan", "program",
    "register_model", "register_optimizer", "simulate", "train",
]  # fmt: skip

# The public names and their modules; every submodule is an attribute too (jaxmem.optim, jaxmem.kernels, ...).
_NAMES = {
    "Checkpoints": "jaxmem.checkpoint.manager:Checkpoints",
    "Config": "jaxmem.config.sections:Config",
    "Loader": "jaxmem.data.loader:Loader",
    "UserError": "jaxmem.errors:UserError",
    "evaluate": "jaxmem.inference.evaluate:evaluate",
    "fit": "jaxmem.search.fit:fit",
    "load_config": "jaxmem.config.load:load_config",
    "plan": "jaxmem.planning.result:plan",
    "program": "jaxmem.step.programs:program",
    "register_model": "jaxmem.models:register_model",
    "register_optimizer": "jaxmem.config.optimizers:register_optimizer",
    "simulate": "jaxmem.machine.devices:simulate",
    "train": "jaxmem.training.run:run",
}

# If jax's CUDA plugin is installed to compile for GPUs (the extra `plan`) and there is no driver, jax would print a
# traceback when it starts.
_plugins = importlib.util.find_spec("jax_plugins")
_has_cuda = _plugins and any(
    "cuda" in module.name for module in pkgutil.iter_modules(_plugins.submodule_search_locations)
)
if _has_cuda and not any(map(os.path.exists, ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"))):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        module, _, attribute = _NAMES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if not name.startswith("_") and importlib.util.find_spec(f"jaxmem.{name}") is not None:
        return importlib.import_module(f"jaxmem.{name}")
    raise AttributeError(f"module 'jaxmem' has no attribute {name!r}")


def __dir__() -> list[str]:
    modules = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted({"__version__", "kernels", *_NAMES, *(name for name in modules if not name.startswith("_"))})
