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
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from handover_sides import (
    PYTHONS,
    Cost,
    RemoteTrainer,
    Side,
    Size,
    cpu_seconds,
    engine_side,
    streaming,
)
from smoke import options_of

from midflight.ports import Engine
from midflight.types import PauseMode, Version
from midflight.types.facts import Fact, WeightsCommitted
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
    """Between tokens of a stream, before the weights are final and after they are served;
    median.
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
    """Until the trainer may change its weights again."""
    wait_cpu: float
    stage_seconds: float
    """In the background; 0 for a reload."""
    change_seconds: float
    """Commit, or pause, reload and resume."""
    total_seconds: float
    """From the moment the weights are final until they are served."""
    total_cpu: float
    """Of all processes in that time, decoding included."""

    @property
    def pause(self) -> float:
        return self.gap - self.normal_gap


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument(
        "--pause-mode",
        choices=("auto", "keep"),
        default="auto",
        help="for commits and reloads; auto is each server's own",
    )
    parser.add_argument("--in-flight", type=int, default=16, help="streams")
    parser.add_argument("--hidden-size", type=int, default=256, help="multiple of 128")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--model", type=Path, help="folder of a model, instead of a made one")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the longest stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to save to; default: the temporary folder"
    )
    parser.add_argument("--json", type=Path, help="where to write every sample")
    options = options_of(
        parser,
        engines=["embedded"],
        transports=["shared_memory"],
        in_flight=2,
        hidden_size=128,
        layers=1,
        context=256,
        rounds=1,
    )
    samples: list[Sample] = []
    for kind in options.engines:
        if kind in PYTHONS and not PYTHONS[kind].exists():
            print(
                (
                    f"{kind} is left out: no {PYTHONS[kind]}; run `make engines` or set "
                    f"MIDFLIGHT_{kind.upper()}_PYTHON"
                ),
                file=sys.stderr,
            )
            continue
        with tempfile.TemporaryDirectory(prefix="midflight-", dir=options.folder) as folder:
            samples += asyncio.run(measured(kind, options, Path(folder)))
    report(samples)
    if options.json:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples], indent=1))


async def measured(kind: str, options: argparse.Namespace, folder: Path) -> list[Sample]:
    size = Size(options.hidden_size, options.layers, options.context, options.model)
    trainer = RemoteTrainer(size, folder)
    samples: list[Sample] = []
    async with AsyncExitStack() as stack:
        stack.push_async_callback(trainer.close)
        side = await stack.enter_async_context(
            engine_side(
                kind,
                size,
                folder,
                max_running=options.in_flight,
                straight="direct" in options.transports,
            )
        )
        round_of = Rounds(
            side,
            trainer,
            in_flight=options.in_flight,
            max_tokens=options.context,
            pause_mode=options.pause_mode,
        )
        for number in range(options.rounds + 1):
            for way in (*options.transports, *([RELOAD] if side.server else [])):
                sample = await round_of.sample(way)
                samples += [sample] if number else []
            print(f"{kind}: round {number} of {options.rounds} done", file=sys.stderr)
    return samples


class Rounds:
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
        self._facts: list[Fact] = []
        self._handover = Handover(
            Alone(side.engine),
            pause_mode=PauseMode.KEEP if self._keeps else "auto",
            stage_seconds=DEADLINE_SECONDS,
            commit_seconds=DEADLINE_SECONDS,
            record=self._facts.append,
        )

    async def sample(self, way: str) -> Sample:
        """Waits for the streams to flow, for the handover, and for the streams again."""
        self._version += 1
        async with streaming(
            self._side.engine, self._in_flight, max_tokens=self._max_tokens
        ) as streams:
            await streams.each_has(SETTLED)
            copy = await self._trainer.copy()
            cpu = cpu_seconds()
            final = time.perf_counter()
            done = await (self._reload() if way == RELOAD else self._hand_over(way))
            served = time.perf_counter()
            cpu = cpu_seconds() - cpu
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
            copy_seconds=copy.seconds,
            copy_cpu=copy.cpu,
            wait_seconds=done.wait.seconds,
            wait_cpu=done.wait.cpu,
            stage_seconds=done.stage_seconds,
            change_seconds=done.change_seconds,
            total_seconds=served - final,
            total_cpu=cpu,
        )

    async def _hand_over(self, way: str) -> Done:
        manifest, wait = await self._trainer.publish(way, self._version)
        report = await self._handover.publish(manifest)
        if report.quarantined:
            raise SystemExit(f"version {self._version} by {way}: {report.quarantined}")
        self._releasable = report.releasable
        committed = [fact for fact in self._facts if isinstance(fact, WeightsCommitted)][-1]
        return Done(
            wait,
            report.stage_seconds,
            committed.pause_seconds,
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
    """From the beginning of the pause, or of the swap, until the new version is served."""
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


def report(samples: Sequence[Sample]) -> None:
    """Two markdown tables: what requests see, and what the trainer and the way take."""
    rows = [
        [s for s in samples if (s.engine, s.way) == key]
        for key in dict.fromkeys((s.engine, s.way) for s in samples)
    ]
    print(
        "| engine | way | normal gap | largest gap before | at the change | pause (of rounds) | "
        "reload's / this |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(seen_by_requests(row, _reloads(samples, row)))
    print(
        "\n| engine | way | MB | trainer waits (CPU) | plain copies | stage | of copy bandwidth | "
        "change | total (CPU) | reload's / this: wait | total |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(on_the_way(row, _reloads(samples, row)))


def seen_by_requests(row: Sequence[Sample], reloads: Sequence[Sample]) -> str:
    pauses = sorted(s.pause for s in row)
    return _line(
        row[0].engine,
        row[0].way,
        *(_ms(median(row, what)) for what in ("normal_gap", "gap_before", "gap")),
        f"{_ms(median(row, 'pause'))} ({1e3 * pauses[0]:.1f}-{1e3 * pauses[-1]:.1f})",
        _times(row, reloads, "pause"),
    )


def on_the_way(row: Sequence[Sample], reloads: Sequence[Sample]) -> str:
    staged = row[0].way != "reload"
    return _line(
        row[0].engine,
        row[0].way,
        f"{row[0].num_bytes / 1e6:.1f}",
        f"{_ms(median(row, 'wait_seconds'))} ({_ms(median(row, 'wait_cpu'))})",
        f"{statistics.median(s.wait_seconds / s.copy_seconds for s in row):.1f}",
        _ms(median(row, "stage_seconds")) if staged else "",
        f"{statistics.median(s.copy_seconds / s.stage_seconds for s in row):.0%}" if staged else "",
        _ms(median(row, "change_seconds")),
        f"{_ms(median(row, 'total_seconds'))} ({_ms(median(row, 'total_cpu'))})",
        _times(row, reloads, "wait_seconds"),
        _times(row, reloads, "total_seconds"),
    )


def median(row: Sequence[Sample], what: str) -> float:
    return statistics.median(getattr(s, what) for s in row)


def _reloads(samples: Sequence[Sample], row: Sequence[Sample]) -> list[Sample]:
    """Of the same engine; none for the row of reloads itself."""
    return [s for s in samples if s.engine == row[0].engine and s.way == "reload" != row[0].way]


def _times(row: Sequence[Sample], reloads: Sequence[Sample], what: str) -> str:
    return (
        f"{median(reloads, what) / median(row, what):.1f}"
        if reloads and median(row, what) > 0
        else ""
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
