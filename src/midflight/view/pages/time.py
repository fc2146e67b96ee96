"""The page of a run's time: when engines, trainer, handovers and evaluations were busy, on one
axis, and which of them waited for which.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

from nicegui import events, ui

from midflight.archive.times import (
    TimelinePart,
    Times,
    before_newest,
    engine_spans,
    handover_seconds,
    part_from,
)
from midflight.errors import MidflightError, RunGone
from midflight.observe.readable import duration, percent
from midflight.view import widgets
from midflight.view.charting import COLORS, GREY, GRID
from midflight.view.visit import PageRequest

REFRESH_SECONDS = 5.0
MAX_BARS = 2000
"""The number of bars of a track that are drawn, the newest. More could not be told apart."""
BEFORE_STEP_SECONDS = 5.0
"""The seconds before a step that are shown if a step is asked for."""
GAP_SECONDS = 0.02
"""Pauses of an engine shorter than this are not drawn."""

Bars: TypeAlias = "list[tuple[float, float, str, int | None]]"
"""Beginning, end and text of each bar, and the step that a click leads to."""


def draw(visit: PageRequest) -> None:
    since = asked(visit)
    part = None if since is None else part_from(visit.run.folder, since)
    times = Times(visit.run.folder, part)
    times.refresh()
    if not times.steps and not times.rollouts:
        ui.label(
            "Nothing has happened yet, or the run was made before there were timelines: it has no "
            "timeline.jsonl."
        ).classes("note")
    ui.label(
        "Drag over a part to see it larger, scroll to zoom, double-click to see all. A click on a "
        "step leads to its groups."
    ).classes("note")
    _places(visit, part)
    with (
        ui.element("div")
        .style("width: 100%")
        .props('role="img" aria-label="Who was busy when" data-test="chart time"')
    ):
        chart = ui.plotly(_figure(visit, times)).style("width: 100%")
    chart.on("plotly_click", lambda event: _follow(visit, event))
    below = ui.element("div").style("width: 100%")

    def show() -> None:
        below.clear()
        with below:
            _waits(visit, times)
            _steps(visit, times)

    def look() -> None:
        try:
            visit.run.journal()
            if times.refresh():
                chart.update_figure(_figure(visit, times))
                show()
        except RunGone as gone:
            timer.deactivate()
            ui.label(str(gone)).props('role="alert" data-test="problem"').classes("trouble")

    show()
    timer = ui.timer(REFRESH_SECONDS, look, immediate=False)


def asked(visit: PageRequest) -> float | None:
    """The second from which on the address wants to see the run, by itself or as a step; None for
    the newest part. Raises `MidflightError` if it names neither a second nor a step.
    """
    step = visit.query.get("step", "")
    if step:
        for line in visit.run.readings.past.steps:
            if str(line.step) == step:
                return line.seconds - line.step_seconds - BEFORE_STEP_SECONDS
        raise MidflightError(
            f"there is no step {step!r} in this run yet; give the number of one, or seconds of "
            "the run as `from`."
        )
    since = visit.query.get("from", "")
    try:
        return float(since) if since else None
    except ValueError:
        raise MidflightError(
            f"`from` is {since!r} in the address; it is a number of seconds since the run began."
        ) from None


def _places(visit: PageRequest, part: TimelinePart | None) -> None:
    """Links to the other parts of a long run, of which one part is shown."""
    earlier = before_newest(visit.run.folder) if part is None else part.earlier
    if part is None and earlier is None:
        return  # all of it is here
    with ui.element("nav").classes("tiles").props('aria-label="Parts of the run"'):
        later = None if part is None else part.later
        for name, since in (("earlier", earlier), ("later", later)):
            if since is not None:
                link = ui.link(name, f"{visit.link('time')}?from={max(0.0, since)}")
                link.props(f'data-test="{name}"')
        if part is not None:
            ui.link("newest", visit.link("time")).props('data-test="newest"')
        ui.html(
            '<form method="get"><label>from second <input name="from" inputmode="decimal" '
            'size="8"></label> '
            '<label>or from step <input name="step" inputmode="numeric" size="6"></label> '
            "<button>Show</button></form>",
            sanitize=False,
        )


def tracks(times: Times, steps: Mapping[int, int]) -> dict[str, Bars]:
    """The bars that are drawn, by the name of their track. `steps` gives the number of the step
    that made a version.
    """
    found: defaultdict[str, Bars] = defaultdict(list)
    rollouts = times.rollouts + times.evaluated
    for engine, spans in engine_spans(rollouts, gap=GAP_SECONDS).items():
        found[engine] = [(began, ended, "answers", None) for began, ended in spans]
    for step in times.steps:
        number = steps.get(step.version)
        if number is None:
            what = f"the step to version {step.version}, lost in a crash or not yet told"
        else:
            what = f"step {number}"
        what += f", {step.num_tokens} tokens"
        if step.skipped:
            what += ", skipped"
        found["trainer"].append((step.began, step.ended, what, number))
    for commit in times.commits:
        paused = commit.at - commit.pause_seconds
        staged = paused - commit.stage_seconds
        brought = f"version {commit.version} is brought to {commit.engine}"
        stands = f"{commit.engine} stands still for version {commit.version}"
        found["handover"].append((staged, paused, brought, None))
        found["pause"].append((paused, commit.at, stands, None))
    for began, ended, version in _evaluations(times):
        found["evaluation"].append((began, ended, f"held-out tasks, version {version}", None))
    for wait in times.waits:
        found[f"{wait.who} waits"].append((wait.began, wait.ended, f"for {wait.for_whom}", None))
    return {name: bars[-MAX_BARS:] for name, bars in found.items()}


def _evaluations(times: Times) -> Iterable[tuple[float, float, int]]:
    """Each evaluation from its first rollout since the evaluation before to its last score."""
    ends: dict[int, float] = {}
    for score in times.scores:
        ends[score.version] = score.at
    before = float("-inf")
    for version, end in ends.items():
        began = [rollout.began for rollout in times.evaluated if before <= rollout.began <= end]
        if began:
            yield min(began), end, version
        before = end


def _figure(visit: PageRequest, times: Times) -> dict[str, Any]:
    """The figure as Plotly takes it: a trace for each track, with a bar for each span."""
    steps = {line.version: line.step for line in visit.run.readings.past.steps}
    drawn = tracks(times, steps)
    traces = [
        _trace(name, bars, color=COLORS[at % len(COLORS)])
        for at, (name, bars) in enumerate(drawn.items())
    ]
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GREY}
    layout = {
        "barmode": "overlay",
        "showlegend": False,
        "height": 60 + 38 * max(1, len(drawn)),
        "margin": {"l": 8, "r": 8, "t": 8, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": GREY},
        "dragmode": "zoom",
        "uirevision": "kept",
        "xaxis": {**axis, "title": {"text": "seconds of the run"}},
        "yaxis": {
            **axis,
            "automargin": True,
            "fixedrange": True,
            "autorange": "reversed",
            "categoryarray": list(drawn),
            "type": "category",
        },
    }
    return {
        "data": traces,
        "layout": layout,
        "config": {"scrollZoom": True, "displaylogo": False, "responsive": True},
    }


def _trace(name: str, bars: Bars, *, color: str) -> dict[str, Any]:
    text = [
        f"{what}<br>{began:.3f} to {ended:.3f} s ({ended - began:.3f} s)"
        for began, ended, what, _ in bars
    ]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "width": 0.7,
        "marker": {"color": color},
        "base": [began for began, _, _, _ in bars],
        "x": [ended - began for began, ended, _, _ in bars],
        "y": [name] * len(bars),
        "hovertext": text,
        "hoverinfo": "text",
        "textposition": "none",
        "customdata": [step for _, _, _, step in bars],
    }


def _follow(visit: PageRequest, event: events.GenericEventArguments) -> None:
    for point in event.args.get("points", []):
        step = point.get("customdata")
        if step is not None:
            ui.navigate.to(visit.link("groups", step=step))


def _waits(visit: PageRequest, times: Times) -> None:
    """Shows the waits of the training phase. Only the longest one is of what is drawn."""
    widgets.section("Who waited for whom")
    longest: defaultdict[tuple[str, str], float] = defaultdict(float)
    for wait in times.waits:
        of = wait.who, wait.for_whom
        longest[of] = max(longest[of], wait.ended - wait.began)
    rows: list[list[widgets.Cell]] = []
    for idle in visit.run.describe().summary.idle_times:
        most = f"{longest[idle.who, idle.for_whom]:.3f} s"
        rows.append([idle.who, idle.for_whom, duration(idle.seconds), percent(idle.share), most])
    widgets.table(
        ("who", "for whom", "in all", "of the training phase", "longest of those drawn"),
        rows,
        name="waits",
    )


def _steps(visit: PageRequest, times: Times) -> None:
    """Shows the last steps as a table, which has the numbers that the chart shows on hover."""
    widgets.section("Last steps")
    steps = {line.version: line.step for line in visit.run.readings.past.steps}
    handovers = handover_seconds(times.commits)
    rows: list[list[widgets.Cell]] = []
    for before, step in pairwise([None, *times.steps][-31:]):
        number = None if step is None else steps.get(step.version)
        if step is None or number is None:
            continue
        idle = ""
        if before is not None:
            idle = f"{max(0.0, step.began - before.ended):.3f} s"
        handed = ""
        if step.version in handovers:
            stage, pause = handovers[step.version]
            handed = f"{stage:.3f} s and {pause:.3f} s"
        row: list[widgets.Cell] = [
            (f"step {number}", visit.link("groups", step=number)),
            f"{step.began:.3f} s",
            f"{step.ended - step.began:.3f} s",
            idle,
            handed,
        ]
        rows.append(row)
    widgets.table(
        ("step", "began", "took", "trainer idle before", "handover took, engines paused"),
        rows[::-1],
        name="steps",
    )
