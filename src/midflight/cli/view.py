"""`midflight view`: runs in a browser."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.options import Debug

TOKEN_VARIABLE = "MIDFLIGHT_CONTROL_TOKEN"


def view(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of runs, or folders that hold runs; default: runs.", metavar="[RUN ...]"
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8080,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; anything but loopback asks visitors for a token."),
    ] = "127.0.0.1",
    debug: Debug = False,
) -> int:
    """Shows runs in a browser: while they go on, afterwards, and several at once. Reads their
    folders only.
    """
    import secrets

    from midflight.cli.put_back import put_back_below
    from midflight.errors import ConfigError
    from midflight.wire.hosts import is_loopback
    from midflight.wire.server import listen

    try:
        from midflight.view import app as viewer
        from midflight.view.visit import RunFolders
    except ImportError as error:
        raise ConfigError(
            f"the viewer is not installed ({error}): pip install 'midflight[view]'"
        ) from None
    put_back_below(*(folders or [Path("runs")]))
    shelf = RunFolders(folders or [Path("runs")])
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        token = None if is_loopback(host) else secrets.token_urlsafe(24)
    listener = listen(host, port)
    address = f"http://{host}:{listener.getsockname()[1]}/"
    if token and TOKEN_VARIABLE not in os.environ:
        address += f"?token={token}"
    typer.echo(f"viewer: {address}")
    sys.stdout.flush()
    viewer.serve(viewer.build(shelf, host=host, token=token), listener)
    return 0
