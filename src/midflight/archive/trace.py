"""A run as a trace that Perfetto (ui.perfetto.dev) and `chrome://tracing` open: every rollout,
engine, step, handover and evaluation on one time axis.

The format is that of Chrome's trace events, as JSON. Times are microseconds since the run began.
Slices of a track lie beside or inside each other, never across. Two kinds of slices are estimates
and are marked as such in their arguments: the time at which an engine began to take a version in,
and an agent's work between two answers, which only the agent knows.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midflight.archive.runs import open_run
from midflight.archive.times import engine_spans
from midflight.errors import ConfigError
from midflight.observe import timeline
from midflight.observe.atomic_write import write_whole
from midflight.observe.history import JournalHistory
from midflight.observe.lines import AlarmLine
from midflight.observe.rolling import Spans
from midflight.types import Json, Kind, TurnTimes

RUN, TRAINER, ENGINES, EVALUATIONS, WAITS, ROLLOUTS, EVALUATED = range(1, 8)
"""Groups of tracks, in the order in which they are shown."""
TITLES = {
    RUN: "run",
    TRAINER: "trainer",
    ENGINES: "engines",
    EVALUATIONS: "evaluations",
    WAITS: "who waits for whom",
    ROLLOUTS: "rollouts",
    EVALUATED: "rollouts of evaluations",
}
SHORTEST = 0.0005
"""Seconds. Shorter gaps between an agent's answers are not drawn."""
ESTIMATED = "estimated"


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """`X` is a slice, `C` a counter, `i` an instant, `M` a name. `ts` and `dur` are
    microseconds.
    """

    name: str
    ph: str
    pid: int
    tid: int = 0
    ts: int | None = None
    dur: int | None = None
    s: str | None = None
    args: dict[str, Json] = {}


class RunTrace(
    msgspec.Struct,
    frozen=True,
    rename={"events": "traceEvents", "unit": "displayTimeUnit", "about": "otherData"},
):
    """The content of a trace file."""

    events: list[TraceEvent]
    unit: str = "ms"
    about: dict[str, str] = {}


def trace_of(folder: Path) -> RunTrace:
    """The trace of the run in a folder, also while it goes on. Raises `NoRun` if there is none."""
    run = open_run(folder)
    past = run.journal().past
    lines = timeline.read_timeline(folder / timeline.TIMELINE)
    about = {
        "run": str(run.config().get("run", {}).get("name") or folder.name),
        "times": "since the run began",
    }
    if not lines:
        about["missing"] = (
            f"{timeline.TIMELINE} is not there: the run was made by an older Midflight, and steps "
            "are drawn from its journal alone"
        )
    events = list(_of_journal(past, with_steps=not lines))
    events += TraceBuilder(lines).events()
    shown = {event.pid for event in events}
    titles: list[TraceEvent] = []
    for pid in TITLES:
        if pid in shown:
            titles += _titled(pid)
    return RunTrace(titles + events, about=about)


def slice_of(
    name: str, track: tuple[int, int], began: float, ended: float, **args: Json
) -> TraceEvent:
    """A slice. Both ends are rounded alike, so that a slice inside another stays inside it."""
    begin = _micro(began)
    return TraceEvent(name, "X", *track, ts=begin, dur=max(0, _micro(ended) - begin), args=args)


def instant_of(name: str, track: tuple[int, int], at: float, **args: Json) -> TraceEvent:
    return TraceEvent(name, "i", *track, _micro(at), s="t", args=args)


def _micro(seconds: float) -> int:
    return round(max(0.0, seconds) * 1e6)


def _named(track: tuple[int, int], name: str) -> Iterator[TraceEvent]:
    yield TraceEvent("thread_name", "M", *track, args={"name": name})
    yield TraceEvent("thread_sort_index", "M", *track, args={"sort_index": track[1]})


def _titled(pid: int) -> Iterator[TraceEvent]:
    yield TraceEvent("process_name", "M", pid, args={"name": TITLES[pid]})
    yield TraceEvent("process_sort_index", "M", pid, args={"sort_index": pid})


def _of_journal(past: JournalHistory, *, with_steps: bool) -> Iterator[TraceEvent]:
    """Draws counters, alarms and checkpoints, and the steps if no timeline has them."""
    for line in past.steps:
        counters = {
            "reward": line.reward,
            "tokens generated per second": line.generation_rate,
            "tokens trained per second": line.training_rate,
            "staleness, mean": line.staleness_mean,
        }
        if with_steps and line is past.steps[0]:
            yield from _named((TRAINER, 1), "steps")
        for name, value in counters.items():
            if value is not None:
                yield TraceEvent(name, "C", RUN, ts=_micro(line.seconds), args={"value": value})
        if with_steps:
            began = line.seconds - line.step_seconds
            name = f"step {line.version}"
            yield slice_of(name, (TRAINER, 1), began, line.seconds, tokens=line.tokens)
    for alarm in past.alarms:
        yield _alarm(alarm)
    for saved in past.checkpoints:
        yield instant_of(f"checkpoint {saved.version}", (TRAINER, 1), saved.seconds)


def _alarm(alarm: AlarmLine) -> TraceEvent:
    at = _micro(alarm.seconds)
    return TraceEvent(f"alarm: {alarm.name}", "i", RUN, 1, at, s="g", args={"text": alarm.text})


@dataclass(frozen=True, slots=True)
class _GroupEnd:
    """The end of a group: the step that was made on it, or when and why it was dropped."""

    step: timeline.StepTimed | None = None
    dropped: timeline.DropTimed | None = None


class TraceBuilder:
    """Draws the lines of a timeline."""

    def __init__(self, lines: Sequence[timeline.Timed]) -> None:
        self._lines = lines
        self._rollouts = [line for line in lines if isinstance(line, timeline.RolloutTimed)]
        self._commits = [line for line in lines if isinstance(line, timeline.CommitTimed)]
        self._pauses: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for commit in self._commits:
            self._pauses[commit.engine].append((commit.at - commit.pause_seconds, commit.at))
        self._fates = _fates(lines)

    def events(self) -> Iterator[TraceEvent]:
        yield from self._steps()
        yield from self._engines()
        yield from self._evaluations()
        yield from self._waits()
        training = [rollout for rollout in self._rollouts if rollout.of is Kind.TRAINING]
        evaluated = [rollout for rollout in self._rollouts if rollout.of is Kind.EVALUATION]
        yield from self._in_lanes(ROLLOUTS, training)
        yield from self._in_lanes(EVALUATED, evaluated)

    # --- Trainer, engines, evaluations, waits ---

    def _steps(self) -> Iterator[TraceEvent]:
        steps = [line for line in self._lines if isinstance(line, timeline.StepTimed)]
        if steps:
            yield from _named((TRAINER, 1), "steps")
        for step in steps:
            name = f"step {step.version}" + (", skipped" if step.skipped else "")
            yield slice_of(
                name, (TRAINER, 1), step.began, step.ended, tokens=step.num_tokens, lease=step.lease
            )

    def _engines(self) -> Iterator[TraceEvent]:
        busy = engine_spans(self._rollouts)
        changes: defaultdict[str, list[timeline.EngineTimed]] = defaultdict(list)
        for line in self._lines:
            if isinstance(line, timeline.EngineTimed):
                changes[line.engine].append(line)
        names = busy.keys() | self._pauses.keys() | changes.keys()
        for number, engine in enumerate(sorted(names)):
            work = (ENGINES, 2 * number + 1)
            handovers = (ENGINES, 2 * number + 2)
            yield from _named(work, f"{engine}: generating")
            yield from _named(handovers, f"{engine}: handovers")
            for began, ended in busy.get(engine, Spans()):
                yield slice_of("generating", work, began, ended)
            yield from self._handovers(engine, handovers)
            for change in changes[engine]:
                if change.lost is None:
                    yield instant_of(change.event or "back", work, change.at)
                else:
                    yield instant_of(change.event or "lost", work, change.at, why=change.lost)

    def _handovers(self, engine: str, track: tuple[int, int]) -> Iterator[TraceEvent]:
        free = 0.0
        for commit in self._commits:
            if commit.engine != engine:
                continue
            paused = max(free, commit.at - commit.pause_seconds)
            staged = max(free, paused - commit.stage_seconds)
            yield slice_of(f"stage v{commit.version}", track, staged, paused, begin=ESTIMATED)
            yield slice_of(f"paused for v{commit.version}", track, paused, commit.at)
            free = commit.at

    def _evaluations(self) -> Iterator[TraceEvent]:
        """Draws each evaluation from the beginning of its first rollout since the score before."""
        scores: defaultdict[str, list[timeline.ScoreTimed]] = defaultdict(list)
        for line in self._lines:
            if isinstance(line, timeline.ScoreTimed):
                scores[line.source].append(line)
        for number, (source, of_source) in enumerate(scores.items(), start=1):
            track = (EVALUATIONS, number)
            yield from _named(track, source)
            begins = sorted(
                r.began for r in self._rollouts if r.of is Kind.EVALUATION and r.source == source
            )
            last = 0.0
            for score in of_source:
                began = next((begin for begin in begins if last <= begin <= score.at), score.at)
                name = f"evaluation of v{score.version}"
                yield slice_of(name, track, began, score.at, mean_reward=score.mean_reward)
                last = score.at

    def _waits(self) -> Iterator[TraceEvent]:
        waits: defaultdict[str, Spans] = defaultdict(Spans)
        for line in self._lines:
            if isinstance(line, timeline.WaitTimed):
                waits[f"{line.who} for {line.for_whom}"].add(line.began, line.ended)
        for number, (name, spans) in enumerate(sorted(waits.items()), start=1):
            yield from _named((WAITS, number), name)
            for began, ended in spans:
                yield slice_of("waits", (WAITS, number), began, ended)

    # --- Rollouts ---

    def _in_lanes(
        self, pid: int, rollouts: Sequence[timeline.RolloutTimed]
    ) -> Iterator[TraceEvent]:
        """Draws each rollout in the first lane that is free from its beginning to the end of its
        step.
        """
        free: list[tuple[float, int]] = []
        for rollout in sorted(rollouts, key=lambda rollout: rollout.began):
            events = list(self._life(rollout))
            if free and free[0][0] <= rollout.began:
                _, lane = heapq.heappop(free)
            else:
                lane = len(free) + 1
                yield from _named((pid, lane), f"lane {lane}")
            for event in events:
                yield msgspec.structs.replace(event, pid=pid, tid=lane)
            ended = max((event.ts or 0) + (event.dur or 0) for event in events) / 1e6
            heapq.heappush(free, (max(ended, rollout.ended), lane))

    def _life(self, rollout: timeline.RolloutTimed) -> Iterator[TraceEvent]:
        name = "-".join(map(str, rollout.key))
        args: dict[str, Json] = {
            "source": rollout.source,
            "reward": rollout.reward,
            "tokens": rollout.num_tokens,
        }
        if rollout.failure:
            args["failed by"] = rollout.failure
        yield slice_of(f"rollout {name}", NOWHERE, rollout.began, rollout.ended, **args)
        yield from self.turns(rollout)
        fate = _GroupEnd()
        if rollout.of is Kind.TRAINING and rollout.reward is not None:
            fate = self._fates.get(rollout.key[:3], fate)
        step = fate.step
        dropped = fate.dropped
        if step is not None and step.began >= rollout.ended:
            yield slice_of("waiting", NOWHERE, rollout.ended, step.began, until="its step began")
            yield slice_of(f"trained v{step.version}", NOWHERE, step.began, step.ended)
        elif dropped is not None and dropped.at >= rollout.ended:
            until = "its group was dropped"
            yield slice_of("waiting", NOWHERE, rollout.ended, dropped.at, until=until)
            yield instant_of(f"dropped: {dropped.reason}", NOWHERE, dropped.at)

    def turns(self, rollout: timeline.RolloutTimed) -> Iterator[TraceEvent]:
        """Draws the turns one after another. It draws only the part of a
        turn that goes beyond the end of the one before.
        """
        at = rollout.began
        gap = "before the first call"
        for turn in sorted(rollout.turns, key=lambda turn: (turn.began, turn.ended)):
            began = max(at, turn.began)
            ended = min(turn.ended, rollout.ended)
            if ended <= began:
                continue
            if began - at > SHORTEST:
                yield slice_of(gap, NOWHERE, at, began, what=ESTIMATED)
            for name, since, until in phases(turn, began=began, ended=ended):
                yield slice_of(name, NOWHERE, since, until)
                yield from self._paused(turn, since, until)
            at = ended
            gap = "tool"
        if rollout.ended - at > SHORTEST:
            name = "reward" if rollout.turns else "environment"
            yield slice_of(name, NOWHERE, at, rollout.ended, what=ESTIMATED)

    def _paused(self, turn: TurnTimes, began: float, ended: float) -> Iterator[TraceEvent]:
        for engine in dict.fromkeys(engine for engine, _ in turn.placed):
            for since, until in self._pauses[engine]:
                if since < ended and until > began:
                    since = max(since, began)
                    until = min(until, ended)
                    yield slice_of("paused", NOWHERE, since, until, engine=engine)


NOWHERE = (0, 0)
"""The track of a slice that has no lane yet."""


def phases(turn: TurnTimes, *, began: float, ended: float) -> Iterator[tuple[str, float, float]]:
    """Yields name, beginning and end of the phases of a turn: waiting for an engine, the reading of
    its prompt, and the tokens of each version.
    """
    marks: list[tuple[float, str]] = [(turn.began, "queued")]
    versions = turn.sampled
    for number, (_, at) in enumerate(turn.placed):
        until = turn.placed[number + 1][1] if number + 1 < len(turn.placed) else turn.ended
        if number == 0 or any(at <= sampled < until for _, sampled in versions):
            marks.append((at, "prefill"))
    marks += [(at, f"segment v{version}") for version, at in versions]
    marks.sort(key=lambda mark: mark[0])
    ends = [at for at, _ in marks[1:]]
    ends.append(turn.ended)
    for (since, name), until in zip(marks, ends, strict=True):
        since = max(since, began)
        until = min(until, ended)
        if until > since:
            yield name, since, until


def _fates(lines: Sequence[timeline.Timed]) -> Mapping[tuple[int, ...], _GroupEnd]:
    """Returns the last fate of each group: a batch that was taken back is followed by another."""
    steps = {
        line.lease: line
        for line in lines
        if isinstance(line, timeline.StepTimed) and not line.skipped
    }
    found: dict[tuple[int, ...], _GroupEnd] = {}
    for line in lines:
        if isinstance(line, timeline.BatchTimed):
            trained = _GroupEnd(step=steps.get(line.lease))
            found.update(dict.fromkeys(line.groups, trained))
        elif isinstance(line, timeline.DropTimed):
            found[line.group] = _GroupEnd(dropped=line)
    return found


def write_trace(folder: Path, out: Path) -> RunTrace:
    """Writes the trace of a run. Raises `ConfigError` if the file cannot be written."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        why = "it is a folder" if out.is_dir() else "its folder is not there"
        raise ConfigError(f"writing {out}: {why}; give --out a file in a folder that is.")
    made = trace_of(folder)
    try:
        write_whole(out, msgspec.json.encode(made))
    except OSError as error:
        raise ConfigError(
            f"writing {out}: {error.strerror or error}; choose another --out, or make its folder "
            "writable."
        ) from error
    return made
