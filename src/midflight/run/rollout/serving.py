"""The serving side: gateway, fleet and handover over the engines of a run.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `HealthWatch.run` | readings | its interval | time |
| `Rejoin.run` | engines in quarantine | its interval | time |
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, cast

from midflight.config.bounds import RolloutBound, rollout_bound
from midflight.config.sections import Config
from midflight.environments.agents import AgentHost
from midflight.environments.evaluation import Evaluator, Suite
from midflight.environments.rollout import RolloutRunner
from midflight.environments.single_turn import LocalAnswers
from midflight.environments.worker_pool import WorkerPool
from midflight.errors import EngineError
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.generation import Generator
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.fleet.fleet import EngineState, Fleet
from midflight.gateway.fleet.health import HealthWatch
from midflight.gateway.http.control import Control
from midflight.ports import Engine, Sessions, Sleeper
from midflight.run.heartbeat import BEAT_SECONDS
from midflight.run.rollout.capacity import Capacity
from midflight.run.rollout.rollouts import TokenFates
from midflight.run.rollout.turns import Turns
from midflight.run.rollout.version_followers import ShardRole, VersionFeed, VersionFollower
from midflight.stopwatch import LoopDelay, Stopwatch
from midflight.text.formats import MessageFormat
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.heldout import KEPT_ROLLOUTS
from midflight.types import Feature, Version
from midflight.types.facts import Fact, Record, RolloutEnded
from midflight.weights.handover import Handover

HEALTH_SECONDS = 1.0
"""The time between two readings of an engine's progress. The readings find stalls. A crash shows at
once by its connection.
"""

ALONE = ShardRole()


class Readmission(Protocol):
    """Lets an engine in again."""

    async def rejoin(self, engine: str) -> bool: ...


class Rejoin:
    """Brings engines in quarantine back. An engine that was restarted serves old weights, and must
    first be given the current ones (I7).
    """

    def __init__(self, fleet: Fleet, handover: Readmission) -> None:
        self._fleet = fleet
        self._handover = handover

    async def run(self) -> None:
        """Waits for the interval to pass, for ever; ended by its task group. An engine that hangs
        does not keep others from rejoining.
        """
        async with asyncio.TaskGroup() as rejoins:
            while True:
                await asyncio.sleep(HEALTH_SECONDS)
                for state in self._fleet.states():
                    if state.error is not None:
                        rejoins.create_task(self._rejoin(state.name))

    async def _rejoin(self, engine: str) -> None:
        """Ends at once while the engine is rejoining already, so that each engine rejoins once at a
        time; else by the handover's deadlines.
        """
        with suppress(EngineError):
            await self._handover.rejoin(engine)


class Serving:
    """Gateway and fleet: all that answering agents needs. `serve` mode is this alone."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        engines: Sequence[Engine],
        *,
        record: Record,
        version: Version,
        anonymous: bool,
        without: frozenset[Feature] = frozenset(),
        role: ShardRole = ALONE,
        come_back: bool = False,
    ) -> None:
        """`without` names features of engines that are not wanted. `anonymous` serving has no
        rollouts, and so no engines apart. `come_back` is true if a launcher starts engines again
        that die.
        """
        self._stall_seconds = config.run.stall_seconds / 4
        """The seconds after which an engine that has work and gives no token loses its requests to
        others. The launcher starts it again later, if it does not come back.
        """
        self.role = role
        num_apart = 0 if anonymous else config.environment.untracked.engines
        self.fleet = Fleet(record=record, come_back=come_back)
        """The engines that are trained."""
        self.apart = Fleet(record=record, come_back=come_back)
        """The engines that keep their weights, for judges and simulated users: no handover knows
        them.
        """
        self._environment = config.environment
        self.outage = Stopwatch()
        """Measures how long no engine took requests of training."""
        self.delay = LoopDelay(BEAT_SECONDS)
        """Measures how late the event loop of this process turns."""
        self.fleet.on_outage = self._outage
        last = engines[len(engines) - num_apart :]
        self._attach(engines, version, frozenset(engine.name for engine in last))
        seconds = config.gateway.request_seconds
        shares = config.gateway.shards > 1
        self.generator = Generator(self.fleet, request_seconds=seconds)
        self.beside = Generator(self.apart, request_seconds=seconds)
        self.control = Control(
            self.fleet, self.generator, beside=(self.beside,), pause_seconds=self._stall_seconds
        )
        self.handover = self._handover(config, record)
        self.version_feed: VersionFeed | None = None
        self.version_follower: VersionFollower | None = None
        if shares:
            self._share(config.run.stall_seconds)
        self.turns = self._taking_turns(config, engines)
        readmission = self.version_follower or self.turns or self.handover
        self.rejoin = Rejoin(self.fleet, readmission)
        self.capacity = Capacity(config, self.fleet)
        self.gateway = Gateway(
            self.generator,
            tokenizer,
            record,
            model=config.model.name,
            limits=EngineLimits.of([engine.capabilities for engine in engines], without=without),
            run_name=config.run.name,
            run_seed=config.run.seed,
            strict=config.gateway.strict,
            own_sampling=config.gateway.sampling == "run",
            max_sessions=config.gateway.max_sessions,
            max_requests=config.gateway.max_sessions,
            orphan_seconds=seconds / 4,
            anonymous=anonymous,
            message_format=MessageFormat(
                tokenizer,
                tools=config.gateway.tool_format,
                reasoning=config.gateway.reasoning_format,
            ),
            apart=self.beside if num_apart else None,
            shard=role.number if shares else None,
        )

    def _attach(self, engines: Sequence[Engine], version: Version, apart: frozenset[str]) -> None:
        self._names_apart = apart
        unknown = EngineError("this gateway was started again") if self.role.again else None
        for engine in engines:
            home = self.home(engine.name)
            error = unknown if home is self.fleet else None
            home.attach(engine, version=version, error=error)

    def _share(self, stall_seconds: float) -> None:
        """Shares the engines with other gateways. The gateway that hands versions over tells the
        others which versions the engines serve.
        """
        if self.role.ask is None:
            self.version_feed = VersionFeed(self.fleet)
        else:
            self.version_follower = VersionFollower(
                self.fleet, self.role.ask, answer_seconds=stall_seconds
            )

    async def watch(self) -> None:
        """Reads the health of all engines. If another gateway hands versions over, follows it too.
        It is ended by its task group.
        """
        owns = self.version_follower is None
        async with asyncio.TaskGroup() as watches:
            for fleet in (self.fleet, self.apart):
                watch = HealthWatch(
                    fleet,
                    interval_seconds=HEALTH_SECONDS,
                    stall_seconds=self._stall_seconds,
                    ends_pauses=owns,
                )
                watches.create_task(watch.run())
            if self.version_follower is not None:
                watches.create_task(self.version_follower.run())

    async def adopt(self) -> None:
        """Learns which versions the engines serve, if the process that handed versions over died
        and this one is its next life. The newest version that an engine serves is the one that all
        serve or are about to serve, and each engine verified it whole. The others get it, or the
        next, by a handover. Waits for the engines' answers, each as long as a health check.
        """
        if not self.role.again or self.version_follower is not None:
            return
        found: dict[str, Version] = {}

        async def ask(engine: Engine) -> None:
            with suppress(EngineError, OSError):  # a timeout is an OSError
                async with asyncio.timeout(self._stall_seconds):
                    found[engine.name] = (await engine.health()).version

        async with asyncio.TaskGroup() as questions:
            for engine in self.fleet.engines():
                questions.create_task(ask(engine))
        for name, version in found.items():
            if version == max(found.values()):
                self.fleet.served(name, version)

    def _outage(self, begins: bool) -> None:
        if begins:
            self.outage.start()
        else:
            self.outage.stop()

    def home(self, engine: str) -> Fleet:
        """The fleet that an engine of that name belongs to, in all its lives. Engines that join
        under new names are trained.
        """
        return self.apart if engine in self._names_apart else self.fleet

    def give_up(self, engine: str) -> None:
        """Gives up an engine that has left, and of which it is not known when it comes back. If it
        was the last engine for requests that are not trained on, these fail at once until one
        joins.
        """
        if engine in self._names_apart and not self.apart.states():
            self.beside.forsake(
                f"{engine}, the last engine that answers what is not trained, has left the run: "
                "its restarts are spent, or somebody sent it away. See its log; what waits for it "
                "goes on when it joins again."
            )

    def states(self) -> tuple[EngineState, ...]:
        """The states of all engines."""
        return (*self.fleet.states(), *self.apart.states())

    def _handover(self, config: Config, record: Record) -> Handover:
        return Handover(
            self.fleet,
            pause_mode=config.rollout.pause_mode,
            way=config.weights.commit,
            stage_seconds=config.weights.stage_seconds,
            commit_seconds=config.weights.commit_seconds,
            record=record,
        )

    def _taking_turns(self, config: Config, engines: Sequence[Engine]) -> Turns | None:
        """The turns of these engines and the trainer, if they share devices in turns. Engines that
        join later are elsewhere.
        """
        if not config.engine.takes_turns:
            return None
        sleepers = {engine.name: cast(Sleeper, engine) for engine in engines}
        seconds = max(config.weights.stage_seconds, config.weights.commit_seconds)
        return Turns(self.fleet, sleepers, self.handover, seconds=seconds)

    def rollout_bound(self) -> RolloutBound:
        """Returns the last bound on a rollout, from the rates measured so far."""
        pace = self.gateway.pace
        return rollout_bound(
            self._environment,
            tokens_per_second=pace.tokens_per_second,
            longest_answer=pace.longest,
            most_turns=self.capacity.most_turns,
        )

    def routable(self) -> bool:
        """True if some engine takes requests."""
        return any(state.error is None for state in self.fleet.states())

    def trouble(self) -> str:
        """Returns a sentence with the engines that take no requests, or an empty string if all
        do.
        """
        away = [
            f"{state.name} is in quarantine ({state.error})"
            for state in self.states()
            if state.error is not None
        ]
        return f"Meanwhile {', '.join(away)}." if away else ""


@dataclass(frozen=True, slots=True)
class Agents:
    config: Config
    serving: Serving
    host: AgentHost
    record: Record
    runners: list[RolloutRunner] = field(default_factory=list["RolloutRunner"])
    """All runners that were made here."""

    def _delayed_seconds(self) -> float:
        """The time that agents in this process lost to it. For agents in workers it is 0: the
        messages of a worker come late by its delay too.
        """
        if isinstance(self.host, WorkerPool):
            return 0.0
        return self.serving.delay.seconds()

    def runner(
        self,
        sessions: Sessions,
        fates: TokenFates,
        *,
        tracked: bool,
        temperature: float | None = None,
    ) -> RolloutRunner:
        """`tracked` sessions are trained on. `temperature` replaces the environment's."""
        environment = self.config.environment
        sampling = environment.sampling
        if temperature is not None:
            sampling = sampling.changed(temperature=temperature)
        runner = RolloutRunner(
            sessions=sessions,
            agents=self.host,
            sampling=sampling,
            rollout_seconds=environment.rollout_seconds,
            record=self._heard if tracked else self.record,
            fates=fates,
            tracked=tracked,
            own=isinstance(self.host, LocalAnswers),
            bound=self.serving.rollout_bound,
            outage_seconds=self.serving.outage.seconds,
            delayed_seconds=self._delayed_seconds,
            trouble=self.serving.trouble,
        )
        self.runners.append(runner)
        return runner

    def _heard(self, fact: Fact) -> None:
        if isinstance(fact, RolloutEnded):
            self.serving.capacity.ended(fact)
        self.record(fact)

    def evaluator(self, sessions: Sessions) -> Evaluator:
        slots = self.serving.capacity.evaluations
        rollouts = self.runner(sessions, TokenFates(), tracked=False)
        suites: list[Suite] = []
        for section in self.config.evaluation.suites:
            temperature = section.temperature
            if temperature is None:
                temperature = self.config.environment.temperature
            runner = self.runner(sessions, TokenFates(), tracked=False, temperature=temperature)
            suites.append(Suite(section, temperature, runner))
        return Evaluator(
            rollouts=rollouts,
            slots=slots,
            record=self.record,
            keep=KEPT_ROLLOUTS,
            suites=suites,
            passes=self.config.curriculum.passes,
        )
