"""Token ids that share their memory with others."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias, overload

ID_BYTES = 4


def packed(token_ids: Sequence[int]) -> bytes:
    """Ids as little-endian int32: prefixes of ids are prefixes of bytes."""
    if isinstance(token_ids, SharedIds):
        return token_ids.packed
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def unpacked(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // ID_BYTES}i", data)


class SharedIds(Sequence[int]):
    """Ids of which only the number is at hand. The ids themselves lie packed in parts that others
    have too, and are put together each time that somebody reads them: a prompt of a long
    conversation takes no memory and no time as long as nobody looks into it.

    It equals the tuple of its ids.
    """

    __slots__ = ("_length", "_parts", "after", "tail")

    def __init__(
        self, length: int, parts: Callable[[], Iterable[bytes]], *, after: int, tail: bytes
    ) -> None:
        """`parts` gives the ids in pieces, each as `packed` writes it. It always gives the same.
        `after` is the number of the turn, among those of the rollout, whose ids they begin with,
        and `tail` has the ids that follow.
        """
        self._length = length
        self._parts = parts
        self.after = after
        self.tail = tail

    @property
    def packed(self) -> bytes:
        """All ids, as little-endian int32."""
        return b"".join(self._parts())

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(unpacked(self.packed))

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | tuple[int, ...]:
        return unpacked(self.packed)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SharedIds):
            return self is other or (self._length == other._length and self.packed == other.packed)
        if isinstance(other, tuple):
            return self._length == len(other) and unpacked(self.packed) == other  # pyright: ignore[reportUnknownArgumentType]
        return NotImplemented

    def __hash__(self) -> int:
        return hash(unpacked(self.packed))

    def __add__(self, more: Sequence[int]) -> tuple[int, ...]:
        return (*self, *more)

    def __radd__(self, before: Sequence[int]) -> tuple[int, ...]:
        return (*before, *self)

    def __repr__(self) -> str:
        return f"<SharedIds of {self._length} ids>"


if TYPE_CHECKING:
    AnyIds: TypeAlias = tuple[int, ...] | SharedIds
else:
    # what is read from a message is a tuple
    AnyIds: TypeAlias = tuple[int, ...]
