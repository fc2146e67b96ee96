"""The trainer's process: model, warm start, then the loop of steps. Owns the numbers of versions."""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from midflight.config.derived import lora_alpha, num_engines, served_dtype
from midflight.config.sections import Config, ModelSection
from midflight.environments.sources import load_sources
from midflight.models.dtypes import torch_dtype
from midflight.models.export import export_model
from midflight.models.load import load_model, make_model
from midflight.models.lora import add_adapters, is_adapted, lora_config, save_adapters
from midflight.models.names import in_dtype, named_tensors
from midflight.run.child import Launcher
from midflight.run.client import RolloutClient
from midflight.run.lineage import PublishedVersions
from midflight.run.messages import ModelReady, TrainerSpec
from midflight.run.training import TrainingLoop
from midflight.run.warm_start import warm_start
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.checkpoint import latest_checkpoint, load_checkpoint, stage
from midflight.trainer.configure import trainer_of
from midflight.trainer.trainer import Trainer
from midflight.types import Version, WeightManifest
from midflight.weights.transports.publish import Publisher
from midflight.weights.transports.select import publisher as make_publisher
from midflight.weights.transports.stale import remove_stale

if TYPE_CHECKING:
    from peft import LoraConfig


def first_model(section: ModelSection, folder: Path, *, seed: int) -> Path:
    """The model folder a run starts from: the configured one, or one made here with a byte tokenizer and random weights."""
    if section.path is not None:
        return section.path
    write_byte_tokenizer(folder)
    model = make_model(
        vocab_size=Tokenizer.load(folder).vocab_size,
        hidden_size=section.hidden_size,
        intermediate_size=section.intermediate_size,
        num_layers=section.num_layers,
        num_heads=section.num_heads,
        num_kv_heads=section.num_kv_heads,
        max_context=section.max_context,
        seed=seed,
        dtype=section.dtype,
    )
    save = folder.with_name(folder.name + ".made")
    export_model(model, folder, save)
    shutil.rmtree(folder)
    save.rename(folder)
    return folder


async def run_trainer(spec: TrainerSpec, launcher: Launcher) -> None:
    """Runs to the last step. Waits for batches and handovers (see `TrainingLoop`); ended by its steps or by the launcher."""
    config = Config.model_validate_json(spec.config)
    run = Path(config.run.folder)
    checkpoints, published = run / "checkpoints", PublishedVersions(run / "published")
    checkpoint = latest_checkpoint(checkpoints) if spec.resume else None
    source = run / "start" if checkpoint else await asyncio.to_thread(first_model, config.model, run / "first", seed=config.run.seed)
    model = await asyncio.to_thread(load_model, source, dtype=config.model.dtype, device=config.trainer.device)
    tokenizer = Tokenizer.load(source)
    adapters = _adapters(config, model) if checkpoint is None else None  # a resumed model has them; a wrong one is told before a warm start
    if checkpoint is None:
        sources = await asyncio.to_thread(load_sources, config.environment.sources, seed=config.run.seed)
        await warm_start(model, tokenizer, sources, config, launcher.tell)
    if adapters is not None:
        add_adapters(model, adapters, seed=config.run.seed)
    trainer = trainer_of(config, model)
    resumed = await asyncio.to_thread(_resume, trainer, checkpoint, published) if checkpoint else None
    await asyncio.to_thread(export_model, model, source, run / "start")
    launcher.tell(ModelReady(str(run / "start"), trainer.version, resumed))
    await _train(config, trainer, spec, published)
    await asyncio.to_thread(export_model, model, run / "start", run / "model", merged=True)
    if is_adapted(model):
        await asyncio.to_thread(save_adapters, model, run / "adapter")


def _adapters(config: Config, model: PreTrainedModel) -> LoraConfig | None:
    rank = config.lora.rank
    return None if rank is None else lora_config(model, rank=rank, alpha=lora_alpha(config.lora), targets=config.lora.targets)


def _resume(trainer: Trainer, checkpoint: Path, published: PublishedVersions) -> int:
    """Loads a checkpoint under a number that was never handed out; returns the checkpoint's own version."""
    version = int(checkpoint.name.rpartition("-")[2])
    return load_checkpoint(checkpoint, trainer, as_version=published.resumed_as(version)).version


class ModelWeights:
    """The outbox of a model: every version is noted before its bytes can reach an engine (DECISIONS 1).

    Weights leave in `dtype`, that which engines serve in, so that a fingerprint is of what is served; none is the model's own.
    `release` is called while another thread publishes, so versions are given back at the next publication: a publisher has one caller.
    """

    def __init__(self, model: PreTrainedModel, publisher: Publisher, published: PublishedVersions, *, dtype: str | None = None) -> None:
        self._model, self._publisher, self._published = model, publisher, published
        self._dtype = model.dtype if dtype is None else torch_dtype(dtype)
        self._released: deque[Version] = deque()

    def publish(self, version: Version) -> WeightManifest:
        while self._released:
            self._publisher.release(self._released.popleft())
        self._published.note(version)
        return self._publisher.publish(version, in_dtype(named_tensors(self._model), self._dtype))

    def release(self, version: Version) -> None:
        self._released.append(version)


async def _train(config: Config, trainer: Trainer, spec: TrainerSpec, published: PublishedVersions) -> None:
    folder = Path(config.run.folder)

    def staged() -> Callable[[], None]:
        return partial(stage(trainer, cursor="").write, folder / "checkpoints", keep=config.trainer.keep_checkpoints)

    await asyncio.to_thread(remove_stale, spec.segment)  # of a trainer of this run that was killed
    section = config.weights
    full_every = section.full_every if section.delta else 1
    engines = num_engines(config.engine)
    with make_publisher(
        section.transport, name=spec.segment, folder=folder / "weights", full_every=full_every, num_engines=engines
    ) as weights:
        async with RolloutClient(spec.rollout_url, token=spec.token) as service:
            loop = TrainingLoop(
                trainer,
                ModelWeights(trainer.model, weights, published, dtype=served_dtype(config)),
                service,
                steps=config.run.steps,
                prefetch=config.rollout.max_staleness > 0,
                stage=staged,
                save_every=config.trainer.checkpoint_every,
                stop_at_reward=config.run.stop_at_reward,
            )
            if trainer.num_steps == 0:
                # What a crash in the first steps goes back to: the warm start is not made twice.
                await asyncio.to_thread(await asyncio.to_thread(staged))
            await loop.run()
