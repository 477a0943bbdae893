"""`jaxmem doctor`: this machine, the features that work on it, and the commands that install the others.

jax runs in separate processes, so that a wheel that does not match the driver is one line instead of a traceback, and
no GPU memory remains allocated. The command takes about two seconds.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmem import __version__
from jaxmem.machine import devices
from jaxmem.typing import JsonDict

if TYPE_CHECKING:
    from rich.console import Group

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# Optional features: the package, the extra that installs it ("": jaxmem itself), the config key that needs it.
OPTIONAL = {
    "tokenizers": ("tokenizers", "", "data.tokenizer: any tokenizer.json"),
    "gguf": ("gguf", "[gguf]", "model.hf: FILE.gguf"),
    "figures": ("matplotlib", "[figures]", "jaxmem report: figures"),
    "parquet": ("pyarrow", "[parquet]", "data.source: parquet"),
    "digits": ("scikit-learn", "[digits]", "data.source: digits"),
    "images": ("pillow", "[images]", "data.source: images"),
    "tensorboard": ("tensorboardX", "[tensorboard]", "train.trackers: [tensorboard]"),
    "wandb": ("wandb", "[wandb]", "train.trackers: [wandb]"),
}
DRIVER_NEEDED = {"cuda13": 580, "cuda12": 525}  # the oldest driver series for each CUDA version
_PROBE = """
import json, sys
import jax
from jaxmem.config.methods import run_config
from jaxmem.kernels.support import capability
from jaxmem.step.kernel_choice import kernel_choices

cfg = run_config("llama3-8b", ["optimizer.name=adamw8bit"], method="qlora", sequence_length=4096)

def kernels(device):
    choices = kernel_choices(cfg, device.platform, capability(device)).by_setting
    return {setting: f"{choice.implementation} ({choice.why}){checked(device, setting, choice)}"
            for setting, choice in choices.items()}

def checked(device, setting, choice):
    if device.platform == "cpu":
        return ""
    from jaxmem.step.kernel_check import choice_failure

    why = choice_failure(cfg, device.platform, setting, choice)
    return f"; failed its check: {why}" if why else "; passed its check"

seen = [dict(kind=d.device_kind, platform=d.platform, memory=d.memory_stats(), kernels=kernels(d))
        for d in jax.local_devices()]
print(json.dumps(seen))
"""


def examine() -> JsonDict:
    """The findings about this machine, as JSON; sizes in bytes."""
    with ThreadPoolExecutor() as pool:
        here = pool.submit(_see_devices, {})
        simulated = pool.submit(_see_devices, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"})
        gpus = devices.nvidia_gpus()
    seen, error = here.result()
    findings: JsonDict = {
        "jaxmem": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": devices.cores(),
        "packages": dict.fromkeys(PACKAGES) | devices.package_versions(PACKAGES),
        "cuda_wheels": devices.cuda_wheels(),
        "driver": gpus[0]["driver"] if gpus else None,
        "gpus": gpus,
        "devices": seen,
        "devices_error": error,
        "host_memory": devices.host_memory(),
        "disk": {"path": "runs", "free": shutil.disk_usage(Path.cwd()).free},
    }
    remedy = devices.gpu_compiler_remedy()
    findings["works"] = [
        _check("simulated devices", len(simulated.result()[0]) == 8, simulated.result()[1]),
        _gpu_check(findings),
        *_cudnn_checks(findings),
        _check("plan for GPUs", remedy is None, remedy, "compiles without a GPU"),
        *(
            _check(feature, bool(devices.package_versions([package])), f"pip install 'jaxmem{extra}'", use)
            for feature, (package, extra, use) in OPTIONAL.items()
        ),
    ]
    return findings


def table(findings: JsonDict) -> Group:
    """The findings as a table: the machine, then the features, with a remedy for each missing feature."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    packages = findings["packages"] | findings["cuda_wheels"]
    memory = findings["host_memory"]
    kinds = Counter(device["kind"] for device in findings["devices"])
    kernels = {device["kind"]: device["kernels"] for device in findings["devices"] if device["platform"] != "cpu"}
    rows = [
        ("python", f"{findings['python']} on {findings['system']}, {findings['cores']} cores"),
        ("packages", ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())),
        ("driver", findings["driver"] or "none"),
        *(
            ("gpu", f"{gpu['name']}: {_gib(gpu['memory_in_use'])} of {_gib(gpu['memory'])} in use")
            for gpu in findings["gpus"]
        ),
        ("jax sees", findings["devices_error"] or ", ".join(f"{count} x {kind}" for kind, count in kinds.items())),
        *(
            (setting, f"QLoRA of llama3-8b, packed rows of 4,096 tokens on {kind}: {chosen}")
            for kind, all_chosen in kernels.items()
            for setting, chosen in all_chosen.items()
        ),
        ("memory", f"{_gib(memory['available'])} of {_gib(memory['total'])} free"),
        ("disk", f"{_gib(findings['disk']['free'])} free for {findings['disk']['path']}/"),
    ]
    facts = Table.grid(padding=(0, 2))
    works = Table.grid(padding=(0, 2))
    for name, text in rows:
        facts.add_row(name, Text(text))
    for check in findings["works"]:
        mark = Text("yes", style="green") if check["works"] else Text("no", style="yellow")
        use = check["use"] if check["works"] else check["cure"] or ""
        works.add_row(check["what"], mark, Text(use, overflow="fold"))
    return Group(facts, "", works)


def _check(feature: str, works: bool, remedy: str | None, use: str = "") -> JsonDict:
    return {"what": feature, "works": works, "cure": None if works else remedy, "use": use}


def _gpu_check(findings: JsonDict) -> JsonDict:
    works = any(device["platform"] == "gpu" for device in findings["devices"])
    return _check("GPU", works, None if works else _gpu_remedy(findings))


def _gpu_remedy(findings: JsonDict) -> str:
    driver = findings["driver"]
    wheels = findings["cuda_wheels"]
    version = findings["packages"]["jax"]
    if driver is None and not devices.has_nvidia_gpu():
        return "this machine has no NVIDIA driver; install one, or use the CPU"
    if driver is None:
        return "nvidia-smi fails; check the installation of the NVIDIA driver"
    supported = [cuda for cuda, least in DRIVER_NEEDED.items() if int(driver.split(".")[0]) >= least]
    if not supported:
        return f"NVIDIA driver {driver} is too old; install version {min(DRIVER_NEEDED.values())} or newer"
    installed = [cuda for cuda in supported if any(cuda in wheel for wheel in wheels)]
    if not installed:
        return f"jax's CUDA plugin is missing; run pip install 'jaxmem[{supported[0]}]'"
    if conflict := devices.version_conflict(wheels, version):
        return f"{conflict}; run pip install 'jax[{installed[0]}-local]=={version}'"
    return findings["devices_error"] or "jax finds no GPU; unset JAX_PLATFORMS, or check its value"


def _cudnn_checks(findings: JsonDict) -> list[JsonDict]:
    if not findings["gpus"] or not any(name.endswith("plugin") for name in findings["cuda_wheels"]):
        return []
    remedy = devices.cudnn_remedy()
    return [_check("cuDNN", remedy is None, remedy, "memory.attention: cudnn")]


def _see_devices(environment: dict[str, str]) -> tuple[list[JsonDict], str | None]:
    """The devices that jax sees in a new process, or the last line of its error output."""
    if devices.cuda_wheels() and not devices.has_nvidia_gpu():
        environment = {"JAX_PLATFORMS": "cpu"} | environment
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment
    try:
        child = subprocess.run(  # noqa: S603
            [sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return [], "jax did not start within two minutes"
    if child.returncode != 0:
        lines = [line for line in child.stderr.splitlines() if line.strip()]
        return [], lines[-1].strip() if lines else f"jax exited with code {child.returncode}"
    return json.loads(child.stdout.splitlines()[-1]), None


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
