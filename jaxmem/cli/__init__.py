"""The command line: parse, call the library, print. Only results are written to standard output.

A user's error is one line on standard error and exit code 2; an interrupt is exit code 130. A command imports what it
needs when it runs, so that `jaxmem --help` is fast.
"""

import difflib
import shutil
import sys
import warnings
from typing import Annotated

import typer

from jaxmem import __version__
from jaxmem.cli import inference, planning, training
from jaxmem.errors import UserError, escaped, one_of
from jaxmem.machine.devices import collect_garbage_rarely
from jaxmem.machine.files import as_user_error
from jaxmem.machine.terminal import say, say_text

app = typer.Typer(
    help="Train and fine-tune large models with little memory, and plan memory use before a run.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"terminal_width": min(shutil.get_terminal_size().columns, 100)},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        say(__version__)
        raise typer.Exit


@app.callback()
def _of_all_commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None: ...


app.command()(training.train)
app.command()(planning.plan)
app.command()(planning.fit)
app.command()(inference.generate)
app.command()(inference.chat)
app.command()(inference.evaluate)
app.command()(inference.export)
app.command()(training.tokenize)
app.command(context_settings={"allow_interspersed_args": False})(training.launch)
app.command()(training.report)
app.command()(training.doctor)
app.command()(training.schema)

PYDANTIC = {  # its texts for options, and jaxmem's
    "Input should be greater than or equal to": "must be at least",
    "Input should be a valid integer, unable to parse string as an integer": "must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "must be a number",
}


def main(arguments: list[str] | None = None) -> None:
    """Runs one command and exits: 0 done, 2 a user's error, 3 does not fit, 75 try again, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    collect_garbage_rarely()
    warnings.formatwarning = lambda message, *_, **__: f"warning: {escaped(str(message))}\n"
    try:
        code = app(arguments or ["--help"], prog_name="jaxmem", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as raised:
        error = as_user_error(raised)
        if not isinstance(error, UserError | typer.TyperException):
            raise
        say_text(f"error: {_message(error, arguments)}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _message(error: UserError | typer.TyperException, arguments: list[str]) -> str:
    """The text of an error; for a wrong command line, with the help command that explains it."""
    if isinstance(error, UserError):
        return str(error)
    context = getattr(error, "ctx", None)
    text = error.format_message().rstrip(".")
    for pydantic, words in PYDANTIC.items():
        text = text.replace(pydantic, words)
    option = getattr(error, "option_name", None) if "No such option" in text else None
    if context and option and (hint := _place_of(option, context, arguments)):
        text = f"No such option: {option}; {hint}"
    return text + (f" (see {context.command_path} --help)" if context else "")


def _place_of(option: str, context: typer.Context, arguments: list[str]) -> str:
    """A hint for an option that a command does not have: the config key that it means, or commands that have it."""
    from jaxmem.config.explain import key_of_option

    commands = getattr(context.parent and context.parent.command, "commands", {})
    options = {name: [word for option in command.params for word in option.opts] for name, command in commands.items()}
    known = {word for words in options.values() for word in words if word.startswith("--")}
    if option not in known and any(parameter.name == "overrides" for parameter in context.command.params):
        if "." in option:
            place = next(index for index, argument in enumerate(arguments) if argument.startswith(option))
            _, _, value = "=".join(arguments[place : place + 2]).partition("=")
            return f"write {option.lstrip('-')}={value.partition('=')[0] or 'VALUE'}"
        if hint := key_of_option(option):
            return hint
    close = difflib.get_close_matches(option.replace("_", "-"), known, n=1)
    having = [name for name, words in options.items() if close and close[0] in words]
    return f"{close[0]} is an option of jaxmem {one_of(having)}" if having and context.info_name not in having else ""
