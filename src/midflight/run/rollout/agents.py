"""What runs rollouts: an environment, the clients it is given, and the serving side that answers them. In whatever sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from openai import AsyncOpenAI

from midflight.config.sections import Config
from midflight.environments.evaluation import Evaluator
from midflight.environments.registry import Environment
from midflight.environments.rollout import RolloutRunner
from midflight.ports import SessionHandle, Sessions
from midflight.run.rollout.rollouts import Fates
from midflight.run.rollout.serving import Serving
from midflight.types import SamplingParams
from midflight.types.facts import Record


@dataclass(frozen=True, slots=True)
class Agents:
    config: Config
    serving: Serving
    environment: Environment
    client_for: Callable[[SessionHandle], AsyncOpenAI]
    record: Record

    def runner(self, sessions: Sessions, fates: Fates, *, tracked: bool) -> RolloutRunner:
        """`tracked`: its sessions are trained on."""
        environment = self.config.environment
        return RolloutRunner(
            sessions=sessions,
            client_for=self.client_for,
            environment=self.environment,
            sampling=SamplingParams(max_tokens=environment.max_tokens, temperature=environment.temperature),
            rollout_seconds=environment.rollout_seconds,
            record=self.record,
            fates=fates,
            tracked=tracked,
            paused_seconds=self.serving.control.paused_seconds,
        )

    def evaluator(self, sessions: Sessions) -> Evaluator:
        slots = asyncio.Semaphore(self.config.evaluation.max_in_flight)
        return Evaluator(rollouts=self.runner(sessions, Fates(), tracked=False), slots=slots, record=self.record)
