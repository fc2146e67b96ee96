"""Tensors that ranks share by rows, put together in the first rank's host memory, and spread from
there. Both go bucket by bucket, so that no rank's device ever has more than a bucket of another
rank's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from midflight.models.rank_rows import rows_of
from midflight.trainer.model.ranks import Ranks

BUCKET_BYTES = 64 * 2**20
"""The most bytes that a transfer keeps on the device of a rank. It is large enough that a call costs
nothing beside its bytes.
"""


@torch.no_grad()
def collect(
    tensors: Mapping[str, Tensor],
    into: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Copies each tensor into the host tensor of its name, whole. A collective: all ranks call it
    with their own `tensors`, in the same order.

    `into` are contiguous tensors of the whole shapes on the first rank, and empty on the others.
    Floating-point numbers are sent in `dtype`, by default as they are. Tensors that every rank has
    whole are copied from the first.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            sent = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            for part in _parts(tensor, name, ranks, dtype=sent, bucket_bytes=bucket_bytes):
                part.gather(into.get(name))
        elif ranks.is_first:
            into[name].copy_(tensor)


@torch.no_grad()
def spread(
    tensors: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Fills each rank's rows with those of the whole tensors, which the first rank has. Tensors that
    are not shared become the first rank's. A collective, as `collect` is.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            parts = _parts(tensor, name, ranks, dtype=tensor.dtype, bucket_bytes=bucket_bytes)
            for part in parts:
                part.scatter(whole.get(name))
        elif tensor.numel():
            flat = tensor.reshape(-1).contiguous()
            dist.broadcast(_raw(flat), 0)
            tensor.copy_(flat.view(tensor.shape))


class _RankNumbers:
    """The numbers [start, start + each) of every rank's rows, in the order in which they lie in
    memory. `mine` is a piece of this rank's rows.
    """

    def __init__(
        self,
        mine: Tensor,
        at: list[tuple[int, int]],
        ranks: Ranks,
        *,
        each: int,
        dtype: torch.dtype,
    ) -> None:
        """`at` has the place of each rank's numbers in the whole tensor: where they begin, and how
        many there are. Every rank sends and gets `each` numbers, the last of which may mean
        nothing.
        """
        self._mine = mine
        self._at = at
        self._ranks = ranks
        self._each = each
        self._dtype = dtype

    def gather(self, into: Tensor | None) -> None:
        sent = self._room()
        sent[: len(self._mine)].copy_(self._mine)
        if not self._ranks.is_first:
            dist.gather(_raw(sent), None, dst=0)
            return
        got = [self._room() for _ in self._at]
        dist.gather(_raw(sent), [_raw(each) for each in got], dst=0)
        if into is None:
            return
        flat = into.view(-1)
        for (start, count), numbers in zip(self._at, got, strict=True):
            flat[start : start + count].copy_(numbers[:count])

    def scatter(self, whole: Tensor | None) -> None:
        got = self._room()
        if self._ranks.is_first:
            assert whole is not None, "the first rank has every tensor"
            flat = whole.reshape(-1)
            sent = [self._room() for _ in self._at]
            for (start, count), numbers in zip(self._at, sent, strict=True):
                numbers[:count].copy_(flat[start : start + count])
            dist.scatter(_raw(got), [_raw(each) for each in sent], src=0)
        else:
            dist.scatter(_raw(got), None, src=0)
        self._mine.copy_(got[: len(self._mine)])

    def _room(self) -> Tensor:
        return torch.empty(self._each, dtype=self._dtype, device=self._mine.device)


def _parts(
    tensor: DTensor, name: str, ranks: Ranks, *, dtype: torch.dtype, bucket_bytes: int
) -> Iterator[_RankNumbers]:
    """The parts of a tensor, each of which takes at most a bucket on the first rank: its own numbers
    once, and those of all ranks once.
    """
    width = tensor.numel() // max(1, tensor.shape[0])
    spans = [rows_of(tensor, name, rank) for rank in range(ranks.size)]
    local = tensor.to_local().view(-1)
    longest = (spans[0][1] - spans[0][0]) * width
    each = max(1, bucket_bytes // ((ranks.size + 1) * dtype.itemsize))
    each = min(each, longest)
    for start in range(0, longest, max(1, each)):
        at: list[tuple[int, int]] = []
        for first, end in spans:
            left = max(0, (end - first) * width - start)
            at.append((first * width + start, min(each, left)))
        yield _RankNumbers(local[start : start + each], at, ranks, each=each, dtype=dtype)


def _raw(flat: Tensor) -> Tensor:
    """The bytes of a tensor in one dimension, because backends do not send every dtype."""
    return flat.view(torch.uint8)
