"""One SQLite file as the store uses it, its index: tables and blobs, settings, statements, joined
transactions, and errors with names.
"""

import os
import secrets
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from midflight.errors import StoreCorrupt, StoreNewer
from midflight.trajectories.store_errors import naming
from midflight.types import GroupKey, Json, Reason, Row, Task, Trajectory, Turn
from midflight.types.digests import NOTHING, older_digest, seal_after
from midflight.types.facts import AdmissionState
from midflight.types.rollouts import RoleRecord, Seal, TurnRecord
from midflight.types.run_lengths import run_lengths
from midflight.types.token_ids import AnyIds, SharedIds, packed, unpacked

if TYPE_CHECKING:
    from midflight.trajectories.segments import SegmentWriter

Decoded = TypeVar("Decoded")
Given = TypeVar("Given")
Value: TypeAlias = "int | float | str | bytes | None"

APPLICATION_ID = 0x4D464C54
"""Marks the file as ours ("MFLT")."""
SCHEMA_VERSION = 6
OLDER_VERSION = 5
"""The schema whose rows all lie in the index itself. Such a store is read, and continued under the
new number.
"""
MAX_ROWS = 32
"""Rows of one statement. SQLite keeps at most this many texts of it parsed."""
BEGUN = "begun"
"""The name of a number in a store that was drawn when the store was made. Its copies have the
same.
"""
COPIED = "copied"
"""The name of a number in a store: the newest version whose checkpoint has a copy of it."""
COPIES = "copies"
"""The name of a number in a store: how many copies have begun."""
INCREMENT = "increment"
"""The name of a number in a store: its newest increment (`increments`)."""
SEALED = "sealed"
"""The name of a number in a store: the newest seal that its increments have."""

TABLES = """
CREATE TABLE runs (name TEXT NOT NULL);
CREATE TABLE numbers (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE forks (                -- where a trainer went on from a checkpoint under a number that was not its own
    checkpoint INTEGER NOT NULL, version INTEGER NOT NULL
);
CREATE TABLE groups (
    epoch INTEGER NOT NULL, position INTEGER NOT NULL, attempt INTEGER NOT NULL,
    task BLOB NOT NULL,
    state TEXT NOT NULL,            -- State
    reason TEXT,                    -- of a dropped one
    finished INTEGER,               -- order of finishing, kept while the group may wait again
    lease INTEGER,                  -- while a step on it is not final
    version INTEGER,                -- of a trained one: what the step on it made
    PRIMARY KEY (epoch, position, attempt)
) WITHOUT ROWID;
CREATE INDEX groups_by_lease ON groups (lease) WHERE lease IS NOT NULL;
CREATE TABLE rollouts (             -- those that have ended
    epoch INTEGER NOT NULL, position INTEGER NOT NULL, attempt INTEGER NOT NULL, sample INTEGER NOT NULL,
    reward REAL, truncated INTEGER NOT NULL, room INTEGER, error TEXT, seconds REAL NOT NULL,
    num_trainable INTEGER NOT NULL,
    rows BLOB NOT NULL,             -- their place in a segment, or the rows themselves
    scored BLOB NOT NULL,           -- what its reward is made of
    PRIMARY KEY (epoch, position, attempt, sample)
);
CREATE TABLE turns (                -- completed turns of rollouts that have not ended
    epoch INTEGER NOT NULL, position INTEGER NOT NULL, attempt INTEGER NOT NULL, sample INTEGER NOT NULL,
    number INTEGER NOT NULL, turn BLOB NOT NULL,
    PRIMARY KEY (epoch, position, attempt, sample, number)
);
CREATE TABLE fates (                -- tokens of rollouts that have ended (I3)
    epoch INTEGER NOT NULL, position INTEGER NOT NULL, attempt INTEGER NOT NULL, sample INTEGER NOT NULL,
    fate TEXT NOT NULL, reason TEXT NOT NULL, num_tokens INTEGER NOT NULL,
    PRIMARY KEY (epoch, position, attempt, sample, fate, reason)
) WITHOUT ROWID;
CREATE TABLE leases (               -- given, and in no checkpoint yet
    lease INTEGER PRIMARY KEY, train_version INTEGER NOT NULL, done INTEGER NOT NULL
);
"""

TASK_BEGINS = 64
"""The bytes of a task that its index has: the id is among them."""
READING = f"""
CREATE INDEX IF NOT EXISTS rollouts_brief ON rollouts
    (epoch, position, attempt, sample, reward, truncated, seconds, num_trainable, error);
CREATE INDEX IF NOT EXISTS rollouts_failed ON rollouts (error) WHERE reward IS NULL;
CREATE INDEX IF NOT EXISTS groups_by_fate ON groups (state, reason);
CREATE INDEX IF NOT EXISTS groups_by_task ON groups (substr(task, 1, {TASK_BEGINS}));
DROP INDEX IF EXISTS groups_by_state;
CREATE TABLE IF NOT EXISTS sources (name TEXT PRIMARY KEY) WITHOUT ROWID;
"""
"""Indexes and names by which a reader finds the newest groups of a run and passes over the others.
A store of an older Midflight is read without them. It gets them when its run goes on.
"""

SEALS = """
CREATE TABLE IF NOT EXISTS seals (  -- a link for each event, in the order in which they happened
    number INTEGER PRIMARY KEY,
    event TEXT NOT NULL,            -- rollout: it ended; admitted: a group started; waiting, or a reason: its end; leased, taken_back, went_back, interrupted
    -- of a rollout or group; of a lease its number, its version and 0; of going back checkpoint, version and 0; of an interruption 0
    epoch INTEGER NOT NULL, position INTEGER NOT NULL, attempt INTEGER NOT NULL,
    sample INTEGER,                 -- of a rollout
    detail BLOB,                    -- of a rollout its tokens that are in no row, of a start its `AdmissionState`, of a lease and of going back the groups
    digest BLOB NOT NULL,
    head BLOB NOT NULL              -- the digest of this link and of the head before it
)
"""
"""The chain of digests of all that the store was told (`types.digests`). A store of an older
Midflight gets it when its run goes on: then it begins there.
"""

OF_RUN = ("runs", "numbers", "forks", "leases", "sources")
"""Small tables about the whole run."""
OF_GROUPS = ("groups", "rollouts", "turns", "fates")
"""Tables whose rows belong to a group each. Seals are only added."""
CHANGED = """
CREATE TABLE IF NOT EXISTS changed (    -- groups that have changed since a copy, and how many had begun then
    epoch INTEGER NOT NULL, position INTEGER NOT NULL, attempt INTEGER NOT NULL,
    copies INTEGER NOT NULL,
    PRIMARY KEY (epoch, position, attempt)
) WITHOUT ROWID
"""
"""The record of changes, for copies of a store. A store gets it with its triggers (`recordings`) for
its first copy.
"""


SCORES = (
    "SELECT epoch, position, attempt, task, state, COUNT(reward), COUNT(sample) - COUNT(reward), "
    "COUNT(CASE WHEN reward >= ? THEN 1 END), TOTAL(reward) FROM groups LEFT JOIN rollouts USING "
    "(epoch, position, attempt) GROUP BY epoch, position, attempt"
)
"""The scores of every group, by the reward from which a rollout has passed."""


class State(StrEnum):
    """The state of a group. `TRAINED` is final: a checkpoint contains it."""

    IN_LINE = "in_line"
    """It starts before any new task is drawn."""
    RUNNING = "running"
    WAITING = "waiting"
    LEASED = "leased"
    TRAINED = "trained"
    DROPPED = "dropped"
    EVALUATED = "evaluated"
    """It is a held-out task, in the file of evaluations, and is never trained on."""


def recordings() -> Iterator[str]:
    """The triggers that record each change of a group, whichever statement makes it. `ON CONFLICT`
    of that statement would decide in place of `OR REPLACE` in a trigger.
    """
    for table in OF_GROUPS:
        for event, row in (("insert", "NEW"), ("update", "NEW"), ("delete", "OLD")):
            yield (
                f"CREATE TRIGGER IF NOT EXISTS {table}_{event} AFTER {event} ON {table} BEGIN "
                f"INSERT INTO changed VALUES ({row}.epoch, {row}.position, {row}.attempt, "
                f"COALESCE((SELECT value FROM numbers WHERE name = '{COPIES}'), 0)) "
                "ON CONFLICT (epoch, position, attempt) DO UPDATE SET copies = excluded.copies; "
                "END"
            )


class Database:
    """A connection to the file. Errors of SQLite come out as `StoreCorrupt` or `StoreFailed`, with
    the path and the remedy.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str | None,
        logged: bool = True,
        segments: "SegmentWriter | None" = None,
    ) -> None:
        """Without a run it is opened to be read. `connect` explains `logged`. What is appended to
        `segments` belongs to the transaction that is open.
        """
        self.path = path
        self._segments = segments
        self._sync_wanted = False
        self._connection = connect(path, logged=logged) if run is not None else look(path)
        try:
            if run is not None:
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

    def execute_rows(self, sql: str, rows: Sequence[tuple[Value, ...]]) -> None:
        """Makes a change by rows of equal length. Their placeholders replace `{}` in `sql`. SQLite
        works on many rows without the interpreter's lock, which it would otherwise have to take
        again after each.
        """
        for first in range(0, len(rows), MAX_ROWS):
            some = rows[first : first + MAX_ROWS]
            row_places = f"({', '.join('?' * len(some[0]))})"
            all_places = ", ".join([row_places] * len(some))
            self.execute(sql.format(all_places), *chain.from_iterable(some))

    def move(self, sql: str, *values: Value) -> None:
        """Changes one group's state. A group is trained at most once (I8), because it must be in
        the state that it leaves.
        """
        with naming(self.path):
            moved = self._connection.execute(sql, values).rowcount
        assert moved == 1, f"I8: {moved} groups moved by {sql} {values}"

    def add_source(self, name: str) -> None:
        """Keeps the name of a source of which there is a task."""
        self.execute("INSERT OR IGNORE INTO sources VALUES (?)", name)

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
            if self._segments is not None:
                self._segments.settle()
            if self._sync_wanted:
                self._sync()
        except BaseException:
            if self._segments is not None:
                self._segments.undo()
            if self._connection.in_transaction:  # a full disk may have rolled back already
                self._connection.execute("ROLLBACK")
            raise

    def sync_after_commit(self) -> None:
        """Brings everything onto the disk itself once the open transaction is committed, so that a
        power cut cannot undo it.
        """
        self._sync_wanted = True

    def _sync(self) -> None:
        self._sync_wanted = False
        if self._segments is not None:
            self._segments.sync()
        self.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def number(self, name: str) -> int | None:
        """`None` before it was first set."""
        found = self.execute("SELECT value FROM numbers WHERE name = ?", name)
        return found[0][0] if found else None

    def set_number(self, name: str, value: int) -> None:
        self.execute(
            "INSERT INTO numbers VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value",
            name,
            value,
        )

    def raise_number(self, name: str, value: int) -> None:
        """Sets a number to `value` if it was below that, or was not set."""
        self.execute(
            (
                "INSERT INTO numbers VALUES (?, ?) ON CONFLICT DO UPDATE SET value = max(value, "
                "excluded.value)"
            ),
            name,
            value,
        )

    def record_changes(self) -> None:
        """Records from now on which groups change. At first all of them have changed."""
        if self.execute("SELECT 1 FROM sqlite_master WHERE name = 'changed'"):
            return
        self.execute(CHANGED)
        for table in OF_GROUPS:
            self.execute(
                "INSERT OR IGNORE INTO changed SELECT DISTINCT epoch, position, attempt, 0 FROM "
                f"{table}"
            )
        for trigger in recordings():
            self.execute(trigger)

    def _claim(self, run: str) -> None:
        with self.transaction():
            self.execute("INSERT INTO runs SELECT ? WHERE NOT EXISTS (SELECT * FROM runs)", run)
            ((owner,),) = self.execute("SELECT name FROM runs")
        if owner != run:
            raise StoreCorrupt(
                f"Opening {self.path}: it belongs to run {owner!r}, not {run!r}; choose another "
                "run folder."
            )


def connect(path: Path, *, logged: bool = True) -> sqlite3.Connection:
    """Opens the file, or makes it. One thread at a time may use it, and this process alone.
    `logged`: SQLite writes by a log (WAL), which is fast, but not for a file system of a network.
    """
    with naming(path):
        is_new = not path.exists() or path.stat().st_size == 0
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=5.0
        )
        try:
            if is_new:
                _create(connection)
            else:
                _check(connection, path)
            _begin_chain(connection)
            _let_read(connection)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            # WAL with NORMAL survives the death of any process at any instant. A power cut may take
            # the newest transactions; `Store.checkpointed` therefore syncs before a checkpoint
            # relies on them.
            connection.execute(f"PRAGMA journal_mode = {'WAL' if logged else 'DELETE'}")
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
        return connection


def _let_read(connection: sqlite3.Connection) -> None:
    """Makes what readers of a run need, if it is not there."""
    (is_there,) = connection.execute(
        "SELECT COUNT(*) FROM sqlite_master WHERE name = 'sources'"
    ).fetchone()
    if is_there:
        return
    tasks = connection.execute("SELECT task FROM groups")
    names = {decode_task(task).source for (task,) in tasks}
    connection.executescript(f"BEGIN IMMEDIATE;\n{READING}")
    connection.executemany("INSERT INTO sources VALUES (?)", [(name,) for name in names])
    connection.execute("COMMIT")


def _begin_chain(connection: sqlite3.Connection) -> None:
    """Makes the table of digests if it is not there. In a store of an older Midflight its first
    link names what had ended before.
    """
    (is_there,) = connection.execute(
        "SELECT COUNT(*) FROM sqlite_master WHERE name = 'seals'"
    ).fetchone()
    if is_there:
        return
    rollouts = connection.execute(
        "SELECT epoch, position, attempt, sample FROM rollouts ORDER BY 1, 2, 3, 4"
    ).fetchall()
    groups = connection.execute(
        "SELECT epoch, position, attempt FROM groups WHERE state NOT IN (?, ?) ORDER BY 1, 2, 3",
        (State.RUNNING, State.IN_LINE),
    ).fetchall()
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(SEALS)
    if rollouts or groups:
        keys = _encode((rollouts, groups))
        digest = older_digest(keys)
        first = seal_after(Seal(0, NOTHING), digest)
        connection.execute(
            "INSERT INTO seals VALUES (?, 'older', 0, 0, 0, NULL, ?, ?, ?)",
            (first.number, keys, digest, first.head),
        )
    connection.execute("COMMIT")


def look(path: Path) -> sqlite3.Connection:
    """Opens the file to read it, also while another process writes to it."""
    with naming(path):
        connection = sqlite3.connect(address_to_read(path), uri=True, timeout=5.0)
        try:
            _check(connection, path, quick=True)
        except BaseException:
            connection.close()
            raise
        return connection


def address_to_read(path: Path) -> str:
    """The address by which SQLite opens the file to read it. A file without a log is written by
    nobody, and is read as it is where this user may not make a log beside it.
    """
    there = path.resolve()
    address = f"{there.as_uri()}?mode=ro"
    has_log = there.with_name(f"{there.name}-wal").exists()
    if not has_log and not os.access(there.parent, os.W_OK):
        address += "&immutable=1"
    return address


def check_whole(path: Path) -> None:
    """Raises `StoreCorrupt` with the remedy if a store is damaged. Reads all of it, and changes
    nothing.
    """
    with naming(path):
        connection = sqlite3.connect(address_to_read(path), uri=True, timeout=5.0)
        try:
            _check(connection, path)
        finally:
            connection.close()


def _create(connection: sqlite3.Connection) -> None:
    """Makes the tables in one transaction: a process that is killed in it leaves an empty file,
    which counts as new.
    """
    connection.executescript(
        f"BEGIN IMMEDIATE;\nPRAGMA application_id = {APPLICATION_ID};\nPRAGMA user_version = "
        f"{SCHEMA_VERSION};\n{TABLES}\n"
        f"INSERT INTO numbers VALUES ('{BEGUN}', {secrets.randbits(62)});\nCOMMIT;"
    )


def _check(connection: sqlite3.Connection, path: Path, *, quick: bool = False) -> None:
    """Checks that the file is a whole store of this version. `quick` does not read all of it."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise StoreCorrupt(
            f"Opening {path}: it is an SQLite file, but not a store of Midflight; choose another "
            "run folder."
        )
    if version not in (OLDER_VERSION, SCHEMA_VERSION):
        kind = StoreNewer if version > SCHEMA_VERSION else StoreCorrupt
        raise kind(
            f"Opening {path}: its schema is {version}, this Midflight knows {SCHEMA_VERSION}; use "
            "the version that wrote it."
        )
    if quick:
        return
    (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StoreCorrupt(
            f"Opening {path}: {found}; restore the file from a copy, or start a new run folder."
        )


# --- Blobs: msgpack with raw little-endian arrays. Never pickle -----------------------------------


class _StoredRuns(msgspec.Struct, array_like=True, frozen=True):
    """An array in which few values follow each other many times."""

    values: bytes
    """One value for each run."""
    lengths: bytes
    """How often each follows itself, as int32."""


class _StoredRow(msgspec.Struct, array_like=True, frozen=True):
    token_ids: bytes
    generated: bytes | _StoredRuns
    loss_mask: bytes | _StoredRuns
    logprobs: bytes | _StoredRuns
    versions: bytes | _StoredRuns
    kv_versions: bytes | _StoredRuns
    turns: bytes | _StoredRuns | None = None
    kept: bytes = b""
    kept_lengths: bytes | _StoredRuns = b""
    experts: bytes = b""
    role: str = ""
    records: tuple[TurnRecord, ...] = ()


class RewardParts(msgspec.Struct, array_like=True, frozen=True):
    """The parts of a trajectory's reward, and the values that were given beside it."""

    components: dict[str, float]
    metrics: dict[str, float]
    turn_rewards: tuple[float, ...]
    fields: dict[str, Any]
    roles: dict[str, RoleRecord] = {}


class _StoredTask(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    source: str
    data: dict[str, Any]
    place: int | None = None


class ContinuingTurn(Turn, frozen=True):
    """A turn as the file has it, whose prompt begins with all ids of the turn number `after`.
    `prompt_ids` are those that follow. Without `after` they are all.
    """

    after: int | None = None


_ROWS = msgspec.msgpack.Decoder(tuple[_StoredRow, ...])
_TURN = msgspec.msgpack.Decoder(ContinuingTurn)
_SCORED = msgspec.msgpack.Decoder(RewardParts)
_TASK = msgspec.msgpack.Decoder(_StoredTask)
_ADMISSION = msgspec.msgpack.Decoder(AdmissionState)
_encode = msgspec.msgpack.Encoder().encode


def encode_rows(rows: tuple[Row, ...]) -> bytes:
    return _encode(tuple(_pack_row(row) for row in rows))


def decode_rows(blob: bytes) -> tuple[Row, ...]:
    """Raises `msgspec.MsgspecError` or `ValueError` if `encode_rows` did not make the blob."""
    return tuple(_unpack_row(row) for row in _ROWS.decode(blob))


def columns(of: Trajectory, *, rows: bytes) -> tuple[Value, ...]:
    """The columns of `rollouts` after the key. `rows` are those of `encode_rows`, or their place."""
    return (
        of.reward,
        of.truncated,
        of.room,
        of.error,
        of.seconds,
        of.num_trainable,
        rows,
        encode_scored(of),
    )


def encode_scored(of: Trajectory) -> bytes:
    return _encode(
        RewardParts(
            dict(of.components), dict(of.metrics), of.turn_rewards, dict(of.fields), dict(of.roles)
        )
    )


def decode_scored(blob: bytes) -> RewardParts:
    return _SCORED.decode(blob)


def encode_keys(keys: Iterable[GroupKey]) -> bytes:
    return _encode([(key.epoch, key.index, key.attempt) for key in sorted(keys)])


def encode_admission(by: AdmissionState) -> bytes:
    return _encode(by)


def decode_admission(blob: bytes) -> AdmissionState:
    return _ADMISSION.decode(blob)


def encode_counts(masked: Mapping[Reason, int], dropped: Mapping[Reason, int]) -> bytes:
    return _encode((dict(masked), dict(dropped)))


def encode_turn(turn: Turn) -> bytes:
    """The turn as the file has it: of a prompt that continues a turn before it, what is new."""
    ids = turn.prompt_ids
    if not isinstance(ids, SharedIds):
        return _encode(turn)
    values: dict[str, Any] = msgspec.structs.asdict(turn)
    values["prompt_ids"] = unpacked(ids.tail)
    return _encode(ContinuingTurn(**values, after=ids.after))


def decode_turn(blob: bytes) -> Turn:
    """The turn. It is a `ContinuingTurn` if the file has only the end of its prompt."""
    turn = _TURN.decode(blob)
    return turn if turn.after is not None else _plain(turn, turn.prompt_ids)


def whole_turns(stored: Iterable[tuple[int, Turn]]) -> list[Turn]:
    """The turns of one rollout with their whole prompts, from all its turns in the order of their
    numbers. Raises `ValueError` if one is missing.
    """
    parts: dict[int, tuple[bytes, ...]] = {}
    found: list[Turn] = []
    for number, turn in stored:
        after = turn.after if isinstance(turn, ContinuingTurn) else None
        if after is not None and after not in parts:
            raise ValueError(f"turn {number} continues turn {after}, which is not there")
        before = () if after is None else parts[after]
        prompt = (*before, packed(turn.prompt_ids))
        parts[number] = (*prompt, packed(turn.output_ids))
        found.append(turn if after is None else _plain(turn, unpacked(b"".join(prompt))))
    return found


def _plain(turn: Turn, prompt_ids: AnyIds) -> Turn:
    values: dict[str, Any] = msgspec.structs.asdict(turn)
    values["prompt_ids"] = prompt_ids
    values.pop("after", None)
    return Turn(**values)


def encode_task(task: Task) -> bytes:
    return _encode(_StoredTask(task.id, task.source, dict(task.data), task.place))


def decoded(path: Path, decode: Callable[[Given], Decoded], blob: Given) -> Decoded:
    """The value of a blob in the file at `path`. Raises `StoreCorrupt` if `decode` cannot read it."""
    try:
        return decode(blob)
    except (msgspec.MsgspecError, ValueError, AssertionError) as error:
        raise StoreCorrupt(
            f"Reading {path}: {error}; restore the file from a copy, or start a new run folder."
        ) from error


def decode_task(blob: bytes) -> Task:
    task = _TASK.decode(blob)
    return Task(task.id, task.source, cast(dict[str, Json], task.data), task.place)


def _pack_row(row: Row) -> _StoredRow:
    return _StoredRow(
        token_ids=row.token_ids.astype("<i4", copy=False).tobytes(),
        generated=_in_runs(row.generated, "?"),
        loss_mask=_in_runs(row.loss_mask, "?"),
        logprobs=_in_runs(row.logprobs, "<f4"),
        versions=_in_runs(row.versions, "<i4"),
        kv_versions=_in_runs(row.kv_versions, "<i4"),
        turns=None if row.turns is None else _in_runs(row.turns, "<i4"),
        kept=b"" if row.kept is None else row.kept.tobytes(),
        kept_lengths=b"" if row.kept_lengths is None else _in_runs(row.kept_lengths, "<i4"),
        experts=b"" if row.experts is None else row.experts.tobytes(),
        role=row.role,
        records=row.records,
    )


def _unpack_row(row: _StoredRow) -> Row:
    token_ids = _array(row.token_ids, "<i4")
    experts: NDArray[Any] | None = None
    if row.experts:
        experts = _array(row.experts, "u1").reshape(len(token_ids), -1)
    return Row(
        token_ids=token_ids,
        generated=_array(row.generated, "?"),
        loss_mask=_array(row.loss_mask, "?"),
        logprobs=_array(row.logprobs, "<f4"),
        versions=_array(row.versions, "<i4"),
        kv_versions=_array(row.kv_versions, "<i4"),
        turns=None if row.turns is None else _array(row.turns, "<i4"),
        kept=_array(row.kept, "u1") if row.kept_lengths else None,
        kept_lengths=_array(row.kept_lengths, "<i4") if row.kept_lengths else None,
        experts=experts,
        role=row.role,
        records=row.records,
    )


_SHORT_BYTES = 128
"""Arrays up to this size are stored as they are. To look for runs in them would take most of the
time in which a rollout is stored.
"""


def _in_runs(array: NDArray[Any], dtype: str) -> bytes | _StoredRuns:
    """The array as it is, or as runs if it is long and they are shorter."""
    plain = array.astype(dtype, copy=False)
    runs = run_lengths(plain) if plain.nbytes > _SHORT_BYTES else None
    if runs is None:
        return plain.tobytes()
    return _StoredRuns(runs.values.tobytes(), runs.lengths.tobytes())


def _array(stored: bytes | _StoredRuns, dtype: str) -> NDArray[Any]:
    if isinstance(stored, bytes):
        return np.frombuffer(stored, dtype=dtype)
    values = np.frombuffer(stored.values, dtype=dtype)
    return np.repeat(values, np.frombuffer(stored.lengths, dtype="<i4"))
