"""Full-text search over the rollouts of a run. Its index is in a file of the viewer's own, which
grows with the run. The run's folder is not touched.
"""

import hashlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from midflight.archive.store_reader import StoreReader, file_of, reading
from midflight.errors import MidflightError, StoreCorrupt
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.database import decode_scored
from midflight.trajectories.store_errors import naming
from midflight.types import Kind, Row

AT_ONCE = 200
"""The number of rollouts that one transaction adds: about 30 ms at 300 tokens each, so that no page
waits long.
"""
SHAPE = 2
"""The version of the index's tables. An index of another version is made anew."""


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """The progress of the index: how many of the rollouts in the store can be found."""

    done: int
    total: int

    @property
    def complete(self) -> bool:
        return self.done >= self.total


class WordIndex:
    """The index of one run. Several viewers may let it grow at once."""

    def __init__(self, folder: Path, kind: Kind = Kind.TRAINING) -> None:
        self._folder = folder
        self._kind = kind
        self._store = file_of(folder, kind).resolve()
        try:
            inode = self._store.stat().st_ino
        except FileNotFoundError:
            with reading(folder, kind):  # names the fault of the folder
                raise AssertionError("a store that is not there was opened") from None
        place = f"{SHAPE}:{self._store}:{inode}".encode()
        self.path = cache_folder() / f"{hashlib.sha256(place).hexdigest()[:24]}.sqlite"

    @staticmethod
    def query(words: str) -> str:
        """Returns the query for FTS5. Each word is the beginning of a word. Text in quotes is
        searched as it is.
        """
        terms: list[str] = []
        for phrase, word in re.findall(r'"([^"]*)"|(\S+)', words):
            if phrase:
                terms.append(f'"{phrase}"')
            elif word:
                without_quotes = word.replace('"', "")
                terms.append(f'"{without_quotes}"*')
        return " ".join(terms)

    def grow(self, seconds: float) -> IndexProgress:
        """Adds the rollouts that the store has and the index has not. It takes at most about
        `seconds`.
        """
        end = time.monotonic() + seconds
        tokenizer = Tokenizer.load(self._folder / "start")
        with closing(self._open()) as index, reading(self._folder, self._kind) as store:
            ((last,),) = store.ask("SELECT COALESCE(MAX(rowid), 0) FROM rollouts")
            done = _number(index)
            while done < last:
                done = self._add(index, store, tokenizer)
                if time.monotonic() >= end:
                    break
        return IndexProgress(min(done, last), last)

    def _add(self, index: sqlite3.Connection, store: StoreReader, tokenizer: Tokenizer) -> int:
        """Adds the next rollouts in one transaction, so that two viewers don't add the same."""
        with _transaction(index, self.path):
            after = _number(index)
            for number, *key, task, error, rows, scored in store.ask(
                "SELECT r.rowid, epoch, position, attempt, sample, task, error, rows, scored "
                "FROM rollouts r JOIN groups USING (epoch, position, attempt) WHERE r.rowid > ? "
                "ORDER BY r.rowid LIMIT ?",
                after,
                AT_ONCE,
            ):
                after = number
                asked = store.task(task)
                fields = store.decoded(decode_scored, scored).fields
                lines = [asked.id, asked.source, error or ""]
                if fields:
                    lines.append(json.dumps(fields))
                for row in _readable_rows(store, rows):
                    lines.append(tokenizer.decode(np.asarray(row.token_ids).tolist()))
                text = "\n".join(lines)
                index.execute("INSERT INTO said (rowid, text) VALUES (?, ?)", (number, text))
                index.execute("INSERT OR REPLACE INTO told VALUES (?, ?, ?, ?, ?)", (number, *key))
            index.execute("UPDATE reached SET number = ?", (after,))
        return after

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.parent.chmod(0o700)  # it holds the words of conversations
        if not self.path.exists():
            forget_deleted()
        with naming(self.path):
            index = sqlite3.connect(self.path, isolation_level=None, timeout=10.0)
            index.execute("PRAGMA journal_mode = WAL")
            # Entries that a power cut takes are indexed again.
            index.execute("PRAGMA synchronous = OFF")
            with _transaction(index, self.path):
                tables = "SELECT 1 FROM sqlite_master WHERE name = 'reached'"
                if not index.execute(tables).fetchone():
                    self._create(index)
        return index

    def _create(self, index: sqlite3.Connection) -> None:
        index.execute("CREATE VIRTUAL TABLE said USING fts5(text, content = '')")
        # A rollout that was kept anew has a new number, and is not found by its earlier text.
        index.execute(
            "CREATE TABLE told (number INTEGER PRIMARY KEY, epoch INTEGER, position INTEGER, "
            "attempt INTEGER, sample INTEGER, UNIQUE (epoch, position, attempt, sample))"
        )
        index.execute("CREATE TABLE reached (number INTEGER NOT NULL, store TEXT NOT NULL)")
        index.execute("INSERT INTO reached VALUES (0, ?)", (str(self._store),))


def _readable_rows(store: StoreReader, rows: bytes) -> tuple[Row, ...]:
    """The rows, or none if they cannot be read: such a rollout is found by its task alone."""
    try:
        return store.rows(rows)
    except StoreCorrupt:
        return ()


@contextmanager
def _transaction(index: sqlite3.Connection, path: Path) -> Generator[None]:
    with naming(path):
        index.execute("BEGIN IMMEDIATE")
        try:
            yield
            index.execute("COMMIT")
        except (sqlite3.Error, MidflightError):
            index.execute("ROLLBACK")
            raise


def _number(index: sqlite3.Connection) -> int:
    """The number of the last rollout that was added."""
    return index.execute("SELECT number FROM reached").fetchone()[0]


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/midflight/words`. Its files may be deleted at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "midflight" / "words"


def forget_deleted() -> None:
    """Deletes the indices of runs that are not there any more."""
    for path in cache_folder().glob("*.sqlite"):
        with (
            suppress(sqlite3.Error, OSError),
            closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as index,
        ):
            (store,) = index.execute("SELECT store FROM reached").fetchone()
            if not Path(store).exists():
                path.unlink(missing_ok=True)
                path.with_name(f"{path.name}-wal").unlink(missing_ok=True)
                path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
