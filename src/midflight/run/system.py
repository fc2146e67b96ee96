"""Stations 1 to 5 and the handover in one event loop: environments, gateway, fleet, buffer and store, wired together.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `Rollouts.run` | tasks | admission | the queue (see `buffer.queue`) |
| `take` | finished groups | a batch that may be taken | rollouts that end, versions that go live |
| `publish` | manifests | the handover before; an evaluation that it must not overtake | engines' commits, or their deadlines; the evaluation, or `pin_seconds` |
| `HealthWatch.run` | readings | its interval | time |
| `Rejoin.run` | engines in quarantine | its interval | time |
| `StoreWriter.run` | deeds | the next deed | whoever puts one |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from openai import AsyncOpenAI

from midflight.buffer.limits import Limits as BufferLimits
from midflight.buffer.queue import GroupQueue
from midflight.config.sections import Config
from midflight.environments.evaluation import Evaluator
from midflight.environments.registry import Environment
from midflight.environments.rollout import RolloutRunner
from midflight.environments.sources import Source
from midflight.environments.streams import SeededStream
from midflight.errors import EngineError
from midflight.gateway.control import Control
from midflight.gateway.fleet import Fleet
from midflight.gateway.gateway import Gateway
from midflight.gateway.health import HealthWatch
from midflight.gateway.resume import Generator
from midflight.gateway.sampling import Limits as GatewayLimits
from midflight.observe.status import Phase
from midflight.ports import Engine, Observer, SessionHandle, Sessions
from midflight.run.ages import GroupAges
from midflight.run.evaluations import Evaluations, Phases
from midflight.run.parts import serve_while
from midflight.run.records import Records
from midflight.run.rollouts import Fates, Recorded, Rollouts
from midflight.run.service import StepDone
from midflight.run.teacher import Teacher
from midflight.text.formats import MessageFormat
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.packing import pack
from midflight.trajectories.recovery import Recovered
from midflight.trajectories.store import Store
from midflight.trajectories.writer import StoreWriter
from midflight.types import Batch, PackedBatch, SamplingParams, Task, Version, WeightManifest
from midflight.weights.handover import Handover

HEALTH_SECONDS = 1.0
"""Between readings of an engine's progress; a crash shows at once by its connection, this finds stalls."""
STALL_SECONDS = 30.0
"""Without a token while it has work, an engine counts as stalled: far above one step of a large model."""


class Rejoin:
    """Brings engines in quarantine back: one that was restarted serves old weights and must first be given the current ones (I7)."""

    def __init__(self, fleet: Fleet, handover: Handover) -> None:
        self._fleet, self._handover = fleet, handover

    async def run(self) -> None:
        """Waits for the interval to pass, for ever; ended by its task group. An engine that hangs keeps no other from rejoining."""
        async with asyncio.TaskGroup() as rejoins:
            while True:
                await asyncio.sleep(HEALTH_SECONDS)
                for state in self._fleet.states():
                    if state.error is not None:
                        rejoins.create_task(self._rejoin(state.name))

    async def _rejoin(self, engine: str) -> None:
        """Ends at once while the engine is rejoining already, so that there is one of each at most; else by the handover's deadlines."""
        with suppress(EngineError):
            await self._handover.rejoin(engine)


class Serving:
    """Gateway and fleet: all that answering agents needs. `serve` mode is this alone."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer, engines: Sequence[Engine], *, observer: Observer, version: Version, anonymous: bool
    ) -> None:
        self.fleet = Fleet(observer=observer)
        for engine in engines:
            self.fleet.attach(engine, version=version)
        self.generator = Generator(self.fleet, tokenizer=tokenizer, request_seconds=config.gateway.request_seconds)
        self.control = Control(self.fleet, self.generator)
        self.handover = Handover(
            self.fleet,
            pause_mode=config.rollout.pause_mode,
            way=config.weights.commit,
            stage_seconds=config.weights.stage_seconds,
            commit_seconds=config.weights.commit_seconds,
            observer=observer,
        )
        self.rejoin = Rejoin(self.fleet, self.handover)
        self.health = HealthWatch(self.fleet, interval_seconds=HEALTH_SECONDS, stall_seconds=STALL_SECONDS)
        self.gateway = Gateway(
            self.generator,
            tokenizer,
            observer,
            model=config.model.name,
            limits=GatewayLimits.of([engine.capabilities for engine in engines]),
            run_name=config.run.name,
            run_seed=config.run.seed,
            max_sessions=config.gateway.max_sessions,
            max_requests=config.gateway.max_requests,
            orphan_seconds=config.gateway.orphan_seconds,
            anonymous=anonymous,
            count_all_choices=config.environment.count_all_choices,
            message_format=MessageFormat(tokenizer, tools=config.gateway.tool_format, reasoning=config.gateway.reasoning_format),
        )

    def routable(self) -> bool:
        """Whether some engine takes requests."""
        return any(state.error is None for state in self.fleet.states())


def held_out(sources: Sequence[Source]) -> list[Task]:
    return [task for source in sources for task in source.heldout]


def make_evaluator(
    config: Config,
    serving: Serving,
    sessions: Sessions,
    environment: Environment,
    client_for: Callable[[SessionHandle], AsyncOpenAI],
    observer: Observer,
) -> Evaluator:
    runner = _runner(config, serving, sessions, environment, client_for, observer, fates=Fates(), tracked=False)
    return Evaluator(rollouts=runner, slots=asyncio.Semaphore(config.evaluation.max_in_flight), observer=observer)


def _runner(
    config: Config,
    serving: Serving,
    sessions: Sessions,
    environment: Environment,
    client_for: Callable[[SessionHandle], AsyncOpenAI],
    observer: Observer,
    *,
    fates: Fates,
    tracked: bool,
) -> RolloutRunner:
    return RolloutRunner(
        sessions=sessions,
        client_for=client_for,
        environment=environment,
        sampling=SamplingParams(max_tokens=config.environment.max_tokens, temperature=config.environment.temperature),
        rollout_seconds=config.environment.rollout_seconds,
        observer=observer,
        fates=fates,
        tracked=tracked,
        paused_seconds=serving.control.paused_seconds,
    )


class RolloutSystem:
    """Implements `RolloutService`. Built complete, so that it runs alike over real engines and simulated ones, real time and virtual."""

    def __init__(
        self,
        config: Config,
        serving: Serving,
        *,
        sources: Sequence[Source],
        environment: Environment,
        client_for: Callable[[SessionHandle], AsyncOpenAI],
        store: Store,
        observer: Observer,
        phases: Phases,
        version: Version = 0,
        checkpoint: Version | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self._teacher = teacher
        self._observer, self._phases_told = observer, phases
        self._version = version
        self._writer = StoreWriter(store)
        self._records = Records(self._writer)
        self._gateway, self._handover = serving.gateway, serving.handover
        self._gateway.answering.on_turn = self._records.turn_completed
        self._ages = GroupAges(serving.gateway)
        self._fates = Fates()
        limits = BufferLimits.of(config.rollout)
        recovered = store.recover(checkpoint) if checkpoint is not None else None
        self.queue = GroupQueue(
            limits,
            observer=observer,
            running_oldest=self._ages.of_group,
            closed=self._records.closed,
            start_version=version,
            first_lease=recovered.next_lease if recovered else 1,
        )
        serving.fleet.on_served = self.queue.served
        self._stream = SeededStream(sources, seed=config.run.seed)
        runner = _runner(config, serving, self._ages, environment, client_for, observer, fates=self._fates, tracked=True)
        recorded = Recorded(runner, self._records, self._fates)
        self._rollouts = Rollouts(
            self.queue,
            self._stream,
            runner=recorded,
            ages=self._ages,
            fates=self._fates,
            records=self._records,
            observer=observer,
            group_size=config.rollout.group_size,
            min_group_size=limits.min_group_size,
            retries=config.rollout.retries,
        )
        self._evaluations = Evaluations(
            lambda sessions: make_evaluator(config, serving, sessions, environment, client_for, observer),
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
        self._observer.step_finished(
            version=report.version, started=report.started, ended=report.ended, num_tokens=report.num_tokens, metrics=report.metrics
        )

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
