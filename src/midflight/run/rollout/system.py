"""The rollout process: gateway, environments, buffer and store on one event loop, and HTTP for agents and the trainer.

`RolloutSystem` wires stations 1 to 5 and the handover together.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `RolloutStream.run` | tasks | admission | the queue (see `buffer.queue`) |
| `take` | finished groups | a batch that may be taken | rollouts that end, versions that go live |
| `publish` | manifests | the handover before; an evaluation that it must not overtake | engines' commits, or their deadlines; the evaluation, or `pin_seconds` |
| `StoreWriter.run` | facts | the next fact | whoever records one |
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from starlette.routing import BaseRoute

from midflight.buffer.books import Books
from midflight.buffer.groups import Limits
from midflight.buffer.queue import GroupQueue
from midflight.config import derived
from midflight.config.sections import Config, RolloutSection
from midflight.engines.remote import RemoteEngine
from midflight.environments.claimed import Board, Claimed
from midflight.environments.registry import load_environment
from midflight.environments.rollout import SharedClients
from midflight.environments.tasks import SeededStream, Source, load_sources
from midflight.gateway.answers.owner import OwnedSessions, SessionExpiry
from midflight.gateway.http.http import build_app
from midflight.observe.journal import Journal, Observers
from midflight.observe.progress import RunState
from midflight.observe.prometheus import Metrics
from midflight.observe.status import Phase
from midflight.run.api.routes import Teacher, TrainerRoutes, info_route, score_route
from midflight.run.api.session_routes import SessionRoutes
from midflight.run.parts import TEACHER, Launcher, Progress, Purpose, Ready, RolloutSpec, serve_while
from midflight.run.rollout.rollouts import Evaluations, Fates, GroupAges, Phases, Recorded, RolloutStream
from midflight.run.rollout.serving import Agents, Serving
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.packing import pack
from midflight.trajectories.store import Store
from midflight.trajectories.writer import StoreWriter
from midflight.types import Batch, PackedBatch, SamplingParams, Task, Version, WeightManifest, facts
from midflight.wire.memory import MemoryTransport
from midflight.wire.server import serve_app


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
    """Implements `TrainerService`. Built complete, so that it runs alike over real engines and simulated ones, real time and virtual."""

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
        self._observe, self._phases_told = agents.record, phases
        self._version = version
        self._writer = StoreWriter(store)
        self._gateway, self._handover = serving.gateway, serving.handover
        self._gateway.on_turn = lambda key, number, turn: self.record(facts.TurnKept(key, number, turn))
        self._ages = GroupAges(serving.gateway)
        self.books = Books(buffer_limits(config.rollout), start_version=version)
        self.queue = GroupQueue(self.books, record=self.record, running_oldest=self._ages.of_group)
        serving.fleet.on_served = lambda version: self.record(facts.VersionServed(version))
        self._stream = SeededStream(sources, seed=config.run.seed)
        fates = Fates()
        recorded = Recorded(agents.runner(self._ages, fates, tracked=True), fates, self.record)
        if checkpoint is not None:
            self._restore(store, recorded, checkpoint=checkpoint)
        self._rollouts = self._rolling_out(agents.config.rollout, recorded, fates)
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

    def _rolling_out(self, rollout: RolloutSection, runner: Recorded, fates: Fates) -> RolloutStream:
        return RolloutStream(
            self.queue,
            self.books,
            self._stream,
            runner=runner,
            ages=self._ages,
            fates=fates,
            record=self.record,
            room=self._writer.room,
            group_size=rollout.group_size,
            retries=rollout.retries,
        )

    def _restore(self, store: Store, recorded: Recorded, *, checkpoint: Version) -> None:
        """Goes on after a crash of the ring: what the checkpoint has is final, everything else waits or runs again (I8)."""
        for fact in (facts.Interrupted(), facts.WentBack(checkpoint, self._version, store.groups_after(checkpoint))):
            store.apply(fact)
            self._observe(fact)
        for fact in store.facts():
            self.books.apply(fact)
        self._stream.seek(*store.next_position())
        for unfinished in store.unfinished():
            recorded.restore(unfinished.finished)
            for key, turns in unfinished.turns.items():
                self._gateway.replay(key, turns)

    def record(self, fact: facts.Fact) -> None:
        """Applies a fact in one order: to the books, which may refuse it; to the store; to the observers. Then whoever waits is woken."""
        self.books.apply(fact)
        if isinstance(fact, facts.Stored):
            self._writer.put(fact)
        self._observe(fact)
        if isinstance(fact, facts.Booked):
            self.queue.wake()

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
        return await self._packed(await self.queue.take(train_version))

    async def take_within(self, train_version: Version, *, seconds: float) -> PackedBatch | None:
        """Only the wait for the batch has the deadline: once there is one, it is written down and given."""
        try:
            async with asyncio.timeout(seconds):
                batch = await self.queue.take(train_version)
        except TimeoutError:
            return None
        return await self._packed(batch)

    async def done(self, step: facts.Stepped) -> None:
        """A lease that is not open is refused before anything is recorded."""
        for closed in self.books.skipping(step.lease) if step.skipped else ():
            self.record(closed)
        self.record(step)

    async def take_back(self, lease: int) -> None:
        self.record(facts.TakenBack(lease))
        await self._writer.flush()

    async def restart(self, checkpoint: Version) -> Version:
        """Reads the groups again if a step was reported meanwhile. Ended by the writer."""
        while True:
            groups = await self._writer.read(lambda store: store.groups_after(checkpoint))
            if frozenset(group.key for group in groups) == self.books.learnt_after(checkpoint):
                break
        version = self.books.resumed_as(checkpoint)
        self.record(facts.WentBack(checkpoint, version, groups))
        await self._writer.flush()
        return version

    async def publish(self, manifest: WeightManifest) -> None:
        async with self._evaluations.making_way():
            await self._handover.publish(manifest)
            self._evaluations.published(manifest.version)

    async def checkpointed(self, version: Version) -> None:
        self.record(facts.Checkpointed(version))
        await self._writer.flush()

    async def finish(self, version: Version) -> None:
        """Waits for the last evaluation; ended by it."""
        self._last_step.set()
        await self._finished.wait()

    async def _packed(self, batch: Batch) -> PackedBatch:
        """Waits until the lease is on disk, then for the teacher, which scores while the step before is made."""
        await self._writer.flush()
        packed = pack(batch)
        return packed if self._teacher is None else await self._teacher.scored(packed)


# --- The process ------------------------------------------------------------------------------------------------------


ATTACH_SECONDS = 120.0
"""For an engine to load its model and answer; a large one takes minutes of disk."""
REPORT_SECONDS = 0.5
"""Between two looks of the launcher at the run."""


async def run_rollout(spec: RolloutSpec, launcher: Launcher) -> None:
    """Runs for its purpose: a whole training, one evaluation, or serving without an end."""
    with socket.socket(fileno=spec.socket_fd) as listener:
        process = RolloutProcess(spec, launcher, listener)
        mains = {
            Purpose.TRAIN: process.train,
            Purpose.ROLLOUTS: process.train,
            Purpose.EVALUATE: process.evaluate,
            Purpose.SERVE: process.serve,
        }
        await serve_while(mains[spec.purpose](), *(remote.run() for remote in process.remotes), process.report())


class RolloutProcess:
    """Assembles the process. The shells that wait are `RolloutSystem`, the HTTP server and the engines' connections."""

    def __init__(self, spec: RolloutSpec, launcher: Launcher, listener: socket.socket) -> None:
        self._spec, self._launcher, self._listener = spec, launcher, listener
        self._config = config = Config.model_validate_json(spec.config)
        self._state = RunState(name=config.run.name, steps=config.run.steps, start_version=spec.version)
        self._metrics = Metrics()
        observers: list[facts.Record] = [self._state.apply, self._metrics.apply]
        if spec.purpose in (Purpose.TRAIN, Purpose.ROLLOUTS):
            observers.append(Journal(Path(config.run.folder) / "metrics.jsonl", self._state, resume_at=spec.checkpoint).apply)
        self._record = Observers(observers).apply
        self.engines = [self._remote(name, url) for name, url in spec.engines.items()]
        self._teacher = None if spec.teacher is None else self._remote(TEACHER, spec.teacher)

    @property
    def remotes(self) -> list[RemoteEngine]:
        """Whose connections must run: the engines, and the teacher, to whom the gateway routes nothing."""
        return self.engines if self._teacher is None else [*self.engines, self._teacher]

    def _remote(self, name: str, url: str) -> RemoteEngine:
        return RemoteEngine(name, url, token=self._spec.token, record=self._record)

    # --- Purposes ----------------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """For our trainer it ends only by the launcher, because it may still read our last answer; for another, after that answer."""
        sources = await asyncio.to_thread(load_sources, self._config.environment.sources, seed=self._config.run.seed)
        serving = await self._attached(anonymous=False)
        async with asyncio.TaskGroup() as requests, self._clients(serving, requests) as clients:
            environment, teacher = load_environment(self._config.environment.entry), self._scoring()
            system = RolloutSystem(
                Agents(self._config, serving, environment, clients.client_for, self._record),
                sources=sources,
                store=Store(Path(self._config.run.folder) / "store.sqlite", run=self._config.run.name),
                phases=self,
                version=self._spec.version,
                checkpoint=self._spec.checkpoint,
                teacher=teacher,
            )
            finished = asyncio.Event()  # the trainer's last answer was sent
            trainer = TrainerRoutes(
                system,
                token=self._spec.control_token,
                model=Path(self._spec.model),
                start_version=self._spec.version,
                served=serving.fleet.served_version,
                finished=finished.set,
            )
            board = environment.board if isinstance(environment, Claimed) else None
            routes = [*trainer.routes(), score_route(teacher, token=self._spec.control_token)]
            http = self._http(serving, routes, board=board)
            if self._spec.purpose is Purpose.TRAIN:
                await serve_while(system.run(), http)
            else:
                await serve_while(finished.wait(), system.run(), http)

    async def evaluate(self) -> None:
        """Ends with the scores."""
        sources = await asyncio.to_thread(load_sources, self._config.environment.sources, seed=self._config.run.seed)
        serving = await self._attached(anonymous=False)
        async with asyncio.TaskGroup() as requests, self._clients(serving, requests) as clients:
            environment = load_environment(self._config.environment.entry)
            evaluator = Agents(self._config, serving, environment, clients.client_for, self._record).evaluator(serving.gateway)
            self.begin_phase(Phase.EVALUATION, num_tasks=len(held_out(sources)))
            await evaluator.run(held_out(sources), version=self._spec.version)
            self.begin_phase(Phase.DONE)

    async def serve(self) -> None:
        """Ends only by the launcher."""
        await self._http(await self._attached(anonymous=True), [])

    # --- Parts -------------------------------------------------------------------------------------------------------

    async def _attached(self, *, anonymous: bool) -> Serving:
        """Waits until every engine answers, and the teacher; ended by them, or by a deadline."""
        section = self._config.engine
        starting = 0.0 if section.kind == "embedded" else section.start_seconds
        for remote in self.remotes:
            await remote.connect(seconds=ATTACH_SECONDS + starting)
        tokenizer = Tokenizer.load(Path(self._spec.model))
        serving = Serving(self._config, tokenizer, self.engines, record=self._record, version=self._spec.version, anonymous=anonymous)
        serving.gateway.address = f"http://{self._config.gateway.host}:{self._spec.port}"
        return serving

    def _scoring(self) -> Teacher | None:
        if self._teacher is None:
            return None
        return Teacher(self._teacher, temperature=self._config.environment.temperature, seconds=self._config.distillation.score_seconds)

    def _clients(self, serving: Serving, requests: asyncio.TaskGroup) -> SharedClients:
        """The agents of this process talk to the gateway in memory; any other comes by HTTP. Neither may pause it."""
        app = build_app(serving.gateway, serving.control, control_token=self._spec.control_token)
        return SharedClients(transport=MemoryTransport(app, requests))

    async def _http(self, serving: Serving, routes: Sequence[BaseRoute], *, board: Board | None = None) -> None:
        owned = OwnedSessions(serving.gateway, session_seconds=self._config.gateway.session_seconds)
        app = build_app(
            serving.gateway,
            serving.control,
            control_token=self._spec.control_token,
            ready=serving.routable,
            metrics=self._metrics.registry,
            extra_routes=[*routes, *self._common_routes(serving, owned, board)],
        )
        await serve_while(
            serve_app(app, self._listener, ready=lambda: self._launcher.tell(Ready(serving.gateway.address))),
            serving.health.run(),
            serving.rejoin.run(),
            SessionExpiry(owned).run(),
        )

    def _common_routes(self, serving: Serving, owned: OwnedSessions, board: Board | None) -> Sequence[BaseRoute]:
        """What every purpose offers: who is here, and sessions for agents that others run."""
        served, token = serving.fleet.served_version, self._spec.control_token
        sessions = SessionRoutes(serving.gateway, owned, token=token, sampling=self._sampling(serving), served=served, board=board)
        info = info_route(
            self._config,
            purpose=self._spec.purpose,
            model=self._spec.model,
            max_context=serving.gateway.limits.max_context,
            served=served,
            token=token,
        )
        return [info, *sessions.routes()]

    def _sampling(self, serving: Serving) -> SamplingParams:
        """Defaults of a session opened over HTTP: the environment's in a run; when serving, an answer may use all the room."""
        if self._spec.purpose is Purpose.SERVE:
            return SamplingParams(max_tokens=serving.gateway.limits.max_context)
        section = self._config.environment
        return SamplingParams(max_tokens=section.max_tokens, temperature=section.temperature)

    # --- What the launcher sees --------------------------------------------------------------------------------------

    def begin_phase(self, phase: Phase, *, num_tasks: int = 0) -> None:
        self._state.begin_phase(phase, num_tasks=num_tasks)
        self._launcher.tell(Progress(self._state.status()))

    async def report(self) -> None:
        """Waits for the interval to pass, for ever; ended by its task group."""
        try:
            while True:
                await asyncio.sleep(REPORT_SECONDS)
                self._launcher.tell(Progress(self._state.status()))
        finally:
            self._launcher.tell(Progress(self._state.status()))
