"""The page of all runs: the outcome of each, with links to their pages."""

from nicegui import ui

from midflight.archive.runs import COLUMNS, ArchivedRun
from midflight.errors import MidflightError
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
        rows.append([(run.slug, address), *of.cells(), str(run.folder)])
    widgets.table((*COLUMNS, "folder"), rows, name="runs")
    if len(runs) > 1:
        names = ",".join(run.slug for run in runs[1:])
        overlay = ui.link("All of them in one picture", f"/run/{runs[0].slug}/run?with={names}")
        overlay.props('data-test="overlay"')
