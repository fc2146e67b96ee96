"""One SQLite connection as the store uses it: statements, joined transactions, and a few numbers that only grow."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from midflight.errors import StoreCorrupt
from midflight.trajectories.schema import connect, naming

Value: TypeAlias = "int | float | str | bytes | None"


class Database:
    """Errors of SQLite come out as `StoreCorrupt` or `StoreFailed`, with the path and the remedy."""

    def __init__(self, path: Path, *, run: str) -> None:
        self.path = path
        self._sync_wanted = False
        self._connection = connect(path)
        try:
            self._claim(run)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def execute(self, sql: str, *values: Value) -> list[tuple[Any, ...]]:
        """All rows; their columns have the types that the schema gives them."""
        with naming(self.path):
            return self._connection.execute(sql, values).fetchall()

    def move(self, sql: str, *values: Value) -> None:
        """A change of one group's state. That it was in the state it leaves is what makes a group trained at most once (I8)."""
        with naming(self.path):
            moved = self._connection.execute(sql, values).rowcount
        assert moved == 1, f"I8: {moved} groups moved by {sql} {values}"

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Joins the transaction that is open, or makes one."""
        if self._connection.in_transaction:
            yield
            return
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
            if self._sync_wanted:
                self._sync()
        except BaseException:
            if self._connection.in_transaction:  # a full disk may have rolled back already
                self._connection.execute("ROLLBACK")
            raise

    def sync_after_commit(self) -> None:
        """Once the open transaction is committed, brings everything onto the disk itself, so that a power cut cannot undo it."""
        self._sync_wanted = True

    def _sync(self) -> None:
        self._sync_wanted = False
        self.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def number(self, name: str) -> int | None:
        """`None` before it was first raised."""
        found = self.execute("SELECT value FROM numbers WHERE name = ?", name)
        return found[0][0] if found else None

    def raise_number(self, name: str, value: int) -> None:
        """To `value`, if it was below."""
        self.execute("INSERT INTO numbers VALUES (?, ?) ON CONFLICT DO UPDATE SET value = max(value, excluded.value)", name, value)

    def count(self, name: str) -> int:
        """1, 2, 3, ... for ever."""
        value = (self.number(name) or 0) + 1
        self.raise_number(name, value)
        return value

    def _claim(self, run: str) -> None:
        with self.transaction():
            self.execute("INSERT INTO runs SELECT ? WHERE NOT EXISTS (SELECT * FROM runs)", run)
            ((owner,),) = self.execute("SELECT name FROM runs")
        if owner != run:
            raise StoreCorrupt(f"Opening {self.path}: it belongs to run {owner!r}, not {run!r}; choose another run folder.")
