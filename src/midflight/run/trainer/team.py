"""Several trainer processes as one: the first decides, sends each deed to the others, and all do it
together.

| loop | consumes | waits for | unblocked by |
|---|---|---|---|
| `follow` | deeds | the next that the first rank sends; its own | the first rank; its death closes the connection, which is an error here |
"""

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from midflight.models.names import named_tensors, torch_dtype
from midflight.run.heartbeat import ENDLESS, Heartbeat
from midflight.run.parts import PartLost
from midflight.trainer.checkpoint import load_checkpoint, stage
from midflight.trainer.model.rank_buckets import collect
from midflight.trainer.model.ranks import PATIENCE, Ranks
from midflight.trainer.report import StepReport
from midflight.trainer.trainer import PolicyTrainer
from midflight.types import PackedBatch, Version, WeightManifest
from midflight.types.digests import StepChain
from midflight.weights.transports.publisher import Publisher
from midflight.weights.transports.pull_publisher import PullPublisher


class Step(msgspec.Struct, frozen=True, tag=True):
    """An order to make a step. Each rank then gets its own rows."""


class Load(msgspec.Struct, frozen=True, tag=True):
    folder: str
    as_version: Version


class Stage(msgspec.Struct, frozen=True, tag=True):
    """An order to copy the checkpoint's shards, and to write them beside the next steps."""


class Gather(msgspec.Struct, frozen=True, tag=True):
    """An order to put the weights together in the first rank's host memory."""

    dtype: str | None
    """torch's name of the dtype in which floating-point numbers are sent; None: as they are."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """An order to publish the rank's part of this version, and to stop publishing the released
    versions.
    """

    version: Version
    released: tuple[Version, ...]


class TakeDevice(msgspec.Struct, frozen=True, tag=True):
    """An order to bring moments and gradients to the device."""


class LeaveDevice(msgspec.Struct, frozen=True, tag=True):
    """An order to move moments and gradients to host memory."""


class End(msgspec.Struct, frozen=True, tag=True):
    pass


Deed = Step | Load | Stage | Gather | Publish | TakeDevice | LeaveDevice | End
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Deed).decode


class Wire:
    """Carries deeds from the first rank to all others, and has the groups of processes that talk
    beside the steps.
    """

    def __init__(self, ranks: Ranks, publisher: Callable[..., Publisher] = PullPublisher) -> None:
        """`publisher` makes the publisher of this rank's part of the weights, when it is first
        used.
        """
        self.ranks = ranks
        self._publisher = publisher
        self._control = self._group()
        self.writing = self._group()
        """The group of the threads that write checkpoints."""

    def say(self, deed: Deed) -> None:
        """Sends the deed to the other ranks, and returns when it was sent."""
        if self.ranks.size == 1:
            return
        data = torch.frombuffer(bytearray(_encode(deed)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._control)
        dist.broadcast(data, 0, group=self._control)

    def hear(self) -> Deed:
        """Waits for the next deed of the first rank."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._control)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._control)
        return _decode(data.numpy().tobytes())

    def give(self, rank: int, data: bytes) -> None:
        """Sends bytes to one rank, which takes them. Returns when they were sent."""
        dist.send(torch.tensor([len(data)]), rank, group=self._control)
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, group=self._control)

    def taken(self) -> bytes:
        """Waits for the bytes that the first rank gives to this one."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, 0, group=self._control)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, 0, group=self._control)
        return data.numpy().tobytes()

    def gather(self, told: bytes) -> list[bytes]:
        """The bytes that each rank gives, in the order of ranks. A collective."""
        if self.ranks.size == 1:
            return [told]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks.size)]
        dist.all_gather(lengths, torch.tensor([len(told)]), group=self._control)
        longest = max(map(int, lengths))
        padded = bytearray(told.ljust(longest, b"\0"))
        found = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        own = torch.frombuffer(padded, dtype=torch.uint8)
        dist.all_gather(found, own, group=self._control)
        return [
            each[: int(length)].numpy().tobytes()
            for each, length in zip(found, lengths, strict=True)
        ]

    @cached_property
    def publisher(self) -> Publisher:
        return self._publisher(rank=self.ranks.rank, gather=self.gather)

    def _group(self) -> dist.ProcessGroup | None:
        if self.ranks.size == 1:
            return None
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        return group


@contextmanager
def together() -> Generator[None]:
    """Surrounds the work of all ranks. A connection that breaks during it means that another rank
    has died. That rank reports why it died, so the error here is `PartLost`.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistBackendError) or "gloo" in str(error):
            raise PartLost(f"another rank is gone: {error}") from error
        raise


class Team:
    """The first rank's trainer, as the training loop sees it. In a team of one it sends nothing."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        checkpoints: Path,
        *,
        keep: int,
        publisher: Callable[..., Publisher] = PullPublisher,
    ) -> None:
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._keep = keep
        self._wire = Wire(trainer.ranks, publisher)

    @property
    def version(self) -> Version:
        return self._trainer.version

    @property
    def num_steps(self) -> int:
        return self._trainer.num_steps

    @property
    def chain(self) -> StepChain:
        return self._trainer.chain

    @together()
    def step(self, batch: PackedBatch) -> StepReport:
        tokens = self._trainer.tokens_of(batch)
        self._wire.say(Step())
        for rank in range(1, self._trainer.ranks.size):
            self._wire.give(rank, self._trainer.rows_of_rank(tokens, rank))
        return self._trainer.train_on(batch, tokens)

    @together()
    def load(self, folder: Path, *, as_version: Version) -> Version:
        """Returns the checkpoint's own version."""
        self._wire.say(Load(str(folder), as_version))
        return load_checkpoint(folder, self._trainer, as_version=as_version).version

    @together()
    def stage(self, *, beside: Callable[[Path], bool] | None = None) -> Callable[[], bool]:
        """Copies the state between two steps. The function that it returns writes the copy, beside
        the next steps, and returns whether there is a checkpoint. `beside` puts files that belong
        to the checkpoint into its draft.
        """
        self._wire.say(Stage())
        write = _writing(self._trainer, self._checkpoints, keep=self._keep, wire=self._wire)
        return partial(write, beside=beside)

    @together()
    def take_device(self) -> None:
        self._wire.say(TakeDevice())
        self._trainer.take_device()

    @together()
    def leave_device(self) -> None:
        """Returns when every rank has left, so that others may have the devices."""
        self._wire.say(LeaveDevice())
        self._trainer.leave_device()
        self._wire.gather(b"left")

    def weights(self) -> dict[str, Tensor]:
        """The tensors to hand over, as this rank has them: it has only its rows of those that ranks
        share. They share the model's storage.
        """
        return named_tensors(self._trainer.model)

    @together()
    def collect(self, into: Mapping[str, Tensor], *, dtype: str | None = None) -> None:
        """Copies the tensors to hand over into host tensors, each whole. Floating-point numbers are
        sent in `dtype`, by default as they are.

        Ranks send their rows bucket by bucket (`trainer.model.rank_buckets`), so that no tensor is
        put together on a device.
        """
        deed = Gather(dtype)
        self._wire.say(deed)
        _collected(self._trainer, deed, into)

    @together()
    def publish(self, version: Version, released: Sequence[Version]) -> WeightManifest:
        """Publishes what ranks give away by themselves, and no rank puts together: by the pull
        transport, or rows that go straight into servers' workers.
        """
        deed = Publish(version, tuple(released))
        self._wire.say(deed)
        return _published(self._trainer, self._wire, deed)

    def end(self) -> None:
        self._wire.say(End())


async def follow(
    make: Callable[[], PolicyTrainer],
    checkpoints: Path,
    *,
    keep: int,
    heartbeat: Heartbeat,
    publisher: Callable[..., Publisher] = PullPublisher,
) -> None:
    """Runs any rank except the first: makes its trainer, and follows the first rank's deeds until
    the end. Any error ends it, also one of a checkpoint on its way to the disk. The first rank
    would wait for that for ever. It learns of the error because this process ends.
    """
    # One thread for all deeds: a thread chooses its GPU. Not waited for at the end, since nothing
    # ends its waiting but the first rank.
    thread = ThreadPoolExecutor(1, "deeds")
    loop = asyncio.get_running_loop()
    try:
        # the first may make a warm start
        with heartbeat.doing(
            "waits for the first rank, and loads its model", limit=ENDLESS, heavy=True
        ):
            trainer = await loop.run_in_executor(thread, make)
            wire = await loop.run_in_executor(thread, Wire, trainer.ranks, publisher)
        async with asyncio.TaskGroup() as tasks:
            while True:
                deed = await loop.run_in_executor(thread, together()(wire.hear))
                if isinstance(deed, End):
                    return
                # Without a limit, and not as one that computes: it may wait for the first rank,
                # which is judged for both.
                with heartbeat.doing(f"does what the first rank does: {type(deed).__name__}"):
                    write = await loop.run_in_executor(
                        thread, _done, deed, trainer, checkpoints, keep, wire
                    )
                if write is not None:
                    # after the one before: the first rank writes one at a time
                    tasks.create_task(asyncio.to_thread(write))
    finally:
        thread.shutdown(wait=False)


@together()
def _done(
    deed: Step | Load | Stage | Gather | Publish | TakeDevice | LeaveDevice,
    trainer: PolicyTrainer,
    checkpoints: Path,
    keep: int,
    wire: Wire,
) -> Callable[[], object] | None:
    """Carries out one deed. Returns the work that is left to do beside the next deeds."""
    match deed:
        case Step():
            trainer.follow(wire.taken())
        case Load(folder, as_version):
            load_checkpoint(Path(folder), trainer, as_version=as_version)
        case Stage():
            return _writing(trainer, checkpoints, keep=keep, wire=wire)
        case Gather():
            _collected(trainer, deed, {})
        case Publish():
            _published(trainer, wire, deed)
        case TakeDevice():
            trainer.take_device()
        case LeaveDevice():
            trainer.leave_device()
            wire.gather(b"left")
    return None


def _writing(
    trainer: PolicyTrainer, checkpoints: Path, *, keep: int, wire: Wire
) -> Callable[..., bool]:
    write = together()(stage(trainer, cursor="").write)
    return partial(write, checkpoints, keep=keep, group=wire.writing)


def _published(trainer: PolicyTrainer, wire: Wire, deed: Publish) -> WeightManifest:
    for version in deed.released:
        wire.publisher.release(version)
    return wire.publisher.publish(deed.version, named_tensors(trainer.model))


def _collected(trainer: PolicyTrainer, deed: Gather, into: Mapping[str, Tensor]) -> None:
    dtype = None if deed.dtype is None else torch_dtype(deed.dtype)
    collect(named_tensors(trainer.model), into, trainer.ranks, dtype=dtype)
