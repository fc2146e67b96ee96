"""The state of a process, as its machine's /proc has it."""

import os
from dataclasses import dataclass
from pathlib import Path

from midflight.observe.activity import num_bytes_of


@dataclass(frozen=True, slots=True)
class Vitals:
    """A process's state as a letter, its processor seconds, and the bytes that it read and wrote."""

    state: str
    cpu_seconds: float
    num_bytes: int = 0


def vitals_of(pid: int) -> Vitals:
    """Returns the vitals of a process. Without /proc, the process seems to run and never to
    compute.
    """
    try:
        # The command's name, in brackets, may itself hold brackets and spaces: the fields start
        # after the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return Vitals("?", 0.0)
    ticks = int(fields[11]) + int(fields[12])
    return Vitals(fields[0], ticks / os.sysconf("SC_CLK_TCK"), num_bytes_of(pid))
