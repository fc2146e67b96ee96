"""`python -m tests.pages`: how every block of every page is tried, and why some are not run."""

from __future__ import annotations

from collections import Counter

from .blocks import all_blocks

blocks = [block for block in all_blocks() if not block.hidden]
for block in blocks:
    if block.tried == "looked at":
        print(f"{block.place:36}{block.language:8}{block.reason}")
counts = Counter(block.tried for block in blocks)
print(", ".join(f"{counts[how]} {how}" for how in ("run", "file", "read", "looked at", "shown")))
