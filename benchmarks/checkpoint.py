"""What a checkpoint costs a run, and what it is good for when a part is lost.

    python benchmarks/checkpoint.py --parts save [--rounds 5] [--models demo large] [--folder DIR]
    python benchmarks/checkpoint.py --parts store [--stores 1000x16000 100000x200] [--folder DIR]
    python benchmarks/checkpoint.py --parts lost [--rounds 3]

**save**: how long a checkpoint holds the trainer: the copy that the loop waits for, beside the
whole save that it would wait for otherwise. Two models with moments, one rank, float32: the demo's
and one of a hundred million parameters. The disk under `--folder` decides much of the second.
`stall` is the longest time that a thread beside the write did not get the interpreter: a write that
holds its lock would hold the steps as well.

**store**: what a store costs, by its rollouts and the tokens of each. `disk`: bytes a token, of
index and segments. With `run.store_folder` each checkpoint copies what came since the last one:
`first copy` has the whole index, `next copy` one step more. `writer` is the longest that a turn took
to be on disk during the first, one every 2 ms, and `loop` the longest that an event loop beside it
did not turn; in brackets the same without a copy. `restored`: another machine makes the index of
the copies. `resumed`: the store is checked, opened, and gives back all that a run goes on with.
`first page`: the newest groups in the viewer. Nearly all rollouts are trained and in a checkpoint,
one group in ten was dropped, and a step waits at the end.

**lost**: seconds from the kill of a part to the end of the next step. A run of `configs/demo.toml`
loses its trainer, beside which engines and gateway stay, and then its rollout process, after which
all parts start again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from harness.arguments import Arguments
from harness.models import policy_trainer, small_model
from harness.processes import family, parent_of, words_of
from harness.report import Report, make_parts, milliseconds
from harness.rounds import median_of, timed
from harness.runs import DEMO, SMALL, newest_version, train_command, training, wait_for_step
from sides.large_run import GROUP_SIZE, GROUPS_PER_STEP, made_group, write_store

from midflight.archive.groups import GroupFilter, page_of
from midflight.trainer.checkpoint import stage
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.trainer import PolicyTrainer
from midflight.trajectories.database import check_whole
from midflight.trajectories.increments import INCREMENTS, path_of, restore
from midflight.trajectories.pairs import copy_store, drafted
from midflight.trajectories.store import Store
from midflight.trajectories.writer import StoreWriter
from midflight.types import Finish, FinishReason, GroupKey, RolloutKey, Segment, Turn
from midflight.types.facts import Interrupted, TurnKept

# --- A save ---------------------------------------------------------------------------------------

SIZES = {"demo": (128, 384, 4, 262), "large": (768, 2048, 12, 16384)}
"""Width, width of the feed-forward layers, depth, vocabulary."""


@dataclass(frozen=True)
class Saved:
    """One round, in seconds: the whole save, the copy, the write beside the steps, the stall."""

    whole: float
    copy: float
    write: float
    stall: float


def save(options: argparse.Namespace, report: Report) -> None:
    table = report.table(
        "model",
        "MB",
        "held by the whole save",
        "held by the copy",
        "ratio",
        "write beside the steps",
        "stall",
    )
    for name in options.models:
        trainer = trainer_with_moments(*SIZES[name])
        num_bytes = sum(tensor.nbytes for tensor in stage(trainer, cursor="").tensors.values())
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = [saved(trainer, Path(folder)) for _ in range(options.rounds)]
        held = median_of(found, lambda each: each.whole)
        brief = median_of(found, lambda each: each.copy)
        table.row(
            name,
            f"{num_bytes / 1e6:.0f}",
            milliseconds(held),
            milliseconds(brief),
            f"{held / brief:.0f}",
            milliseconds(median_of(found, lambda each: each.write)),
            milliseconds(median_of(found, lambda each: each.stall)),
        )
        report.figure(f"checkpoint, {name}: held by the whole save / by the copy", held / brief)


def saved(trainer: PolicyTrainer, folder: Path) -> Saved:
    trainer.version += 1
    _, whole = timed(lambda: stage(trainer, cursor="").write(folder, keep=1))
    copy, copying = timed(lambda: stage(trainer, cursor=""))
    with Ticks() as ticks:
        _, writing = timed(lambda: copy.write(folder, keep=1))
    return Saved(whole.wall, copying.wall, writing.wall, ticks.longest)


def trainer_with_moments(width: int, inner: int, depth: int, vocabulary: int) -> PolicyTrainer:
    """The gradients behind the moments are random."""
    model = small_model(width, inner=inner, layers=depth, vocab_size=vocabulary)
    trainer = policy_trainer(model)
    for _, parameter in named_parameters(model):
        parameter.grad = torch.randn_like(parameter)
    trainer.optimizer.step()
    return trainer


class Ticks:
    """A thread that wants the interpreter every millisecond, and knows how long it waited at most,
    in seconds.
    """

    def __enter__(self) -> Ticks:
        self.longest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(0.001):
            now = time.perf_counter()
            self.longest = max(self.longest, now - last)
            last = now

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# --- A copy of the store --------------------------------------------------------------------------

BETWEEN_SECONDS = 0.002


def store(options: argparse.Namespace, report: Report) -> None:
    table = report.table(
        "rollouts",
        "disk",
        "first copy",
        "next copy",
        "writer",
        "loop",
        "restored",
        "resumed",
        "first page",
    )
    for text in options.stores:
        rollouts, _, tokens = text.partition("x")
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            write_store(Path(folder), rollouts=int(rollouts), tokens=int(tokens))
            table.row(*asyncio.run(store_cells(Path(folder), int(rollouts), int(tokens))))


async def store_cells(folder: Path, rollouts: int, tokens: int) -> list[str]:
    path = folder / "store.sqlite"
    num_bytes = bytes_in(folder)
    _, resuming = timed(lambda: go_on_with(path))
    page_of(folder, GroupFilter())
    _, looking = timed(lambda: page_of(folder, GroupFilter()))
    writer = StoreWriter(Store(path, run="benchmark"))
    running = asyncio.create_task(writer.run())
    copies: list[Copied] = []

    async def copy() -> None:
        copies.append(await copied(writer, folder, version=len(copies)))

    beside = await longest_waits(writer, copy())
    alone = await longest_waits(writer, asyncio.sleep(copies[0].seconds))
    await copy()  # of the turns of these measurements
    draw = np.random.default_rng(1)
    for number in range(GROUPS_PER_STEP):
        _, facts = made_group(rollouts // GROUP_SIZE + number, tokens, draw)
        for fact in facts:
            writer.put(fact)
    await writer.flush()
    await copy()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    writer.close()
    newest = copies[-1].name
    _, restoring = timed(lambda: restore(newest, folder / INCREMENTS, folder / "restored.sqlite"))
    return [
        f"{rollouts:,} of {tokens:,}",
        f"{num_bytes / (rollouts * tokens):.1f} B",
        copies[0].words,
        copies[-1].words,
        f"{beside[0] * 1e3:.0f} ms ({alone[0] * 1e3:.0f})",
        f"{beside[1] * 1e3:.0f} ms ({alone[1] * 1e3:.0f})",
        f"{restoring.wall:.2f} s",
        f"{resuming.wall:.2f} s",
        f"{looking.wall:.2f} s",
    ]


@dataclass(frozen=True)
class Copied:
    """One copy: the increment's name, its size, and the seconds that the copy took."""

    name: int
    num_bytes: int
    seconds: float

    @property
    def words(self) -> str:
        return f"{self.num_bytes / 1e6:.2f} MB, {self.seconds:.2f} s"


async def copied(writer: StoreWriter, folder: Path, *, version: int) -> Copied:
    """Makes a copy as the rollout process does."""
    began = time.perf_counter()
    await writer.read(lambda store: store.copied(version))
    place = drafted(folder, version)
    made = await asyncio.to_thread(copy_store, folder / "store.sqlite", place)
    await writer.read(lambda store: store.has_increment(made))
    seconds = time.perf_counter() - began
    return Copied(made.name, path_of(made.name, folder / INCREMENTS).stat().st_size, seconds)


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def go_on_with(path: Path) -> None:
    """Reads what a launcher and a rollout process read before a run goes on."""
    check_whole(path)
    kept = Store(path, run="benchmark")
    kept.apply(Interrupted())
    for _ in (*kept.damaged(), *kept.facts(), *kept.unfinished(), *kept.scores(passes=1.0)):
        pass
    kept.close()


async def longest_waits(writer: StoreWriter, meanwhile: Awaitable[object]) -> tuple[float, float]:
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
        number += 1
        writer.put(TurnKept(RolloutKey(GroupKey(9, 0), 0), number, made_turn()))
        await writer.flush()
        written = max(written, time.perf_counter() - began)
    return written, turned


def made_turn() -> Turn:
    segments = (Segment(0, 0, 0, 64),)
    return Turn((1, 2, 3), tuple(range(64)), (0.0,) * 64, segments, Finish(FinishReason.STOP))


# --- A lost part ----------------------------------------------------------------------------------

LOST = {
    "trainer": "the trainer: engines, gateway and agents stay",
    "rollout": "the gateway: all parts start again",
}
SETTINGS = (
    "run.steps=100000",
    "run.restarts=100",
    "trainer.checkpoint_every=2",
    "warm_start.target_accuracy=0.0",
    "evaluation.eval_every=0",
)


def lost(options: argparse.Namespace, report: Report) -> None:
    table = report.table("killed", "seconds to the next step")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        command = train_command(DEMO, [*SETTINGS, *options.set], folder=folder)
        with training(command, said=Path(place) / "said") as run:
            wait_for_step(run, folder, above=3)
            for part, words in LOST.items():
                found: list[float] = []
                for _ in range(options.rounds):
                    began = time.monotonic()
                    before = newest_version(folder)
                    os.kill(pid_of(run.pid, part), signal.SIGKILL)
                    # numbers go on above all that there were
                    wait_for_step(run, folder, above=before + 1)
                    found.append(time.monotonic() - began)
                    wait_for_step(run, folder, above=newest_version(folder) + 3)
                table.row(words, f"{statistics.median(found):.1f}")


def pid_of(launcher: int, part: str) -> int:
    for pid in family(launcher):
        if parent_of(pid) == launcher and part in words_of(pid):
            return pid
    raise SystemExit(f"the run has no process {part}")


PARTS = {"save": save, "store": store, "lost": lost}


def main() -> None:
    arguments = Arguments(__doc__, rounds=3)
    arguments.option("--parts", [*PARTS], choices=[*PARTS])
    arguments.option("--models", [*SIZES], smoke=["demo"], choices=[*SIZES])
    arguments.option(
        "--stores", ["1000x16000", "100000x200"], smoke=["240x200"], metavar="ROLLOUTSxTOKENS"
    )
    arguments.option(
        "--folder", None, type=Path, help="on the disk to write to; default: the temporary folder"
    )
    arguments.option(
        "--set", [], smoke=[*SMALL], metavar="OPTION", help="of the run of part `lost`"
    )
    options = arguments.parse()
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()
