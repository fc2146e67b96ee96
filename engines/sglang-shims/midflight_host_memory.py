"""Lets SGLang record the experts of a mixture on a CPU: it pins the memory for them by CUDA, whatever the device.

A `.pth` file beside this one imports this module at the interpreter's start. The function that sets memory aside is replaced when, and
only if, SGLang is about to import what records, and only where torch has no CUDA.
"""

from __future__ import annotations

import sys

RECORDER = "sglang.srt.state_capturer.routed_experts"


class AllocateWithoutPinning:
    """Finds no module: it only sees the import coming."""

    done = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != RECORDER or self.done:
            return
        self.done = True
        import torch
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        if not torch.backends.cuda.is_built():
            ALLOC_MEMORY_FUNCS["cpu"] = _allocate


def _allocate(
    dims: tuple[int, ...],
    dtype: object,
    device: str,
    pin_memory: bool,
    allocator: object,
    **_: object,
) -> object:
    return allocator.allocate(dims, dtype=dtype, device=device)  # type: ignore[attr-defined]


sys.meta_path.insert(0, AllocateWithoutPinning())
