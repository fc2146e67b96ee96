"""A small ring in this process: the production parts of a run, over the engines and the trainer of
a test or an experiment.

It runs on virtual time with scripted engines and a `SimulatedTrainer`, or on the real clock with
embedded engines and the real trainer. `ScriptedScorer` is a teacher whose scores follow from token
and position alone, and which fails when it is told to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from midflight.config.sections import Config
from midflight.environments.agents import Environment, LocalAgents, SharedClients
from midflight.environments.posted import PostedTasks
from midflight.environments.sources import Source
from midflight.gateway.http.http import build_app
from midflight.observe.status import Phase
from midflight.ports import Engine, SessionHandle
from midflight.run.api.service import DeviceOwner, RolloutService
from midflight.run.api.teacher import Teacher
from midflight.run.parts import serve_while
from midflight.run.rollout.hosting import hosting_here
from midflight.run.rollout.serving import ALONE, Agents, Serving
from midflight.run.rollout.system import RolloutSystem
from midflight.run.rollout.version_followers import ShardRole
from midflight.run.trainer.training import Stage, Steps, TrainingLoop, WeightsOutlet
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.store import Store
from midflight.types import Float32, Int32, PackedBatch, Version, WeightManifest
from midflight.types.digests import StepChain
from midflight.types.facts import Record, Stepped, record_nothing
from midflight.wire.memory import MemoryTransport

if TYPE_CHECKING:
    from openai import AsyncOpenAI


# --- A trainer without weights --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SimulatedReport:
    """The report of a simulated step."""

    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    skipped: str | None = None
    alarms: tuple[str, ...] = ()


class SimulatedTrainer:
    """Implements `Steps` and `WeightsOutlet` of `run.trainer.training`. `on_step` sees each batch
    before its step is made, and the step raises the errors of `on_step`.
    """

    def __init__(
        self, *, version: Version = 0, on_step: Callable[[PackedBatch], None] | None = None
    ) -> None:
        self.version = version
        self._first = version
        self.num_steps = 0
        self.batches: list[PackedBatch] = []
        self.released: list[Version] = []
        self.passed_over: list[Version] = []
        self._on_step = on_step

    def step(self, batch: PackedBatch) -> SimulatedReport:
        assert batch.train_version == self.version, (
            f"a batch for version {batch.train_version} at {self.version}"
        )
        if self._on_step is not None:
            self._on_step(batch)
        self.batches.append(batch)
        self.version += 1
        self.num_steps += 1
        return SimulatedReport()

    def publish(self, version: Version) -> WeightManifest:
        """The manifest of a version. Scripted engines start with the first version."""
        fingerprint = "initial" if version == self._first else f"weights-{version}"
        return WeightManifest(version, fingerprint, "shared_memory", "nowhere", ())

    def pass_over(self, version: Version) -> None:
        self.passed_over.append(version)

    def release(self, version: Version) -> None:
        self.released.append(version)


class SlowSteps:
    """Stands between trainer and rollout side, and makes steps take time on the loop's clock, which
    may be virtual.

    `to_thread` runs inline under virtual time, so a step's time passes here, between the batch and
    the report of its step.
    """

    def __init__(self, service: RolloutService, *, seconds: Callable[[], float]) -> None:
        self._service = service
        self._seconds = seconds

    async def take(self, train_version: Version) -> PackedBatch:
        return await self._service.take(train_version)

    async def done(self, step: Stepped) -> None:
        """Waits for the step's duration, then for the service."""
        await asyncio.sleep(self._seconds())
        await self._service.done(step)

    async def publish(self, manifest: WeightManifest) -> None:
        await self._service.publish(manifest)

    async def turn(self, of: DeviceOwner) -> None:
        await self._service.turn(of)

    async def checkpointed(self, version: Version) -> None:
        await self._service.checkpointed(version)

    async def finish(self, version: Version) -> None:
        await self._service.finish(version)


class _SimulatedTurns:
    """Implements `TrainerTurns` for a trainer that has nothing on a device."""

    def __init__(self, service: RolloutService) -> None:
        self._service = service

    async def begin(self) -> None:
        await self._service.turn(DeviceOwner.TRAINER)

    async def end(self) -> None:
        pass


# --- A teacher without a model --------------------------------------------------------------------


class ScriptedScorer:
    """Implements `Scorer`. An answer takes `seconds`."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.num_asked = 0
        self._failures: deque[Exception] = deque()

    def fail_next(self, error: Exception, *, times: int = 1) -> None:
        """Makes the next answers fail with this error."""
        self._failures.extend([error] * times)

    async def score(self, token_ids: Int32, row_offsets: Int32, *, temperature: float) -> Float32:
        """Waits for its seconds to pass."""
        self.num_asked += 1
        await asyncio.sleep(self.seconds)
        if self._failures:
            raise self._failures.popleft()
        return self.scores(token_ids, row_offsets, temperature=temperature)

    @staticmethod
    def scores(token_ids: Int32, row_offsets: Int32, *, temperature: float) -> Float32:
        positions = np.arange(len(token_ids)) - np.repeat(row_offsets[:-1], np.diff(row_offsets))
        return np.where(
            positions == 0, 0.0, -(1 + (token_ids + positions) % 7) / temperature
        ).astype(np.float32)


# --- The ring -------------------------------------------------------------------------------------


class PhaseLog:
    """Remembers the phases that a run went through."""

    def __init__(self) -> None:
        self.seen: list[Phase] = []

    def begin_phase(self, phase: Phase, *, num_tasks: int = 0) -> None:
        del num_tasks
        self.seen.append(phase)


@dataclass(frozen=True, slots=True)
class SmallRing:
    """The rollout side of a run, complete but for its trainer: agents reach it by the `openai`
    client, in memory.
    """

    config: Config
    serving: Serving
    agents: Agents
    system: RolloutSystem
    phases: PhaseLog

    async def serve(
        self, main: Coroutine[object, object, None], *beside: Coroutine[object, object, None]
    ) -> None:
        """Makes rollouts for as long as `main` runs, and waits for it. The failure of any part,
        `beside` included, ends all at once (I9).
        """
        await serve_while(
            main, self.system.run(), self.serving.watch(), self.serving.rejoin.run(), *beside
        )

    async def train(
        self,
        trainer: Steps,
        outlet: WeightsOutlet,
        *beside: Coroutine[object, object, None],
        service: RolloutService | None = None,
        stage: Stage = lambda: lambda: None,
        chain: StepChain | None = None,
    ) -> None:
        """Makes the whole run of `run.steps` steps, and waits for its end, see `serve`. `service`
        may stand between trainer and system, to slow or to watch them. Steps are added to `chain`.
        """
        service = service or self.system
        loop = TrainingLoop(
            trainer,
            outlet,
            service,
            steps=self.config.run.steps,
            prefetch=self.config.rollout.max_staleness > 0,
            stage=stage,
            save_every=self.config.trainer.checkpoint_every,
            publish_every=self.config.weights.every,
            chain=chain,
            turns=_SimulatedTurns(service) if self.config.engine.takes_turns else None,
        )
        await self.serve(loop.run(), *beside)


@asynccontextmanager
async def open_ring(
    config: Config,
    engines: Sequence[Engine],
    *,
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    environment: Environment | None,
    folder: Path,
    record: Record = record_nothing,
    version: Version = 0,
    checkpoint: Version | None = None,
    client_for: Callable[[Serving, SessionHandle], AsyncOpenAI] | None = None,
    teacher: Teacher | None = None,
    posted: PostedTasks | None = None,
    role: ShardRole = ALONE,
) -> AsyncGenerator[SmallRing]:
    """Assembles a ring whose store is in `folder`, and runs nothing yet. The engines serve
    `version`. With `checkpoint` the ring goes on after a crash.

    Without an `environment` the agents are those of `config.environment`, as in a run.
    `client_for` may give agents another client than the SDK's, such as one that calls the gateway
    without HTTP. At its end this waits for requests that are still being answered. Those of ended
    rollouts are cancelled.
    """
    serving = Serving(
        config,
        tokenizer,
        engines,
        record=record,
        version=version,
        anonymous=False,
        role=role,
        come_back=True,
    )
    await serving.adopt()
    serving.gateway.address = "http://ring"
    phases = PhaseLog()
    async with AsyncExitStack() as stack:
        if environment is None:
            hosting = await stack.enter_async_context(hosting_here(config, serving))
            host = hosting.host
        else:
            requests = await stack.enter_async_context(asyncio.TaskGroup())
            transport = MemoryTransport(build_app(serving.gateway, serving.control), requests)
            untracked = config.environment.untracked
            clients = await stack.enter_async_context(
                SharedClients(transport=transport, untracked=untracked)
            )
            given = partial(client_for, serving) if client_for else clients.client_for
            host = LocalAgents(
                environment, client_for=given, plain_client_for=clients.plain_client_for
            )
        agents = Agents(config, serving, host, record)
        system = RolloutSystem(
            agents,
            sources=sources,
            store=Store(folder / "store.sqlite", run=config.run.name),
            phases=phases,
            version=version,
            checkpoint=checkpoint,
            teacher=teacher,
            posted=posted,
        )
        yield SmallRing(config, serving, agents, system, phases)
