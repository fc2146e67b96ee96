"""Posted tasks: taken whole or not at all, in their order, before those of other sources, and kept over restarts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from midflight.config.sources import SourceSection
from midflight.environments import posted as posted_module
from midflight.environments.posted import POSTED_EPOCH, PostedTasks
from midflight.environments.sources import Source, load_sources
from midflight.environments.tasks import TaskStream, posted_tasks
from midflight.errors import Overloaded, RequestRejected
from midflight.types import GroupKey, Task


def box(folder: Path, **options: Any) -> PostedTasks:
    found = posted_tasks([SourceSection(dataset="spell_backward"), SourceSection(posted=True, **options)], folder)
    assert found is not None
    return found


def rows(*questions: str) -> list[dict[str, Any]]:
    return [{"question": question, "answer": len(question)} for question in questions]


def test_posted_tasks_are_drawn_in_their_order(tmp_path: Path) -> None:
    posted = box(tmp_path, answer="answer", system="Count.")
    assert posted.draw() is None and posted.post(rows("a", "bb")) == range(2) and posted.post(rows("é")) == range(2, 3)
    drawn = [place for _ in range(4) if (place := posted.draw()) is not None]
    assert drawn == [0, 1, 2] and posted.num_waiting == 0
    assert (posted.task(1).id, posted.task(1).source, posted.task(1).data["answer"]) == ("1", "posted", "2")
    assert posted.task(2).messages == [{"role": "system", "content": "Count."}, {"role": "user", "content": "é"}]


def test_a_row_that_makes_no_task_is_named_and_none_is_taken(tmp_path: Path) -> None:
    posted = box(tmp_path)
    with pytest.raises(RequestRejected, match=r"task 1: there is no column 'question', which environment.sources.1.prompt names"):
        posted.post([*rows("a"), {"prompt": "b"}])
    assert len(posted) == 0 and not (tmp_path / "posted.jsonl").read_bytes()


def test_what_a_source_holds_out_is_refused_by_its_name_and_none_is_taken(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"q": q}) + "\n" for q in "abcd"))
    sections = [
        SourceSection(dataset="spell_backward", size=5, heldout=5, prompt="reverse {word}", content="word"),
        SourceSection(path=tmp_path / "own.jsonl", prompt="{q}?", heldout=2),
        SourceSection(posted=True),
    ]
    spelled, own = load_sources(sections, seed=3)
    posted = posted_tasks(sections, tmp_path, heldout=(spelled, own), seed=3)
    assert posted is not None
    for source in (spelled, own):
        held, trained = (str(task.data["question"]) for task in (source.heldout[0], source.training[0]))
        before = len(posted)
        with pytest.raises(RequestRejected, match=f"task 1: its content is held out by source '{source.name}'"):
            posted.post(rows(trained, held.upper()))
        assert len(posted) == before and posted.post(rows(trained)) == range(before, before + 1)


def test_more_than_may_wait_are_told_to_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posted_module, "MAX_WAITING", 3)
    posted = box(tmp_path)
    posted.post(rows("a", "b"))
    with pytest.raises(Overloaded, match="2 posted tasks are waiting, and 3 are the most; post these 2 when"):
        posted.post(rows("c", "d"))
    posted.draw()
    assert posted.post(rows("c", "d")) == range(2, 4)


def test_a_restart_goes_on_with_those_that_were_waiting_and_forgets_half_a_line(tmp_path: Path) -> None:
    box(tmp_path).post(rows("a", "b", "c"))
    with (tmp_path / "posted.jsonl").open("ab") as file:
        file.write(b'{"question": "cut')
    again = box(tmp_path)
    again.seek(1)
    assert (len(again), again.num_waiting, again.draw(), again.task(2).data["question"]) == (3, 2, 1, "c")
    assert again.post(rows("d")) == range(3, 4) and again.task(3).data["question"] == "d"


def test_they_come_before_the_tasks_of_other_sources(tmp_path: Path) -> None:
    posted = box(tmp_path)
    stream = TaskStream([Source("numbers", 1.0, tuple(Task(str(i), "numbers") for i in range(3)))], posted, seed=0)
    first = stream.draw()
    posted.post(rows("a"))
    assert (first, stream.draw(), stream.draw()) == (GroupKey(0, 0), GroupKey(POSTED_EPOCH, 0), GroupKey(0, 1))
    assert stream.task_of(GroupKey(POSTED_EPOCH, 0)).data["question"] == "a"
    assert stream.task_of(GroupKey(0, 1)).source == "numbers"


def test_a_run_without_a_posted_source_has_none(tmp_path: Path) -> None:
    assert posted_tasks([SourceSection(dataset="spell_backward")], tmp_path) is None and not list(tmp_path.iterdir())
