"""A run's store, opened to be read: also while its run goes on, and after a crash. What is not a
store comes out as a clear error.
"""

import sqlite3
import tomllib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from midflight.errors import MidflightError, NoRun, RunGone, StoreCorrupt
from midflight.observe.failures import failure_class
from midflight.observe.readable import duration
from midflight.trajectories.database import Value, decode_task, look, naming
from midflight.trajectories.heldout import HELDOUT
from midflight.trajectories.pairs import STORE, readable, shard_stores
from midflight.types import GroupKey, Kind, RolloutKey, Task

Decoded = TypeVar("Decoded")


class StoreReading:
    """One look at a store: a transaction of its own, so that all that is asked in it is of one
    moment.
    """

    def __init__(
        self, path: Path, connection: sqlite3.Connection, kind: Kind = Kind.TRAINING
    ) -> None:
        self.path = path
        self.kind = kind
        self._connection = connection
        for name, function in (
            ("source_of", _source),
            ("task_of", _task_id),
            ("failure_of", failure_class),
        ):
            connection.create_function(name, 1, function, deterministic=True)

    def ask(self, sql: str, *values: Value) -> list[tuple[Any, ...]]:
        """All rows; their columns have the types that the schema gives them."""
        with naming(self.path):
            return self._connection.execute(sql, values).fetchall()

    def each(self, sql: str, *values: Value) -> Iterator[tuple[Any, ...]]:
        """Row by row, for what would not fit into memory."""
        with naming(self.path):
            yield from self._connection.execute(sql, values)

    def beside(self, path: Path) -> None:
        """Lets `beside.TABLE` of another file be asked too."""
        with naming(path):
            self._connection.execute("COMMIT")
            self._connection.execute("ATTACH ? AS beside", (f"{path.resolve().as_uri()}?mode=ro",))
            self._connection.execute("BEGIN")

    def task(self, blob: bytes) -> Task:
        return self.decoded(decode_task, blob)

    def decoded(self, decode: Callable[[bytes], Decoded], blob: bytes) -> Decoded:
        try:
            return decode(blob)
        except (msgspec.MsgspecError, ValueError, AssertionError) as error:
            raise StoreCorrupt(
                f"StoreReading {self.path}: {error}; restore the file from a copy, or start a new "
                "run folder."
            ) from error


def file_of(folder: Path, kind: Kind) -> Path:
    """Where rollouts of a kind are kept. What was said to held-out tasks has the tables of the
    store: the epoch is the version that answered.
    """
    return (
        folder / HELDOUT
        if kind is Kind.EVALUATION
        else readable(folder, store_folder_of(folder))[0]
    )


@contextmanager
def reading(folder: Path, kind: Kind = Kind.TRAINING) -> Generator[StoreReading]:
    """The store of the run in a folder, or its newest copy where that is all there is here. `NoRun`
    where it has none yet, `RunGone` where the folder vanished."""
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
            yield StoreReading(path, connection, kind)
        finally:
            connection.close()
    except MidflightError as error:
        if not path.is_file():
            raise _missing(folder, kind) from error
        raise


def _join_shards(connection: sqlite3.Connection, folder: Path) -> None:
    """Where several gateways have each a store: their tables, which share no group, are read as
    one. Leases are numbered by each.
    """
    shards = shard_stores(folder)
    if not shards:
        return
    for number, path in enumerate(shards):
        connection.execute(f"ATTACH ? AS shard{number}", (f"{path.resolve().as_uri()}?mode=ro",))
    schemas = ["main", *(f"shard{number}" for number in range(len(shards)))]
    for table in ("groups", "rollouts", "turns", "fates", "leases"):
        columns = [name for _, name, *_ in connection.execute(f"PRAGMA main.table_info({table})")]
        unions: list[str] = []
        for number, schema in enumerate(schemas):
            chosen = (
                f"lease * {len(schemas)} + {number} AS lease" if name == "lease" else name
                for name in columns
            )
            unions.append(f"SELECT {', '.join(chosen)} FROM {schema}.{table}")
        connection.execute(f"CREATE TEMP VIEW {table} AS {' UNION ALL '.join(unions)}")


def store_folder_of(folder: Path) -> Path | None:
    """As the run's configuration says."""
    try:
        found = cast(
            "dict[str, object]",
            tomllib.loads((folder / "config.toml").read_text()).get("run") or {},
        ).get("store_folder")
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return None
    return Path(found) if isinstance(found, str) else None


def copy_in_words(folder: Path) -> str | None:
    """That what is read of a run is a copy, and how old that is; none where it is the store
    itself.
    """
    _, copy = readable(folder, store_folder_of(folder))
    if copy is None:
        return None
    return (
        "This run's store is on another machine; this is its copy with the checkpoint of "
        f"version {copy.version}, {duration(copy.age)} old."
    )


def _missing(folder: Path, kind: Kind) -> MidflightError:
    if not folder.is_dir():
        return RunGone(
            f"{folder} is not there: the run was deleted or moved; `midflight runs` lists those "
            "that there are."
        )
    if kind is Kind.EVALUATION:
        return NoRun(
            f"{folder} has no conversations of evaluations: there was none yet, or evaluation.keep "
            f"was 0 (there is no {HELDOUT})."
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
    """Of `epoch-position-attempt-sample`, as `str` of a key writes it; an epoch below 0 is of
    posted tasks, `evaluation-` before it of an evaluation.
    """
    named = text.removeprefix(f"{Kind.EVALUATION}-")
    kind = Kind.TRAINING if named == text else Kind.EVALUATION
    sign, rest = (-1, named[1:]) if named.startswith("-") else (1, named)
    parts = rest.split("-")
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise NoRun(
            f"{text!r} names no rollout; it is EPOCH-POSITION-ATTEMPT-SAMPLE, such as 0-12-0-3."
        )
    epoch, position, attempt, sample = map(int, parts)
    return RolloutKey(GroupKey(sign * epoch, position, attempt), sample, kind)
