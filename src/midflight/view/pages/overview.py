"""The page of all runs: the outcome of each, with links to their pages."""

from html import escape

from nicegui import ui

from midflight.archive.runs import COLUMNS, ArchivedRun, RunDescription
from midflight.errors import MidflightError
from midflight.view import lead, widgets

REFRESH_SECONDS = 5.0


def draw(runs: tuple[ArchivedRun, ...]) -> None:
    with ui.element("div").classes("sheet") as place:
        _rows(runs)
    ui.timer(REFRESH_SECONDS, lambda: (place.clear(), _within(place, runs)))


def _within(place: ui.element, runs: tuple[ArchivedRun, ...]) -> None:
    with place:
        _rows(runs)


def _rows(runs: tuple[ArchivedRun, ...]) -> None:
    rows: list[list[widgets.Cell]] = []
    for run in runs:
        try:
            of = run.describe()
        except MidflightError:
            rows.append([run.slug, "deleted"])
            continue
        rows.append([(run.slug, f"/run/{run.slug}/run"), *_cells(run, of), str(run.folder)])
    with widgets.panel():
        widgets.table((*COLUMNS, "folder"), rows, name="runs")
    if len(runs) > 1:
        names = ",".join(run.slug for run in runs[1:])
        overlay = ui.link("All of them in one picture", f"/run/{runs[0].slug}/run?with={names}")
        overlay.props('data-test="overlay"')


def _cells(run: ArchivedRun, of: RunDescription) -> list[widgets.Cell]:
    """The cells of a run, with a line of its reward and of its held-out score beside each."""
    _, steps, reward, heldout, *rest = of.cells()
    past = run.readings.past
    scores = [
        (line.step, line.mean_reward)
        for line in past.evaluations
        if line.source == of.summary.primary and line.mean_reward is not None
    ]
    done = of.summary.steps / of.max_steps if of.max_steps else None
    return [
        widgets.Markup(lead.condition_tag(of)),
        widgets.Markup(f"{escape(steps)}{widgets.meter(done)}"),
        widgets.Markup(f"{reward}{lead.sparkline(lead.reward_points(past))}"),
        widgets.Markup(f"{heldout}{lead.sparkline(scores)}"),
        *rest,
    ]
