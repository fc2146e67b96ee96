"""What the trainer asks of the rollout side: draw a batch, report a step, hand over weights; and
how it asks over HTTP.

`StepBook` knows what the trainer was handed, made and published: it refuses what comes out of turn,
and fills in what was left unsaid. A version is one step: it begins at `train_version` and makes
`train_version + 1`. Synchronous; it never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, Self

import msgspec
from msgspec import Meta

from midflight.errors import OutOfTurn, RequestRejected, UnknownLease, nearest
from midflight.models.adapters import served_weights
from midflight.run.parts import PartLost
from midflight.sender_clock import SenderClock
from midflight.trajectories.packing import from_bytes
from midflight.types import Batch, PackedBatch, TensorSpec, Version, WeightManifest
from midflight.types.facts import Stepped
from midflight.weights.transports.files import read_specs
from midflight.wire.client import Answered, HttpClient

PREFIX = "/midflight/v1"
"""Of the routes by which a trainer, a harness or a worker asks."""
LIFE = "x-midflight-life"
"""Header: which trainer of the run speaks, counted from 0. One that was given up, and is not dead
but cut off, is not heard any more.
"""


AGAIN_SECONDS = 0.2
"""Before a rollout process that is being started again is asked again."""


class RolloutService(Protocol):
    async def take(self, train_version: Version) -> PackedBatch:
        """Leases the batch to train at this version; waits until there is one. Asking again gives
        the same batch.
        """
        ...

    async def ahead(self, train_version: Version, *, tokens: int) -> PackedBatch | None:
        """Groups that the batch of this version is likely to have, in no lease, each once; waits
        until there are some, of so many `tokens` at least. None: the batch is there, which alone
        says what the step is made of."""
        ...

    async def done(self, step: Stepped) -> None:
        """The step is over: its groups are trained, final with the checkpoint that contains them,
        or dropped if it was skipped.
        """
        ...

    async def publish(self, manifest: WeightManifest) -> None:
        """Brings a version to the engines; returns when each serves it, is in quarantine, or is
        reserved for an evaluation.
        """
        ...

    async def checkpointed(self, version: Version) -> None:
        """A checkpoint of this version is on disk: what was trained up to it is final (I8)."""
        ...

    async def finish(self, version: Version) -> None:
        """No more steps: stops the rollouts and evaluates the last version; returns when that is
        done.
        """
        ...


class Copied(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `store`: why there is no copy, if there is none."""

    error: str = ""


class TrainerService(RolloutService, Protocol):
    """What a foreign trainer may ask for too: it may not wait for ever, and it may go back while
    the gateway and the engines stay.
    """

    async def take_within(self, train_version: Version, *, seconds: float) -> PackedBatch | None:
        """As `take`, but None when there is no batch yet after `seconds`; 0 looks once."""
        ...

    async def take_back(self, lease: int) -> None:
        """The step of a lease will not be made: its groups wait again. `UnknownLease` if it is not
        open.
        """
        ...

    async def restart(self, checkpoint: Version, *, least: Version = 0) -> Version:
        """The trainer goes on from its checkpoint: groups of later steps wait again, exactly once
        (I8).

        Returns the number under which the checkpoint's weights go on: its own, or one that no other
        weights have had, and `least` at least. `OutOfTurn` when the last step was made and this is
        not its checkpoint.
        """
        ...

    async def copy_store(self, version: Version) -> Copied:
        """Copies the store into the run's folder, for the checkpoint of this version; returns when
        the copy is on disk, or could not be made.
        """
        ...

    @property
    def over(self) -> bool:
        """Whether a trainer has said `finish`: no batch comes any more."""
        ...


class WentOn(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `restart`: the number under which the checkpoint's weights go on, and whether
    the last step was made before.
    """

    version: Version
    over: bool = False


class RolloutClient:
    """`RolloutService` of another process. A lost connection is made anew once, because every verb
    may be said again: after this process has stood still, the connections it had are closed. What
    fails again is `PartLost`; the launcher ends this process with a dead one."""

    def __init__(self, url: str, *, token: str, life: int = 0, patient: bool = False) -> None:
        """`life`: see `LIFE`. `patient`: the process is started again when it dies, and is asked
        for as long as that takes.
        """
        self._headers = {LIFE: str(life)}
        self._patient = patient
        # A batch may take as long as its slowest rollout, so answers have no deadline; connecting
        # has one.
        self._http = HttpClient(url, lost=_lost, token=token, connect_seconds=60)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.__aexit__(*exc)

    async def take(self, train_version: Version) -> PackedBatch:
        return from_bytes(await self._post("take", {"train_version": train_version}))

    async def ahead(self, train_version: Version, *, tokens: int) -> PackedBatch | None:
        found = await self._post("ahead", {"version": train_version, "tokens": tokens})
        return from_bytes(found) if found else None

    async def done(self, step: Stepped) -> None:
        await self._post("done", {**msgspec.structs.asdict(step), "now": time.monotonic()})

    async def publish(self, manifest: WeightManifest) -> None:
        await self._post("weights", manifest)

    async def checkpointed(self, version: Version) -> None:
        await self._post("checkpointed", {"version": version})

    async def finish(self, version: Version) -> None:
        await self._post("finish", {"version": version})

    async def restart(self, checkpoint: Version, *, least: Version = 0) -> WentOn:
        """As `TrainerService`. Said twice, the second number is the one that holds."""
        return msgspec.json.decode(
            await self._post("restart", {"version": checkpoint, "least": least}), type=WentOn
        )

    async def copy_store(self, version: Version) -> Copied:
        return msgspec.json.decode(await self._post("store", {"version": version}), type=Copied)

    async def _post(self, verb: str, body: object) -> bytes:
        path = f"{PREFIX}/{verb}"
        content = msgspec.json.encode(body)
        try:
            answer = await self._http.call("POST", path, content, headers=self._headers)
        except PartLost:
            answer = await self._again(path, content)
        if answer.status not in (200, 204):
            raise PartLost(
                f"the rollout process answered {verb} with {answer.status}: "
                f"{answer.content[:500].decode(errors='replace')}"
            )
        return answer.content

    async def _again(self, path: str, content: bytes) -> Answered:
        """Waits for the process where it is started again; ended by its answer, or with this
        process.
        """
        while True:
            try:
                return await self._http.call("POST", path, content, headers=self._headers)
            except PartLost:
                if not self._patient:
                    raise
            await asyncio.sleep(AGAIN_SECONDS)


def _lost(what: str) -> PartLost:
    return PartLost(f"the rollout process {what}; its log says why it ended")


# --- What the trainer was handed, made and published ----------------------------------------------


Seconds = Annotated[float, Meta(ge=0, le=1e10)]
"""Of CLOCK_MONOTONIC: three centuries are more than any machine has been up."""

_TIED = "lm_head.weight"
"""The output layer, by the name that `transformers` gives it in most models."""


@dataclass(frozen=True, slots=True)
class _Taken:
    train_version: Version
    at: float
    num_tokens: int


class StepBook:
    """One run's. Its open leases are as many as the batches that wait for `done`: with one batch
    drawn ahead, two.
    """

    def __init__(self, *, start_version: Version) -> None:
        self._made = self._newest_taken = start_version
        self._saved = start_version
        self._open: dict[int, _Taken] = {}
        self._last_said: DoneBody | None = None
        self._life = 0
        self._published: tuple[Version, str] | None = None
        self._clock = SenderClock()
        self._forgot = False

    def go_on(self, leased: Sequence[Batch], *, next_version: Version, now: float) -> None:
        """After the death of this process, while the trainer goes on: it has these batches, and has
        made what it was given before them. Which reports were answered is not known any more, so
        one of an earlier lease counts as a repetition."""
        self._forgot = True
        self._made = self._newest_taken = next_version
        for batch in leased:
            tokens = sum(
                trajectory.num_trainable
                for group in batch.groups
                for trajectory in group.trajectories
            )
            self._open[batch.lease] = _Taken(batch.train_version, now, tokens)

    def check_life(self, life: int) -> None:
        """`OutOfTurn` for a trainer in whose place another goes on."""
        if life < self._life:
            raise OutOfTurn(
                f"trainer {life} of this run was given up, and trainer {self._life} goes on in its "
                "place: end this one."
            )

    def check_take(self, train_version: Version) -> None:
        """No version is left out: a batch follows the newest version made, or the newest batch."""
        newest = max(self._made, self._newest_taken)
        if train_version > newest + 1:
            raise OutOfTurn(
                f"a batch for version {train_version} was asked, but {newest} is the newest so "
                f"far: ask for {newest + 1} at most."
            )

    def taken(self, batch: PackedBatch, *, now: float) -> None:
        """Asked again, a lease keeps the time of its first leave."""
        self._newest_taken = max(self._newest_taken, batch.train_version)
        self._open.setdefault(
            batch.lease, _Taken(batch.train_version, now, int(batch.loss_mask.sum()))
        )

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
        ended = now if said.ended is None else said.ended + shift
        return Stepped(
            lease=said.lease,
            version=said.version,
            started=min(ended, taken.at if said.started is None else said.started + shift),
            ended=ended,
            num_tokens=(0 if said.skipped else taken.num_tokens)
            if said.num_tokens is None
            else said.num_tokens,
            metrics=said.metrics,
            skipped=said.skipped,
            alarms=said.alarms,
        )

    def repeats(self, said: DoneBody) -> bool:
        """Whether this was the last report: its answer did not arrive, and it is said again."""
        return said == self._last_said or (
            self._forgot and said.lease not in self._open and said.version <= self._made
        )

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
        """The next step begins at `version`; leases are closed, and trainers before this one are
        not heard any more.
        """
        self._life = life
        self._made = self._newest_taken = version
        self._open.clear()
        self._clock = SenderClock()  # the trainer may be on another machine now

    def saved(self, version: Version) -> None:
        self._saved = max(self._saved, version)

    def check_saved(self, version: Version) -> None:
        """A checkpoint holds steps that were made: what is trained later must not count as
        final.
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
        if (
            self._published is not None
            and self._published[0] == manifest.version
            and self._published[1] != manifest.fingerprint
        ):
            raise OutOfTurn(
                f"publishing version {manifest.version}: other weights of this number were "
                "published before; make a new version."
            )
        self._published = (manifest.version, manifest.fingerprint)


class DoneBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer says of a step; what it leaves out is filled in. Times are CLOCK_MONOTONIC
    seconds: of the sender's machine where it says `now`, else of this one."""

    lease: int
    version: Version
    started: Seconds | None = None
    ended: Seconds | None = None
    num_tokens: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    metrics: Annotated[dict[str, float], Meta(max_length=1024)] = {}
    """They are kept in the journal for every step."""
    skipped: bool = False
    """The step left the weights as they were: its groups are dropped and not trained."""
    alarms: Annotated[tuple[Annotated[str, Meta(max_length=1000)], ...], Meta(max_length=16)] = ()
    """What is out of its bounds, a sentence each."""
    now: Seconds | None = None
    """When it is sent."""


class ModelTensors:
    """Names and shapes of what is handed over of the model that the engines started with: other
    weights are refused before any engine sees them.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        """`tied`: the output layer is the embedding, so engines have it once, and a file may have
        it twice.
        """
        self._shapes = {
            name: shape for name, shape in shapes.items() if not (tied and name == _TIED)
        }
        self._tied = tied

    @classmethod
    def of(cls, folder: Path) -> ModelTensors:
        """Blocking; reads headers only."""
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig)
        shapes = {
            spec.name: spec.shape for path in served_weights(folder) for spec in read_specs(path)
        }
        return cls(shapes, tied=config.tie_word_embeddings)

    def fitting(self, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """The tensors to serve. `RequestRejected` names the first that does not fit."""
        kept = tuple(spec for spec in specs if not (self._tied and spec.name == _TIED))
        for spec in kept:
            if spec.name not in self._shapes:
                raise RequestRejected(
                    (
                        f"the model has no tensor {spec.name!r}.{nearest(spec.name, self._shapes)} "
                        "Leave it out."
                    ),
                    param="file",
                )
            if spec.shape != self._shapes[spec.name]:
                raise RequestRejected(
                    (
                        f"tensor {spec.name!r} has shape {spec.shape}, the model needs "
                        f"{self._shapes[spec.name]}."
                    ),
                    param="file",
                )
        if missing := sorted(self._shapes.keys() - {spec.name for spec in kept}):
            raise RequestRejected(
                f"tensor {missing[0]!r} is missing: publish every tensor of the model.",
                param="file",
            )
        return kept


class _ModelConfig(msgspec.Struct, frozen=True):
    tie_word_embeddings: bool = True
    """What `transformers` assumes of a configuration that does not say."""
