"""The commands `runs` and `compare`: what lies in the folders of runs, as tables, and as a plot of
several.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from midflight.archive.runs import ArchivedRun

UNSET = "(unset)"
_TOTALS = {
    "oldest trained token": "max_token_staleness",
    "tokens trained": "trained_tokens",
    "failed rollouts": "failed_rollouts",
}

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.", metavar="[DIR]")] = Path(
        "runs"
    ),
    debug: Debug = False,
) -> int:
    """Lists the runs below a folder: what became of each, how far it came, its rewards."""
    from midflight.archive.runs import runs_under
    from midflight.cli.returned import put_back_below
    from midflight.observe.readable import duration, number

    put_back_below(folder)
    found = runs_under(folder)
    rows: list[tuple[str, ...]] = []
    for run in found:
        of = run.describe()
        steps = str(of.step) if of.steps is None else f"{of.step}/{of.steps}"
        rows.append(
            (
                _near(run.folder),
                of.condition.value,
                steps,
                number(of.reward),
                number(of.heldout),
                duration(of.seconds),
                of.started,
            )
        )
    if found:
        _print_table(("run", "state", "steps", "reward", "held out", "time", "started"), rows)
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
    from midflight.cli.returned import put_back_at
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
    _print_table(("", *labels), list(_numbers(chosen)))
    options = differences([run.config() for run in chosen]).items()
    if options:
        rows = [
            (name, *(UNSET if value is None else str(value) for value in values))
            for name, values in options
        ]
        _print_table(("option", *labels), rows)
    else:
        typer.echo("their configurations are the same")
    draw_comparison(
        {run.slug: run.journal().past for run in chosen}, plot, title=" and ".join(labels)
    )
    typer.echo(f"plot: {plot}")
    return 0


def _numbers(chosen: Sequence[ArchivedRun]) -> Iterator[tuple[str, ...]]:
    """Rows of a table with a column for each run."""
    from midflight.observe.readable import UNKNOWN, duration, number

    described = [run.describe() for run in chosen]
    past = [run.journal().past for run in chosen]
    yield "state", *(of.condition.value for of in described)
    yield "steps", *(str(of.step) for of in described)
    yield "time", *(duration(of.seconds) for of in described)
    yield "reward, last step", *(number(of.reward) for of in described)
    for source in dict.fromkeys(line.source for lines in past for line in lines.evaluations):
        scores = [
            [line.mean_reward for line in lines.evaluations if line.source == source]
            for lines in past
        ]
        yield (
            f"held out {source}",
            *(
                " → ".join(map(number, dict.fromkeys((s[0], s[-1])))) if s else UNKNOWN
                for s in scores
            ),
        )
    for label, name in _TOTALS.items():
        yield (
            label,
            *(
                f"{getattr(lines.steps[-1].totals, name):,}" if lines.steps else UNKNOWN
                for lines in past
            ),
        )


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column is cut last: it says what the others are of."""
    from rich import box, console, table, text

    drawn = table.Table(box=box.SIMPLE_HEAD)
    for head in heads:
        drawn.add_column(head, overflow="fold", min_width=24 if head in ("run", "option") else None)
    for row in rows:
        drawn.add_row(*(text.Text(cell) for cell in row))  # brackets are no markup
    console.Console().print(drawn)


def _near(folder: Path) -> str:
    """As a person would type it here."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)
