"""Conversations of evaluations, in a file of their own."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from midflight.environments.evaluation import evaluation_key
from midflight.trajectories.heldout import HELDOUT, KEPT_EVALUATIONS, HeldoutStore
from midflight.types import Task, Trajectory
from midflight.types.facts import Evaluated, EvaluationKept


def kept(version: int, position: int = 0, reward: float | None = 1.0) -> EvaluationKept:
    task = Task(f"task-{position}", "sums", {"question": "1+1"})
    error = None if reward is not None else "KeyError: 'x'"
    return EvaluationKept(version, task, Trajectory(evaluation_key(position), task.id, task.source, reward, (), error=error))


def rows(folder: Path, sql: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(folder / HELDOUT)) as file:
        return file.execute(sql).fetchall()


def test_each_version_has_its_own_answer_to_a_task_and_a_second_try_replaces_the_first(tmp_path: Path) -> None:
    store = HeldoutStore(tmp_path / HELDOUT, run="r")
    for fact in (kept(0, 3, 0.25), kept(5, 3, 0.5), kept(5, 4, None), kept(5, 3, 0.75), Evaluated(5, "sums", 1, 0.75)):
        store.apply(fact)
    store.close()
    found = rows(tmp_path, "SELECT epoch, position, reward, error FROM rollouts ORDER BY epoch, position")
    assert found == [(0, 3, 0.25, None), (5, 3, 0.75, None), (5, 4, None, "KeyError: 'x'")]
    assert rows(tmp_path, "SELECT DISTINCT state FROM groups") == [("evaluated",)]


def test_the_first_evaluation_and_the_newest_are_kept(tmp_path: Path) -> None:
    store = HeldoutStore(tmp_path / HELDOUT, run="r")
    for version in range(0, 10 * (KEPT_EVALUATIONS + 5), 10):
        store.apply(kept(version))
    store.close()
    versions = [version for (version,) in rows(tmp_path, "SELECT DISTINCT epoch FROM groups ORDER BY epoch")]
    assert versions == [0, *range(60, 250, 10)] and len(versions) == KEPT_EVALUATIONS
    assert rows(tmp_path, "SELECT DISTINCT epoch FROM rollouts ORDER BY epoch") == [(version,) for version in versions]


def test_a_run_without_evaluations_has_no_file(tmp_path: Path) -> None:
    HeldoutStore(tmp_path / HELDOUT, run="r").close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_said_once_and_costs_the_run_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    store = HeldoutStore(tmp_path / "file" / HELDOUT, run="r")
    for version in (1, 2, 3):
        store.apply(kept(version))
    store.close()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["conversations of evaluations are not kept any more"]
