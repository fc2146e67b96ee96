"""The machine that a run is made on: versions, system, processors, memory and devices. A run writes
them into its folder when it starts. This module imports no torch.
"""

import os
import platform
from importlib import metadata
from pathlib import Path

from midflight.observe.readable import size
from midflight.version import described

MACHINE = "machine.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "openai")
"""Packages whose version may change the results of a run."""
_GPUS = Path("/proc/driver/nvidia/gpus")
_PROCESSORS = Path("/proc/cpuinfo")


def machine() -> dict[str, str]:
    """Returns the description of this machine by name, in the order in which it is shown. Unknown
    parts are left out. It has no name of a host or a user.
    """
    found: dict[str, str | None] = {
        "midflight": described(),
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        found[name] = package_version(name)
    processor = _line(_PROCESSORS, "model name") or platform.machine()
    devices = [_line(path, "Model") for path in sorted(_GPUS.glob("*/information"))]
    found["system"] = platform.platform(terse=True)
    found["processors"] = f"{os.cpu_count() or 1} x {processor}"
    found["memory"] = size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    found["devices"] = ", ".join(filter(None, devices))
    return {name: value for name, value in found.items() if value}


def package_version(name: str) -> str | None:
    """The version of a package, or None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _line(path: Path, name: str) -> str:
    """The value of the first `name : value` of a file, or an empty string if there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
