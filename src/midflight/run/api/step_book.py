"""The trainer's batches, steps and published versions.

`StepBook` refuses calls that come out of turn, and fills in the fields that a report leaves out. A
version is one step: it begins at `train_version` and makes `train_version + 1`. It is synchronous;
it never waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from midflight.errors import OutOfTurn, UnknownLease
from midflight.sender_clock import SenderClock
from midflight.types import Batch, PackedBatch, Version, WeightManifest
from midflight.types.digests import StepDigests
from midflight.types.facts import Stepped

Seconds = Annotated[float, Meta(ge=0, le=1e10)]
"""A time of CLOCK_MONOTONIC: three centuries are more than any machine has been up."""


@dataclass(frozen=True, slots=True)
class _OpenBatch:
    train_version: Version
    at: float
    num_tokens: int


class StepBook:
    """The book of one run. It has as many open leases as there are batches that wait for `done`:
    with one batch drawn ahead, two.
    """

    def __init__(self, *, start_version: Version) -> None:
        self._made = start_version
        self._newest_taken = start_version
        self._saved = start_version
        self._open: dict[int, _OpenBatch] = {}
        self._last_said: DoneBody | None = None
        self._life = 0
        self._published: tuple[Version, str] | None = None
        self._clock = SenderClock()
        self._forgot = False

    def go_on(self, leased: Sequence[Batch], *, next_version: Version, now: float) -> None:
        """Goes on after the death of this process, which the trainer has outlived: it has these
        batches, and has made the steps of those before. It is not known any more which reports were
        answered, so a report of an earlier lease counts as a repetition.
        """
        self._forgot = True
        self._made = next_version
        self._newest_taken = next_version
        for batch in leased:
            tokens = 0
            for group in batch.groups:
                tokens += sum(trajectory.num_trainable for trajectory in group.trajectories)
            self._open[batch.lease] = _OpenBatch(batch.train_version, now, tokens)

    def check_life(self, life: int) -> None:
        """Raises `OutOfTurn` for a trainer that another trainer has replaced."""
        if life < self._life:
            raise OutOfTurn(
                f"trainer {life} of this run was given up, and trainer {self._life} goes on in its "
                "place: end this one."
            )

    def check_take(self, train_version: Version) -> None:
        """Refuses a batch that would leave a version out: it must follow the newest version made,
        or the newest batch.
        """
        newest = max(self._made, self._newest_taken)
        if train_version > newest + 1:
            raise OutOfTurn(
                f"a batch for version {train_version} was asked, but {newest} is the newest so "
                f"far: ask for {newest + 1} at most."
            )

    def taken(self, batch: PackedBatch, *, now: float) -> None:
        """A lease that is asked for again keeps the time at which it was first given."""
        self._newest_taken = max(self._newest_taken, batch.train_version)
        taken = _OpenBatch(batch.train_version, now, int(batch.loss_mask.sum()))
        self._open.setdefault(batch.lease, taken)

    def report(self, said: DoneBody, *, now: float) -> Stepped:
        """The step as the run counts it. `UnknownLease` and `OutOfTurn` leave everything as it
        was.
        """
        self.check_open(said.lease)
        taken = self._open[said.lease]
        if said.version != taken.train_version + 1:
            raise OutOfTurn(
                f"lease {said.lease} is of the step that begins at version {taken.train_version} "
                f"and makes {taken.train_version + 1}, not {said.version}: report that."
            )
        shift = 0.0 if said.now is None else self._clock.shift(said.now, now=now)
        started = taken.at if said.started is None else said.started + shift
        ended = now if said.ended is None else said.ended + shift
        num_tokens = said.num_tokens
        if num_tokens is None:
            num_tokens = 0 if said.skipped else taken.num_tokens
        return Stepped(
            lease=said.lease,
            version=said.version,
            started=min(ended, started),
            ended=ended,
            num_tokens=num_tokens,
            metrics={name: _number(value) for name, value in said.metrics.items()},
            skipped=said.skipped,
            alarms=said.alarms,
            digests=said.digests,
        )

    def repeats(self, said: DoneBody) -> bool:
        """True if this report equals the last one. The sender repeats a report whose answer did not
        arrive.
        """
        if said == self._last_said:
            return True
        if not self._forgot:
            return False
        return said.lease not in self._open and said.version <= self._made

    def done(self, step: Stepped, said: DoneBody | None = None) -> None:
        self._open.pop(step.lease, None)
        self._last_said = said
        self._made = max(self._made, step.version)

    def check_open(self, lease: int) -> None:
        if lease not in self._open:
            raise UnknownLease(
                f"lease {lease} is not open: it was never given, or its step is done already."
            )

    def taken_back(self, lease: int) -> None:
        """The batch of its version may be taken again."""
        del self._open[lease]

    def check_restart(self, checkpoint: Version) -> None:
        """Steps up to a checkpoint that was reported are final: no trainer goes back beyond it."""
        if not self._saved <= checkpoint <= self._made:
            raise OutOfTurn(
                f"going back to version {checkpoint}: it must be a checkpoint of version "
                f"{self._saved}, the newest that was reported, to {self._made}, the newest made."
            )

    def restarted(self, version: Version, *, life: int = 0) -> None:
        """The next step begins at `version`. Leases are closed, and requests of trainers before
        this one are refused.
        """
        self._life = life
        self._made = version
        self._newest_taken = version
        self._open.clear()
        self._clock = SenderClock()  # the trainer may be on another machine now

    def saved(self, version: Version) -> None:
        self._saved = max(self._saved, version)

    def check_saved(self, version: Version) -> None:
        """Raises `OutOfTurn` if the checkpoint is newer than the newest step made. A checkpoint may
        only hold steps that were made, because later training must not count as final.
        """
        if version > self._made:
            raise OutOfTurn(
                f"a checkpoint of version {version}: the newest made is {self._made}; report its "
                "step with `done` first."
            )

    def check_version(self, version: Version) -> None:
        """Versions are published in order, and only those that a step has made."""
        if version > self._made:
            raise OutOfTurn(
                f"publishing version {version}: the newest made is {self._made}; report its step "
                "with `done` first."
            )
        if self._published is not None and version < self._published[0]:
            raise OutOfTurn(
                f"publishing version {version}: version {self._published[0]} was published before; "
                "numbers only grow."
            )

    def publishing(self, manifest: WeightManifest) -> None:
        """The same version may be published again, with the same weights (I7)."""
        self.check_version(manifest.version)
        if self._published is not None:
            version, fingerprint = self._published
            if version == manifest.version and fingerprint != manifest.fingerprint:
                raise OutOfTurn(
                    f"publishing version {manifest.version}: other weights of this number were "
                    "published before; make a new version."
                )
        self._published = (manifest.version, manifest.fingerprint)


class DoneBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer's report of a step. Fields that it leaves out are filled in. Times are seconds of
    CLOCK_MONOTONIC: on the sender's machine if it gives `now`, else on this one.
    """

    lease: int
    version: Version
    started: Seconds | None = None
    ended: Seconds | None = None
    num_tokens: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    metrics: Annotated[dict[str, float | None], Meta(max_length=1024)] = {}
    """They are kept in the journal for every step. A number that is not finite is null."""
    skipped: bool = False
    """The step left the weights as they were: its groups are dropped and not trained."""
    alarms: Annotated[tuple[Annotated[str, Meta(max_length=1000)], ...], Meta(max_length=16)] = ()
    """One sentence for each value that is out of its bounds."""
    digests: StepDigests | None = None
    """They are kept in the journal (`midflight ledger --prove`)."""
    now: Seconds | None = None
    """The time at which the report is sent."""


def _number(value: float | None) -> float:
    """JSON has no number that is not finite: such a metric came as null."""
    return math.nan if value is None else value
