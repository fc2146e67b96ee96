"""The durable record of one run's rollouts: one SQLite file, owned by the rollout process. Synchronous; `StoreWriter` waits.

Every deed is one transaction, or part of the one of `apply`. After the death of any process at any instant (I8) a deed has
happened or it has not, and `recover` says where every group is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from midflight.errors import StoreCorrupt, UnknownLease
from midflight.trajectories import codec
from midflight.trajectories.database import Database, Value
from midflight.trajectories.recovery import Recovered, Unfinished
from midflight.trajectories.schema import State
from midflight.types import Batch, Fate, Group, GroupKey, Reason, RolloutKey, Task, Trajectory, Turn, Version

T = TypeVar("T")
Deed: TypeAlias = "Callable[[Store], object]"

_GROUP = "epoch = ? AND position = ? AND attempt = ?"
_ROLLOUT = _GROUP + " AND sample = ?"
_OF_LEASE = "(epoch, position, attempt) IN (SELECT epoch, position, attempt FROM groups WHERE lease = ?)"


class Store:
    """`run` names the run; a file of another run is refused, so that two runs never mix their groups."""

    def __init__(self, path: Path, *, run: str) -> None:
        self._db = Database(path, run=run)

    def close(self) -> None:
        self._db.close()

    def apply(self, deeds: Iterable[Deed]) -> None:
        """Several deeds in one transaction: all of them happen, or none."""
        with self._db.transaction():
            for deed in deeds:
                deed(self)

    # --- Groups and rollouts ---

    def admit(self, key: GroupKey, task: Task) -> None:
        """A group starts. One that was running before a crash, or was put in line by `requeue`, is known already."""
        self._db.execute(
            "INSERT OR IGNORE INTO groups (epoch, position, attempt, task, state) VALUES (?, ?, ?, ?, ?)",
            *_group(key),
            codec.encode_task(task),
            State.RUNNING,
        )

    def record_turn(self, key: RolloutKey, number: int, turn: Turn) -> None:
        """The `number`-th completed turn of a rollout that goes on; number 0 begins anew, so a retry forgets what it replaces."""
        with self._db.transaction():
            if number == 0:
                self._db.execute(f"DELETE FROM turns WHERE {_ROLLOUT}", *_rollout(key))
            self._db.execute("INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?, ?)", *_rollout(key), number, codec.encode_turn(turn))

    def finish_rollout(
        self, trajectory: Trajectory, *, masked: Mapping[Reason, int] | None = None, dropped: Mapping[Reason, int] | None = None
    ) -> None:
        """Writes the trajectory and its tokens' fates in the transaction that completes it; its turns are in its rows from now on.

        `masked` and `dropped` are those of the session's record. A retried rollout replaces its trajectory and adds its fates.
        """
        key, num_trainable = trajectory.key, trajectory.num_trainable
        values = (trajectory.reward, trajectory.truncated, trajectory.error, trajectory.seconds, num_trainable)
        with self._db.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                *_rollout(key),
                *values,
                codec.encode_rows(trajectory.rows),
            )
            self._db.execute(f"DELETE FROM turns WHERE {_ROLLOUT}", *_rollout(key))
            for reason, num_tokens in (masked or {}).items():
                self._add_fate(key, Fate.MASKED, reason, num_tokens)
            for reason, num_tokens in (dropped or {}).items():
                self._add_fate(key, Fate.DROPPED, reason, num_tokens)
            if trajectory.reward is None:
                self._add_fate(key, Fate.DROPPED, Reason.NO_REWARD, num_trainable)
            else:
                self._add_fate(key, Fate.WAITING, None, num_trainable)

    def finish_group(self, key: GroupKey) -> None:
        """All rollouts of a running group are written: it waits for a step."""
        with self._db.transaction():
            order = self._db.count("finished")
            self._db.move(
                "UPDATE groups SET state = ?, finished = ? WHERE state = ? AND " + _GROUP, State.WAITING, order, State.RUNNING, *_group(key)
            )
            self._db.execute(f"DELETE FROM turns WHERE {_GROUP}", *_group(key))  # of rollouts that ended without a record

    def drop_group(self, key: GroupKey, reason: Reason) -> None:
        """A group ends untrained, and its tokens with it: a running or waiting one, or a leased one whose step was skipped."""
        with self._db.transaction():
            self._db.move(
                f"UPDATE groups SET state = ?, reason = ?, lease = NULL WHERE state IN (?, ?, ?) AND {_GROUP}",
                *(State.DROPPED, reason, State.RUNNING, State.WAITING, State.LEASED),
                *_group(key),
            )
            self._drop_tokens(_GROUP, reason, *_group(key))
            self._db.execute(f"DELETE FROM turns WHERE {_GROUP}", *_group(key))
            self._db.execute("DELETE FROM leases WHERE NOT EXISTS (SELECT * FROM groups WHERE groups.lease = leases.lease)")

    def requeue(self, key: GroupKey, reason: Reason) -> None:
        """Drops the attempt and puts the task in line as the next one, at once: a crash between the two would lose the prompt."""
        with self._db.transaction():
            task = self._task(key)
            self.drop_group(key, reason)
            self.admit(replace(key, attempt=key.attempt + 1), task)

    # --- Leases ---

    def lease(self, batch: Batch) -> None:
        """A batch is about to leave for the trainer, or leaves once more for one that asked again.

        Tokens the buffer trimmed from it for their age get that fate.
        """
        if self._leases("lease = ? AND train_version = ?", batch.lease, batch.train_version):
            return
        with self._db.transaction():
            self._db.execute("INSERT INTO leases VALUES (?, ?, 0)", batch.lease, batch.train_version)
            self._db.raise_number("lease", batch.lease)
            self._db.raise_number("version", batch.train_version + 1)
            for group in batch.groups:
                self._db.move(
                    "UPDATE groups SET state = ?, lease = ? WHERE state = ? AND " + _GROUP,
                    State.LEASED,
                    batch.lease,
                    State.WAITING,
                    *_group(group.key),
                )
                for trajectory in group.trajectories:
                    self._trim_tokens(trajectory)

    def done(self, lease: int) -> None:
        """The step is made. Final only when a checkpoint of its version is (`checkpointed`)."""
        with self._db.transaction():
            self._end_lease("UPDATE leases SET done = 1 WHERE lease = ?", lease)
            self._db.execute(f"UPDATE fates SET fate = ? WHERE fate = ? AND {_OF_LEASE}", Fate.TRAINED, Fate.WAITING, lease)

    def take_back(self, lease: int) -> None:
        """The trainer died before the step was in a checkpoint: its groups wait again."""
        with self._db.transaction():
            self._end_lease("DELETE FROM leases WHERE lease = ?", lease)
            self._db.execute(
                f"DELETE FROM fates WHERE (fate IN (?, ?) OR reason = ?) AND {_OF_LEASE}", Fate.WAITING, Fate.TRAINED, Reason.STALE, lease
            )
            self._db.execute(
                f"INSERT INTO fates SELECT epoch, position, attempt, sample, ?, '', num_trainable FROM rollouts "
                f"WHERE reward IS NOT NULL AND num_trainable > 0 AND {_OF_LEASE}",
                Fate.WAITING,
                lease,
            )
            self._db.execute("UPDATE groups SET state = ?, lease = NULL WHERE lease = ?", State.WAITING, lease)

    def checkpointed(self, version: Version) -> None:
        """A checkpoint of `version` is complete: the steps up to it are final. On disk before this returns, power cuts included."""
        with self._db.transaction():
            for lease in self._leases("train_version < ?", version):
                self._settle(lease)
            self._db.sync_after_commit()

    # --- After a crash ---

    def revert(self, version: Version) -> tuple[Group, ...]:
        """Weights later than `version` have died. Steps up to it are final; later ones' groups wait again, exactly once.

        Returns the groups of steps that were done: a buffer that lived on counts them as trained.
        """
        with self._db.transaction():
            for lease in self._leases("train_version < ?", version):
                self._settle(lease)
            untrained = [g for lease in self._leases("done = 1") for g in self._groups("lease = ?", lease)]
            for lease in self._leases("1"):
                self.take_back(lease)
        return tuple(untrained)

    def recover(self, checkpoint_version: Version | None) -> Recovered:
        """Where everything is, after this process died.

        With a version, the trainer goes on from that checkpoint (see `revert`); with `None` it lives, and all its leases stand.
        """
        with self._db.transaction():
            if checkpoint_version is not None:
                self.revert(checkpoint_version)
            waiting = self._groups("state = ?", State.WAITING)
            leases = tuple(self._batch(lease) for lease in self._leases("done = 0"))
            unfinished = tuple(self._unfinished(key) for key in self._keys("state = ?", State.RUNNING))
            again = [g.key for g in (*waiting, *(g for batch in leases for g in batch.groups))]
            return Recovered(
                waiting=waiting,
                unfinished=unfinished,
                leases=leases,
                tasks={**{u.key: u.task for u in unfinished}, **{key: self._task(key) for key in again}},
                next_position=self._next_position(),
                highest_version=self._db.number("version"),
                next_lease=(self._db.number("lease") or 0) + 1,
            )

    def token_fates(self) -> Mapping[tuple[Fate, Reason | None], int]:
        """Tokens of ended rollouts by fate and reason (I3)."""
        found = self._db.execute("SELECT fate, reason, SUM(num_tokens) FROM fates GROUP BY fate, reason")
        return {(Fate(fate), Reason(reason) if reason else None): total for fate, reason, total in found}

    # --- Reading ---

    def _groups(self, where: str, *values: Value) -> tuple[Group, ...]:
        return tuple(self._group(key) for key in self._keys(where, *values))

    def _group(self, key: GroupKey) -> Group:
        task = self._task(key)
        scored = (t for t in self._trajectories(key, task) if t.reward is not None)
        return Group(key, task.id, task.source, tuple(scored))

    def _unfinished(self, key: GroupKey) -> Unfinished:
        task = self._task(key)
        turns: dict[RolloutKey, list[Turn]] = {}
        for sample, blob in self._db.execute(f"SELECT sample, turn FROM turns WHERE {_GROUP} ORDER BY sample, number", *_group(key)):
            turns.setdefault(RolloutKey(key, sample), []).append(self._decoded(codec.decode_turn, blob))
        return Unfinished(key, task, tuple(self._trajectories(key, task)), {rollout: tuple(made) for rollout, made in turns.items()})

    def _batch(self, lease: int) -> Batch:
        (version,) = self._db.execute("SELECT train_version FROM leases WHERE lease = ?", lease)[0]
        return Batch(lease, version, tuple(sorted(self._groups("lease = ?", lease), key=lambda g: g.key)))

    def _trajectories(self, key: GroupKey, task: Task) -> Iterator[Trajectory]:
        columns = "sample, reward, rows, truncated, error, seconds"
        for sample, reward, rows, truncated, error, seconds in self._db.execute(
            f"SELECT {columns} FROM rollouts WHERE {_GROUP} ORDER BY sample", *_group(key)
        ):
            decoded = self._decoded(codec.decode_rows, rows)
            yield Trajectory(RolloutKey(key, sample), task.id, task.source, reward, decoded, bool(truncated), error, seconds)

    def _task(self, key: GroupKey) -> Task:
        (blob,) = self._db.execute(f"SELECT task FROM groups WHERE {_GROUP}", *_group(key))[0]
        return self._decoded(codec.decode_task, blob)

    def _decoded(self, decode: Callable[[bytes], T], blob: bytes) -> T:
        try:
            return decode(blob)
        except (msgspec.MsgspecError, ValueError, AssertionError) as error:
            raise StoreCorrupt(f"Reading {self._db.path}: {error}; restore the file from a copy, or start a new run folder.") from error

    def _keys(self, where: str, *values: Value) -> list[GroupKey]:
        found = self._db.execute(
            f"SELECT epoch, position, attempt FROM groups WHERE {where} ORDER BY finished, epoch, position, attempt", *values
        )
        return [GroupKey(*columns) for columns in found]

    def _leases(self, where: str, *values: Value) -> list[int]:
        return [lease for (lease,) in self._db.execute(f"SELECT lease FROM leases WHERE {where} ORDER BY lease", *values)]

    def _next_position(self) -> tuple[int, int]:
        found = self._db.execute("SELECT epoch, position FROM groups ORDER BY epoch DESC, position DESC LIMIT 1")
        return (found[0][0], found[0][1] + 1) if found else (0, 0)

    # --- Tokens ---

    def _add_fate(self, key: RolloutKey, fate: Fate, reason: Reason | None, num_tokens: int) -> None:
        if num_tokens:
            self._db.execute(
                "INSERT INTO fates VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET num_tokens = num_tokens + excluded.num_tokens",
                *_rollout(key),
                fate,
                reason or "",
                num_tokens,
            )

    def _trim_tokens(self, trajectory: Trajectory) -> None:
        """What the batch no longer trains on left for its age: masked if its trajectory still has rows, else dropped."""
        key, left = trajectory.key, trajectory.num_trainable
        found = self._db.execute(f"SELECT num_tokens FROM fates WHERE {_ROLLOUT} AND fate = ?", *_rollout(key), Fate.WAITING)
        trimmed = (found[0][0] if found else 0) - left
        if trimmed:
            self._db.execute(f"DELETE FROM fates WHERE {_ROLLOUT} AND fate = ?", *_rollout(key), Fate.WAITING)
            self._add_fate(key, Fate.WAITING, None, left)
            self._add_fate(key, Fate.MASKED if trajectory.rows else Fate.DROPPED, Reason.STALE, trimmed)

    def _drop_tokens(self, where: str, reason: Reason, *values: Value) -> None:
        """Waiting tokens -> dropped(reason), added to what was dropped for that reason before."""
        self._db.execute(
            f"INSERT INTO fates SELECT epoch, position, attempt, sample, ?, ?, num_tokens FROM fates WHERE fate = ? AND {where} "
            "ON CONFLICT DO UPDATE SET num_tokens = num_tokens + excluded.num_tokens",
            Fate.DROPPED,
            reason,
            Fate.WAITING,
            *values,
        )
        self._db.execute(f"DELETE FROM fates WHERE fate = ? AND {where}", Fate.WAITING, *values)

    # --- Writing ---

    def _settle(self, lease: int) -> None:
        """The step is final, also if its `done` was lost with this process: the checkpoint has it."""
        if self._leases("lease = ? AND done = 0", lease):
            self.done(lease)
        self._db.execute("UPDATE groups SET state = ?, lease = NULL WHERE lease = ?", State.TRAINED, lease)
        self._db.execute("DELETE FROM leases WHERE lease = ?", lease)

    def _end_lease(self, sql: str, lease: int) -> None:
        if not self._leases("lease = ?", lease):
            raise UnknownLease(f"Lease {lease} is not open in {self._db.path.name}; take a batch again.")
        self._db.execute(sql, lease)


def _group(key: GroupKey) -> tuple[int, int, int]:
    return key.epoch, key.index, key.attempt


def _rollout(key: RolloutKey) -> tuple[int, int, int, int]:
    return *_group(key.group), key.sample
