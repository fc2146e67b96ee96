"""The commands that list runs and set them side by side: `midflight runs` and `compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from midflight.cli.options import Debug

UNSET = "(unset)"


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.", metavar="[DIR]")] = Path(
        "runs"
    ),
    debug: Debug = False,
) -> int:
    """Lists the runs below a folder: what became of each, how far it came, its rewards."""
    from midflight.archive.runs import COLUMNS, runs_under
    from midflight.cli.put_back import put_back_below

    put_back_below(folder)
    found = runs_under(folder)
    rows: list[tuple[str, ...]] = []
    for run in found:
        rows.append((_near(run.folder), *run.describe().cells()))
    if found:
        _print_table(COLUMNS, rows)
    else:
        typer.echo(f"there is no run below {folder}")
    return 0


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="RUN RUN ...")],
    plot: Annotated[Path, typer.Option(help="Where the plot is written.", metavar="FILE")] = Path(
        "compare.png"
    ),
    debug: Debug = False,
) -> int:
    """Compares runs: their numbers side by side, the options that differ, and a plot."""
    from midflight.archive.runs import differences, open_runs
    from midflight.cli.put_back import put_back_at
    from midflight.errors import ConfigError
    from midflight.observe.plot import draw_comparison

    put_back_at(*folders)
    chosen = open_runs(folders)
    if len(chosen) < 2:
        raise ConfigError(
            f"comparing {len(chosen)} run: give the folders of two runs or more; `midflight runs "
            "DIR` lists them."
        )
    labels = [run.slug for run in chosen]
    _print_table(("", *labels), _side_by_side([dict(run.describe().rows()) for run in chosen]))
    options = differences([run.config() for run in chosen]).items()
    if options:
        rows: list[tuple[str, ...]] = []
        for name, values in options:
            rows.append((name, *map(_shown, values)))
        _print_table(("option", *labels), rows)
    else:
        typer.echo("their configurations are the same")
    draw_comparison(
        {run.slug: run.journal().past for run in chosen}, plot, title=" and ".join(labels)
    )
    typer.echo(f"plot: {plot}")
    return 0


def _shown(value: object) -> str:
    return UNSET if value is None else str(value)


def _side_by_side(described: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Rows of a table with a column for each run."""
    from midflight.observe.readable import UNKNOWN

    labels = dict.fromkeys(label for rows in described for label in rows)
    table: list[tuple[str, ...]] = []
    for label in labels:
        values = [rows.get(label, UNKNOWN) for rows in described]
        table.append((label, *values))
    return table


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table. Its first column, which names the others, is the last to be cut."""
    from rich import box, console, table, text

    drawn = table.Table(box=box.SIMPLE_HEAD)
    for head in heads:
        drawn.add_column(head, overflow="fold", min_width=24 if head in ("run", "option") else None)
    for row in rows:
        drawn.add_row(*(text.Text(cell) for cell in row))  # brackets are no markup
    console.Console().print(drawn)


def _near(folder: Path) -> str:
    """The path as a person would type it here."""
    here = Path.cwd()
    if folder.is_relative_to(here):
        folder = folder.relative_to(here)
    return str(folder)
