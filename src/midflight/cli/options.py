"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(help="TOML file of the run.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override an option, such as rollout.max_staleness=2."
    ),
]
Folder = Annotated[Path | None, typer.Option(help="Where the run writes; overrides run.folder.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help=(
            "Replace the run that the folder holds: it is deleted after the first step of the new "
            "one."
        ),
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[
    Path, typer.Option(help="Hugging Face model folder to serve, or a GGUF file.", metavar="DIR")
]
Host = Annotated[
    str, typer.Option(help="Address to listen on; anything but loopback exposes the endpoint.")
]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)]
MaxRunning = Annotated[
    int | None, typer.Option(help="Requests one engine decodes together.", min=1)
]
Device = Annotated[str | None, typer.Option(help="Where an engine computes: cpu or cuda.")]
Name = Annotated[str | None, typer.Option(help="The model id that clients use.")]
MaxContext = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt plus answer, in tokens; default: what the model can, at most 4096.",
        min=2,
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="What generates: embedded (the default), vllm or sglang.",
        metavar="KIND",
        show_default=False,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--engine-url",
        metavar="URL",
        help="Attach to a server that runs there, instead of starting one.",
        show_default=False,
    ),
]
Urls = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-url",
        metavar="URL",
        help=(
            "Attach to a server that runs there, instead of starting one; may be given again for "
            "more of them."
        ),
        show_default=False,
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--control-token",
        help=(
            "Opens the control plane and sessions; default: MIDFLIGHT_CONTROL_TOKEN, else a new "
            "one. Other users may see it in the list of processes: prefer the variable."
        ),
        show_default=False,
    ),
]

LogFormat = Annotated[
    str | None,
    typer.Option(
        help="How logs and this output are written: plain, or json, one object a line.",
        metavar="FORMAT",
    ),
]
