"""The page of all runs: the outcome of each, with links to their pages."""

from nicegui import ui

from midflight.archive.runs import ArchivedRun
from midflight.errors import MidflightError
from midflight.observe.readable import duration, number
from midflight.view import widgets

REFRESH_SECONDS = 5.0


def draw(runs: tuple[ArchivedRun, ...]) -> None:
    with ui.element("div") as place:
        _rows(runs)
    ui.timer(REFRESH_SECONDS, lambda: (place.clear(), _within(place, runs)))


def _within(place: ui.element, runs: tuple[ArchivedRun, ...]) -> None:
    with place:
        _rows(runs)


def _rows(runs: tuple[ArchivedRun, ...]) -> None:
    rows: list[list[widgets.Cell]] = []
    for run in runs:
        address = f"/run/{run.slug}/run"
        try:
            of = run.describe()
        except MidflightError:
            rows.append([run.slug, "deleted"])
            continue
        steps = str(of.step) if of.steps is None else f"{of.step}/{of.steps}"
        row: list[widgets.Cell] = [
            (run.slug, address),
            of.condition.value,
            steps,
            number(of.reward),
            number(of.heldout),
            duration(of.seconds),
            of.started,
            str(run.folder),
        ]
        rows.append(row)
    widgets.table(
        ("run", "state", "steps", "reward", "held out", "time", "started", "folder"),
        rows,
        name="runs",
    )
    if len(runs) > 1:
        names = ",".join(run.slug for run in runs[1:])
        overlay = ui.link("All of them in one picture", f"/run/{runs[0].slug}/run?with={names}")
        overlay.props('data-test="overlay"')
