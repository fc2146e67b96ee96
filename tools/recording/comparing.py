"""How two recordings of a part differ."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from recording import Found

SHOWN_LINES = 12
SHOWN_LETTERS = 160
"""What is shown of a change in a long text. The files of the two records have all of it."""


def changes(before: Found, now: Found) -> Iterator[str]:
    """What vanished or changed, each by name. What is new is no change."""
    for name, text in before.items():
        if name not in now:
            yield f"{name}: vanished"
        elif now[name] != text:
            yield f"{name}: {changed(text, now[name])}"


def changed(before: str, now: str) -> str:
    """One line for two words, else the lines that differ, old ones with a minus and new ones with a plus."""
    if "\n" not in before + now:
        return f"{now}, and {before} before"
    lines = list(difflib.unified_diff(before.splitlines(), now.splitlines(), n=0, lineterm=""))
    lines = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    shown = [f"\n    {line[:SHOWN_LETTERS]}" for line in lines[:SHOWN_LINES]]
    left_out = len(lines) - len(shown)
    if left_out:
        shown.append(f"\n    and {left_out} lines more")
    return "".join(shown)
