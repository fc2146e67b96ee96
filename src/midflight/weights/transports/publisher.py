"""The trainer's end of a transport, as a Protocol, and the functions that every publisher needs to
copy tensors.
"""

import mmap
from collections.abc import Collection, Mapping
from typing import Protocol, Self

import torch
from torch import Tensor

from midflight.errors import SlotBusy
from midflight.models.names import dtype_name
from midflight.types import TensorSpec, Version, WeightManifest


class Publisher(Protocol):
    """Publishes versions for engines to fetch. It blocks and is not thread-safe: the trainer is its
    one caller. The end of a `with` block closes it.
    """

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Copies the tensors, which may change as soon as this returns."""
        ...

    def release(self, version: Version) -> None:
        """Says that no engine will fetch this version any more. Idempotent; unknown versions are no
        error.
        """
        ...

    def close(self) -> None:
        """Removes everything that was published. Idempotent. It does not wait for a publication
        under way in another thread, which may fail.
        """
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_slot(version: Version, held: Collection[Version], *, num_slots: int) -> None:
    """Raises `SlotBusy` if the version is held already, or as many versions as there are slots."""
    if version in held:
        raise SlotBusy(
            f"publishing version {version}: it is published already; numbers are never reused."
        )
    if len(held) >= num_slots:
        raise SlotBusy(
            f"publishing version {version}: versions {', '.join(map(str, held))} hold all slots; "
            "wait until a handover ends and releases one."
        )


def named_shapes(tensors: Mapping[str, Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, safetensors dtype, shape) of each tensor, as `manifest.layout` takes them."""
    return [(name, dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()]


@torch.no_grad()
def copy_into(
    buffer: mmap.mmap, specs: tuple[TensorSpec, ...], tensors: Mapping[str, Tensor]
) -> None:
    """Copies each tensor to its place in the buffer."""
    for spec in specs:
        source = tensors[spec.name]
        if spec.num_bytes:
            slot = torch.frombuffer(
                buffer, dtype=source.dtype, count=source.numel(), offset=spec.offset
            )
            slot.view(source.shape).copy_(source)
