"""What the trainer was handed, made and published: refuses what comes out of turn, and fills in what it left unsaid.

A version is one step: it begins at `train_version` and makes `train_version + 1`. Synchronous; it never waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from midflight.errors import OutOfTurn, RequestRejected, UnknownLease, nearest
from midflight.models.adapter import served_weights
from midflight.types import PackedBatch, TensorSpec, Version, WeightManifest
from midflight.types.facts import Stepped
from midflight.weights.transports.files import read_specs

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
    """One run's. Its open leases are as many as the batches that wait for `done`: with one batch drawn ahead, two."""

    def __init__(self, *, start_version: Version) -> None:
        self._made = self._newest_taken = start_version
        self._saved = start_version
        self._open: dict[int, _Taken] = {}
        self._published: tuple[Version, str] | None = None

    def check_take(self, train_version: Version) -> None:
        """No version is left out: a batch follows the newest version made, or the newest batch."""
        newest = max(self._made, self._newest_taken)
        if train_version > newest + 1:
            raise OutOfTurn(
                f"a batch for version {train_version} was asked, but {newest} is the newest so far: ask for {newest + 1} at most."
            )

    def taken(self, batch: PackedBatch, *, now: float) -> None:
        """Asked again, a lease keeps the time of its first leave."""
        self._newest_taken = max(self._newest_taken, batch.train_version)
        self._open.setdefault(batch.lease, _Taken(batch.train_version, now, int(batch.loss_mask.sum())))

    def report(self, said: DoneBody, *, now: float) -> Stepped:
        """The step as the run counts it. `UnknownLease` and `OutOfTurn` leave everything as it was."""
        self.check_open(said.lease)
        taken = self._open[said.lease]
        if said.version != taken.train_version + 1:
            raise OutOfTurn(
                f"lease {said.lease} is of the step that begins at version {taken.train_version} and makes {taken.train_version + 1}, "
                f"not {said.version}: report that."
            )
        ended = now if said.ended is None else said.ended
        return Stepped(
            lease=said.lease,
            version=said.version,
            started=min(ended, taken.at if said.started is None else said.started),
            ended=ended,
            num_tokens=(0 if said.skipped else taken.num_tokens) if said.num_tokens is None else said.num_tokens,
            metrics=said.metrics,
            skipped=said.skipped,
        )

    def done(self, step: Stepped) -> None:
        self._open.pop(step.lease, None)
        self._made = max(self._made, step.version)

    def check_open(self, lease: int) -> None:
        if lease not in self._open:
            raise UnknownLease(f"lease {lease} is not open: it was never given, or its step is done already.")

    def taken_back(self, lease: int) -> None:
        """The batch of its version may be taken again."""
        del self._open[lease]

    def check_restart(self, checkpoint: Version) -> None:
        """Steps up to a checkpoint that was reported are final: no trainer goes back beyond it."""
        if not self._saved <= checkpoint <= self._made:
            raise OutOfTurn(
                f"going back to version {checkpoint}: it must be a checkpoint of version {self._saved}, the newest that was reported, "
                f"to {self._made}, the newest made."
            )

    def restarted(self, version: Version) -> None:
        """The next step begins at `version`; leases are closed."""
        self._made = self._newest_taken = version
        self._open.clear()

    def saved(self, version: Version) -> None:
        self._saved = max(self._saved, version)

    def check_saved(self, version: Version) -> None:
        """A checkpoint holds steps that were made: what is trained later must not count as final."""
        if version > self._made:
            raise OutOfTurn(f"a checkpoint of version {version}: the newest made is {self._made}; report its step with `done` first.")

    def check_version(self, version: Version) -> None:
        """Versions are published in order, and only those that a step has made."""
        if version > self._made:
            raise OutOfTurn(f"publishing version {version}: the newest made is {self._made}; report its step with `done` first.")
        if self._published is not None and version < self._published[0]:
            raise OutOfTurn(f"publishing version {version}: version {self._published[0]} was published before; numbers only grow.")

    def publishing(self, manifest: WeightManifest) -> None:
        """The same version may be published again, with the same weights (I7)."""
        self.check_version(manifest.version)
        if self._published is not None and self._published[0] == manifest.version and self._published[1] != manifest.fingerprint:
            raise OutOfTurn(
                f"publishing version {manifest.version}: other weights of this number were published before; make a new version."
            )
        self._published = (manifest.version, manifest.fingerprint)


class DoneBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trainer says of a step; what it leaves out is filled in. Times are CLOCK_MONOTONIC seconds of this machine."""

    lease: int
    version: Version
    started: Seconds | None = None
    ended: Seconds | None = None
    num_tokens: Annotated[int, Meta(ge=0, le=2**53)] | None = None
    metrics: Annotated[dict[str, float], Meta(max_length=1024)] = {}
    """They are kept in the journal for every step."""
    skipped: bool = False
    """The step left the weights as they were: its groups are dropped and not trained."""


class ModelTensors:
    """Names and shapes of what is handed over of the model that the engines started with: other weights are refused before any engine sees them."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
        """`tied`: the output layer is the embedding, so engines have it once, and a file may have it twice."""
        self._shapes, self._tied = {name: shape for name, shape in shapes.items() if not (tied and name == _TIED)}, tied

    @classmethod
    def of(cls, folder: Path) -> ModelTensors:
        """Blocking; reads headers only."""
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig)
        shapes = {spec.name: spec.shape for path in served_weights(folder) for spec in read_specs(path)}
        return cls(shapes, tied=config.tie_word_embeddings)

    def fitting(self, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """The tensors to serve. `RequestRejected` names the first that does not fit."""
        kept = tuple(spec for spec in specs if not (self._tied and spec.name == _TIED))
        for spec in kept:
            if spec.name not in self._shapes:
                raise RequestRejected(
                    f"the model has no tensor {spec.name!r}.{nearest(spec.name, self._shapes)} Leave it out.", param="file"
                )
            if spec.shape != self._shapes[spec.name]:
                raise RequestRejected(
                    f"tensor {spec.name!r} has shape {spec.shape}, the model needs {self._shapes[spec.name]}.", param="file"
                )
        if missing := sorted(self._shapes.keys() - {spec.name for spec in kept}):
            raise RequestRejected(f"tensor {missing[0]!r} is missing: publish every tensor of the model.", param="file")
        return kept


class _ModelConfig(msgspec.Struct, frozen=True):
    tie_word_embeddings: bool = True
    """What `transformers` assumes of a configuration that does not say."""
