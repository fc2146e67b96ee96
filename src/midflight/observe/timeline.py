"""`timeline.jsonl`: the times of all events of a run, one line for each rollout, batch, step,
commit and wait. `midflight trace` draws it.

Times are seconds since the run began, over all its starts, as in the journal. Nothing is taken
back: steps that a crash undid are there too, and again when they were made again.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from midflight.errors import ConfigError, naming_file
from midflight.observe.failures import failure_class
from midflight.observe.run_state import RunState
from midflight.types import GroupKey, Kind, TurnTimes, Version, facts

TIMELINE = "timeline.jsonl"
FLUSH_SECONDS = 0.2
"""Rollouts that end within this time are flushed together: flushing each by itself costs as much as
encoding its line.
"""
SHORTEST_WAIT = 0.005
"""Seconds. Shorter waits have no line: they are hand-overs between loops, and there are
thousands.
"""


class RunStarted(msgspec.Struct, frozen=True, tag="start", tag_field="kind"):
    """The processes of the run started, or started again, at `at`, which was `wall` in seconds
    since 1970.
    """

    at: float
    wall: float


class RolloutTimed(
    msgspec.Struct, frozen=True, omit_defaults=True, tag="rollout", tag_field="kind"
):
    """One try of a rollout. Its turns are in the order of their ends."""

    key: tuple[int, int, int, int]
    """Epoch, position, attempt and sample, as the store has them."""
    source: str
    began: float
    ended: float
    reward: float | None
    num_tokens: int
    turns: tuple[TurnTimes, ...] = ()
    of: Kind = Kind.TRAINING
    failure: str | None = None
    """The class of its error."""
    truncated: bool = False


class BatchTimed(msgspec.Struct, frozen=True, tag="batch", tag_field="kind"):
    """Groups were given to the step that makes `train_version + 1`."""

    lease: int
    train_version: Version
    at: float
    groups: tuple[tuple[int, int, int], ...]


class StepTimed(msgspec.Struct, frozen=True, omit_defaults=True, tag="step", tag_field="kind"):
    """A step of the trainer, which made `version`."""

    lease: int
    version: Version
    began: float
    ended: float
    num_tokens: int
    skipped: bool = False


class CommitTimed(msgspec.Struct, frozen=True, tag="commit", tag_field="kind"):
    """An engine serves a version from `at` on. Before that it had stood still for `pause_seconds`,
    and before the pause it had taken the version in for `stage_seconds`.
    """

    engine: str
    version: Version
    at: float
    stage_seconds: float
    pause_seconds: float


class WaitTimed(msgspec.Struct, frozen=True, tag="wait", tag_field="kind"):
    """The side `who` was idle because of the side `for_whom`."""

    who: str
    for_whom: str
    began: float
    ended: float


class ScoreTimed(msgspec.Struct, frozen=True, tag="evaluation", tag_field="kind"):
    """An evaluation had scored its tasks of a source."""

    version: Version
    source: str
    at: float
    mean_reward: float | None


class DropTimed(msgspec.Struct, frozen=True, tag="dropped", tag_field="kind"):
    """A group was dropped."""

    group: tuple[int, int, int]
    reason: str
    at: float


class EngineTimed(msgspec.Struct, frozen=True, tag="engine", tag_field="kind"):
    """An engine was lost or came back. If `event` is set, it joined or left the run."""

    engine: str
    at: float
    lost: str | None
    """The reason why it was lost, or None if it came back."""
    event: str | None = None


Timed = (
    RunStarted
    | RolloutTimed
    | BatchTimed
    | StepTimed
    | CommitTimed
    | WaitTimed
    | ScoreTimed
    | DropTimed
    | EngineTimed
)

TIMED = (
    facts.RolloutEnded
    | facts.Leased
    | facts.Stepped
    | facts.WeightsCommitted
    | facts.Waited
    | facts.Evaluated
    | facts.GroupClosed
    | facts.Quarantined
    | facts.Rejoined
    | facts.EngineJoined
    | facts.EngineLeft
)
"""The facts that have a line. An answer, a token and an engine's step have none: the times of an
answer come with its rollout.
"""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Timed).decode


class Timeline:
    """Writes the lines as facts come in."""

    def __init__(self, path: Path, state: RunState, *, goes_on: bool) -> None:
        """With `goes_on` the lines that are there stay."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._state = state
        self._shift = state.seconds - time.monotonic()
        self._file = path.open("ab" if goes_on else "wb")
        self._flushed = 0.0
        self._write(RunStarted(self._now(), round(time.time(), 3)))

    def close(self) -> None:
        self._file.close()

    def apply(self, fact: TIMED) -> None:
        now = self._now()
        match fact:
            case facts.RolloutEnded():
                self._write(self._rollout(fact, now))
            case facts.Leased(batch=batch):
                groups = tuple(_place(group.key) for group in batch.groups)
                self._write(BatchTimed(batch.lease, batch.train_version, now, groups))
            case facts.Stepped(lease=lease, version=version, num_tokens=tokens, skipped=skipped):
                began = self._at(fact.started)
                ended = self._at(fact.ended)
                self._write(StepTimed(lease, version, began, ended, tokens, skipped))
            case facts.WeightsCommitted(engine=engine, version=version):
                line = CommitTimed(engine, version, now, fact.stage_seconds, fact.pause_seconds)
                self._write(line)
            case facts.Waited() if fact.seconds >= SHORTEST_WAIT:
                began = round(now - fact.seconds, 6)
                self._write(WaitTimed(fact.who, fact.for_whom, began, now))
            case facts.Evaluated(version=version, source=source):
                self._write(ScoreTimed(version, source, now, fact.mean_reward))
            case facts.GroupClosed(key=key, reason=reason):
                self._write(DropTimed(_place(key), reason.value, now))
            case facts.Quarantined(engine=engine, error=error):
                self._write(EngineTimed(engine, now, error))
            case facts.Rejoined(engine=engine):
                self._write(EngineTimed(engine, now, None))
            case facts.EngineJoined(engine=engine, url=url):
                self._write(EngineTimed(engine, now, f"came from {url}", "joined"))
            case facts.EngineLeft(engine=engine, why=why):
                self._write(EngineTimed(engine, now, why, "left"))
            case _:
                pass

    def _rollout(self, ended: facts.RolloutEnded, now: float) -> RolloutTimed:
        failure = None if ended.reward is not None else failure_class(ended.error)
        began = self._at(ended.started) if ended.started else round(now - ended.seconds, 6)
        group = ended.key.group
        return RolloutTimed(
            (group.epoch, group.index, group.attempt, ended.key.sample),
            ended.source,
            began,
            round(began + ended.seconds, 6),
            ended.reward,
            ended.num_tokens,
            tuple([self._turn(turn) for turn in ended.times]),
            ended.key.kind,
            failure,
            ended.truncated,
        )

    def _turn(self, turn: TurnTimes) -> TurnTimes:
        return TurnTimes(
            self._at(turn.began),
            self._at(turn.ended),
            tuple([(engine, self._at(at)) for engine, at in turn.placed]),
            tuple([(version, self._at(at)) for version, at in turn.sampled]),
            turn.num_tokens,
        )

    def _at(self, monotonic: float) -> float:
        return round(monotonic + self._shift, 6)

    def _now(self) -> float:
        return round(self._state.seconds, 6)

    def _write(self, line: Timed) -> None:
        can_wait = isinstance(line, RolloutTimed)
        with naming_file(self._path):
            self._file.write(_encode(line) + b"\n")
            if not can_wait or time.monotonic() >= self._flushed + FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()


def _place(key: GroupKey) -> tuple[int, int, int]:
    return key.epoch, key.index, key.attempt


def read_timeline(path: Path) -> Sequence[Timed]:
    """The lines of a timeline, in the order in which they were written. A last line that is still
    being written is left out; a missing file is empty.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    try:
        return [_decode(line) for line in lines if line.strip()]
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path}: not a line of a timeline ({error}); move the file away, and the run is drawn "
            "without it."
        ) from None
