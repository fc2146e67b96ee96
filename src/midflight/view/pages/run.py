"""Run: how it goes, what is wrong with it and what to do, and every number of its journal as a
chart; several runs over each other.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from nicegui import ui

from midflight.archive.phases import room_of
from midflight.archive.runs import ArchivedRun, RunCondition, differences, flat
from midflight.archive.stored import copy_in_words
from midflight.archive.times import Times, busy_shares, failures, split
from midflight.errors import RunGone
from midflight.observe.bottleneck import judge
from midflight.observe.history import PastLines
from midflight.observe.readable import UNKNOWN, duration, number, percent
from midflight.trajectories.heldout import HELDOUT
from midflight.view import looks
from midflight.view.panels import RECENT_STEPS, Panel, bars, of_run, of_runs
from midflight.view.visit import Visit

REFRESH_SECONDS = 3.0
LATEST_SECONDS = 15.0
"""At the soonest; and at the latest, however much a look costs."""
SHARE = 0.012
"""Of a core: what the viewer's process may take while a run's page is open. Where looking costs
more, it looks less often.
"""
RECENT_ROLLOUTS = 512
"""That the times of rollouts are of."""
LATELY_BYTES = 2**20
"""Of the timeline, which shares of time, failures by environment and the times of rollouts are of,
until more is appended: some thousand rollouts.
"""
MAX_ALARMS = 20


def draw(visit: Visit) -> None:
    others = [
        run
        for run in visit.runs
        if run.slug in visit.query.get("with", "").split(",") and run is not visit.run
    ]
    if others:
        _overlaid(visit, [visit.run, *others])
    else:
        _alone(visit)


def _alone(visit: Visit) -> None:
    times = Times(visit.run.folder, newest=LATELY_BYTES)
    times.refresh()
    if (said := copy_in_words(visit.run.folder)) is not None:
        ui.label(said)
    head = ui.element("div").style("width: 100%")

    def show_head() -> None:
        head.clear()
        with head:
            _head(visit, times)
            _findings(visit, times)

    def panels() -> list[Panel]:
        return of_run(visit.run.readings.past) + _timed(times)

    show_head()
    looks.section("Numbers")
    _live(lambda: (visit.run.readings.refresh(), times.refresh())[0], panels, show_head)
    _compare_with(visit)
    looks.section("Configuration")
    with ui.element("details"):
        with ui.element("summary"):
            ui.label("All options, as the run wrote them down").style("display: inline")
        looks.table(
            ("option", "value"),
            [(name, str(value)) for name, value in flat(visit.run.config()).items()],
            name="options",
        )


def _live(
    refresh: Callable[[], bool], panels: Callable[[], list[Panel]], show_more: Callable[[], None]
) -> None:
    """Charts that follow the journal; what a chart shows is sent again only where it is something
    else.
    """
    place = looks.charts()
    shown: dict[str, tuple[Panel, tuple[ui.echart, ui.label]]] = {}

    def show() -> None:
        now = {panel.title: panel for panel in panels()}
        if list(now) != list(shown):
            place.clear()
            shown.clear()
            with place:
                shown.update(
                    {
                        title: (panel, looks.figure(title, dict(panel.options), note=panel.note))
                        for title, panel in now.items()
                    }
                )
            return
        for title, panel in now.items():
            if panel != shown[title][0]:
                chart, said = shown[title][1]
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


# --- How it goes ----------------------------------------------------------------------------------


def _head(visit: Visit, times: Times) -> None:
    of = visit.run.describe()
    past = visit.run.readings.past
    last = past.steps[-1] if past.steps else None
    room = room_of(visit.run.folder)
    shares = busy_shares(times, slots=room.slots)
    waiting = f"{of.step}" if of.steps is None else f"{of.step} of {of.steps}"
    facts = [
        ("state", of.condition.value),
        ("step", waiting),
        ("version", str(last.version if last else 0)),
        ("reward", number(of.reward)),
    ]
    facts += [(f"held out {name}", text) for name, text in _heldout(past).items()]
    facts += [
        ("time", duration(of.seconds)),
        ("ETA", _eta(past, of.steps) if of.condition is RunCondition.RUNNING else UNKNOWN),
    ]
    if last is not None:
        facts += [
            ("tokens trained", f"{last.totals.trained_tokens:,}"),
            ("tokens generated", f"{last.totals.generated_tokens:,}"),
        ]
    facts += [
        (
            "engine, trainer, both busy",
            ", ".join(map(percent, (shares.engines, shares.trainer, shares.both))),
        )
    ]
    facts += [("engines' slots in use", percent(shares.slots))]
    looks.facts(facts)
    if (visit.run.folder / HELDOUT).is_file():
        ui.link(
            "what the model said to held-out tasks", visit.link("groups", kind="evaluation")
        ).props('data-test="held out groups"')
    bound, advice = judge(
        engine_busy=shares.engines,
        trainer_busy=shares.trainer,
        slots_used=shares.slots,
        cores=room.cores,
    )
    if advice:
        ui.label(f"This run is {bound.value}: {advice}.").classes("note").props(
            'data-test="advice"'
        )
    if visit.run.readings.num_unread:
        ui.label(
            f"{visit.run.readings.num_unread} lines of the journal are of a later version of "
            "Midflight and are not shown."
        ).classes("note")


def _heldout(past: PastLines) -> dict[str, str]:
    """First and last score by source."""
    scores: dict[str, list[float | None]] = {}
    for line in past.evaluations:
        scores.setdefault(line.source, []).append(line.mean_reward)
    return {
        source: number(s[0]) if len(s) == 1 else f"{number(s[0])} → {number(s[-1])}"
        for source, s in scores.items()
    }


def _eta(past: PastLines, steps: int | None) -> str:
    recent = past.steps[-RECENT_STEPS:]
    if steps is None or len(recent) < 2:
        return UNKNOWN
    each = (recent[-1].seconds - recent[0].seconds) / (len(recent) - 1)
    return duration(max(0, steps - recent[-1].step) * each)


def _findings(visit: Visit, times: Times) -> None:
    """What somebody should look at, each with where to look and what to do."""
    past = visit.run.readings.past
    looks.section("Findings")
    _failures(visit, times, past)
    if past.alarms:
        rows: list[list[looks.Cell]] = []
        for alarm in reversed(past.alarms[-MAX_ALARMS:]):
            rows.append(
                [
                    (f"step {alarm.step}", visit.link("groups", step=alarm.step or 1)),
                    alarm.name,
                    alarm.text,
                ]
            )
        looks.table(("when", "alarm", "what was seen, and what to do"), rows, name="alarms")
    if not past.alarms and not any(step.failures for step in past.steps):
        ui.label("No alarm, and no rollout failed.").classes("note")


def _failures(visit: Visit, times: Times, past: PastLines) -> None:
    """By source, where the timeline knows it; each class once, with the step in which it failed
    most.
    """
    by_source = failures(times.rollouts)
    if not by_source:
        by_source = Counter(
            {("", name): n for step in past.steps for name, n in (step.failures or {}).items()}
        )
    tries = Counter(rollout.source for rollout in times.rollouts)
    rows: list[list[looks.Cell]] = []
    for (source, name), count in by_source.most_common(12):
        worst = max(
            past.steps, key=lambda step, name=name: (step.failures or {}).get(name, 0), default=None
        )
        where: looks.Cell = UNKNOWN
        if worst is not None and (worst.failures or {}).get(name):
            where = (
                f"step {worst.step} ({(worst.failures or {})[name]})",
                visit.link("groups", step=worst.step),
            )
        of = f"{count} of {tries[source]} tries" if tries[source] else f"{count} tries"
        rows.append(
            [
                source or "all sources",
                (name, visit.link("groups", failure=name, source=source or None)),
                of,
                where,
            ]
        )
    if rows:
        ui.label("Rollouts that got no reward: they are in no mean and no gradient.").classes(
            "note"
        )
        looks.table(("environment", "failed by", "how often", "most in"), rows, name="failures")


def _timed(times: Times) -> list[Panel]:
    """What the timeline adds to the journal's numbers."""
    recent = times.rollouts[-RECENT_ROLLOUTS:]
    if (of := split(recent)) is None:
        return []
    named = {
        "generating": of.generating,
        "waiting for a first token": of.waiting,
        "environment": of.environment,
    }
    whole = sum(named.values()) or 1.0
    note = "; ".join(
        f"{name} {seconds:.3f} s ({seconds / whole:.0%})" for name, seconds in named.items()
    )
    note = f"Mean of the last {len(recent)} rollouts: {note}."
    found = bars(
        "A rollout's time",
        list(named),
        {"seconds": [round(seconds, 4) for seconds in named.values()]},
        x="",
        note=note,
    )
    return [] if found is None else [found]


# --- Several runs ---------------------------------------------------------------------------------


def _compare_with(visit: Visit) -> None:
    others = [run for run in visit.runs if run is not visit.run]
    if others:
        looks.section("Over each other", "This run with another one:")
        with ui.element("div").classes("tiles"):
            for other in others:
                ui.link(other.slug, f"{visit.link('run')}?with={other.slug}")
            ui.link(
                "all of them", f"{visit.link('run')}?with={','.join(run.slug for run in others)}"
            ).props('data-test="overlay"')


def _overlaid(visit: Visit, runs: Sequence[ArchivedRun]) -> None:
    for run in runs:
        run.journal()
    rows: list[list[looks.Cell]] = []
    for run in runs:
        of = run.describe()
        scores = (
            ", ".join(f"{name} {text}" for name, text in _heldout(run.readings.past).items())
            or UNKNOWN
        )
        rows.append(
            [
                (run.slug, visit.link("run", of=run)),
                of.condition.value,
                str(of.step),
                number(of.reward),
                scores,
                duration(of.seconds),
            ]
        )
    looks.table(("run", "state", "step", "reward", "held out", "time"), rows, name="overlaid runs")
    looks.section(
        "Numbers",
        (
            "Each line is a moving mean; runs that differ by their seed alone are one line, their "
            "mean, in a band from their least to their most."
        ),
    )
    _live(
        lambda: sum(run.readings.refresh() for run in runs) > 0, lambda: of_runs(runs), lambda: None
    )
    looks.section("Options that differ")
    found = differences([run.config() for run in runs])
    options = [
        [name, *(UNKNOWN if value is None else str(value) for value in values)]
        for name, values in found.items()
    ]
    if options:
        looks.table(("option", *(run.slug for run in runs)), options, name="differences")
    else:
        ui.label("None.").classes("note")
