"""The run that a new one replaces. It is deleted as soon as the new one has made its first step."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from midflight.run.launcher import replaced_files
from midflight.run.launcher.folder import JOURNAL, replaces


class ReplacedRun:
    """Deletes the run that is set aside in a folder, if there is one. A thread does that, because
    it takes long if the run is large.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._deletion: threading.Thread | None = None

    def look(self) -> None:
        """Looks whether the new run has made its first step. Called whenever it may have."""
        if self._deletion is not None:
            return
        if not replaced_files.is_aside(self._folder) or not replaces(self._folder):
            return
        try:
            self._let_go()
        except OSError as error:
            self._say(f"{self._folder}: the run that was replaced stays for now: {error}")
            return
        self._say(
            f"{self._folder}: the first step is made, and the run that was there before is deleted."
        )

    def _let_go(self) -> None:
        """Makes sure that the step is on the disk, and only then gives up the replaced run."""
        with (self._folder / JOURNAL).open("rb") as journal:
            os.fsync(journal.fileno())
        replaced_files.let_go(self._folder)
        self._deletion = threading.Thread(
            target=self._delete, name="deletes the replaced run", daemon=True
        )
        self._deletion.start()

    def _delete(self) -> None:
        try:
            replaced_files.delete_gone(self._folder)
        except OSError:
            return  # the next start deletes the rest, or reports why it can't

    def wait(self) -> None:
        """Waits for the deletion; ended by it."""
        if self._deletion is not None:
            self._deletion.join()
