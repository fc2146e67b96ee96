"""The commands that write a run as a file: `trace` on a time axis, `report` as a page."""

from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.options import Debug


def trace(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    out: Annotated[Path, typer.Option(help="Where the trace is written.", metavar="FILE")] = Path(
        "trace.json"
    ),
    debug: Debug = False,
) -> int:
    """Writes a run as a trace: every rollout, engine, step, handover and evaluation on one time
    axis, for ui.perfetto.dev.
    """
    from midflight.archive.trace import write_trace
    from midflight.cli.put_back import put_back_at

    put_back_at(folder)
    written = write_trace(folder, out)
    missing = written.about.get("missing")
    if missing:
        typer.echo(f"note: {missing}")
    typer.echo(
        f"{out}: {len(written.events):,} events; open it in ui.perfetto.dev or chrome://tracing"
    )
    return 0


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs.", metavar="RUN [RUN ...]")
    ],
    out: Annotated[
        Path, typer.Option(help="Where the page is written: .html or .md.", metavar="FILE")
    ] = Path("report.html"),
    debug: Debug = False,
) -> int:
    """Writes a page on a run, or on several: plots, verdict, samples, ledger, configuration,
    versions, machine.
    """
    from midflight.cli.put_back import put_back_at
    from midflight.report.page import write_report

    put_back_at(*folders)
    for path in write_report(folders, out):
        typer.echo(f"wrote {path}")
    return 0
