"""The rollout side of a run. It connects stations 1 to 5 and the handover, and works with any
engines and any trainer.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `RolloutStream.run` | tasks | admission | the queue (see `buffer.queue`) |
| `take` | finished groups | a batch that may be taken | rollouts that end, versions that go live |
| `publish` | manifests | the handover before; an evaluation that it must not overtake | engines' commits, or their deadlines; the evaluation, or `pin_seconds` |
| `StoreWriter.run` | facts | the next fact | whoever records one |
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from midflight.buffer.books import Books
from midflight.buffer.groups import Limits
from midflight.buffer.queue import GroupQueue
from midflight.config import derived
from midflight.config.rollout import RolloutSection
from midflight.config.run import KeptTrajectories
from midflight.config.seats import lent_engine
from midflight.config.sections import Config
from midflight.environments.posted import PostedTasks
from midflight.environments.rows import Columns
from midflight.environments.sources import Source
from midflight.environments.tasks import TaskStream
from midflight.errors import OutOfTurn, RequestRejected, StoreFailed
from midflight.observe.status import Phase
from midflight.run.api.service import CopyAnswer, DeviceOwner
from midflight.run.api.teacher import Teacher
from midflight.run.parts import serve_while
from midflight.run.rollout.evaluations import Evaluations, Phases
from midflight.run.rollout.lending import Lending
from midflight.run.rollout.rollouts import GroupAges, RecordedRollouts, RolloutStream, TokenFates
from midflight.run.rollout.serving import Agents
from midflight.trajectories.packing import pack
from midflight.trajectories.pairs import copy_store, drafted, oldest_checkpoint
from midflight.trajectories.store import Store, Unfinished
from midflight.trajectories.writer import StoreWriter
from midflight.types import (
    Accounts,
    Batch,
    GroupKey,
    PackedBatch,
    Reason,
    Task,
    Version,
    WeightManifest,
    facts,
)
from midflight.types.rollouts import GroupScores

_STORED = frozenset(get_args(facts.Stored))
"""The classes of facts that the store applies."""
_WAKING = frozenset(get_args(facts.Booked)) - {facts.TrajectoryKept, facts.SlotFreed}
"""The classes of facts that may end a wait of the queue. To look for a fact's class here is cheaper
than to wake the queue for each. A freed slot is one of many that a group needs.
"""


def held_out(sources: Sequence[Source]) -> list[Task]:
    return [task for source in sources for task in source.heldout]


def buffer_limits(rollout: RolloutSection, *, shards: int = 1) -> Limits:
    """The limits of the buffer of one of so many shards."""
    return Limits(
        groups_per_step=rollout.groups_per_step,
        group_size=rollout.group_size,
        max_staleness=rollout.max_staleness,
        policy=rollout.stale_policy,
        max_in_flight=derived.most_in_flight(rollout),
        buffer_groups=derived.buffer_groups(rollout),
        buffer_bytes=derived.buffer_bytes(shards),
        min_group_size=derived.min_group_size(rollout),
        drop_zero_spread=rollout.drop_zero_spread,
    )


def accounts(books: Books) -> Accounts:
    """All accounts as values; the reasons as words."""
    tokens = books.tokens
    return Accounts(
        submitted=books.submitted,
        running=books.num_running,
        waiting=books.num_waiting,
        leased=books.num_leased,
        trained=books.trained,
        dropped=_in_words(books.dropped),
        received_tokens=tokens.received,
        waiting_tokens=books.tokens_waiting,
        trained_tokens=tokens.trained,
        masked_tokens=_in_words(tokens.masked),
        dropped_tokens=_in_words(tokens.dropped),
    )


def _in_words(counts: Mapping[Reason, int]) -> dict[str, int]:
    return {reason.value: count for reason, count in counts.items()}


def resumed(
    books: Books, groups: Iterable[GroupScores], unfinished: Iterable[Unfinished]
) -> facts.Resumed:
    """Returns the state of the run so far, for observers that count."""
    scored = Counter[str]()
    failed = Counter[str]()
    rewards = defaultdict[str, float](float)
    for group in groups:
        if group.num_scored + group.num_failed == 0:
            continue
        source = group.task.source
        scored[source] += group.num_scored
        failed[source] += group.num_failed
        rewards[source] += group.rewards
    num_tokens = 0
    for one in unfinished:
        for turns in one.turns.values():
            num_tokens += sum(len(turn.output_ids) for turn in turns)
    return facts.Resumed(accounts(books), num_tokens, scored, failed, rewards)


def task_stream(
    agents: Agents, sources: Sequence[Source], posted: PostedTasks | None
) -> TaskStream:
    config = agents.config
    number = agents.serving.role.number
    return TaskStream(
        sources,
        posted,
        seed=config.run.seed,
        curriculum=config.curriculum,
        shard=(number, config.gateway.shards),
    )


def _kept_here(config: Config) -> KeptTrajectories | None:
    """The bounds on the tokens that this gateway keeps: its part, if there are several."""
    kept = config.run.kept_trajectories
    if kept is None or kept.max_bytes is None:
        return kept
    return KeptTrajectories(kept.max_bytes // config.gateway.shards, None)


def _remove_old(folder: Path, version: Version, kept: KeptTrajectories, store: Store) -> None:
    oldest = oldest_checkpoint(folder, version)
    store.remove_old(oldest, max_bytes=kept.max_bytes, max_seconds=kept.max_seconds)


class RolloutSystem:
    """Implements `TrainerService`. It is complete after it is built, so it runs in the same way
    over real and simulated engines, and in real and virtual time.
    """

    leased: Sequence[Batch] = ()
    """Batches that a trainer had when this process died and was started again."""
    next_version: Version
    """The version of the next batch, as it was when this process began."""
    _last_version: Version | None = None
    """The version of the last step, once the trainer has said `finish`."""

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
        posted: PostedTasks | None = None,
    ) -> None:
        config = agents.config
        serving = agents.serving
        self._teacher = teacher
        self._version = version
        self._folder = Path(config.run.folder)
        self._kept = _kept_here(config)
        self._observe = agents.record
        self._phases_told = phases
        self._writer = StoreWriter(store)
        self._gateway = serving.gateway
        self._handover = serving.handover
        self._turns = serving.turns
        self._gateway.on_turn = self.record
        self._ages = GroupAges(serving.gateway)
        self._lending = Lending(serving.fleet, lent_engine(config.engine))
        self.books = Books(
            buffer_limits(config.rollout, shards=config.gateway.shards), start_version=version
        )
        self.queue = GroupQueue(
            self.books,
            record=self.record,
            running_oldest=self._ages.of_group,
            full=serving.capacity.full,
        )
        serving.capacity.on_changed = self.queue.wake
        serving.fleet.on_served = lambda version: self.record(facts.VersionServed(version))
        self._stream = task_stream(agents, sources, posted)
        fates = TokenFates()
        recorded = RecordedRollouts(
            agents.runner(self._ages, fates, tracked=True),
            fates,
            self.record,
            kept=serving.capacity.kept,
        )
        self._again = serving.role.again
        self.next_version = version
        if self._again or checkpoint is not None:
            self._restore(agents, store, recorded, checkpoint=checkpoint)
        self._rollouts = self._rolling_out(agents, recorded, fates)
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
        self._last_step = asyncio.Event()
        """The trainer has said `finish`."""
        self._finished = asyncio.Event()
        """The last evaluation has ended, so that `finish` is answered."""

    def _rolling_out(
        self, agents: Agents, runner: RecordedRollouts, fates: TokenFates
    ) -> RolloutStream:
        rollout = agents.config.rollout
        return RolloutStream(
            self.queue,
            self.books,
            self._stream,
            runner=runner,
            ages=self._ages,
            fates=fates,
            record=self.record,
            room=self._writer.room,
            routable=agents.serving.routable,
            group_size=rollout.group_size,
            retries=rollout.retries,
            passes=agents.config.curriculum.passes,
        )

    def _restore(
        self,
        agents: Agents,
        store: Store,
        recorded: RecordedRollouts,
        *,
        checkpoint: Version | None,
    ) -> None:
        """Goes on after a crash. With a checkpoint the whole ring has crashed: the contents of the
        checkpoint are final, and everything else waits or runs again (I8). Without one, this
        process alone has crashed: leased groups stay leased and trained groups stay trained.
        """
        serving = agents.serving
        passes = agents.config.curriculum.passes
        store.apply(facts.Interrupted())
        if checkpoint is not None:
            groups = store.groups_after(checkpoint, whole=False)
            store.apply(facts.WentBack(checkpoint, self._version, groups))
        self._begin_damaged_again(store)
        open_leases: dict[int, Batch] = {}
        for fact in store.facts():
            self.books.apply(fact)
            if isinstance(fact, facts.Leased):
                open_leases[fact.batch.lease] = fact.batch
            elif isinstance(fact, facts.Stepped):
                del open_leases[fact.lease]
            elif isinstance(fact, facts.CarriedOver):
                self.next_version = fact.next_version or self.next_version
        self.leased = tuple(open_leases.values())
        if self._again and serving.routable():
            self.record(facts.VersionServed(serving.fleet.served_version()))
        if self._stream.curriculum is not None:
            self._stream.curriculum.restore(store.scores(passes=passes))
        self._stream.seek(*store.next_position(), posted=store.next_posted())
        going_on = store.unfinished()
        self._observe(resumed(self.books, store.scores(passes=passes), going_on))
        for unfinished in going_on:
            recorded.restore(unfinished.finished)
            self._ages.restore(unfinished.key, unfinished.versions())
            for key, turns in unfinished.turns.items():
                self._gateway.replay(key, turns)

    def _begin_damaged_again(self, store: Store) -> None:
        """Puts the tasks of groups in line again whose tokens the disk has damaged."""
        for key, said in tuple(store.damaged()):
            again = GroupKey(key.epoch, key.index, key.attempt + 1)
            store.apply(facts.GroupClosed(key, Reason.DAMAGED, 0, successor=again))
            #: The disk gave other tokens back than were written. The group begins again.
            self._observe(facts.Alarmed("damaged", f"{said} Its group begins again."))

    def record(self, fact: facts.Fact) -> None:
        """Applies a fact in one order: to the books, which may refuse it; to the store; to the
        observers. Then the waits of the queue are woken.
        """
        self.books.apply(fact)
        if type(fact) in _STORED:
            self._writer.put(fact)
        self._observe(fact)
        if type(fact) in _WAKING or (
            type(fact) is facts.SlotFreed and self.books.admission() is None
        ):
            self.queue.wake()

    def post(self, rows: Sequence[Columns]) -> tuple[range, int]:
        """Posts as `TaskStream` does, and wakes those that wait for tasks."""
        taken = self._stream.post(rows)
        self.queue.wake()
        return taken

    # --- The run of it ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Evaluates, rolls out until the trainer says that it has finished, and evaluates again.
        After `finish` it waits for ever: the launcher ends it, or a failure.
        """
        try:
            await serve_while(self._phases(), self._writer.run())
        finally:
            self.queue.close()
            self._writer.close()

    async def _phases(self) -> None:
        if self._version == 0 and not self._again:
            await self._evaluations.evaluate()
        self._phases_told.begin_phase(Phase.TRAINING)
        await serve_while(self._rolled_out(), self._evaluations.run())
        await self._evaluations.evaluate()
        self._phases_told.begin_phase(Phase.DONE)
        self._finished.set()
        # the trainer may still be reading our last answer: the launcher ends this process
        await asyncio.Event().wait()

    async def _rolled_out(self) -> None:
        """Waits for the trainer's last step, then for an evaluation of a version before."""
        await serve_while(self._last_step.wait(), self._rollouts.run())
        await self._evaluations.settled()

    # --- RolloutService ---------------------------------------------------------------------------

    async def take(self, train_version: Version) -> PackedBatch:
        with self._lending.while_waiting():
            batch = await self.queue.take(train_version)
            self._lending.given(batch.lease)
        return await self._packed(batch)

    async def take_within(self, train_version: Version, *, seconds: float) -> PackedBatch | None:
        """Only the wait for the batch has the deadline: once there is a batch, it is written down
        and given.
        """
        try:
            async with asyncio.timeout(seconds):
                batch = await self.queue.take(train_version)
        except TimeoutError:
            return None
        return await self._packed(batch)

    async def done(self, step: facts.Stepped) -> None:
        """A lease that is not open is refused before anything is recorded."""
        if step.skipped:
            for closed in self.books.skipping(step.lease):
                self.record(closed)
        self.record(step)
        self._lending.done(step.lease)

    async def take_back(self, lease: int) -> None:
        self.record(facts.TakenBack(lease))
        self._lending.done(lease)
        await self._writer.flush()

    async def restart(self, checkpoint: Version, *, least: Version = 0) -> Version:
        """Waits for the writer to read the groups; reads them again if a step was reported
        meanwhile.
        """
        if self.over and checkpoint != self._last_version:
            raise OutOfTurn(
                f"going back to version {checkpoint}: version {self._last_version} was the last, "
                "and its rollouts have ended."
            )
        while True:
            groups = await self._writer.read(lambda store: store.groups_after(checkpoint))
            keys = frozenset(group.key for group in groups)
            if keys == self.books.learnt_after(checkpoint):
                break
        version = max(least, self.books.resumed_as(checkpoint))
        self.record(facts.WentBack(checkpoint, version, groups))
        self._lending.done()
        await self._writer.flush()
        return version

    @property
    def over(self) -> bool:
        return self._last_step.is_set()

    async def copy_store(self, version: Version) -> CopyAnswer:
        """Waits until earlier facts are written, then for a thread of its own, which makes the
        copy. Meanwhile facts are written and the event loop goes on.
        """

        def noted(store: Store) -> Store:
            store.copied(version)
            return store

        store = await self._writer.read(noted)
        try:
            made = await asyncio.to_thread(copy_store, store.path, drafted(self._folder, version))
        except StoreFailed as error:
            return CopyAnswer(str(error))
        await self._writer.read(lambda store: store.has_increment(made))
        return CopyAnswer()

    async def publish(self, manifest: WeightManifest) -> None:
        async def deliver() -> None:
            await self._handover.publish(manifest)
            self._evaluations.published(manifest.version)

        async with self._evaluations.making_way():
            if self._turns is None:
                await deliver()
            else:
                await self._turns.to_engines(deliver)

    async def turn(self, of: DeviceOwner) -> None:
        """Waits as `Turns` does. Before the trainer's turn it waits for an evaluation that no
        version may overtake.
        """
        if self._turns is None:
            raise RequestRejected(
                'turns are for engines that sleep while the trainer steps; set engine.share = "time" '
                "or do not ask for one.",
                param="of",
            )
        if of is DeviceOwner.ENGINES:
            await self._turns.to_engines()
            return
        async with self._evaluations.making_way():
            await self._turns.to_trainer()

    async def checkpointed(self, version: Version) -> None:
        self.record(facts.Checkpointed(version))
        await self._writer.flush()
        if self._kept is not None:
            await self._writer.read(partial(_remove_old, self._folder, version, self._kept))

    async def finish(self, version: Version) -> None:
        """Waits for the last evaluation; ended by it. Batches that the trainer drew and will not
        train wait again.
        """
        self._last_version = version
        self._last_step.set()
        for lease in self.books.leases:
            await self.take_back(lease)
        with self._lending.while_waiting():
            await self._finished.wait()

    async def _packed(self, batch: Batch) -> PackedBatch:
        """Waits until the lease is on disk, then for the thread that packs, and for the teacher,
        which scores while the step before is made.
        """
        seal = await self._writer.read(lambda store: store.seal())
        packed = replace(await asyncio.to_thread(pack, batch), seals=(seal,))
        if self._teacher is None:
            return packed
        return await self._teacher.scored(packed)
