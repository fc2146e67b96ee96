"""What new weights cost while requests are under way: the pause they see, the trainer's wait, and
the way; by every transport and engine.

Each handover is the real one: a trainer in a process of its own publishes, `weights.Handover`
stages and commits over the wire, and streams go on meanwhile. Beside it, in the same run, the
server's own reload: the trainer saves a model folder to disk, the server is paused, reads it, and
goes on. Ways alternate from round to round; the first round is not counted.

    python benchmarks/handover.py [--engines embedded vllm sglang] [--hidden-size 256] [--layers 4]
    [--model FOLDER] [--rounds 5] [--json FILE]

vLLM and SGLang run from `MIDFLIGHT_VLLM_PYTHON` and `MIDFLIGHT_SGLANG_PYTHON`, or from where `make
engines` puts them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.arguments import Arguments
from harness.processes import family_cpu_seconds
from harness.report import Report, milliseconds
from harness.rounds import Cost, turns
from sides.handover_ends import PYTHONS, RemoteTrainer, Side, Size, engine_side, streaming

from midflight.ports import Engine
from midflight.types import PauseMode, Version
from midflight.types.facts import record_nothing
from midflight.weights.handover import Handover

ENGINES = ("embedded", "vllm", "sglang")
TRANSPORTS = ("shared_memory", "pull", "direct")
RELOAD = "reload"
SETTLED = 8
"""Tokens of every stream before the weights are final, and after they are served."""
DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class Sample:
    """One handover. Seconds."""

    engine: str
    way: str
    """A transport, or `reload`."""
    num_bytes: int
    normal_gap: float
    """The median gap between tokens of a stream, before the weights are final and after they are
    served.
    """
    gap_before: float
    """The largest while weights are published and staged, or saved; median over streams, as the
    next.
    """
    gap: float
    """The largest around the change of weights."""
    copy_seconds: float
    """A plain copy of the same tensors, in the trainer, just before."""
    copy_cpu: float
    wait_seconds: float
    """The time until the trainer may change its weights again."""
    wait_cpu: float
    stage_seconds: float
    """The time of staging in the background; 0 for a reload."""
    change_seconds: float
    """Commit, or pause, reload and resume."""
    total_seconds: float
    """The time from the moment the weights are final until they are served."""
    total_cpu: float
    """The CPU time of all processes meanwhile, decoding included."""

    @property
    def pause(self) -> float:
        return self.gap - self.normal_gap


def main() -> None:
    arguments = Arguments(__doc__, rounds=5)
    arguments.option("--engines", [*ENGINES], smoke=["embedded"], choices=ENGINES)
    arguments.option(
        "--transports",
        [*TRANSPORTS],
        smoke=["shared_memory", "pull"],
        choices=TRANSPORTS,
        help="`direct` goes to vLLM and SGLang alone",
    )
    arguments.option(
        "--pause-mode",
        "auto",
        choices=("auto", "keep"),
        help="for commits and reloads; auto is each server's own",
    )
    arguments.option("--in-flight", 16, smoke=2, help="streams")
    arguments.option("--hidden-size", 256, smoke=128, help="multiple of 128")
    arguments.option("--layers", 4, smoke=1)
    arguments.option("--model", None, type=Path, help="folder of a model, instead of a made one")
    arguments.option("--context", 1024, smoke=256, help="tokens of the longest stream")
    arguments.option(
        "--folder", None, type=Path, help="on the disk to save to; default: the temporary folder"
    )
    options = arguments.parse()
    report = Report(options)
    samples: list[Sample] = []
    for kind in options.engines:
        if kind in PYTHONS and not PYTHONS[kind].exists():
            where = f"run `make engines` or set MIDFLIGHT_{kind.upper()}_PYTHON"
            print(f"{kind} is left out: no {PYTHONS[kind]}; {where}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="midflight-", dir=options.folder) as folder:
            samples += asyncio.run(measured(kind, options, Path(folder)))
    print_requests(samples, report)
    print_way(samples, report)
    report.keep("samples", [asdict(sample) for sample in samples])
    report.close()


def ways_of(side: Side, transports: Sequence[str]) -> list[str]:
    """The transports that go to this engine, and the server's own reload."""
    if side.server is None:
        return [transport for transport in transports if transport != "direct"]
    return [*transports, RELOAD]


async def measured(kind: str, options: argparse.Namespace, folder: Path) -> list[Sample]:
    size = Size(options.hidden_size, options.layers, options.context, options.model)
    trainer = RemoteTrainer(size, folder)
    samples: list[Sample] = []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(trainer.close)
        made = engine_side(
            kind,
            size,
            folder,
            max_running=max(1, options.in_flight),
            straight="direct" in options.transports,
        )
        side = await stack.enter_async_context(made)
        handovers = Handovers(
            side,
            trainer,
            in_flight=options.in_flight,
            max_tokens=options.context,
            pause_mode=options.pause_mode,
        )
        ways = ways_of(side, options.transports)
        for way, counts in turns(ways, rounds=options.rounds, warmup=1):
            sample = await handovers.sample(way)
            if counts:
                samples.append(sample)
    return samples


class Handovers:
    """The handovers of one engine, one after the other, each with streams of its own."""

    def __init__(
        self,
        side: Side,
        trainer: RemoteTrainer,
        *,
        in_flight: int,
        max_tokens: int,
        pause_mode: str,
    ) -> None:
        self._side = side
        self._trainer = trainer
        self._in_flight = in_flight
        self._max_tokens = max_tokens
        self._keeps = pause_mode == "keep"
        self._version: Version = 0
        self._releasable: tuple[Version, ...] = ()
        self._handover = Handover(
            Alone(side.engine),
            pause_mode=PauseMode.KEEP if self._keeps else "auto",
            stage_seconds=DEADLINE_SECONDS,
            commit_seconds=DEADLINE_SECONDS,
            record=record_nothing,
        )

    async def sample(self, way: str) -> Sample:
        """Waits for the streams to flow, for the handover, and for the streams again."""
        self._version += 1
        async with streaming(
            self._side.engine, self._in_flight, max_tokens=self._max_tokens
        ) as streams:
            await streams.each_has(SETTLED)
            copy = await self._trainer.copy()
            cpu = family_cpu_seconds()
            final = time.perf_counter()
            done = await (self._reload() if way == RELOAD else self._hand_over(way))
            served = time.perf_counter()
            cpu = family_cpu_seconds() - cpu
            await streams.each_has(SETTLED)
        await self._trainer.release(self._releasable)
        change = served - done.change_seconds
        return Sample(
            engine=self._side.kind,
            way=way,
            num_bytes=done.num_bytes,
            normal_gap=streams.normal_gap((final, served)),
            gap_before=streams.largest_gap((final, change)),
            gap=streams.largest_gap((change, served)),
            copy_seconds=copy.wall,
            copy_cpu=copy.cpu,
            wait_seconds=done.wait.wall,
            wait_cpu=done.wait.cpu,
            stage_seconds=done.stage_seconds,
            change_seconds=done.change_seconds,
            total_seconds=served - final,
            total_cpu=cpu,
        )

    async def _hand_over(self, way: str) -> Done:
        manifest, wait = await self._trainer.publish(way, self._version)
        began = time.perf_counter()
        report = await self._handover.publish(manifest)
        taken = time.perf_counter() - began
        if report.quarantined:
            raise SystemExit(f"version {self._version} by {way}: {report.quarantined}")
        self._releasable = report.releasable
        return Done(
            wait,
            report.stage_seconds,
            taken - report.stage_seconds,
            sum(spec.num_bytes for spec in manifest.tensors),
        )

    async def _reload(self) -> Done:
        folder, wait = await self._trainer.save(self._version)
        began = time.perf_counter()
        await self._side.reload(folder, keeps=self._keeps)
        return Done(
            wait,
            0.0,
            time.perf_counter() - began,
            (Path(folder) / "model.safetensors").stat().st_size,
        )


@dataclass(frozen=True)
class Done:
    wait: Cost
    """The trainer's: until it may change its weights again."""
    stage_seconds: float
    change_seconds: float
    """The time from the beginning of the pause, or of the swap, until the new version is served."""
    num_bytes: int


class Alone:
    """A fleet of one engine, which stays in it whatever happens."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._version = 0

    def engines(self) -> tuple[Engine, ...]:
        return (self._engine,)

    def hold(self, engine: str, owner: str) -> None: ...
    def release(self, engine: str, owner: str) -> None: ...
    def quarantine(self, engine: str, error: BaseException) -> None: ...

    def reserved(self) -> str | None:
        return None

    def served(self, engine: str, version: Version) -> None:
        self._version = version

    def served_version(self) -> Version:
        return self._version


# --- The tables -----------------------------------------------------------------------------------


def by_way(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each engine and way."""
    found: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.engine, sample.way), []).append(sample)
    return list(found.values())


def print_requests(samples: Sequence[Sample], report: Report) -> None:
    """What requests see."""
    table = report.table(
        "engine",
        "way",
        "normal gap",
        "largest gap before",
        "at the change",
        "pause (of rounds)",
        "reload's / this",
    )
    for row in by_way(samples):
        pauses = [1e3 * sample.pause for sample in row]
        table.row(
            row[0].engine,
            row[0].way,
            milliseconds(median(row, "normal_gap")),
            milliseconds(median(row, "gap_before")),
            milliseconds(median(row, "gap")),
            f"{statistics.median(pauses):.1f} ms ({min(pauses):.1f}-{max(pauses):.1f})",
            times_of_reload(samples, row, "pause"),
        )


def print_way(samples: Sequence[Sample], report: Report) -> None:
    """What the trainer waits, and what the way takes."""
    table = report.table(
        "engine",
        "way",
        "MB",
        "trainer waits (CPU)",
        "plain copies",
        "stage",
        "of copy bandwidth",
        "change",
        "total (CPU)",
        "reload's / this: wait",
        "total",
    )
    for row in by_way(samples):
        stage = ""
        bandwidth = ""
        if row[0].way != RELOAD:
            share = statistics.median(each.copy_seconds / each.stage_seconds for each in row)
            stage = milliseconds(median(row, "stage_seconds"))
            bandwidth = f"{share:.0%}"
            name = f"handover, {row[0].engine}, {row[0].way}: stage, of copy bandwidth, in percent"
            report.figure(name, 100 * share)
        waits = milliseconds(median(row, "wait_seconds"))
        copies = statistics.median(each.wait_seconds / each.copy_seconds for each in row)
        total = milliseconds(median(row, "total_seconds"))
        table.row(
            row[0].engine,
            row[0].way,
            f"{row[0].num_bytes / 1e6:.1f}",
            f"{waits} ({milliseconds(median(row, 'wait_cpu'))})",
            f"{copies:.1f}",
            stage,
            bandwidth,
            milliseconds(median(row, "change_seconds")),
            f"{total} ({milliseconds(median(row, 'total_cpu'))})",
            times_of_reload(samples, row, "wait_seconds"),
            times_of_reload(samples, row, "total_seconds"),
        )


def median(row: Sequence[Sample], what: str) -> float:
    return statistics.median(getattr(sample, what) for sample in row)


def times_of_reload(samples: Sequence[Sample], row: Sequence[Sample], what: str) -> str:
    """Returns the same engine's reload in times of this way; empty where there is none."""
    if row[0].way == RELOAD or median(row, what) <= 0:
        return ""
    reloads = [each for each in samples if (each.engine, each.way) == (row[0].engine, RELOAD)]
    return f"{median(reloads, what) / median(row, what):.1f}" if reloads else ""


if __name__ == "__main__":
    main()
