"""Answers to held-out tasks: some rollouts of each evaluation, in a file of their own beside the
run's store, for people to read.

They are not in the books, and no step waits for them. The file has the tables of the store: a group
for each task, whose epoch is the version that answered. It is bounded by the rollouts of an
evaluation (`KEPT_ROLLOUTS`) and by the number of evaluations.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from midflight.errors import MidflightError
from midflight.trajectories.database import Database, State, columns, encode_rows, encode_task
from midflight.types import facts

HELDOUT = "evaluations.sqlite"
KEPT_ROLLOUTS = 32
"""The rollouts of each source whose conversations an evaluation keeps."""
KEPT_EVALUATIONS = 20
"""The evaluations that are kept: the first one, to compare with, and the newest ones."""

_log = logging.getLogger(__name__)


class HeldoutStore:
    """Writes in a thread of its own. If it fails, it says so in the log and keeps no more: the run
    goes on.
    """

    def __init__(self, path: Path, *, run: str) -> None:
        self._path = path
        self._run = run
        self._thread = ThreadPoolExecutor(1, "held-out")
        self._database: Database | None = None
        self._failed = False

    def apply(self, fact: facts.Fact) -> None:
        """Returns at once. At most `KEPT_ROLLOUTS` of each source wait to be written."""
        if isinstance(fact, facts.EvaluationKept) and not self._failed:
            self._thread.submit(self._tried, fact)

    def close(self) -> None:
        """Waits for rollouts that are still to be written, and closes the file."""
        self._thread.shutdown()
        if self._database is not None:
            self._database.close()

    def _tried(self, kept: facts.EvaluationKept) -> None:
        try:
            if not self._failed:
                self._write(kept)
        except MidflightError as error:
            self._failed = True
            _log.warning("conversations of evaluations are not kept any more: %s", error)

    def _write(self, kept: facts.EvaluationKept) -> None:
        made = kept.trajectory
        key = kept.version, made.key.group.index, 0
        if self._database is None:
            self._database = Database(self._path, run=self._run, logged=False)
        db = self._database
        with db.transaction():
            if not db.execute("SELECT 1 FROM groups WHERE epoch = ? LIMIT 1", kept.version):
                self._forget(db)
            db.add_source(kept.task.source)
            db.execute(
                "INSERT OR REPLACE INTO groups (epoch, position, attempt, task, state) "
                "VALUES (?, ?, ?, ?, ?)",
                *key,
                encode_task(kept.task),
                State.EVALUATED,
            )
            db.execute_rows(
                "INSERT OR REPLACE INTO rollouts VALUES {}",
                [(*key, made.key.sample, *columns(made, rows=encode_rows(made.rows)))],
            )

    def _forget(self, db: Database) -> None:
        """Makes room for one evaluation more."""
        found = db.execute("SELECT DISTINCT epoch FROM groups ORDER BY epoch")
        versions = [version for (version,) in found]
        for version in versions[1 : max(1, len(versions) - KEPT_EVALUATIONS + 2)]:
            for table in ("groups", "rollouts"):
                db.execute(f"DELETE FROM {table} WHERE epoch = ?", version)
