"""The page of a run's time: when engines, trainer, handovers and evaluations were busy, on one
axis, and which of them waited for which.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

from nicegui import ui

from midflight.archive.times import (
    TimelinePart,
    Times,
    before_newest,
    engine_spans,
    handover_seconds,
    part_from,
)
from midflight.errors import MidflightError, RunGone
from midflight.observe.readable import duration
from midflight.view import widgets
from midflight.view.bars import WAITING, Bar, figure, follow
from midflight.view.charting import COLORS, version_color
from midflight.view.visit import PageRequest

REFRESH_SECONDS = 5.0
MAX_BARS = 2000
"""The number of bars of a track that are drawn, the newest. More could not be told apart."""
BEFORE_STEP_SECONDS = 5.0
"""The seconds before a step that are shown if a step is asked for."""
GAP_SECONDS = 0.02
"""Pauses of an engine shorter than this are not drawn."""

MAX_STEPS = 10
"""The number of steps in the table, the newest."""

Bars: TypeAlias = "list[Bar]"


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
        widgets.panel()
        .classes("timeline")
        .props('role="img" aria-label="Who was busy when" data-test="chart time"')
    ):
        chart = ui.plotly(_figure(visit, times)).style("width: 100%")
    chart.on("plotly_click", follow)
    below = widgets.two_columns()

    def show() -> None:
        below.clear()
        with below:
            with widgets.panel():
                _waits(visit, times)
                _what_tracks_are()
            with widgets.panel():
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
    with ui.element("nav").classes("seek").props('aria-label="Parts of the run"'):
        later = None if part is None else part.later
        for name, since in (("earlier", earlier), ("later", later)):
            if since is not None:
                link = ui.link(name, f"{visit.link('time')}?from={max(0.0, since)}")
                link.props(f'data-test="{name}"')
        if part is not None:
            ui.link("newest", visit.link("time")).props('data-test="newest"')
        ui.html(
            '<form method="get" class="seek"><label>from second <input name="from" inputmode="decimal" '
            'size="8"></label> '
            '<label>or from step <input name="step" inputmode="numeric" size="6"></label> '
            "<button>Show</button></form>",
            sanitize=False,
        )


def tracks(visit: PageRequest, times: Times, steps: Mapping[int, int]) -> dict[str, Bars]:
    """The bars that are drawn, by the name of their track. `steps` gives the number of the step
    that made a version.
    """
    found: defaultdict[str, Bars] = defaultdict(list)
    rollouts = times.rollouts + times.evaluated
    for engine, spans in engine_spans(rollouts, gap=GAP_SECONDS).items():
        found[engine] = [Bar(began, ended, "answers", COLORS[0]) for began, ended in spans]
    for step in times.steps:
        number = steps.get(step.version)
        link = None
        if number is None:
            what = f"the step to version {step.version}, lost in a crash or not yet told"
        else:
            what = f"step {number} makes version {step.version}"
            link = visit.link("groups", step=number)
        what += f", {step.num_tokens} tokens"
        if step.skipped:
            what += ", skipped"
        color = version_color(step.version)
        found["trainer"].append(Bar(step.began, step.ended, what, color, link))
    for commit in times.commits:
        color = version_color(commit.version)
        paused = commit.at - commit.pause_seconds
        staged = paused - commit.stage_seconds
        brought = f"version {commit.version} is brought to {commit.engine}"
        stands = f"{commit.engine} stands still for version {commit.version}"
        found["handover"].append(Bar(staged, paused, brought, color))
        found["pause"].append(Bar(paused, commit.at, stands, color))
    for began, ended, version in _evaluations(times):
        what = f"held-out tasks, version {version}"
        found["evaluation"].append(Bar(began, ended, what, version_color(version)))
    for wait in times.waits:
        bar = Bar(wait.began, wait.ended, f"for {wait.for_whom}", WAITING)
        found[f"{wait.who} waits"].append(bar)
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
    steps = {line.version: line.step for line in visit.run.readings.past.steps}
    return figure(tracks(visit, times, steps))


TRACKS = {
    "engine0, …": "the engine generates answers",
    "trainer": "a step, in the colour of the version that it makes",
    "handover": "that version is brought to an engine, which goes on generating",
    "pause": "the engine stands still to take it up",
    "evaluation": "held-out tasks, in the colour of the version that answers",
    "… waits": "one part has nothing to do because of another",
}


def _what_tracks_are() -> None:
    widgets.section("What the tracks are")
    rows = "".join(f"<dt>{name}</dt><dd>{what}</dd>" for name, what in TRACKS.items())
    ui.html(f'<dl class="what">{rows}</dl>', sanitize=False).classes("w-full")


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
        seconds = duration(idle.seconds)
        rows.append([idle.who, idle.for_whom, seconds, widgets.share(idle.share), most])
    if not rows:
        ui.label("No step has told of a wait so far.").classes("note")
        return
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
    for before, step in pairwise([None, *times.steps][-MAX_STEPS - 1 :]):
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
            widgets.Markup(widgets.version(step.version, str(step.version))),
            f"{step.began:.3f} s",
            f"{step.ended - step.began:.3f} s",
            idle,
            handed,
        ]
        rows.append(row)
    widgets.table(
        ("step", "version", "began", "took", "idle before", "handover, pause of engines"),
        rows[::-1],
        name="steps",
    )
