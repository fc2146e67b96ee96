"""What the model said to held-out tasks: some rollouts of each evaluation, in a file of their own
beside the run's store, to be read by people.

Nothing of it is in the books, and no step waits for it. It has the tables of the store: a group for
each task, whose epoch is the version that answered. What is kept is bounded by rollouts of an
evaluation (`evaluation.keep`) and by evaluations.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from midflight.errors import MidflightError
from midflight.trajectories.database import Database, State, columns, encode_task
from midflight.types import facts

HELDOUT = "evaluations.sqlite"
KEPT_EVALUATIONS = 20
"""The first, to compare with, and the newest ones."""

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
        """Returns at once. What waits to be written is at most what `evaluation.keep` lets of an
        evaluation.
        """
        if isinstance(fact, facts.EvaluationKept) and not self._failed:
            self._thread.submit(self._tried, fact)

    def close(self) -> None:
        """Waits for what is to be written."""
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
        number = kept.trajectory.key.group.index
        key = kept.version, number, 0
        db = self._database = self._database or Database(self._path, run=self._run, logged=False)
        with db.transaction():
            if not db.execute("SELECT 1 FROM groups WHERE epoch = ? LIMIT 1", kept.version):
                self._forget(db)
            names = "(epoch, position, attempt, task, state) VALUES (?, ?, ?, ?, ?)"
            db.execute(
                f"INSERT OR REPLACE INTO groups {names}",
                *key,
                encode_task(kept.task),
                State.EVALUATED,
            )
            db.execute_rows(
                "INSERT OR REPLACE INTO rollouts VALUES {}",
                [(*key, made.key.sample, *columns(made))],
            )

    def _forget(self, db: Database) -> None:
        """Makes room for one evaluation more."""
        versions = [
            version for (version,) in db.execute("SELECT DISTINCT epoch FROM groups ORDER BY epoch")
        ]
        for version in versions[1 : max(1, len(versions) - KEPT_EVALUATIONS + 2)]:
            for table in ("groups", "rollouts"):
                db.execute(f"DELETE FROM {table} WHERE epoch = ?", version)
