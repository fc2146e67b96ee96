"""The page of a run: its scores, its progress and its verdict first, then its problems with their
remedies, every number of its journal as a chart, and its figures. It can show several runs over
each other.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from nicegui import ui

from midflight.archive.runs import COLUMNS, ArchivedRun, RunDescription, differences, flat
from midflight.archive.store_reader import copy_in_words
from midflight.archive.times import Times, failures, split
from midflight.errors import RunGone
from midflight.observe.history import JournalHistory
from midflight.observe.lines import AlarmLine, StepLine
from midflight.observe.readable import UNKNOWN
from midflight.trajectories.heldout import HELDOUT
from midflight.view import lead, widgets
from midflight.view.panels import Panel, bars, of_run, of_runs, sectioned
from midflight.view.visit import PageRequest

REFRESH_SECONDS = 3.0
"""The least time before the next refresh."""
LATEST_SECONDS = 15.0
"""The most time before the next refresh, even if a refresh costs much."""
SHARE = 0.012
"""The share of a core that the viewer's process may take while a run's page is open. If a refresh
costs more, the page refreshes less often.
"""
RECENT_ROLLOUTS = 512
"""The times of rollouts are means over this many."""
LATELY_BYTES = 2**20
"""The number of bytes of the timeline that are read at first, some thousand rollouts. Failures by
environment and the times of rollouts come from them and from the lines appended later.
"""
MAX_ALARMS = 20
OPEN_ALARMS = 3
"""The number of alarms that are shown at once. Older ones are unfolded."""


def draw(visit: PageRequest) -> None:
    beside = visit.query.get("with", "").split(",")
    others = [run for run in visit.runs if run.slug in beside and run is not visit.run]
    if others:
        _overlaid(visit, [visit.run, *others])
    else:
        _alone(visit)


def _alone(visit: PageRequest) -> None:
    times = Times(visit.run.folder, newest=LATELY_BYTES)
    times.refresh()
    copy = copy_in_words(visit.run.folder)
    if copy is not None:
        ui.label(copy)
    head = ui.element("div").classes("sheet")
    described = visit.run.describe()

    def show_head() -> None:
        head.clear()
        with head:
            _head(visit, described)
            _findings(visit, times)

    def show_figures() -> None:
        figures.clear()
        with figures, widgets.panel():
            widgets.section("Figures")
            widgets.facts(lead.other_figures(described))

    def show_words() -> None:
        show_head()
        show_figures()

    def panels() -> list[Panel]:
        return of_run(visit.run.readings.past) + _timed(times)

    def refresh() -> bool:
        nonlocal described
        has_lines = visit.run.readings.refresh()
        times.refresh()
        before = described
        described = visit.run.describe()
        return has_lines or described != before

    show_head()
    _live(refresh, panels, show_words)
    figures = ui.element("div").classes("sheet")
    show_figures()
    _compare_with(visit)
    with ui.element("details").classes("panel"):
        with ui.element("summary"):
            ui.label("Configuration: all options, as the run wrote them down").style(
                "display: inline"
            )
        options = [(name, str(value)) for name, value in flat(visit.run.config()).items()]
        widgets.table(("option", "value"), options, name="options", pairs=True)


def _live(
    refresh: Callable[[], bool], panels: Callable[[], list[Panel]], show_more: Callable[[], None]
) -> None:
    """Draws charts that follow the journal. A chart is sent again only if its content has
    changed.
    """
    place = ui.element("div").classes("numbers")
    shown: dict[str, tuple[Panel, tuple[ui.echart, ui.label]]] = {}

    def show() -> None:
        now = {panel.title: panel for panel in panels()}
        if list(now) != list(shown):
            place.clear()
            with place:
                shown.clear()
                shown.update(_drawn(now.values()))
            return
        for title, panel in now.items():
            before, (chart, said) = shown[title]
            if panel != before:
                chart.options.clear()
                chart.options.update(panel.options)
                chart.update()
                said.text = panel.note
                shown[title] = panel, (chart, said)

    def look() -> None:
        nonlocal spent
        before = spent
        spent = time.process_time()
        timer.interval = min(max(REFRESH_SECONDS, (spent - before) / SHARE), LATEST_SECONDS)
        try:
            if refresh():
                show()
                show_more()
        except RunGone as gone:
            timer.deactivate()
            ui.label(str(gone)).props('role="alert" data-test="problem"').classes("trouble")

    show()
    spent = time.process_time()
    timer = ui.timer(REFRESH_SECONDS, look, immediate=False)


def _drawn(
    panels: Iterable[Panel],
) -> Iterator[tuple[str, tuple[Panel, tuple[ui.echart, ui.label]]]]:
    """Draws the charts section by section. The first one of a page has the width of two."""
    is_first = True
    for title, found in sectioned(panels).items():
        widgets.section(title)
        with widgets.charts(many=True):
            for panel in found:
                options = dict(panel.options)
                drawn = widgets.figure(panel.title, options, note=panel.note, first=is_first)
                is_first = False
                yield panel.title, (panel, drawn)


# --- How it goes ----------------------------------------------------------------------------------


def _head(visit: PageRequest, of: RunDescription) -> None:
    past = visit.run.readings.past
    ui.html(lead.lead(of, past), sanitize=False).classes("w-full")
    if visit.run.readings.num_unread:
        ui.label(
            f"{visit.run.readings.num_unread} lines of the journal are of a later version of "
            "Midflight and are not shown."
        ).classes("note")


def _findings(visit: PageRequest, times: Times) -> None:
    """Shows the findings that need attention, each with a link and a remedy."""
    past = visit.run.readings.past
    is_calm = not past.alarms and not any(step.failures for step in past.steps)
    with widgets.panel():
        widgets.section("Findings")
        if not past.steps and not past.alarms:
            ui.label("No step has been made yet: charts appear with the first.").classes("note")
        elif is_calm:
            ui.label("No alarm, and no rollout failed.").classes("calm")
        _alarms(visit, past.alarms)
        _failures(visit, times, past)
        if (visit.run.folder / HELDOUT).is_file():
            evaluated = visit.link("groups", kind="evaluation")
            link = ui.link("What the model said to held-out tasks", evaluated)
            link.props('data-test="held out groups"')


def _alarms(visit: PageRequest, alarms: Sequence[AlarmLine]) -> None:
    """The newest alarms first. Those before them are unfolded."""
    if not alarms:
        return
    newest = list(reversed(alarms[-MAX_ALARMS:]))
    _alarm_table(visit, newest[:OPEN_ALARMS], name="alarms")
    earlier = newest[OPEN_ALARMS:]
    if earlier:
        with ui.element("details"):
            with ui.element("summary"):
                ui.label(f"{len(earlier)} earlier alarms").style("display: inline")
            _alarm_table(visit, earlier, name="earlier alarms")


def _alarm_table(visit: PageRequest, alarms: Sequence[AlarmLine], *, name: str) -> None:
    rows: list[list[widgets.Cell]] = []
    for alarm in alarms:
        step = (f"step {alarm.step}", visit.link("groups", step=alarm.step or 1))
        named = widgets.Markup(widgets.tag(alarm.name.replace("_", " "), "bad"))
        rows.append([step, named, alarm.text])
    widgets.table(("when", "alarm", "what was seen, and what to do"), rows, name=name)


def _failures(visit: PageRequest, times: Times, past: JournalHistory) -> None:
    """Shows the failures by source if the timeline knows it. Each class of failure is there once,
    with the step in which it was most frequent.
    """
    by_source = failures(times.rollouts)
    if not by_source:
        for step in past.steps:
            for name, count in (step.failures or {}).items():
                by_source["", name] += count
    tries = Counter(rollout.source for rollout in times.rollouts)
    rows: list[list[widgets.Cell]] = []
    for (source, name), count in by_source.most_common(12):
        failed = (name, visit.link("groups", failure=name, source=source or None))
        of = f"{count} of {tries[source]} tries" if tries[source] else f"{count} tries"
        rows.append([source or "all sources", failed, of, _worst_step(visit, past, name)])
    if rows:
        note = ui.label("Rollouts that got no reward: they are in no mean and no gradient.")
        note.classes("note")
        widgets.table(("environment", "failed by", "how often", "most in"), rows, name="failures")


def _worst_step(visit: PageRequest, past: JournalHistory, name: str) -> widgets.Cell:
    """The step in which this class of failure was most frequent."""

    def count(step: StepLine) -> int:
        return (step.failures or {}).get(name, 0)

    worst = max(past.steps, key=count, default=None)
    if worst is None or not count(worst):
        return UNKNOWN
    return f"step {worst.step} ({count(worst)})", visit.link("groups", step=worst.step)


def _timed(times: Times) -> list[Panel]:
    """The charts that the timeline adds to those of the journal."""
    recent = times.rollouts[-RECENT_ROLLOUTS:]
    of = split(recent)
    if of is None:
        return []
    named = {
        "generating": of.generating,
        "waiting for a first token": of.waiting,
        "environment": of.environment,
    }
    whole = sum(named.values()) or 1.0
    parts = [f"{name} {seconds:.3f} s ({seconds / whole:.0%})" for name, seconds in named.items()]
    note = f"Mean of the last {len(recent)} rollouts: {'; '.join(parts)}."
    found = bars(
        "A rollout's time",
        list(named),
        {"seconds": [round(seconds, 4) for seconds in named.values()]},
        x="",
        note=note,
    )
    return [] if found is None else [found]


# --- Several runs ---------------------------------------------------------------------------------


def _compare_with(visit: PageRequest) -> None:
    others = [run for run in visit.runs if run is not visit.run]
    if others:
        widgets.section("Compare", "This run with another one:")
        with ui.element("div").classes("colours"):
            for other in others:
                ui.link(other.slug, f"{visit.link('run')}?with={other.slug}")
            slugs = ",".join(run.slug for run in others)
            overlay = ui.link("all of them", f"{visit.link('run')}?with={slugs}")
            overlay.props('data-test="overlay"')


def _overlaid(visit: PageRequest, runs: Sequence[ArchivedRun]) -> None:
    for run in runs:
        run.journal()
    rows: list[list[widgets.Cell]] = []
    for run in runs:
        of = run.describe()
        rows.append([(run.slug, visit.link("run", of=run)), *of.cells()])
    widgets.table(COLUMNS, rows, name="overlaid runs")
    ui.label(
        "Each line is a moving mean; runs that differ by their seed alone are one line, their "
        "mean, in a band from their least to their most."
    ).classes("note")

    def refresh() -> bool:
        has_lines = [run.readings.refresh() for run in runs]
        return any(has_lines)

    _live(refresh, lambda: of_runs(runs), lambda: None)
    widgets.section("Options that differ")
    found = differences([run.config() for run in runs])
    options: list[list[str]] = []
    for name, values in found.items():
        shown = [UNKNOWN if value is None else str(value) for value in values]
        options.append([name, *shown])
    if options:
        slugs = [run.slug for run in runs]
        widgets.table(["option", *slugs], options, name="differences")
    else:
        ui.label("None.").classes("note")
