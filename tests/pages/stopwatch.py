"""How long it takes to do a page, by a stopwatch:

    python -m tests.pages.stopwatch [docs/data.md ...]

Every page is done from its first block to its last by somebody who copies line by line and reads nothing, with the sizes that stand there,
and with the pretrained model if `make models/smollm2-135m` has fetched it. Without a name: all pages that have something to run.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .blocks import ROOT, blocks_of
from .story import TOLD, Story, free_ports

MODEL = Path("models/smollm2-135m")
STATED = re.compile(r"^\*(To read: .*)\*$", re.MULTILINE)


def main(pages: Sequence[Path]) -> None:
    for page in pages:
        stated = STATED.search(page.read_text())
        print(f"{page.relative_to(ROOT)}: {_seconds(page):.0f} s; it says: {stated[1] if stated else 'nothing'}", flush=True)


def _seconds(page: Path) -> float:
    with tempfile.TemporaryDirectory(prefix="midflight-") as folder:
        story = Story(Path(folder), free_ports(), is_small=False)
        story.command("midflight new-model MODEL_DIR")
        blocks = blocks_of(page)
        if (ROOT / MODEL).exists():
            (Path(folder) / MODEL).parent.mkdir()
            (Path(folder) / MODEL).symlink_to(ROOT / MODEL)
            blocks = [block for block in blocks if block.text != f"midflight new-model {MODEL}"]
        began = time.monotonic()
        try:
            story.tell(blocks)
        finally:
            story.close()
        return time.monotonic() - began


if __name__ == "__main__":
    main([Path(name).resolve() for name in sys.argv[1:]] or TOLD)
