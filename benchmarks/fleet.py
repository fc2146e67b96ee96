"""What a request and a handover cost where there are many engines: the gateway's fleet and the real
handover, over scripted engines on virtual time.

    python benchmarks/fleet.py [--engines 1 8 64 256 1000] [--requests 20000]

| column | means |
|---|---|
| us a request | CPU microseconds to place a request and to end it, beside 64 others on each engine, half of them of sessions that stay where they were |
| of one engine | times of the first row |
| handover, CPU ms an engine | CPU of bringing a version to all, with 64 requests under way on each, by engine |
| handover, virtual s | of commits of 80 ms each, `--max-paused` at once |
| versions | served at the same time, at most |
| idle | share of the engines' slots, 64 each, that hold no request that goes on: 64 agents for each engine ask again and again (answers of 8 s at the median, log-normal, sigma 0.75), and a version comes every 10 s or after the one before |
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import statistics
import time

from harness.arguments import Arguments
from harness.report import Report

from midflight.allowance import Allowance
from midflight.gateway.fleet.fleet import Fleet
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import PauseMode, WeightManifest
from midflight.types.facts import record_nothing
from midflight.weights.handover import Handover

TOKENS = 1000
PIECES = 5
"""The requests are measured in so many pieces; the median counts."""
LOOK_SECONDS = 0.053
VERSIONS = (1, 2, 3)


def fleet_of(engines: int) -> Fleet:
    fleet = Fleet()
    for number in range(engines):
        fleet.attach(ScriptedEngine(f"e{number}", commit_seconds=0.08))
    return fleet


async def busy_fleet(engines: int, *, beside: int) -> Fleet:
    """Makes a fleet with so many requests under way on each engine."""
    fleet = fleet_of(engines)
    for _ in range(beside * engines):
        await fleet.place(fleet.ticket(), tokens=TOKENS, affinity="", allowance=Allowance(600))
    return fleet


def handover_of(fleet: Fleet, *, max_paused: int) -> Handover:
    return Handover(
        fleet,
        pause_mode=PauseMode.RECOMPUTE,
        stage_seconds=600,
        commit_seconds=600,
        record=record_nothing,
        max_paused=max_paused,
    )


def manifest_of(version: int) -> WeightManifest:
    """Names weights that nobody fetches: scripted engines have none."""
    return WeightManifest(version, f"print-{version}", "shared_memory", "nowhere", ())


async def microseconds(engines: int, *, requests: int, beside: int) -> float:
    """CPU to place one request and to end it."""
    fleet = await busy_fleet(engines, beside=beside)
    each = requests // PIECES
    found: list[float] = []
    for _ in range(PIECES):
        began = time.process_time()
        for number in range(each):
            affinity = f"s{number % 2000}" if number % 2 else ""
            placed = await fleet.place(
                fleet.ticket(),
                tokens=TOKENS + number % 700,
                affinity=affinity,
                allowance=Allowance(600),
            )
            fleet.leave(placed)
        found.append((time.process_time() - began) / each * 1e6)
    return statistics.median(found)


async def handed_over(engines: int, *, beside: int, max_paused: int) -> tuple[float, float]:
    """CPU seconds and virtual seconds of a version, the mean of three in a row."""
    fleet = await busy_fleet(engines, beside=beside)
    handover = handover_of(fleet, max_paused=max_paused)
    loop = asyncio.get_running_loop()
    began = loop.time()
    cpu = time.process_time()
    for version in VERSIONS:
        await handover.publish(manifest_of(version))
    spent = time.process_time() - cpu
    return spent / len(VERSIONS), (loop.time() - began) / len(VERSIONS)


async def versions_served(engines: int, *, max_paused: int) -> int:
    """How many versions are served at the same time at most, while three come in a row."""
    fleet = await busy_fleet(engines, beside=1)
    handover = handover_of(fleet, max_paused=max_paused)
    seen = [0]

    async def watch() -> None:
        while True:
            seen.append(len({state.version for state in fleet.states()}))
            await asyncio.sleep(0.03)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        for version in VERSIONS:
            await handover.publish(manifest_of(version))
        watching.cancel()
    return max(seen)


async def idle_share(engines: int, *, beside: int, max_paused: int, seconds: float) -> float:
    """The mean over virtual time of the share of slots without a request that goes on."""
    fleet = fleet_of(engines)
    handover = handover_of(fleet, max_paused=max_paused)
    lengths = random.Random(engines)

    async def ask() -> None:
        while True:
            length = lengths.lognormvariate(math.log(8), 0.75)
            placed = await fleet.place(
                fleet.ticket(), tokens=int(50 * length), affinity="", allowance=Allowance(600)
            )
            await asyncio.sleep(length)
            fleet.leave(placed)

    async def bring() -> None:
        for version in itertools.count(1):
            await asyncio.gather(asyncio.sleep(10), handover.publish(manifest_of(version)))

    busy: list[float] = []
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask()) for _ in range(beside * engines)]
        tasks.append(group.create_task(bring()))
        await asyncio.sleep(seconds)  # until those who began together no longer end together
        for _ in range(int(seconds / LOOK_SECONDS)):
            await asyncio.sleep(LOOK_SECONDS)
            going_on = 0
            for state in fleet.states():
                if not state.paused_by:
                    going_on += min(state.num_requests, beside)
            busy.append(going_on / (beside * engines))
        for task in tasks:
            task.cancel()
    return 1 - statistics.mean(busy)


def print_table(options: argparse.Namespace, report: Report) -> None:
    table = report.table(
        "engines",
        "us a request",
        f"of {options.engines[0]} engine",
        "handover, CPU ms an engine",
        "handover, virtual s",
        "versions",
        "idle",
    )
    first = 0.0
    beside: int = options.beside
    max_paused: int = options.max_paused
    for engines in options.engines:
        each = run_virtual(microseconds(engines, requests=options.requests, beside=beside))
        first = first or each
        cpu, seconds = run_virtual(handed_over(engines, beside=beside, max_paused=max_paused))
        served = run_virtual(versions_served(engines, max_paused=max_paused))
        idle = run_virtual(
            idle_share(engines, beside=beside, max_paused=max_paused, seconds=options.seconds)
        )
        table.row(
            engines,
            f"{each:.1f}",
            f"{each / first:.2f}",
            f"{cpu / engines * 1e3:.2f}",
            f"{seconds:.2f}",
            served,
            f"{idle:.1%}",
        )


def main() -> None:
    arguments = Arguments(__doc__)
    arguments.option("--engines", [1, 8, 64, 256, 1000], smoke=[1, 8])
    arguments.option("--requests", 20_000, smoke=500)
    arguments.option("--beside", 64, smoke=4, help="requests under way on each engine")
    arguments.option("--max-paused", 16)
    arguments.option(
        "--seconds", 40.0, smoke=12.0, help="virtual, for which idleness is watched, after as many"
    )
    options = arguments.parse()
    report = Report(options)
    print_table(options, report)
    report.close()


if __name__ == "__main__":
    main()
