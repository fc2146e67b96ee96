"""docs/data.md: its first configuration, a broken row in its data, and what it says of posting."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import httpx2
import pytest
from tests.checks import found_in

from midflight.config import load_config
from midflight.run.launcher.checks.check import Findings

from .blocks import ROOT, blocks_of

PAGE = ROOT / "docs" / "data.md"
BLOCKS = blocks_of(PAGE)
FIRST = next(block.text for block in BLOCKS if block.language == "toml")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for block in BLOCKS:
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def tried(folder: Path, text: str) -> Findings:
    (folder / "run.toml").write_text(text)
    return found_in(load_config(folder / "run.toml"))


def test_the_first_one_is_short_and_makes_the_prompts_that_it_says(files: Path) -> None:
    found = tried(files, FIRST)
    assert len(FIRST.splitlines()) <= 10 and (found.sources[0].num_training, found.sources[0].num_heldout) == (1, 1)
    assert found.prompt is not None and re.search(r"How many\? \((easy|hard)\)<\|end\|>", found.prompt.text)


def test_a_broken_row_is_told_by_its_line_with_the_nearest_column(files: Path) -> None:
    with (files / "words.jsonl").open("a") as file:
        file.write('{"qestion": "a", "answer": 1}\n')
    text = FIRST.replace("{question} ({level})", "{question}").replace("heldout = 1", "")
    (problem,) = tried(files, text).problems
    assert str(problem) == (
        "words.jsonl:3: there is no column 'question', which environment.sources.0.prompt names; there are qestion, answer. Did you mean 'qestion'?"
    )


def test_all_other_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [block.text for block in BLOCKS if block.language == "python" and block.file is None]
    given: list[object] = []

    def post(url: str, **request: object) -> httpx2.Response:
        given.extend([url, request["json"]])
        return httpx2.Response(200, json={"first": 0, "taken": 1, "waiting": 1}, request=httpx2.Request("POST", url))

    monkeypatch.setattr(httpx2, "post", post)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["post"]("http://here", "token", [{"question": "a"}]) == {"first": 0, "taken": 1, "waiting": 1}  # type: ignore[operator]
    assert given == ["http://here/midflight/v1/tasks", {"tasks": [{"question": "a"}]}]
