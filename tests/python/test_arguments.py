"""What a program asks for, as a configuration: no process is started."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midflight import Trainer, given
from midflight.entries import load_entry
from midflight.errors import ConfigError
from midflight.python.arguments import Objects, RowsFile


async def agent(task: Any, client: Any) -> float:
    return 1.0


def named(entry: str) -> object:
    return load_entry(entry, option="x", such_as="y")


def test_a_function_becomes_an_entry_that_its_children_find(tmp_path: Path) -> None:
    config = Trainer(environment=agent, steps=7, folder=tmp_path / "run").config
    assert (config.environment.entry, config.run.steps, config.run.folder) == ("midflight.given:agent", 7, tmp_path / "run")


def test_objects_of_one_name_get_names_of_their_own_and_one_object_has_one_name() -> None:
    objects = Objects()

    def other() -> None: ...

    other.__name__ = "agent"
    found = [objects.entry(value, role="reward") for value in (agent, other, agent, lambda: 0, functools.partial(agent, 1), "module:name")]
    assert [entry.rpartition(":")[2] for entry in found] == ["agent", "agent_2", "agent", "reward", "agent_3", "name"]
    given.read(io.BytesIO(objects.packed()))
    try:
        assert named(found[0]) is agent
        assert getattr(named(found[4]), "func", None) is agent
    finally:
        given.read(io.BytesIO(given.NOTHING))


def test_options_given_by_name_lie_over_those_of_the_configuration_and_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[run]\nsteps = 3\nseed = 5\nname = "mine"\n[rollout]\ngroup_size = 4\n')
    assert Trainer(config=file, steps=9).config.run.model_dump(include={"steps", "seed", "name"}) == {"steps": 9, "seed": 5, "name": "mine"}
    config = Trainer(config={"run": {"steps": 3, "seed": 5}, "rollout": {"group_size": 6}}, steps=9).config
    assert (config.run.steps, config.run.seed, config.rollout.group_size) == (9, 5, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"rollout": {"group_sise": 8}}}, r"unknown key 'rollout\.group_sise'.*group_size"),
        ({"config": {"rollouts": {"group_size": 8}}}, r"unknown key 'rollouts'.*rollout"),
        ({"config": {"run": {"steps": "many"}}}, r"run\.steps must be a whole number >= 1, got 'many'"),
        ({"config": {"run": 3}}, r"run must be a table of options, got 3"),
        ({"steps": 0}, r"run\.steps must be >= 1, got 0"),
        ({"environment": 3}, r"environment is int 3, expected a function"),
        ({"prompt": "{question}"}, r"prompt given without data"),
        ({"data": []}, r"data has no rows"),
        ({"data": 3}, r"data is int 3, expected rows"),
        ({"data": {"question": ["a"]}}, r"data is a dict with question: give a list of dicts"),
        ({"data": ["a question"]}, r"data, row 0 is str 'a question', expected a dict"),
        ({"data": [{"question": "a"}, {"question": object()}]}, r"data, row 1: column 'question' is object, which has no form in JSON"),
        ({"data": [{"question": "\ud800"}]}, r"data, row 0 has a text that UTF-8 cannot write .*surrogates not allowed"),
        ({"data": [{"question": "a"}], "heldout": []}, r"heldout has no rows"),
        ({"data": [{"question": "a"}], "heldout": {"question": ["a"]}}, r"heldout is a dict with question"),
        ({"data": [{"question": "a"}], "heldout": object()}, r"heldout is object .*expected rows"),
        ({"rewards": [3]}, r"reward is int 3, expected a function"),
        ({"rewards": [(agent, "1")]}, r"the weight of reward .*agent.* is '1', expected a number"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(**arguments)


def rows() -> Iterator[dict[str, object]]:
    yield {"question": "1 + 1", "answer": np.int64(2)}
    yield {"question": "ä", "tags": ("a", "b"), "vector": np.array([1.0, 2.0])}


class Numbered:
    """As a dataset of torch: rows by number, and no end of its own."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> dict[str, object]:
        return {"question": number}


def test_rows_are_written_as_json_whatever_gives_them() -> None:
    file = RowsFile(rows())
    assert [json.loads(line) for line in file.path.read_text().splitlines()] == [
        {"question": "1 + 1", "answer": 2},
        {"question": "ä", "tags": ["a", "b"], "vector": [1.0, 2.0]},
    ]
    path = file.path
    del file
    assert not path.exists()


def test_rows_to_hold_out_may_be_given_like_data_and_go_into_a_file_of_their_own(tmp_path: Path) -> None:
    apart = ({"question": question} for question in "bc")
    trainer = Trainer(data=[{"question": "a"}], heldout=apart, shuffle=False, folder=tmp_path / "run")
    source = trainer.config.environment.sources[0]
    assert (source.path, source.heldout, source.shuffle) == (tmp_path / "run/data.jsonl", tmp_path / "run/data-heldout.jsonl", False)
    tried = trainer._asked.tried.environment.sources[0]
    assert isinstance(tried.heldout, Path) and tried.heldout.read_text() == '{"question":"b"}\n{"question":"c"}\n'


def test_a_number_to_hold_out_stays_one(tmp_path: Path) -> None:
    for number in (2, 0.5):
        assert (
            Trainer(data=[{"question": q} for q in "abcd"], heldout=number, folder=tmp_path / "run").config.environment.sources[0].heldout
            == number
        )
