"""The difference of two versions as bytes. Workers of servers load this file by its path and have
no Midflight, so it imports nothing of Midflight.

A difference leads from one set of words to the other, bit for bit. Weights are words of 1, 2, 4 or
8 bytes. A step changes a word by little, compared with the word. So a difference is taken as
between integers (mod 2^bits), folded so that small ones of either sign are small (0, -1, 1, -2, ...
become 0, 1, 2, 3, ...), and laid out in planes: all lowest bytes, then all second ones, and so on.
The upper planes are nearly always zeros.

    payload = for each tensor, for each BLOCK of its words: frame
    frame   = count                                  uint32; 0: nothing changed, and the frame
                                                     ends here
              length of map, length of each plane    uint32 each
              map                                    a bit for each word: whether it changed;
                                                     none if count is the whole block
              planes                                 of the `count` folded differences

A map or a plane has no bytes if all of it is zero. If the length in the frame is its full length,
it is stored as it is. Otherwise it is deflated. The compressor looks for runs only (Z_RLE): on
differences of AdamW steps the result was a tenth smaller than with zlib's search for repeated
strings, and a little smaller than with zstandard. It was also faster than the first. zstandard is
four times as fast, but one more thing to install beside every engine. A deflated map is about as
small as a list of gaps, and made in half the time or less if more than a few words in a hundred
change.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]
"""One-dimensional, of unsigned integers."""

BLOCK = 1 << 18
"""The words of a frame. They are few enough to fit a processor's cache, and to keep the scratch
memory of both ends at some megabytes.
"""

DENSE = 0.9
"""The share of changed words above which a map costs more than the zeros in between."""

_SAMPLE = 1 << 12
"""The number of bytes of a plane that are tried first. A plane that cannot be compressed is copied,
which takes a hundredth of the time.
"""


def encode(old: memoryview, new: memoryview, *, width: int) -> Iterator[bytes]:
    """The frames that turn `old` into `new`, one by one. Both have the same length, in words of
    `width` bytes.
    """
    before = _words(old, width)
    after = _words(new, width)
    for start in range(0, before.size, BLOCK):
        yield _frame(before[start : start + BLOCK], after[start : start + BLOCK])


class Frames:
    """Reads a payload from its beginning to its end. Wrong bytes lead to `ValueError` or wrong
    words, and to nothing worse: memory is set aside for the words that the caller has, never for a
    length that the bytes claim.
    """

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
        of_map, *lengths = self._numbers(1 + words.itemsize)
        where = slice(None) if count == words.size else self._where(of_map, count, words.size)
        planes = np.empty((count, words.itemsize), np.uint8)
        for i, length in enumerate(lengths):
            planes[:, i] = self._unpacked(length, count)
        words[where] += _unfolded(planes.view(words.dtype).reshape(-1))

    def _where(self, length: int, count: int, num_words: int) -> NDArray[np.intp]:
        bits = self._unpacked(length, -(-num_words // 8))
        where = np.flatnonzero(np.unpackbits(bits, count=num_words).view(np.bool_))
        if where.size != count:
            raise ValueError(f"a map of {where.size} changes instead of {count}")
        return where

    def _unpacked(self, length: int, size: int) -> NDArray[np.uint8]:
        """Reads the next `length` bytes and unpacks them to `size` bytes."""
        data = self._take(length)
        if length == 0:
            return np.zeros(size, np.uint8)
        if length == size:
            return np.frombuffer(data, np.uint8)
        return np.frombuffer(_inflated(data, size), np.uint8)

    def _numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self._take(4 * count))

    def _take(self, length: int) -> memoryview:
        if length > len(self._left):
            raise ValueError("it ends within a frame")
        taken = self._left[:length]
        self._left = self._left[length:]
        return taken


def _frame(before: Words, after: Words) -> bytes:
    changed = before != after
    where = np.flatnonzero(changed)
    if not where.size:
        return bytes(4)
    if where.size > DENSE * before.size:
        bits = b""
        folded = _folded(after - before)
    else:
        bits = _packed(np.packbits(changed))
        folded = _folded(after[where] - before[where])
    by_byte = folded.view(np.uint8).reshape(-1, before.itemsize).T
    planes = [_packed(plane) for plane in np.ascontiguousarray(by_byte)]
    head = struct.pack(f"<{2 + len(planes)}I", folded.size, len(bits), *map(len, planes))
    parts = [head, bits]
    parts += planes
    return b"".join(parts)


def _packed(values: NDArray[np.uint8]) -> bytes:
    if not values.any():
        return b""
    raw = values.tobytes()
    if len(raw) > _SAMPLE and len(_deflated(raw[:_SAMPLE])) > 0.97 * _SAMPLE:
        return raw
    deflated = _deflated(raw)
    return deflated if len(deflated) < len(raw) else raw


# --- Numbers and bytes ----------------------------------------------------------------------------


def _words(data: memoryview, width: int) -> Words:
    return np.frombuffer(data, np.dtype(f"<u{width}"))


def _folded(differences: Words) -> Words:
    """Zigzag: the sign goes to the lowest bit. Overflow is intended: words wrap."""
    return (differences << 1) ^ np.negative(differences >> (8 * differences.itemsize - 1))


def _unfolded(folded: Words) -> Words:
    return (folded >> 1) ^ np.negative(folded & 1)


def _deflated(data: bytes) -> bytes:
    """The deflated data, without a checksum, because the fingerprint of the result is verified
    anyway.
    """
    made = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
    return made.compress(data) + made.flush()


def _inflated(data: memoryview, size: int) -> bytes:
    """Inflates the data to exactly `size` bytes, or raises `ValueError`. At most one byte more is
    made, even if the data claims to hold more.
    """
    reading = zlib.decompressobj(-15)
    try:
        found = reading.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"it does not inflate: {error}") from error
    if not reading.eof or reading.unused_data or len(found) != size:
        raise ValueError(f"it does not inflate to {size} bytes")
    return found
