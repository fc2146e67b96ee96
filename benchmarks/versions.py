"""What a version weighs and costs on its way from the trainer to the engines.

    python benchmarks/versions.py --parts deltas [--rates 1e-6 1e-5 1e-4 3e-4] [--steps 8]
    python benchmarks/versions.py --parts adapters [--rounds 9]
    python benchmarks/versions.py --parts pull [--megabytes 256] [--sites 1x1 1x4 4x1 4x2]

**deltas**: differences between versions of real AdamW steps, served in float32 and in bfloat16. A
small model is trained in float32 on the bytes of this repository's sources, first for a while, then
a few steps at each learning rate; after each step it is published, as it is or converted to
bfloat16. Rows are medians over those steps. Times are CPU seconds of one thread; each ratio is to a
plain copy, or to plain shared memory, measured between them.

| column | means |
|---|---|
| changed | share of words of which any bit changed |
| bytes | payload / whole version |
| encode, apply | MB of whole version per second: comparing and packing; unpacking and adding |
| x copy | times of a plain copy of the whole version |
| publish, fetch | the whole way with fingerprints, through shared memory: times of the same without differences |
| pays below | MB/s of a link below which encode, transfer and apply are quicker than the transfer of the whole |

**adapters**: a version of adapters beside one of all weights, by shared memory, from the trainer's
copy to the engine's.

**pull**: engines on several machines pull a version. The trainer and every engine are processes of
their own on this machine; those of one `machine` share a folder of memory, as they would on a real
one. All begin at once, over loopback, so the seconds are those of processors that all of them
share, and bytes say what a network would.

| column | means |
|---|---|
| machines x engines | engines on each machine |
| trainer waits | seconds until it may change its weights again |
| an engine, all | seconds from the announcement until an engine has the version, verified: the median, and the last |
| CPU an engine, of the trainer | seconds |
| MB an engine | that came to it over the network, mean |
| MB of the trainer | that it sent |
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from harness.arguments import Arguments
from harness.models import (
    PRETRAIN_RATE,
    Tensors,
    small_model,
    source_batches,
    train_on_bytes,
    versions_of,
)
from harness.processes import environment, running, side
from harness.report import Report, make_parts
from harness.rounds import Cost, median_of, timed
from torch import Tensor
from transformers import PreTrainedModel

from midflight.engines.embedded.weights import EngineWeights
from midflight.models.load import load_model, save_model
from midflight.models.lora import add_adapters, lora_config
from midflight.models.names import named_tensors
from midflight.types import WeightManifest
from midflight.weights.difference_codec import Frames, encode
from midflight.weights.transports.select import publisher, receiver

# --- Differences ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One version from the one before: the share of words changed, bytes, and CPU seconds."""

    changed: float
    num_bytes: int
    encode: float
    apply: float
    copy: float


def deltas(options: argparse.Namespace, report: Report) -> None:
    torch.manual_seed(0)
    model = small_model(vocab_size=512, layers=6)
    batches = source_batches()
    losses = train_on_bytes(model, batches, rate=PRETRAIN_RATE, steps=options.pretrain)
    start = deepcopy(model.state_dict())
    parameters = sum(tensor.numel() for tensor in named_tensors(model).values())
    report.say(
        f"{parameters / 1e6:.1f} million parameters, loss {losses[-1]:.2f} after "
        f"{options.pretrain} steps"
    )
    table = report.table(
        "served",
        "rate",
        "changed",
        "bytes",
        "encode MB/s",
        "x copy",
        "apply MB/s",
        "x copy",
        "publish",
        "fetch",
        "pays below MB/s",
    )
    for dtype in (torch.float32, torch.bfloat16):
        for rate in options.rates:
            model.load_state_dict(start)
            versions = versions_of(model, batches, rate=rate, steps=options.steps, dtype=dtype)
            name = str(dtype).removeprefix("torch.")
            table.row(name, f"{rate:g}", *delta_cells(versions))


def delta_cells(versions: Sequence[Tensors]) -> list[str]:
    whole = sum(tensor.nbytes for tensor in versions[0].values())
    differences = [difference_of(old, new) for old, new in pairwise(versions)]
    size = median_of(differences, lambda each: each.num_bytes)
    packing = median_of(differences, lambda each: each.encode)
    adding = median_of(differences, lambda each: each.apply)
    copying = median_of(differences, lambda each: each.copy)
    ways = list(published_ways(versions))
    pays = (whole - size) / (packing + adding) / 1e6
    return [
        f"{median_of(differences, lambda each: each.changed):.1%}",
        f"{size / whole:.3f}",
        f"{whole / packing / 1e6:.0f}",
        f"{packing / copying:.0f}",
        f"{whole / adding / 1e6:.0f}",
        f"{adding / copying:.0f}",
        f"{median_of(ways, lambda way: way[0]):.1f}",
        f"{median_of(ways, lambda way: way[1]):.1f}",
        f"{pays:.0f}",
    ]


def difference_of(old: Tensors, new: Tensors) -> Difference:
    widths = {name: tensor.element_size() for name, tensor in new.items()}
    changed = 0
    for name, tensor in new.items():
        changed += int((words_of(old[name]) != words_of(tensor)).sum())

    def packed() -> bytes:
        frames: list[bytes] = []
        for name, tensor in new.items():
            frames += encode(bytes_of(old[name]), bytes_of(tensor), width=widths[name])
        return b"".join(frames)

    payload, packing = timed(packed, cpu=time.thread_time)
    target = {name: tensor.clone() for name, tensor in old.items()}
    frames = Frames(memoryview(payload))

    def add() -> None:
        for name, tensor in target.items():
            frames.apply(bytes_of(tensor), width=widths[name])

    _, adding = timed(add, cpu=time.thread_time)
    for name, tensor in new.items():
        assert torch.equal(words_of(target[name]), words_of(tensor)), name

    def copy() -> None:
        for name, tensor in new.items():
            target[name].copy_(tensor)

    _, copying = timed(copy, cpu=time.thread_time)
    return Difference(
        changed=changed / sum(tensor.numel() for tensor in new.values()),
        num_bytes=len(payload),
        encode=packing.cpu,
        apply=adding.cpu,
        copy=copying.cpu,
    )


def published_ways(versions: Sequence[Tensors]) -> Iterator[tuple[float, float]]:
    """Publishing and fetching each version with differences, in times of the same without them."""
    name = "midflight-benchmark"
    every = len(versions) + 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = stack.enter_context(publisher("shared_memory", name=name, folder=folder))
        small = stack.enter_context(
            publisher("shared_memory", name=name, folder=folder, full_every=every)
        )
        ends = (receiver(), receiver())
        for version, tensors in enumerate(versions):
            whole, publishing = published(plain.publish, version, tensors)
            delta, publishing_delta = published(small.publish, version, tensors)
            _, fetching = timed(lambda m=whole: ends[0].fetch(m), cpu=time.thread_time)
            _, fetching_delta = timed(lambda m=delta: ends[1].fetch(m), cpu=time.thread_time)
            plain.release(version - 1)
            small.release(version - 1)
            # the first makes the receiver fetch the whole once more
            if delta.deltas and version > 1:
                yield publishing_delta.cpu / publishing.cpu, fetching_delta.cpu / fetching.cpu


def published(
    publish: Callable[[int, Tensors], WeightManifest], version: int, tensors: Tensors
) -> tuple[WeightManifest, Cost]:
    """The manifest, and what it cost."""
    return timed(lambda: publish(version, tensors), cpu=time.thread_time)


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def words_of(tensor: Tensor) -> Tensor:
    """Returns the numbers as integers, so that a NaN equals itself and -0 does not equal 0."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


# --- Adapters -------------------------------------------------------------------------------------

RANKS = (None, 64, 16, 4)


@dataclass(frozen=True)
class Sent:
    """Bytes of a version, and what it took to publish and to stage it, in seconds."""

    num_bytes: int
    publish: float
    stage: float


def adapters(options: argparse.Namespace, report: Report) -> None:
    table = report.table("trained", "numbers", "bytes a version", "share", "publish s", "stage s")
    whole = 0
    for rank in RANKS:
        model = small_model(512, layers=8, heads=8, vocab_size=16384)
        if rank is not None:
            add_adapters(model, lora_config(model, rank=rank, alpha=2 * rank), seed=0)
        sent = versions_sent(model, number=options.rounds)
        whole = whole or sent[0].num_bytes
        numbers = sum(tensor.numel() for tensor in named_tensors(model).values())
        table.row(
            "all weights" if rank is None else f"rank {rank}",
            f"{numbers:,}",
            f"{sent[0].num_bytes:,}",
            f"{sent[0].num_bytes / whole:.3f}",
            f"{median_of(sent, lambda each: each.publish):.3f}",
            f"{median_of(sent, lambda each: each.stage):.3f}",
        )


def versions_sent(model: PreTrainedModel, *, number: int) -> list[Sent]:
    """So many versions, handed over by shared memory."""
    found: list[Sent] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        outbox = stack.enter_context(
            publisher("shared_memory", name="midflight-benchmark-adapters", folder=folder)
        )
        save_model(model, folder / "start")
        served = load_model(folder / "start", dtype="float32")
        engine = EngineWeights(served, receiver(), version=0)
        for version in range(1, number + 1):
            for tensor in named_tensors(model).values():
                tensor += 1e-3
            tensors = named_tensors(model)
            manifest, publishing = timed(lambda v=version, t=tensors: outbox.publish(v, t))
            _, staging = timed(lambda m=manifest: engine.stage(m))
            engine.commit(version)
            if version > 1:
                outbox.release(version - 1)
            num_bytes = sum(spec.num_bytes for spec in manifest.tensors)
            found.append(Sent(num_bytes, publishing.wall, staging.wall))
    return found


# --- Pulling --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fetched:
    """What one version took one engine, in seconds and bytes."""

    wall: float
    cpu: float
    num_bytes: int


@dataclass(frozen=True)
class Pulled:
    """What one version took the trainer, in seconds and bytes, and the engines."""

    waits: float
    cpu: float
    num_bytes: int
    engines: Sequence[Fetched]


SHARED = Path("/dev/shm")
Engines = list["subprocess.Popen[str]"]


def pull(options: argparse.Namespace, report: Report) -> None:
    report.say(f"{options.megabytes} MB, medians of {options.rounds}")
    table = report.table(
        "machines x engines",
        "trainer waits",
        "an engine",
        "all",
        "CPU an engine",
        "of the trainer",
        "MB an engine",
        "MB of the trainer",
    )
    for site in options.sites:
        found = pulled_at(site, megabytes=options.megabytes, rounds=options.rounds)
        middle: list[float] = []
        last: list[float] = []
        cpu: list[float] = []
        num_bytes: list[float] = []
        for sample in found:
            seconds = [engine.wall for engine in sample.engines]
            middle.append(statistics.median(seconds))
            last.append(max(seconds))
            cpu.append(statistics.mean(engine.cpu for engine in sample.engines))
            num_bytes.append(statistics.mean(engine.num_bytes for engine in sample.engines))
        table.row(
            site.replace("x", " x "),
            f"{median_of(found, lambda sample: sample.waits):.2f} s",
            f"{statistics.median(middle):.2f} s",
            f"{statistics.median(last):.2f} s",
            f"{statistics.median(cpu):.2f} s",
            f"{median_of(found, lambda sample: sample.cpu):.2f} s",
            f"{statistics.median(num_bytes) / 2**20:.0f}",
            f"{median_of(found, lambda sample: sample.num_bytes) / 2**20:.0f}",
        )


def pulled_at(site: str, *, megabytes: int, rounds: int) -> list[Pulled]:
    """Versions for engines of a site such as `4x2`: four machines with two engines each."""
    machines, engines = (int(number) for number in site.split("x"))
    found: list[Pulled] = []
    with ExitStack() as stack:
        parent = SHARED if SHARED.is_dir() else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        sender = stack.enter_context(publisher("pull", name="midflight-benchmark", folder=folder))
        started = start_engines(stack, folder, machines=machines, engines=engines)
        for number in range(rounds + 1):
            sample = pulled_once(sender, started, number, megabytes=megabytes)
            if number:  # connections are made in the first
                found.append(sample)
    return found


def start_engines(stack: ExitStack, folder: Path, *, machines: int, engines: int) -> Engines:
    started: Engines = []
    for machine in range(machines):
        place = folder / f"machine-{machine}"
        place.mkdir()
        for _ in range(engines):
            process = running(
                side("pulling_engine", place),
                environ=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None,
                text=True,
                bufsize=1,
            )
            started.append(stack.enter_context(process))
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return started


def pulled_once(sender: Any, engines: Engines, number: int, *, megabytes: int) -> Pulled:
    """Publishes a version and waits until every engine has it. `sender` is a `PullPublisher`."""
    version = time.monotonic_ns()
    count = max(1, megabytes // 8)
    size = megabytes * 2**18 // count
    tensors = {f"w{at}": torch.full((size,), float(number + at)) for at in range(count)}
    sent = sender.server.num_bytes
    cpu = time.process_time()
    manifest, publishing = timed(lambda: sender.publish(version, tensors))
    line = msgspec.json.encode(manifest).decode() + "\n"
    for process in engines:
        assert process.stdin is not None
        process.stdin.write(line)
    answers: list[Fetched] = []
    for process in engines:
        assert process.stdout is not None
        answers.append(Fetched(*json.loads(process.stdout.readline())))
    used = time.process_time() - cpu
    sender.release(version)
    return Pulled(publishing.wall, used, sender.server.num_bytes - sent, answers)


PARTS = {"deltas": deltas, "adapters": adapters, "pull": pull}


def main() -> None:
    arguments = Arguments(__doc__, rounds=5)
    arguments.option("--parts", [*PARTS], choices=[*PARTS])
    arguments.option("--rates", [1e-6, 1e-5, 1e-4, 3e-4], smoke=[1e-4], help="learning rates")
    arguments.option("--steps", 8, smoke=3, help="versions of each rate, after as many others")
    arguments.option("--pretrain", 150, smoke=2, help="steps of training before")
    arguments.option("--megabytes", 256, smoke=2, help="of a version of part `pull`")
    arguments.option(
        "--sites", ["1x1", "1x4", "4x1", "4x2"], smoke=["1x2"], help="machines x engines on each"
    )
    options = arguments.parse()
    make_parts(options, PARTS)


if __name__ == "__main__":
    main()
