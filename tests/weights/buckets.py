"""Stands for the driver of CUDA where there is none: the memory of a bucket is a file, which other processes map by its name.

On the second device of tests the mapped numbers are of that device, so that a copy to the host would be counted.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.second_device import NAME, Elsewhere
from torch import Tensor

from midflight.weights import device_handles
from midflight.weights.device_handles import HandleRefused


class Driver:
    """What this process has given and opened. `refuses` is said in place of an opened bucket."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.refuses = ""
        self.gives_none = ""
        self.given: list[FileBucket] = []
        self.opened: list[FileBucket] = []

    def given_bucket(self, device: torch.device, num_bytes: int) -> FileBucket:
        if self.gives_none:
            raise HandleRefused(self.gives_none)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.truncate(num_bytes)
        self.given.append(FileBucket(file.name, device))
        return self.given[-1]

    def opened_bucket(self, handle: str, device: torch.device) -> FileBucket:
        if self.refuses:
            raise HandleRefused(self.refuses)
        self.opened.append(FileBucket(bytes.fromhex(handle).decode(), device))
        return self.opened[-1]

    @property
    def num_open(self) -> int:
        return sum(not bucket.is_closed for bucket in self.opened)

    @property
    def num_given(self) -> int:
        return sum(not bucket.is_closed for bucket in self.given)


class FileBucket:
    def __init__(self, path: str, device: torch.device) -> None:
        self.handle = path.encode().hex()
        self.is_closed = False
        mapped = torch.from_file(path, shared=True, size=Path(path).stat().st_size, dtype=torch.uint8)
        self._mapped: Tensor = Elsewhere(mapped) if device.type == NAME else mapped

    def write(self, part: Tensor) -> None:
        assert not self.is_closed
        self._mapped[: len(part)].copy_(part)

    def read(self, part: Tensor) -> None:
        assert not self.is_closed
        part.copy_(self._mapped[: len(part)])

    def free(self) -> None:
        self.close()
        Path(bytes.fromhex(self.handle).decode()).unlink()

    def close(self) -> None:
        self.is_closed = True
        self._mapped = torch.empty(0)


def stand_in(patch: pytest.MonkeyPatch, plugin: Any, driver: Driver) -> None:
    """Puts it in the place of the driver, in this process: for the publisher, and for workers by the plugin's code."""
    by_path = plugin.module_of

    def module_of(path: Path) -> ModuleType:
        return device_handles if path == plugin.HANDLES else by_path(path)

    patch.setattr(plugin, "module_of", module_of)
    patch.setattr(device_handles, "given_bucket", driver.given_bucket)
    patch.setattr(device_handles, "opened_bucket", driver.opened_bucket)
