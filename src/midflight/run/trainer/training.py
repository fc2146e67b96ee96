"""The trainer's loop: take, step, publish, until the steps are done.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `TrainingLoop.run` | batches | a batch; its own step; the handover before the last; the write of the checkpoint before | the group queue; the engines' commits; the threads of step and write |
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from midflight.run.api.service import DeviceOwner, RolloutService
from midflight.run.heartbeat import Heartbeat
from midflight.types import PackedBatch, Version, WeightManifest
from midflight.types.digests import StepChain
from midflight.types.facts import Stepped

REWARD_WINDOW = 20
"""Steps over which `stop_at_reward` takes its mean: long enough that luck does not end a run."""

Stage = Callable[[], Callable[[], object]]
"""Copies the trainer's state. Returns a function that puts the copy on disk, which returns False if
it made no checkpoint. Both block; the trainer may step on before the second is called.
"""

DISK_SECONDS = 600.0
"""The limit of copies of a model, in memory and to a disk that others use too."""
MAX_HANDOVERS = 2
"""One is under way and one waits for it. The outlet holds one version more: the one that is live.
"""


class Report(Protocol):
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def skipped(self) -> str | None:
        """The reason why the step left the weights as they were, or `None` if it made an update."""
        ...

    @property
    def alarms(self) -> tuple[str, ...]: ...


class Steps(Protocol):
    """The trainer, as this loop sees it. It is synchronous; `step` runs in a thread."""

    @property
    def version(self) -> Version: ...
    @property
    def num_steps(self) -> int: ...
    def step(self, batch: PackedBatch) -> Report: ...


class WeightsOutlet(Protocol):
    """Takes the trainer's weights for the engines."""

    def publish(self, version: Version) -> WeightManifest:
        """Copies the trainer's weights as they are now. It blocks."""
        ...

    def pass_over(self, version: Version) -> None:
        """No engine will ever have this version; its number is taken all the same."""
        ...

    def release(self, version: Version) -> None:
        """No engine will fetch this version any more."""
        ...


class TrainerTurns(Protocol):
    """The trainer's turns on the devices that engines have in between."""

    async def begin(self) -> None:
        """Waits until all engines sleep, and takes the devices."""
        ...

    async def end(self) -> None:
        """Leaves the devices, but for the weights. The engines wake when they are told."""
        ...


class TrainingLoop:
    """Steps while generation goes on.

    With `prefetch` the next batch is drawn during a step; without it (`max_staleness` 0) after the
    step. The handover of version v runs beside the steps after it, at most `MAX_HANDOVERS` at once:
    a slow engine slows the trainer before it falls behind without bound. With `publish_every` k
    only every k-th version is handed over, and the last. A version's bytes stay until the next one
    is live everywhere, so that an engine which restarts can always fetch the current version.

    With `turns` engines sleep during each step, and the loop waits for the handover, by which they
    wake, before it begins the next.

    The loop waits while a checkpoint is copied. It is written beside the steps after it, one at a
    time: a disk slower than the checkpoints slows the trainer before copies fill the memory.
    """

    def __init__(
        self,
        trainer: Steps,
        outlet: WeightsOutlet,
        service: RolloutService,
        *,
        steps: int,
        prefetch: bool,
        stage: Stage,
        save_every: int,
        publish_every: int = 1,
        stop_at_reward: float | None = None,
        heartbeat: Heartbeat | None = None,
        handover_seconds: float = 0.0,
        chain: StepChain | None = None,
        turns: TrainerTurns | None = None,
    ) -> None:
        """`heartbeat` gets work and waits, and a handover with the `handover_seconds` that it may
        take. Steps are added to `chain`, if there is one.
        """
        self._doing = (heartbeat or Heartbeat()).doing
        self._handover_seconds = handover_seconds
        self._chain = chain
        self._trainer = trainer
        self._outlet = outlet
        self._service = service
        self._steps = steps
        self._turns = turns
        self._prefetch = prefetch
        self._stop_at_reward = stop_at_reward
        self._stage = stage
        self._save_every = save_every
        self._publish_every = publish_every
        self._rewards: deque[float] = deque(maxlen=REWARD_WINDOW)
        self._reports = asyncio.Lock()
        """Steps are reported in their order, even if one report takes longer than the step after
        it.
        """
        self._live: Version | None = None
        self._staged: Version | None = None

    async def run(self) -> None:
        """Waits for batches, steps and handovers. Ends by itself after the last step; any failure
        ends it and cancels the tasks that it started.
        """
        async with asyncio.TaskGroup() as tasks:
            drawn = tasks.create_task(self._service.take(self._trainer.version))
            first = await self._publish()
            if self._chain is not None:
                self._chain.begin(first.fingerprint)
            handovers = deque([tasks.create_task(self._hand_over(first))])
            told = handovers[-1]
            if self._turns is not None:
                await told
            unpublished = 0
            written: asyncio.Task[None] | None = None
            while not self._over():
                with self._doing(
                    f"waits for the batch of version {self._trainer.version}", whom="rollout"
                ):
                    batch = await drawn
                if self._prefetch and self._trainer.num_steps + 1 < self._steps:
                    drawn = tasks.create_task(self._service.take(batch.train_version + 1))
                if self._turns is not None:
                    with self._doing("waits until engines sleep", whom="rollout"):
                        await self._turns.begin()
                done = await self._step(batch)
                unpublished += 1
                if unpublished == self._publish_every or self._over():
                    unpublished = 0
                    await self._freed(handovers)
                    manifest = await self._publish()
                    await self._end_turn()
                    done = await self._chained(done, batch, weights=manifest.fingerprint)
                    told = tasks.create_task(self._hand_over(manifest, done, after=handovers[-1]))
                    handovers.append(told)
                else:
                    self._outlet.pass_over(done.version)
                    await self._end_turn()
                    done = await self._chained(done, batch, weights="")
                    told = tasks.create_task(self._report_alone(done))
                if self._turns is not None:
                    await told
                if not self._prefetch and not self._over():
                    drawn = tasks.create_task(self._service.take(self._trainer.version))
                if self._save_every and self._trainer.num_steps % self._save_every == 0:
                    copied = await self._copied(after=written)
                    written = tasks.create_task(
                        self._write(copied, self._trainer.version, after=told)
                    )
            drawn.cancel()
        if self._staged != self._trainer.version:
            await self._write(await self._copied(), self._trainer.version)
        with self._doing("waits for the last evaluation", whom="rollout"):
            await self._service.finish(self._trainer.version)

    async def _step(self, batch: PackedBatch) -> Stepped:
        started = time.monotonic()
        with self._doing(f"makes version {batch.train_version + 1}", computes=True):
            report = await asyncio.to_thread(self._trainer.step, batch)
        ended = time.monotonic()
        scored = np.isfinite(batch.rewards)
        if scored.any():
            self._rewards.append(float(batch.rewards[scored].mean()))
        skipped = report.skipped is not None
        num_tokens = 0 if skipped else int(batch.loss_mask.sum())
        return Stepped(
            batch.lease,
            self._trainer.version,
            started,
            ended,
            num_tokens,
            dict(report.metrics),
            skipped,
            report.alarms,
        )

    async def _chained(self, done: Stepped, batch: PackedBatch, *, weights: str) -> Stepped:
        """The step with its digests, if they are kept. Waits for the thread that makes them."""
        if self._chain is None:
            return done
        digests = await asyncio.to_thread(
            partial(
                self._chain.stepped,
                done.version,
                batch,
                weights=weights,
                skipped=done.skipped,
                metrics=done.metrics,
            )
        )
        return msgspec.structs.replace(done, digests=digests)

    async def _freed(self, handovers: deque[asyncio.Task[None]]) -> None:
        """Waits for the handover before the last, whose end frees a slot of the outlet."""
        if len(handovers) == MAX_HANDOVERS:
            with self._doing("waits for the handover before the last", whom="rollout"):
                await handovers.popleft()

    async def _end_turn(self) -> None:
        """Waits for the trainer to leave the devices, if they are shared in turns."""
        if self._turns is not None:
            with self._doing("leaves its devices", limit=DISK_SECONDS, computes=True):
                await self._turns.end()

    async def _report_alone(self, done: Stepped) -> None:
        """Reports a step whose version is not handed over. Engines that sleep wake as they were."""
        await self._report(done)
        if self._turns is not None:
            await self._service.turn(DeviceOwner.ENGINES)

    async def _report(self, done: Stepped) -> None:
        """Waits for the reports of the steps before."""
        async with self._reports:
            await self._service.done(done)

    async def _publish(self) -> WeightManifest:
        """Copies the weights out before the next step may change them."""
        with self._doing(
            f"copies the weights of version {self._trainer.version}",
            limit=DISK_SECONDS,
            computes=True,
        ):
            return await asyncio.to_thread(self._outlet.publish, self._trainer.version)

    async def _hand_over(
        self,
        manifest: WeightManifest,
        done: Stepped | None = None,
        *,
        after: asyncio.Task[None] | None = None,
    ) -> None:
        """Reports the step; waits for the handover before it, and until every engine serves this
        version or is in quarantine.
        """
        if done is not None:
            await self._report(done)
        if after is not None:
            await after
        with self._doing(
            f"hands version {manifest.version} over", whom="rollout", limit=self._handover_seconds
        ):
            await self._service.publish(manifest)
        if self._live is not None:
            self._outlet.release(self._live)
        self._live = manifest.version

    async def _copied(self, *, after: asyncio.Task[None] | None = None) -> Callable[[], object]:
        """Copies the trainer's state before the next step may change it. Waits for the write
        `after`, so that memory holds one copy.
        """
        if after is not None:
            await after
        self._staged = self._trainer.version
        with self._doing("copies a checkpoint", limit=DISK_SECONDS, computes=True):
            return await asyncio.to_thread(self._stage)

    async def _write(
        self,
        write: Callable[[], object],
        version: Version,
        *,
        after: asyncio.Task[None] | None = None,
    ) -> None:
        """Writes a checkpoint. Waits for the handover `after`, then for the disk: a checkpoint
        ahead of the journal would lose a step's line in a crash (I8).
        """
        if after is not None:
            await after
        with self._doing(
            f"writes the checkpoint of version {version}", limit=DISK_SECONDS, computes=True
        ):
            made = await asyncio.to_thread(write)
        if made is not False:
            await self._service.checkpointed(version)

    def _over(self) -> bool:
        if self._trainer.num_steps >= self._steps:
            return True
        if self._stop_at_reward is None or len(self._rewards) < REWARD_WINDOW:
            return False
        return sum(self._rewards) / REWARD_WINDOW >= self._stop_at_reward
