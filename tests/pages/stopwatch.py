"""How long it takes to do a page, by a stopwatch:

    python -m tests.pages.stopwatch [docs/data.md ...]

Every page is done from its first block to its last by somebody who copies line by line and reads nothing, with the sizes that stand there,
and with the pretrained model if `make models/smollm2-135m` has fetched it. Without a name: all pages that have something to run.
The exit status is 1 if a page took longer than it says.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .blocks import ROOT, blocks_of
from .story import TOLD, Story, free_ports

MODEL = Path("models/smollm2-135m")
STATED = re.compile(r"^\*(To read: .*|A page to look .*)\*$", re.MULTILINE)
TO_DO = re.compile(r"To do: (?:\d+ to )?(\d+) minutes?")


def main(pages: Sequence[Path]) -> int:
    """The exit status."""
    late = [page for page in pages if _is_late(page)]
    return 1 if late else 0


def _is_late(page: Path) -> bool:
    stated = STATED.search(page.read_text())
    seconds = _seconds(page)
    late = stated is not None and is_late(seconds, stated[1])
    print(f"{'LATE ' if late else ''}{page.relative_to(ROOT)}: {seconds:.0f} s; it says: {stated[1] if stated else 'nothing'}", flush=True)
    return late


def is_late(seconds: float, stated: str) -> bool:
    """A page that says no minutes to do is never late."""
    minutes = TO_DO.search(stated)
    return minutes is not None and seconds > 60 * int(minutes[1])


def _seconds(page: Path) -> float:
    with tempfile.TemporaryDirectory(prefix="midflight-") as folder:
        story = _Timed(Path(folder), free_ports(), is_small=False)
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


class _Timed(Story):
    """It prints what each command took, the one that failed too."""

    def command(self, line: str) -> None:
        with _timed(" ".join(line.split())):
            super().command(line)

    def program(self, text: str) -> None:
        with _timed("the program in Python"):
            super().program(text)

    def runs_end(self) -> None:
        if self.runs:
            with _timed("until the runs of workers ended"):
                super().runs_end()


@contextmanager
def _timed(what: str) -> Generator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main([Path(name).resolve() for name in sys.argv[1:]] or TOLD))
