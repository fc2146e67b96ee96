"""The kernels of state-space models; see `sgl_kernel`."""

from __future__ import annotations

from collections.abc import Callable

from sgl_kernel import absent


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(f"mamba.{name}")
