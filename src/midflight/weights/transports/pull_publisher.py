"""The trainer's end of the pull transport. Each rank keeps its part of a version in buffers of its
own, hashes it and gives it away.

Nothing is put together on the first rank. FSDP2 gives each rank rows of every tensor, which lie in
one piece of the whole tensor's bytes.
"""

import itertools
import mmap
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from midflight.errors import ConfigError
from midflight.models.names import dtype_name
from midflight.models.rank_rows import own_rows
from midflight.models.sizes import piece_digest
from midflight.types import TensorSpec, Version, WeightManifest
from midflight.weights.manifest import MAX_HELD, aligned, layout
from midflight.weights.transports.bucket_server import BucketServer, SharedVersion
from midflight.weights.transports.buffers import StandingBuffers
from midflight.weights.transports.kinds import PULL
from midflight.weights.transports.publisher import Fill, Publisher, copied, filled
from midflight.weights.transports.swarm import Bucket, Leaf, Views, bucketed, cut, root


class _RankBuckets(msgspec.Struct, frozen=True, array_like=True):
    """A rank's message to the others: the address that gives its buckets, and the list of them."""

    url: str
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class _OwnPart:
    """The part of a tensor that this rank has, and its place in the buffer."""

    tensor: int
    spec: TensorSpec
    dtype: torch.dtype
    """The dtype in which the tensor is served."""
    values: Tensor
    start: int
    stop: int
    """Both in bytes of the tensor."""
    offset: int
    """In bytes of the buffer."""


def alone(told: bytes) -> list[bytes]:
    """The `gather` of a trainer of one rank."""
    return [told]


class PullPublisher(Publisher):
    """Keeps versions in buffers until their release. Any receiver that knows the address in the
    manifest takes buckets of them. `publish` waits for no receiver. Beside the buffers it takes no
    memory on a CPU, and a piece (`PIECE`) if tensors come from a GPU.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        num_slots: int = MAX_HELD,
        threads: int = 1,
        dtype: torch.dtype | None = None,
        rank: int = 0,
        gather: Callable[[bytes], list[bytes]] = alone,
    ) -> None:
        """`host` is the address of this machine by which engines reach it; it listens there only.
        Floating-point tensors are served in `dtype`, by default as they are. `gather` gives each
        rank the messages of all ranks, in the order of ranks. With several ranks all of them
        publish.
        """
        self._threads = threads
        self._dtype = dtype
        self._rank = rank
        self._gather = gather
        self._buffers = StandingBuffers(num_slots)
        self._fingerprints: dict[Version, str] = {}
        try:
            self.server = BucketServer(host, secret=secrets.token_hex(16))
        except OSError as error:
            raise ConfigError(
                f"publishing weights: cannot listen on {host!r} ({error}); name an address of this "
                "machine."
            ) from error

    def publish(
        self, version: Version, tensors: Mapping[str, Tensor], fill: Fill = copied
    ) -> WeightManifest:
        """Copies each tensor that is here once, piece by piece, and hashes each piece. With several
        ranks it is a collective, of hashes only.
        """
        if fill is not copied:
            tensors = filled(tensors, fill)
        specs = layout(
            (name, dtype_name(self._served(t)), tuple(t.shape)) for name, t in tensors.items()
        )
        stretches = list(self._here(specs, tensors))
        num_bytes = 0
        if stretches:
            last = stretches[-1]
            num_bytes = last.offset + last.stop - last.start
        buffer = self._buffers.take(version, num_bytes)
        pieces: list[tuple[_OwnPart, int, int]] = []
        for stretch in stretches:
            for start, stop in cut(stretch.start, stretch.stop):
                pieces.append((stretch, start, stop))
        with ThreadPoolExecutor(self._threads, "weights-copy") as pool:
            leaves = list(pool.map(partial(_copied, buffer), pieces))
        self._buffers.hold(version, buffer)
        mine = tuple(bucketed(leaves))
        told = self._gather(msgspec.msgpack.encode(_RankBuckets(self.server.url, mine)))
        everybody = [msgspec.msgpack.decode(each, type=_RankBuckets) for each in told]
        tree = tuple(itertools.chain.from_iterable(rank.buckets for rank in everybody))
        fingerprint = root(tree, specs)
        self._fingerprints[version] = fingerprint
        first = sum(len(rank.buckets) for rank in everybody[: self._rank])
        end = first + len(mine)
        views: list[Views | None] = [None] * len(tree)
        views[first:end] = _views(memoryview(buffer), mine, stretches)
        self.server.shares[fingerprint] = SharedVersion(tree, views, set(range(first, end)))
        location = " ".join(rank.url for rank in everybody)
        return WeightManifest(version, fingerprint, PULL, location, specs)

    def release(self, version: Version) -> None:
        """See `Publisher`. Skipped steps give the same weights another number. Such weights are
        given away until the last of their numbers is released.
        """
        self._buffers.release(version)
        fingerprint = self._fingerprints.pop(version, None)
        if fingerprint is not None and fingerprint not in self._fingerprints.values():
            self.server.shares.pop(fingerprint, None)

    def close(self) -> None:
        self.server.close()
        self._fingerprints.clear()
        self._buffers.clear()

    def _served(self, tensor: Tensor) -> torch.dtype:
        """The dtype in which the tensor is served."""
        if self._dtype is not None and tensor.is_floating_point():
            return self._dtype
        return tensor.dtype

    def _here(
        self, specs: tuple[TensorSpec, ...], tensors: Mapping[str, Tensor]
    ) -> Iterator[_OwnPart]:
        """The parts that this rank has: the rows of a sharded tensor, and the whole of any other if
        this rank is the first.
        """
        offset = 0
        for number, (spec, tensor) in enumerate(zip(specs, tensors.values(), strict=True)):
            if isinstance(tensor, DTensor):
                values, row = own_rows(tensor, spec.name)
            elif self._rank:
                continue
            else:
                values = tensor
                row = 0
            if values.numel() == 0:
                continue
            num_rows = max(1, spec.shape[0]) if spec.shape else 1
            start = row * (spec.num_bytes // num_rows)
            dtype = self._served(tensor)
            size = values.numel() * dtype.itemsize
            yield _OwnPart(
                tensor=number,
                spec=spec,
                dtype=dtype,
                values=values.detach().reshape(-1),
                start=start,
                stop=start + size,
                offset=offset,
            )
            offset = aligned(offset + size)


@torch.no_grad()
def _copied(buffer: mmap.mmap, piece: tuple[_OwnPart, int, int]) -> Leaf:
    """Copies a piece, and hashes it while it is in the cache."""
    stretch, start, stop = piece
    width = stretch.dtype.itemsize
    at = stretch.offset + start - stretch.start
    first = (start - stretch.start) // width
    end = (stop - stretch.start) // width
    values = stretch.values[first:end]
    torch.frombuffer(buffer, dtype=stretch.dtype, count=len(values), offset=at).copy_(values)
    with memoryview(buffer)[at : at + stop - start] as copied:
        return Leaf(stretch.tensor, start, stop, piece_digest(copied))


def _views(
    buffer: memoryview, buckets: tuple[Bucket, ...], stretches: list[_OwnPart]
) -> list[Views]:
    """The leaves of each bucket, in the buffer."""
    places = {stretch.tensor: stretch.offset - stretch.start for stretch in stretches}
    found: list[Views] = []
    for bucket in buckets:
        leaves: list[memoryview] = []
        for leaf in bucket:
            place = places[leaf.tensor]
            leaves.append(buffer[place + leaf.start : place + leaf.stop])
        found.append(tuple(leaves))
    return found
