"""A version from the trainer to engines on several machines: the pull transport beside the
broadcast of the direct one.

The trainer and every engine are processes of their own on this machine; those of one `machine`
share a folder of memory, as they would on a real one. All begin at once, over loopback, so the
seconds are those of processors that all of them share, and bytes tell what a network would.

    python benchmarks/pull.py [--megabytes 256] [--sites 1x1 1x4 4x1 4x2] [--rounds 5]

| column | means |
|---|---|
| machines x engines | engines on each machine |
| trainer waits | seconds until it may change its weights again |
| an engine, all | seconds from the announcement until an engine has the version, verified: the median, and the last |
| CPU an engine, of the trainer | seconds |
| MB an engine | that came to it over the network, mean |
| MB of the trainer | that it sent; of a broadcast, what it gave to it once for all |
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from smoke import options_of

from midflight.types import WeightManifest
from midflight.weights.transports.delta_receiver import DeltaReceiver
from midflight.weights.transports.memory_files import SHARED
from midflight.weights.transports.pull import PullReceiver
from midflight.weights.transports.select import receiver

WAYS = ("direct", "pull")


@dataclass(frozen=True)
class Sample:
    wait: float
    engines: tuple[float, ...]
    cpu: float
    trainer_cpu: float
    engine_bytes: float
    trainer_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument(
        "--sites",
        nargs="+",
        default=["1x1", "1x4", "4x1", "4x2"],
        help="machines x engines on each",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = options_of(parser, megabytes=2, sites=["1x2"], rounds=1)
    if options.engine:
        engine(*options.engine)
        return
    print(f"{options.megabytes} MB, medians of {options.rounds}\n")
    print(
        "| way | machines x engines | trainer waits | an engine | all | CPU an engine | of the "
        "trainer | MB an engine | MB of the trainer |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for site in options.sites:
        machines, engines = map(int, site.split("x"))
        with (
            tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as folder,
            ExitStack() as stack,
        ):
            ways = {
                way: stack.enter_context(
                    standing(way, Path(folder), machines=machines, engines=engines)
                )
                for way in WAYS
            }
            found = {way: list[Sample]() for way in WAYS}
            for number in range(options.rounds + 1):
                for way in WAYS:
                    sample = handed_over(way, ways[way], number, megabytes=options.megabytes)
                    found[way] += [sample] if number else []  # connections are made in the first
        for way in WAYS:
            print(row(way, site, found[way]), flush=True)


# --- An engine ------------------------------------------------------------------------------------


def engine(way: str, folder: str) -> None:
    """For each manifest on standard input: fetches, and says seconds, CPU seconds and bytes."""
    pulling = PullReceiver(places=[Path(folder)])
    own = DeltaReceiver(pulling) if way == "pull" else receiver()
    print("ready", flush=True)
    for line in sys.stdin:
        manifest = msgspec.json.decode(line, type=WeightManifest)
        began = time.perf_counter()
        cpu = time.process_time()
        before = pulling.num_bytes
        own.fetch(manifest)
        came = (
            pulling.num_bytes - before
            if way == "pull"
            else sum(spec.num_bytes for spec in manifest.tensors)
        )
        print(
            json.dumps([time.perf_counter() - began, time.process_time() - cpu, came]), flush=True
        )


Engines = list["subprocess.Popen[str]"]


@contextmanager
def standing(way: str, folder: Path, *, machines: int, engines: int) -> Generator[Engines]:
    started: Engines = []
    for machine in range(machines):
        place = folder / f"machine-{machine}"
        place.mkdir(exist_ok=True)
        for _ in range(engines):
            command = [sys.executable, __file__, "--engine", way, str(place)]
            started.append(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                )
            )
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


# --- The trainer ----------------------------------------------------------------------------------

PUBLISHERS: dict[str, object] = {}


def handed_over(way: str, engines: Engines, number: int, *, megabytes: int) -> Sample:
    import torch

    from midflight.weights.transports.broadcast import BroadcastPublisher
    from midflight.weights.transports.pull_publisher import PullPublisher

    made = PUBLISHERS.setdefault(way, BroadcastPublisher() if way == "direct" else PullPublisher())
    assert isinstance(made, BroadcastPublisher | PullPublisher)
    version = time.monotonic_ns()
    count = max(1, megabytes // 8)
    tensors = {
        f"w{n}": torch.full((megabytes * 2**18 // count,), float(number + n)) for n in range(count)
    }
    cpu = time.process_time()
    sent = sent_by(made)
    began = time.perf_counter()
    manifest = made.publish(version, tensors)
    wait = time.perf_counter() - began
    told = msgspec.json.encode(manifest).decode()
    for process in engines:
        assert process.stdin is not None
        process.stdin.write(told + "\n")
    answers = [
        json.loads(process.stdout.readline()) for process in engines if process.stdout is not None
    ]
    sample = Sample(
        wait=wait,
        engines=tuple(seconds for seconds, _, _ in answers),
        cpu=statistics.mean(each for _, each, _ in answers),
        trainer_cpu=time.process_time() - cpu,
        engine_bytes=statistics.mean(came for _, _, came in answers),
        trainer_bytes=sent_by(made) - sent,
    )
    made.release(version)
    return sample


def sent_by(publisher: object) -> int:
    from midflight.weights.transports.pull_publisher import PullPublisher

    return (
        publisher.server.num_bytes
        if isinstance(publisher, PullPublisher)
        else publisher.service.num_bytes_broadcast  # pyright: ignore[reportAttributeAccessIssue]
    )


def row(way: str, site: str, samples: list[Sample]) -> str:
    def median(values: Iterator[float]) -> float:
        return statistics.median(values)

    cells = (
        f"{median(s.wait for s in samples):.2f} s",
        f"{median(statistics.median(s.engines) for s in samples):.2f} s",
        f"{median(max(s.engines) for s in samples):.2f} s",
        f"{median(s.cpu for s in samples):.2f} s",
        f"{median(s.trainer_cpu for s in samples):.2f} s",
        f"{median(s.engine_bytes for s in samples) / 2**20:.0f}",
        f"{median(s.trainer_bytes for s in samples) / 2**20:.0f}",
    )
    return f"| {way} | {site} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
