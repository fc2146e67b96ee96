"""CPU of one rollout of the built-in single-turn environment: what the environment itself costs,
and with it session, gateway and books.

    python benchmarks/single_turn.py

Rollouts run one after another in this process, over an engine that answers at once with the same
four tokens. Three sides take turns:

| side | how the environment asks the gateway |
|---|---|
| gateway | no environment: the same request is planned and answered without a wire |
| built-in | as in a run: `single_turn.answer` by `LocalAnswers` |
| SDK | `single_turn.answer` by the client of the package openai, in memory |
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from smoke import options_of

from midflight.environments.agents import AgentHost, AgentsHere, SharedClients
from midflight.environments.rollout import RolloutRunner
from midflight.environments.scoring import Unjudged
from midflight.environments.single_turn import LocalAnswers, answer
from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.http.chats import InProcessChats
from midflight.gateway.http.http import build_app
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.ports import SessionHandle
from midflight.run.rollout.rollouts import TokenFates
from midflight.testing.script import scripted_tokenizer
from midflight.types import (
    Chunk,
    Finish,
    FinishReason,
    GroupKey,
    Result,
    RolloutKey,
    SamplingParams,
    Task,
)
from midflight.types.facts import unheard
from midflight.wire.memory import MemoryTransport


class AtOnce:
    """In the place of `Generator`: the same tokens for every request."""

    async def generate(self, answer: Answer, **_: object) -> None:
        answer.next_request("attempt")
        answer.accept(
            Chunk((104, 105, 104, 105), (-0.5,) * 4, 0, 0, Finish(FinishReason.LENGTH)),
            vocab_size=262,
        )

    def forget(self, session_id: str) -> None: ...


class AskedDirectly:
    """Implements `AgentHost`: what a rollout costs without an environment."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def run(self, task: Task, session: SessionHandle) -> float:
        opened = self._gateway.session_for(path_token=session.api_key, api_key=None)
        call = CompletionCall(
            (Messages(({"role": "user", "content": str(task.data["question"])},)),)
        )
        await self._gateway.answers(self._gateway.prepare(opened, call))
        return 0.0

    async def judge(
        self, task: Task, attempts: Sequence[Unjudged], *, name: str
    ) -> Sequence[Result]:
        raise AssertionError("an answer's score is 0 here, and nothing is left to judge")

    def excused(self, session_id: str) -> float:
        return 0.0

    def tool_seconds(self, session_id: str) -> float:
        return 0.0


@asynccontextmanager
async def hosts() -> AsyncGenerator[tuple[Gateway, dict[str, AgentHost]]]:
    limits = EngineLimits(max_context=256, vocab_size=262)
    gateway = Gateway(
        cast(Any, AtOnce()),
        scripted_tokenizer(),
        unheard,
        model="policy",
        limits=limits,
        anonymous=False,
    )
    gateway.address = "http://here"
    app = build_app(gateway, cast(Any, None))
    async with (
        asyncio.TaskGroup() as requests,
        SharedClients(transport=MemoryTransport(app, requests)) as clients,
    ):
        sdk = AgentsHere(
            answer, client_for=clients.client_for, plain_client_for=clients.plain_client_for
        )
        yield (
            gateway,
            {
                "gateway": AskedDirectly(gateway),
                "built-in": LocalAnswers(InProcessChats(gateway)),
                "SDK": sdk,
            },
        )


async def milliseconds(gateway: Gateway, host: AgentHost, *, number: int) -> float:
    """CPU of this process per rollout."""
    sampling = SamplingParams(max_tokens=4)
    runner = RolloutRunner(
        sessions=gateway,
        agents=host,
        sampling=sampling,
        rollout_seconds=60,
        record=unheard,
        fates=TokenFates(),
    )
    task = Task("t", "s", {"question": "reverse hello", "answer": "olleh"})
    began = time.process_time()
    for index in range(number):
        await runner.run(RolloutKey(GroupKey(0, index), 0), task)
    return (time.process_time() - began) / number * 1e3


async def main(options: argparse.Namespace) -> None:
    async with hosts() as (gateway, every):
        found: dict[str, list[float]] = {name: [] for name in every}
        for _ in range(options.rounds + 1):  # the first round warms up
            for name, host in every.items():
                found[name].append(await milliseconds(gateway, host, number=options.rollouts))
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    print("| side | CPU ms per rollout | of it the environment |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:.3f} | {median - medians['gateway']:.3f} |")
    print(f"\nThe SDK's client costs {medians['SDK'] / medians['built-in']:.1f} times as much.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="CPU of a rollout of the built-in environment.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=1000, help="in each round and side")
    asyncio.run(main(options_of(parser, rounds=1, rollouts=20)))
