"""Records of the ids that truncation kept for each token. An engine packs them and a trainer reads
them.

A token sampled with top-p, top-k or min-p was drawn from the ids that these kept, renormalised. Its
probability under any other weights is comparable only over the same ids. So the ids travel with the
token.

A record begins with a byte that names one of two forms. The ids follow in ascending order. In the
first form they are the first id and the gaps between neighbours, seven bits to a byte, lowest
first, with the high bit set if another byte follows. In the second form, which is used if an eighth
of the vocabulary or more was kept, they are one bit for each id of the vocabulary. So a record has
at most 1 + V / 8 bytes. An empty record means that nothing was cut off.
"""

from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from midflight.types.names import Bool, UInt8

_GAPS: Final = 0
_BITS: Final = 1
_LONGEST: Final = 5
"""The most bytes of a gap, which have 35 bits."""

Ints = NDArray[np.int64]


def pack_kept(kept: Bool) -> list[bytes]:
    """One record for each row of [R, V]."""
    counts = kept.sum(1)
    is_wide = counts * 8 >= kept.shape[1]
    records = {row: _bits(kept[row]) for row in np.flatnonzero(is_wide).tolist()}
    narrow = np.flatnonzero(~is_wide)
    flat = np.flatnonzero(kept if len(narrow) == len(kept) else kept[narrow])
    offsets = np.searchsorted(flat, np.arange(len(narrow) + 1) * kept.shape[1])
    packed = _packed(flat % kept.shape[1], offsets)
    records |= dict(zip(narrow.tolist(), packed, strict=True))
    return [records[row] for row in range(len(kept))]


def _bits(kept: Bool) -> bytes:
    """The record of one row with a bit for each id."""
    if kept.all():
        return b""
    return bytes([_BITS]) + np.packbits(kept, bitorder="little").tobytes()


def _packed(ids: Ints, offsets: Ints) -> list[bytes]:
    """The records of gaps. Row r has `ids[offsets[r] : offsets[r + 1]]`, in ascending order."""
    first = offsets[:-1][np.diff(offsets) > 0]
    gaps = np.diff(ids, prepend=0)
    gaps[first] = ids[first]
    lengths = 1 + (gaps[:, None] >= 1 << 7 * np.arange(1, _LONGEST)).sum(1)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    written = np.zeros(int(ends[-1]), np.uint8)
    for i in range(int(lengths.max(initial=0))):
        has = lengths > i
        more = (lengths[has] > i + 1).astype(np.int64) << 7
        written[ends[:-1][has] + i] = (gaps[has] >> 7 * i & 127) | more
    data = written.tobytes()
    bounds = ends[offsets].tolist()
    return [bytes([_GAPS]) + data[begin:end] for begin, end in pairwise(bounds)]


def unpack_kept(data: UInt8, lengths: Ints) -> tuple[Ints, Ints]:
    """The ids of all records, which lie end to end in `data`, and the offsets of the records among
    them. The ids have shape [n] and ascend within a record; the offsets have shape [R + 1].

    Raises `ValueError` if the bytes are no such records.
    """
    ends = np.cumsum(lengths)
    if int(ends[-1] if len(ends) else 0) != len(data):
        raise ValueError(f"{len(data)} bytes for records of {int(lengths.sum())}")
    record = np.repeat(np.arange(len(lengths)), lengths)
    is_form = np.zeros(len(data), np.bool_)
    is_form[(ends - lengths)[lengths > 0]] = True
    forms = np.zeros(len(lengths), np.uint8)
    forms[record[is_form]] = data[is_form]
    if (forms > _BITS).any():
        raise ValueError(f"a record of form {forms.max()}")
    narrow = ~is_form & (forms[record] == _GAPS)
    owner, narrow_ids = _unpacked(data[narrow], record[narrow])
    bits = {
        wide: _set_bits(data[ends[wide] - lengths[wide] + 1 : ends[wide]])
        for wide in np.flatnonzero(forms == _BITS).tolist()
    }
    counts = np.bincount(owner, minlength=len(lengths))
    counts[list(bits)] = [len(ids) for ids in bits.values()]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    found = np.empty(int(offsets[-1]), np.int64)
    is_wide = np.zeros(len(lengths), np.bool_)
    is_wide[list(bits)] = True
    found[np.repeat(~is_wide, counts)] = narrow_ids
    for wide, ids in bits.items():
        found[offsets[wide] : offsets[wide + 1]] = ids
    return found, offsets


def kept_ids(data: UInt8, lengths: NDArray[np.integer[Any]]) -> list[list[int]]:
    """The ids of each record. The list is empty if nothing was cut off."""
    ids, offsets = unpack_kept(data, lengths.astype(np.int64))
    if not len(lengths):
        return []
    return [part.tolist() for part in np.split(ids, offsets[1:-1])]


def _set_bits(data: UInt8) -> Ints:
    return np.flatnonzero(np.unpackbits(data, bitorder="little"))


def _unpacked(data: UInt8, record: Ints) -> tuple[Ints, Ints]:
    """The record of each id, and the ids, from the bytes of their gaps."""
    last = np.flatnonzero(data < 128)
    if len(data) and (not len(last) or last[-1] != len(data) - 1):
        raise ValueError("a gap that does not end")
    first = np.concatenate([np.zeros(min(1, len(last)), np.int64), last[:-1] + 1])
    if (last - first >= _LONGEST).any() or (record[first] != record[last]).any():
        raise ValueError("a gap that does not end")
    place = np.arange(len(data)) - np.repeat(first, last - first + 1)
    gaps = np.zeros(0, np.int64)
    if len(first):
        gaps = np.add.reduceat((data & 127).astype(np.int64) << 7 * place, first)
    owner = record[last]
    total = np.cumsum(gaps)
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    before = np.repeat((total - gaps)[begins], np.diff(np.append(begins, len(owner))))
    return owner, total - before
