"""The parts of the record that `record.py` writes. Each gives what it found by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[2]
"""The checkout that is recorded."""
Found: TypeAlias = dict[str, str]
"""What was found, by name."""

sys.path[:0] = [str(ROOT / "src"), str(ROOT)]


def surroundings() -> dict[str, str]:
    """The environment of a process that runs this checkout's code, on one core and without a network."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
