"""The durable record of one run's rollouts: an index, which is one SQLite file, and segments with
their tokens. The rollout process owns both.

The store is synchronous; `StoreWriter` waits. Every fact is one transaction, or a part of the one
that `write` makes. After the death of any process at any instant (I8) a fact is in the file or it
is not, and `facts` gives it back: folded, they are the books as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from midflight.errors import StoreCorrupt, UnknownLease
from midflight.trajectories import database
from midflight.trajectories.database import (
    COPIED,
    COPIES,
    INCREMENT,
    SEALED,
    Database,
    State,
    Value,
)
from midflight.trajectories.increments import Increment
from midflight.trajectories.segments import SEGMENTS, SegmentWriter, place_of, read
from midflight.types import (
    Batch,
    Fate,
    Group,
    GroupKey,
    Reason,
    RolloutKey,
    Row,
    Task,
    Trajectory,
    Turn,
    Version,
    facts,
)
from midflight.types.digests import (
    NOTHING,
    admission_digest,
    group_digest,
    rollout_digest,
    seal_after,
    step_event_digest,
)
from midflight.types.rollouts import GroupScores, Seal

T = TypeVar("T")
_Fated: TypeAlias = tuple[RolloutKey, Fate, Reason | None, int]
_GATHERED = (facts.TrajectoryKept, facts.TurnKept, facts.Admitted, facts.GroupFinished)

_GROUP = "epoch = ? AND position = ? AND attempt = ?"
_ROLLOUT = _GROUP + " AND sample = ?"
_OF = "(epoch, position, attempt) IN (SELECT epoch, position, attempt FROM groups WHERE {})"
_OF_LEASE = _OF.format("lease = ?")
_LEARNT_LATER = f"state = '{State.TRAINED}' AND version > ?"
_GOES_ON = f"state IN ('{State.IN_LINE}', '{State.RUNNING}', '{State.WAITING}', ?)"
_ENDED = (
    "(epoch, position, attempt) IN (SELECT epoch, position, attempt FROM groups WHERE state "
    f"IN ('{State.TRAINED}', '{State.DROPPED}'))"
)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A group that was running or in line. Its rollouts go on: the rollouts in `finished` need not
    run again, and the others are replayed.
    """

    key: GroupKey
    finished: tuple[Trajectory, ...]
    turns: Mapping[RolloutKey, tuple[Turn, ...]]
    """The completed turns, in order, of rollouts that had not ended."""

    def versions(self) -> Iterator[Version]:
        """The oldest version of the group's tokens is among these versions."""
        for trajectory in self.finished:
            oldest = trajectory.oldest_version
            if oldest is not None:
                yield oldest
        for turns in self.turns.values():
            for turn in turns:
                for segment in turn.segments:
                    yield segment.version


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the chain of digests."""

    kind: str
    place: tuple[int, int, int, int | None]
    """Epoch, position, attempt and sample, or what stands in their place (`database.SEALS`)."""
    digest: bytes
    detail: bytes | None = None


class Store:
    """The store of the run with this name. A file of another run is refused, so that two runs never
    mix their groups.

    Without a run the file is only read, also while its run goes on: nothing is written.
    """

    def __init__(self, path: Path, *, run: str | None, segments: Path | None = None) -> None:
        """`path` is that of the index, and `segments` the folder of the tokens: by default the one
        beside the index.
        """
        self._folder = segments or path.parent / SEGMENTS
        self._segments = SegmentWriter(self._folder)
        self._db = Database(path, run=run, segments=self._segments)

    def close(self) -> None:
        self._segments.close()
        self._db.close()

    @property
    def path(self) -> Path:
        return self._db.path

    def copied(self, version: Version) -> None:
        """Records that the checkpoint of this version is about to get a copy of this store's index.
        The copy has this record too: no older copy can be newer than it. Its tokens are on the
        disk itself from then on.
        """
        self._segments.sync()
        with self._db.transaction():
            self._db.raise_number(COPIED, version)
            self._db.record_changes()
            self._db.set_number(COPIES, (self._db.number(COPIES) or 0) + 1)

    def has_increment(self, made: Increment) -> None:
        """Records that an increment is on the disk, so that the next one follows it. If another
        copy has begun meanwhile, it does not: that one has all of this again.
        """
        if self._db.number(COPIES) != made.copy:
            return
        with self._db.transaction():
            self._db.set_number(INCREMENT, made.name)
            self._db.set_number(SEALED, made.seal)
            self._db.execute("DELETE FROM changed WHERE copies < ?", made.copy)

    def apply(self, fact: facts.Fact) -> None:
        self.write((fact,))

    def write(self, deeds: Sequence[facts.Fact | Callable[[Store], object]]) -> None:
        """Does all of these in one transaction: all happen, or none. Many rollouts are one
        statement, up to the next fact of another kind.
        """
        with self._db.transaction():
            gathered: list[facts.Fact] = []
            for deed in deeds:
                if isinstance(deed, _GATHERED):
                    gathered.append(deed)
                    continue
                self._write_gathered(gathered)
                if isinstance(deed, Callable):
                    deed(self)
                else:
                    self._apply(deed)
            self._write_gathered(gathered)

    # --- Applying ---

    def _write_gathered(self, gathered: list[facts.Fact]) -> None:
        """Writes rollouts before the end of their groups, which removes the turns of rollouts."""
        ended = [fact for fact in gathered if isinstance(fact, facts.TrajectoryKept)]
        turns = [fact for fact in gathered if isinstance(fact, facts.TurnKept)]
        self._keep(ended, turns)
        for fact in gathered:
            if isinstance(fact, facts.Admitted):
                self._admit(fact)
            elif isinstance(fact, facts.GroupFinished):
                self._finish(fact)
        gathered.clear()

    def _apply(self, fact: facts.Fact) -> None:
        match fact:
            case facts.GroupClosed():
                self._close(fact)
            case facts.Leased():
                self._lease(fact)
            case facts.Stepped(lease=lease):
                self._step(lease)
            case facts.TakenBack(lease=lease):
                (train_version,) = self._open(lease)
                self._take_back(lease)
                self._seal_step("taken_back", lease, train_version, ())
                self._db.set_number("next", min(self._db.number("next") or 0, train_version))
            case facts.WentBack():
                self._go_back(fact)
            case facts.Checkpointed(version=version):
                self._settle(version)
                self._db.sync_after_commit()
            case facts.Interrupted():
                self._db.execute(
                    "UPDATE groups SET state = ? WHERE state = ?", State.IN_LINE, State.RUNNING
                )
                self._seal_step("interrupted", 0, 0, ())
            case _:
                pass

    def _admit(self, admitted: facts.Admitted) -> None:
        self._db.move(
            "INSERT INTO groups (epoch, position, attempt, task, state) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO UPDATE SET state = excluded.state WHERE state = ?",
            *_group(admitted.key),
            database.encode_task(admitted.task),
            State.RUNNING,
            State.IN_LINE,
        )
        self._db.add_source(admitted.task.source)
        if admitted.by is not None:
            by = database.encode_admission(admitted.by)
            place = (*_group(admitted.key), None)
            self._seal([Event("admitted", place, admission_digest(admitted.key, by), by)])

    def _keep(self, kept: Sequence[facts.TrajectoryKept], turns: Sequence[facts.TurnKept]) -> None:
        """Keeps rollouts that have ended, and turns of those that go on.

        The turns of a rollout that has ended are in its rows. Turn 0 begins anew, so a retry
        forgets the turns that it replaces.
        """
        gone = {deed.trajectory.key for deed in kept}
        going_on = dict[RolloutKey, list[facts.TurnKept]]()
        for turn in turns:
            if turn.key in gone:
                continue
            if turn.number == 0:
                going_on[turn.key] = []
            going_on.setdefault(turn.key, []).append(turn)
        gone.update(key for key, made in going_on.items() if made[0].number == 0)
        self._db.execute_rows(
            "DELETE FROM turns WHERE (epoch, position, attempt, sample) IN (VALUES {})",
            [_rollout(key) for key in gone],
        )
        turn_rows = list[tuple[Value, ...]]()
        for key, made in going_on.items():
            for turn in made:
                turn_rows.append((*_rollout(key), turn.number, database.encode_turn(turn.turn)))
        self._db.execute_rows("INSERT OR REPLACE INTO turns VALUES {}", turn_rows)
        ended = list[tuple[Value, ...]]()
        all_rows = self._segments.append(
            database.encode_rows(deed.trajectory.rows) for deed in kept
        )
        for deed, rows in zip(kept, all_rows, strict=True):
            of = database.columns(deed.trajectory, rows=rows)
            ended.append((*_rollout(deed.trajectory.key), *of))
        self._db.execute_rows("INSERT OR REPLACE INTO rollouts VALUES {}", ended)
        fates = list[_Fated]()
        for deed in kept:
            fates += _fated(deed)
        self._add_fates(fates)
        self._seal(
            Event(
                "rollout",
                _rollout(deed.trajectory.key),
                rollout_digest(deed.trajectory, deed.masked, deed.dropped),
                database.encode_counts(deed.masked, deed.dropped),
            )
            for deed in kept
        )

    def _finish(self, finished: facts.GroupFinished) -> None:
        where = _group(finished.group.key)
        self._db.move(
            f"UPDATE groups SET state = ?, finished = ? WHERE state = ? AND {_GROUP}",
            State.WAITING,
            finished.order,
            State.RUNNING,
            *where,
        )
        self._db.raise_number("finished", finished.order)
        # Rollouts that ended without a record may have left some.
        self._db.execute(f"DELETE FROM turns WHERE {_GROUP}", *where)
        self._seal_group(finished.group.key, State.WAITING)

    def _close(self, closed: facts.GroupClosed) -> None:
        """Closes a group and puts its successor in line at once: a crash between the two would lose
        the prompt.
        """
        where = _group(closed.key)
        self._db.move(
            (
                "UPDATE groups SET state = ?, reason = ?, lease = NULL WHERE state IN (?, ?, ?, ?) "
                f"AND {_GROUP}"
            ),
            State.DROPPED,
            closed.reason,
            State.IN_LINE,
            State.RUNNING,
            State.WAITING,
            State.LEASED,
            *where,
        )
        self._db.execute(
            "INSERT INTO fates SELECT epoch, position, attempt, sample, ?, ?, num_tokens FROM "
            f"fates WHERE fate = ? AND {_GROUP} ON CONFLICT DO UPDATE SET num_tokens = num_tokens "
            "+ excluded.num_tokens",
            Fate.DROPPED,
            closed.reason,
            Fate.WAITING,
            *where,
        )
        self._db.execute(f"DELETE FROM fates WHERE fate = ? AND {_GROUP}", Fate.WAITING, *where)
        self._db.execute(f"DELETE FROM turns WHERE {_GROUP}", *where)
        self._seal_group(closed.key, closed.reason)
        if closed.successor is not None:
            self._db.move(
                (
                    "INSERT INTO groups (epoch, position, attempt, task, state) SELECT ?, ?, ?, "
                    f"task, ? FROM groups WHERE {_GROUP}"
                ),
                *_group(closed.successor),
                State.IN_LINE,
                *where,
            )

    def _seal_group(self, key: GroupKey, end: str) -> None:
        """Adds the end of a group to the chain: `waiting`, or the reason for which it was
        dropped.
        """
        ((task,),) = self._db.execute(f"SELECT task FROM groups WHERE {_GROUP}", *_group(key))
        self._seal([Event(end, (*_group(key), None), group_digest(key, task, end))])

    def _seal_step(self, event: str, first: int, second: int, groups: Sequence[GroupKey]) -> None:
        """Adds an event of the steps to the chain: a lease, its end, or going back."""
        digest = step_event_digest(event, first, second, groups)
        detail = database.encode_keys(groups)
        self._seal([Event(event, (first, second, 0, None), digest, detail)])

    def _seal(self, events: Iterable[Event]) -> None:
        """Adds a link for each event to the chain of digests."""
        seal = self.seal()
        links = list[tuple[Value, ...]]()
        for event in events:
            seal = seal_after(seal, event.digest)
            links.append(
                (seal.number, event.kind, *event.place, event.detail, event.digest, seal.head)
            )
        self._db.execute_rows("INSERT INTO seals VALUES {}", links)

    def seal(self) -> Seal:
        """The end of the chain of digests."""
        found = self._db.execute("SELECT number, head FROM seals ORDER BY number DESC LIMIT 1")
        return Seal(*found[0]) if found else Seal(0, NOTHING)

    def _lease(self, leased: facts.Leased) -> None:
        batch = leased.batch
        self._db.execute("INSERT INTO leases VALUES (?, ?, 0)", batch.lease, batch.train_version)
        self._db.raise_number("lease", batch.lease)
        self._db.raise_number("version", batch.train_version + 1)
        self._db.set_number("next", batch.train_version + 1)
        for group in batch.groups:
            self._db.move(
                f"UPDATE groups SET state = ?, lease = ? WHERE state = ? AND {_GROUP}",
                State.LEASED,
                batch.lease,
                State.WAITING,
                *_group(group.key),
            )
        for fate, counts in ((Fate.MASKED, leased.masked), (Fate.DROPPED, leased.dropped)):
            self._add_fates((key, Fate.WAITING, None, -number) for key, number in counts.items())
            self._add_fates((key, fate, Reason.STALE, number) for key, number in counts.items())
        self._db.execute(f"DELETE FROM fates WHERE num_tokens = 0 AND {_OF_LEASE}", batch.lease)
        keys = [group.key for group in batch.groups]
        self._seal_step("leased", batch.lease, batch.train_version, keys)

    def _step(self, lease: int) -> None:
        self._open(lease)
        self._db.execute("UPDATE leases SET done = 1 WHERE lease = ?", lease)
        self._db.execute(
            f"UPDATE fates SET fate = ? WHERE fate = ? AND {_OF_LEASE}",
            Fate.TRAINED,
            Fate.WAITING,
            lease,
        )

    def _take_back(self, lease: int) -> None:
        self._db.execute("DELETE FROM leases WHERE lease = ?", lease)
        self._wait_again("lease = ?", lease)

    def _wait_again(self, groups: str, value: int) -> None:
        """Makes groups wait again. Tokens that the stale policy had taken out wait again too."""
        of = _OF.format(groups)
        self._db.execute(
            f"DELETE FROM fates WHERE (fate IN (?, ?) OR reason = ?) AND {of}",
            Fate.WAITING,
            Fate.TRAINED,
            Reason.STALE,
            value,
        )
        self._db.execute(
            "INSERT INTO fates SELECT epoch, position, attempt, sample, ?, '', num_trainable FROM "
            f"rollouts WHERE reward IS NOT NULL AND num_trainable > 0 AND {of}",
            Fate.WAITING,
            value,
        )
        self._db.execute(
            f"UPDATE groups SET state = ?, lease = NULL, version = NULL WHERE {groups}",
            State.WAITING,
            value,
        )

    def _go_back(self, back: facts.WentBack) -> None:
        """Goes back to a checkpoint, which may be older than others that there were: steps that
        only those had were not learnt either.
        """
        self._settle(back.checkpoint)
        for lease in self._leases("1"):
            self._take_back(lease)
        self._wait_again(_LEARNT_LATER, back.checkpoint)
        if back.version != back.checkpoint:
            self._db.execute("INSERT INTO forks VALUES (?, ?)", back.checkpoint, back.version)
        self._db.raise_number("version", back.version)
        self._db.set_number("next", back.version)
        keys = [group.key for group in back.groups]
        self._seal_step("went_back", back.checkpoint, back.version, keys)

    def _settle(self, version: Version) -> None:
        """Makes steps up to `version` final. Also makes a step final whose report was lost with
        this process, because the checkpoint has it.
        """
        for lease in self._leases("train_version < ?", version):
            (train_version,) = self._open(lease)
            self._step(lease)
            self._db.execute(
                "UPDATE groups SET state = ?, version = ?, lease = NULL WHERE lease = ?",
                State.TRAINED,
                train_version + 1,
                lease,
            )
            self._db.execute("DELETE FROM leases WHERE lease = ?", lease)

    def _add_fates(self, fates: Iterable[_Fated]) -> None:
        rows = [
            (*_rollout(key), fate, reason or "", num_tokens)
            for key, fate, reason, num_tokens in fates
            if num_tokens
        ]
        self._db.execute_rows(
            (
                "INSERT INTO fates VALUES {} ON CONFLICT DO UPDATE SET num_tokens = num_tokens + "
                "excluded.num_tokens"
            ),
            rows,
        )

    def _open(self, lease: int) -> tuple[Version]:
        found = self._db.execute("SELECT train_version FROM leases WHERE lease = ?", lease)
        if not found:
            raise UnknownLease(
                f"Lease {lease} is not open in {self._db.path.name}; take a batch again."
            )
        return found[0]

    # --- After a crash ---

    def facts(self) -> Iterator[facts.Fact]:
        """The facts about all groups, in an order in which they may have happened. Folded, they are
        the books.

        Final groups are included as sums only.
        """
        for checkpoint, version in self.forks():
            yield facts.WentBack(checkpoint, version, ())
        for key in self._keys("state IN (?, ?, ?)", State.RUNNING, State.WAITING, State.LEASED):
            yield facts.Admitted(key, self._task(key))
        for key in self._keys(
            "state IN (?, ?, ?, ?)", State.IN_LINE, State.RUNNING, State.WAITING, State.LEASED
        ):
            yield from self._kept(key)
        for key in self._keys("state IN (?, ?)", State.WAITING, State.LEASED):
            ((order,),) = self._db.execute(
                f"SELECT finished FROM groups WHERE {_GROUP}", *_group(key)
            )
            yield facts.GroupFinished(self._group(key), order)
        for lease, train_version, done in self._db.execute(
            "SELECT lease, train_version, done FROM leases ORDER BY lease"
        ):
            groups = sorted(self._groups("lease = ?", lease), key=lambda group: group.key)
            yield facts.Leased(Batch(lease, train_version, tuple(groups)), {}, {}, {})
            if done:
                yield facts.Stepped(
                    lease, train_version + 1, started=0.0, ended=0.0, num_tokens=0, metrics={}
                )
        yield self._carried_over()

    def groups_after(self, checkpoint: Version, *, whole: bool = True) -> tuple[Group, ...]:
        """Groups of steps that were made and that a checkpoint of that version does not have.
        Unless they are `whole`, their rollouts are left out.
        """
        keys = self._keys(_LEARNT_LATER, checkpoint)
        for lease in self._leases("done = 1 AND train_version >= ?", checkpoint):
            keys += self._keys("lease = ?", lease)
        if whole:
            return tuple(self._group(key) for key in keys)
        return tuple(Group.of(key, self._task(key), ()) for key in keys)

    def damaged(self) -> Iterator[tuple[GroupKey, str]]:
        """The groups that go on or wait, and of which some tokens cannot be read, each with a
        sentence. It reads all of them.
        """
        for key in self._keys("state IN (?, ?, ?)", State.IN_LINE, State.RUNNING, State.WAITING):
            try:
                for _ in self._trajectories(key, self._task(key)):
                    pass
            except StoreCorrupt as error:
                yield key, str(error)

    def remove_old(
        self,
        checkpoint: Version,
        *,
        max_bytes: int | None = None,
        max_seconds: float | None = None,
    ) -> int:
        """Removes the oldest tokens that training does not need, with the whole segments that hold
        them, until both bounds hold. Rewards, accounts and digests stay. No step after
        `checkpoint` is final: a trainer may go back that far. Returns the number of bytes that
        are free now.
        """
        needed: set[int] = set()
        for where, value in ((_GOES_ON, State.LEASED), (_LEARNT_LATER, checkpoint)):
            for (rows,) in self._db.execute(
                f"SELECT rows FROM rollouts WHERE {_OF.format(where)}", value
            ):
                place = place_of(rows)
                if place is not None:
                    needed.add(place.segment)
        return self._segments.remove_old(
            needed=needed, max_bytes=max_bytes, max_seconds=max_seconds
        )

    def forks(self) -> tuple[tuple[Version, Version], ...]:
        """The checkpoint and the version of each place where a trainer went on under a number that
        was not its own.
        """
        found = self._db.execute("SELECT checkpoint, version FROM forks ORDER BY rowid")
        return tuple(found)

    def groups_of_step(self, version: Version) -> tuple[Group, ...]:
        """The groups that the step which made a version trained on, in the order of their keys."""
        found = list(self._groups("state = ? AND version = ?", State.TRAINED, version))
        for lease in self._leases("done = 1 AND train_version = ?", version - 1):
            found += self._groups("lease = ?", lease)
        return tuple(sorted(found, key=lambda group: group.key))

    def group(self, key: GroupKey) -> Group:
        """The scored rollouts of a group that have ended."""
        return self._group(key)

    def task(self, key: GroupKey) -> Task:
        return self._task(key)

    def unfinished(self) -> tuple[Unfinished, ...]:
        """The groups that were running or in line, in the order of their keys."""
        keys = sorted(self._keys("state IN (?, ?)", State.RUNNING, State.IN_LINE))
        return tuple(self._unfinished(key) for key in keys)

    def scores(self, *, passes: float) -> Iterator[GroupScores]:
        """The scores of every group, in the order of their keys; a reward of `passes` or more is a
        pass.
        """
        for *key, task, state, scored, failed, passed, rewards in self._db.execute(
            database.SCORES, passes
        ):
            made = self._decoded(database.decode_task, task)
            yield GroupScores(
                GroupKey(*key),
                made,
                state not in (State.RUNNING, State.IN_LINE),
                scored,
                failed,
                passed,
                rewards,
            )

    def next_position(self) -> tuple[int, int]:
        """(epoch, index) of the next task to draw. An index past the end of its epoch means the
        start of the next.
        """
        found = self._db.execute(
            "SELECT epoch, position FROM groups WHERE epoch >= 0 ORDER BY epoch DESC, position "
            "DESC LIMIT 1"
        )
        return (found[0][0], found[0][1] + 1) if found else (0, 0)

    def next_posted(self) -> int:
        """The place of the next posted task to draw: their groups have an epoch below 0."""
        ((last,),) = self._db.execute(
            "SELECT COALESCE(MAX(position), -1) FROM groups WHERE epoch < 0"
        )
        return last + 1

    def _carried_over(self) -> facts.CarriedOver:
        trained = 0
        dropped = dict[Reason, int]()
        for state, reason, number in self._db.execute(
            (
                "SELECT state, reason, COUNT(*) FROM groups WHERE state IN (?, ?) GROUP BY state, "
                "reason"
            ),
            State.TRAINED,
            State.DROPPED,
        ):
            if state == State.TRAINED:
                trained = number
            else:
                dropped[Reason(reason)] = number
        return facts.CarriedOver(
            trained=trained,
            dropped=dropped,
            tokens=self._fates(_ENDED),
            in_line=tuple(self._keys("state = ?", State.IN_LINE)),
            next_version=self._db.number("next"),
            highest_version=self._db.number("version"),
            num_leases=self._db.number("lease") or 0,
            num_finished=self._db.number("finished") or 0,
        )

    def _kept(self, key: GroupKey) -> Iterator[facts.TrajectoryKept]:
        """The rollouts of a group that have ended. Fates that a step or its stale policy gave are
        left out: the lease gives them anew.
        """
        for trajectory in self._trajectories(key, self._task(key)):
            masked = dict[Reason, int]()
            dropped = dict[Reason, int]()
            fates = self._fates(_ROLLOUT, *_rollout(trajectory.key))
            for (fate, reason), number in fates.items():
                if reason is None or reason is Reason.STALE:
                    continue
                if fate is Fate.MASKED:
                    masked[reason] = number
                elif fate is Fate.DROPPED:
                    dropped[reason] = number
            if trajectory.reward is None and trajectory.num_trainable:
                dropped[Reason.NO_REWARD] -= trajectory.num_trainable
            yield facts.TrajectoryKept(trajectory, masked, dropped)

    def _fates(self, where: str, *values: Value) -> Mapping[tuple[Fate, Reason | None], int]:
        """Tokens by fate and reason (I3)."""
        found = self._db.execute(
            f"SELECT fate, reason, SUM(num_tokens) FROM fates WHERE {where} GROUP BY fate, reason",
            *values,
        )
        fates: dict[tuple[Fate, Reason | None], int] = {}
        for fate, reason, total in found:
            fates[Fate(fate), Reason(reason) if reason else None] = total
        return fates

    # --- Reading ---

    def ended(self) -> Iterator[tuple[Trajectory, Task, State, Version | None]]:
        """Every rollout that has ended, in the order of the stream, with its task, the state of its
        group and the version that a step on it made. One whose tokens cannot be read has no rows,
        and its error says why.
        """
        groups = (
            "SELECT epoch, position, attempt, state, version FROM groups ORDER BY epoch, "
            "position, attempt"
        )
        for epoch, position, attempt, state, version in self._db.execute(groups):
            key = GroupKey(epoch, position, attempt)
            task = self._task(key)
            for trajectory in self._trajectories(key, task, strictly=False):
                yield trajectory, task, State(state), version

    def _groups(self, where: str, *values: Value) -> tuple[Group, ...]:
        return tuple(self._group(key) for key in self._keys(where, *values))

    def _group(self, key: GroupKey) -> Group:
        task = self._task(key)
        return Group.of(key, task, self._trajectories(key, task))

    def _unfinished(self, key: GroupKey) -> Unfinished:
        stored: dict[RolloutKey, list[tuple[int, Turn]]] = {}
        for sample, number, blob in self._db.execute(
            f"SELECT sample, number, turn FROM turns WHERE {_GROUP} ORDER BY sample, number",
            *_group(key),
        ):
            turn = self._decoded(database.decode_turn, blob)
            stored.setdefault(RolloutKey(key, sample), []).append((number, turn))
        turns = {
            rollout: tuple(self._decoded(database.whole_turns, made))
            for rollout, made in stored.items()
        }
        finished = tuple(self._trajectories(key, self._task(key)))
        return Unfinished(key, finished, turns)

    def _trajectories(
        self, key: GroupKey, task: Task, *, strictly: bool = True
    ) -> Iterator[Trajectory]:
        """The rollouts of a group that have ended. `strictly`: raises `StoreCorrupt` if the tokens
        of one cannot be read.
        """
        columns = "sample, reward, rows, scored, truncated, error, seconds, room"
        for sample, reward, rows, scored, truncated, error, seconds, room in self._db.execute(
            f"SELECT {columns} FROM rollouts WHERE {_GROUP} ORDER BY sample", *_group(key)
        ):
            decoded: tuple[Row, ...] = ()
            try:
                decoded = self._decoded(database.decode_rows, read((self._folder,), rows))
            except StoreCorrupt as unread:
                if strictly:
                    raise
                error = str(unread)
            made_of = self._decoded(database.decode_scored, scored)
            yield Trajectory(
                RolloutKey(key, sample),
                task.id,
                task.source,
                reward,
                decoded,
                bool(truncated),
                error,
                seconds,
                room,
                made_of.components,
                made_of.metrics,
                made_of.turn_rewards,
                made_of.fields,
                made_of.roles,
            )

    def _task(self, key: GroupKey) -> Task:
        (blob,) = self._db.execute(f"SELECT task FROM groups WHERE {_GROUP}", *_group(key))[0]
        return self._decoded(database.decode_task, blob)

    def _decoded(self, decode: Callable[[database.Given], T], blob: database.Given) -> T:
        return database.decoded(self._db.path, decode, blob)

    def _keys(self, where: str, *values: Value) -> list[GroupKey]:
        """Keys in the order of finishing. Groups that have not finished come first, in the order of
        their keys.
        """
        found = self._db.execute(
            (
                f"SELECT epoch, position, attempt FROM groups WHERE {where} ORDER BY finished, "
                "epoch, position, attempt"
            ),
            *values,
        )
        return [GroupKey(*columns) for columns in found]

    def _leases(self, where: str, *values: Value) -> list[int]:
        found = self._db.execute(f"SELECT lease FROM leases WHERE {where} ORDER BY lease", *values)
        return [lease for (lease,) in found]


def _group(key: GroupKey) -> tuple[int, int, int]:
    return key.epoch, key.index, key.attempt


def _rollout(key: RolloutKey) -> tuple[int, int, int, int]:
    return *_group(key.group), key.sample


def _fated(kept: facts.TrajectoryKept) -> Iterator[_Fated]:
    """The tokens of a rollout that has ended, by fate."""
    trajectory = kept.trajectory
    for reason, number in kept.masked.items():
        yield trajectory.key, Fate.MASKED, reason, number
    for reason, number in kept.dropped.items():
        yield trajectory.key, Fate.DROPPED, reason, number
    if trajectory.reward is None:
        yield trajectory.key, Fate.DROPPED, Reason.NO_REWARD, trajectory.num_trainable
    else:
        yield trajectory.key, Fate.WAITING, None, trajectory.num_trainable
