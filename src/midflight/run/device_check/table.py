"""The parts of a device's check in the order in which they are tried. It needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

SERVER_SECONDS = 720.0
"""The most seconds of a server's part. On one GPU a server starts five times, and a start took up to
two minutes on an H200.
"""
PARTS: Mapping[str, float] = {
    "what it could do at most": 60,
    "kernels of the trainer": 120,
    "kernels of the embedded engine": 120,
    "versions in mid-answer": 120,
    "taking a version back": 90,
    "straight into a server's workers": 90,
    "two ranks": 150,
    "a version in two processes": 90,
    "determinism": 90,
    "a step in one order": 60,
    "speeds": 180,
    "a whole run": 240,
    "vLLM": SERVER_SECONDS,
    "SGLang": SERVER_SECONDS,
}
"""The name of each part, with the most seconds that it may take. Parts that are quick and that
others stand on come first.
"""
SERVERS = ("vLLM", "SGLang")
"""Parts of servers. They have their seconds whatever the others took."""
BUDGET_SECONDS = 600.0
"""The time of all other parts together."""
LEAST_SECONDS = 10.0
"""A part is not begun with less."""
