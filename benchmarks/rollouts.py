"""What one single-turn rollout costs in CPU.

    python benchmarks/rollouts.py [--rollouts 4000] [--in-flight 128] [--answer 8]
    python benchmarks/rollouts.py --parts environment

**process**: all of the rollout process (tasks, groups, session, gateway, engine's wire, books,
store, journal), assembled as in a run. The engine is a process of its own, which answers at once
over the engine's wire. In the trainer's place is one that gives every batch back. CPU is this
process's, threads included, from a steady state on.

**environment**: the built-in environment by itself. Rollouts run one after the other, over an
engine that answers at once with the same four tokens. The sides:

| side | how the environment asks the gateway |
|---|---|
| gateway | no environment: the same request is planned and answered without a wire |
| built-in | as in a run: `single_turn.answer` by `LocalAnswers` |
| SDK | `single_turn.answer` by the client of the package openai, in memory |
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import uvloop
from harness.arguments import Arguments
from harness.processes import free_port, running, side, wait_for
from harness.report import Report, make_parts
from harness.rounds import middle_and_range, turns
from harness.runs import DEMO

from midflight.config import Config, load_config
from midflight.engines.remote import RemoteEngine
from midflight.environments.agents import AgentHost, LocalAgents, SharedClients
from midflight.environments.result_checks import UnscoredRollout
from midflight.environments.rollout import RolloutRunner
from midflight.environments.single_turn import LocalAnswers, answer
from midflight.environments.sources import load_sources
from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.http.chats import InProcessChats
from midflight.gateway.http.http import build_app
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.observe.journal import Journal
from midflight.observe.observers import Observers
from midflight.observe.prometheus import Metrics
from midflight.observe.run_state import RunState
from midflight.ports import SessionHandle
from midflight.run.launcher.child import GC_THRESHOLD
from midflight.run.parts import serve_while
from midflight.run.rollout.rollout_process import frequent
from midflight.run.rollout.rollouts import TokenFates
from midflight.run.rollout.serving import Agents, Serving
from midflight.run.rollout.system import RolloutSystem, accounts
from midflight.testing.ring import PhaseLog
from midflight.testing.script import scripted_tokenizer
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.store import Store
from midflight.types import (
    Chunk,
    Finish,
    FinishReason,
    GroupKey,
    Result,
    RolloutKey,
    SamplingParams,
    Task,
    WeightManifest,
)
from midflight.types.facts import Stepped, record_nothing
from midflight.wire.memory import MemoryTransport

CHECKPOINT_EVERY = 20
"""Versions, as in a run: what was trained up to one need not be remembered any more."""


# --- The rollout process --------------------------------------------------------------------------


def process(options: argparse.Namespace, report: Report) -> None:
    port = free_port()
    engine_command = side("gateway_servers", "engine", port, 0)
    with running(engine_command) as engine, tempfile.TemporaryDirectory() as folder:
        wait_for(port, engine)
        config = config_of(options, Path(folder))
        found = uvloop.run(process_milliseconds(options, config, port, Path(folder)))
    shown = middle_and_range(found[1:], digits=3)
    report.say(f"{shown} ms CPU a rollout of {options.answer} tokens")


def config_of(options: argparse.Namespace, folder: Path) -> Config:
    """The demo's, from a model that needs no warm start."""
    settings = [
        f"run.folder={folder}",
        f"environment.max_tokens={options.answer}",
        f"rollout.max_in_flight={options.in_flight}",
        "rollout.max_staleness=8",
        "rollout.buffer_groups=none",
        "warm_start.target_accuracy=none",
        "environment.sources.0.heldout=0",
        "environment.sources.1.heldout=0",
    ]
    return load_config(DEMO, settings)


async def process_milliseconds(
    options: argparse.Namespace, config: Config, engine_port: int, folder: Path
) -> list[float]:
    """CPU milliseconds a rollout, in each round; the first warms up."""
    state = RunState(name="run", steps=0, start_version=0, slots=options.in_flight)
    metrics = Metrics()
    observers = [state.apply, metrics.apply, Journal(folder / "metrics.jsonl", state).apply]
    record = Observers(observers, of=frequent(state, metrics)).apply
    remote = RemoteEngine("trivial", f"http://127.0.0.1:{engine_port}", token=None, record=record)
    found: list[float] = []

    async def serve() -> None:
        await remote.connect(seconds=30)
        write_byte_tokenizer(folder)
        tokenizer = Tokenizer.load(folder)
        serving = Serving(config, tokenizer, [remote], record=record, version=0, anonymous=False)
        host = LocalAnswers(InProcessChats(serving.gateway))
        system = RolloutSystem(
            Agents(config, serving, host, record),
            sources=load_sources(config.environment.sources, seed=0),
            store=Store(folder / "store.sqlite", run="run"),
            phases=PhaseLog(),
        )
        state.accounts = metrics.accounts = lambda: accounts(system.books)
        await serve_while(give_back(system, options, config, found), system.run())

    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    await serve_while(serve(), remote.run())
    return found


async def give_back(
    system: RolloutSystem, options: argparse.Namespace, config: Config, found: list[float]
) -> None:
    """Waits for batches, and ends when all rounds were measured."""
    size = config.rollout.groups_per_step * config.rollout.group_size
    version = 0
    for _ in range(options.rounds + 1):
        began = time.process_time()
        first = version
        while (version - first) * size < options.rollouts:
            batch = await system.take(version)
            version += 1
            step = Stepped(batch.lease, version, began, began, num_tokens=0, metrics={})
            await system.done(step)
            weights = f"weights {version}"
            manifest = WeightManifest(version, weights, "shared_memory", "nowhere", ())
            await system.publish(manifest)
            if version % CHECKPOINT_EVERY == 0:
                await system.checkpointed(version)
        num_rollouts = (version - first) * size
        found.append((time.process_time() - began) / num_rollouts * 1e3)


# --- The environment ------------------------------------------------------------------------------


class FixedGenerator:
    """Stands for `Generator`, with the same tokens for every request, at once."""

    async def generate(self, answer: Answer, **_: object) -> None:
        answer.next_request("attempt")
        tokens = (104, 105, 104, 105)
        chunk = Chunk(tokens, (-0.5,) * len(tokens), 0, 0, Finish(FinishReason.LENGTH))
        answer.accept(chunk, vocab_size=262)

    def forget(self, session_id: str) -> None: ...


class GatewayAlone:
    """Implements `AgentHost`: what a rollout costs without an environment."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def run(self, task: Task, session: SessionHandle) -> float:
        opened = self._gateway.session_for(path_token=session.api_key, api_key=None)
        message = {"role": "user", "content": str(task.data["question"])}
        call = CompletionCall((Messages((message,)),))
        await self._gateway.answers(self._gateway.prepare(opened, call))
        return 0.0

    async def judge(
        self, task: Task, attempts: Sequence[UnscoredRollout], *, name: str
    ) -> Sequence[Result]:
        raise AssertionError("an answer's score is 0 here, and nothing is left to judge")

    def excused(self, session_id: str) -> float:
        return 0.0

    def tool_seconds(self, session_id: str) -> float:
        return 0.0


@asynccontextmanager
async def agent_hosts() -> AsyncGenerator[tuple[Gateway, dict[str, AgentHost]]]:
    gateway = Gateway(
        cast(Any, FixedGenerator()),
        scripted_tokenizer(),
        record_nothing,
        model="policy",
        limits=EngineLimits(max_context=256, vocab_size=262),
        anonymous=False,
    )
    gateway.address = "http://here"
    app = build_app(gateway, cast(Any, None))
    async with asyncio.TaskGroup() as requests:
        transport = MemoryTransport(app, requests)
        async with SharedClients(transport=transport) as clients:
            sdk = LocalAgents(
                answer, client_for=clients.client_for, plain_client_for=clients.plain_client_for
            )
            hosts: dict[str, AgentHost] = {
                "gateway": GatewayAlone(gateway),
                "built-in": LocalAnswers(InProcessChats(gateway)),
                "SDK": sdk,
            }
            yield gateway, hosts


async def rollout_milliseconds(gateway: Gateway, host: AgentHost, *, number: int) -> float:
    """CPU of this process for each of so many rollouts."""
    runner = RolloutRunner(
        sessions=gateway,
        agents=host,
        sampling=SamplingParams(max_tokens=4),
        rollout_seconds=60,
        record=record_nothing,
        fates=TokenFates(),
    )
    task = Task("t", "s", {"question": "reverse hello", "answer": "olleh"})
    began = time.process_time()
    for index in range(number):
        await runner.run(RolloutKey(GroupKey(0, index), 0), task)
    return (time.process_time() - began) / number * 1e3


async def compared(options: argparse.Namespace) -> dict[str, float]:
    """The median of each side."""
    async with agent_hosts() as (gateway, hosts):
        found: dict[str, list[float]] = {name: [] for name in hosts}
        for name, counts in turns(hosts, rounds=options.rounds, warmup=1):
            number = options.rollouts // 4
            taken = await rollout_milliseconds(gateway, hosts[name], number=number)
            if counts:
                found[name].append(taken)
    return {name: statistics.median(taken) for name, taken in found.items()}


def environment(options: argparse.Namespace, report: Report) -> None:
    medians = asyncio.run(compared(options))
    table = report.table("side", "CPU ms per rollout", "of it the environment")
    for name, median in medians.items():
        table.row(name, f"{median:.3f}", f"{median - medians['gateway']:.3f}")
    ratio = medians["SDK"] / medians["built-in"]
    report.say(f"\nThe SDK's client costs {ratio:.1f} times as much.")
    report.figure("a rollout: the SDK's client / built-in", ratio)


PARTS = {"process": process, "environment": environment}


def main() -> None:
    arguments = Arguments(__doc__, rounds=5)
    arguments.option("--parts", ["process"], smoke=[*PARTS], choices=[*PARTS])
    arguments.option(
        "--rollouts", 4000, smoke=128, help="in each round; a fourth of it in part `environment`"
    )
    arguments.option("--in-flight", 128)
    arguments.option("--answer", 8, help="tokens of each answer of part `process`")
    options = arguments.parse()
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()
