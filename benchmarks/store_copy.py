"""What the copy of the store costs that each checkpoint gets with `run.store_folder`: its time, and
what writer and event loop feel of it.

A store is filled with groups of rollouts; then it is copied while turns go on being recorded, one
every 2 ms, as in a run. `writer` is the longest that a turn took to be on disk meanwhile, `loop`
the longest that an event loop beside it did not turn; in brackets the same without a copy.

    python benchmarks/store_copy.py [--mb 100 1000] [--folder DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import numpy as np
from smoke import options_of

from midflight.trajectories.pairs import copy_store
from midflight.trajectories.store import Store
from midflight.trajectories.writer import StoreWriter
from midflight.types import (
    Finish,
    FinishReason,
    GroupKey,
    RolloutKey,
    Row,
    Segment,
    Task,
    Trajectory,
    Turn,
)
from midflight.types.facts import Admitted, Fact, TrajectoryKept, TurnKept

TOKENS = 2048
"""Of a rollout; about 18 bytes each in the store."""
BETWEEN_SECONDS = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--folder", type=Path, default=None)
    options = options_of(parser, mb=[5])
    print("| store | copied in | writer | loop |\n|---|---|---|---|")
    for size in options.mb:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(asyncio.run(row(size, Path(folder))))


async def row(size: int, folder: Path) -> str:
    store = Store(folder / "store.sqlite", run="benchmark")
    await asyncio.to_thread(fill, store, folder / "store.sqlite", size * 10**6)
    writer = StoreWriter(store)
    running = asyncio.create_task(writer.run())
    seconds = time.perf_counter()
    await asyncio.to_thread(copy_store, store.path, folder / ".store-0.sqlite")
    seconds = time.perf_counter() - seconds
    alone = await felt(writer, asyncio.sleep(seconds))
    beside = await felt(
        writer, asyncio.to_thread(copy_store, store.path, folder / ".store-1.sqlite")
    )
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    writer.close()
    number = (folder / ".store-1.sqlite").stat().st_size / 1e6
    return (
        f"| {number:.0f} MB | {seconds:.2f} s | {beside[0] * 1e3:.0f} ms "
        f"({alone[0] * 1e3:.0f}) "
        f"| {beside[1] * 1e3:.0f} ms ({alone[1] * 1e3:.0f}) |"
    )


async def felt(writer: StoreWriter, meanwhile: Awaitable[object]) -> tuple[float, float]:
    """The longest of a turn's way to the disk, and of a turn of the loop."""
    done = asyncio.ensure_future(meanwhile)
    written = 0.0
    turned = 0.0
    number = 0
    while not done.done():
        began = time.perf_counter()
        await asyncio.sleep(BETWEEN_SECONDS)
        turned = max(turned, time.perf_counter() - began - BETWEEN_SECONDS)
        began = time.perf_counter()
        writer.put(TurnKept(RolloutKey(GroupKey(9, 0), 0), number := number + 1, turn()))
        await writer.flush()
        written = max(written, time.perf_counter() - began)
    return written, turned


def fill(store: Store, path: Path, num_bytes: int) -> None:
    ids = np.arange(TOKENS, dtype=np.int32)
    made = Row(ids, ids >= 0, ids >= 0, ids.astype(np.float32), ids, ids)
    index = 0
    while sum(file.stat().st_size for file in path.parent.glob("store.sqlite*")) < num_bytes:
        deeds: list[Callable[[Store], None]] = []
        for _ in range(8):
            index += 1
            key = GroupKey(0, index)
            facts: list[Fact] = [
                Admitted(key, Task(str(index), "s", {})),
                *(
                    TrajectoryKept(Trajectory(RolloutKey(key, n), "", "s", 1.0, (made,)), {}, {})
                    for n in range(8)
                ),
            ]
            deeds += [partial(applied, fact) for fact in facts]
        store.write(deeds)


def applied(fact: Fact, store: Store) -> None:
    store.apply(fact)


def turn() -> Turn:
    return Turn(
        (1, 2, 3), tuple(range(64)), (0.0,) * 64, (Segment(0, 0, 0, 64),), Finish(FinishReason.STOP)
    )


if __name__ == "__main__":
    main()
