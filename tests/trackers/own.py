"""Trackers as users write them: one that notes everything, and some that fail in one way each."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from midflight.trackers import TrackedRun, Tracker


class Notes(Tracker):
    """Writes each call as a line of `notes.jsonl` in the run's folder. Takes nothing back."""

    def open(self, run: TrackedRun) -> str | None:
        self.path = run.folder / "notes.jsonl"
        self.note("open", run.name, run.id, run.config["rollout.max_staleness"])
        return "known again"

    def note(self, *words: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        self.note("scalars", step, dict(numbers))

    def histogram(self, step: int, name: str, edges: Sequence[float], counts: Sequence[int]) -> None:
        self.note("histogram", step, name, list(edges), list(counts))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[str | float | None]]) -> None:
        self.note("table", step, name, list(columns), [list(row) for row in rows])

    def picture(self, name: str, png: Path) -> None:
        self.note("picture", name, png.name)

    def close(self, summary: Mapping[str, float | str]) -> None:
        self.note("close", dict(summary))


class Forgets(Notes):
    """It can take back."""

    def rewind(self, step: int) -> bool:
        self.note("rewind", step)
        return True


class Fails(Tracker):
    """On every step."""

    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        raise ConnectionError(f"no route to the service at step {step}")


class Leaves(Tracker):
    def scalars(self, step: int, numbers: Mapping[str, float]) -> None:
        raise SystemExit(3)


class Hangs(Tracker):
    def open(self, run: TrackedRun) -> str | None:
        time.sleep(3600)
        return None


class NeedsMore(Tracker):
    def __init__(self, address: str) -> None:
        self.address = address


class NotOne:
    pass
