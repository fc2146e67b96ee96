"""What was said to held-out tasks, read beside what the run learns from and never mixed with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.archive.stores import SAYS, Recorded

from midflight.archive.conversation import TokenUse, conversation_of
from midflight.archive.groups import GroupFilter, page_of, versions_of
from midflight.archive.search import WordIndex
from midflight.archive.store_reader import rollout_key
from midflight.cli import main
from midflight.environments.evaluation import evaluation_key
from midflight.errors import NoRun
from midflight.trajectories.heldout import HELDOUT, HeldoutStore
from midflight.types import Kind, Task, Trajectory
from midflight.types.facts import EvaluationKept

HELD_OUT = GroupFilter(kind=Kind.EVALUATION)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group that was trained, and two evaluations of two tasks: by version 0 both fail, by version 7, after step 5, the first passes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = tmp_path / "run"
    run.mkdir()
    with Recorded(run) as store:
        store.train(store.group(0, (1.0, 0.0)), version=1)
        kept = HeldoutStore(run / HELDOUT, run="tests")
        for version in (0, 7):
            for position, said in enumerate(("apple", "pear")):
                task = Task(f"held-{position}", "sums", {"question": f"held out {position}"})
                row = store.row((SAYS.format(asked=task.text("question")), False), (f"{said} {version}<|end|>", True), version=version)
                reward = float(version == 7 and position == 0)
                kept.apply(EvaluationKept(version, task, Trajectory(evaluation_key(position), task.id, task.source, reward, (row,))))
        kept.close()
    lines = [{"kind": "evaluation", "version": v, "step": s, "seconds": 1.0, "source": "sums", "num_tasks": 2, "mean_reward": 0.5} for v, s in ((0, 0), (7, 5))]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_held_out_tasks_are_a_kind_of_their_own_by_version_and_by_words(folder: Path) -> None:
    page = page_of(folder, HELD_OUT)
    assert [(group.key.epoch, group.key.index, group.mean) for group in page.groups] == [(7, 1, 0.0), (7, 0, 1.0), (0, 1, 0.0), (0, 0, 0.0)]
    first = page.groups[1]
    assert first.fate == "held out, answered by version 7" and first.rollouts[0].key.kind is Kind.EVALUATION
    assert [(score.epoch, score.passed, score.scored) for score in first.epochs] == [(0, 0, 1), (7, 1, 1)], "how the task went, by version"
    after = versions_of(folder, 5, 5, Kind.EVALUATION)
    assert [group.key.epoch for group in page_of(folder, replace(HELD_OUT, versions=after)).groups] == [7, 7]
    words = WordIndex(folder, Kind.EVALUATION)
    while not words.grow(1.0).complete:
        pass
    assert [group.key.index for group in page_of(folder, replace(HELD_OUT, words="pear"), words=words).groups] == [1, 1]
    assert [group.task.id for group in page_of(folder, GroupFilter()).groups] == ["task-0"], "training is as it was"
    with pytest.raises(NoRun, match="made no evaluation after a step from 3"):
        versions_of(folder, 3, 3, Kind.EVALUATION)


def test_a_conversation_of_an_evaluation_is_named_read_and_never_called_trained(folder: Path) -> None:
    key = rollout_key("evaluation-7-0-0-0")
    seen = conversation_of(folder, key)
    assert seen.key == key and [message["content"] for message in seen.chat()] == ["held out 0", "apple 7"]
    branch = seen.branches[0]
    assert set(branch.uses) == {TokenUse.READ, TokenUse.HELD_OUT} and set(branch.ages.tolist()) == {-1, 0}


def test_samples_and_export_show_held_out_tasks_only_where_they_are_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(folder), "--evaluation", "--best", "-n", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("evaluation-7-0-0-0: sums, task held-0, reward 1.000; held out, answered by version 7") and "apple 7" in said
    assert main(["samples", str(folder), "--rollout", "evaluation-0-1-0-0"]) == 0 and "pear 0" in capsys.readouterr().out
    for words, tasks in (((), ["task-0", "task-0"]), (("--evaluation", "--steps", "5"), ["held-0", "held-1"])):
        out = tmp_path / f"{len(words)}.jsonl"
        assert main(["export", str(folder), "--out", str(out), *words]) == 0
        assert [json.loads(line)["task"] for line in out.read_text().splitlines()] == tasks


def test_a_run_that_kept_none_says_why(tmp_path: Path) -> None:
    with Recorded(tmp_path) as store:
        store.group(0, (1.0,))
    with pytest.raises(NoRun, match=r"no conversations of evaluations: there was none yet"):
        page_of(tmp_path, HELD_OUT)
