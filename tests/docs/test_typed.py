"""What README and docs tell people to type, typed: page by page, each command after the one before."""

import contextlib
import functools
import io
import itertools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from jaxmem import report
from jaxmem.cli import main
from jaxmem.config import MESH_AXES, Config
from jaxmem.config.methods import METHODS
from jaxmem.data import text
from jaxmem.machine.devices import simulation_environment
from jaxmem.planning import budget, result
from jaxmem.planning.budget import estimated
from jaxmem.planning.compile import CompiledProgram, compile_program
from jaxmem.search import candidates, comparison, fit
from jaxmem.search.compilers import CompilerPool
from jaxmem.search.knobs import allowed
from jaxmem.search.worker import StepCost
from jaxmem.step.programs import Program
from scripts.bench import contest, kernels
from tests.docs.conftest import own_scripts, written
from tests.support.conversations import write_conversations, write_tokenizer

ROOT = Path(__file__).parents[2]

# What readers have, under the names that the pages have for it; all of it small, the models of configs/ too.
MODEL = {"vocab": 512, "layers": 8, "embed": 128, "mlp": 128, "heads": 8, "kv_heads": 8, "head_dim": 8}
EXPERTS = MODEL | {"mlp": 64, "experts": {"count": 4, "top_k": 2}}
MODELS = ("HF_DIR", "Qwen/Qwen3-8B", "my-hf-dir", "llama-3.2-1b", "llama-3-8b", "llama-3-70b")
GGUF = ("MODEL.gguf", "model.gguf", "SmolLM2-135M-Instruct.Q4_1.gguf")
CHATS = ("chats.jsonl", "conversations.jsonl", "data/chats.jsonl")
TOKENS = ("tokens", "data/llama3-tokens")
FILES = (*MODELS, *GGUF, *CHATS, *TOKENS)
CONFIGS = {
    "base.yaml": {"name": "base", "model": MODEL, "data": {"source": "stdlib", "tokenizer": "data/llama3"}},
    "before.yaml": {
        "name": "before",
        "model": {"hf": "HF_DIR"},
        "data": {"source": "chat", "path": "chats.jsonl"},
        "adapter": {"kind": "qlora", "rank": 4},
    },
}
OWN = ("mine.yaml", "tune.yaml")  # what a page calls the config that it shows
LINE = {"prompt": "The sky is", "text": "The sky is blue"}
PUBLISHED = {
    "name": "MaxText, small", "source": "https://example.org", "software": "MaxText", "date": "2024", "program": "xla",
    "target": "h100-80gb", "config": {f"model.{key}": size for key, size in MODEL.items()},
    "published": {"seconds": 1.0}, "why": "It is a small model.",
}  # fmt: skip
ASKED = "What is it?\n"  # on standard input
PROGRAMS = ("scripts/finetune.py", "scripts/own_model.py", "scripts/train.py")
# Run in processes of their own: what starts others, and scripts that define or register parts of a model.
APART = (
    "doctor", "launch", "-c", "-m", "own_lm.py", "own_model.py", "own_optimizer.py", "own_vision.py",
    "scripts/bench/published.py",
)  # fmt: skip
# What is typed stays as it is; these only do less of it.
LESS = {
    "chat": ["--tokens", "4"],
    "generate": ["--tokens", "4"],
    "--maximize": ["memory.budget=0.02"],
    "scripts/bench/kernels.py": ["--seconds", "0.1"],
    "--check": ["--without", "triton"],  # interpreted, it is what takes longest to compile
    "tests.support.fuzz": ["-n", "2"],
    "scripts/demo.py": ["zero=0"],
    "scripts/finetune.py": ["train.steps=2", "train.evaluate_every=2", "data.sequence_length=64", "--ask", ASKED],
    "scripts/own_model.py": ["train.steps=2"],
    "scripts/bench/published.py": ["--rows", "rows.yaml"],
}


def cut_down(config: dict[str, Any]) -> str:
    """The same config with little to do: a small decoder, short rows, two steps."""
    preset = str(config["model"].get("preset"))
    if preset.startswith(("llama", "qwen", "gpt-oss")):
        config["model"] = EXPERTS if preset.startswith(("qwen3-30b", "gpt-oss")) else MODEL
    if preset == "tiny":
        config["model"] |= {"layers": 2, "embed": 64, "mlp": 128, "head_dim": 16}
    data = config.get("data", {"source": "chat", "path": CHATS[0]})
    if data["source"] != "digits":
        config["data"] = {**data, "sequence_length": 64}
    config.get("optimizer", {}).pop("warmup", None)
    if (batch := config.get("batch", {})).get("accumulate", 1) > 2:
        batch |= {"accumulate": 2, "global_size": 2 * batch["global_size"] // batch["accumulate"]}
    return yaml.safe_dump({**config, "train": {"steps": 2}, "checkpoint": {}})


def devices(place: Path, words: Sequence[str]) -> int:
    """As many as the command simulates or the config that is trained asks for, or two for any number of devices."""
    if "--simulate" in words:
        return int(words[words.index("--simulate") + 1])
    if "mesh.fsdp=-1" in words:
        return 2
    for config in (place / word for word in words if word.endswith(".yaml") and (place / word).is_file()):
        mesh = yaml.safe_load(config.read_text()).get("mesh", {})
        return math.prod(max(size, 1) for size in mesh.values() if isinstance(size, int))  # and context_method
    return 1


def types(place: Path, *words: str, seen: int = 0) -> None:
    """A command does what it should: it ends well, or says in a line that it needs a GPU."""
    words = (*words, *(more for word in words for more in LESS.get(word, ())))
    code, said = (apart if words[1] in APART else here)(place, words, seen or devices(place, words))
    assert code == 0 or (code == 2 and "no GPU on this machine" in said), f"{shlex.join(words)}\n{said}"
    assert "Traceback" not in said, f"{shlex.join(words)}\n{said}"


def here(place: Path, words: tuple[str, ...], seen: int) -> tuple[int, str]:
    """In this process, which has started jax already, and has interpreters of GPU kernels."""
    said = io.StringIO()
    seen_devices = jax.devices()[:seen]
    with (
        contextlib.chdir(place),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        jax.numpy_dtype_promotion("standard"),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in simulation_environment(seen).items():  # commands change these variables
            patch.setenv(name, value)
        for name in ("devices", "local_devices"):
            patch.setattr(jax, name, lambda *_, **__: seen_devices)
        patch.setattr(sys, "stdin", io.StringIO(ASKED))
        patch.setattr(sys, "argv", [*words[1:]])
        if words[1] == "train":
            patch.setattr(report, "report_run", lambda _: None)  # tests/report draws
        try:
            if words[0] == "jaxmem":
                main([*words[1:]])
            runpy.run_path(words[1], run_name="__main__")
        except SystemExit as exit_:
            return int(exit_.code or 0), said.getvalue()
    return 0, said.getvalue()


def apart(place: Path, words: tuple[str, ...], seen: int) -> tuple[int, str]:
    there = simulation_environment(seen)
    there["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    program = ["-m", "jaxmem"] if words[0] == "jaxmem" else []
    done = subprocess.run(
        [sys.executable, *program, *words[1:]],
        cwd=place,
        env=os.environ | there,
        input=ASKED,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module", autouse=True)
def less_is_done() -> Iterator[None]:
    """A part of the standard library is text enough, and tests/planning predicts."""
    files = text.stdlib_files()[::30]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text.TextFiles, "default_files", lambda *_: files)
        patch.setattr(result, "predict", lambda _: Counter())  # it traces the layers again, for each plan
        yield


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every reader begins with. Of what was trained before, they have an adapter."""
    place = tmp_path_factory.mktemp("desk")
    (place / "configs").mkdir()
    for config in (ROOT / "configs").glob("*.yaml"):
        (place / "configs" / config.name).write_text(cut_down(yaml.safe_load(config.read_text(encoding="utf-8"))))
    shutil.copy(ROOT / "configs/demo-tokenizer.json", place / "configs")
    for name, own in CONFIGS.items():
        (place / name).write_text(cut_down({**own}))
    for name in ("scripts", "tests"):
        (place / name).symlink_to(ROOT / name)
    base = {"name": "published", "data.source": "tokens", "data.path": "unused", "train.steps": 1}
    (place / "rows.yaml").write_text(yaml.safe_dump({"base": base, "rows": [PUBLISHED]}))
    (place / "FILE").write_text(f"{json.dumps(LINE)}\n" * 10)
    write_tokenizer(sorted((ROOT / "jaxmem").rglob("*.py")), place / "data/llama3")
    for name in CHATS:
        write_conversations({f"What is {n}?": f"It is {n}." for n in range(200)}, place / name)
    types(place, "jaxmem", "tokenize", "base.yaml", "--output", TOKENS[0])
    types(place, "jaxmem", "train", "base.yaml")
    types(place, "jaxmem", "export", "runs/base", MODELS[0])
    types(place, "jaxmem", "export", "runs/base", GGUF[0])
    for first, *others in (TOKENS, MODELS):
        for name in others:
            shutil.copytree(place / first, place / name)
    for name in GGUF[1:]:
        shutil.copy(place / GGUF[0], place / name)
    types(place, "jaxmem", "train", "before.yaml")
    (place / "runs/before").rename(place / "before")
    shutil.rmtree(place / "runs")
    return place


@pytest.fixture
def place(desk: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(desk, tmp_path / "desk", symlinks=True))


@pytest.fixture(autouse=True)
def no_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's benches run, and their numbers mean nothing; of all operations only the first row."""
    rows = kernels.bench_kernels
    monkeypatch.setattr(kernels, "bench_kernels", lambda *given, **check: itertools.islice(rows(*given, **check), 2))
    monkeypatch.setattr(contest, "program_rows", lambda *_, **__: lambda _: [])
    monkeypatch.setattr(contest, "BURST_SECONDS", 0.0)
    monkeypatch.setattr(contest, "MIN_BURSTS", 1)


PLAN = functools.lru_cache(maxsize=4)(result.plan)  # pages plan the same with other options


def estimate(pool: CompilerPool, question: str, cfg: Config) -> dict[str, Any]:
    """The answer of a compiler process, without compiling."""
    found = estimated(cfg, pool.target)
    step = StepCost(found.total, found.host, found.seconds or 0.0, found.kinds, 0)
    return {"initialise": found.total // 2} if question == "phases" else vars(step)


@pytest.fixture(autouse=True)
def searches_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/search has the full spaces, methods and advice, and compiles."""
    monkeypatch.setattr(candidates, "MAX_SIZE", 4)
    monkeypatch.setattr(candidates.Space, "neighbors", lambda *_: [])
    monkeypatch.setattr(fit, "DEFAULT_ALLOW", ("update", "batch"))
    monkeypatch.setattr(fit, "DEFAULT_COMPILES", 2)
    monkeypatch.setattr(comparison, "MEMORY_KNOBS", allowed(["update"]))
    monkeypatch.setattr(comparison, "METHODS", {name: METHODS[name] for name in ("full", "lora", "qlora")})
    monkeypatch.setattr(result, "plan", PLAN)
    monkeypatch.setattr(CompilerPool, "_answer", estimate)


FOR_GPUS: list[CompiledProgram] = []  # the first step that was compiled for GPUs, which is that of base.yaml
LOWER = Program.lower_step


def lower_step(built: Program) -> Any:
    """Of GPUs only the first: tests/planning has each kind, and `make lint` plans the configs."""
    return LOWER(built) if built.platform == "cpu" or not FOR_GPUS else None


def compile_step(step: Any, *, here: bool, runs: bool = True) -> CompiledProgram:
    """A compiled step, for GPUs the first of all."""
    if here:
        return compile_program(step, here=True, runs=runs)
    if not FOR_GPUS:
        FOR_GPUS.append(compile_program(step, here=False))
    return FOR_GPUS[0]


def compile_steps(step: Any, others: Any, *, here: bool) -> tuple[CompiledProgram, dict[str, int]]:
    """A compiled step; for each other program half of its bytes, without compiling."""
    compiled = compile_step(step, here=here)
    return compiled, dict.fromkeys(others, compiled.total // 2)


@pytest.fixture(autouse=True)
def plans_are_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/planning compiles the other phases. A plan has bytes for each of them: for a phase without bytes it would
    compile the program of a run, through jax's cache, which cannot hold programs for devices that are not installed."""
    monkeypatch.setattr(Program, "lower_step", lower_step)
    monkeypatch.setattr(result, "compile_all", compile_steps)
    monkeypatch.setattr(result, "compile_program", compile_step)
    monkeypatch.setattr(budget, "compile_program", compile_step)


@pytest.fixture(scope="module")
def answered() -> list[list[str]]:
    """What another page had answered for everyone's configs, and of what kind it asked a model that it trained."""
    return [["python", name] for name in PROGRAMS if name != "scripts/finetune.py"]  # tests/scripts/test_programs.py


def without_numbers(settings: dict[str, Any]) -> dict[str, Any]:
    """What a config chooses: without numbers, names of files, and the sizes of the mesh's axes."""
    chosen = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            chosen[key] = without_numbers(value)
        elif isinstance(value, str):
            chosen[key] = Path(value).suffix if value in FILES else value
        elif not isinstance(value, int | float) or isinstance(value, bool):
            chosen[key] = value
        elif key.rpartition(".")[2] in MESH_AXES:
            chosen[key] = None
    return chosen


def run_kind(words: list[str], place: Path) -> list[str]:
    """What runs have in common whose configs differ in numbers and names only."""
    config = yaml.safe_load((place / words[2]).read_text()) | {"name": None}
    return ["train", repr(without_numbers(config)), changed(words)]


def changed(words: list[str]) -> str:
    """What overrides choose."""
    overrides = dict(word.split("=", 1) for word in words[3:] if "=" in word)
    return repr(without_numbers({key: yaml.safe_load(value) for key, value in overrides.items() if key != "name"}))


def plan_kind(words: list[str]) -> list[str]:
    """What plans and searches have in common of whichever config or model for whichever GPUs: `make lint` plans the
    configs. [] for the config that a page shows."""
    source = Path(words[2])
    if source.suffix == ".yaml" and source.parent.name != "configs":
        return []
    options = [
        word for before, word in itertools.pairwise(words[2:])
        if before != "--target" and "=" not in word and not word.isdecimal()
    ]  # fmt: skip
    name = source.name if words[2].startswith("-") else f"{source.parent.name}{source.suffix}{words[2] in FILES}"
    return [words[1], name, *options, changed(words)]


def kind_of(words: list[str], place: Path) -> list[str]:
    """What one page shows for all: a plan of everyone's config, a run of settings like those of another, the use of a
    model, with these options and kinds of files. [] for others. test_pages.py reads every command."""
    if words[:2] == ["jaxmem", "train"] and words[2] != "fitting.yaml":
        return run_kind(words, place)
    if words[1] in PROGRAMS:
        return words[:2]
    if words[1:] == ["train", "fitting.yaml"] or words[1].startswith("scripts/"):
        return words  # the searches above find the same config
    if words[1] in ("plan", "fit"):
        return plan_kind(words)
    if words[1] not in ("chat", "doctor", "evaluate", "export", "generate", "report"):
        return []
    files = {word: "runs/" if word.startswith("runs/") else Path(word).suffix for word in words[2:]}
    return [*words[:2], *(word if word.startswith("-") or "=" in word else files[word] for word in words[2:])]


def write_files(page: Path, shown: list[dict[str, Any]], place: Path) -> None:
    """The scripts and the configs that a page writes out."""
    for name, code in own_scripts(page).items():
        (place / name).write_text(re.sub(r'"steps": \d+', '"steps": 2', code))
    for config in shown:
        if own_scripts(page):
            (place / f"{config['name']}.yaml").write_text(cut_down(config))
    for config in (config for config in shown[::-1] if "hf" in config.get("model", {})):
        for name in OWN:
            (place / name).write_text(cut_down({"name": "mine", **config}))


def test_what_a_page_says_is_typed(
    page: Path, commands: list[list[str]], shown: list[dict[str, Any]], desk: Path, place: Path,
    answered: list[list[str]],
) -> None:  # fmt: skip
    write_files(page, shown, place)
    if not FOR_GPUS:
        types(place, "jaxmem", "plan", "base.yaml", "--target", "h100-80gb")
    typed = [words for command in commands for words in expanded(command)]
    for number, words in enumerate(typed):
        named_later = {word for later in typed[number + 1 :] for word in later}
        exported = {*words[3:4]} if words[1] == "export" else set()
        if words in typed[:number] or (kind_of(words, place) in answered and not named_later & exported):
            continue
        if kind := kind_of(words, place):
            answered.append(kind)
        for run in (place / word for word in words[2:] if word.startswith("runs/") and words[1] != "train"):
            if not run.exists():
                shutil.copytree(place / "before", run)
        shutil.rmtree(place / "DIR", ignore_errors=True)
        types(place, *words, seen=2 if "scripts/demo.py" in words else 0)
        if kind and "--write" in words:  # other pages have it
            shutil.copy(place / words[words.index("--write") + 1], desk)


def expanded(words: list[str]) -> list[list[str]]:
    """A command; for `make demo` the commands of its recipe. `make test` is this, `make lint` is for contributors."""
    if words[0] != "make":
        return [words]
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    lines = re.findall(r"^\t@\$\(BIN\)/(.*)$", recipe, re.MULTILINE) if words == ["make", "demo"] else []
    return [shlex.split(line) for line in lines]


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", ["README.md", "docs/how-to/own-loop.md"])
def test_the_same_from_python(file: str, place: Path) -> None:
    for code in written(ROOT / file, "python"):
        types(place, "python", "-c", code, seen=8)


@pytest.mark.exhaustive
def test_the_notebook_runs(place: Path) -> None:
    """From its first cell to its last, with fewer updates."""
    cells = json.loads((ROOT / "docs/how-to/plan.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = code.replace("train.steps=20", "train.steps=2").replace("warmup=5", "warmup=1")
    types(place, "python", "-c", code, seen=2)
    assert (place / "runs/notebook/metrics.jsonl").exists()
