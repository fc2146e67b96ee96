"""The trainer's process: model, warm start, then the loop of steps. It owns the numbers of
versions.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from midflight.allowance import LOOKS
from midflight.config.derived import lora_alpha, model_sizes, num_engines, served_dtype
from midflight.config.disk import staged_bytes
from midflight.config.model import ModelSection
from midflight.config.seats import by_handles, stays_on_gpus
from midflight.config.sections import Config
from midflight.config.shards import shard_folder
from midflight.errors import ConfigError
from midflight.models.creation import make_model
from midflight.models.export import export_model
from midflight.models.load import load_frame, load_model, prepare
from midflight.models.lora import add_adapters, is_adapted, lora_config, save_adapters
from midflight.models.names import named_tensors, outlines, torch_dtype
from midflight.models.proof import SMALL
from midflight.models.sizes import sizes_of
from midflight.observe.activity import WorkBelow
from midflight.run.api.rollout_client import RolloutClient
from midflight.run.api.service import DeviceOwner, WentOn
from midflight.run.device_lock import DeviceLock, device_lock
from midflight.run.heartbeat import START_SECONDS
from midflight.run.parts import Alarm, LauncherPipe, ModelReady, TrainerSpec
from midflight.run.trainer.shards import ShardedRollouts
from midflight.run.trainer.team import Team, follow
from midflight.run.trainer.training import TrainingLoop
from midflight.run.trainer.warm_start import warm_start, warm_start_data
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trainer.folders import newest_whole, version_of
from midflight.trainer.model.determinism import compute_in_one_order
from midflight.trainer.model.microbatch import Layout
from midflight.trainer.model.probe import proven_layout, shared_layout
from midflight.trainer.model.ranks import Ranks, backend_of, join, own_device
from midflight.trainer.own_loss import objective_of
from midflight.trainer.trainer import PolicyTrainer, trainer_of
from midflight.trajectories.pairs import copy_name, drafted
from midflight.types import Version, WeightManifest
from midflight.weights.transports.memory_files import SHARED, remove_stale
from midflight.weights.transports.publisher import Publisher, copied
from midflight.weights.transports.pull_publisher import PullPublisher
from midflight.weights.transports.rank_rows import RankRowsPublisher
from midflight.weights.transports.select import publisher as make_publisher

if TYPE_CHECKING:
    from peft import LoraConfig

CPU = torch.device("cpu")
FULL_EVERY = 16
"""Versions from one that is sent whole to the next one with `weights.delta`. With more, an engine
that rejoins reads more.
"""


class PublishedVersions:
    """The highest version ever made, in a file that is replaced before the version reaches any
    engine. So no number is used again, also after a crash, whether that version was published or
    passed over.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def highest(self) -> Version | None:
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return None

    def note(self, version: Version) -> None:
        draft = self._path.with_suffix(".writing")
        draft.write_text(str(version))
        draft.replace(self._path)

    def resumed_as(self, checkpoint: Version) -> Version:
        """The number under which the weights of a checkpoint go on: its own, unless later ones were
        handed out.
        """
        highest = self.highest()
        if highest is None or highest <= checkpoint:
            return checkpoint
        return highest + 1


def first_model(section: ModelSection, folder: Path, *, seed: int) -> Path:
    """The model folder that a run starts from: the configured one, or one that is made here with a
    byte tokenizer and random weights.
    """
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


async def run_trainer(spec: TrainerSpec, launcher: LauncherPipe) -> None:
    """Runs to the last step. Waits for batches and handovers (see `TrainingLoop`); ended by its
    steps or by the launcher.

    The first rank makes or loads the model and warms it up; the others begin with the files that it
    wrote.
    """
    config = Config.model_validate_json(spec.config)
    if config.trainer.deterministic:
        compute_in_one_order()
    if spec.rank > 0:
        await follow(
            partial(_follower, config, spec),
            Path(config.run.folder) / "checkpoints",
            keep=config.trainer.keep_checkpoints,
            heartbeat=launcher.heartbeat,
            publisher=_sharing(config, spec.host),
        )
        return
    if config.trainer.compile:  # in processes below this one, for which the first steps wait
        launcher.heartbeat.work = WorkBelow(seconds=config.run.stall_seconds / LOOKS)
    run = Path(config.run.folder)
    published = PublishedVersions(run / "published")
    lock = device_lock(config, alone=True)
    with launcher.heartbeat.doing("begins", limit=START_SECONDS, heavy=True):
        found: list[str] = []
        team, resumed, over = await _begun(config, spec, launcher, published, found.append, lock)
    launcher.tell(ModelReady(str(run / "start"), team.version, resumed, tuple(found)))
    await _train(config, team, spec, published, launcher, lock, over=over)
    with launcher.heartbeat.doing(
        "exports its model", limit=START_SECONDS, heavy=True, computes=True
    ):
        await asyncio.to_thread(_export, config, team, run / "model", merged=True)
        await asyncio.to_thread(team.end)


async def _begun(
    config: Config,
    spec: TrainerSpec,
    launcher: LauncherPipe,
    published: PublishedVersions,
    keep: Callable[[str], None],
    lock: DeviceLock | None,
) -> tuple[Team, Version | None, bool]:
    """Returns what `_ready` does. A trainer that begins beside engines that generate, with which it
    takes turns, has a turn for its beginning.
    """
    if lock is None or not spec.life:
        begun = await _ready(config, spec, launcher, published, keep)
        if lock is not None:
            await asyncio.to_thread(begun[0].leave_device)
        return begun
    async with _service(spec) as service:
        await service.turn(DeviceOwner.TRAINER)
        await lock.take()
        begun = await _ready(config, spec, launcher, published, keep)
        await asyncio.to_thread(begun[0].leave_device)
        lock.leave()
        await service.turn(DeviceOwner.ENGINES)
    return begun


async def _ready(
    config: Config,
    spec: TrainerSpec,
    launcher: LauncherPipe,
    published: PublishedVersions,
    keep: Callable[[str], None],
) -> tuple[Team, Version | None, bool]:
    """Returns the trainer as it begins, the version of the checkpoint that it goes on from, if
    there is one, and whether the last step was made before. Alarms go to the launcher at once, and
    to `keep`.
    """

    def alarm(text: str) -> None:
        launcher.tell(Alarm(text))
        keep(text)

    # a loss that cannot be trained with is reported before anything is made
    await asyncio.to_thread(objective_of, config)
    run = Path(config.run.folder)
    checkpoint = None
    if spec.resume:
        checkpoint = await asyncio.to_thread(newest_whole, run / "checkpoints", alarm)
    if checkpoint is None:
        model, layout = await _first(config, launcher, alarm)
    else:
        with _loading(launcher):
            model = await asyncio.to_thread(_started, config)
            layout = await asyncio.to_thread(_layout, config, model)
    team = await asyncio.to_thread(_team, config, model, layout, spec, launcher)
    if checkpoint is None:
        return team, None, False
    goes_on = WentOn(published.resumed_as(version_of(checkpoint)))
    if spec.life:
        async with _service(spec) as service:
            goes_on = await service.restart(version_of(checkpoint))
    with _loading(launcher):
        resumed = await asyncio.to_thread(
            partial(team.load, checkpoint, as_version=goes_on.version)
        )
        # else engines have the folder that they began with, and get these weights by a handover
        if not spec.life:
            await asyncio.to_thread(_export, config, team, run / "start")
    return team, resumed, goes_on.over


def _loading(launcher: LauncherPipe) -> AbstractContextManager[None]:
    """Tells the launcher of the block. A large model takes minutes of disk, and may take them while
    it is read, computed or written.
    """
    return launcher.heartbeat.doing(
        "makes or loads its model", limit=START_SECONDS, heavy=True, computes=True
    )


def _service(spec: TrainerSpec) -> RolloutClient | ShardedRollouts:
    if not spec.further_urls:
        return RolloutClient(spec.rollout_url, token=spec.token, life=spec.life)
    urls = (spec.rollout_url, *spec.further_urls)
    clients = [RolloutClient(url, token=spec.token, life=spec.life, patient=True) for url in urls]
    return ShardedRollouts(clients)


async def _first(
    config: Config, launcher: LauncherPipe, alarm: Callable[[str], None]
) -> tuple[PreTrainedModel, Layout]:
    """Returns the model that the ring starts with, proven and warmed up. Waits for the warm start,
    between whose steps it may be cancelled.

    It is saved for engines and other ranks. If the loss asks for a reference, it is saved as the
    reference too, which a resumed run keeps.
    """
    run = Path(config.run.folder)
    with _loading(launcher):
        source = await asyncio.to_thread(
            first_model, config.model, run / "first", seed=config.run.seed
        )
        device = config.trainer.device
        if not config.warm_start.is_made:  # which one rank computes
            device = _loading_device(config, source)
        model = await asyncio.to_thread(load_model, source, dtype=config.model.dtype, device=device)
        # a model that cannot be trained is reported before all else
        layout = await asyncio.to_thread(_layout, config, model, alarm)
    adapters = _adapters(config, model)
    if config.warm_start.is_made:
        with launcher.heartbeat.doing("draws its tasks", computes=True):
            lessons = await asyncio.to_thread(warm_start_data, config, Tokenizer.load(source))
        with launcher.heartbeat.doing("makes the warm start", computes=True):
            await warm_start(model, lessons, config, launcher.tell, layout=layout)
    if adapters is not None:
        add_adapters(model, adapters, seed=config.run.seed)
    with _loading(launcher):
        await asyncio.to_thread(export_model, model, source, run / "start")
        if config.objective.kl_coefficient:
            await asyncio.to_thread(export_model, model, source, run / "reference")
    return model, layout


def _pairing(
    config: Config, service: RolloutClient | ShardedRollouts, launcher: LauncherPipe
) -> Callable[[Path], bool]:
    """Gets a copy of each gateway's store into a checkpoint's draft, and returns whether all are
    there: they are one with it. Called in the thread that writes the checkpoint; waits for the
    rollout processes, which copy beside their work.
    """
    loop = asyncio.get_running_loop()
    run = Path(config.run.folder)
    folders = [shard_folder(run, shard) for shard in range(config.gateway.shards)]

    def pair(draft: Path) -> bool:
        version = version_of(draft)
        said = asyncio.run_coroutine_threadsafe(service.copy_store(version), loop).result()
        if said.error:
            stays = (
                f"the checkpoint of version {version} was not made, and the one before stays, "
                f"for its copy of the store failed. {said.error}"
            )
            launcher.tell(Alarm(f"{stays} The run goes on."))
            return False
        for folder in folders:
            pair = draft / folder.relative_to(run)
            pair.mkdir(parents=True, exist_ok=True)
            drafted(folder, version).replace(pair / copy_name(version))
        return True

    return pair


def _layout(
    config: Config, model: PreTrainedModel, alarm: Callable[[str], None] | None = None
) -> Layout:
    """Returns the layout of rows under which the model's numbers are right, which is proven here. A
    slow layout raises an alarm, once.
    """
    layout, found = proven_layout(model, max_context=config.model.max_context)
    if layout is not Layout.PACKED and alarm is not None:
        alarm(
            f"{type(model).__name__} trains in padded rows, which is exact and slower: packed rows "
            f"are not right ({found.reason})."
        )
    return layout


def _loading_device(config: Config, folder: Path) -> str:
    """The device that the first rank loads a model to. If ranks share the model, it is the CPU: they
    get their rows from there, and the whole model need not fit on a GPU. A small model is proven on
    the device that trains.
    """
    if config.trainer.ranks == 1 or sizes_of(folder).num_parameters <= SMALL:
        return config.trainer.device
    return "cpu"


def _started(config: Config, *, device: str | None = None) -> PreTrainedModel:
    """The model that the ring started with, this time or before."""
    folder = Path(config.run.folder) / "start"
    return load_model(
        folder,
        dtype=config.model.dtype,
        device=device or _loading_device(config, folder),
    )


def _team(
    config: Config,
    model: PreTrainedModel,
    layout: Layout,
    spec: TrainerSpec,
    launcher: LauncherPipe,
) -> Team:
    checkpoints = Path(config.run.folder) / "checkpoints"
    if config.trainer.ranks > 1:
        _join(spec, size=config.trainer.ranks, device=config.trainer.device)
        shared_layout(layout)
    publisher = _sharing(config, sending_host(config.gateway.host, spec.host))
    return Team(
        _trainer(config, model, layout),
        checkpoints,
        keep=config.trainer.keep_checkpoints,
        publisher=publisher,
    )


def _shares(config: Config) -> bool:
    """True if each rank publishes its part of the weights. A difference is made of whole tensors."""
    if config.weights.delta:
        return False
    return config.weights.transport == "pull" or _sends_rows(config)


def _sends_rows(config: Config) -> bool:
    """True if several ranks send their rows from their GPUs. Untested on a GPU."""
    return config.trainer.ranks > 1 and stays_on_gpus(config)


def _sharing(config: Config, host: str) -> Callable[..., Publisher]:
    """Makes the publisher of a rank's part of the weights, as soon as the ranks have met."""
    dtype = torch_dtype(served_dtype(config))
    if not _sends_rows(config):
        return partial(PullPublisher, host, dtype=dtype)

    def make(*, rank: int, gather: Callable[[bytes], list[bytes]]) -> RankRowsPublisher:
        device = torch.device(config.trainer.device)
        if str(device) == "cuda":  # another thread may have chosen another one
            device = torch.device("cuda", rank % torch.cuda.device_count())
        return RankRowsPublisher(
            host,
            rank=rank,
            gather=gather,
            device=device,
            backend=backend_of(config.trainer.device),
            dtype=dtype,
            deadline_seconds=config.weights.stage_seconds / 4,
        )

    return make


def _follower(config: Config, spec: TrainerSpec) -> PolicyTrainer:
    """Waits for the first rank, which saves the model that the others begin with before it joins
    them. This rank makes the model without weights, and gets its rows from the first one.
    """
    _join(spec, size=config.trainer.ranks, device=config.trainer.device)
    layout = shared_layout(None)
    model = load_frame(Path(config.run.folder) / "start", dtype=config.model.dtype)
    return _trainer(config, model, layout)


def _join(spec: TrainerSpec, *, size: int, device: str) -> None:
    join(
        spec.meeting,
        host=spec.host,
        rank=spec.rank,
        size=size,
        device=device,
        listening_fd=spec.meeting_fd,
    )


def _trainer(config: Config, model: PreTrainedModel, layout: Layout) -> PolicyTrainer:
    reference = None
    ranks = Ranks.joined()
    device = own_device(config.trainer.device)
    prepare(device)
    if config.objective.kl_coefficient:
        folder = Path(config.run.folder) / "reference"
        if not folder.is_dir():
            raise ConfigError(
                f"objective.kl_coefficient is set, and {folder} is not there: the run began "
                "without one. Remove it, or start anew without --resume."
            )
        if ranks.is_first:
            at = _loading_device(config, folder)
            reference = load_model(folder, dtype=config.model.dtype, device=at)
        else:
            reference = load_frame(folder, dtype=config.model.dtype)
    return trainer_of(
        config,
        model,
        layout=layout,
        reference=reference,
        ranks=ranks,
        device=device,
    )


def _export(config: Config, team: Team, folder: Path, *, merged: bool = False) -> None:
    """Saves the model as it is now, in a folder that others load. The trainer's own model may be in
    pieces, so that a copy is filled with its weights.
    """
    start = Path(config.run.folder) / "start"
    model = _started(config, device="cpu")
    team.collect(named_tensors(model))
    if merged:
        model.config.midflight_steps_digest = team.chain.head
    export_model(model, start, folder, merged=merged)
    if merged and is_adapted(model):
        save_adapters(model, Path(config.run.folder) / "adapter")


def _adapters(config: Config, model: PreTrainedModel) -> LoraConfig | None:
    lora = config.lora
    if lora.rank is None:
        return None
    return lora_config(model, rank=lora.rank, alpha=lora_alpha(lora), targets=lora.targets)


def _nothing() -> None:
    """Ranks that publish their own parts keep copies of them."""


class DeviceTurns:
    """Implements `TrainerTurns`."""

    def __init__(
        self,
        team: Team,
        service: RolloutClient | ShardedRollouts,
        lock: DeviceLock,
        withdraw: Callable[[], None],
    ) -> None:
        """`withdraw` ends what is sent out of the trainer's weights, which the step will change."""
        self._withdraw = withdraw
        self._team = team
        self._service = service
        self._lock = lock

    async def begin(self) -> None:
        await self._service.turn(DeviceOwner.TRAINER)
        self._withdraw()
        await self._lock.take()
        await asyncio.to_thread(self._team.take_device)

    async def end(self) -> None:
        await asyncio.to_thread(self._team.leave_device)
        self._lock.leave()


class ModelWeights:
    """The trainer's `WeightsOutlet`: every version is noted before its bytes can reach an engine.

    `release` is called while another thread publishes, so versions are given back at the next
    publication: a publisher has one caller.
    """

    def __init__(
        self,
        publish: Callable[[Version, Sequence[Version]], WeightManifest],
        published: PublishedVersions,
    ) -> None:
        """`publish` gives the released versions back, and publishes a version with the weights as
        they are now.
        """
        self._publish = publish
        self._published = published
        self._released: deque[Version] = deque()

    def publish(self, version: Version) -> WeightManifest:
        released = [self._released.popleft() for _ in range(len(self._released))]
        self._published.note(version)
        return self._publish(version, released)

    def pass_over(self, version: Version) -> None:
        self._published.note(version)

    def release(self, version: Version) -> None:
        self._released.append(version)


def put_together(
    weights: Callable[[], Mapping[str, Tensor]],
    publisher: Publisher,
    *,
    dtype: str,
    collect: Callable[[Mapping[str, Tensor]], None] | None = None,
) -> Callable[[Version, Sequence[Version]], WeightManifest]:
    """Publishes the tensors that `weights` gives, in the `dtype` that engines serve in, so that the
    fingerprint is that of the served tensors. `collect` copies them into host tensors, if ranks
    share them; without it they are whole.
    """

    def fill(places: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        if collect is None:
            copied(places, weights())
        else:
            collect(places)

    def publish(version: Version, released: Sequence[Version]) -> WeightManifest:
        for old in released:
            publisher.release(old)
        tensors = weights()
        served = outlines(tensors, torch_dtype(dtype))
        if collect is None and all(t.dtype is served[name].dtype for name, t in tensors.items()):
            return publisher.publish(version, tensors)
        return publisher.publish(version, served, fill)

    return publish


def sending_host(gateway: str, own: str) -> str:
    """The address at which engines reach the sender of weights. It is the trainer's own address.
    For a trainer on loopback it is that of the gateway beside it, which names this machine to
    engines that join from others, unless it names no address.
    """
    if own != "127.0.0.1" or gateway in ("0.0.0.0", "::", "localhost"):
        return own
    return gateway


async def _train(
    config: Config,
    team: Team,
    spec: TrainerSpec,
    published: PublishedVersions,
    launcher: LauncherPipe,
    lock: DeviceLock | None,
    *,
    over: bool,
) -> None:
    section = config.weights
    folder = Path(config.run.folder) / "weights"
    # engines that were reading the weights of a trainer before have had the time of a start
    remove_stale(spec.segment, [SHARED, folder])
    if over:
        async with _service(spec) as service:
            await service.finish(team.version)
        return
    handover_seconds = 2 * (
        config.evaluation.pin_seconds
        + section.stage_seconds
        + num_engines(config.engine) * section.commit_seconds
    )
    with ExitStack() as closing:
        publish = team.publish
        withdraw = _nothing
        if not _shares(config):
            weights = make_publisher(
                section.transport,
                name=spec.segment,
                folder=folder,
                host=sending_host(config.gateway.host, spec.host),
                full_every=FULL_EVERY if section.delta else 1,
                stage_seconds=section.stage_seconds,
                # after a restart the folders of servers are there already
                spare=0 if spec.life else staged_bytes(config, model_sizes(config.model)),
                device=own_device(config.trainer.device) if stays_on_gpus(config) else CPU,
                by_handles=by_handles(config),
                out_of_weights=config.engine.takes_turns,
            )
            withdraw = weights.withdraw
            publisher = closing.enter_context(weights)
            served = served_dtype(config)
            collect = None
            if config.trainer.ranks > 1:
                collect = partial(team.collect, dtype=served)
            publish = put_together(team.weights, publisher, dtype=served, collect=collect)
        async with _service(spec) as service:
            stage = team.stage
            if config.run.store_folder is not None:
                stage = partial(team.stage, beside=_pairing(config, service, launcher))
            loop = TrainingLoop(
                team,
                ModelWeights(publish, published),
                service,
                steps=config.run.steps,
                prefetch=config.rollout.max_staleness > 0,
                stage=stage,
                save_every=config.trainer.checkpoint_every,
                publish_every=section.every,
                stop_at_reward=config.run.stop_at_reward,
                heartbeat=launcher.heartbeat,
                handover_seconds=handover_seconds,
                chain=team.chain,
                turns=None if lock is None else DeviceTurns(team, service, lock, withdraw),
            )
            if team.num_steps == 0:
                # A crash in the first steps goes back to this: the warm start is not made twice.
                write = await asyncio.to_thread(team.stage)
                await asyncio.to_thread(write)
            await loop.run()
