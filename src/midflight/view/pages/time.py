"""Time: what engines, trainer, handovers and evaluations did, on one axis, and who waited for
whom.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

from nicegui import events, ui

from midflight.archive.times import TimelinePart, Times, before_newest, engine_spans, part_from
from midflight.errors import MidflightError, RunGone
from midflight.observe.readable import duration, percent
from midflight.view import looks
from midflight.view.charting import COLORS, GREY, GRID
from midflight.view.visit import Visit

REFRESH_SECONDS = 5.0
MAX_BARS = 2000
"""Of a track: more than anybody tells apart; the newest are drawn."""
BEFORE_STEP_SECONDS = 5.0
"""That are shown before a step that is asked for."""
GAP_SECONDS = 0.02
"""Pauses of an engine shorter than this are not drawn."""

Bars: TypeAlias = "list[tuple[float, float, str, int | None]]"
"""Begin, end, what to say of it, and the step that a click leads to."""


def draw(visit: Visit) -> None:
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
            _waits(times)
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


def asked(visit: Visit) -> float | None:
    """From which second on the address wants to see, or from before which step; none for the
    newest. `MidflightError` where it says neither.
    """
    since = visit.query.get("from", "")
    step = visit.query.get("step", "")
    if step:
        if (
            line := next(
                (line for line in visit.run.readings.past.steps if str(line.step) == step), None
            )
        ) is None:
            raise MidflightError(
                f"there is no step {step!r} in this run yet; give the number of one, or seconds of "
                "the run as `from`."
            )
        return line.seconds - line.step_seconds - BEFORE_STEP_SECONDS
    try:
        return float(since) if since else None
    except ValueError:
        raise MidflightError(
            f"`from` is {since!r} in the address; it is a number of seconds since the run began."
        ) from None


def _places(visit: Visit, part: TimelinePart | None) -> None:
    """What of a long run is shown, and the way to the rest of it."""
    earlier = before_newest(visit.run.folder) if part is None else part.earlier
    if part is None and earlier is None:
        return  # all of it is here
    with ui.element("nav").classes("tiles").props('aria-label="Parts of the run"'):
        for name, since in (("earlier", earlier), ("later", part and part.later)):
            if since is not None:
                ui.link(name, f"{visit.link('time')}?from={max(0.0, since)}").props(
                    f'data-test="{name}"'
                )
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
    """What is drawn, by the name of each track. `steps`: the number of the step that made a
    version.
    """
    found: defaultdict[str, Bars] = defaultdict(list)
    for engine, spans in engine_spans([*times.rollouts, *times.evaluated], gap=GAP_SECONDS).items():
        found[engine] = [
            (began, ended, "answers", None)
            for began, ended in zip(spans.starts, spans.ends, strict=True)
        ]
    for step in times.steps:
        number = steps.get(step.version)
        what = (
            f"step {number}"
            if number is not None
            else f"the step to version {step.version}, lost in a crash or not yet told"
        )
        found["trainer"].append(
            (
                step.began,
                step.ended,
                f"{what}, {step.num_tokens} tokens{', skipped' if step.skipped else ''}",
                number,
            )
        )
    for commit in times.commits:
        paused = commit.at - commit.pause_seconds
        found["handover"].append(
            (
                paused - commit.stage_seconds,
                paused,
                f"version {commit.version} is brought to {commit.engine}",
                None,
            )
        )
        found["pause"].append(
            (paused, commit.at, f"{commit.engine} stands still for version {commit.version}", None)
        )
    for began, ended, version in _evaluations(times):
        found["evaluation"].append((began, ended, f"held-out tasks, version {version}", None))
    for wait in times.waits:
        found[f"{wait.who} waits"].append((wait.began, wait.ended, f"for {wait.for_whom}", None))
    return {name: bars[-MAX_BARS:] for name, bars in found.items()}


def _evaluations(times: Times) -> Iterable[tuple[float, float, int]]:
    """From the first rollout begun since the evaluation before to the last score."""
    ends: dict[int, float] = {}
    for score in times.scores:
        ends[score.version] = score.at
    before = float("-inf")
    for version, end in ends.items():
        began = [rollout.began for rollout in times.evaluated if before <= rollout.began <= end]
        if began:
            yield min(began), end, version
        before = end


def _figure(visit: Visit, times: Times) -> dict[str, Any]:
    """For Plotly: a trace for each track, whose bars begin where things began."""
    steps = {line.version: line.step for line in visit.run.readings.past.steps}
    traces: list[dict[str, Any]] = []
    drawn = tracks(times, steps)
    for at, (name, bars) in enumerate(drawn.items()):
        text = [
            f"{what}<br>{began:.3f} to {ended:.3f} s ({ended - began:.3f} s)"
            for began, ended, what, _ in bars
        ]
        shape = {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "width": 0.7,
            "marker": {"color": COLORS[at % len(COLORS)]},
        }
        where = {
            "base": [bar[0] for bar in bars],
            "x": [bar[1] - bar[0] for bar in bars],
            "y": [name] * len(bars),
        }
        traces.append(
            {
                **shape,
                **where,
                "hovertext": text,
                "hoverinfo": "text",
                "textposition": "none",
                "customdata": [bar[3] for bar in bars],
            }
        )
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


def _follow(visit: Visit, event: events.GenericEventArguments) -> None:
    for point in event.args.get("points", []):
        if (step := point.get("customdata")) is not None:
            ui.navigate.to(visit.link("groups", step=step))


def _waits(times: Times) -> None:
    looks.section("Who waited for whom")
    waited: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for wait in times.waits:
        waited[wait.who, wait.for_whom].append(wait.ended - wait.began)
    whole = times.steps[-1].ended - times.steps[0].began if times.steps else 0.0
    rows: list[list[looks.Cell]] = []
    for (who, whom), each in sorted(waited.items(), key=lambda item: -sum(item[1])):
        rows.append(
            [
                who,
                whom,
                duration(sum(each)),
                percent(sum(each) / whole if whole > 0 else None),
                f"{max(each):.3f} s",
            ]
        )
    looks.table(
        ("who", "for whom", "in all", "of the time of the steps", "longest"), rows, name="waits"
    )


def _steps(visit: Visit, times: Times) -> None:
    """What the chart says of the last steps, for those who do not point at it."""
    looks.section("Last steps")
    steps = {line.version: line.step for line in visit.run.readings.past.steps}
    pause = {commit.version: commit for commit in times.commits}
    rows: list[list[looks.Cell]] = []
    for before, step in pairwise([None, *times.steps][-31:]):
        if step is None or (number := steps.get(step.version)) is None:
            continue
        idle = "" if before is None else f"{max(0.0, step.began - before.ended):.3f} s"
        commit = pause.get(step.version)
        handed = (
            ""
            if commit is None
            else f"{commit.stage_seconds:.3f} s and {commit.pause_seconds:.3f} s"
        )
        rows.append(
            [
                (f"step {number}", visit.link("groups", step=number)),
                f"{step.began:.3f} s",
                f"{step.ended - step.began:.3f} s",
                idle,
                handed,
            ]
        )
    looks.table(
        ("step", "began", "took", "trainer idle before", "handover took, engines paused"),
        rows[::-1],
        name="steps",
    )
