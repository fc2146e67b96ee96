"""The trainer's end of the pull transport: each rank keeps what it has of a version in buffers of
its own, hashes it and gives it away.

Nothing is put together on the first rank: FSDP2 gives each rank rows of every tensor, which lie in
one piece of the whole tensor's bytes.
"""

import mmap
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Self

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from midflight.errors import ConfigError
from midflight.models.names import dtype_name
from midflight.models.sizes import piece_digest
from midflight.types import TensorSpec, Version, WeightManifest
from midflight.weights.manifest import MAX_HELD, aligned, layout
from midflight.weights.transports.publish import StandingBuffers
from midflight.weights.transports.sharing import BucketServer, SharedVersion
from midflight.weights.transports.swarm import TRANSPORT, Bucket, Leaf, Views, bucketed, cut, root


class _Mine(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others: where its buckets are asked for, and which they are."""

    url: str
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class _OwnPart:
    """What this rank has of a tensor, and where in its buffer."""

    tensor: int
    spec: TensorSpec
    dtype: torch.dtype
    """As it is served."""
    values: Tensor
    start: int
    stop: int
    """In bytes, of the tensor."""
    offset: int


def alone(told: bytes) -> list[bytes]:
    """Of a trainer of one rank."""
    return [told]


class PullPublisher:
    """Versions wait in standing buffers until their release; whoever knows the address in the
    manifest takes buckets of them. `publish` waits for no receiver. Beside the buffers it takes no
    memory on a CPU, and a piece (`PIECE`) where tensors come from a GPU.
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
        """`host`: the address of this machine that engines reach it by; it listens there only.
        `dtype`: floating-point tensors are served in it, by default as they are. `gather` tells all
        ranks what each says, in the order of ranks; with several all of them publish."""
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

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """One copy of each tensor that is here, piece by piece, and of each piece its hash. With
        several ranks a collective, of hashes only.
        """
        specs = layout(
            (name, dtype_name(self._served(t)), tuple(t.shape)) for name, t in tensors.items()
        )
        stretches = list(self._here(specs, tensors))
        buffer = self._buffers.take(
            version,
            stretches[-1].offset + stretches[-1].stop - stretches[-1].start if stretches else 0,
        )
        pieces = [piece for stretch in stretches for piece in _pieces(stretch)]
        with ThreadPoolExecutor(self._threads, "weights-copy") as pool:
            leaves = list(pool.map(partial(_copied, buffer), pieces))
        self._buffers.hold(version, buffer)
        mine = tuple(bucketed(leaves))
        told = self._gather(msgspec.msgpack.encode(_Mine(self.server.url, mine)))
        everybody = [msgspec.msgpack.decode(each, type=_Mine) for each in told]
        tree = tuple(bucket for rank in everybody for bucket in rank.buckets)
        fingerprint = self._fingerprints[version] = root(tree, specs)
        first = sum(len(rank.buckets) for rank in everybody[: self._rank])
        views: list[Views | None] = [None] * len(tree)
        views[first : first + len(mine)] = _views(memoryview(buffer), mine, stretches)
        self.server.shares[fingerprint] = SharedVersion(
            tree, views, set(range(first, first + len(mine)))
        )
        return WeightManifest(
            version, fingerprint, TRANSPORT, " ".join(rank.url for rank in everybody), specs
        )

    def release(self, version: Version) -> None:
        """Skipped steps give the same weights another number: they are given away until the last is
        released.
        """
        self._buffers.release(version)
        fingerprint = self._fingerprints.pop(version, None)
        if fingerprint is not None and fingerprint not in self._fingerprints.values():
            self.server.shares.pop(fingerprint, None)

    def close(self) -> None:
        self.server.close()
        self._fingerprints.clear()
        self._buffers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _served(self, tensor: Tensor) -> torch.dtype:
        return (
            self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        )

    def _here(
        self, specs: tuple[TensorSpec, ...], tensors: Mapping[str, Tensor]
    ) -> Iterator[_OwnPart]:
        """What this rank has: of a sharded tensor its rows, of any other everything if it is the
        first.
        """
        offset = 0
        for number, (spec, tensor) in enumerate(zip(specs, tensors.values(), strict=True)):
            values, row = _rows(tensor, spec.name) if isinstance(tensor, DTensor) else (tensor, 0)
            if values.numel() == 0 or (self._rank and not isinstance(tensor, DTensor)):
                continue
            start = row * (spec.num_bytes // max(1, spec.shape[0] if spec.shape else 1))
            size = values.numel() * (dtype := self._served(tensor)).itemsize
            yield _OwnPart(
                number, spec, dtype, values.detach().reshape(-1), start, start + size, offset
            )
            offset = aligned(offset + size)


def _rows(tensor: DTensor, name: str) -> tuple[Tensor, int]:
    """This rank's rows, and the number of the first. Ranks have equal numbers of rows but for the
    last ones, which have fewer or none.
    """
    placement = tensor.placements[0]
    if not isinstance(placement, Shard) or placement.dim != 0 or tensor.device_mesh.ndim != 1:
        raise ConfigError(
            f"publishing {name!r}: ranks have it as {tensor.placements}, not by rows; set "
            "weights.transport to collective."
        )
    each = -(-tensor.shape[0] // tensor.device_mesh.size())
    return tensor.to_local(), min(tensor.device_mesh.get_local_rank() * each, tensor.shape[0])


def _pieces(stretch: _OwnPart) -> Iterator[tuple[_OwnPart, int, int]]:
    return (
        (stretch, start, stop)
        for _, start, stop in cut(stretch.tensor, stretch.start, stretch.stop)
    )


@torch.no_grad()
def _copied(buffer: mmap.mmap, piece: tuple[_OwnPart, int, int]) -> Leaf:
    """Copies a piece, and hashes it while it is in the cache."""
    stretch, start, stop = piece
    width = stretch.dtype.itemsize
    at = stretch.offset + start - stretch.start
    values = stretch.values[(start - stretch.start) // width : (stop - stretch.start) // width]
    torch.frombuffer(buffer, dtype=stretch.dtype, count=len(values), offset=at).copy_(values)
    with memoryview(buffer)[at : at + stop - start] as copied:
        return Leaf(stretch.tensor, start, stop, piece_digest(copied))


def _views(
    buffer: memoryview, buckets: tuple[Bucket, ...], stretches: list[_OwnPart]
) -> list[Views]:
    places = {stretch.tensor: stretch.offset - stretch.start for stretch in stretches}
    return [
        tuple(
            buffer[places[leaf.tensor] + leaf.start : places[leaf.tensor] + leaf.stop]
            for leaf in bucket
        )
        for bucket in buckets
    ]
