"""What a task, a batch and a version pass in a run: modules of `src`, functions, and calls.

    python tools/ring_journey.py [DIR]    of this checkout, or of another

The ring of `tests/loop` runs on virtual time with one scripted engine and `max_staleness = 0`, so
that one thing goes on at a time: tasks until the batch is leased, the batch until its step is done,
the version until it is served. Counted are the calls that `sys.setprofile` reports in one process;
the shares of the trainer's arithmetic, of HTTP and of sockets are not in it. What a streamed chat
passes over real sockets, `journey.py` says.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

STEPS = 6
BEGINS = {"Leased": "batch", "Stepped": "version", "WeightsCommitted": "task"}
"""Which journey begins after a fact, by the fact's name."""


class Journeys:
    """Counts calls by journey and function."""

    def __init__(self, sources: Path) -> None:
        self._sources = f"{sources}/"
        self._ring = f"{sources}/testing/"
        self.calls: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self._now = "start"

    def record(self, fact: object) -> None:
        self._now = BEGINS.get(type(fact).__name__, self._now)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        file = code.co_filename
        if file.startswith(self._sources) and not file.startswith(self._ring):
            name = file.removeprefix(self._sources)
            self.calls[self._now][name, f"{code.co_name}:{code.co_firstlineno}"] += 1


def measure(root: Path) -> Journeys:
    """Runs the ring of the checkout in `root` once."""
    sys.path[:0] = [str(root / "src"), str(root)]
    site_of = importlib.import_module("tests.loop.site")
    run_virtual = importlib.import_module("midflight.testing.virtual_time").run_virtual
    journeys = Journeys(root / "src" / "midflight")

    async def main(folder: Path) -> None:
        config = site_of.config(staleness=0, steps=STEPS)
        site = site_of.Site(
            config, folder, engines=site_of.fast_engines(1), agents=site_of.Agents(0)
        )
        observed = site._record

        def record(fact: object) -> None:
            observed(fact)
            journeys.record(fact)

        site._record = record
        sys.setprofile(journeys)
        try:
            await site.run()
        finally:
            sys.setprofile(None)

    with tempfile.TemporaryDirectory() as folder:
        run_virtual(lambda: main(Path(folder)), seed=0, max_seconds=3600)
    return journeys


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    journeys = measure(root)
    print("| journey | modules | functions | calls |\n|---|---|---|---|")
    for name in ("task", "batch", "version"):
        calls = journeys.calls[name]
        modules = {module for module, _ in calls}
        print(f"| {name} | {len(modules)} | {len(calls)} | {calls.total() // STEPS} |")


if __name__ == "__main__":
    main()
