"""I8 where a run goes on from an older checkpoint than its newest, and where its disk is full at any write."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from midflight.run.launcher.child import failure_of
from midflight.run.parts import Verdict
from midflight.testing.virtual_time import run_virtual
from midflight.trajectories import database
from midflight.trajectories.database import State
from midflight.types import Reason, Version

from .test_recovery import NUM_TASKS, Life, Place, states


def check_lives(made: Sequence[Life], saved: Sequence[Version]) -> None:
    """`saved`: up to which version the steps of each life are in the weights of the last."""
    trained = Counter[Place]()
    for life, version in zip(made, saved, strict=True):
        trained.update((g.key.epoch, g.key.index) for batch in life.stepped if batch.train_version < version for g in batch.groups)
    assert set(trained.values()) == {1}, f"trained twice: {[place for place, n in trained.items() if n > 1]}"
    found = states(made[-1].site.folder)
    assert [place for place in sorted(found) if place[0] == 0] == [(0, index) for index in range(NUM_TASKS)], "a prompt lost"
    for place, attempts in found.items():
        last, reason = attempts[-1]
        assert (last is State.TRAINED) == (place in trained), f"{place} is {last}, trained {trained[place]} times"
        assert last is not State.DROPPED or reason in (Reason.NO_REWARD, Reason.TOO_FEW), f"{place} dropped for {reason}"


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("checkpoint", [2, 6])
def test_i8_falling_back_to_an_older_checkpoint_loses_no_prompt_and_trains_none_twice(
    tmp_path: Path, staleness: int, checkpoint: Version
) -> None:
    first = Life(tmp_path, 1, staleness=staleness, version=0, checkpoint=None, steps=9)
    assert run_virtual(first.run(None, tmp_path), seed=1, max_seconds=20_000) and first.saved == 9
    second = Life(tmp_path, 2, staleness=staleness, version=10, checkpoint=checkpoint, steps=8)
    assert run_virtual(second.run(None, tmp_path), seed=2, max_seconds=20_000)
    check_lives([first, second], [checkpoint, second.saved])
    assert second.site.ring is not None and second.site.books.trained == 2 * (checkpoint + 8)


@pytest.mark.parametrize("num_pages", range(13, 32, 3))
def test_i8_no_space_at_a_write_ends_the_run_with_the_remedy_and_it_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    connect = database.connect

    def limited(path: Path, *, logged: bool = True) -> sqlite3.Connection:
        connection = connect(path, logged=logged)
        connection.execute(f"PRAGMA max_page_count = {num_pages}")
        return connection

    first = Life(tmp_path, 1, staleness=1, version=0, checkpoint=None, steps=40)
    with monkeypatch.context() as patch, pytest.raises(ExceptionGroup) as raised:
        patch.setattr(database, "connect", limited)
        run_virtual(first.run(None, tmp_path), seed=1, max_seconds=20_000)
    told = failure_of(raised.value)
    assert told.verdict is Verdict.FINAL and "database or disk is full; free some space and resume the run" in told.error
    second = Life(tmp_path, 2, staleness=1, version=first.next_version, checkpoint=first.saved, steps=8)
    assert run_virtual(second.run(None, tmp_path), seed=2, max_seconds=20_000)
    check_lives([first, second], [first.saved, second.saved])
