"""A small ring in this process: the production parts of a run, over whatever engines and trainer a test or an experiment brings.

On virtual time with scripted engines and a `SimulatedTrainer`, or on the real clock with embedded engines and the real trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from midflight.config.sections import Config
from midflight.environments.registry import Environment
from midflight.environments.rollout import SharedClients
from midflight.environments.tasks import Source
from midflight.gateway.http.http import build_app
from midflight.observe.status import Phase
from midflight.ports import Engine, SessionHandle
from midflight.run.api.service import RolloutService
from midflight.run.api.teacher import Teacher
from midflight.run.parts import serve_while
from midflight.run.rollout.serving import Agents, Serving
from midflight.run.rollout.system import RolloutSystem
from midflight.run.trainer.training import Stage, Steps, TrainingLoop, WeightsOutlet
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.store import Store
from midflight.types import Version
from midflight.types.facts import Record, unheard
from midflight.wire.memory import MemoryTransport

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class PhaseLog:
    """Remembers the phases that a run went through."""

    def __init__(self) -> None:
        self.seen: list[Phase] = []

    def begin_phase(self, phase: Phase, *, num_tasks: int = 0) -> None:
        del num_tasks
        self.seen.append(phase)


@dataclass(frozen=True, slots=True)
class SmallRing:
    """The rollout side of a run, complete but for its trainer: agents reach it by the `openai` client, in memory."""

    config: Config
    serving: Serving
    system: RolloutSystem
    phases: PhaseLog

    async def serve(self, main: Coroutine[object, object, None], *beside: Coroutine[object, object, None]) -> None:
        """Rolls out for as long as `main` runs; waits for it. The failure of any part, of `beside` too, ends all at once (I9)."""
        await serve_while(main, self.system.run(), self.serving.health.run(), self.serving.rejoin.run(), *beside)

    async def train(
        self,
        trainer: Steps,
        outlet: WeightsOutlet,
        *beside: Coroutine[object, object, None],
        service: RolloutService | None = None,
        stage: Stage = lambda: lambda: None,
    ) -> None:
        """The whole run: `run.steps` steps. Waits for its end; see `serve`. `service` may stand between trainer and system, to slow or to watch."""
        loop = TrainingLoop(
            trainer,
            outlet,
            service or self.system,
            steps=self.config.run.steps,
            prefetch=self.config.rollout.max_staleness > 0,
            stage=stage,
            save_every=self.config.trainer.checkpoint_every,
        )
        await self.serve(loop.run(), *beside)


@asynccontextmanager
async def open_ring(
    config: Config,
    engines: Sequence[Engine],
    *,
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    environment: Environment,
    folder: Path,
    record: Record = unheard,
    version: Version = 0,
    checkpoint: Version | None = None,
    client_for: Callable[[Serving, SessionHandle], AsyncOpenAI] | None = None,
    teacher: Teacher | None = None,
) -> AsyncGenerator[SmallRing]:
    """Assembles a ring whose store is in `folder`; nothing runs yet. The engines serve `version`; with `checkpoint` it goes on after a crash.

    `client_for` may give agents another client than the SDK's, such as one that calls the gateway without HTTP.
    Waits at its end for requests that are still being answered; those of ended rollouts are cancelled.
    """
    serving = Serving(config, tokenizer, engines, record=record, version=version, anonymous=False)
    serving.gateway.address = "http://ring"
    phases = PhaseLog()
    async with (
        asyncio.TaskGroup() as requests,
        SharedClients(transport=MemoryTransport(build_app(serving.gateway, serving.control), requests)) as clients,
    ):
        system = RolloutSystem(
            Agents(config, serving, environment, partial(client_for, serving) if client_for else clients.client_for, record),
            sources=sources,
            store=Store(folder / "store.sqlite", run=config.run.name),
            phases=phases,
            version=version,
            checkpoint=checkpoint,
            teacher=teacher,
        )
        yield SmallRing(config, serving, system, phases)
