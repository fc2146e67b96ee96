"""Every block of every page, as far as that costs next to nothing; `make test-docs` runs the rest, `python -m tests.pages` lists it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.checks import found_in

from midflight.config import load_config
from midflight.environments.agent_program import AgentProgram

from . import blocks
from .blocks import DATA, PAGES, PROGRAMS, ROOT, SHOWN, Block, all_blocks, blocks_of, lacks

BLOCKS = all_blocks()
CONFIGURATIONS = [block for block in BLOCKS if block.language == "toml"]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, where modules are found; none of them stays."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path  # type: ignore[misc]
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


def write_files(page: Path, folder: Path) -> None:
    """Also what a page makes by a few lines of shell."""
    for block in blocks_of(page):
        if block.file is not None:
            (folder / block.file).write_text(block.text)
        elif block.language == "bash" and block.text.startswith("mkdir "):
            subprocess.run(["bash", "-e"], input=block.text, text=True, cwd=folder, check=True)


def test_every_fence_of_a_page_belongs_to_a_block() -> None:
    for page in PAGES:
        shown = [block for block in blocks_of(page) if not block.hidden]
        assert len(re.findall(r"^\s*```", page.read_text(), re.MULTILINE)) == 2 * len(shown), page.name


def test_every_block_is_of_a_language_that_is_tried_and_has_a_mark_that_is_known() -> None:
    for block in BLOCKS:
        assert block.language in PROGRAMS | DATA | SHOWN, block.place
        assert re.fullmatch(r"|beside|file [\w.-]+|not run: .{10,}", block.mark), f"{block.place}: {block.mark}"


def test_the_python_of_the_pages_compiles() -> None:
    for block in of("python"):
        compile(block.text, block.place, "exec")


def test_the_json_of_the_pages_is_json() -> None:
    for block in of("json", "jsonl"):
        for text in block.text.splitlines() if block.language == "jsonl" else [block.text]:
            json.loads(text)


def test_the_shell_of_the_pages_is_read_by_a_shell() -> None:
    texts = [f"f{number}() {{\n{block.text}\n}}" for number, block in enumerate(of("bash", "sh"))]
    assert subprocess.run(["bash", "-n"], input="\n".join(texts), text=True, capture_output=True).stderr == ""


def test_options_of_scripts_are_options_that_the_scripts_have() -> None:
    for block in of("bash", "sh"):
        for line in block.commands():
            if script := re.search(r"(?:benchmarks|examples|tools)/\w+\.py", line):
                known = "".join(path.read_text() for path in (ROOT / script[0]).parent.rglob("*.py"))
                for option in re.findall(r"(?<=\s)--[\w-]+", line.partition(script[0])[2]):
                    assert f'"{option}"' in known or option == "--json", f"{block.place}: {option}"


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=lambda block: block.place)
def test_every_configuration_of_the_pages_can_be_run(block: Block, folder: Path) -> None:
    """With sources as a dry run looks at it; else its agent, rewards and tools are loaded."""
    if lacks(block.page):
        pytest.skip(f"{lacks(block.page)} has an environment of its own")
    write_files(block.page, folder)
    path = folder / "page.toml"
    path.write_text(block.text)
    config = load_config(path)
    given = tomllib.loads(block.text).get("environment", {})
    if "sandbox" in given and shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap")
    if "sources" in given:
        assert found_in(config).problems == ()
    elif given:
        AgentProgram(config.environment)


@pytest.mark.parametrize(
    ("page", "package"), [("verifiers", "verifiers"), ("openenv", "openenv"), ("textarena", "textarena"), ("harbor", None)]
)
def test_what_a_page_needs_is_seen_by_what_it_runs(page: str, package: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "find_spec", lambda name: None)
    assert lacks(ROOT / "docs" / "adapters" / f"{page}.md") == package


def test_what_is_not_run_says_why_and_is_little() -> None:
    shown = [block for block in BLOCKS if not block.hidden and block.language not in SHOWN]
    not_run = [block for block in shown if block.tried == "looked at"]
    assert all(block.language in PROGRAMS for block in not_run)
    assert len(not_run) <= len(shown) / 3
