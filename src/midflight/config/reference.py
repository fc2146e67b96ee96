"""docs/configuration.md, made from the sections: `python -m midflight.config.reference
docs/configuration.md`.
"""

import ast
import inspect
import json
import operator
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from midflight.config.agents import McpSection, RewardSection
from midflight.config.devices import ServerSection
from midflight.config.evaluation import SuiteSection
from midflight.config.options import Option, options, tables
from midflight.config.section import Section
from midflight.config.sections import Config
from midflight.config.sources import SourceSection

INTRODUCTION = """# Configuration

*A page to look things up in.*

Made from `src/midflight/config` by `python -m midflight.config.reference docs/configuration.md`; edit the sentences there.

A run is one TOML file. `--set rollout.max_staleness=2` overrides an option, `--set environment.sources.0.size=100` one of a list. `"none"` unsets an
option whose default is none. [Choosing the knobs](knobs.md) says which numbers to choose. *Seconds* are from 0.001 to 1e+09. Other numbers are above
0, unless the values say otherwise, and at most 1e+30. A default such as `16` stands for whole numbers, one such as `1.0` for all.
"""
TEN = (
    "model.path",
    "model.max_context",
    "environment.sources.*.path",
    "environment.sources.*.heldout",
    "environment.rewards.*.entry",
    "environment.max_tokens",
    "rollout.groups_per_step",
    "rollout.max_staleness",
    "run.folder",
    "run.steps",
)
"""The options that everyone sets. They stand at the beginning of the page."""
GROUPS = {
    "The run and its model": ("run", "model", "lora"),
    "Tasks, agents and rewards": ("environment", "curriculum"),
    "How asynchronous": ("rollout", "weights", "evaluation"),
    "What is learned": (
        "trainer",
        "warm_start",
        "objective",
        "correction",
        "critic",
        "distillation",
    ),
    "Engines and gateway": ("engine", "gateway"),
    "Watching a run": ("observe",),
    "Several machines": ("cluster",),
}
"""The sections in the order in which a reader meets them, by the heading of the page."""
_PAGE = re.compile(r"docs/((?:[\w-]+/)*)([\w-]+)\.md(#[\w-]+)?")
"""A page in docs, perhaps with the anchor of a heading."""
_ABOVE_0 = re.compile(r"(integer) ≥ 1(?: and)?(?= |$)|(number) > 0(?: and)?(?= |$)")
"""The least of a number of which the introduction says that it is above 0."""
HEADER = ("| option | default (values) | meaning |", "|---|---|---|")


def reference() -> str:
    """The page, as Markdown."""
    described = descriptions()
    parts = [INTRODUCTION, _first_options(described)]
    for heading, sections in GROUPS.items():
        parts.append(f"## {heading}\n")
        for key in _section_keys(sections):
            parts.append(_section(key, described))
    return "\n".join(parts)


def _first_options(described: Mapping[tuple[str, str], str]) -> str:
    """The table of the options that everyone sets, by their whole keys. Each has the first sentence
    of its text; the rest stands once, in the table of its section.
    """
    lines = ["## The ten that everyone sets", "", "| option | default | meaning |", "|---|---|---|"]
    known = options()
    for key in TEN:
        table, _, name = key.rpartition(".")
        text = described[section_class(table).__name__, name]
        first = text.partition(". ")[0].removesuffix(".")
        meaning = _linked(f"{first}.")
        lines.append(_table_row(f"`{key.replace('.*', '')}`", _default(known[key]), meaning))
    return "\n".join([*lines, ""])


def descriptions() -> Mapping[tuple[str, str], str]:
    """The text under each option by class and attribute, and the text of each class by class and
    an empty name.
    """
    found: dict[tuple[str, str], str] = {}
    for section in {section_class(key) for key in _section_keys(Config.model_fields)}:
        (node,) = ast.parse(inspect.getsource(section)).body
        assert isinstance(node, ast.ClassDef)
        found[node.name, ""] = ast.get_docstring(node) or ""
        for name, text in attribute_texts(node):
            found[node.name, name] = text
    return found


def attribute_texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The attributes of a class that have a docstring, each with its text on one line."""
    for statement, following in pairwise(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(following, ast.Expr):
            continue
        text = following.value
        if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
            continue
        if isinstance(statement.target, ast.Name):
            yield statement.target.id, " ".join(text.value.split())


def _section_keys(sections: Iterable[str]) -> list[str]:
    """The sections, each followed by the tables and lists of tables in it that have options of
    their own.
    """
    owners = {option.key.rpartition(".")[0] for option in options().values()}
    inner = sorted(key for key in tables() if "." in key and key in owners)
    keys: list[str] = []
    for name in sections:
        keys.append(name)
        keys += [key for key in inner if key.startswith(f"{name}.")]
    return keys


def _section(key: str, described: Mapping[tuple[str, str], str]) -> str:
    owner = section_class(key).__name__
    title = f"[[{key.removesuffix('.*')}]]" if key.endswith(".*") else f"[{key}]"
    lines = [f"### `{title}`", ""]
    if described.get((owner, "")):
        lines += [_linked(described[owner, ""]), ""]
    lines += HEADER
    for option in options().values():
        table, _, name = option.key.rpartition(".")
        if table == key:
            lines.append(_row(option, described.get((owner, name), ""), name))
    return "\n".join([*lines, ""])


def section_class(key: str) -> type[Section]:
    """The class of a section; for `environment.sources.*` and the like, the class of the list's
    members.
    """
    of_lists = {
        "sources": SourceSection,
        "rewards": RewardSection,
        "mcp": McpSection,
        "servers": ServerSection,
        "suites": SuiteSection,
    }
    if key.endswith(".*"):
        return of_lists[key.split(".")[1]]
    return type(operator.attrgetter(key)(Config()))


def _row(option: Option, text: str, name: str) -> str:
    """The row of an option, called `name` there."""
    return _table_row(f"`{name}`", _default_and_values(option), _linked(text))


def _linked(text: str) -> str:
    """The text of an option, where the name of a page in docs is a link to it."""
    return _PAGE.sub(r"[\2](\1\2.md\3)", text)


def _default_and_values(option: Option) -> str:
    """The default, and the values beside it where the default does not show them."""
    default = _default(option)
    values = _values(option)
    if default.startswith("`"):
        kind = "number" if isinstance(option.default, float) else "integer"
        values = values.removeprefix(f"{kind} ")
        if values in ("text", "true or false", "a list of texts", "number", "integer"):
            return default
    return f"{default} ({values})" if default else values


def _table_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(option: Option) -> str:
    """The accepted values, in fewer words than an error has for them. What the introduction of the
    page says of all numbers is left out.
    """
    if option.is_list:
        return "tables"
    is_number = option.kind in ("a number", "a whole number")
    if is_number and not option.bounds and not option.choices:
        return "any number"
    text = option.expectation.replace("'", "`").replace(' (or "none")', "")
    text = text.replace("a whole number", "integer").replace("a number", "number")
    text = text.replace("a list of whole numbers", "integers")
    text = text.replace(" >= ", " ≥ ").replace(" <= ", " ≤ ").replace("one of ", "")
    text = text.replace("number ≥ 0.001 and ≤ 1e+09", "seconds").replace(" and ≤ 1e+30", "")
    return _ABOVE_0.sub(r"\1\2", text)


def _default(option: Option) -> str:
    if option.required:
        return "required"
    if option.default is None:
        return "" if not option.optional else "none"
    if option.is_list and option.default:
        return ""
    return f"`{json.dumps(option.default)}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
