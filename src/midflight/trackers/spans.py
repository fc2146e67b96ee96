"""Rollouts as spans in seconds since 1970, made from a run's timeline for trackers that keep
traces.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from midflight.archive.trace import TraceBuilder
from midflight.observe.timeline import CommitTimed, RolloutTimed, RunStarted, Timed
from midflight.types import Json

COMMITS = 64
"""The number of handovers that are kept for the pauses of rollouts. A rollout that lasted longer
shows the last of them.
"""

_decode = msgspec.json.Decoder(Timed).decode


@dataclass(frozen=True, slots=True)
class RolloutSpan:
    """A rollout, or a part of one."""

    name: str
    began: float
    ended: float
    attributes: dict[str, str | float | bool] = field(
        default_factory=dict[str, "str | float | bool"]
    )
    failure: str | None = None
    """The class of the error that ended it."""
    inner: tuple["RolloutSpan", ...] = ()
    """Its parts, in order: `queued`, `prefill`, `segment v3`, `paused`, `tool`, `reward`, as in
    `midflight trace`.
    """


class RolloutSpans:
    """Reads the lines of a timeline once, in their order."""

    def __init__(self, *, told: int = 0) -> None:
        """`told` is the number of lines at the beginning that were sent already. No spans are made
        of them.
        """
        self.num_read = 0
        self._told = told
        self._epoch = 0.0
        self._commits: deque[CommitTimed] = deque(maxlen=COMMITS)

    def of(self, lines: Sequence[bytes]) -> Iterator[RolloutSpan]:
        """The rollouts among the next lines. Lines of a later version of Midflight are passed
        over.
        """
        for line in lines:
            self.num_read += 1
            try:
                read = _decode(line)
            except msgspec.DecodeError:
                continue
            if isinstance(read, RunStarted):
                self._epoch = read.wall - read.at
            elif isinstance(read, CommitTimed):
                self._commits.append(read)
            elif isinstance(read, RolloutTimed) and self.num_read > self._told:
                yield self._span(read)

    def _span(self, rollout: RolloutTimed) -> RolloutSpan:
        parts: list[RolloutSpan] = []
        for event in TraceBuilder(list(self._commits)).turns(rollout):
            if event.ts is not None and event.dur is not None:
                began = self._epoch + event.ts / 1e6
                ended = self._epoch + (event.ts + event.dur) / 1e6
                parts.append(RolloutSpan(event.name, began, ended, _attributes(event.args)))
        said: dict[str, Json] = {
            "rollout": "-".join(map(str, rollout.key)),
            "source": rollout.source,
            "kind": rollout.of.value,
            "reward": rollout.reward,
            "tokens": rollout.num_tokens,
            "truncated": rollout.truncated,
        }
        began = self._epoch + rollout.began
        ended = self._epoch + rollout.ended
        return RolloutSpan(
            "rollout", began, ended, _attributes(said), rollout.failure, tuple(parts)
        )


def _attributes(said: dict[str, Json]) -> dict[str, str | float | bool]:
    """The attributes that have a value, by names of our own."""
    return {
        f"midflight.{name}": cast("str | float | bool", value)
        for name, value in said.items()
        if isinstance(value, str | int | float)
    }
