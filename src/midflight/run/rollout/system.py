"""Stations 1 to 5 and the handover in one event loop: environments, gateway, fleet, buffer and store, wired together.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Rollouts.run` | tasks | admission | the queue (see `buffer.queue`) |
| `take` | finished groups | a batch that may be taken | rollouts that end, versions that go live |
| `publish` | manifests | the handover before; an evaluation that it must not overtake | engines' commits, or their deadlines; the evaluation, or `pin_seconds` |
| `StoreWriter.run` | deeds | the next deed | whoever puts one |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from midflight.buffer.limits import Limits
from midflight.buffer.queue import GroupQueue
from midflight.config import derived
from midflight.config.sections import Config, RolloutSection
from midflight.environments.tasks import SeededStream, Source
from midflight.observe.status import Phase
from midflight.run.api.service import StepDone
from midflight.run.api.teacher import Teacher
from midflight.run.parts import serve_while
from midflight.run.rollout.agents import Agents
from midflight.run.rollout.ages import GroupAges
from midflight.run.rollout.evaluations import Evaluations, Phases
from midflight.run.rollout.records import Records
from midflight.run.rollout.rollouts import Fates, Recorded, Rollouts
from midflight.trajectories.packing import pack
from midflight.trajectories.recovery import Recovered
from midflight.trajectories.store import Store
from midflight.trajectories.writer import StoreWriter
from midflight.types import Batch, PackedBatch, Task, Version, WeightManifest
from midflight.types.facts import Stepped


def held_out(sources: Sequence[Source]) -> list[Task]:
    return [task for source in sources for task in source.heldout]


def buffer_limits(rollout: RolloutSection) -> Limits:
    return Limits(
        groups_per_step=rollout.groups_per_step,
        group_size=rollout.group_size,
        max_staleness=rollout.max_staleness,
        policy=rollout.stale_policy,
        max_in_flight=derived.in_flight(rollout),
        buffer_groups=derived.buffer_groups(rollout),
        min_group_size=derived.min_group_size(rollout),
        requeues=rollout.requeues,
        drop_zero_spread=rollout.drop_zero_spread,
    )


class RolloutSystem:
    """Implements `RolloutService`. Built complete, so that it runs alike over real engines and simulated ones, real time and virtual."""

    def __init__(
        self,
        agents: Agents,
        *,
        sources: Sequence[Source],
        store: Store,
        phases: Phases,
        version: Version = 0,
        checkpoint: Version | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        config, serving = agents.config, agents.serving
        self._teacher = teacher
        self._record, self._phases_told = agents.record, phases
        self._version = version
        self._writer = StoreWriter(store)
        self._records = Records(self._writer)
        self._gateway, self._handover = serving.gateway, serving.handover
        self._gateway.on_turn = self._records.turn_completed
        self._ages = GroupAges(serving.gateway)
        self._fates = Fates()
        self._stream = SeededStream(sources, seed=config.run.seed)
        recovered = store.recover(checkpoint) if checkpoint is not None else None
        self.queue = self._queue(config, first_lease=recovered.next_lease if recovered else 1)
        serving.fleet.on_served = self.queue.served
        recorded = Recorded(agents.runner(self._ages, self._fates, tracked=True), self._records, self._fates)
        self._rollouts = self._rolling_out(config, recorded)
        self._evaluations = Evaluations(
            agents.evaluator,
            held_out(sources),
            every=config.evaluation.eval_every,
            pin_seconds=config.evaluation.pin_seconds,
            phases=phases,
            fleet=serving.fleet,
            handover=serving.handover,
            sessions=serving.gateway,
        )
        self._last_step = asyncio.Event()  # the trainer has said `finish`
        self._finished = asyncio.Event()
        if recovered is not None:
            self._restore(recovered, recorded)

    def _queue(self, config: Config, *, first_lease: int) -> GroupQueue:
        return GroupQueue(
            buffer_limits(config.rollout),
            record=self._record,
            running_oldest=self._ages.of_group,
            closed=self._records.closed,
            start_version=self._version,
            first_lease=first_lease,
        )

    def _rolling_out(self, config: Config, runner: Recorded) -> Rollouts:
        return Rollouts(
            self.queue,
            self._stream,
            runner=runner,
            ages=self._ages,
            fates=self._fates,
            records=self._records,
            record=self._record,
            group_size=config.rollout.group_size,
            min_group_size=derived.min_group_size(config.rollout),
            retries=config.rollout.retries,
        )

    def _restore(self, found: Recovered, recorded: Recorded) -> None:
        """Goes on after a crash of the ring: what the checkpoint has is final, everything else waits or runs again (I8)."""
        self._stream.seek(*found.next_position)
        self.queue.restore(waiting=found.waiting, unfinished=[u.key for u in found.unfinished])
        for unfinished in found.unfinished:
            recorded.restore(unfinished.finished)
            for key, turns in unfinished.turns.items():
                self._gateway.replay(key, turns)

    # --- The run of it -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Evaluates, rolls out until the trainer says that it has finished, evaluates again. Ended by `finish`, or by a failure."""
        try:
            await serve_while(self._phases(), self._writer.run())
        finally:
            self.queue.close()
            self._writer.close()

    async def _phases(self) -> None:
        if self._version == 0:
            await self._evaluations.evaluate()
        self._phases_told.begin_phase(Phase.TRAINING)
        await serve_while(self._rolled_out(), self._evaluations.run())
        await self._evaluations.evaluate()
        self._phases_told.begin_phase(Phase.DONE)
        self._finished.set()
        await asyncio.Event().wait()  # the trainer may still be reading our last answer: the launcher ends this process

    async def _rolled_out(self) -> None:
        """Waits for the trainer's last step, then for an evaluation of a version before."""
        await serve_while(self._last_step.wait(), self._rollouts.run())
        await self._evaluations.settled()

    # --- RolloutService ----------------------------------------------------------------------------------------------

    async def take(self, train_version: Version) -> PackedBatch:
        return await self._leased(await self.queue.take(train_version))

    async def take_within(self, train_version: Version, *, seconds: float) -> PackedBatch | None:
        """Only the wait for the batch has the deadline: once there is one, it is written down and given."""
        try:
            async with asyncio.timeout(seconds):
                batch = await self.queue.take(train_version)
        except TimeoutError:
            return None
        return await self._leased(batch)

    async def done(self, report: StepDone) -> None:
        self.queue.done(report.lease)  # first: a lease that is not open is refused here
        self._records.done(report.lease)
        self._record(Stepped(report.version, report.started, report.ended, report.num_tokens, report.metrics))

    async def publish(self, manifest: WeightManifest) -> None:
        async with self._evaluations.making_way():
            await self._handover.publish(manifest)
            self._evaluations.published(manifest.version)

    async def checkpointed(self, version: Version) -> None:
        await self._records.checkpointed(version)
        self.queue.checkpointed(version)

    async def finish(self, version: Version) -> None:
        """Waits for the last evaluation; ended by it."""
        self._last_step.set()
        await self._finished.wait()

    async def _leased(self, batch: Batch) -> PackedBatch:
        """Waits until the lease is on disk, then for the teacher, which scores while the step before is made."""
        await self._records.leased(batch)
        packed = pack(batch)
        return packed if self._teacher is None else await self._teacher.scored(packed)
