"""Increments: each has what came since the one before, and together they are the store, whatever has happened to its groups."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import StoreCorrupt
from midflight.trajectories.database import INCREMENT, OF_GROUPS, OF_RUN, SEALED
from midflight.trajectories.increments import Increment, path_of, restore, write_increment
from midflight.types import Batch, Group, GroupKey, Reason, RolloutKey

from .keeping import Keeper
from .making import group, key, trajectory, turn


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "increments"


def copied(store: Keeper, folder: Path, version: int = 1, *, noted: bool = True) -> Increment:
    """A copy for a checkpoint. Unless it is `noted` the process has died before that."""
    store.copied(version)
    made = write_increment(store.path, folder)
    if noted:
        store.has_increment(made)
    return made


def contents(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All that a store says, but for what it notes of its own copies."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        for table in (*OF_RUN, *OF_GROUPS, "seals"):
            # the search of a viewer goes on from the number of a row
            number = "rowid, " if table == "rollouts" else ""
            found[table] = sorted(map(repr, file.execute(f"SELECT {number}* FROM {table}")))  # type: ignore[misc]
    found["numbers"] = [row for row in found["numbers"] if INCREMENT not in row and SEALED not in row]
    return found


def groups_of(increment: Increment, folder: Path) -> list[int]:
    with closing(sqlite3.connect(path_of(increment.name, folder))) as file:
        return [position for (position,) in file.execute("SELECT position FROM groups ORDER BY position")]


def learnt(store: Keeper, index: int) -> None:
    """A group from its admission to a step that a checkpoint has."""
    made = store.finish(index)
    store.lease(Batch(index, index - 1, (made,)))
    store.done(index)
    store.checkpoint(index)


def test_an_increment_has_the_groups_that_have_changed_since_the_one_before(path: Path, folder: Path) -> None:
    store = Keeper(path)
    for index in (1, 2, 3):
        learnt(store, index)
    store.admit(key(4))
    assert groups_of(copied(store, folder), folder) == [1, 2, 3, 4], "the first has all, also of a store of before"
    assert groups_of(copied(store, folder), folder) == []
    store.keep_turn(RolloutKey(key(4), 0), 0, turn(5))
    learnt(store, 5)
    made = copied(store, folder)
    assert groups_of(made, folder) == [4, 5]
    restored = path.with_name("restored.sqlite")
    restore(made.name, folder, restored)
    assert contents(restored) == contents(path)


def test_a_copy_costs_as_much_after_hundred_times_as_many_groups(path: Path, folder: Path) -> None:
    store = Keeper(path)
    sizes: list[int] = []
    learnt(store, 1)
    copied(store, folder)
    for upto in (6, 600):
        while store.next_position()[1] < upto:
            learnt(store, store.next_position()[1])
        copied(store, folder)
        for _ in range(5):
            learnt(store, store.next_position()[1])
        sizes.append(path_of(copied(store, folder).name, folder).stat().st_size)
    assert sizes[1] <= sizes[0] * 1.1, sizes


class Play:
    """Whatever may happen to the groups of a run, in an order drawn at random."""

    def __init__(self, store: Keeper, draw: random.Random) -> None:
        self.store = store
        self._draw = draw
        self._running: list[GroupKey] = []
        self._waiting: list[Group] = []
        self._ended: list[GroupKey] = []
        self._lease = 0
        self._version = 0
        self._next = 0

    def move(self) -> None:
        moves = (self._admit, self._turn, self._turn, self._rollout, self._rollout, self._finish, self._finish)
        moves += (self._close, self._step, self._step, self._checkpoint, self._late, self._go_back)
        self._draw.choice(moves)()

    def _one(self) -> GroupKey | None:
        return self._draw.choice(self._running) if self._running else None

    def _admit(self) -> None:
        self._running.append(key(self._next))
        self.store.admit(self._running[-1])
        self._next += 1

    def _turn(self) -> None:
        if one := self._one():
            for number in range(self._draw.randrange(1, 3)):
                self.store.keep_turn(RolloutKey(one, self._draw.randrange(2)), number, turn(number, 7))

    def _rollout(self) -> None:
        if one := self._one():
            made = trajectory(one, self._draw.randrange(2), reward=self._draw.choice((None, 0.5)), num_tokens=self._draw.randrange(1, 40))
            self.store.keep(made, masked={Reason.STALE: 1} if self._draw.random() < 0.3 else None)

    def _finish(self) -> None:
        if one := self._one():
            self._running.remove(one)
            made = group(one)
            for each in made.trajectories:
                self.store.keep(each)
            self.store.finish_group(made)
            self._waiting.append(made)

    def _close(self) -> None:
        if one := self._one():
            self._running.remove(one)
            again = GroupKey(one.epoch, one.index, one.attempt + 1) if self._draw.random() < 0.5 else None
            self.store.close_group(one, Reason.ZERO_SPREAD, successor=again)
            self._ended.append(one)
            if again is not None:
                self._running.append(again)
                self.store.admit(again)

    def _late(self) -> None:
        """A rollout of a group that was dropped ends after it."""
        if self._ended:
            self.store.keep(trajectory(self._draw.choice(self._ended), 5))

    def _step(self) -> None:
        if self._waiting:
            self._lease += 1
            self.store.lease(Batch(self._lease, self._version, tuple(self._waiting)))
            self._waiting = []
            self.store.done(self._lease)
            self._version += 1

    def _checkpoint(self) -> None:
        self.store.checkpoint(self._version)

    def _go_back(self) -> None:
        if self._draw.random() < 0.3 and self._version > 1:
            self._version -= 1
            self.store.go_back(self._version)
            for one in self._running:
                self.store.admit(one)
            self._waiting = self.store.waiting


@pytest.mark.parametrize("seed", range(8))
def test_i8_increments_together_are_the_store_at_each_copy_whatever_has_happened(
    path: Path, folder: Path, tmp_path: Path, seed: int
) -> None:
    """Also where a process died before it noted its copy, and where a run goes on from a copy on another machine."""
    draw = random.Random(seed)
    store = Keeper(path)
    play = Play(store, draw)
    seen = tmp_path / "seen.sqlite"
    copies = 0
    for number in range(400):
        play.move()
        if draw.random() < 0.07:
            copies += 1
            made = copied(store, folder, number, noted=draw.random() < 0.8)
            alone = tmp_path / f"alone-{number}.sqlite"
            restore(made.name, folder, alone)
            restore(made.name, folder, seen)
            assert contents(alone) == contents(seen) == contents(store.path)
            if draw.random() < 0.3:
                store.close()
                store = Keeper(alone)
                play.store = store
    assert copies > 10


def test_a_reader_that_followed_a_run_whose_machine_was_lost_follows_it_where_it_goes_on(path: Path, folder: Path, tmp_path: Path) -> None:
    store = Keeper(path)
    learnt(store, 1)
    first = copied(store, folder)
    learnt(store, 2)
    lost = copied(store, folder)
    seen = tmp_path / "seen.sqlite"
    restore(lost.name, folder, seen)
    restore(first.name, folder, tmp_path / "other.sqlite")
    other = Keeper(tmp_path / "other.sqlite")
    store = other
    store.finish(2)
    newest = copied(store, folder)
    assert groups_of(newest, folder) == [2]
    restore(newest.name, folder, seen)
    assert contents(seen) == contents(other.path)


def test_two_copies_at_once_are_both_whole_and_neither_takes_from_what_follows(path: Path, folder: Path, tmp_path: Path) -> None:
    """The trainer that asked for the first has died."""
    store = Keeper(path)
    learnt(store, 1)
    store.copied(1)
    first = write_increment(path, folder)
    before = contents(path)
    learnt(store, 2)
    store.copied(2)
    learnt(store, 3)
    second = write_increment(path, folder)
    store.has_increment(second)
    store.has_increment(first)
    learnt(store, 4)
    third = copied(store, folder, 3)
    restore(first.name, folder, tmp_path / "first.sqlite")
    assert contents(tmp_path / "first.sqlite") == before
    restore(third.name, folder, tmp_path / "third.sqlite")
    assert contents(tmp_path / "third.sqlite") == contents(path)


def test_what_changes_while_a_copy_is_made_is_in_the_next(path: Path, folder: Path, tmp_path: Path) -> None:
    store = Keeper(path)
    store.admit(key(1))
    store.copied(1)
    made = write_increment(path, folder)
    store.keep(trajectory(key(1), 0))
    store.has_increment(made)
    later = copied(store, folder)
    assert groups_of(later, folder) == [1]
    restore(later.name, folder, tmp_path / "restored.sqlite")
    assert contents(tmp_path / "restored.sqlite") == contents(path)


@pytest.mark.parametrize("table", OF_GROUPS)
def test_whichever_statement_changes_a_row_of_a_group_its_change_is_copied(path: Path, folder: Path, table: str) -> None:
    store = Keeper(path)
    for index in (1, 2):
        learnt(store, index)
        store.admit(key(10 + index))
        store.keep_turn(RolloutKey(key(10 + index), 0), 0, turn(5))
    copied(store, folder)
    index = 11 if table == "turns" else 1
    for statement in (
        f"UPDATE {table} SET attempt = attempt WHERE position = {index}",
        f"INSERT OR REPLACE INTO {table} SELECT * FROM {table} WHERE position = {index}",
        f"DELETE FROM {table} WHERE position = {index}",
    ):
        with closing(sqlite3.connect(path)) as other:
            assert other.execute(statement).rowcount
            other.commit()
        made = copied(store, folder)
        with closing(sqlite3.connect(path_of(made.name, folder))) as file:
            assert file.execute("SELECT position FROM changed").fetchall() == [(index,)], statement


def spoil(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])


@pytest.mark.parametrize("harm", [Path.unlink, spoil])
def test_an_increment_that_is_lost_or_damaged_is_named_and_nothing_is_restored(
    path: Path, folder: Path, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    store = Keeper(path)
    learnt(store, 1)
    first = copied(store, folder)
    restored = tmp_path / "restored.sqlite"
    restore(first.name, folder, restored)
    before = contents(restored)
    learnt(store, 2)
    second = copied(store, folder)
    learnt(store, 3)
    third = copied(store, folder)
    harm(path_of(second.name, folder))
    with pytest.raises(StoreCorrupt, match=f"{second.name:016x}.*restore the file from a copy"):
        restore(third.name, folder, restored)
    assert contents(restored) == before
