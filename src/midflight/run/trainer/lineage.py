"""The numbers of versions a run has handed out: never used again, also after a crash (DECISIONS 1)."""

from __future__ import annotations

from pathlib import Path

from midflight.types import Version


class PublishedVersions:
    """The highest version ever published, in a file that is replaced before the version reaches any engine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def highest(self) -> Version | None:
        try:
            return int(self._path.read_text())
        except FileNotFoundError:
            return None

    def note(self, version: Version) -> None:
        draft = self._path.with_suffix(".writing")
        draft.write_text(str(version))
        draft.replace(self._path)

    def resumed_as(self, checkpoint: Version) -> Version:
        """The number under which the weights of a checkpoint go on: its own, unless later ones were handed out."""
        highest = self.highest()
        return checkpoint if highest is None or highest <= checkpoint else highest + 1
