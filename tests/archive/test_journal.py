"""A journal is read as far as it is whole, and what was appended is read once."""

from __future__ import annotations

from pathlib import Path

from tests.archive.test_runs import made_run, score_line, step_line

from midflight.archive.journal import Tail, read_folder


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    whole = step_line(2, 0.5)
    folder = made_run(tmp_path / "a", step_line(1, 0.25), whole[:40])
    readings = read_folder(folder)
    assert readings.points("rollout/reward_mean") == [(1, 0.25)] and not readings.refresh()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(whole[40:] + score_line(2, 0.75))
    assert readings.refresh() and readings.num_unread == 0
    assert readings.points("rollout/reward_mean") == [(1, 0.25), (2, 0.5)]
    assert readings.points("eval/sums/reward") == [(2, 0.75)] and "eval/sums/reward" in readings.names()


def test_lines_of_lost_steps_go_when_a_resumed_run_writes_its_journal_anew(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a", step_line(1, 0.25), step_line(2, 0.5))
    readings = read_folder(folder)
    (folder / "new").write_text(step_line(1, 0.25) + step_line(2, 0.75) + step_line(3, 1.0))
    (folder / "new").replace(folder / "metrics.jsonl")
    assert readings.refresh() and readings.points("rollout/reward_mean") == [(1, 0.25), (2, 0.75), (3, 1.0)]


def test_a_file_written_anew_under_the_same_number_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("one\ntwo\n")
    tail = Tail(path)
    assert tail.new() == (False, [b"one", b"two"]) and tail.new() == (False, [])
    path.write_text("three\nfour\nfive\n")  # longer, and the same file
    assert tail.new() == (True, [b"three", b"four", b"five"])
    path.unlink()
    assert tail.new() == (True, []) and tail.new() == (False, [])


def test_lines_of_a_later_version_are_passed_over_and_counted(tmp_path: Path) -> None:
    folder = made_run(
        tmp_path / "a", '{"kind": "dream", "version": 1}\n', "no json\n", step_line(1, 0.25).replace('"tokens"', '"new_key": 1, "tokens"')
    )
    readings = read_folder(folder)
    assert readings.points("rollout/reward_mean") == [(1, 0.25)] and readings.num_unread == 2
