"""From `sys.argv` to an exit status: 0 done, 1 failed, 2 a wrong configuration or usage, 130 interrupted."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

import typer
from typer.main import get_command

from midflight.errors import Blame, MidflightError

FAILED, WRONG_CONFIG, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Errors meant for users become one clear message; their traceback is shown with `--debug`."""
    from midflight.cli.commands import app

    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return get_command(app).main(args=given, prog_name="midflight", standalone_mode=False) or 0
    except MidflightError as error:
        return _report(error, debug="--debug" in given)
    except typer.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        return _usage(error)


def _report(error: MidflightError, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    sys.stderr.write(f"midflight: {error}\n")
    return WRONG_CONFIG if error.blame is Blame.CONFIG else FAILED


def _usage(error: Exception) -> int:
    """A wrong option is the user's, and shows its own help; anything else is ours, and keeps its traceback."""
    show, status = getattr(error, "show", None), getattr(error, "exit_code", None)
    if show is None or not isinstance(status, int):
        raise error
    show()
    return status
