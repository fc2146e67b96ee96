"""`midflight fetch-model`: a model that can talk, from a package."""

from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.options import Debug
from midflight.errors import ConfigError


def fetch_model(
    name: Annotated[
        str | None,
        typer.Argument(help="Of the list that this prints without a name.", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to make.", metavar="DIR", show_default=False)
    ] = None,
    debug: Debug = False,
) -> int:
    """Makes a model folder of a pretrained model that an ordinary package carries; without a name
    lists those there are.
    """
    from midflight.cli import configurations
    from midflight.models.fetch import fetch
    from midflight.models.packages import packaged

    if name is None:
        _show()
        return 0
    try:
        model = packaged(name)
    except ConfigError:
        _show()
        raise
    if folder is None:
        raise ConfigError(f"no folder was given: midflight fetch-model {name} DIR")
    configurations.check_new(folder)
    typer.echo(model.source)
    typer.echo(f"licence: {model.licence}, whose text goes with the model as LICENSE")
    contents = fetch(model, folder, say=typer.echo)
    typer.echo(contents.described)
    typer.echo(f"made {folder}; look at it: midflight check-model {folder}")
    return 0


def _show() -> None:
    from midflight.models.packages import PACKAGED

    for model in PACKAGED:
        sizes = (
            f"{model.wheel_bytes / 1e6:,.0f} MB to fetch, {model.folder_bytes / 1e6:,.0f} MB "
            "as a folder"
        )
        typer.echo(f"{model.name}: {model.source}")
        typer.echo(
            f"    {model.licence}; {model.requirement}, {sizes}; SHA-256 {model.wheel_sha256}"
        )
