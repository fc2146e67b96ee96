"""`midflight init`: a project to start one's own from. That it trains is in tests/benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.checks import found_in

from midflight.cli.commands import main
from midflight.cli.project import word_problems
from midflight.config import load_config

ROOT = Path(__file__).parents[2]


def test_a_project_can_be_run_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "mine")]) == 0
    assert f"cd {tmp_path}/mine && midflight train run.toml" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "mine"), *sys.path])
    found = found_in(load_config("run.toml"))
    assert not found.problems and (found.sources[0].num_training, found.sources[0].num_heldout) == (160, 40)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").write_text("")
    assert main(["init", str(tmp_path)]) == 2
    assert f"making a project in '{tmp_path}': it exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_two_hundred_rows_are_those_of_the_configuration_that_ships() -> None:
    rows = [json.loads(line) for line in (ROOT / "configs" / "own-data.jsonl").read_text().splitlines()]
    assert rows == word_problems() and len({row["question"] for row in rows}) == 200
    assert load_config(ROOT / "configs" / "own-data.toml").environment.sources[0].path == Path("configs/own-data.jsonl")
