"""What the pages say is there: links, paths, commands, options, code and the tests of the invariants."""

from __future__ import annotations

import ast
import builtins
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.main import get_command

import midflight
from midflight.cli.commands import app
from midflight.config import load_config
from midflight.config.options import options
from midflight.environments.agent_program import environment_name, load_environment
from midflight.gateway.http.http import DIALECTS
from midflight.gateway.http.openapi import DESCRIBED
from midflight.observe.summary import Summary
from midflight.testing.virtual_time import run_virtual
from midflight.types import Task

from .blocks import PAGES, ROOT, Block, blocks_of, without_blocks

SRC = ROOT / "src" / "midflight"
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")

page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def prose(path: Path) -> str:
    return without_blocks(path.read_text())


def blocks(path: Path, *languages: str) -> list[Block]:
    return [block for block in blocks_of(path) if block.language in languages]


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(path: Path) -> Iterator[list[str]]:
    """Every command of the shell blocks, those that are tried and not shown too, and those in the text that begin with `midflight`."""
    lines = [line for block in blocks(path, "bash", "sh") for line in block.commands()]
    lines += [code for code in CODE.findall(prose(path)) if code.startswith("midflight ")]
    for line in lines:
        if words := shlex.split(line, comments=True):
            yield words


@page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for text, target in LINK.findall(prose(page)):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(found), f"{page.name}: {target} has no such heading"
        assert not text.endswith(".py") or found.as_posix().endswith(f"/{text}"), f"{page.name} calls {target} {text}"


@page
def test_every_path_named_in_the_text_exists(page: Path) -> None:
    for code in CODE.findall(prose(page)):
        if re.fullmatch(r"(src|tests|examples|configs|benchmarks|docs)/[\w./-]+", code) or re.fullmatch(r"\w+/[\w/]+\.py", code):
            assert (ROOT / code).exists() or (SRC / code).exists(), f"{page.name} names {code}"


@page
def test_every_class_named_in_the_text_exists(page: Path) -> None:
    for code in set(CODE.findall(prose(page))) - {"TaskGroup", *dir(builtins), *midflight.__all__}:
        if (match := re.fullmatch(r"([A-Z][a-z]+[A-Za-z]*)(?:\.(\w+))?", code)) and "_" not in match[1]:
            assert re.search(rf"^(class {match[1]}\b|{match[1]} = |{match[1]}: )", source(), re.MULTILINE), f"{page.name} names {code}"
            assert match[2] is None or re.search(rf"\b{match[2]}\b", source()), f"{page.name} names {code}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in ("CHANGELOG", "from-trl", "from-verl")], ids=lambda path: path.name
)
def test_every_option_named_in_the_text_exists(page: Path) -> None:
    """But for those that were, and those of others."""
    sections, known = {key.partition(".")[0] for key in options()}, {re.sub(r"\.\*.*", "", key) for key in options()}
    for code in set(CODE.findall(prose(page))):
        match = re.fullmatch(r"(?:--set )?((\w+)\.[a-z_]+)(?: ?= ?[\w\".:-]+)?", code)
        if match and match[2] in sections and not code.endswith((".py", ".toml", ".log", ".json")):
            assert match[1] in known, f"{page.name} names {code}"


@cache
def source() -> str:
    return "\n".join(path.read_text() for path in SRC.rglob("*.py"))


@page
def test_every_command_names_files_and_targets_that_exist(page: Path) -> None:
    for words in commands(page):
        for word in words:
            if re.match(r"(src|tests|examples|configs|benchmarks)/", word):
                assert (ROOT / word).exists(), f"{page.name}: {shlex.join(words)}"
        if words[0] == "make":
            for target in (word for word in words[1:] if "=" not in word):
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), shlex.join(words)


@page
def test_every_midflight_command_has_arguments_that_are_accepted(page: Path) -> None:
    known = cast(Any, get_command(app)).commands
    for words in commands(page):
        if Path(words[0]).name != "midflight" or len(words) == 1:
            continue
        options = {option for parameter in known[words[1]].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, f"{page.name}: {shlex.join(words)}"
        file = next((file for word in words if word.endswith(".toml") and (file := ROOT / word).exists()), None)
        load_config(file, [word for before, word in pairwise(words) if before == "--set"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_every_configuration_loads(path: Path) -> None:
    assert load_config(path).environment.sources


def test_the_first_two_commands_of_the_readme_are_the_demo_and_the_tests() -> None:
    first = blocks(ROOT / "README.md", "bash")[0].commands()
    assert [shlex.split(line, comments=True) for line in first] == [["make", "demo"], ["make", "test"]]


def test_the_data_of_the_readme_takes_ten_lines() -> None:
    (configuration,) = (block.text for block in blocks(ROOT / "README.md", "toml"))
    assert len(configuration.splitlines()) <= 10


def test_the_environment_for_agent_builders_is_ten_lines_that_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "for-agent-builders.md"
    block = next(block.text for block in blocks(page, "python") if "@environment" in block.text)
    assert len([line for line in block.splitlines() if line]) <= 10
    (tmp_path / "my_environment.py").write_text(block)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    environment = load_environment("my_environment:spell")
    assert environment_name(environment) == "spell"

    async def create(*, model: str, messages: list[dict[str, str]]) -> object:
        reply = messages[0]["content"].removeprefix("reverse ")[::-1]
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=f" {reply}\n"))])

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    tasks = [Task("1", "words", {"question": "reverse hello", "answer": answer}) for answer in ("olleh", "hello")]
    assert [run_virtual(lambda task=task: environment(task, client)) for task in tasks] == [1.0, 0.0]


def test_the_measured_numbers_are_keys_of_the_summary() -> None:
    table = (ROOT / "docs" / "demo.md").read_text().partition("measured: begin")[2].partition("measured: end")[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(keys) >= 10 and set(keys) <= {field.name for field in fields(Summary)}


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=lambda path: path.name)
def test_every_page_says_below_its_title_how_long_it_takes(page: Path) -> None:
    title, blank, said, *_ = page.read_text().splitlines()
    assert title.startswith("# ") and not blank
    assert re.fullmatch(r"\*(?:To read: (?:\d+ minutes?\.)(?: To do: .+\.)?|A page to look things up in\.)\*", said), said


# --- ARCHITECTURE.md -------------------------------------------------------------------------------------------------


def section(heading: str) -> str:
    return re.split(r"^## ", (ROOT / "ARCHITECTURE.md").read_text().partition(f"\n## {heading}\n")[2], flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]


def linked(cell: str) -> list[Path]:
    return [ROOT / target for _, target in LINK.findall(cell)]


def test_every_long_lived_loop_says_what_ends_it() -> None:
    loops = {
        f"{path.relative_to(SRC)}: {loop[1] or ''}"
        for path in SRC.rglob("*.py")
        if "testing" not in path.parts
        for loop in re.finditer(r'^ +async def run\(self\)[^\n]*:\n(?: +"""(.*?)""")?', path.read_text(), re.M | re.S)
    }
    assert len(loops) > 8 and not [loop for loop in loops if not re.search(r"\b([Ee]nd(s|ed)|[Uu]ntil)\b", loop)]


def test_every_folder_says_in_a_sentence_what_is_in_it() -> None:
    for folder in {path.parent for path in SRC.rglob("*.py")} - {SRC / "engines" / "servers" / "inside"}:
        first = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").partition("\n\n")[0]
        assert re.fullmatch(r".{20,}\.", first, re.DOTALL), f"{folder.relative_to(ROOT)}/__init__.py does not say what is in it"


def test_every_invariant_is_numbered_where_the_table_says_it_holds_and_is_tested() -> None:
    table = [cells for cells in rows(section("Invariants")) if re.fullmatch(r"I\d+", cells[0])]
    assert [cells[0] for cells in table] == [f"I{n}" for n in range(1, 11)]
    tests = [path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))]
    for number, _, holds in table:
        spelled = re.compile(rf"(?<![A-Za-z0-9]){number}(?![0-9])|(?<![A-Za-z0-9]){number.lower()}_", re.ASCII)
        for path in linked(holds):
            text = "".join(p.read_text() for p in ([path] if path.is_file() else sorted(path.glob("*.py"))))
            assert spelled.search(text), f"{path.relative_to(ROOT)} does not name {number}"
        assert linked(holds) and sum(spelled.search(text) is not None for text in tests) >= 4, number


# --- The gateway's pages ---------------------------------------------------------------------------------------------


def test_the_readme_leads_to_the_list_of_pages_and_that_to_every_page() -> None:
    table = (ROOT / "README.md").read_text().partition("## Where to read on")[2]
    assert "docs/pages.md" in {target for _, target in LINK.findall(table)}
    listed = {Path(target).name for _, target in LINK.findall((ROOT / "docs" / "pages.md").read_text())}
    assert {path.name for path in PAGES} - listed == {"pages.md"}


def test_every_page_has_a_place_on_the_site() -> None:
    places = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} <= places


def test_every_route_of_an_agent_is_in_the_table_of_routes() -> None:
    text = (ROOT / "docs" / "gateway.md").read_text()
    assert all(f"`POST {path}`" in text for path in DESCRIBED) and DESCRIBED.keys() >= {dialect.path for dialect in DIALECTS}


def test_the_page_of_the_fields_is_current_and_leaves_none_out() -> None:
    page = (ROOT / "docs" / "fields.md").read_text()
    assert page == runpy.run_path(str(ROOT / "tools" / "fields.py"))["page"](), "run: python tools/fields.py docs/fields.md"
    named = {word for code in CODE.findall(page) for word in re.findall(r"\w+", code)}
    for described in DESCRIBED.values():
        assert {field.alias or name for name, field in described.body.model_fields.items()} <= named


def test_the_page_of_the_formulas_is_current() -> None:
    page = (ROOT / "docs" / "formulas.md").read_text()
    assert page == runpy.run_path(str(ROOT / "tools" / "formulas.py"))["page"](), "run: python tools/formulas.py docs/formulas.md"


def test_every_metric_is_explained() -> None:
    names = set(re.findall(r'"(midflight_\w+)", "', source()))
    assert len(names) > 20 and names <= set(CODE.findall((ROOT / "docs" / "metrics.md").read_text()))
