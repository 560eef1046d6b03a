"""The command line: one thin module per command, none of which imports torch before it runs."""

import errno
import logging
import os
import sys
import time
import warnings
from typing import Annotated

import typer
from typer.core import TyperGroup

from torpor import __version__
from torpor.cli.demo import demo
from torpor.cli.distill import distill
from torpor.cli.graft import graft
from torpor.cli.inspect import inspect
from torpor.cli.sft import sft
from torpor.cli.verify import verify
from torpor.errors import CheckpointError, ConfigError, TorporError, UnsupportedModelError

EXIT_CHECK_FAILED = 1
EXIT_REFUSED = 2
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
REFUSALS = (ConfigError, CheckpointError, UnsupportedModelError)

# Libraries whose remarks are about their own insides. What a user can act on, they raise.
CHATTY_LOGGERS = ("megatron", "modelopt", "nvidia_modelopt", "transformers", "datasets", "torch")

# Longer than a launcher takes to notice that a rank has failed and to end the others.
OTHER_RANKS_WAIT_S = 3.0


class TorporGroup(TyperGroup):
    """The one place where an error raised on purpose becomes a message and an exit code."""

    def invoke(self, ctx: typer.Context) -> object:
        """Run the chosen command; report a `TorporError` and leave with 1 or 2."""
        try:
            return super().invoke(ctx)
        except TorporError as error:
            report_error(error)
            raise typer.Exit(EXIT_REFUSED if isinstance(error, REFUSALS) else EXIT_CHECK_FAILED) from None
        except OSError as error:
            # Commands answer for their own files by name; what is left is the stream that they print to.
            if error.errno not in NO_ROOM:
                raise
            typer.echo(f"output cannot be written: {error.strerror}", err=True)
            raise typer.Exit(EXIT_REFUSED) from None


def report_error(error: TorporError) -> None:
    """Write an error to stderr once, however many ranks met it.

    Rank 0 speaks at once. The others leave it to rank 0 where all ranks are known to have failed alike. If
    not, they hold back first: where rank 0 has failed too, the launcher ends them meanwhile; where it has
    not, theirs is the only account of what happened.
    """
    rank = int(os.environ.get("RANK", "0"))
    prefix = ""
    if rank and error.is_on_every_rank:
        return
    if rank:
        time.sleep(OTHER_RANKS_WAIT_S)
        prefix = f"rank {rank}: "
    typer.echo(f"{prefix}{type(error).__name__}: {error}", err=True)


def silence_libraries() -> None:
    """Keep other libraries' warnings off the screen, unless Python was told to show them (-W)."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    for name in CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def show_version(requested: bool) -> None:
    """Print the version and leave."""
    if requested:
        typer.echo(f"torpor {__version__}")
        raise typer.Exit()


app = typer.Typer(
    name="torpor",
    cls=TorporGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Post-train language models with their multi-token-prediction heads asleep.",
    epilog="Exit code: 0 fine, 1 a check failed, 2 usage or refused input.",
)


@app.callback()
def prepare(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Post-train language models with their multi-token-prediction heads asleep."""
    silence_libraries()


app.command()(demo)
app.command()(distill)
app.command()(graft)
app.command()(inspect)
app.command()(sft)
app.command()(verify)
