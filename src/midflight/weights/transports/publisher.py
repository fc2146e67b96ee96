"""The trainer's end of a transport, as a Protocol, and the functions that every publisher needs to
copy tensors.
"""

import mmap
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, Self

import torch
from torch import Tensor

from midflight.errors import SlotBusy
from midflight.models.names import dtype_name
from midflight.types import TensorSpec, Version, WeightManifest

Fill = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
"""Copies a version's tensors into tensors of the same names, shapes and dtypes, its first argument.
The second has the tensors that were given to `publish`.
"""


@torch.no_grad()
def copied(places: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """The `Fill` of tensors that are whole."""
    for name, place in places.items():
        place.copy_(tensors[name])


class Publisher(Protocol):
    """Publishes versions for engines to fetch. It blocks and is not thread-safe: the trainer is its
    one caller. The end of a `with` block closes it.
    """

    def publish(
        self, version: Version, tensors: Mapping[str, Tensor], fill: Fill = copied
    ) -> WeightManifest:
        """Copies the tensors, which may change as soon as this returns.

        If `fill` brings the numbers, the tensors say only names, shapes and dtypes, and may be on
        the meta device. It is called once.
        """
        ...

    def release(self, version: Version) -> None:
        """Says that no engine will fetch this version any more. Idempotent; unknown versions are no
        error.
        """
        ...

    def withdraw(self) -> None:
        """Says that the tensors of the newest version will change now, which only matters to a
        publisher that sends versions out of them.
        """

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


def copy_into(
    buffer: mmap.mmap,
    specs: tuple[TensorSpec, ...],
    tensors: Mapping[str, Tensor],
    fill: Fill = copied,
) -> None:
    """Copies each tensor to its place in the buffer."""
    places: dict[str, Tensor] = {}
    for spec in specs:
        shape = tensors[spec.name].shape
        dtype = tensors[spec.name].dtype
        if spec.num_bytes:
            flat = torch.frombuffer(buffer, dtype=dtype, count=shape.numel(), offset=spec.offset)
            places[spec.name] = flat.view(shape)
        else:
            places[spec.name] = torch.empty(shape, dtype=dtype)
    fill(places, tensors)


def filled(tensors: Mapping[str, Tensor], fill: Fill) -> dict[str, Tensor]:
    """The tensors in host memory of their own."""
    made = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for name, tensor in tensors.items()
    }
    fill(made, tensors)
    return made
