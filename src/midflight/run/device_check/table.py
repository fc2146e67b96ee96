"""The parts of a device's check, and what each is given. It needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
PART_SECONDS = 300.0
"""A part that takes longer hangs. The slowest took a third of it on an H200, beside others."""
SERVER_SECONDS = 420.0
"""The same for a part that starts a server. A start took up to two minutes on an H200, beside other
work.
"""


@dataclass(frozen=True, slots=True)
class PartPlan:
    """The time and the memory that a part may take, and what it needs."""

    seconds: float = PART_SECONDS
    """The most seconds that it may take, after which it ends itself."""
    gigabytes: int = 4
    """The memory of a GPU that it takes at most, in GiB. A part that is alone has all of it."""
    is_alone: bool = False
    """True if it measures speeds, so that nothing may run beside it."""
    server: str = ""
    """The kind of server that it tries, if it tries one."""


FIRST = "what it could do at most"
"""This part also says how much memory the device has."""
REAL_GIGABYTES = 20
"""The memory that the trials in real size take on a GPU."""
_OURS = PartPlan()
_REAL = PartPlan(gigabytes=REAL_GIGABYTES)
_ALONE = PartPlan(is_alone=True)


def _of_server(name: str, kind: str) -> Mapping[str, PartPlan]:
    beside = PartPlan(SERVER_SECONDS, gigabytes=8, server=kind)
    return {
        name: beside,
        f"{name} on two GPUs": beside,
        f"{name} asleep": PartPlan(SERVER_SECONDS, gigabytes=16, server=kind),
        f"{name} in a run": beside,
        f"{name} in a deterministic run": beside,
        f"{name} in real size": PartPlan(SERVER_SECONDS, is_alone=True, server=kind),
    }


PARTS: Mapping[str, PartPlan] = {
    FIRST: _ALONE,
    "kernels of the trainer": _REAL,
    "kernels of the embedded engine": _REAL,
    "versions in mid-answer": _REAL,
    "taking a version back": _OURS,
    "straight into a server's workers": _OURS,
    "two ranks": _OURS,
    "determinism": _OURS,
    "a step in one order": _OURS,
    "a whole run": _OURS,
    "a version in two processes": _ALONE,
    "speeds": _ALONE,
    "a whole run in real size": _ALONE,
    **_of_server("vLLM", "vllm"),
    **_of_server("SGLang", "sglang"),
}
"""The parts in the order in which a report has them."""


def segment_prefix(scratch: Path, part: str) -> str:
    """The beginning of the names of a part's shared memory. `scratch` is the check's own folder,
    whose name no other check has.
    """
    return f"{scratch.name}-{list(PARTS).index(part)}-"
