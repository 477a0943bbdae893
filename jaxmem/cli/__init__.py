"""The command line: parse, call the library, print. What is meant for machines goes to standard output alone.

A mistake of the user's is one line on standard error and exit code 2; an interrupt is exit code 130.
Nothing heavy is imported before a command needs it, so that `jaxmem --help` answers at once.
"""

from __future__ import annotations

import shutil
import sys
import warnings

import typer

from jaxmem.cli import about, benches, files, planning, running, talking
from jaxmem.errors import UserError
from jaxmem.machine.devices import collect_garbage_rarely

app = typer.Typer(
    help="Train large models in the least memory, and know the number first.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"terminal_width": min(shutil.get_terminal_size().columns, 100)},
)
app.command()(running.train)
app.command()(planning.plan)
app.command()(planning.fit)
app.command()(talking.generate)
app.command()(talking.chat)
app.command()(talking.evaluate)
app.command("import")(files.import_)
app.command()(files.export)
app.command()(files.tokenize)
app.command(context_settings={"allow_interspersed_args": False})(running.launch)
app.command()(about.report)
app.command()(about.tour)
app.command()(about.doctor)
app.command()(about.schema)

bench = typer.Typer(help="Speed, against what else there is.", rich_markup_mode=None)
bench.command("step")(benches.bench_step)
bench.command("kernels")(benches.bench_kernels)
bench.command("tune")(benches.bench_tune)
app.add_typer(bench, name="bench")


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit: 0 done, 2 a mistake in what was given, 3 it does not fit, 75 try again,
    130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    collect_garbage_rarely()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
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
