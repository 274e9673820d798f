"""The command line: one module per command, assembled here. Errors become one paragraph and an exit status."""

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

import zerobubble
from zerobubble.cli.demo import demo
from zerobubble.cli.emulate import emulate
from zerobubble.cli.output import console, print_error
from zerobubble.cli.paper import paper
from zerobubble.cli.plan import plan
from zerobubble.cli.profile import profile
from zerobubble.cli.schedules import schedules
from zerobubble.cli.show import show
from zerobubble.cli.simulate import simulate
from zerobubble.errors import OptionError, ZeroBubbleError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130

_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""What typer raises for a wrong command line; its newer releases do not export it."""

app = typer.Typer(
    name="zerobubble",
    help="Zero bubble pipeline parallelism: schedules, what they cost, and how they look.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (demo, plan, simulate, emulate, profile, show, schedules, paper):
    app.command()(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        console().print(f"zerobubble {zerobubble.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        console().print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 it failed, 2 wrong usage, 130 interrupted.

    What a user can cause is said in one paragraph on standard error, without a traceback.

    Args:
        arguments: without the program's name; by default those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter is no reason to fail
    try:
        status = app(arguments, prog_name="zerobubble", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except OptionError as error:
        print_error(str(error))
        return WRONG_USAGE
    except ZeroBubbleError as error:
        print_error(str(error))
        return FAILED
    except _UsageError as error:
        print_error(_said(error))
        return WRONG_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:  # the reader, say `head`, has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _said(error: Exception) -> str:
    """The message of typer, and where to read how it is used."""
    context = getattr(error, "ctx", None)
    message: str = error.format_message()  # type: ignore[attr-defined]
    message = message.replace("Value error, ", "").rstrip(".")
    return f"{message}; see {context.command_path if context else 'zerobubble'} --help"
