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

from smoke import options_of

from midflight.allowance import Allowance
from midflight.gateway.fleet.fleet import Fleet
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import PauseMode, WeightManifest
from midflight.types.facts import unheard
from midflight.weights.handover import Handover

TOKENS = 1000


async def filled(fleet: Fleet, *, engines: int, beside: int) -> list[ScriptedEngine]:
    """With so many requests under way on each."""
    made = [ScriptedEngine(f"e{number}", commit_seconds=0.08) for number in range(engines)]
    for engine in made:
        fleet.attach(engine)
    for _ in range(beside * engines):
        await fleet.place(fleet.ticket(), tokens=TOKENS, affinity="", allowance=Allowance(600))
    return made


async def microseconds(engines: int, *, requests: int, beside: int) -> float:
    """CPU to place one request and to end it."""
    fleet = Fleet()
    await filled(fleet, engines=engines, beside=beside)
    rounds = list[float]()
    for _ in range(5):
        began = time.process_time()
        for number in range(requests // 5):
            affinity = f"s{number % 2000}" if number % 2 else ""
            fleet.leave(
                await fleet.place(
                    fleet.ticket(),
                    tokens=TOKENS + number % 700,
                    affinity=affinity,
                    allowance=Allowance(600),
                )
            )
        rounds.append((time.process_time() - began) / (requests // 5) * 1e6)
    return statistics.median(rounds)


async def handed_over(
    engines: int, *, beside: int, max_paused: int, watched: bool = False
) -> tuple[float, float, int]:
    """CPU seconds and virtual seconds of a version, the mean of three in a row; where `watched`,
    how many were served at once.
    """
    fleet = Fleet()
    seen = [0]
    await filled(fleet, engines=engines, beside=beside)
    handover = Handover(
        fleet,
        pause_mode=PauseMode.RECOMPUTE,
        stage_seconds=600,
        commit_seconds=600,
        record=unheard,
        max_paused=max_paused,
    )

    async def watch() -> None:
        while True:
            seen.append(len({state.version for state in fleet.states()}))
            await asyncio.sleep(0.03)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch()) if watched else None
        began = asyncio.get_running_loop().time()
        cpu = time.process_time()
        for version in (1, 2, 3):
            await handover.publish(
                WeightManifest(version, f"print-{version}", "file", "nowhere", ())
            )
        took = (
            (time.process_time() - cpu) / 3,
            (asyncio.get_running_loop().time() - began) / 3,
            max(seen),
        )
        if watching is not None:
            watching.cancel()
    return took


async def idle_share(engines: int, *, beside: int, max_paused: int, seconds: float) -> float:
    """Mean over virtual time of the slots without a request that goes on."""
    fleet = Fleet()
    lengths = random.Random(engines)
    made = [ScriptedEngine(f"e{number}", commit_seconds=0.08) for number in range(engines)]
    for engine in made:
        fleet.attach(engine)
    handover = Handover(
        fleet,
        pause_mode=PauseMode.RECOMPUTE,
        stage_seconds=600,
        commit_seconds=600,
        record=unheard,
        max_paused=max_paused,
    )

    async def ask() -> None:
        while True:
            length = lengths.lognormvariate(math.log(8), 0.75)
            lease = await fleet.place(
                fleet.ticket(), tokens=int(50 * length), affinity="", allowance=Allowance(600)
            )
            await asyncio.sleep(length)
            fleet.leave(lease)

    async def bring() -> None:
        for version in itertools.count(1):
            await asyncio.gather(
                asyncio.sleep(10),
                handover.publish(
                    WeightManifest(version, f"print-{version}", "file", "nowhere", ())
                ),
            )

    busy = list[float]()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask()) for _ in range(beside * engines)] + [
            group.create_task(bring())
        ]
        await asyncio.sleep(seconds)  # until those who began together no longer end together
        for _ in range(int(seconds / 0.053)):
            await asyncio.sleep(0.053)
            running = sum(
                min(state.num_requests, beside) for state in fleet.states() if not state.paused_by
            )
            busy.append(running / (beside * engines))
        for task in tasks:
            task.cancel()
    return 1 - statistics.mean(busy)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 8, 64, 256, 1000])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--beside", type=int, default=64, help="requests under way on each engine")
    parser.add_argument("--max-paused", type=int, default=16)
    parser.add_argument(
        "--seconds",
        type=float,
        default=40.0,
        help="virtual, for which idleness is watched, after as many",
    )
    options = options_of(parser, engines=[1, 8], requests=500, beside=4, seconds=12.0)
    print(
        f"| engines | us a request | of {options.engines[0]} engine | handover, CPU ms an engine | "
        "handover, virtual s | versions | idle |\n|---|---|---|---|---|---|---|"
    )
    first = 0.0
    for engines in options.engines:
        each = run_virtual(microseconds(engines, requests=options.requests, beside=options.beside))
        cpu, seconds, _ = run_virtual(
            handed_over(engines, beside=options.beside, max_paused=options.max_paused)
        )
        *_, versions = run_virtual(
            handed_over(engines, beside=1, max_paused=options.max_paused, watched=True)
        )
        idle = run_virtual(
            idle_share(
                engines,
                beside=options.beside,
                max_paused=options.max_paused,
                seconds=options.seconds,
            )
        )
        first = first or each
        print(
            (
                f"| {engines} | {each:.1f} | {each / first:.2f} | {cpu / engines * 1e3:.2f} | "
                f"{seconds:.2f} | {versions} | {idle:.1%} |"
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
