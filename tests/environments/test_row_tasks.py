"""Tasks of rows of one's own: what is asked and expected, what is held out, and what is wrong with a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from midflight.config.sources import SourceSection
from midflight.environments.seeded_stream import SeededStream
from midflight.environments.sources import Source, load_sources
from midflight.errors import ConfigError
from midflight.types import Task

SUMS = [{"question": f"{i} + {i} =", "answer": 2 * i, "key": f"k{i}"} for i in range(40)]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, seed: int = 0, **options: Any) -> Source:
    (source,) = load_sources([SourceSection(path=path, **options)], seed=seed)
    return source


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return written(tmp_path / "sums.jsonl", SUMS)


def questions(tasks: Any) -> set[str]:
    return {task.data["question"] for task in tasks}


def test_a_row_becomes_a_task_with_all_its_columns(sums: Path) -> None:
    source = load(sums)
    assert (source.name, len(source.training), len(source.heldout)) == ("sums", 40, 0)
    assert source.training[3] == Task("3", "sums", SUMS[3]) and list(source.training)[3] == source.training[3]
    assert source.training[3].messages == [{"role": "user", "content": "3 + 3 ="}]


def test_prompt_answer_id_and_system_are_taken_from_the_columns_named(sums: Path) -> None:
    task = load(sums, prompt="{key}: {answer:03d} is {question}", answer="answer", id="key", system="Be brief.").training[7]
    assert (task.id, task.data["question"], task.data["answer"]) == ("k7", "k7: 014 is 7 + 7 =", "14")
    assert task.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "k7: 014 is 7 + 7 ="}]


def test_a_prompt_may_be_a_column_with_a_text_or_a_conversation(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = written(tmp_path / "chats.jsonl", [{"messages": chat, "prompt": "p"}])
    assert load(path, prompt="messages").training[0].prompt == chat
    assert load(path, prompt="prompt").training[0].messages == [{"role": "user", "content": "p"}]


def message_of(tmp_path: Path, row: dict[str, Any], **options: Any) -> str:
    source = load(written(tmp_path / "t.jsonl", [SUMS[0], row]), **options)
    with pytest.raises(ConfigError) as caught:
        source.training[1]
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"qestion": "a"}, {}, "there is no column 'question', which environment.sources.0.prompt names; there are qestion. Did you mean 'qestion'?"),
        ({"question": None}, {}, "column 'question' holds null, which environment.sources.0.prompt '{question}' cannot print"),
        ({"question": ["a"]}, {}, "column 'question' holds [\"a\"]"),
        ({"question": "a"}, {"prompt": "{question:d}"}, "cannot be filled in: Unknown format code 'd'"),
        ({"question": "a", "answer": None}, {"answer": "answer"}, "column 'answer' holds null, and environment.sources.0.answer takes a text or a number"),
        ({"question": "a", "answer": True}, {"answer": "answer"}, "column 'answer' holds true"),
        ({"question": "a"}, {"answer": "anwser"}, "there is no column 'anwser', which environment.sources.0.answer names"),
        ({"question": "a", "key": 1.5}, {"id": "key"}, "column 'key' holds 1.5, and environment.sources.0.id takes"),
        ({"m": 3}, {"prompt": "m"}, "column 'm' holds 3; expected a text, or a list of messages"),
        ({"m": [{"content": "a"}]}, {"prompt": "m"}, "column 'm': message 0 is {\"content\": \"a\"}; give it a role"),
        ({"m": [{"role": "assistant", "content": "a"}]}, {"prompt": "m"}, "ends with an assistant's message"),
        ({"m": [{"role": "system", "content": "a"}]}, {"prompt": "m", "system": "b"}, "has a system message of its own"),
    ],
)  # fmt: skip
def test_a_row_that_makes_no_task_is_named_by_file_line_column_and_option(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    said = message_of(tmp_path, row, **options)
    assert said.startswith(f"{tmp_path}/t.jsonl:2: ") and message in said


@pytest.mark.parametrize("prompt", ["{question", "{}", "}"])
def test_a_prompt_that_is_no_format_is_refused(sums: Path, prompt: str) -> None:
    with pytest.raises(ConfigError, match=r"environment.sources.0.prompt"):
        load(sums, prompt=prompt)


# --- The split --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heldout", "number"), [(8, 8), (0.25, 10), (0, 0)])
def test_a_number_or_a_share_of_the_contents_is_held_out(sums: Path, heldout: float, number: int) -> None:
    source = load(sums, heldout=heldout)
    assert (len(source.training), len(source.heldout)) == (40 - number, number)
    assert not questions(source.training) & questions(source.heldout)
    assert questions(source.training) | questions(source.heldout) == {row["question"] for row in SUMS}


def test_what_is_held_out_follows_the_seed_and_not_the_order_of_the_rows(sums: Path, tmp_path: Path) -> None:
    turned = written(tmp_path / "turned.jsonl", SUMS[::-1])
    assert questions(load(sums, heldout=8).heldout) == questions(load(turned, heldout=8).heldout)
    assert questions(load(sums, heldout=8).heldout) != questions(load(sums, heldout=8, seed=1).heldout)
    assert questions(load(sums, heldout=4).heldout) < questions(load(sums, heldout=8).heldout)


def test_a_content_that_occurs_again_is_held_out_once_and_never_trained_on(tmp_path: Path) -> None:
    rows = [*SUMS, *({**row, "question": row["question"].upper()} for row in SUMS)]
    source = load(written(tmp_path / "twice.jsonl", rows), heldout=10)
    assert (len(source.training), len(source.heldout), source.num_left_out) == (60, 10, 10)
    assert not questions(source.training) & questions(source.heldout)


def test_rows_of_a_second_file_are_held_out_and_left_out_of_training(sums: Path, tmp_path: Path) -> None:
    apart = written(tmp_path / "held.jsonl", [*SUMS[5:8], {"question": "9 + 1 =", "answer": 10, "key": "x"}])
    source = load(sums, heldout=apart)
    assert (len(source.training), len(source.heldout), source.num_left_out) == (37, 4, 3)
    assert [task.id for task in source.heldout] == [f"heldout-{i}" for i in range(4)]


def test_no_source_trains_on_what_another_holds_out(sums: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other.jsonl", SUMS)
    first, second = load_sources([SourceSection(path=sums, heldout=10), SourceSection(path=other)], seed=0)
    assert len(second.training) == 30 and not questions(first.heldout) & questions(second.training)


def test_a_content_may_be_a_column_and_must_match_the_pattern(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "kind": "ab"[i % 2] * (i % 5 + 1)} for i in range(50)]
    source = load(written(tmp_path / "kinds.jsonl", rows), content="kind", heldout=2, only="a+", size=12)
    assert all(set(str(task.data["kind"])) == {"a"} for task in (*source.training, *source.heldout))
    assert (len(source.training), len(source.heldout)) == (12, 2), (
        "five contents in 25 rows: two are held out, 15 rows are left, 12 are taken"
    )
    with pytest.raises(ConfigError, match="5 rows of distinct content that match only: none would be left"):
        load(tmp_path / "kinds.jsonl", content="kind", heldout=5, only="a+")


def test_holding_out_everything_is_refused(sums: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="40 rows of distinct content: none would be left"):
        load(sums, heldout=40)
    with pytest.raises(ConfigError, match=r"every row of .* is held out"):
        load(sums, heldout=written(tmp_path / "same.jsonl", SUMS))
    with pytest.raises(ConfigError, match="has no rows"):
        load(written(tmp_path / "none.jsonl", []))


# --- The stream -------------------------------------------------------------------------------------------------------

ORDER = ("aaabbababaaaaabaabbb", "41012243342013043431")
"""Drawn before tasks could be too many for a list."""


def test_without_shuffle_tasks_come_in_the_order_of_the_rows(sums: Path) -> None:
    stream = SeededStream([load(sums, shuffle=False)], seed=0)
    assert [stream.next()[1].id for _ in range(80)] == [str(i) for i in range(40)] * 2


def test_the_order_of_a_seed_is_what_it_always_was() -> None:
    sources = [Source(name, weight, tuple(Task(str(i), name) for i in range(5))) for name, weight in (("a", 3.0), ("b", 2.0))]
    stream = SeededStream(sources, seed=7)
    drawn = [(task.source, task.id) for _, task in (stream.next() for _ in range(20))]
    assert "".join(source for source, _ in drawn) == ORDER[0] and "".join(task_id for _, task_id in drawn) == ORDER[1]
