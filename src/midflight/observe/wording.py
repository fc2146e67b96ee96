"""How numbers read on a terminal. What is not known is a dash, never a zero."""

from __future__ import annotations

UNKNOWN = "–"


def number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"


def duration(seconds: float | None) -> str:
    """`7 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None:
        return UNKNOWN
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def size(num_bytes: float) -> str:
    """`512 KB`, `3.4 MB`, `1.2 GB`, in powers of 1024."""
    for unit, factor in (("GB", 2**30), ("MB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes / 1024:.0f} KB"
