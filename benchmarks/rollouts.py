"""What one single-turn rollout costs in CPU, and how fast rollouts go on beside faulty ones.

    python benchmarks/rollouts.py [--rollouts 4000] [--in-flight 128] [--answer 8]
    python benchmarks/rollouts.py --parts environment faulty

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

**faulty**: rollouts beside others that hang, raise, fork or leak. 512 at once in real workers, over
a scripted engine. Environments take a long-tailed time. 1 % of the rollouts hang, 1 % raise, 1 %
start processes or take memory without end; whenever one ends, another of its kind begins. Beside it
the same healthy rollouts without them, in alternating rounds. The speed is that at which healthy
rollouts end. Failures are counted by class, and each names its task.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import random
import secrets
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop
from harness.arguments import Arguments
from harness.processes import environment as child_environment
from harness.processes import free_port, running, side, wait_for
from harness.report import Report, make_parts
from harness.rounds import middle_and_range, turns
from harness.runs import DEMO

from midflight.config import Config, load_config
from midflight.config.environment import EnvironmentSection
from midflight.config.gateway import GatewaySection
from midflight.engines.remote import RemoteEngine
from midflight.environments.agents import AgentHost, LocalAgents, SharedClients
from midflight.environments.result_checks import UnscoredRollout
from midflight.environments.rollout import RolloutRunner
from midflight.environments.single_turn import LocalAnswers, answer
from midflight.environments.sources import load_sources
from midflight.environments.worker_pool import HungWorker, WorkerPool
from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.http.chats import InProcessChats
from midflight.gateway.http.http import build_app
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.observe.failures import failure_class
from midflight.observe.journal import Journal
from midflight.observe.observers import Observers
from midflight.observe.prometheus import Metrics
from midflight.observe.run_state import RunState
from midflight.ports import SessionHandle
from midflight.run import parts
from midflight.run.api.worker_routes import WorkerRoutes, watch_workers
from midflight.run.launcher.child import GC_THRESHOLD
from midflight.run.parts import serve_while
from midflight.run.places.port import ChildOrder
from midflight.run.places.process import LocalChild
from midflight.run.rollout.rollout_process import frequent
from midflight.run.rollout.rollouts import TokenFates
from midflight.run.rollout.serving import Agents, Serving
from midflight.run.rollout.system import RolloutSystem, accounts
from midflight.testing.ring import PhaseLog
from midflight.testing.script import Script, scripted_tokenizer
from midflight.testing.scripted import ScriptedEngine
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
from midflight.wire.server import listen, serve_app

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


# --- Beside faulty ones ---------------------------------------------------------------------------

SHARES = {"hang": 0.01, "raise": 0.01, "fork": 0.005, "leak": 0.005}
EXPECTED = {
    "hang": "RolloutTimeout",
    "raise": "SimulatorCrashed",
    "fork": "TooManyProcesses",
    "leak": "MemoryError",
}


def seconds_of(draw: random.Random, shortest: float) -> float:
    """Pareto of shape 1.5, five times the shortest at most: half take less than 1.6 times the
    shortest, one in ten more than 4.6 times.
    """
    return shortest * min(5.0, draw.paretovariate(1.5))


@dataclass
class Round:
    """What ended in a round, after its warm-up: healthy rollouts, and of the others classes and
    tasks by fault.
    """

    healthy: int = 0
    failed_healthy: list[str] = field(default_factory=list)
    classes: Counter[tuple[str, str]] = field(default_factory=Counter)
    blamed: dict[str, str] = field(default_factory=dict)
    """One rollout of each class of failure: task and error."""
    workers_lost: int = 0

    def add(self, other: Round) -> None:
        self.healthy += other.healthy
        self.failed_healthy += other.failed_healthy
        self.classes += other.classes
        self.blamed |= other.blamed
        self.workers_lost += other.workers_lost


class Site:
    """Rollout side and workers for one round. `slots` by fault, none for the healthy."""

    def __init__(
        self, config: Config, slots: Counter[str], folder: Path, *, seed: int, shortest: float
    ) -> None:
        self._config = config
        self._slots = slots
        self._folder = folder
        self._seed = seed
        self._shortest = shortest
        self._numbers = itertools.count()
        self._counting = False
        self.found = Round()
        self._token = secrets.token_urlsafe()
        self._workers: dict[str, LocalChild] = {}

    async def run(self, *, warmup: float, seconds: float) -> Round:
        """Waits for the workers to come up, then as long as it is told; ended by that."""
        config = self._config
        engine = ScriptedEngine(
            script=Script(mean_length=4), tokenizer=scripted_tokenizer(), step_seconds=0.02
        )
        serving = Serving(
            config,
            scripted_tokenizer(),
            [engine],
            record=record_nothing,
            version=0,
            anonymous=False,
        )
        pool = WorkerPool(serving.gateway, stall_seconds=config.run.stall_seconds, say=print)
        with listen("127.0.0.1", 0) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            serving.gateway.address = url
            routes = WorkerRoutes(pool, token=self._token, control_token=self._token).routes()
            app = build_app(serving.gateway, serving.control, extra_routes=routes)
            runner = Agents(config, serving, pool, record_nothing).runner(
                serving.gateway, TokenFates(), tracked=True
            )
            names = [f"worker{i}" for i in range(config.environment.workers or 1)]
            up = {name: asyncio.Event() for name in names}
            try:
                async with asyncio.TaskGroup() as tasks:
                    started = [
                        tasks.create_task(serve_app(app, listener, ready=lambda: None)),
                        tasks.create_task(watch_workers(pool, self._condemn)),
                    ]
                    for name in names:
                        started.append(tasks.create_task(self._worker(name, url, up[name])))
                    for event in up.values():
                        await event.wait()
                    for fault, number in self._slots.items():
                        for at in range(number):
                            started.append(tasks.create_task(self._slot(runner, fault, at)))
                    await asyncio.sleep(warmup)
                    self._counting = True
                    await asyncio.sleep(seconds)
                    self._counting = False
                    for task in started:
                        task.cancel()
            finally:
                for worker in self._workers.values():
                    worker.signal(signal.SIGKILL)
                    await worker.ended()
        return self.found

    async def _worker(self, name: str, url: str, up: asyncio.Event) -> None:
        """Starts it again whenever it ends, as a run does."""
        while True:
            section = self._config.environment
            order = ChildOrder(
                parts.ProcessKind.WORKER,
                name,
                str(self._folder / f"{name}.log"),
                child_environment(),
                arguments=[str(section.entry)],
            )
            worker = LocalChild(order)
            self._workers[name] = worker
            await worker.start()
            await worker.tell(parts.WorkerSpec(name, url, self._token, section.model_dump_json()))
            async for message in worker.messages():
                if isinstance(message, parts.Ready):
                    up.set()
            await worker.ended()
            self.found.workers_lost += 1

    def _condemn(self, hung: HungWorker) -> None:
        self._workers[hung.name].condemn(hung.why)

    async def _slot(self, runner: RolloutRunner, fault: str, number: int) -> None:
        """One rollout after the other, for ever; ended by the round."""
        draw = random.Random(f"{self._seed}|{fault}|{number}")
        while True:
            at = next(self._numbers)
            task = Task(
                f"{fault}-{at}",
                "mixed",
                {"question": f"{at}?", "seconds": seconds_of(draw, self._shortest), "fault": fault},
            )
            made = await runner.run(RolloutKey(GroupKey(0, at), 0), task)
            if not self._counting:
                continue
            if fault != "none":
                self.found.classes[fault, failure_class(made.error)] += 1
                self.found.blamed[failure_class(made.error)] = (
                    f"task {made.task_id} of {made.source}: {made.error}"
                )
            elif made.error is None:
                self.found.healthy += 1
            else:
                self.found.failed_healthy.append(made.error)


def configured(options: argparse.Namespace) -> Config:
    return Config(
        environment=EnvironmentSection(
            entry="sides.faulty_agents:rollout",
            workers=options.workers,
            rollout_seconds=7 * options.shortest,
            max_tokens=8,
            max_processes=16,
            worker_mb=options.worker_mb,
        ),
        gateway=GatewaySection(request_seconds=60),
    )


def slots_of(rollouts: int, *, faulty: bool) -> Counter[str]:
    """Gives at least one slot to each fault."""
    others = {fault: max(1, round(rollouts * share)) for fault, share in SHARES.items()}
    slots = Counter({"none": rollouts - sum(others.values())})
    if faulty:
        slots.update(others)
    return slots


def played(options: argparse.Namespace, *, faulty: bool, seed: int) -> Round:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(
            configured(options),
            slots_of(options.at_once, faulty=faulty),
            Path(folder),
            seed=seed,
            shortest=options.shortest,
        )
        return asyncio.run(site.run(warmup=options.warmup, seconds=options.seconds))


def faulty(options: argparse.Namespace, report: Report) -> None:
    rates: dict[bool, list[float]] = {True: [], False: []}
    everything = Round()
    for has_faults, _ in turns((True, False), rounds=options.rounds):
        found = played(options, faulty=has_faults, seed=len(rates[has_faults]))
        rates[has_faults].append(found.healthy / options.seconds)
        everything.add(found)
        kind = "with" if has_faults else "without"
        report.say(f"{kind} faults: {rates[has_faults][-1]:.2f} healthy rollouts a second")
    print_result(rates, everything, report)


def print_result(rates: dict[bool, list[float]], found: Round, report: Report) -> None:
    ratios: list[float] = []
    for with_them, without in zip(rates[True], rates[False], strict=True):
        ratios.append(with_them / without if without else 0.0)
    ratio = statistics.median(ratios)
    report.figure("rollouts beside faulty ones / without them", ratio)
    report.say(
        f"healthy rollouts go on at {ratio:.3f} of their speed without the others "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )
    for (fault, name), count in sorted(found.classes.items()):
        unexpected = "" if name.endswith(EXPECTED[fault]) else "  (unexpected)"
        report.say(f"  {fault}: {count} {name}{unexpected}, such as {found.blamed[name][:160]}")
    report.say(
        f"  healthy ones that failed: {len(found.failed_healthy)} "
        f"{found.failed_healthy[:1] or ''}; workers lost: {found.workers_lost}"
    )


PARTS = {"process": process, "environment": environment, "faulty": faulty}


def main() -> None:
    arguments = Arguments(__doc__, rounds=5)
    arguments.option("--parts", ["process"], smoke=[*PARTS], choices=[*PARTS])
    arguments.option(
        "--rollouts", 4000, smoke=128, help="in each round; a fourth of it in part `environment`"
    )
    arguments.option("--in-flight", 128)
    arguments.option("--answer", 8, help="tokens of each answer of part `process`")
    arguments.option("--at-once", 512, smoke=12, help="rollouts of part `faulty`")
    arguments.option("--workers", 4, smoke=1, help="of part `faulty`")
    arguments.option("--worker-mb", 1024, help="of part `faulty`")
    arguments.option(
        "--warmup", 20.0, smoke=0.5, help="seconds of a round of part `faulty` before it counts"
    )
    arguments.option("--seconds", 50.0, smoke=4.0, help="of a round of part `faulty`")
    arguments.option(
        "--shortest",
        8.0,
        smoke=0.2,
        help="seconds of an environment of part `faulty`; the longest take five times as long",
    )
    options = arguments.parse()
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()
