"""The trainer's end of a transport, as a Protocol, and the tensors' bytes as it needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self

from torch import Tensor

from midflight.models.names import dtype_name
from midflight.types import Version, WeightManifest

MAX_HELD = 3
"""Versions that may be fetched at once: the one that is live, the one whose handover is under way, and the one that waits for it."""


class Publisher(Protocol):
    """Puts versions where engines can fetch them. Blocking and not thread-safe: one caller, the trainer's."""

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Copies the tensors: they may change as soon as this returns."""
        ...

    def release(self, version: Version) -> None:
        """No engine will fetch this version any more. Idempotent; unknown versions are no error."""
        ...

    def close(self) -> None:
        """Removes what was published. Idempotent. A publication under way in another thread is not waited for, and may fail."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


def named_shapes(tensors: Mapping[str, Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, safetensors dtype, shape) of each, as `manifest.layout` takes them."""
    return [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]
