"""Increments: files that together are a copy of a store's index. An increment has all rows of the
groups that have changed since the one before it, and is never changed itself.

A checkpoint has the name of its newest increment alone, so that a copy takes what came since the
last one, however long the run is. Each increment names the one before it. They lie in the run's
folder, and stay there when a checkpoint is removed.

Triggers in the index record which groups change, in the transaction of the change. A
group is recorded with the number of the copy that began last before it changed. A record is removed
when a copy that began later is on the disk:

| a process dies | what the next copy has |
|---|---|
| before its copy is on the disk | all that had changed, because every record is still there |
| after that, before the store has noted it | the same: it follows the increment that is noted |
| later | what has changed since that copy began |
"""

import secrets
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec

from midflight.errors import StoreCorrupt
from midflight.trajectories.database import (
    CHANGED,
    COPIES,
    INCREMENT,
    OF_GROUPS,
    OF_RUN,
    SEALED,
    address_to_read,
    connect,
    recordings,
)
from midflight.trajectories.store_errors import naming, sync

INCREMENTS = "increments"
"""The name of the folder in that of the run, or of one of its gateways."""
PAGE_BYTES = 1024
"""Each table takes a page at least, and an increment of a single step has few rows."""
_SUFFIX = ".sqlite"
_REMEDY = "restore the file from a copy, or resume on the machine that the run was on, where its store is."
_KEY = "epoch, position, attempt"


class Increment(msgspec.Struct, frozen=True):
    """An increment that is on the disk."""

    name: int
    """A number drawn at random, which no other increment has."""
    copy: int
    """The number of the copy that it was made for."""
    seal: int
    """The number of the newest seal that it has."""


def path_of(name: int, folder: Path) -> Path:
    return folder / f"{name:016x}{_SUFFIX}"


# --- Writing --------------------------------------------------------------------------------------


def write_increment(store: Path, folder: Path) -> Increment:
    """Writes what has changed in the store since the increment that it has noted, as it is at the
    beginning. The file is whole and on the disk when this returns; if it raises, there is none.

    It blocks, and another process may write to the store meanwhile. Raises `StoreFailed` with the
    remedy.
    """
    name = secrets.randbits(62)
    path = path_of(name, folder)
    draft = path.with_name(f"{path.name}.writing")
    with naming(draft):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            naming(draft),
            closing(sqlite3.connect(draft, isolation_level=None, uri=True)) as target,
        ):
            # a draft that is not finished is removed
            target.execute("PRAGMA synchronous = OFF")
            target.execute("PRAGMA journal_mode = MEMORY")
            target.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            target.execute("ATTACH ? AS store", (address_to_read(store),))
            # its first look at the store fixes the moment of all others
            target.execute("BEGIN")
            made = _written(target, name)
            target.execute("COMMIT")
        sync(draft)
        draft.replace(path)
        sync(folder)
    finally:
        draft.unlink(missing_ok=True)
    return made


def _written(target: sqlite3.Connection, name: int) -> Increment:
    for table in OF_RUN:
        target.execute(f"CREATE TABLE {table} AS SELECT * FROM store.{table}")
    numbers = dict(target.execute("SELECT name, value FROM numbers").fetchall())
    target.execute(f"CREATE TABLE changed AS SELECT {_KEY} FROM store.changed")
    for table in OF_GROUPS:
        columns = "t.*" if table != "rollouts" else "t.rowid AS number, t.*"
        target.execute(
            f"CREATE TABLE {table} AS SELECT {columns} FROM store.changed CROSS JOIN "
            f"store.{table} t USING ({_KEY})"
        )
    sealed = numbers.get(SEALED, 0)
    target.execute(f"CREATE TABLE seals AS SELECT * FROM store.seals WHERE number > {sealed}")
    ((seal,),) = target.execute("SELECT COALESCE(MAX(number), ?) FROM seals", (sealed,))
    return Increment(name, numbers[COPIES], seal)


# --- Reading --------------------------------------------------------------------------------------


def numbers_of(name: int, folder: Path) -> Mapping[str, int]:
    """The numbers of the store at the moment of an increment."""
    path = path_of(name, folder)
    with naming(path), closing(sqlite3.connect(_address(path), uri=True)) as found:
        return dict(found.execute("SELECT name, value FROM numbers").fetchall())


def restore(name: int, folder: Path, store: Path) -> None:
    """Makes `store` what the store was when the increment `name` was made. What it has already of
    the increments in `folder` is not read again.

    Each increment is a transaction: whenever this ends, `store` is what it was at some copy. Raises
    `StoreCorrupt` if an increment is not there or cannot be read.
    """
    with naming(store):
        if not store.is_file():
            connect(store).close()
        with closing(sqlite3.connect(store, isolation_level=None, uri=True)) as target:
            target.execute("PRAGMA synchronous = NORMAL")
            found = target.execute("SELECT value FROM numbers WHERE name = ?", (INCREMENT,))
            ((had,),) = found.fetchall() or [(None,)]
            for link in reversed(list(_until(name, folder, had))):
                _add(link, folder, target)


class _Link(NamedTuple):
    name: int
    before: int | None
    """The increment before it. The first one has none."""


def _until(name: int, folder: Path, had: int | None) -> Iterator[_Link]:
    """The increments from `name` back to the one after `had`, or to the first."""
    left: int | None = name
    while left is not None and left != had:
        link = _Link(left, numbers_of(left, folder).get(INCREMENT))
        yield link
        left = link.before


def _add(link: _Link, folder: Path, target: sqlite3.Connection) -> None:
    """Puts the groups of an increment in the place of what the target had of them. The first one
    takes the place of all.
    """
    path = path_of(link.name, folder)
    with naming(path):
        target.execute("ATTACH ? AS part", (_address(path),))
        ((found,),) = target.execute("PRAGMA part.quick_check(1)").fetchall()
    if found != "ok":
        raise StoreCorrupt(f"Reading {path}: {found}; {_REMEDY}")
    target.execute("BEGIN IMMEDIATE")
    if link.before is None:
        those = "1"
        target.execute("DELETE FROM main.seals")
    else:
        those = f"({_KEY}) IN (SELECT {_KEY} FROM part.changed)"
    for table in OF_GROUPS:
        target.execute(f"DELETE FROM main.{table} WHERE {those}")
    for table in OF_RUN:
        target.execute(f"DELETE FROM main.{table}")
    for table in (*OF_GROUPS, *OF_RUN, "seals"):
        _insert(table, target)
    target.execute("INSERT OR REPLACE INTO main.numbers VALUES (?, ?)", (INCREMENT, link.name))
    target.execute(
        "INSERT OR REPLACE INTO main.numbers SELECT ?, COALESCE(MAX(number), 0) FROM main.seals",
        (SEALED,),
    )
    if link.before is None:
        target.execute(CHANGED)
        for trigger in recordings():
            target.execute(trigger)
    target.execute("DELETE FROM main.changed")
    target.execute("COMMIT")
    target.execute("DETACH part")


def _insert(table: str, target: sqlite3.Connection) -> None:
    columns = [name for _, name, *_ in target.execute(f"PRAGMA part.table_info({table})")]
    into = list(columns)
    if table == "rollouts":
        into[0] = "rowid"
    target.execute(
        f"INSERT INTO main.{table} ({', '.join(into)}) SELECT {', '.join(columns)} FROM "
        f"part.{table}"
    )


def _address(path: Path) -> str:
    """The address by which SQLite opens an increment. Nobody writes to it any more."""
    if not path.is_file():
        raise StoreCorrupt(
            f"Reading {path}: this part of the copy of the store is not there; {_REMEDY}"
        )
    return f"{path.resolve().as_uri()}?mode=ro&immutable=1"
