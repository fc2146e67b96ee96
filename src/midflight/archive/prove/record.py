"""A store's file as plain values, for the proof: no type of the program that wrote it."""

import sqlite3
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from midflight.errors import StoreCorrupt, TokensRemoved
from midflight.trajectories.database import look
from midflight.trajectories.segments import read
from midflight.trajectories.store_errors import naming

Key: TypeAlias = tuple[int, int, int]
"""Epoch, position and attempt of a group."""

MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    struct.error,
)
"""The errors of a computation with values that no store has."""

NOTHING_SCORED: tuple[Any, ...] = ({}, {}, (), {})
"""Components, metrics, rewards of answers and fields of a rollout that has none."""
_COLUMNS = (
    "token_ids",
    "generated",
    "loss_mask",
    "logprobs",
    "versions",
    "kv_versions",
    "turns",
    "kept",
    "kept_lengths",
    "experts",
    "role",
    "records",
)
_MISSING: Mapping[str, Any] = {
    "turns": None,
    "kept": b"",
    "kept_lengths": b"",
    "experts": b"",
    "role": "",
    "records": (),
}
"""The values that stand for the columns that an older store lacks."""


@dataclass(frozen=True, slots=True)
class RecordedRow:
    arrays: Mapping[str, bytes]
    role: str
    records: tuple[Any, ...]
    """Start, first, end, conditions and digest of each answer."""

    @property
    def num_trainable(self) -> int:
        return self.arrays["loss_mask"].count(1)


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A rollout that has ended."""

    key: Key
    sample: int
    columns: Mapping[str, Any]
    rows: tuple[RecordedRow, ...]
    unread: str = ""
    """A sentence if the disk has damaged its rows, which are left out then."""
    removed: bool = False
    """True if the run has removed its rows."""

    @property
    def name(self) -> str:
        return "-".join(map(str, (*self.key, self.sample)))

    @property
    def num_trainable(self) -> int:
        return sum(row.num_trainable for row in self.rows)


@dataclass(frozen=True, slots=True)
class StoredGroup:
    key: Key
    task: bytes
    state: str
    reason: str | None
    made: int | None
    """The version that the step on it made, if there was one."""
    version: int | None
    """The same as the column has it: None as long as no checkpoint has the step."""

    @property
    def name(self) -> str:
        return "-".join(map(str, self.key))


@dataclass(frozen=True, slots=True)
class Link:
    """A link of the chain: an event, in the order in which they happened."""

    number: int
    event: str
    key: Key
    sample: int | None
    detail: bytes | None
    digest: bytes
    head: bytes


class StoreRecord:
    """A store's file, as it is at one moment. Groups and links are held, rollouts are read as they
    are asked for.
    """

    def __init__(self, path: Path, segments: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._segments = segments
        self._connection = connection
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        self.has_chain = "seals" in tables
        self.groups: Mapping[Key, StoredGroup] = {group.key: group for group in self._groups()}
        self.forks: Sequence[tuple[int, int]] = connection.execute(
            "SELECT checkpoint, version FROM forks ORDER BY rowid"
        ).fetchall()
        """The checkpoint and the version of each place where a trainer went on under another
        number.
        """
        self.leases: Sequence[tuple[int, int]] = connection.execute(
            "SELECT lease, train_version FROM leases ORDER BY lease"
        ).fetchall()
        """Number and version of each lease that is in no checkpoint yet."""
        self.removed: set[tuple[Key, int]] = set()
        """The rollouts whose rows the run has removed, among those that were read."""
        self.removed_groups: set[Key] = set()
        """Their groups."""

    def links(self) -> Iterator[Link]:
        """The chain, in order."""
        if not self.has_chain:
            return
        columns = "number, event, epoch, position, attempt, sample, detail, digest, head"
        for number, event, epoch, position, attempt, *rest in self._connection.execute(
            f"SELECT {columns} FROM seals ORDER BY number"
        ):
            yield Link(number, event, (epoch, position, attempt), *rest)

    def rollouts(self, group: Key | None = None) -> Iterator[StoredRollout]:
        """The rollouts that have ended, in the order of their keys: of one group or of all."""
        columns = "reward, truncated, room, error, num_trainable, rows, scored"
        where = "" if group is None else "WHERE epoch = ? AND position = ? AND attempt = ?"
        for epoch, position, attempt, sample, *values in self._connection.execute(
            f"SELECT epoch, position, attempt, sample, {columns} FROM rollouts {where} "
            "ORDER BY epoch, position, attempt, sample",
            group or (),
        ):
            found: dict[str, Any] = dict(zip(columns.split(", "), values, strict=True))
            key = (epoch, position, attempt)
            scored = found["scored"]
            found["scored"] = NOTHING_SCORED
            try:
                found["scored"] = self.decoded("the parts of its reward", scored)
                blob = read((self._segments,), found.pop("rows"))
                rows = tuple(_row(row) for row in self.decoded("its rows", blob))
            except TokensRemoved:
                self.removed.add((key, sample))
                self.removed_groups.add(key)
                yield StoredRollout(key, sample, found, (), removed=True)
            except StoreCorrupt as error:
                yield StoredRollout(key, sample, found, (), unread=str(error))
            except MALFORMED as error:
                said = f"its rows are none ({error!r})"
                yield StoredRollout(key, sample, found, (), unread=said)
            else:
                yield StoredRollout(key, sample, found, rows)

    def fates(self, rollout: StoredRollout) -> dict[tuple[str, str], int]:
        """The tokens of a rollout by fate and reason."""
        rows = self._connection.execute(
            "SELECT fate, reason, num_tokens FROM fates WHERE epoch = ? AND position = ? AND "
            "attempt = ? AND sample = ?",
            (*rollout.key, rollout.sample),
        )
        return {(fate, reason): number for fate, reason, number in rows}

    def orphaned_fates(self) -> list[str]:
        """The rollouts that have tokens and are not there."""
        rows = self._connection.execute(
            "SELECT DISTINCT epoch, position, attempt, sample FROM fates LEFT JOIN rollouts USING "
            "(epoch, position, attempt, sample) WHERE num_trainable IS NULL"
        )
        return ["-".join(map(str, row)) for row in rows]

    def decoded(self, what: str, blob: bytes) -> Any:
        """A value of msgpack. Raises `StoreCorrupt`, which names it."""
        try:
            return msgspec.msgpack.decode(blob)
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreCorrupt(
                f"{self.path}: {what} cannot be read ({error}); restore the file from a copy."
            ) from error

    def _groups(self) -> Iterator[StoredGroup]:
        rows = self._connection.execute(
            "SELECT epoch, position, attempt, task, state, reason, version, train_version, done "
            "FROM groups LEFT JOIN leases USING (lease)"
        )
        for epoch, position, attempt, task, state, reason, version, train_version, done in rows:
            made = train_version + 1 if done else version
            is_trained = made is not None and state in ("leased", "trained")
            yield StoredGroup(
                (epoch, position, attempt),
                task,
                "trained" if is_trained else state,
                reason,
                made if is_trained else None,
                version,
            )


@contextmanager
def opened(path: Path, segments: Path) -> Generator[StoreRecord]:
    """Opens a store for a proof, in one transaction."""
    with naming(path), closing(look(path)) as connection:
        connection.isolation_level = None
        connection.execute("BEGIN")
        yield StoreRecord(path, segments, connection)


def _row(values: list[Any]) -> RecordedRow:
    columns = {**_MISSING, **dict(zip(_COLUMNS, values, strict=False))}
    role = columns.pop("role")
    records = columns.pop("records")
    arrays: dict[str, bytes] = {}
    for name, value in columns.items():
        if isinstance(value, list):
            one_each, lengths = cast("list[bytes]", value)
            arrays[name] = _repeated(one_each, lengths, name)
        else:
            arrays[name] = value or b""
    return RecordedRow(arrays, role, tuple(records))


def _repeated(values: bytes, lengths: bytes, name: str) -> bytes:
    """The array that was stored as one value for each run, and the lengths of the runs."""
    width = 1 if name in ("generated", "loss_mask") else 4
    found = np.frombuffer(values, np.dtype((np.void, width)))
    return np.repeat(found, np.frombuffer(lengths, "<i4")).tobytes()
