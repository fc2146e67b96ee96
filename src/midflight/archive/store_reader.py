"""Opens a run's store for reading, also while its run goes on and after a crash. A file that is no
store gives a clear error.
"""

import sqlite3
import tomllib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from midflight.errors import MidflightError, NoRun, RunGone
from midflight.observe.failures import failure_class
from midflight.observe.readable import duration
from midflight.trajectories.database import (
    Value,
    address_to_read,
    decode_rows,
    decode_task,
    decoded,
    look,
)
from midflight.trajectories.heldout import HELDOUT
from midflight.trajectories.pairs import STORE, Copy, copy_instead, readable, shard_folders
from midflight.trajectories.segments import SEGMENTS, read, segment_folders
from midflight.trajectories.store_errors import naming
from midflight.types import GroupKey, Kind, RolloutKey, Row, Task

Decoded = TypeVar("Decoded")
Given = TypeVar("Given")

GROUP_STATE = (
    "CASE WHEN g.lease IN (SELECT lease FROM leases WHERE done) THEN 'trained' ELSE g.state END"
)
"""The state of a group `g` in SQL. A group whose step was made counts as trained, in a checkpoint or
not.
"""


class StoreReader:
    """One look at a store. It is a transaction of its own, so that all its answers belong to one
    moment.
    """

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        kind: Kind = Kind.TRAINING,
        *,
        segments: Sequence[Path] = (),
    ) -> None:
        """`segments` are the folders with the tokens of the rollouts."""
        self.path = path
        self._segments = segments
        self.kind = kind
        self._connection = connection
        connection.create_function("source_of", 1, _source, deterministic=True)
        connection.create_function("task_of", 1, _task_id, deterministic=True)
        connection.create_function("failure_of", 1, failure_class, deterministic=True)

    def ask(self, sql: str, *values: Value) -> list[tuple[Any, ...]]:
        """All rows; their columns have the types that the schema gives them."""
        with naming(self.path):
            return self._connection.execute(sql, values).fetchall()

    def each(self, sql: str, *values: Value) -> Iterator[tuple[Any, ...]]:
        """The rows one by one, for results that would not fit into memory."""
        with naming(self.path):
            yield from self._connection.execute(sql, values)

    def beside(self, path: Path) -> None:
        """Attaches another file, whose tables can then be asked as `beside.TABLE`."""
        with naming(path):
            self._connection.execute("COMMIT")
            self._connection.execute("ATTACH ? AS beside", (address_to_read(path),))
            self._connection.execute("BEGIN")

    def task(self, blob: bytes) -> Task:
        return self.decoded(decode_task, blob)

    def rows(self, value: bytes) -> tuple[Row, ...]:
        """The rows of a rollout, from the column `rows`. Raises `StoreCorrupt`, which names the
        file, if they are damaged, and `TokensRemoved` if the run has removed them.
        """
        return self.decoded(decode_rows, read(self._segments, value))

    def decoded(self, decode: Callable[[Given], Decoded], blob: Given) -> Decoded:
        """The value of a column. Raises `StoreCorrupt` if it is none."""
        return decoded(self.path, decode, blob)


def file_of(folder: Path, kind: Kind) -> Path:
    """The file in which rollouts of a kind are kept. The file of held-out tasks has the tables of a
    store; the epoch in it is the version that answered.
    """
    if kind is Kind.EVALUATION:
        return folder / HELDOUT
    return readable(folder, store_folder_of(folder))


class StoreFiles(NamedTuple):
    """The files of one gateway's store."""

    path: Path
    segments: Path


def stores_of(folder: Path) -> list[StoreFiles]:
    """The stores of a run, that of its first gateway first. Those of other gateways that have none
    yet are left out. Empty if the run has none yet.
    """
    path = file_of(folder, Kind.TRAINING)
    if not path.is_file():
        return []
    stores = [StoreFiles(path, folder / SEGMENTS)]
    disk = store_folder_of(folder)
    for shard in shard_folders(folder):
        other = readable(shard, disk)
        if other.is_file():
            stores.append(StoreFiles(other, shard / SEGMENTS))
    return stores


@contextmanager
def reading(folder: Path, kind: Kind = Kind.TRAINING) -> Generator[StoreReader]:
    """Opens the store of the run in a folder, or its newest copy if only a copy is here. Raises
    `NoRun` if the run has none yet, and `RunGone` if the folder vanished.
    """
    path = file_of(folder, kind)
    if not path.is_file():
        raise _missing(folder, kind)
    try:
        connection = look(path)
        try:
            connection.isolation_level = None
            with naming(path):
                if kind is Kind.TRAINING:
                    _join_shards(connection, folder)
                connection.execute("BEGIN")
            yield StoreReader(path, connection, kind, segments=segment_folders(folder))
        finally:
            connection.close()
    except MidflightError as error:
        if not path.is_file():
            raise _missing(folder, kind) from error
        raise


def _join_shards(connection: sqlite3.Connection, folder: Path) -> None:
    """Lets the stores of several gateways be read as one. Their tables share no group. Each gateway
    numbers its own leases, so that these get new numbers.
    """
    _, *shards = stores_of(folder)
    if not shards:
        return
    for number, shard in enumerate(shards):
        connection.execute(f"ATTACH ? AS shard{number}", (address_to_read(shard.path),))
    schemas = ["main"] + [f"shard{number}" for number in range(len(shards))]
    for table in ("groups", "rollouts", "turns", "fates", "leases", "sources"):
        columns = [name for _, name, *_ in connection.execute(f"PRAGMA main.table_info({table})")]
        if not columns:  # the run is of an older Midflight
            continue
        unions: list[str] = []
        for number, schema in enumerate(schemas):
            chosen = list(columns)
            if "lease" in chosen:
                place = chosen.index("lease")
                chosen[place] = f"lease * {len(schemas)} + {number} AS lease"
            unions.append(f"SELECT {', '.join(chosen)} FROM {schema}.{table}")
        connection.execute(f"CREATE TEMP VIEW {table} AS {' UNION ALL '.join(unions)}")


def store_folder_of(folder: Path) -> Path | None:
    """The folder of the store, if the run's configuration names one."""
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return None
    run = cast("dict[str, object]", config.get("run") or {})
    found = run.get("store_folder")
    return Path(found) if isinstance(found, str) else None


def copy_in_words(folder: Path) -> str | None:
    """Returns a sentence that says that a copy of one of the run's stores is read, and how old it
    is. Returns None if the stores themselves are read.
    """
    copy = oldest_copy_read(folder)
    if copy is None:
        return None
    return (
        "This run's store is on another machine; this is its copy with the checkpoint of "
        f"version {copy.version}, {duration(copy.age)} old."
    )


def oldest_copy_read(folder: Path) -> Copy | None:
    """The copy that is read in place of one of the run's stores; of several gateways the oldest.
    None if the stores themselves are read.
    """
    disk = store_folder_of(folder)
    read_instead = (copy_instead(one, disk) for one in (folder, *shard_folders(folder)))
    found = [copy for copy in read_instead if copy is not None]
    return min(found, key=lambda copy: copy.version, default=None)


def _missing(folder: Path, kind: Kind) -> MidflightError:
    if not folder.is_dir():
        return RunGone(
            f"{folder} is not there: the run was deleted or moved; `midflight runs` lists those "
            "that there are."
        )
    if kind is Kind.EVALUATION:
        return NoRun(
            f"{folder} has no conversations of evaluations: there was none yet (there is no "
            f"{HELDOUT})."
        )
    return NoRun(
        f"{folder} has no rollouts: there is no {STORE} in it. Give the folder of a run that has "
        "begun to train."
    )


def _source(task: bytes) -> str:
    return decode_task(task).source


def _task_id(task: bytes) -> str:
    return decode_task(task).id


def group_key(columns: Iterable[int]) -> GroupKey:
    return GroupKey(*columns)


def rollout_key(text: str) -> RolloutKey:
    """The key that `str` of a key writes as `epoch-position-attempt-sample`. An epoch below 0
    belongs to posted tasks, and `evaluation-` before it marks an evaluation.
    """
    named = text.removeprefix(f"{Kind.EVALUATION}-")
    kind = Kind.TRAINING if named == text else Kind.EVALUATION
    sign = -1 if named.startswith("-") else 1
    parts = named.removeprefix("-").split("-")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise NoRun(
            f"{text!r} names no rollout; it is EPOCH-POSITION-ATTEMPT-SAMPLE, such as 0-12-0-3."
        )
    epoch, position, attempt, sample = map(int, parts)
    return RolloutKey(GroupKey(sign * epoch, position, attempt), sample, kind)
