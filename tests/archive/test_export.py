"""Rollouts as data sets, and the commands that print them."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from midflight.cli import main

from .stores import SAYS, Recorded

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end|>'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two groups; the first was trained in step 1, and called a tool in its first rollout."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with Recorded(tmp_path / "run") as store:
        asked = (SAYS.format(asked="question 0"), False)
        calls = store.row(asked, (CALL, True), ("<|tool|>2<|end|><|assistant|>", False), ("two<|end|>", True))
        store.train(store.group(0, (1.0, 0.0, 0.5), rows={0: (calls,)}), version=1)
        store.group(1, (0.25, 0.25, None), source="sums")
    line = {"kind": "step", "step": 1, "version": 1, "seconds": 1.0, "step_seconds": 1.0, "tokens": 1, "rollouts": 3,
            "generation_rate": 0.0, "training_rate": 0.0, "totals": {}}  # fmt: skip
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path / "run"


def exported(folder: Path, *options: str) -> datasets.Dataset:
    out = folder.parent / "out.jsonl"
    assert main(["export", str(folder), "--out", str(out), "--overwrite", *options]) == 0
    return datasets.load_dataset("json", data_files=str(out), split="train")


def test_conversations_are_loaded_as_chat_messages(folder: Path) -> None:
    rows = exported(folder)
    assert rows["reward"] == [1.0, 0.0, 0.5, 0.25, 0.25]
    user, call, answer, last = rows[0]["messages"]
    assert (user["role"], user["content"]) == ("user", "question 0")
    assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (answer["role"], answer["content"], answer["tool_call_id"]) == ("tool", "2", "call_0")
    assert (last["role"], last["content"]) == ("assistant", "two")


def test_what_is_chosen_is_exported_and_nothing_else(folder: Path) -> None:
    assert exported(folder, "--min-reward", "0.5")["reward"] == [1.0, 0.5]
    assert exported(folder, "--source", "sums")["reward"] == [0.25, 0.25]
    assert exported(folder, "--steps", "1")["rollout"] == ["0-0-0-0", "0-0-0-1", "0-0-0-2"]


def test_pairs_are_the_best_and_the_worst_answer_to_the_same(folder: Path) -> None:
    (pair,) = exported(folder, "--format", "dpo")
    assert [message["content"] for message in pair["prompt"]] == ["question 0"]
    assert pair["chosen"][-1]["content"] == "two"
    assert pair["rejected"][-1]["content"] == "answer 1"
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (1.0, 0.0)


def test_all_that_is_known_of_each_token_can_be_exported(folder: Path) -> None:
    (row,) = exported(folder, "--format", "jsonl", "--min-reward", "1")[0]["rows"]
    assert len(row["token_ids"]) == len(row["logprobs"]) == len(row["versions"]) == len(row["loss_mask"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--min-reward", "2"], "none of its rollouts is chosen"),
        (["--steps", "9"], "has made no step from 9 to 9"),
        (["--steps", "x"], "write one step"),
    ],
)
def test_nothing_is_written_where_nothing_is_chosen(
    folder: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.parent / "new.jsonl"
    assert main(["export", str(folder), "--out", str(out), *options]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in folder.parent.iterdir() if "new" in path.name] == []


def test_a_file_that_is_there_is_not_replaced_unasked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "mine").write_text("mine")
    assert main(["export", str(folder), "--out", str(folder.parent / "mine")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert (folder.parent / "mine").read_text() == "mine"


def test_without_a_name_the_file_has_that_of_run_and_format(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert main(["export", ".", "--format", "dpo"]) == 0
    assert (folder / "run-dpo.jsonl").is_file()


def test_samples_are_printed_best_worst_failed_and_by_source(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, keys in (
        (["--best", "-n", "1"], ["0-0-0-0"]),
        (["--worst", "-n", "1"], ["0-0-0-1"]),
        (["--failed"], ["0-1-0-2"]),
        (["--source", "sums"], ["0-1-0-0", "0-1-0-1", "0-1-0-2"]),
        (["--steps", "1-3", "-n", "2"], ["0-0-0-0", "0-0-0-1"]),
        (["--rollout", "0-0-0-2"], ["0-0-0-2"]),
    ):
        assert main(["samples", str(folder), *options]) == 0
        assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "] == keys


@pytest.mark.parametrize("command", ["samples", "ledger"])
def test_a_folder_that_is_no_run_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert "has no rollouts" in capsys.readouterr().err


def test_the_ledger_says_that_it_balances(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(folder)]) == 0
    assert "it balances: each of" in capsys.readouterr().out
