"""A run as a trace that Perfetto (ui.perfetto.dev) and `chrome://tracing` open: every rollout,
engine, step, handover and evaluation on one time axis.

The format is that of Chrome's trace events, as JSON. Times are microseconds since the run began.
Slices of a track lie beside or inside each other, never across. What is estimated says so in its
arguments: when an engine began to take a version in, and what an agent did between two answers,
which nobody but the agent knows.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midflight.archive.runs import open_run
from midflight.errors import ConfigError
from midflight.observe import timeline
from midflight.observe.atomic_write import write_whole
from midflight.observe.history import PastLines
from midflight.types import Json, Kind, TurnTimes, Version

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
    """The file."""

    events: list[TraceEvent]
    unit: str = "ms"
    about: dict[str, str] = {}


def trace_of(folder: Path) -> RunTrace:
    """Of the run in a folder, also while it goes on. `NoRun` where there is none."""
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
    events = [*_of_journal(past, with_steps=not lines), *Drawing(lines).events()]
    shown = {event.pid for event in events}
    return RunTrace(
        [*(name for pid in TITLES if pid in shown for name in _titled(pid)), *events], about=about
    )


def slice_of(
    name: str, track: tuple[int, int], began: float, ended: float, **args: Json
) -> TraceEvent:
    """Both ends are rounded alike, so that what lies inside another does so afterwards."""
    begin = _micro(began)
    return TraceEvent(name, "X", *track, ts=begin, dur=max(0, _micro(ended) - begin), args=args)


def _micro(seconds: float) -> int:
    return round(max(0.0, seconds) * 1e6)


def _named(track: tuple[int, int], name: str) -> Iterator[TraceEvent]:
    yield TraceEvent("thread_name", "M", *track, args={"name": name})
    yield TraceEvent("thread_sort_index", "M", *track, args={"sort_index": track[1]})


def _titled(pid: int) -> Iterator[TraceEvent]:
    yield TraceEvent("process_name", "M", pid, args={"name": TITLES[pid]})
    yield TraceEvent("process_sort_index", "M", pid, args={"sort_index": pid})


def _of_journal(past: PastLines, *, with_steps: bool) -> Iterator[TraceEvent]:
    """Counters, alarms and checkpoints; the steps too where nothing else has them."""
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
            yield slice_of(
                f"step {line.version}",
                (TRAINER, 1),
                line.seconds - line.step_seconds,
                line.seconds,
                tokens=line.tokens,
            )
    for alarm in past.alarms:
        yield TraceEvent(
            f"alarm: {alarm.name}",
            "i",
            RUN,
            1,
            _micro(alarm.seconds),
            s="g",
            args={"text": alarm.text},
        )
    for saved in past.checkpoints:
        yield TraceEvent(
            f"checkpoint {saved.version}", "i", TRAINER, 1, _micro(saved.seconds), s="t"
        )


@dataclass(frozen=True, slots=True)
class _GroupEnd:
    """What became of a group: the step that was made on it, or when and why it was dropped."""

    step: timeline.StepTimed | None = None
    dropped: timeline.DropTimed | None = None


class Drawing:
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
        yield from self._in_lanes(ROLLOUTS, training)
        yield from self._in_lanes(
            EVALUATED, [rollout for rollout in self._rollouts if rollout.of is Kind.EVALUATION]
        )

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
        busy: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        for turn in (turn for rollout in self._rollouts for turn in rollout.turns):
            for (engine, placed), (_, until) in zip(
                turn.placed, [*turn.placed[1:], ("", turn.ended)], strict=True
            ):
                busy[engine].append((placed, until))
        names = sorted(
            {
                *busy,
                *self._pauses,
                *(line.engine for line in self._lines if isinstance(line, timeline.EngineTimed)),
            }
        )
        for number, engine in enumerate(names):
            work = (ENGINES, 2 * number + 1)
            handovers = (ENGINES, 2 * number + 2)
            yield from _named(work, f"{engine}: generating")
            yield from _named(handovers, f"{engine}: handovers")
            for began, ended in merged(busy[engine]):
                yield slice_of("generating", work, began, ended)
            yield from self._handovers(engine, handovers)
            for line in self._lines:
                if isinstance(line, timeline.EngineTimed) and line.engine == engine:
                    text = line.event or ("back" if line.lost is None else "lost")
                    yield TraceEvent(
                        text,
                        "i",
                        *work,
                        _micro(line.at),
                        s="t",
                        args={} if line.lost is None else {"why": line.lost},
                    )

    def _handovers(self, engine: str, track: tuple[int, int]) -> Iterator[TraceEvent]:
        free = 0.0
        for commit in (commit for commit in self._commits if commit.engine == engine):
            paused = max(free, commit.at - commit.pause_seconds)
            staged = max(free, paused - commit.stage_seconds)
            yield slice_of(f"stage v{commit.version}", track, staged, paused, begin=ESTIMATED)
            yield slice_of(f"paused for v{commit.version}", track, paused, commit.at)
            free = commit.at

    def _evaluations(self) -> Iterator[TraceEvent]:
        """Each from the begin of its first rollout since the score before."""
        scores = [line for line in self._lines if isinstance(line, timeline.ScoreTimed)]
        for number, source in enumerate(dict.fromkeys(score.source for score in scores), start=1):
            yield from _named((EVALUATIONS, number), source)
            begins = sorted(
                r.began for r in self._rollouts if r.of is Kind.EVALUATION and r.source == source
            )
            last = 0.0
            for score in (score for score in scores if score.source == source):
                began = next((begin for begin in begins if last <= begin <= score.at), score.at)
                yield slice_of(
                    f"evaluation of v{score.version}",
                    (EVALUATIONS, number),
                    began,
                    score.at,
                    mean_reward=score.mean_reward,
                )
                last = score.at

    def _waits(self) -> Iterator[TraceEvent]:
        waits = [line for line in self._lines if isinstance(line, timeline.WaitTimed)]
        for number, name in enumerate(
            sorted({f"{wait.who} for {wait.for_whom}" for wait in waits}), start=1
        ):
            yield from _named((WAITS, number), name)
            spans = [
                (wait.began, wait.ended)
                for wait in waits
                if f"{wait.who} for {wait.for_whom}" == name
            ]
            for began, ended in merged(spans):
                yield slice_of("waits", (WAITS, number), began, ended)

    # --- Rollouts ---

    def _in_lanes(
        self, pid: int, rollouts: Sequence[timeline.RolloutTimed]
    ) -> Iterator[TraceEvent]:
        """Each in the first lane that is free from its begin to the end of its step."""
        free: list[tuple[float, int]] = []
        for rollout in sorted(rollouts, key=lambda rollout: rollout.began):
            events = list(self._life(rollout))
            if free and free[0][0] <= rollout.began:
                _, lane = heapq.heappop(free)
            else:
                lane = len(free) + 1
                yield from _named((pid, lane), f"lane {lane}")
            yield from (msgspec.structs.replace(event, pid=pid, tid=lane) for event in events)
            ended = max((event.ts or 0) + (event.dur or 0) for event in events) / 1e6
            heapq.heappush(free, (max(ended, rollout.ended), lane))

    def _life(self, rollout: timeline.RolloutTimed) -> Iterator[TraceEvent]:
        name = "-".join(map(str, rollout.key))
        args: dict[str, Json] = {
            "source": rollout.source,
            "reward": rollout.reward,
            "tokens": rollout.num_tokens,
        }
        args |= {"failed by": rollout.failure} if rollout.failure else {}
        yield slice_of(f"rollout {name}", NOWHERE, rollout.began, rollout.ended, **args)
        yield from self.turns(rollout)
        fate = (
            self._fates.get(rollout.key[:3], _GroupEnd())
            if rollout.of is Kind.TRAINING and rollout.reward is not None
            else _GroupEnd()
        )
        step = fate.step
        dropped = fate.dropped
        if step is not None and step.began >= rollout.ended:
            yield slice_of("waiting", NOWHERE, rollout.ended, step.began, until="its step began")
            yield slice_of(f"trained v{step.version}", NOWHERE, step.began, step.ended)
        elif dropped is not None and dropped.at >= rollout.ended:
            yield slice_of(
                "waiting", NOWHERE, rollout.ended, dropped.at, until="its group was dropped"
            )
            yield TraceEvent(f"dropped: {dropped.reason}", "i", *NOWHERE, _micro(dropped.at), s="t")

    def turns(self, rollout: timeline.RolloutTimed) -> Iterator[TraceEvent]:
        """Turns that ran beside each other are drawn one after another, as far as they go beyond
        the one before.
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
            yield slice_of(
                "reward" if rollout.turns else "environment",
                NOWHERE,
                at,
                rollout.ended,
                what=ESTIMATED,
            )

    def _paused(self, turn: TurnTimes, began: float, ended: float) -> Iterator[TraceEvent]:
        for engine in dict.fromkeys(engine for engine, _ in turn.placed):
            for since, until in self._pauses[engine]:
                if since < ended and until > began:
                    yield slice_of(
                        "paused", NOWHERE, max(since, began), min(until, ended), engine=engine
                    )


NOWHERE = (0, 0)
"""The track of a slice that has no lane yet."""


def phases(turn: TurnTimes, *, began: float, ended: float) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of what a turn went through: waiting for an engine, its prompt being
    read, and the tokens of each version.
    """
    marks: list[tuple[float, str]] = [(turn.began, "queued")]
    versions: list[tuple[Version, float]] = list(turn.sampled)
    for number, (_, at) in enumerate(turn.placed):
        until = turn.placed[number + 1][1] if number + 1 < len(turn.placed) else turn.ended
        if number == 0 or any(at <= sampled < until for _, sampled in versions):
            marks.append((at, "prefill"))
    marks += [(at, f"segment v{version}") for version, at in versions]
    marks.sort(key=lambda mark: mark[0])
    for (since, name), (until, _) in zip(marks, [*marks[1:], (turn.ended, "")], strict=True):
        since = max(since, began)
        until = min(until, ended)
        if until > since:
            yield name, since, until


def merged(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The spans joined where they touch, in order."""
    begun: tuple[float, float] | None = None
    for since, until in sorted(spans):
        if begun is not None and since <= begun[1]:
            begun = begun[0], max(begun[1], until)
            continue
        if begun is not None:
            yield begun
        begun = since, until
    if begun is not None:
        yield begun


def _fates(lines: Sequence[timeline.Timed]) -> Mapping[tuple[int, ...], _GroupEnd]:
    """Of each group the last word: a batch that was taken back is followed by another."""
    steps = {
        line.lease: line
        for line in lines
        if isinstance(line, timeline.StepTimed) and not line.skipped
    }
    found: dict[tuple[int, ...], _GroupEnd] = {}
    for line in lines:
        if isinstance(line, timeline.BatchTimed):
            found |= {group: _GroupEnd(step=steps.get(line.lease)) for group in line.groups}
        elif isinstance(line, timeline.DropTimed):
            found[line.group] = _GroupEnd(dropped=line)
    return found


def write_trace(folder: Path, out: Path) -> RunTrace:
    """`ConfigError` where the file cannot be written."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(
            f"writing {out}: {'it is a folder' if out.is_dir() else 'its folder is not there'}; "
            "give --out a file in a folder that is."
        )
    made = trace_of(folder)
    try:
        write_whole(out, msgspec.json.encode(made))
    except OSError as error:
        raise ConfigError(
            f"writing {out}: {error.strerror or error}; choose another --out, or make its folder "
            "writable."
        ) from error
    return made
