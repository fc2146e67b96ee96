"""The time that a version takes to the engines, by each transport, estimated from the speed of the
slowest part of its way. Only the figures of `COPY_SPEED`, `BROADCAST_SPEED` and `PULL_SPEED` are
measured, on CPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from midflight.config.derived import num_engines
from midflight.config.disk import published_bytes, staged_bytes
from midflight.config.gpu_memory import num_models
from midflight.config.gpus import DescribedGpus
from midflight.config.seats import server_of, server_size, stays_on_gpus
from midflight.config.sections import Config
from midflight.config.transport import Transport, may_use_handles, version_bytes
from midflight.models.sizes import ModelSizes

COPY_SPEED = 7.7
"""A copy in the memory of a machine by one core, in 10^9 bytes a second (benchmarks/NOTES.md)."""
BROADCAST_SPEED = 1.0
"""gloo from a trainer to one engine of its machine, 128 MB in 0.13 s (docs/scale.md)."""
PULL_SPEED = 0.8
"""`pull` in the same place, 128 MB in 0.16 s."""
NETWORK_SPEED = 12.5
"""An adapter of 100 Gbit/s, which is assumed between machines."""


@dataclass(frozen=True, slots=True)
class WayPart:
    """A part of the way of a version."""

    words: str
    num_bytes: int
    """The bytes that go over it one after the other."""
    speed: float
    """10^9 bytes a second."""

    @property
    def seconds(self) -> float:
        return self.num_bytes / (self.speed * 1e9)


@dataclass(frozen=True, slots=True)
class VersionWay:
    """The way of a version by one transport. It has no parts if the run cannot use the transport;
    `why_not` says why.
    """

    transport: Transport
    parts: Sequence[WayPart] = ()
    why_not: str = ""

    @property
    def slowest(self) -> WayPart:
        return max(self.parts, key=lambda part: part.seconds)


def version_ways(config: Config, gpus: DescribedGpus) -> Iterator[VersionWay]:
    """The way by each transport that there is."""
    for transport in get_args(Transport):
        why_not = _why_not(config, transport)
        if why_not:
            yield VersionWay(transport, why_not=why_not)
        else:
            yield VersionWay(transport, tuple(_parts(config, gpus, transport)))


def _why_not(config: Config, transport: Transport) -> str:
    if transport == "shared_memory" and config.cluster.kind != "local":
        return "not between machines"
    if transport == "direct" and config.engine.kind == "embedded":
        return "for vLLM and SGLang only"
    if transport == "direct" and config.lora.rank is not None:
        return "not for adapters"
    return ""


def _parts(config: Config, gpus: DescribedGpus, transport: Transport) -> Iterator[WayPart]:
    num_bytes = version_bytes(config)
    pcie = gpus.kind.pcie_speed
    if transport == "direct" and may_use_handles(config):
        yield _by_handles(config, gpus)
        return
    if transport == "direct" and stays_on_gpus(config):
        speed = gpus.kind.nvlink_speed or pcie
        words = "NVLink" if gpus.kind.nvlink_speed else "PCIe"
        yield WayPart(f"{words}, by NCCL from GPU to GPU", num_bytes, speed)
        return
    if config.trainer.device != "cpu":
        own = num_bytes
        if transport == "pull" and not config.weights.delta:
            own //= config.trainer.ranks
        yield WayPart("PCIe, from the trainer's GPU to its machine", own, pcie)
    if transport == "shared_memory":
        yield WayPart("a copy in the machine's memory, by one core", num_bytes, COPY_SPEED)
    elif transport == "direct":
        yield WayPart("gloo, by TCP", num_bytes, BROADCAST_SPEED)
    else:
        yield WayPart("HTTP, by TCP", num_bytes, PULL_SPEED)
    if config.cluster.kind != "local":
        yield WayPart("the network, 100 Gbit/s assumed", num_bytes, NETWORK_SPEED)
    if config.engine.device != "cpu":
        yield WayPart("PCIe, from the machine to an engine's GPU", num_bytes, pcie)


def _by_handles(config: Config, gpus: DescribedGpus) -> WayPart:
    """Within a GPU each byte is read and written twice: into a bucket, and out of it."""
    num_bytes = version_bytes(config)
    if config.engine.shares_devices:
        words = "two copies in the GPU's memory, by CUDA IPC"
        return WayPart(words, num_bytes, gpus.kind.memory_speed / 4)
    if gpus.kind.nvlink_speed:
        return WayPart("NVLink, by CUDA IPC from GPU to GPU", num_bytes, gpus.kind.nvlink_speed)
    return WayPart("PCIe, by CUDA IPC from GPU to GPU", num_bytes, gpus.kind.pcie_speed)


# --- What it takes of the machines' own memory ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostNeed:
    """Memory of machines, or of their `/dev/shm`, that versions take on their way."""

    where: str
    what: str
    num_bytes: int


SHARED = "/dev/shm"
MEMORY = "memory"


def version_needs(config: Config, sizes: ModelSizes) -> Iterator[HostNeed]:
    """What versions take of the machines, in all machines together."""
    num_bytes = version_bytes(config)
    transport = config.weights.transport
    engines = num_engines(config.engine)
    published = published_bytes(config, sizes)
    if published:
        yield HostNeed(SHARED, "published versions", published)
    staged = staged_bytes(config, sizes)
    if staged:
        yield HostNeed(SHARED, "two folders for each server to load from", staged)
    if transport == "pull":
        yield HostNeed(SHARED, "a version, once on each machine with engines", num_bytes)
    if transport == "direct" and config.engine.device != "cpu":
        workers = num_workers_of_servers(config)
        yield HostNeed(
            MEMORY,
            "two versions in each worker of the servers, where its GPU has no room beside",
            2 * num_bytes * workers,
        )
    elif config.engine.kind != "embedded" and config.engine.device != "cpu":
        yield HostNeed(MEMORY, "a version on its way, beside each server", num_bytes * engines)
    if config.trainer.device != "cpu":
        loaded = num_models(config) * sizes.weight_bytes(config.model.dtype)
        words = "the whole model in the first trainer rank, at its start and its end"
        yield HostNeed(MEMORY, words, loaded)


def most_shared(config: Config, sizes: ModelSizes, *, engines_there: int) -> int:
    """The bytes that versions take of `/dev/shm` on one machine of a cluster, which has so many of
    the engines.
    """
    if not engines_there:
        return 0
    staged = staged_bytes(config, sizes) * engines_there // num_engines(config.engine)
    copied = version_bytes(config) if config.weights.transport == "pull" else 0
    return staged + copied


def num_workers_of_servers(config: Config) -> int:
    """The processes that compute for all servers, one on each of their GPUs."""
    engine = config.engine
    names = [f"engine{number}" for number in range(num_engines(engine))]
    return sum(server_size(engine, server_of(config, name)) for name in names)
