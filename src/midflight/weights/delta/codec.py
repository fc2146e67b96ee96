"""The difference of two sets of words as bytes, and back, bit for bit. NumPy and zlib; needs no torch.

Weights are words of 1, 2, 4 or 8 bytes. What a step changes in a word is small beside the word, so a difference is taken as between
integers (mod 2^bits), folded so that small ones of either sign are small (0, -1, 1, -2, ... become 0, 1, 2, 3, ...), and laid out in
planes: all lowest bytes, then all second ones, and so on, of which the upper are nearly always zeros.

    payload = for each tensor, for each BLOCK of its words: frame
    frame   = count                                   uint32; 0: nothing changed, and the frame ends here
              length of gaps, length of each plane    uint32 each
              gaps                                    where the changed words are, deflated; none if count is the whole block
              planes                                  of `count` folded differences: no bytes: zeros; `count` bytes: as they are; else deflated

The planes' compressor looks for runs only (Z_RLE): on differences of AdamW steps it was smaller than zlib's and zstandard's
searches for repeated strings, at 0.2 to 9 GB of weights per second, where hashing them makes 1.7 (see benchmarks/delta.py).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
"""One-dimensional, of unsigned integers."""

BLOCK = 1 << 18
"""Words of a frame: what is worked on fits a processor's cache, and bounds the scratch memory of both ends to some megabytes."""

DENSE = 0.5
"""Share of changed words above which their positions cost more than the zeros in between."""

_SAMPLE = 1 << 12
"""Bytes of a plane that are tried first: what cannot be compressed is copied, at a hundredth of the time."""


def encode(old: memoryview, new: memoryview, *, width: int) -> Iterator[bytes]:
    """The frames that turn `old` into `new`, one by one; both have the same length, in words of `width` bytes."""
    before, after = _words(old, width), _words(new, width)
    for start in range(0, before.size, BLOCK):
        yield _frame(before[start : start + BLOCK], after[start : start + BLOCK])


class Frames:
    """Reads a payload from its beginning to its end. Whatever the bytes are, all that happens is `ValueError`, or wrong words:
    memory is set aside for words that the caller has, never for what the bytes claim."""

    def __init__(self, payload: memoryview) -> None:
        self._left = payload

    def apply(self, onto: memoryview, *, width: int) -> None:
        """Changes the next tensor's bytes in place."""
        words = _words(onto, width)
        for start in range(0, words.size, BLOCK):
            self._change(words[start : start + BLOCK])

    def end(self) -> None:
        if self._left:
            raise ValueError(f"{len(self._left)} bytes are left over")

    def _change(self, words: Words) -> None:
        (count,) = self._numbers(1)
        if count == 0:
            return
        if count > words.size:
            raise ValueError(f"{count} changes of {words.size} words")
        gaps, *planes = self._numbers(1 + words.itemsize)
        where = slice(None) if count == words.size else _positions(self._take(gaps), count, words.size)
        words[where] += self._differences(planes, count, words.dtype)

    def _differences(self, lengths: tuple[int, ...] | list[int], count: int, dtype: np.dtype[Any]) -> Words:
        planes = np.zeros((count, len(lengths)), np.uint8)
        for i, length in enumerate(lengths):
            if length:
                data = self._take(length)
                planes[:, i] = np.frombuffer(data if length == count else _inflated(data, count, exactly=True), np.uint8)
        return _unfolded(planes.view(dtype).reshape(-1))

    def _numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self._take(4 * count))

    def _take(self, length: int) -> memoryview:
        if length > len(self._left):
            raise ValueError("it ends within a frame")
        taken, self._left = self._left[:length], self._left[length:]
        return taken


def _frame(before: Words, after: Words) -> bytes:
    where = np.flatnonzero(before != after)
    if not where.size:
        return bytes(4)
    if where.size > DENSE * before.size:
        gaps, folded = b"", _folded(after - before)
    else:
        gaps, folded = _deflated(_gaps(where)), _folded(after[where] - before[where])
    planes = [_plane(p) for p in np.ascontiguousarray(folded.view(np.uint8).reshape(-1, before.itemsize).T)]
    return b"".join([struct.pack(f"<{2 + len(planes)}I", folded.size, len(gaps), *map(len, planes)), gaps, *planes])


def _plane(values: NDArray[np.uint8]) -> bytes:
    if not values.any():
        return b""
    raw = values.tobytes()
    if len(raw) > _SAMPLE and len(_deflated(raw[:_SAMPLE])) > 0.97 * _SAMPLE:
        return raw
    packed = _deflated(raw)
    return packed if len(packed) < len(raw) else raw


# --- Positions: bytes that add up to them. 255 means: go on adding ---------------------------------------------------


def _gaps(where: NDArray[np.int64]) -> bytes:
    """At most one byte for each position, and one for each 255 words."""
    gaps = np.diff(where.astype(np.int32), prepend=np.int32(0))
    whole = gaps // 255
    ends = np.cumsum(whole + 1)
    found = np.full(int(ends[-1]), 255, np.uint8)
    found[ends - 1] = gaps - 255 * whole
    return found.tobytes()


def _positions(data: memoryview, count: int, num_words: int) -> NDArray[np.int64]:
    gaps = np.frombuffer(_inflated(data, count + num_words // 255), np.uint8)
    where = np.cumsum(gaps, dtype=np.int64)[gaps != 255]
    if where.size != count or where[-1] >= num_words:
        raise ValueError(f"{where.size} positions for {count} changes of {num_words} words")
    return where


# --- Numbers and bytes -----------------------------------------------------------------------------------------------


def _words(data: memoryview, width: int) -> Words:
    return np.frombuffer(data, np.dtype(f"<u{width}"))


def _folded(differences: Words) -> Words:
    """Zigzag: the sign goes to the lowest bit. Overflow is meant: words wrap."""
    return (differences << 1) ^ np.negative(differences >> (8 * differences.itemsize - 1))


def _unfolded(folded: Words) -> Words:
    return (folded >> 1) ^ np.negative(folded & 1)


def _deflated(data: bytes) -> bytes:
    """Without a checksum: the fingerprint of the result is verified anyway."""
    made = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    return made.compress(data) + made.flush()


def _inflated(data: memoryview, limit: int, *, exactly: bool = False) -> bytes:
    """At most `limit` bytes, whatever the data claims to hold."""
    reading = zlib.decompressobj(-15)
    try:
        found = reading.decompress(data, limit + 1)
    except zlib.error as error:
        raise ValueError(f"it does not inflate: {error}") from error
    if not reading.eof or reading.unused_data or len(found) > limit or (exactly and len(found) != limit):
        raise ValueError(f"it does not inflate to {limit} bytes")
    return found
