"""What a streamed chat passes, as `journey.py` measures it: every module's calls a token, and all calls a token."""

from __future__ import annotations

from collections.abc import Iterator

from journey import NUM_TOKENS, measure

from recording import ROOT, Found

TOTAL = "calls a token"
NOISE = 3.0
"""Calls a token. On a quiet machine the same code gave 106.4 three times, on a busy one 106.2 and 109.1."""


def calls() -> Found:
    """Waits for three processes and their requests, as `measure` does."""
    found = measure(ROOT)
    modules = {name: f"{number / NUM_TOKENS:.1f}" for name, number in found.modules.most_common()}
    return {TOTAL: f"{found.calls_per_token:.1f}", **modules}


def differences(before: Found, now: Found) -> Iterator[str]:
    """Only the total counts: modules may be cut otherwise, and a chat that costs less is welcome."""
    if float(now[TOTAL]) > float(before[TOTAL]) + NOISE:
        yield f"{TOTAL}: {now[TOTAL]}, and {before[TOTAL]} before"
