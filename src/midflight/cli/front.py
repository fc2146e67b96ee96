"""`midflight front`: one address for a run with several gateways."""

from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.options import Debug


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
    debug: Debug = False,
) -> int:
    """One address for a run with several gateways: each request goes to the one whose session it
    names.
    """
    from midflight.run.launcher.front import Front, gateways_of
    from midflight.run.launcher.shutdown import main_task
    from midflight.wire.server import listen

    urls = gateways_of(run)
    with listen(host, port) as listener:
        address = f"front: http://{host}:{listener.getsockname()[1]} for {', '.join(urls)}"
        served = Front(urls).serve(
            listener, names=tuple(name or ()), ready=lambda: typer.echo(address)
        )
        return main_task(served)
