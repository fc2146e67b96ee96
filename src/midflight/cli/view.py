"""What listens beside a run, each a process of its own: `view`, in a browser, and `front`, one
address for several gateways.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

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
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> int:
    """Shows runs in a browser: while they go on, afterwards, and several at once. Reads their
    folders only.
    """
    import secrets

    from midflight.cli.returned import put_back_below
    from midflight.errors import ConfigError
    from midflight.wire.hosts import is_loopback
    from midflight.wire.server import listen

    try:
        from midflight.view import app as viewer
        from midflight.view.visit import Shelf
    except ImportError as error:
        raise ConfigError(
            f"the viewer is not installed ({error}): pip install 'midflight[view]'"
        ) from None
    put_back_below(*(folders or [Path("runs")]))
    shelf = Shelf(folders or [Path("runs")])
    token = os.environ.get(TOKEN_VARIABLE) or (
        None if is_loopback(host) else secrets.token_urlsafe(24)
    )
    listener = listen(host, port)
    address = f"http://{host}:{listener.getsockname()[1]}/"
    typer.echo(
        f"viewer: {address}"
        + (f"?token={token}" if token and TOKEN_VARIABLE not in os.environ else "")
    )
    sys.stdout.flush()
    viewer.serve(viewer.build(shelf, host=host, token=token), listener)
    return 0


def front(
    run: Annotated[
        Path,
        typer.Argument(help="Folder of a run that goes on with gateway.shards.", metavar="RUN"),
    ],
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; anything but loopback exposes the gateways.")
    ] = "127.0.0.1",
    name: Annotated[
        list[str] | None,
        typer.Option(help="By which clients may ask beside loopback's names, such as a proxy's."),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> int:
    """One address for a run with several gateways: each request goes to the one whose session it
    names.
    """
    from midflight.run.launcher.ending import main_task
    from midflight.run.launcher.front import Front, gateways_of
    from midflight.wire.server import listen

    urls = gateways_of(run)
    with listen(host, port) as listener:
        address = f"front: http://{host}:{listener.getsockname()[1]} for {', '.join(urls)}"
        return main_task(
            Front(urls).serve(listener, names=tuple(name or ()), ready=lambda: typer.echo(address))
        )
