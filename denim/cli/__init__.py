"""The command `denim`.

Owns the names of the commands, and the way in which errors leave: one line on stderr and an exit code. The
options of each are in the modules beside this one. The work is in `denim.commands`, imported when a command
runs, so that light commands stay quick.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import Annotated

import typer

import denim
from denim.cli.costs import doctor, families, inspect, ledger, plan
from denim.cli.engines import chat, generate, serve
from denim.cli.exit_codes import INTERRUPTED, OTHER_ERROR, exit_code
from denim.cli.measures import bench, cache, profile, study, verify
from denim.cli.options import PLAIN_HELP
from denim.errors import DenimError

app = typer.Typer(
    name="denim",
    help="An inference engine for hybrid linear-attention language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=PLAIN_HELP,
    pretty_exceptions_enable=False,
)
for command in (ledger, plan, inspect, families, doctor, generate, chat, serve, profile, verify):
    app.command()(command)
for name, group in (("cache", cache), ("study", study), ("bench", bench)):
    app.add_typer(group, name=name)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"denim {denim.__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point: run a command, turn Denim's own errors into one line and an exit code."""
    if sys.stdout is None:  # closed by the shell: >&-
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)
    if isinstance(sys.stdout, TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without α or ─ shows ? in their place
    try:
        app()
    except DenimError as error:
        print("denim:", " ".join(str(error).splitlines()), file=sys.stderr)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:  # before the parser looks out for it
        sys.exit(INTERRUPTED)
    except OSError as error:  # a full disk behind stdout, say
        print(f"denim: {error}", file=sys.stderr)
        sys.exit(OTHER_ERROR)
