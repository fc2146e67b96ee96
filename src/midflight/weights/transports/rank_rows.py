"""Versions of a trainer of several ranks that go from the ranks' own memory to servers' workers: each
rank keeps its rows, and a version is put together bucket by bucket, on the first rank's device, while
it is sent. No rank ever has all of it. Untested on a GPU.

A bucket goes between the ranks in a group of its own, beside the steps of the trainer. The workers that
wait for it are in a pause, so that none of them keeps a rank from its step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from midflight.models.names import dtype_name
from midflight.models.rank_rows import own_rows
from midflight.models.sizes import BUCKET_BYTES
from midflight.types import Meeting, TensorSpec, Version, WeightManifest
from midflight.weights.device_digest import WORD, lanes, words
from midflight.weights.manifest import MAX_HELD, aligned, extent, layout
from midflight.weights.transports.broadcast import CPU, BroadcastPublisher, use_device
from midflight.weights.transports.device_versions import DeviceBuffer, total_fingerprint
from midflight.weights.transports.publisher import Fill, Publisher, check_slot, copied, filled
from midflight.weights.transports.rendezvous import packs

PATIENCE = timedelta(days=7)
"""A rank may wait so long for the next order. The death of the first one closes the connection."""
END = -1
"""The order that ends a rank's thread, in the place of a version."""


class _HashedStretch(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of a tensor that a rank keeps, and their part of its digest."""

    tensor: int
    start: int
    stop: int
    lanes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _VersionRows:
    """The rows of a version that this rank keeps."""

    data: Tensor
    """uint8, on the rank's device, or in host memory if that has no room"""
    places: Mapping[int, slice]
    """The place of a tensor's rows in `data`, by the number of the tensor."""


class RankRowsPublisher(Publisher):
    """Each rank has one, and all of them publish together. The first answers engines.

    | loop | consumes | waits for | unblocked by |
    |---|---|---|---|
    | `_follow` (each rank but the first) | orders to send | the next one | the first rank |
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        rank: int,
        gather: Callable[[bytes], list[bytes]],
        device: torch.device = CPU,
        backend: str = "gloo",
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        deadline_seconds: float = 10.0,
        quiet_seconds: float = 0.05,
    ) -> None:
        """A collective. `gather` gives each rank the messages of all, in the order of ranks.
        `backend` is that of the group in which buckets are put together, for tensors of the CPU
        and of `device`, as `torch.distributed` names it. Floating-point tensors are served in
        `dtype`, by default as they are.
        """
        self._rank = rank
        self._gather = gather
        self.device = device
        self._dtype = dtype
        group = dist.new_group(backend=backend, timeout=PATIENCE)
        assert isinstance(group, dist.ProcessGroup), "every rank is in it"
        self._group = group
        self._room = DeviceBuffer(device)
        self._held: dict[Version, _VersionRows] = {}
        self._free: list[Tensor] = []
        self._last: _VersionRows | None = None
        """The rows of the newest version."""
        self._specs: tuple[TensorSpec, ...] = ()
        self._kept: Sequence[Sequence[_HashedStretch]] = ()
        """The stretches of tensors that each rank keeps. They are the same in all versions."""
        self._sender: BroadcastPublisher | None = None
        if rank == 0:
            self._sender = BroadcastPublisher(
                host,
                device=device,
                bucket_bytes=bucket_bytes,
                deadline_seconds=deadline_seconds,
                quiet_seconds=quiet_seconds,
            )
        else:
            Thread(target=self._follow, name="weights-rows", daemon=True).start()

    # --- Publishing -------------------------------------------------------------------------------

    @torch.no_grad()
    def publish(
        self, version: Version, tensors: Mapping[str, Tensor], fill: Fill = copied
    ) -> WeightManifest:
        """A collective of all ranks, of hashes and of the few tensors that are not cut at words of
        8 bytes. The manifest of another rank than the first has no location.
        """
        if fill is not copied:
            tensors = filled(tensors, fill)
        check_slot(version, self._held, num_slots=MAX_HELD)
        served = [(name, self._served(tensor), tensor) for name, tensor in tensors.items()]
        specs = layout((name, dtype_name(dtype), tuple(t.shape)) for name, dtype, t in served)
        dtypes = [dtype for _, dtype, _ in served]
        here = list(self._here(specs, tensors))
        rows = self._own_rows(here, dtypes)
        starts = {number: start for number, start, _ in here}
        everybody = self._gather(msgspec.msgpack.encode(_hashed(rows, starts)))
        kept = [msgspec.msgpack.decode(each, type=list[_HashedStretch]) for each in everybody]
        digest = total_fingerprint(specs, _digests(specs, kept))
        self._specs = specs
        self._kept = kept
        self._held[version] = rows
        self._last = rows
        if self._sender is None:
            return WeightManifest(version, digest, "direct", "", specs)
        return self._sender.hold(version, _RankedVersion(self, version, digest, specs))

    def release(self, version: Version) -> None:
        rows = self._held.pop(version, None)
        if rows is not None:
            self._free.append(rows.data)
        if self._sender is not None:
            self._sender.release(version)

    def close(self) -> None:
        """Ends the threads of the other ranks too."""
        if self._sender is not None:
            self._sender.close()
            with suppress(RuntimeError):  # they have ended
                self.order(END, 0)
        self._held.clear()
        self._free.clear()

    def _served(self, tensor: Tensor) -> torch.dtype:
        if self._dtype is not None and tensor.is_floating_point():
            return self._dtype
        return tensor.dtype

    def _here(
        self, specs: Sequence[TensorSpec], tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[int, int, Tensor]]:
        """The number of each tensor of which this rank keeps something, the first byte that it
        keeps, and its numbers. Rows that are no whole words of a digest are kept by the first rank
        together, as are tensors that all ranks have.
        """
        for number, (spec, tensor) in enumerate(zip(specs, tensors.values(), strict=True)):
            start = 0
            values = tensor
            keeps = self._rank == 0
            if isinstance(tensor, DTensor):
                bytes_of_row = spec.num_bytes // max(1, spec.shape[0])
                if bytes_of_row % WORD == 0:
                    values, row = own_rows(tensor, spec.name)
                    start = row * bytes_of_row
                    keeps = True
                else:
                    values = tensor.full_tensor()
            if keeps and values.numel():
                yield number, start, values.detach().reshape(-1)

    def _own_rows(
        self, here: Sequence[tuple[int, int, Tensor]], dtypes: Sequence[torch.dtype]
    ) -> _VersionRows:
        places: dict[int, slice] = {}
        end = 0
        for number, _, values in here:
            size = values.numel() * dtypes[number].itemsize
            places[number] = slice(end, end + size)
            end = aligned(end + size)
        on = self.device if self._room.fits(end) else CPU
        data = next((each for each in self._free if len(each) == end), None)
        if data is None:
            data = torch.empty(end, dtype=torch.uint8, device=on)
        self._free.clear()
        for number, _, values in here:
            data[places[number]].view(dtypes[number]).copy_(values)
        return _VersionRows(data, places)

    # --- Sending ----------------------------------------------------------------------------------

    def order(self, version: Version, bucket_bytes: int) -> None:
        """Tells the other ranks to send their rows of a version to this one, the first."""
        dist.broadcast(torch.tensor([version, bucket_bytes]), 0, group=self._group)

    def buckets(
        self, version: Version, specs: Sequence[TensorSpec], bucket_bytes: int
    ) -> Generator[tuple[Sequence[TensorSpec], Tensor]]:
        """Yields each bucket of whole tensors, on the first rank's device. All buckets come, even
        if nobody wants the last.
        """
        self.order(version, bucket_bytes)
        numbers = {spec.name: number for number, spec in enumerate(specs)}
        rows = self._rows_of(version)
        coming = packs(specs, bucket_bytes)
        try:
            for pack in coming:
                yield pack, self._together(rows, pack, [numbers[spec.name] for spec in pack])
        finally:
            for pack in coming:
                self._together(rows, pack, [numbers[spec.name] for spec in pack])

    def _together(
        self, rows: _VersionRows, pack: Sequence[TensorSpec], numbers: Sequence[int]
    ) -> Tensor:
        """A bucket, of which each rank gives its rows."""
        whole = torch.empty(
            sum(spec.num_bytes for spec in pack), dtype=torch.uint8, device=self.device
        )
        begins: dict[int, int] = {}
        end = 0
        for number, spec in zip(numbers, pack, strict=True):
            begins[number] = end
            end += spec.num_bytes
        for rank, kept in enumerate(self._kept):
            wanted = {each.tensor: each for each in kept if each.tensor in begins}
            stretches = [wanted[number] for number in numbers if number in wanted]
            got = self._mine(rows, numbers) if rank == 0 else self._from(rank, stretches)
            at = 0
            for each in stretches:
                size = each.stop - each.start
                start = begins[each.tensor] + each.start
                whole[start : start + size].copy_(got[at : at + size])
                at += size
        return whole

    def _from(self, rank: int, stretches: Sequence[_HashedStretch]) -> Tensor:
        size = sum(each.stop - each.start for each in stretches)
        got = torch.empty(size, dtype=torch.uint8, device=self.device)
        if size:
            dist.recv(got, src=rank, group=self._group)
        return got

    def _mine(self, rows: _VersionRows, numbers: Sequence[int]) -> Tensor:
        """This rank's rows of these tensors, one after the other, on its device."""
        parts = [rows.data[rows.places[number]] for number in numbers if number in rows.places]
        if not parts:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.cat(parts).to(self.device)

    def _rows_of(self, version: Version) -> _VersionRows:
        """The rows of a version. Of one that this rank has released it has others of the same
        shape: nobody will serve them, because the first rank says so at the end.
        """
        rows = self._held.get(version, self._last)
        assert rows is not None, "a version is published before it is sent"
        return rows

    @torch.no_grad()
    def _follow(self) -> None:
        use_device(self.device)
        told = torch.zeros(2, dtype=torch.int64)
        with suppress(RuntimeError):  # the first rank has ended, which the trainer says
            while True:
                dist.broadcast(told, 0, group=self._group)
                version, bucket_bytes = told.tolist()
                if version == END:
                    return
                rows = self._rows_of(version)
                numbers = {spec.name: number for number, spec in enumerate(self._specs)}
                for pack in packs(self._specs, bucket_bytes):
                    mine = self._mine(rows, [numbers[spec.name] for spec in pack])
                    if len(mine):
                        dist.send(mine, dst=0, group=self._group)


@dataclass(frozen=True, slots=True)
class _RankedVersion:
    """Implements `OutgoingVersion`, on the first rank."""

    rows: RankRowsPublisher
    version: Version
    fingerprint: str
    tensors: tuple[TensorSpec, ...]

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def parts(self, meets: Meeting, bucket_bytes: int) -> Generator[Tensor]:
        with closing(self.rows.buckets(self.version, self.tensors, bucket_bytes)) as coming:
            if meets == "plugin":
                yield from _slices(coming, extent(self.tensors), bucket_bytes, self.device)
                return
            for _, bucket in coming:
                yield bucket


def _hashed(rows: _VersionRows, starts: Mapping[int, int]) -> list[_HashedStretch]:
    """Hashes the stretches that a rank keeps. `starts` has the first byte of each, by the number of
    its tensor. Waits for the device once.
    """
    if not starts:
        return []
    found = [
        lanes(rows.data[rows.places[number]], first=start // WORD)
        for number, start in starts.items()
    ]
    told: list[_HashedStretch] = []
    for (number, start), (one, other) in zip(
        starts.items(), torch.stack(found).tolist(), strict=True
    ):
        place = rows.places[number]
        told.append(_HashedStretch(number, start, start + place.stop - place.start, (one, other)))
    return told


def _slices(
    buckets: Iterator[tuple[Sequence[TensorSpec], Tensor]],
    num_bytes: int,
    bucket_bytes: int,
    device: torch.device,
) -> Iterator[Tensor]:
    """The same bytes as slices of a version whose tensors lie at their offsets."""

    def room(start: int) -> Tensor:
        size = min(bucket_bytes, num_bytes - start)
        return torch.zeros(size, dtype=torch.uint8, device=device)

    start = 0
    piece = room(start)
    for pack, bucket in buckets:
        left = bucket
        for spec in pack:
            tensor = left[: spec.num_bytes]
            left = left[spec.num_bytes :]
            at = spec.offset
            while len(tensor):
                while at >= start + bucket_bytes:
                    yield piece
                    start += bucket_bytes
                    piece = room(start)
                fits = min(len(tensor), start + bucket_bytes - at)
                piece[at - start : at - start + fits].copy_(tensor[:fits])
                tensor = tensor[fits:]
                at += fits
    if len(piece):
        yield piece


def _digests(
    specs: Sequence[TensorSpec], kept: Sequence[Sequence[_HashedStretch]]
) -> Mapping[str, str]:
    """The digest of each tensor, by its name: lanes of its parts are added."""
    sums = [[0, 0] for _ in specs]
    for stretches in kept:
        for each in stretches:
            sums[each.tensor][0] += each.lanes[0]
            sums[each.tensor][1] += each.lanes[1]
    return {
        spec.name: words(one, other, spec.num_bytes)
        for spec, (one, other) in zip(specs, sums, strict=True)
    }
