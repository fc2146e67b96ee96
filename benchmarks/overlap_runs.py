"""The four runs that `overlap.py` compares. Each drives the processes of `midflight train`, or one
half of them.

`ring` is a whole training. `generation_alone` is the ring without its trainer: the same rollout and
engine processes, and in the trainer's place one that gives every batch back at once. It still
publishes a version per batch, for admission and the age of tokens follow versions, but always the
same weights. `training_alone` is the trainer's process without the ring: the same loop, steps and
publications, fed with batches that `generation_alone` recorded.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from midflight.config.sections import Config
from midflight.observe.history import read_journal
from midflight.run.api.rollout_client import RolloutClient
from midflight.run.launcher.ring import Ring
from midflight.run.parts import Message, ModelReady, Progress, Purpose, Ready, serve_while
from midflight.run.trainer.training import TrainingLoop
from midflight.types import PackedBatch, Version, WeightManifest
from midflight.types.facts import Stepped

TICKS = os.sysconf("SC_CLK_TCK")
KEPT_BATCHES = 40
"""Recorded for `training_alone`: enough that caches do not know them."""


@dataclass(frozen=True)
class Measured:
    """Of the steps after the warm-up. `cpu` and `waits` are seconds per step, by process and by
    `"who for whom"`.
    """

    samples_per_second: float
    num_steps: int
    cpu: Mapping[str, float]
    waits: Mapping[str, float] = field(default_factory=dict[str, float])
    handover: tuple[float, float] = (0.0, 0.0)
    """Median seconds to stage, and to commit, seen from the rollout process."""


# --- With the rollout and engine processes --------------------------------------------------------


def ring(config: Config, *, warmup: int) -> Measured:
    """A whole training run, as `midflight train` does it."""
    fresh(config)
    watch = Watch()
    watch.ring = Ring(config, on_message=watch.hear, control_token=secrets.token_urlsafe())
    asyncio.run(watch.ring.run(Purpose.TRAIN))
    return watch.measured(config, warmup=warmup)


def generation_alone(
    config: Config, model: Path, *, warmup: int
) -> tuple[Measured, list[PackedBatch]]:
    """Also returns batches to train on."""
    fresh(config)
    watch = Watch()
    steps = NoSteps()
    token = secrets.token_urlsafe()
    watch.ring = Ring(
        config, on_message=watch.hear, control_token=token, model=ModelReady(str(model), 0)
    )

    async def main() -> None:
        await serve_while(
            _take_all(config, model, watch, steps, token=token), watch.ring.run(Purpose.ROLLOUTS)
        )

    asyncio.run(main())
    return watch.measured(config, warmup=warmup), steps.batches[-KEPT_BATCHES:]


async def _take_all(
    config: Config, model: Path, watch: Watch, steps: NoSteps, *, token: str
) -> None:
    """Waits for the rollout process to serve, then for its batches; ended by the number of
    steps.
    """
    from midflight.models.load import load_model
    from midflight.models.names import named_tensors
    from midflight.weights.transports.select import publisher

    url = await watch.url
    loaded = load_model(model, dtype=config.model.dtype, device="cpu")
    with publisher(
        config.weights.transport, name=config.run.name, folder=config.run.folder / "weights"
    ) as weights:
        outbox = SameWeights(weights.publish(0, named_tensors(loaded)))
        async with RolloutClient(url, token=token) as service:
            await TrainingLoop(
                steps,
                outbox,
                service,
                steps=config.run.steps,
                prefetch=config.rollout.max_staleness > 0,
                stage=lambda: lambda: None,
                save_every=0,
            ).run()


class NoSteps:
    """A trainer that computes nothing."""

    def __init__(self) -> None:
        self.version: Version = 0
        self.batches: list[PackedBatch] = []

    @property
    def num_steps(self) -> int:
        return self.version

    @property
    def early_tokens(self) -> int:
        return 0

    def begin(self, groups: PackedBatch) -> None:
        raise AssertionError("there is nothing to compute ahead")

    def step(self, batch: PackedBatch) -> NoReport:
        self.batches.append(batch)
        self.version += 1
        return NoReport()


@dataclass(frozen=True)
class NoReport:
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    skipped: str | None = None
    alarms: tuple[str, ...] = ()


class SameWeights:
    """Publishes one set of weights under every number."""

    def __init__(self, manifest: WeightManifest) -> None:
        self._manifest = manifest

    def publish(self, version: Version) -> WeightManifest:
        return replace(self._manifest, version=version)

    def pass_over(self, version: Version) -> None:
        del version

    def release(self, version: Version) -> None:
        pass


class Watch:
    """Hears the ring; at every report it reads how much CPU each process has used."""

    ring: Ring

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._cpu: list[dict[str, float]] = []
        self._url: asyncio.Future[str] | None = None

    @property
    def url(self) -> asyncio.Future[str]:
        if self._url is None:
            self._url = asyncio.get_running_loop().create_future()
        return self._url

    def hear(self, message: Message) -> None:
        if isinstance(message, Ready) and message.url is not None and not self.url.done():
            self.url.set_result(message.url)
        if isinstance(message, Progress):
            self._seconds.append(message.status.seconds)
            cpu = {
                child.name: cpu_seconds(child.pid)
                for child in self.ring.children.newest.values()
                if child.running and child.pid
            }
            self._cpu.append({**cpu, "launcher": time.process_time()})

    def measured(self, config: Config, *, warmup: int) -> Measured:
        steps = read_journal(config.run.folder / "metrics.jsonl").steps
        first = steps[warmup - 1]
        last = steps[-1]
        num_steps = len(steps) - warmup
        samples = num_steps * config.rollout.groups_per_step * config.rollout.group_size
        names = sorted({name for reading in self._cpu for name in reading})
        cpu = {name: self._used(name, first.seconds, last.seconds) for name in names}
        waits = [line.waits or {} for line in steps[warmup:]]
        return Measured(
            samples_per_second=samples / (last.seconds - first.seconds),
            num_steps=num_steps,
            cpu={name: seconds / num_steps for name, seconds in cpu.items()},
            waits={
                name: sum(w.get(name, 0.0) for w in waits) / num_steps
                for name in sorted({n for w in waits for n in w})
            },
            handover=(
                _median([s.stage_seconds for s in steps[warmup:]]),
                _median([s.pause_seconds for s in steps[warmup:]]),
            ),
        )

    def _used(self, name: str, start: float, end: float) -> float:
        """CPU seconds of a process between two times of the run, by its readings; the last report
        comes when it has ended.
        """
        readings = [
            (seconds, cpu[name])
            for seconds, cpu in zip(self._seconds, self._cpu, strict=True)
            if name in cpu
        ]
        times, used = zip(*readings, strict=True)
        return float(np.diff(np.interp([start, end], times, used))[0])


def _median(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return float(np.median(known)) if known else 0.0


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def fresh(config: Config) -> None:
    from midflight.run.launcher.folder import prepare

    prepare(Path(config.run.folder), config, resume=False)


# --- The trainer's process alone ------------------------------------------------------------------


def training_alone(
    config: Config, model: Path, batches: list[PackedBatch], *, warmup: int
) -> Measured:
    """In a fresh process, as the trainer is."""
    fresh(config)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_train, config.model_dump_json(), str(model), batches, warmup).result()


def _train(config_json: str, model: str, batches: list[PackedBatch], warmup: int) -> Measured:
    import uvloop

    config = Config.model_validate_json(config_json)
    replay = Replay(batches)
    gc.freeze()
    gc.set_threshold(50_000)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_train_all(config, Path(model), replay))
    seconds, cpu = np.diff(np.array(replay.ends)[[warmup - 1, -1]], axis=0)[0]
    num_steps = len(replay.ends) - warmup
    samples = num_steps * config.rollout.groups_per_step * config.rollout.group_size
    return Measured(samples / seconds, num_steps, {"trainer": cpu / num_steps})


async def _train_all(config: Config, model: Path, replay: Replay) -> None:
    from midflight.models.load import load_model
    from midflight.models.names import named_tensors
    from midflight.run.trainer.trainer_process import ModelWeights, PublishedVersions, put_together
    from midflight.trainer.trainer import trainer_of
    from midflight.weights.transports.select import publisher

    trainer = trainer_of(
        config, load_model(model, dtype=config.model.dtype, device=config.trainer.device)
    )
    with publisher(
        config.weights.transport, name=config.run.name, folder=config.run.folder / "weights"
    ) as weights:
        publish = put_together(
            lambda: named_tensors(trainer.model), weights, dtype=config.model.dtype
        )
        outbox = ModelWeights(publish, PublishedVersions(config.run.folder / "published"))
        await TrainingLoop(
            trainer,
            outbox,
            replay,
            steps=config.run.steps,
            prefetch=True,
            stage=lambda: lambda: None,
            save_every=0,
        ).run()


class Replay:
    """A `RolloutService` that always has a batch, and hands versions over in no time."""

    def __init__(self, batches: list[PackedBatch]) -> None:
        self._batches = batches
        self.ends: list[tuple[float, float]] = []
        """Of each step: wall time and the CPU time of the process."""

    async def take(self, train_version: Version) -> PackedBatch:
        batch = self._batches[train_version % len(self._batches)]
        later = train_version - batch.train_version
        return replace(
            batch,
            lease=train_version + 1,
            train_version=train_version,
            versions=batch.versions + np.int32(later),
        )

    async def ahead(self, train_version: Version, *, tokens: int) -> PackedBatch | None:
        return None

    async def done(self, step: Stepped) -> None:
        self.ends.append((time.monotonic(), time.process_time()))

    async def publish(self, manifest: WeightManifest) -> None:
        pass

    async def checkpointed(self, version: Version) -> None:
        pass

    async def finish(self, version: Version) -> None:
        pass
