"""The rollout process: gateway, environments, buffer and store on one event loop, and HTTP for
agents and the trainer.
"""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.routing import BaseRoute

from midflight.config import derived
from midflight.config.cores import core_use, own_cores
from midflight.config.derived import batch_rollouts
from midflight.config.model_defaults import usual_rate
from midflight.config.sections import Config
from midflight.engines.introduction import About, ask_about
from midflight.engines.remote import RemoteEngine
from midflight.environments.claimed import Board
from midflight.environments.sources import Source, load_sources
from midflight.environments.tasks import posted_tasks
from midflight.environments.worker_pool import WorkerPool
from midflight.gateway.answers.owned_sessions import OwnedSessions, SessionExpiry
from midflight.gateway.http.http import build_app
from midflight.observe.alarms import Alarms
from midflight.observe.completions import Completions, LastRollout, in_words
from midflight.observe.history import newest_version
from midflight.observe.journal import Journal
from midflight.observe.learning_alarms import LearningOptions
from midflight.observe.memory import resident
from midflight.observe.observers import Observers
from midflight.observe.prometheus import Metrics
from midflight.observe.run_state import RunState
from midflight.observe.status import Phase, Status
from midflight.run.api.dashboard import dashboard_route
from midflight.run.api.disk_weights import DiskWeights
from midflight.run.api.info import info_route
from midflight.run.api.membership import EngineAddress, member_routes
from midflight.run.api.session_routes import SessionRoutes
from midflight.run.api.task_routes import tasks_route
from midflight.run.api.teacher import Teacher, score_route
from midflight.run.api.trainer_routes import TrainerRoutes
from midflight.run.api.worker_routes import WorkerRoutes, watch_workers
from midflight.run.parts import (
    TEACHER,
    Alarm,
    LauncherPipe,
    Notice,
    Progress,
    Purpose,
    Ready,
    RestartWorker,
    RolloutSpec,
    serve_while,
)
from midflight.run.rollout.claim_watch import ClaimWatch
from midflight.run.rollout.hosting import Hosting, hosting_here
from midflight.run.rollout.members import Connections, JoinTerms, Members, settings_of, standing
from midflight.run.rollout.serving import Agents, Serving
from midflight.run.rollout.standing import RolloutStanding
from midflight.run.rollout.system import RolloutSystem, accounts, held_out
from midflight.run.rollout.version_followers import OwnerClient, ShardRole, served_route
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.heldout import HELDOUT, HeldoutStore
from midflight.trajectories.pairs import check_local, claim, go_on, remove_left, shelve, store_path
from midflight.trajectories.segments import SEGMENTS
from midflight.trajectories.store import Store
from midflight.types import Feature, SamplingParams, facts
from midflight.wire.hosts import guarded
from midflight.wire.server import serve_app

REPORT_SECONDS = 0.5
"""The time between two reports to the launcher."""
TEACHER_STALLS = 5
"""A teacher has this many times `run.stall_seconds` for the scores of a batch, a restart of it
included.
"""


async def run_rollout(spec: RolloutSpec, launcher: LauncherPipe) -> None:
    """Runs for its purpose: a whole training, one evaluation, or serving without an end."""
    with socket.socket(fileno=spec.socket_fd) as listener:
        process = RolloutProcess(spec, launcher, listener)
        mains = {
            Purpose.TRAIN: process.train,
            Purpose.ROLLOUTS: process.train,
            Purpose.EVALUATE: process.evaluate,
            Purpose.SERVE: process.serve,
        }
        try:
            await serve_while(mains[spec.purpose](), process.connections.run(), process.report())
        finally:
            process.close()


def frequent(state: RunState, metrics: Metrics) -> dict[type, Sequence[facts.Record]]:
    """The observers of facts that come for each rollout, request or step of an engine. All other
    facts go to every observer.
    """
    return {
        facts.EngineStepped: [state.apply, metrics.apply],
        facts.TurnFinished: [metrics.apply],
        facts.EvaluationKept: [],
        facts.SlotFreed: [],
        facts.TurnKept: [],
        facts.TrajectoryKept: [],
    }


class RolloutProcess:
    """Assembles the process. The shells that wait are `RolloutSystem`, the HTTP server and the
    engines' connections.
    """

    def __init__(self, spec: RolloutSpec, launcher: LauncherPipe, listener: socket.socket) -> None:
        self._spec = spec
        self._launcher = launcher
        self._listener = listener
        self._config = config = Config.model_validate_json(spec.config)
        steps = 0 if spec.purpose is Purpose.EVALUATE else config.run.steps
        slots = min(derived.engine_slots(config), derived.in_flight(config))
        cores = core_use(config, own_cores())
        self._state = RunState(
            name=config.run.name,
            steps=steps,
            start_version=spec.version,
            slots=slots,
            cores=cores,
            seconds=spec.seconds,
        )
        self._tokenizer: Tokenizer | None = None
        self._metrics = Metrics()
        self._metrics.learning = self._state.learning.status
        self._metrics.memory = partial(resident, os.getppid())
        self._heldout: HeldoutStore | None = None
        self._claims: ClaimWatch | None = None
        """It is present if workers outside run the agents."""
        self._last: LastRollout | None = None
        self._record = self._observers().apply
        for text in spec.alarms:
            #: The trainer went back to an older checkpoint, or trains in padded rows.
            self._record(facts.Alarmed("trainer", text))
        self._engines = {
            name: self._remote(name, EngineAddress(url)) for name, url in spec.engines.items()
        }
        self._teacher = (
            None if spec.teacher is None else self._remote(TEACHER, EngineAddress(spec.teacher))
        )
        self.connections = Connections(self._remotes)

    def _observers(self) -> Observers:
        """All that apply the run's facts, and those for which some facts are left out."""
        spec = self._spec
        config = self._config
        observers: list[facts.Record] = [self._state.apply, self._metrics.apply]
        of = frequent(self._state, self._metrics)
        if spec.purpose in (Purpose.TRAIN, Purpose.ROLLOUTS):
            folder = Path(config.run.folder)
            folder.mkdir(parents=True, exist_ok=True)  # a further shard has none yet
            at = spec.checkpoint
            if spec.again:
                at = newest_version(folder / "metrics.jsonl", otherwise=spec.version)
            journal = Journal(folder / "metrics.jsonl", self._state, resume_at=at)
            observers.append(journal.apply)
            self._heldout = HeldoutStore(folder / HELDOUT, run=config.run.name)
            of[facts.EvaluationKept] = [self._heldout.apply]
        if config.rollout.show_every:
            completions = Completions(
                self._shown,
                self._decoded,
                every=config.rollout.show_every,
                number=config.rollout.show_completions,
            )
            observers.append(completions.apply)
        if config.observe.samples:
            self._last = LastRollout(self._decoded)
            of[facts.TrajectoryKept] = [self._last.apply]
        alarms = self._alarms().apply
        observers.append(alarms)
        of[facts.SessionEnded] = [self._state.apply, self._metrics.apply, alarms]
        return Observers(observers, of=of, say=lambda text: self._launcher.tell(Alarm(text)))

    def close(self) -> None:
        """Waits until the answers to held-out tasks are on disk: the process ends without waiting
        for threads.
        """
        if self._heldout is not None:
            self._heldout.close()

    @property
    def _remotes(self) -> list[RemoteEngine]:
        """The engines, and the teacher, to which the gateway routes nothing. Their connections must
        run from the start.
        """
        remotes = list(self._engines.values())
        if self._teacher is not None:
            remotes.append(self._teacher)
        return remotes

    def _remote(self, name: str, address: EngineAddress) -> RemoteEngine:
        return RemoteEngine(
            name, address.url, token=address.token or self._spec.token, record=self._record
        )

    # --- Purposes ---------------------------------------------------------------------------------

    async def train(self) -> None:
        """With our trainer it is ended only by the launcher, because the trainer may still read the
        last answer. With a foreign trainer it ends after that answer.
        """
        sources = await self._sources()
        serving = await self._attached(anonymous=False)
        async with self._hosting(serving) as hosting:
            teacher = self._scoring()
            agents = Agents(self._config, serving, hosting.host, self._record)
            system = await self._system(agents, sources, teacher)
            self._standing.watch(
                agents, system.queue, placement=hosting.placement, board=hosting.board
            )
            self._state.accounts = lambda: accounts(system.books)
            self._metrics.accounts = self._state.accounts
            finished = asyncio.Event()  # the trainer's last answer was sent
            routes = self._trainer_routes(system, serving, teacher, finished=finished.set)
            routes += hosting.routes
            services = (self._http(serving, routes, board=hosting.board), *hosting.services)
            if self._spec.purpose is Purpose.TRAIN:
                await serve_while(system.run(), *services)
            else:
                await serve_while(finished.wait(), system.run(), *services)

    async def _system(
        self, agents: Agents, sources: Sequence[Source], teacher: Teacher | None
    ) -> RolloutSystem:
        """Waits until the store is ready. The first gateway alone evaluates: the others leave the
        held-out tasks out.
        """
        spec = self._spec
        run = self._config.run
        drawn = sources
        if spec.owner is not None:
            drawn = [replace(source, heldout=()) for source in sources]
        store = Store(
            await asyncio.to_thread(self._store),
            run=run.name,
            segments=Path(run.folder) / SEGMENTS,
        )
        posted = posted_tasks(
            self._config.environment.sources, Path(run.folder), heldout=sources, seed=run.seed
        )
        return RolloutSystem(
            agents,
            sources=drawn,
            store=store,
            phases=self,
            version=spec.version,
            checkpoint=spec.checkpoint,
            teacher=teacher,
            posted=posted,
        )

    def _trainer_routes(
        self,
        system: RolloutSystem,
        serving: Serving,
        teacher: Teacher | None,
        *,
        finished: Callable[[], None],
    ) -> list[BaseRoute]:
        token = self._spec.control_token
        trainer = TrainerRoutes(
            system,
            token=token,
            model=Path(self._spec.model),
            start_version=self._spec.version,
            served=serving.fleet.served_version,
            finished=finished,
            goes_on=(system.leased, system.next_version) if self._spec.again else None,
        )
        return [
            *trainer.routes(),
            score_route(teacher, token=token),
            tasks_route(system.post, token=token),
        ]

    async def evaluate(self) -> None:
        """Ends with the scores."""
        sources = await self._sources()
        serving = await self._attached(anonymous=False)
        async with self._hosting(serving) as hosting:
            agents = Agents(self._config, serving, hosting.host, self._record)
            evaluator = agents.evaluator(serving.gateway)
            self._standing.watch(agents, placement=hosting.placement, board=hosting.board)
            self.begin_phase(Phase.EVALUATION, num_tasks=len(held_out(sources)))

            async def evaluated() -> None:
                await evaluator.run(held_out(sources), version=self._spec.version)
                # before workers are hung up on, whose ends are then no deaths
                self.begin_phase(Phase.DONE)

            await serve_while(
                evaluated(),
                self._http(serving, hosting.routes, board=hosting.board),
                *hosting.services,
            )

    async def serve(self) -> None:
        """Ends only by the launcher."""
        serving = await self._attached(anonymous=True)
        weights = DiskWeights(Path(self._spec.model), serving.fleet, serving.handover)
        await self._http(serving, [weights.route(self._spec.control_token)])

    def _store(self) -> Path:
        """Returns the path of the store, which is ready for this run. A new run has no store yet:
        one that an earlier run of this folder left on another disk is set aside. A process that was
        started again goes on with the store that it has. It blocks.
        """
        section = self._config.run
        folder = Path(section.folder)
        store = store_path(folder, section.store_folder)
        check_local(store)
        if self._spec.again:
            return store
        if section.store_folder is not None:
            gone = remove_left(section.store_folder, but=store)
            if gone:
                words = (
                    f"removed from {section.store_folder}, for their runs went on elsewhere: "
                    f"{len(gone)} stores"
                )
                self._launcher.tell(Notice(words))
            claim(store, folder)
        if self._spec.checkpoint is None:
            if section.store_folder is not None:
                # a launcher on another machine could not set it aside
                shelve(store)
                _keep_private(store)
            return store
        alarm = go_on(folder, section.store_folder)
        if alarm is not None:
            self._launcher.tell(Alarm(alarm))
        if section.store_folder is not None:
            _keep_private(store)
        return store

    # --- Parts ------------------------------------------------------------------------------------

    async def _sources(self) -> Sequence[Source]:
        """Waits until the tasks are drawn, however many they are."""
        with self._launcher.heartbeat.doing("draws its tasks", computes=True):
            return await asyncio.to_thread(
                load_sources, self._config.environment.sources, seed=self._config.run.seed
            )

    async def _attached(self, *, anonymous: bool) -> Serving:
        """Waits until every engine and the teacher answer, however long they load; ended by them,
        or by the launcher, which ends those that hang.
        """
        for remote in self._remotes:
            with self._launcher.heartbeat.doing(f"attaches {remote.name}", whom=remote.name):
                await remote.connect()
        tokenizer = Tokenizer.load(Path(self._spec.model))
        wants_masks = derived.trains_truncated(
            self._config, trainer_is_ours=self._spec.purpose is Purpose.TRAIN
        )
        owner = None
        if self._spec.owner is not None:
            owner = OwnerClient(self._spec.owner, token=self._spec.control_token)
        serving = Serving(
            self._config,
            tokenizer,
            list(self._engines.values()),
            record=self._record,
            version=self._spec.version,
            anonymous=anonymous,
            without=frozenset() if wants_masks else frozenset({Feature.SAMPLING_MASKS}),
            role=ShardRole(self._spec.shard, owner, self._spec.again),
            come_back=True,
        )
        await serving.adopt()
        serving.gateway.address = self._spec.url
        self._standing = RolloutStanding(serving)
        self._metrics.requests = lambda: {
            state.name: state.num_requests for state in serving.states()
        }
        self._metrics.in_flight = lambda: serving.capacity.limits()
        self._metrics.engines = lambda: Counter(standing(state) for state in serving.states())
        self._launcher.heartbeat.ask = self._standing.now
        return serving

    def _scoring(self) -> Teacher | None:
        if self._teacher is None:
            return None
        temperature = self._config.environment.temperature
        seconds = TEACHER_STALLS * self._config.run.stall_seconds
        return Teacher(
            self._teacher,
            temperature=temperature,
            seconds=seconds,
            heartbeat=self._launcher.heartbeat,
        )

    @asynccontextmanager
    async def _hosting(self, serving: Serving) -> AsyncGenerator[Hosting]:
        """Agents run in workers, whose code this process never sees, or here. At its end, waits for
        requests that are still being answered.
        """
        if self._spec.worker_token is not None:
            yield self._workers(serving, self._spec.worker_token)
            return
        token = self._spec.control_token
        async with hosting_here(self._config, serving, control_token=token) as hosting:
            if hosting.board is not None:
                self._claims = self._claim_watch(hosting.board)
            yield hosting

    def _workers(self, serving: Serving, token: str) -> Hosting:
        pool = WorkerPool(
            serving.gateway,
            stall_seconds=self._config.run.stall_seconds,
            names=self._spec.workers,
            #: Agents that block their worker run alone.
            say=lambda text: self._alarmed(facts.Alarmed("worker", text)),
        )
        watch = watch_workers(
            pool, lambda hung: self._launcher.tell(RestartWorker(hung.name, hung.why))
        )
        routes = WorkerRoutes(pool, token=token, control_token=self._spec.control_token)
        return Hosting(pool, routes.routes(), services=(watch,), placement=pool.placement)

    def _claim_watch(self, board: Board) -> ClaimWatch:
        run = self._config.run
        return ClaimWatch(
            board,
            self._alarmed,
            stall_seconds=run.stall_seconds,
            where=str(Path(run.folder) / "endpoint.json"),
        )

    async def _http(
        self, serving: Serving, routes: Sequence[BaseRoute], *, board: Board | None = None
    ) -> None:
        gateway = self._config.gateway
        members = self._members(serving)
        owned = OwnedSessions(serving.gateway, session_seconds=gateway.session_seconds)
        token = self._spec.control_token
        app = build_app(
            serving.gateway,
            serving.control,
            control_token=token,
            ready=serving.routable,
            metrics=self._metrics.registry,
            metrics_token=token if gateway.private_metrics else None,
            extra_routes=[
                *routes,
                *self._common_routes(serving, owned, board),
                *member_routes(members, token=token),
            ],
        )
        # an evaluation without claims gets no requests from outside
        is_asked = self._spec.purpose is not Purpose.EVALUATE or board is not None
        address = serving.gateway.address if is_asked else None
        server = serve_app(
            guarded(app, host=self._listener.getsockname()[0], names=gateway.names),
            self._listener,
            ready=lambda: self._launcher.tell(Ready(address)),
            stopping=serving.gateway.stop,
        )
        await serve_while(
            server,
            serving.watch(),
            serving.rejoin.run(),
            members.run(),
            SessionExpiry(owned).run(),
        )

    def _members(self, serving: Serving) -> Members:
        config = self._config
        purpose = self._spec.purpose

        async def ask(address: EngineAddress, nonce: Path | None, weights: bool) -> About:
            token = address.token or self._spec.token
            # a large model is read first
            seconds = config.cluster.wait_seconds if weights else config.run.stall_seconds
            return await ask_about(
                address.url, token=token, nonce=nonce, weights=weights, seconds=seconds
            )

        terms = JoinTerms(
            Path(self._spec.model),
            settings_of(config),
            config.weights.transport if purpose in (Purpose.TRAIN, Purpose.ROLLOUTS) else None,
            config.gateway.drain_seconds,
            config.run.stall_seconds,
        )
        first = {
            name: (engine, EngineAddress(self._spec.engines[name]))
            for name, engine in self._engines.items()
        }
        return Members(
            serving,
            self.connections,
            first,
            terms=terms,
            ask=ask,
            connect=self._remote,
            record=self._membership,
        )

    def _common_routes(
        self, serving: Serving, owned: OwnedSessions, board: Board | None
    ) -> Sequence[BaseRoute]:
        """Returns the routes of every purpose: information about this process, and sessions for
        agents that run elsewhere.
        """
        served = serving.fleet.served_version
        token = self._spec.control_token
        sessions = SessionRoutes(
            serving.gateway,
            owned,
            token=token,
            sampling=self._sampling(serving),
            served=served,
            public_url=self._config.gateway.public_url,
            board=board,
        )
        info = info_route(
            self._config,
            purpose=self._spec.purpose,
            model=self._spec.model,
            max_context=serving.gateway.limits.max_context,
            served=served,
            bound=serving.rollout_bound,
            token=token,
        )
        routes = [info, dashboard_route(Path(self._config.run.folder))]
        routes += sessions.routes()
        if serving.version_feed is not None:
            routes.append(served_route(serving.version_feed, token=token))
        return routes

    def _sampling(self, serving: Serving) -> SamplingParams:
        """Defaults of a session that is opened over HTTP. In a run they are the environment's; when
        serving, an answer may use all the room.
        """
        if self._spec.purpose is Purpose.SERVE:
            return SamplingParams(max_tokens=serving.gateway.limits.max_context)
        return self._config.environment.sampling

    # --- What the launcher sees -------------------------------------------------------------------

    def _alarms(self) -> Alarms:
        learns_from_rewards = self._config.distillation.teacher is None
        trains = self._spec.purpose in (Purpose.TRAIN, Purpose.ROLLOUTS)
        return Alarms(
            self._alarmed,
            log=str(Path(self._config.run.folder) / "logs" / "rollout.log"),
            step_rollouts=batch_rollouts(self._config.rollout) if learns_from_rewards else None,
            learning=self._learning() if trains else None,
        )

    def _learning(self) -> LearningOptions:
        config = self._config
        trainer_is_ours = self._spec.purpose is Purpose.TRAIN
        return LearningOptions(
            group_size=config.rollout.group_size,
            groups_per_step=config.rollout.groups_per_step,
            max_tokens=config.environment.max_tokens,
            max_context=config.model.max_context,
            learning_rate=config.trainer.learning_rate if trainer_is_ours else None,
            usual_rate=usual_rate(config),
            draws_by_pass_rate=config.curriculum.chooses,
            draws_others=config.rollout.drop_zero_spread,
            compares=config.distillation.teacher is None and config.objective.advantage != "gae",
            masks_truncated=config.objective.mask_truncated,
        )

    def _decoded(self, ids: Sequence[int]) -> str:
        self._tokenizer = self._tokenizer or Tokenizer.load(Path(self._spec.model))
        return self._tokenizer.decode(ids)

    def _shown(self, completions: facts.CompletionsShown) -> None:
        self._launcher.tell(Notice(in_words(completions)))
        self._record(completions)

    def _membership(self, fact: facts.Fact) -> None:
        """Records engines that come and go, and shows them too."""
        match fact:
            case facts.EngineJoined(engine=engine, url=url):
                words = f"engine {engine} has joined from {url}; it gets the current weights first"
                self._launcher.tell(Notice(words))
            case facts.EngineLeft(engine=engine, why=why, num_resumed=resumed):
                words = f"engine {engine} {why}; {resumed} of its requests go on elsewhere"
                self._launcher.tell(Notice(words))
            case _:
                pass
        self._record(fact)

    def _alarmed(self, alarm: facts.Alarmed) -> None:
        self._launcher.tell(Alarm(alarm.text))
        self._record(alarm)

    def begin_phase(self, phase: Phase, *, num_tasks: int = 0) -> None:
        self._state.begin_phase(phase, num_tasks=num_tasks)
        self._launcher.tell(Progress(self._status()))

    def _status(self) -> Status:
        status = self._state.status()
        sample = None if self._last is None else self._last.now()
        unclaimed = None if self._claims is None else self._claims.board.unclaimed()
        return replace(status, sample=sample, unclaimed=unclaimed)

    async def report(self) -> None:
        """Waits for the interval to pass, for ever; ended by its task group."""
        try:
            while True:
                await asyncio.sleep(REPORT_SECONDS)
                if self._claims is not None:
                    self._claims.look()
                self._launcher.tell(Progress(self._status()))
        finally:
            self._launcher.tell(Progress(self._status()))


def _keep_private(store: Path) -> None:
    """Makes a store outside the run's folder its user's alone, also if the folder is shared with a
    group. One that is not there begins as an empty file; SQLite gives its log the same permissions.
    """
    store.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.close(os.open(store, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    store.chmod(0o600)
