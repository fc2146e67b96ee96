"""Pages of a run's groups, as the store has them."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from midflight.archive.groups import GroupFilter, GroupOrder, page_of
from midflight.archive.ledger import ledger_of
from midflight.archive.search import WordIndex, forget_deleted
from midflight.archive.store_reader import rollout_key
from midflight.errors import NoRun, RunGone, StoreCorrupt, StoreNewer
from midflight.trajectories.database import OLDER_VERSION, SCHEMA_VERSION, State
from midflight.types import GroupKey, Reason, RolloutKey, Trajectory
from midflight.types.facts import TrajectoryKept

from .stores import Recorded


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Group 0 was trained (made version 1), 1 is in a step that no checkpoint has, 2 was dropped, 3 waits, with a failure in it."""
    with Recorded(tmp_path / "run") as store:
        made = [
            store.group(0, (0.0, 1.0), said="a fine pear"),
            store.group(1, (0.5, 0.75), said="a green apple"),
            store.group(2, (1.0, 1.0), source="sums"),
            store.group(3, (0.25, None), error="ZeroDivisionError: division by zero", epoch=1),
        ]
        store.train(made[0], version=1)
        store.train(made[1], version=2, lasting=False)
        store.drop(made[2], Reason.ZERO_SPREAD)
    return tmp_path / "run"


def indices(folder: Path, wanted: GroupFilter, order: GroupOrder = GroupOrder.NEWEST, words: WordIndex | None = None) -> list[int]:
    return [group.key.index for group in page_of(folder, wanted, order=order, words=words).groups]


def test_the_newest_groups_come_first_with_their_rewards_and_fates(folder: Path) -> None:
    page = page_of(folder, GroupFilter())
    assert [(group.key.index, group.state, group.mean, group.spread) for group in page.groups] == [
        (3, State.WAITING, 0.25, 0.0),
        (2, State.DROPPED, 1.0, 0.0),
        (1, State.LEASED, 0.625, 0.25),
        (0, State.TRAINED, 0.5, 1.0),
    ]
    assert [group.version for group in page.groups] == [None, None, 2, 1]
    assert [group.fate for group in page.groups] == [
        "waits for a step",
        "dropped: zero_spread",
        "in the step that makes version 2, which no checkpoint has yet",
        "trained, made version 1",
    ]
    assert page.groups[0].rollouts[1].failure == "ZeroDivisionError"
    assert page.groups[3].rollouts[1].components == {"right": 1.0}


def test_groups_that_have_not_ended_can_be_left_out(folder: Path) -> None:
    """The newest of a run that has ended would be those that nobody finished."""
    with Recorded(folder) as store:
        store.begin(4)
    assert 4 in indices(folder, GroupFilter())
    assert 4 not in indices(folder, GroupFilter(only_ended=True))
    assert page_of(folder, GroupFilter(only_ended=True)).total == 4


def test_a_page_is_a_part_and_says_how_many_there_are_in_all(folder: Path) -> None:
    page = page_of(folder, GroupFilter(), first=1, number=2)
    assert [group.key.index for group in page.groups] == [2, 1]
    assert page.total == 4
    assert page.sources == ("letters", "sums")
    assert page.failures == {"ZeroDivisionError": 1}
    assert page.fates == {"dropped": 1, "zero_spread": 1, "trained": 2, "waiting": 1}
    groups = ledger_of(folder).groups()
    assert all(groups[fate] == page.fates[fate] for fate in ("trained", "waiting")), "as the ledger counts them, which leads there"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (GroupFilter(source="sums"), [2]),
        (GroupFilter(task="task-1"), [1]),
        (GroupFilter(version=1), [0]),
        (GroupFilter(version=2), [1]),
        (GroupFilter(versions=(1, 2)), [1, 0]),
        (GroupFilter(fate="dropped"), [2]),
        (GroupFilter(fate="trained"), [1, 0]),
        (GroupFilter(fate="zero_spread"), [2]),
        (GroupFilter(failure="ZeroDivisionError"), [3]),
        (GroupFilter(failure="ZeroDivisionError", source="sums"), []),
    ],
)
def test_each_filter_lets_through_what_it_names(folder: Path, wanted: GroupFilter, expected: list[int]) -> None:
    assert indices(folder, wanted) == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (GroupOrder.OLDEST, [0, 1, 2, 3]),
        (GroupOrder.WORST, [3, 0, 1, 2]),
        (GroupOrder.BEST, [2, 1, 0, 3]),
        (GroupOrder.SPREAD, [0, 1, 3, 2]),
        (GroupOrder.FAILED, [3, 2, 1, 0]),
    ],
)
def test_groups_are_sorted_by_what_is_asked(folder: Path, order: GroupOrder, expected: list[int]) -> None:
    found = indices(folder, GroupFilter(), order)
    if order in (GroupOrder.SPREAD, GroupOrder.FAILED):  # of those that are alike any may be first
        assert found[0] == expected[0]
    else:
        assert found == expected


def test_how_often_a_task_passed_is_said_for_each_epoch_that_drew_it(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        store.group(0, (0.0, 1.0, 0.0, 0.0))
        store.group(0, (1.0, 1.0, None, 0.0), epoch=1)
    (newest, _) = page_of(tmp_path, GroupFilter()).groups
    assert [(score.epoch, score.passed, score.scored) for score in newest.epochs] == [(0, 1, 4), (1, 2, 3)]


def test_words_are_found_in_what_was_said_and_in_errors(folder: Path) -> None:
    words = WordIndex(folder)
    assert words.grow(60.0).complete
    assert indices(folder, GroupFilter(words="pear"), words=words) == [0]
    assert indices(folder, GroupFilter(words='"green apple"'), words=words) == [1]
    assert indices(folder, GroupFilter(words='"apple green"'), words=words) == []
    assert indices(folder, GroupFilter(words="division"), words=words) == [3]
    assert indices(folder, GroupFilter(words='fine OR "'), words=words) == []  # its operators are words like others
    page = page_of(folder, GroupFilter(words="division"), words=words)
    assert [rollout.found for rollout in page.groups[0].rollouts] == [False, True]


def test_the_index_grows_with_the_run_and_leaves_the_runs_folder_alone(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name == "store.sqlite"}
    words = WordIndex(folder)
    words.grow(60.0)
    assert before["store.sqlite"] == (folder / "store.sqlite").read_bytes()
    with Recorded(folder) as store:
        store._order = 4
        store.group(9, (1.0,), said="a quince")
    assert not words.grow(60.0).done < 9
    assert indices(folder, GroupFilter(words="quince"), words=words) == [9]


def test_two_viewers_that_index_at_once_add_each_rollout_once(folder: Path) -> None:
    with ThreadPoolExecutor(2) as both:
        grown = list(both.map(lambda _: WordIndex(folder).grow(60.0), range(2)))
    assert all(each.complete for each in grown)
    words = WordIndex(folder)
    assert indices(folder, GroupFilter(words="answer"), words=words) == [3, 2]
    with closing(sqlite3.connect(words.path)) as index:
        assert index.execute("SELECT COUNT(*) FROM said WHERE said MATCH 'answer'").fetchone() == (4,)


def test_a_rollout_that_was_kept_anew_is_not_found_by_what_it_said_before(folder: Path) -> None:
    words = WordIndex(folder)
    words.grow(60.0)
    with Recorded(folder) as store:
        key = RolloutKey(GroupKey(0, 1), 0)
        row = store.row(("<|user|>x<|end|><|assistant|>", False), ("a medlar<|end|>", True))
        store.apply(TrajectoryKept(Trajectory(key, "task-1", "letters", 1.0, (row,)), {}, {}))
    words.grow(60.0)
    page = page_of(folder, GroupFilter(words="apple"), words=words)
    assert [(group.key.index, [rollout.found for rollout in group.rollouts]) for group in page.groups] == [(1, [False, True])]


def test_the_index_of_a_run_that_was_deleted_is_forgotten(folder: Path) -> None:
    words = WordIndex(folder)
    words.grow(60.0)
    forget_deleted()
    assert words.path.exists()
    (folder / "store.sqlite").unlink()
    forget_deleted()
    assert not words.path.exists()


def test_a_folder_without_a_store_and_one_that_is_gone_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="has no rollouts"):
        page_of(tmp_path, GroupFilter())
    with pytest.raises(RunGone, match="deleted or moved"):
        page_of(tmp_path / "gone", GroupFilter())
    with pytest.raises(RunGone):
        WordIndex(tmp_path / "gone")


@pytest.mark.parametrize(("schema", "error"), [(SCHEMA_VERSION + 1, StoreNewer), (OLDER_VERSION - 1, StoreCorrupt)])
def test_a_store_of_another_schema_is_refused_with_both_numbers(folder: Path, schema: int, error: type[Exception]) -> None:
    with closing(sqlite3.connect(folder / "store.sqlite")) as other:
        other.execute(f"PRAGMA user_version = {schema}")
    with pytest.raises(error, match=f"schema is {schema}, this Midflight knows {SCHEMA_VERSION}"):
        page_of(folder, GroupFilter())


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_text("no database, though long enough to be looked at as one" * 20)
    with pytest.raises(StoreCorrupt):
        page_of(tmp_path, GroupFilter())


@pytest.mark.parametrize("text", ["", "1-2-3", "a-b-c-d", "1-2-3-4-5"])
def test_a_name_that_is_of_no_rollout_is_refused(text: str) -> None:
    with pytest.raises(NoRun, match="names no rollout"):
        rollout_key(text)


def test_the_name_of_a_posted_tasks_rollout_begins_with_a_minus() -> None:
    assert str(rollout_key("-1-7-0-2")) == "-1-7-0-2"
