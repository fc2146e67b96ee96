"""A digest of bytes that is computed where they lie, on any device: no byte of them goes to the host.
It imports torch only, because servers' workers load this file by its path.

    lane_j = sum over words i of mix(w_i + (i + 1) * STEPS[j])  mod 2^64

`mix` is the finaliser of SplitMix64 (Steele, Lea and Flood 2014), w_i the i-th 8 bytes, the last
filled up with zeros. Sums of whole numbers are the same in any order, so every device finds the same
digest. It finds bytes that are torn, lost or mixed up, and does not protect against forgery.
"""

import torch
from torch import Tensor

STEPS = (-0x61C8864680B583EB, -0x3C5A37A36834CED9)
"""Two odd numbers of 64 bits, one for each lane."""
_FIRST = -0x40A7B892E31B1A47
_SECOND = -0x6B2FB644ECCEEE15
WORD = 8
"""Bytes that are mixed as one number."""
AT_ONCE = 2**20
"""Words that are hashed at once, so that what is between takes little memory."""


def lanes(part: Tensor, *, first: int = 0) -> Tensor:
    """The digest of uint8 numbers: two numbers of 64 bits, on the same device. It does not wait.

    `first` is the number of their first word in a longer row. The digests of all parts of a row,
    cut at words, add up to the digest of the row.
    """
    whole = len(part) // WORD * WORD
    found = torch.zeros(2, dtype=torch.int64, device=part.device)
    for start in range(0, whole, AT_ONCE * WORD):
        stop = min(start + AT_ONCE * WORD, whole)
        found += _of_words(_words(part[start:stop]), first + start // WORD)
    if whole < len(part):
        rest = torch.zeros(WORD, dtype=torch.uint8, device=part.device)
        rest[: len(part) - whole].copy_(part[whole:])
        found += _of_words(_words(rest), first + whole // WORD)
    return found


def digests(found: list[Tensor], lengths: list[int]) -> list[str]:
    """The digests of parts in hex, from their `lanes` and lengths in bytes. It waits for the device,
    once for all of them.
    """
    if not found:
        return []
    numbers = torch.stack(found).tolist()
    pairs = zip(numbers, lengths, strict=True)
    return [words(one, other, length) for (one, other), length in pairs]


def words(one: int, other: int, length: int) -> str:
    """A digest in hex, from its two numbers and the length in bytes."""
    return f"{one % 2**64:016x}{other % 2**64:016x}-{length}"


def _words(part: Tensor) -> Tensor:
    if part.storage_offset() % WORD:
        part = part.clone()
    return part.view(torch.int64)


def _of_words(words: Tensor, first: int) -> Tensor:
    index = torch.arange(first + 1, first + 1 + len(words), dtype=torch.int64, device=words.device)
    return torch.stack([_mix(words + index * step).sum() for step in STEPS])


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """z >> bits of numbers without a sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)
