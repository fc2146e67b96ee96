"""The two halves of a run, each alone, for `overlap.py`.

`generation_alone` is the ring without its trainer: the same rollout and engine processes, and in
the trainer's place one that gives every batch back at once. It still publishes a version per batch,
for admission and the age of tokens follow versions, but always the same weights. `training_alone`
is the trainer's process without the ring: the same loop, steps and publications, fed with batches
that `generation_alone` recorded.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from harness.ring import Measured, Watch, new_folder, watched_ring
from harness.rounds import Cost

from midflight.config.sections import Config
from midflight.run.api.rollout_client import RolloutClient
from midflight.run.api.service import DeviceOwner
from midflight.run.parts import ModelReady, Purpose, serve_while
from midflight.run.trainer.training import TrainingLoop
from midflight.types import PackedBatch, Version, WeightManifest
from midflight.types.facts import Stepped

KEPT_BATCHES = 40
"""Recorded for `training_alone`: enough that caches do not know them."""


# --- Generation -----------------------------------------------------------------------------------


def generation_alone(
    config: Config, model: Path, *, warmup: int
) -> tuple[Measured, list[PackedBatch]]:
    """Measures the ring without its trainer, and returns batches to train on, too."""
    new_folder(config)
    watch = Watch()
    steps = NoSteps()
    token = secrets.token_urlsafe()
    ring = watched_ring(config, watch, token=token, model=ModelReady(str(model), 0))

    async def main() -> None:
        taking = _take_all(config, model, watch, steps, token=token)
        await serve_while(taking, ring.run(Purpose.ROLLOUTS))

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


# --- Training -------------------------------------------------------------------------------------


def training_alone(
    config: Config, model: Path, batches: list[PackedBatch], *, warmup: int
) -> Measured:
    """Measures the trainer in a new process, as it has one in a run."""
    new_folder(config)
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
    first = replay.ends[warmup - 1]
    last = replay.ends[-1]
    num_steps = len(replay.ends) - warmup
    samples = num_steps * config.rollout.groups_per_step * config.rollout.group_size
    rate = samples / (last.wall - first.wall)
    return Measured(rate, num_steps, {"trainer": (last.cpu - first.cpu) / num_steps})


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
        self.ends: list[Cost] = []
        """When each step ended, by the clock and by the CPU time of the process."""

    async def take(self, train_version: Version) -> PackedBatch:
        batch = self._batches[train_version % len(self._batches)]
        later = train_version - batch.train_version
        return replace(
            batch,
            lease=train_version + 1,
            train_version=train_version,
            versions=batch.versions + np.int32(later),
        )

    async def done(self, step: Stepped) -> None:
        self.ends.append(Cost(time.monotonic(), time.process_time()))

    async def publish(self, manifest: WeightManifest) -> None:
        pass

    async def turn(self, of: DeviceOwner) -> None:
        pass

    async def checkpointed(self, version: Version) -> None:
        pass

    async def finish(self, version: Version) -> None:
        pass
