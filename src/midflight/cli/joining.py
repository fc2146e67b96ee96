"""`midflight join`: one more engine for a run that goes on."""

from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.options import Debug
from midflight.cli.view import TOKEN_VARIABLE
from midflight.errors import ConfigError

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override an option, such as engine.threads=4."
    ),
]


def join(
    url: Annotated[
        str,
        typer.Option(help="The gateway of the run, such as http://10.0.0.5:8000.", metavar="URL"),
    ],
    token: Annotated[
        str,
        typer.Option(
            envvar=TOKEN_VARIABLE,
            help="The run's control token; prefer the variable.",
            metavar="TOKEN",
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            help="The run's model here, a folder or a GGUF file; default: where the run has it.",
            metavar="DIR",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Of the engine in the run; default: this machine's and a number."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; default: this machine's on its way to the gateway."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 0,
    advertise: Annotated[
        str | None,
        typer.Option(help="Where the gateway finds the engine, if not there.", metavar="URL"),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--engine", help="What generates: embedded, vllm or sglang.", metavar="KIND"),
    ] = None,
    engine_url: Annotated[
        str | None,
        typer.Option(
            help="Attach to a server that runs there, instead of starting one.", metavar="URL"
        ),
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(help="Requests decoded together.", min=1)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where the engine computes: cpu or cuda.")
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            help=(
                "Seconds that the gateway may stay away, or let an answer wait, before this gives "
                "up."
            ),
            min=0,
        ),
    ] = 300.0,
    config: Annotated[
        Path | None, typer.Option(help="TOML file whose [engine] is taken.", metavar="CONFIG")
    ] = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Adds an engine to a run that goes on anywhere: it gets the current weights, serves, and
    leaves in order when it is ended.
    """
    import asyncio

    from midflight.cli import configurations
    from midflight.run.launcher import joining

    door = joining.GatewayAccess(url, token)
    called = name or joining.default_name()
    needs = asyncio.run(joining.asked(door, name=called, patience_seconds=patience))
    given = {
        "engine.max_running": max_running,
        "engine.device": device,
        "engine.kind": kind,
        "engine.urls": None if engine_url is None else [engine_url],
    }
    own = {} if config is None else configurations.engine_options(config)
    options = {**own, **needs.settings, **given}
    made = configurations.config_of_model(_model(model, needs.model_path), options, overrides or [])
    return joining.run(
        made,
        door,
        name=called,
        host=host,
        port=port,
        advertised=advertise,
        patience_seconds=patience,
    )


def _model(given: Path | None, theirs: str) -> Path:
    folder = given or Path(theirs)
    if given is None and not (folder / "config.json").is_file():
        raise ConfigError(
            f"the run's model is in {theirs}, which this machine does not see: copy that folder "
            "here and name it by --model."
        )
    return folder
