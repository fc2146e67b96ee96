"""On what a run is made: versions, system, processors, memory and devices, written into its folder
when it starts. Imports no torch.
"""

import json
import os
import platform
from importlib import metadata
from pathlib import Path

from midflight.observe.status import size
from midflight.version import described

MACHINE = "machine.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "openai")
"""Those whose version may change what a run does."""
_GPUS = Path("/proc/driver/nvidia/gpus")
_PROCESSORS = Path("/proc/cpuinfo")


def machine() -> dict[str, str]:
    """By name, in the order in which it is shown; what is not known is left out. No name of host or
    user is in it.
    """
    found = {
        "midflight": described(),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := package_version(name)) is not None},
        "system": platform.platform(terse=True),
        "processors": (
            f"{os.cpu_count() or 1} x {_line(_PROCESSORS, 'model name') or platform.machine()}"
        ),
        "memory": size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "devices": ", ".join(
            filter(None, (_line(path, "Model") for path in sorted(_GPUS.glob("*/information"))))
        ),
    }
    return {name: value for name, value in found.items() if value}


def processors_of(folder: Path) -> int | None:
    """How many the machine of the run in this folder had; None where it does not say."""
    try:
        said = json.loads((folder / MACHINE).read_bytes())["processors"]
        return int(said.partition(" x ")[0])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def package_version(name: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _line(path: Path, name: str) -> str:
    """The value of the first `name : value` of a file; empty where there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
