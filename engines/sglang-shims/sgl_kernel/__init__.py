"""Stands in for SGLang's compiled kernels on a CPU that has no build of them.

SGLang imports names of this package at its start, and for a dense model on a CPU calls none. Each name is there; calling one
is an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable

__version__ = "0.0.0"


def absent(name: str) -> Callable[..., None]:
    def call(*arguments: object, **named: object) -> None:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, which this machine has no build of: serve a dense model, on a CPU."
        )

    return call


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):  # what Python itself asks of a module is not a kernel
        raise AttributeError(name)
    return absent(name)
