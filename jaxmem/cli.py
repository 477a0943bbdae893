"""The command line: parse, call the library, print. What is meant for machines goes to standard output alone.

A mistake of the user's is one line on standard error and exit code 2; an interrupt is exit code 130.
Nothing heavy is imported before a command needs it, so that `jaxmem --help` answers at once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxmem import devices
from jaxmem.errors import UserError

if TYPE_CHECKING:
    from jaxmem.config import Config

app = typer.Typer(
    help="Train large models in the least memory, and know the number first.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"terminal_width": min(shutil.get_terminal_size().columns, 100)},
)
bench = typer.Typer(help="Speed, against what else there is.", rich_markup_mode=None)
app.add_typer(bench, name="bench")

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML file: configs/demo.yaml", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="mesh.fsdp=8 memory.remat=full", show_default=False)
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory: runs/demo", show_default=False)]
Simulate = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="See N devices on this machine's CPU.", show_default=False)
]
Reserve = Annotated[
    float | None, typer.Option(metavar="GIB", min=0.0, help="Of each GPU, for CUDA and NCCL.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def train(config: ConfigFile, overrides: Overrides = None, simulate: Simulate = None) -> None:
    """Train, or go on where the run stopped."""
    cfg = _load(config, overrides, simulate)
    with _joined(cfg):
        from jaxmem.training.run import run

        code = run(cfg).exit_code
    raise typer.Exit(code)


@app.command()
def plan(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", show_default=False)] = None,
    overrides: Overrides = None,
    target: Annotated[
        str | None, typer.Option(metavar="T", help="h100-80gb:16x8, cpu:8, my-gpu.yaml; or: list", show_default=False)
    ] = None,
    reserve: Reserve = None,
    simulate: Simulate = None,
    as_json: Json = False,
) -> None:
    """Bytes per device, without running: for what is here, or for any number of GPUs that are not."""
    if target == "list":
        from jaxmem.planning.table import Targets
        from jaxmem.planning.targets import targets_json

        _show(targets_json() if as_json else Targets())
        return
    if config is None:
        raise UserError("CONFIG: missing; give a YAML file such as configs/demo.yaml, or --target list")
    if target and simulate:
        raise UserError(f"--simulate {simulate} and --target {target} say the same thing; give one")
    cfg = _load(config, overrides, simulate, only_compile=True)
    from jaxmem import planning

    with _only_json(as_json):
        planned = planning.plan(cfg, target, reserve_gib=reserve)
    _show(planned.as_json() if as_json else planned.table())


@app.command()
def fit(
    config: ConfigFile,
    overrides: Overrides = None,
    target: Annotated[
        str | None, typer.Option(metavar="T", help="h100-80gb:8, cpu:8, my-gpu.yaml", show_default=False)
    ] = None,
    allow: Annotated[
        str | None,
        typer.Option(metavar="WORDS", help="What may change: mesh,remat,update,batch,chunks", show_default=False),
    ] = None,
    maximize: Annotated[
        str | None, typer.Option(metavar="KEY", help="model.layers: the largest that fits.", show_default=False)
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The best config, to train as it is.", show_default=False)
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Memory against time, as a figure.", show_default=False)
    ] = None,
    reserve: Reserve = None,
    compiles: Annotated[int, typer.Option(metavar="N", min=1, help="Compile at most so many steps.")] = 20,
    as_json: Json = False,
) -> None:
    """Search for what fits, fastest first. Exit code 3: nothing does."""
    from jaxmem.config import load_config

    cfg = load_config(config, overrides or [])
    if target is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no device here has anything to do
    _devices(None, only_compile=True)
    from jaxmem import search

    given: dict[str, Any] = {"target": target, "reserve_gib": reserve}
    if allow is not None:
        given["allow"] = [word.strip() for word in allow.split(",") if word.strip()]
    if maximize and png:
        raise UserError(f"--png {png}: --maximize draws none; leave one out")
    found: search.Most | search.Fit
    with _only_json(as_json):
        if maximize:
            found = search.maximize(cfg, maximize, **given)
        else:
            found = search.fit(cfg, compiles=compiles, **given)
            if png:
                found.figure(png)
        if found.best and write:
            found.write(write)
    _show(found.as_json() if as_json else found.table())
    raise typer.Exit(0 if found.best else 3)


Model = Annotated[Path, typer.Argument(metavar="RUN_OR_HF_DIR", help="A run, or a Hugging Face directory.")]
Tokens = Annotated[int, typer.Option(min=1, help="How many to add at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Only of the so many likeliest.", show_default=False)]
TopP = Annotated[float, typer.Option(help="Only of the likeliest that have this probability together.")]
Stops = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before it.", show_default=False)]
Seed = Annotated[int, typer.Option(min=0, help="Another seed, another text.")]


@app.command()
def generate(
    run: Model,
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.", show_default=False)] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One a line; gives JSONL.", show_default=False)
    ] = None,
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    stop: Stops = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts of a file that run together.")] = 8,
    seed: Seed = 0,
    simulate: Simulate = None,
) -> None:
    """Continue a text with what was trained."""
    if (prompt is None) == (prompts is None):
        raise UserError("--prompt TEXT or --prompts FILE: give one of the two")
    _devices(simulate)
    with _joined(_config_of(run)):
        from jaxmem.decode import Sampling
        from jaxmem.talk import Speaker, read_prompts

        sampling = Sampling(temperature, top_k, top_p, seed)
        speaker = Speaker(run, sampling, tokens=tokens, stops=stop or (), overrides=overrides or ())
        if prompt is not None:
            for piece in itertools.chain([prompt], speaker.continued(prompt), ["\n"]):
                _say(piece)
            return
        given = read_prompts(prompts or "")
        for one, text in zip(given, speaker.continued_all(given, batch), strict=True):
            _say(json.dumps({"prompt": one, "text": text}, ensure_ascii=False) + "\n")


@app.command()
def chat(
    run: Model,
    overrides: Overrides = None,
    system: Annotated[str | None, typer.Option(help="What it is told first.", show_default=False)] = None,
    tokens: Tokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = 0.9,
    stop: Stops = None,
    seed: Seed = 0,
    simulate: Simulate = None,
) -> None:
    """Talk to a model that has a chat template. /new begins anew; the end of the input ends it."""
    _devices(simulate)
    from jaxmem.decode import Sampling
    from jaxmem.talk import Speaker

    sampling = Sampling(temperature, top_k, top_p, seed)
    speaker = Speaker(run, sampling, tokens=tokens, stops=stop or (), overrides=overrides or ())
    begin = [{"role": "system", "content": system}] if system else []
    said = list(begin)
    while (line := _asked()) is not None:
        if line == "/new":
            said = list(begin)
        elif line:
            said.append({"role": "user", "content": line})
            answer = ""
            for piece in speaker.answered(said):
                answer += piece
                _say(piece)
            _say("\n")
            said.append({"role": "assistant", "content": answer})


@app.command()
def evaluate(
    run: Model,
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Text, in place of what was held out.")] = None,
    choices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Multiple choice, JSONL.", show_default=False)
    ] = None,
    simulate: Simulate = None,
    as_json: Json = False,
) -> None:
    """Loss and perplexity on text it never saw, or the share of questions that it answers rightly."""
    if data is not None and choices is not None:
        raise UserError("--data and --choices: give one of the two")
    _devices(simulate)
    with _joined(_config_of(run)):
        from jaxmem.choices import evaluate_choices
        from jaxmem.evaluate import evaluate

        with _only_json(as_json):
            if choices is None:
                result = evaluate(run, data, overrides or ())
            else:
                result = evaluate_choices(run, choices, overrides or ())
        if not _is_first():
            pass
        elif as_json:
            _show(result)
        else:
            print("  ".join(f"{name} {value:.4g}" for name, value in result.items()))


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="config.json, *.safetensors", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The run to write.", show_default=False)],
    simulate: Simulate = None,
) -> None:
    """A Hugging Face directory as a run, to train, generate from, evaluate."""
    _devices(simulate)
    from jaxmem.convert import import_model

    import_model(source, target)
    print(f"{target}: try it with jaxmem generate {target} --prompt TEXT")


@app.command()
def export(
    run: Run,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to write.", show_default=False)],
    dtype: Annotated[
        str | None, typer.Option(metavar="D", help="float32, float16, bfloat16; default: as it came, or rests.")
    ] = None,
    simulate: Simulate = None,
) -> None:
    """A run as a Hugging Face directory, which transformers opens."""
    _devices(simulate)
    from jaxmem.convert import export_model

    export_model(run, target, dtype)
    print(f"{target}: config.json, *.safetensors and the tokenizer")


@app.command()
def tokenize(
    config: ConfigFile,
    output: Annotated[Path, typer.Option(help="The cache to write, for data.source: tokens.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Tokenize a config's data once, to train from disk."""
    cfg = _load(config, overrides, None)
    from rich.console import Console
    from rich.progress import Progress

    from jaxmem import data

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("records")
        made = data.tokenize(cfg, output, lambda done, total: progress.update(task, completed=done, total=total))
    print(f"{output}: {made['tokens']:,} tokens of {made['records']:,} records")
    print(f"train on it with: data.source=tokens data.path={output}")


@bench.command("step")
def bench_step(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A decoder.")] = Path("configs/bench.yaml"),
    overrides: Overrides = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to measure, about.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Tokens a second of the compiled step, against PyTorch."""
    cfg = _load(config, overrides, None)
    from jaxmem.bench import step

    with _only_json(as_json):
        found = step.bench_step(cfg, seconds=seconds)
    if as_json:
        _show(found)
        return
    print(f"jaxmem         {found['jaxmem']:8,.0f} tokens/s")
    for peer in ("eager", "compile"):
        if f"torch_{peer}" in found:
            print(f"torch {peer:8} {found[f'torch_{peer}']:8,.0f} tokens/s  jaxmem: {found[f'ratio_{peer}']:.2f} x")
    print(f"losses differ by {found['largest_loss_difference']:.1e} at most")


@bench.command("kernels")
def bench_kernels(
    shapes: Annotated[
        list[str] | None, typer.Argument(metavar="[SHAPE]...", help="long llama3-8b", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure each, about.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Whether attention is right on this device, and how fast, beside cuDNN and PyTorch."""
    from jaxmem.bench import kernels

    with _only_json(as_json):
        found = kernels.bench_kernels(shapes or [], seconds=seconds)
    if as_json:
        _show(found)
        return
    dry = ": a dry run on small shapes, its speeds mean nothing" if found["dry_run"] else ""
    print(f"{found['device']}{dry}")
    print("ceilings: {matmul_tflops:.1f} TFLOP/s, {copy_gb_s:.0f} GB/s".format(**found["ceilings"]))
    for row in found["rows"]:
        if "why_not" in row:
            print(f"{row['shape']:13} {row['contestant']:14} not: {row['why_not']}")
            continue
        error = "" if row["error"] is None else f"  error {row['error']:.1f} steps"
        print(f"{row['shape']:13} {row['contestant']:14} {row['pass']:8} {row['tflops']:8.3f} TFLOP/s{error}")


@app.command(context_settings={"allow_interspersed_args": False})
def launch(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What each of them runs.")],
    processes: Annotated[int, typer.Option("-n", metavar="P", min=1, help="How many.")],
    devices: Annotated[
        int | None, typer.Option(metavar="D", min=1, help="Simulated CPU devices of each.", show_default=False)
    ] = None,
) -> None:
    """P processes of one command on this host, as one program (Slurm, MPI and Kubernetes need no launcher)."""
    from jaxmem.distributed.launch import launch

    raise typer.Exit(launch(command, processes, devices))


@app.command()
def tour(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="None: what there is.")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="T", help="Compile for it: h100-80gb, my-gpu.yaml", show_default=False)
    ] = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Also as Markdown.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Each technique, with its number."""
    devices.stay_on_cpu_without_gpu(only_compile=True)
    from jaxmem import tour

    with _only_json(as_json):
        stops = tour.visit(topic, target)
    if write:
        write.write_text("\n\n".join(stop.markdown() for stop in stops) + "\n")
    if as_json:
        _show({"stops": [stop.as_json() for stop in stops]})
    else:
        for stop in stops:
            _show(stop.table())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Driver, wheels, memory in use, what works here."""
    from jaxmem import doctor

    with _only_json(as_json):
        findings = doctor.examine()
    _show(findings if as_json else doctor.table(findings))


@app.command()
def schema() -> None:
    """The config's JSON schema, for editors."""
    from jaxmem.config import json_schema

    _show(json_schema())


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: 0 done, 2 a mistake in what was given, 3 it does not fit, 75 try again,
    130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(arguments or ["--help"], prog_name="jaxmem", standalone_mode=False)
    except (UserError, typer.TyperException) as error:
        print(f"error: {_said(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _said(error: UserError | typer.TyperException) -> str:
    """What was wrong; with what was typed, also where it is explained."""
    if isinstance(error, UserError):
        return str(error)
    context = getattr(error, "ctx", None)
    return error.format_message() + (f" ({context.command_path} --help)" if context else "")


def _load(config: Path, overrides: list[str] | None, simulate: int | None, *, only_compile: bool = False) -> Config:
    """The config, checked before jax is even imported, and the devices for it."""
    from jaxmem.config import load_config

    cfg = load_config(config, overrides or [])
    _devices(simulate, only_compile=only_compile)
    return cfg


def _devices(simulate: int | None, *, only_compile: bool = False) -> None:
    if simulate is None:
        devices.stay_on_cpu_without_gpu(only_compile=only_compile)
        devices.take_all_but_reserved()
    else:
        devices.simulate(simulate)


@contextlib.contextmanager
def _joined(cfg: Config | None) -> Iterator[None]:
    """Together with the processes that were started beside this one, if any. Nothing has started jax before."""
    from jaxmem.config import Cluster
    from jaxmem.distributed.join import joined

    cluster = cfg.cluster if cfg else Cluster()
    with joined(cluster.heartbeat, cluster.start_timeout):
        yield


def _config_of(run: Path) -> Config | None:
    """None where no run is: that is told later, by what reads it."""
    from jaxmem.config import load_config

    file = run / "config.yaml"
    return load_config(file) if file.is_file() else None


def _is_first() -> bool:
    """Of several processes, the one that prints."""
    import jax

    return jax.process_index() == 0


def _say(piece: str) -> None:
    if _is_first():
        print(piece, end="", flush=True)


def _asked() -> str | None:
    """The next line that is typed; None where the input ends."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


@contextlib.contextmanager
def _only_json(wanted: bool) -> Iterator[None]:
    """With --json, what the library says on the way goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def _show(result: Any) -> None:
    """A dict as JSON; anything else is for people and printed by rich."""
    if isinstance(result, dict):
        print(json.dumps(result, indent=2))
        return
    from rich.console import Console

    Console().print(result, markup=not isinstance(result, str))
