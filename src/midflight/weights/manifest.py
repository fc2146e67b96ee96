"""The layout of a version's tensors in a packed buffer, and the check that a manifest makes sense.
It needs no torch.
"""

import mmap
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from weakref import finalize

import numpy as np

from midflight.errors import RequestRejected
from midflight.models.sizes import tensor_bytes
from midflight.types import Delta, TensorSpec, WeightManifest

ALIGNMENT = 64
"""In bytes. It is a cache line and the widest vector load, so that a tensor can be used in place."""

MAX_HELD = 3
"""The number of versions that may be fetched at once: the one that is live, the one whose handover
is under way, and the one that waits for it.
"""

MAX_DELTAS = 64
"""The number of differences that may lie between a version and the whole one before it. Each costs
an engine that catches up one more file and one more pass.
"""


def aligned(offset: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-offset // to) * to


def layout(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], *, start: int = 0
) -> tuple[TensorSpec, ...]:
    """Specs of (name, safetensors dtype, shape) packed one after the other from `start`, each
    aligned.
    """
    specs: list[TensorSpec] = []
    for name, dtype, shape in tensors:
        offset = aligned(start)
        num_bytes = tensor_bytes(dtype, shape)
        specs.append(TensorSpec(name, dtype, shape, offset, num_bytes))
        start = offset + num_bytes
    return tuple(specs)


def repacked(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The same tensors in a buffer of their own, from offset 0."""
    return layout((s.name, s.dtype, s.shape) for s in specs)


def extent(specs: Iterable[TensorSpec]) -> int:
    """The number of bytes that a buffer needs to hold the specs."""
    return max((s.offset + s.num_bytes for s in specs), default=0)


def views(specs: Iterable[TensorSpec], buffer: memoryview) -> Mapping[str, memoryview]:
    """The bytes of each tensor in the buffer, by name."""
    return {s.name: buffer[s.offset : s.offset + s.num_bytes] for s in specs}


_left: deque[mmap.mmap] = deque(maxlen=1)
"""Memory that no view uses any more. Getting the same amount anew from the kernel, page by page,
takes several times as long as filling it.
"""


def set_aside(specs: Iterable[TensorSpec]) -> memoryview:
    """Memory for the specs: writable, page-aligned, and full of old bytes. It lives as long as any
    view of it, and is then used again.
    """
    size = max(1, extent(specs))
    with suppress(IndexError):  # there is none, or another thread has it by now
        memory = _left.pop()
        if len(memory) == size:
            return _lent(memory)
    return _lent(mmap.mmap(-1, size))


def _lent(memory: mmap.mmap) -> memoryview:
    whole = np.frombuffer(memory, np.uint8)
    finalize(whole, _left.append, memory).atexit = False
    return whole.data


def is_sound(spec: TensorSpec) -> bool:
    """True if the spec's number of bytes follows from its dtype and shape."""
    if spec.offset < 0 or any(n < 0 for n in spec.shape):
        return False
    return spec.num_bytes == tensor_bytes(spec.dtype, spec.shape)


def check_extents(manifest: WeightManifest) -> None:
    """Raises `RequestRejected` if the extent of a tensor makes no sense, or the differences do not.
    The error names the tensor or the fault.
    """
    for spec in manifest.tensors:
        if not is_sound(spec):
            raise RequestRejected(
                f"reading a weight manifest: tensor {spec.name!r} claims {spec.num_bytes} bytes at "
                f"{spec.offset} for {spec.dtype} of shape {spec.shape}; send the JSON that the "
                "publisher made.",
                param="manifest",
            )
    _check_deltas(manifest.deltas, sum(s.num_bytes for s in manifest.tensors))


def _check_deltas(deltas: tuple[Delta, ...], full_bytes: int) -> None:
    """Refuses differences for which a receiver would set aside and read more than for the whole
    version.
    """
    if len(deltas) > MAX_DELTAS:
        raise RequestRejected(
            (
                f"reading a weight manifest: {len(deltas)} differences; publish a whole version "
                f"after {MAX_DELTAS} at most."
            ),
            param="deltas",
        )
    total = 0
    for delta in deltas:
        spec = delta.payload
        total += spec.num_bytes
        if spec.dtype != "U8" or len(spec.shape) != 1 or not is_sound(spec):
            raise RequestRejected(
                f"reading a weight manifest: a difference claims {spec.num_bytes} bytes at "
                f"{spec.offset} for {spec.dtype} of shape {spec.shape}; send the JSON that the "
                "publisher made.",
                param="deltas",
            )
    if total > full_bytes:
        raise RequestRejected(
            (
                f"reading a weight manifest: differences of {total} bytes for weights of "
                f"{full_bytes}; "
                "publish a whole version."
            ),
            param="deltas",
        )
