"""The commands that list runs and set them side by side: `midflight runs` and `compare`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midflight.cli.options import Debug

if TYPE_CHECKING:
    from midflight.archive.runs import ArchivedRun
    from midflight.observe.journal import JournalHistory

UNSET = "(unset)"
_TOTALS = {
    "oldest trained token": "max_token_staleness",
    "tokens trained": "trained_tokens",
    "failed rollouts": "failed_rollouts",
}


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.", metavar="[DIR]")] = Path(
        "runs"
    ),
    debug: Debug = False,
) -> int:
    """Lists the runs below a folder: what became of each, how far it came, its rewards."""
    from midflight.archive.runs import runs_under
    from midflight.cli.put_back import put_back_below
    from midflight.observe.readable import duration, number

    put_back_below(folder)
    found = runs_under(folder)
    rows: list[tuple[str, ...]] = []
    for run in found:
        summary = run.describe()
        steps = str(summary.step)
        if summary.steps is not None:
            steps += f"/{summary.steps}"
        rows.append(
            (
                _near(run.folder),
                summary.condition.value,
                steps,
                number(summary.reward),
                number(summary.heldout),
                duration(summary.seconds),
                summary.started,
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
    _print_table(("", *labels), list(_numbers(chosen)))
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


def _numbers(chosen: Sequence[ArchivedRun]) -> Iterator[tuple[str, ...]]:
    """Rows of a table with a column for each run."""
    from midflight.observe.readable import duration, number

    described = [run.describe() for run in chosen]
    past = [run.journal().past for run in chosen]
    yield "state", *(each.condition.value for each in described)
    yield "steps", *(str(each.step) for each in described)
    yield "time", *(duration(each.seconds) for each in described)
    yield "reward, last step", *(number(each.reward) for each in described)
    for source in dict.fromkeys(line.source for lines in past for line in lines.evaluations):
        yield f"held out {source}", *(_scores(lines, source) for lines in past)
    for label, name in _TOTALS.items():
        yield label, *(_total(lines, name) for lines in past)


def _scores(past: JournalHistory, source: str) -> str:
    """The first and the last held-out score of a source."""
    from midflight.observe.readable import UNKNOWN, number

    scores = [line.mean_reward for line in past.evaluations if line.source == source]
    if not scores:
        return UNKNOWN
    ends = dict.fromkeys((scores[0], scores[-1]))
    return " → ".join(number(score) for score in ends)


def _total(past: JournalHistory, name: str) -> str:
    from midflight.observe.readable import UNKNOWN

    if not past.steps:
        return UNKNOWN
    return f"{getattr(past.steps[-1].totals, name):,}"


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
