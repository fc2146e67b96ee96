"""Rollouts beside others that hang, raise, fork or leak: how fast the healthy ones go on, and what
is said of the others.

    python benchmarks/isolation.py

512 rollouts at once in real workers, over a scripted engine. Environments take a long-tailed time.
1 % of the rollouts hang, 1 % raise, 1 % start processes or take memory without end; whenever one
ends, another of its kind begins. Beside it the same healthy rollouts without them, in alternating
rounds. The speed is that at which healthy rollouts end. Failures are counted by class, and each
names its task.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import secrets
import signal
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from harness.arguments import Arguments
from harness.processes import environment
from harness.report import Report
from harness.rounds import turns

from midflight.config.environment import EnvironmentSection
from midflight.config.gateway import GatewaySection
from midflight.config.sections import Config
from midflight.environments.rollout import RolloutRunner
from midflight.environments.worker_pool import HungWorker, WorkerPool
from midflight.gateway.http.http import build_app
from midflight.observe.failures import failure_class
from midflight.run import parts
from midflight.run.api.worker_routes import WorkerRoutes, watch_workers
from midflight.run.places.port import ChildOrder
from midflight.run.places.process import LocalChild
from midflight.run.rollout.rollouts import TokenFates
from midflight.run.rollout.serving import Agents, Serving
from midflight.testing.script import Script, scripted_tokenizer
from midflight.testing.scripted import ScriptedEngine
from midflight.types import GroupKey, RolloutKey, Task
from midflight.types.facts import record_nothing
from midflight.wire.server import listen, serve_app

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
                environment(),
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
            slots_of(options.rollouts, faulty=faulty),
            Path(folder),
            seed=seed,
            shortest=options.shortest,
        )
        return asyncio.run(site.run(warmup=options.warmup, seconds=options.seconds))


def main() -> None:
    arguments = Arguments(__doc__, rounds=3)
    arguments.option("--rollouts", 512, smoke=12)
    arguments.option("--workers", 4, smoke=1)
    arguments.option("--worker-mb", 1024)
    arguments.option("--warmup", 20.0, smoke=0.5, help="seconds of a round before it counts")
    arguments.option("--seconds", 50.0, smoke=4.0, help="of a round")
    arguments.option(
        "--shortest",
        8.0,
        smoke=0.2,
        help="seconds of an environment; the longest take five times as long",
    )
    options = arguments.parse()
    report = Report(options)
    rates: dict[bool, list[float]] = {True: [], False: []}
    everything = Round()
    for faulty, _ in turns((True, False), rounds=options.rounds):
        found = played(options, faulty=faulty, seed=len(rates[faulty]))
        rates[faulty].append(found.healthy / options.seconds)
        everything.add(found)
        kind = "with" if faulty else "without"
        report.say(f"{kind} faults: {rates[faulty][-1]:.2f} healthy rollouts a second")
    print_result(rates, everything, report)
    report.close()


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


if __name__ == "__main__":
    main()
