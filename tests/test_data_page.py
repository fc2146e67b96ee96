"""docs/data.md: its files and modules are written, its configurations are tried as `--dry-run` tries them, its code is run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import httpx2
import pytest

from midflight.config import load_config
from midflight.run.launcher.preflight import Findings, Inspection

PAGE = (Path(__file__).parents[1] / "docs" / "data.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def named_before(place: int, ending: str) -> str:
    """The file that the text speaks of last before a block."""
    return re.findall(rf"`([\w-]+\.{ending})`", PAGE[:place])[-1]


def configurations() -> list[str]:
    return [text for language, text in BLOCK.findall(PAGE) if language == "toml"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for block in BLOCK.finditer(PAGE):
        if block[1] == "jsonl":
            (tmp_path / named_before(block.start(), "jsonl")).write_text(block[2])
        elif block[1] == "python" and "yield" in block[2]:
            (tmp_path / named_before(block.start(), "py")).write_text(block[2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def tried(folder: Path, text: str) -> Findings:
    (folder / "run.toml").write_text(text)
    return Inspection(load_config(folder / "run.toml")).findings()


@pytest.mark.parametrize("number", range(len(configurations())))
def test_every_configuration_of_the_page_can_be_run(files: Path, number: int) -> None:
    text = configurations()[number]
    found = tried(files, text)
    assert not found.problems
    assert [source.num_training > 0 for source in found.sources] == ([] if "posted" in text else [True])


def test_the_first_one_is_short_and_makes_the_prompts_that_it_says(files: Path) -> None:
    text = configurations()[0]
    found = tried(files, text)
    assert len(text.splitlines()) <= 10 and (found.sources[0].num_training, found.sources[0].num_heldout) == (3, 1)
    assert found.prompt is not None and re.search(r"How many\? \((easy|hard)\)<\|end\|>", found.prompt.text)


def test_a_broken_row_is_told_as_on_the_page(files: Path) -> None:
    with (files / "words.jsonl").open("a") as file:
        file.write('{"qestion": "a", "answer": 1}\n')
    text = configurations()[0].replace("{question} ({level})", "{question}").replace("heldout = 0.25", "")
    (problem,) = tried(files, text).problems
    assert f"midflight: {problem}" in PAGE


def test_all_other_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [text for language, text in BLOCK.findall(PAGE) if language == "python" and "yield" not in text]
    given: list[object] = []

    def post(url: str, **request: object) -> httpx2.Response:
        given.extend([url, request["json"]])
        return httpx2.Response(200, json={"first": 0, "taken": 1, "waiting": 1}, request=httpx2.Request("POST", url))

    monkeypatch.setattr(httpx2, "post", post)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["post"]("http://here", "token", [{"question": "a"}]) == {"first": 0, "taken": 1, "waiting": 1}  # type: ignore[operator]
    assert given == ["http://here/midflight/v1/tasks", {"tasks": [{"question": "a"}]}]


def test_no_block_is_of_a_language_that_nothing_tries() -> None:
    assert {language for language, _ in BLOCK.findall(PAGE)} == {"jsonl", "toml", "python", "bash", "text"}
