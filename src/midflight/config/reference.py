"""docs/configuration.md, made from the sections: `python -m midflight.config.reference
docs/configuration.md`.
"""

import ast
import inspect
import json
import operator
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from midflight.config import agents, cluster, devices, loss, sections, sources
from midflight.config.load import Option, options, tables
from midflight.config.section import Section
from midflight.config.sections import Config

INTRODUCTION = """# Configuration

Made from `sections.py`, `sources.py`, `agents.py`, `loss.py` and `cluster.py` in `src/midflight/config` by `python -m midflight.config.reference docs/configuration.md`; edit the
sentences there.

A run is one TOML file. Every option can be overridden on the command line: `--set rollout.max_staleness=2`, or
`--set environment.sources.0.size=100` for one of a list. Unknown keys are refused. An option that may be unset is
unset by writing `"none"`. `midflight train CONFIG --dry-run` prints what follows from the numbers.
"""


def reference() -> str:
    """The page, as Markdown."""
    described = descriptions()
    parts = [INTRODUCTION, *(_section(key, described) for key in _section_keys())]
    return "\n".join(parts)


def descriptions() -> Mapping[tuple[str, str], str]:
    """The sentence under each option, by class and attribute, and the one of each class by class
    and ``.
    """
    found: dict[tuple[str, str], str] = {}
    for node in (
        node
        for module in (sections, sources, agents, loss, cluster, devices)
        for node in ast.parse(inspect.getsource(module)).body
    ):
        if isinstance(node, ast.ClassDef):
            found[node.name, ""] = ast.get_docstring(node) or ""
            found.update({(node.name, name): text for name, text in _attributes(node)})
    return found


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
        ):
            text = following.value
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield statement.target.id, " ".join(text.value.split())


def _section_keys() -> list[str]:
    """Sections in the order of `Config`, each followed by the tables and lists of tables in it that
    have options of their own.
    """
    owners = {option.key.rpartition(".")[0] for option in options().values()}
    inner = sorted(key for key in tables() if "." in key and key in owners)
    return [
        key
        for name in Config.model_fields
        for key in (name, *(k for k in inner if k.startswith(f"{name}.")))
    ]


def _section(key: str, described: Mapping[tuple[str, str], str]) -> str:
    owner = section_class(key).__name__
    title = f"[[{key.removesuffix('.*')}]]" if key.endswith(".*") else f"[{key}]"
    lines = [f"## `{title}`", ""]
    if described.get((owner, "")):
        lines += [described[owner, ""], ""]
    lines += ["| option | value | default | meaning |", "|---|---|---|---|"]
    members = [option for option in options().values() if option.key.rpartition(".")[0] == key]
    lines += [
        _row(option, described.get((owner, option.key.rpartition(".")[2]), ""))
        for option in members
    ]
    return "\n".join([*lines, ""])


def section_class(key: str) -> type[Section]:
    """The class of a section; that of a list's members for `environment.sources.*` and its like."""
    of_lists = {
        "sources": sources.SourceSection,
        "rewards": agents.RewardSection,
        "mcp": agents.McpSection,
        "servers": devices.ServerSection,
        "suites": sections.SuiteSection,
    }
    if key.endswith(".*"):
        return of_lists[key.split(".")[1]]
    return type(operator.attrgetter(key)(Config()))


def _row(option: Option, text: str) -> str:
    cells = (
        f"`{option.key.rpartition('.')[2]}`",
        option.expectation.replace("'", "`"),
        _default(option),
        text,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(option: Option) -> str:
    if option.required:
        return "required"
    if option.default is None:
        return "" if not option.optional else "none"
    return "see above" if option.is_list else f"`{json.dumps(option.default)}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
