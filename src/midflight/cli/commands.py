"""The commands and their options. What they do is in `midflight.run.launcher.launch`, imported when a command runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="midflight",
    help="Asynchronous reinforcement learning for language-model agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(help="TOML file of the run.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override an option, such as rollout.max_staleness=2.")
]
Folder = Annotated[Path | None, typer.Option(help="Where the run writes; overrides run.folder.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[Path, typer.Option(help="Hugging Face model folder to serve.", metavar="DIR")]
Host = Annotated[str, typer.Option(help="Address to listen on; anything but loopback exposes the endpoint.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)]
MaxRunning = Annotated[int | None, typer.Option(help="Requests one engine decodes together.", min=1)]
Device = Annotated[str | None, typer.Option(help="Where an engine computes: cpu or cuda.")]
Name = Annotated[str | None, typer.Option(help="The model id that clients use.")]
MaxContext = Annotated[
    int | None, typer.Option(help="Longest prompt plus answer, in tokens; default: what the model can, at most 4096.", min=2)
]
Kind = Annotated[
    str | None,
    typer.Option("--engine", help="What generates: embedded (the default), vllm or sglang.", metavar="KIND", show_default=False),
]
Url = Annotated[
    str | None,
    typer.Option("--engine-url", metavar="URL", help="Attach to a server that runs there, instead of starting one.", show_default=False),
]
Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-url",
        metavar="URL",
        help="Attach to a server that runs there, instead of starting one; may be given again for more of them.",
        show_default=False,
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--control-token",
        help="Opens the control plane and sessions; default: MIDFLIGHT_CONTROL_TOKEN, else a new one. Other users may see it in the list of processes: prefer the variable.",
        show_default=False,
    ),
]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and end.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the run's folder.")] = False,
    folder: Folder = None,
    debug: Debug = False,
) -> int:
    """Trains a model: engines generate while the trainer takes steps."""
    from midflight.cli import actions

    return actions.train(config, overrides or [], dry_run=dry_run, resume=resume, folder=folder)


@app.command()
def rollouts(
    config: ConfigFile,
    overrides: Overrides = None,
    folder: Folder = None,
    control_token: Token = None,
    debug: Debug = False,
) -> int:
    """Runs engines and rollouts for a trainer of your own, which draws batches and publishes weights over HTTP."""
    from midflight.cli import actions

    return actions.rollouts(config, overrides or [], folder=folder, token=control_token)


@app.command()
def serve(
    model: Model,
    engine: Kind = None,
    engine_urls: Urls = None,
    engines: Annotated[int, typer.Option(help="Engine processes.", min=1)] = 1,
    port: Port = 8000,
    host: Host = "127.0.0.1",
    max_running: MaxRunning = None,
    max_context: MaxContext = None,
    device: Device = None,
    name: Name = None,
    control_token: Token = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Serves a model over the OpenAI API: engines, ours or vLLM or SGLang servers, and gateway, no trainer."""
    from midflight.cli import actions

    given = _given(max_running, max_context, device, name, engine, engine_urls or [])
    return actions.serve(
        model, {"engine.count": engines, "gateway.port": port, "gateway.host": host, **given}, overrides or [], token=control_token
    )


@app.command()
def engine(
    model: Model,
    kind: Kind = None,
    engine_url: Url = None,
    port: Port = 8001,
    host: Host = "127.0.0.1",
    max_running: MaxRunning = None,
    max_context: MaxContext = None,
    device: Device = None,
    name: Name = None,
    control_token: Token = None,
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Serves a model with one engine alone: native generation and its control plane."""
    from midflight.cli import actions

    given = _given(max_running, max_context, device, name, kind, [] if engine_url is None else [engine_url])
    return actions.engine(model, given, overrides or [], host=host, port=port, token=control_token)


def _given(
    max_running: int | None, max_context: int | None, device: str | None, name: str | None, kind: str | None, urls: Sequence[str]
) -> Mapping[str, object]:
    """What `serve` and `engine` say of their engines, by the keys of the configuration."""
    return {
        "engine.max_running": max_running,
        "model.max_context": max_context,
        "engine.device": device,
        "model.name": name,
        "engine.kind": kind,
        "engine.urls": json.dumps(urls) if urls else None,
    }


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="Hugging Face model folder.", metavar="MODEL_DIR")],
    config: Annotated[Path, typer.Option("--config", help="TOML file whose held-out tasks are asked.", metavar="CONFIG")],
    overrides: Overrides = None,
    folder: Folder = None,
    debug: Debug = False,
) -> int:
    """Scores a model folder on the held-out tasks of a configuration."""
    from midflight.cli import actions

    return actions.evaluate(config, model, overrides or [], folder=folder)


@app.command("new-model")
def new_model(
    folder: Annotated[Path, typer.Argument(help="Folder to make.", metavar="DIR")],
    overrides: Overrides = None,
    debug: Debug = False,
) -> int:
    """Makes a small model with random weights and a byte tokenizer, to try the other commands with."""
    from midflight.cli import actions

    return actions.new_model(folder, overrides or [])


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    if show:
        from importlib.metadata import version as installed

        typer.echo(f"midflight {installed('midflight')}")
        raise typer.Exit
