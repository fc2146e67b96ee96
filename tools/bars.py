"""The bars of the tree: measures them, prints a table, and exits with 1 where one is exceeded.

    python tools/bars.py              what the sources say: about two seconds
    python tools/bars.py --journey    also a streamed chat through all processes (`journey.py`):
                                      about fifteen seconds more
    python tools/bars.py --root DIR   of another checkout
    python tools/bars.py --list       also what counts in each row; without this only where a bar
                                      is exceeded

| row | what is counted, under `src/midflight` unless said |
|---|---|
| names with two meanings | class names that more than one module defines; leading underscores do not count |
| import circles | sets of modules that import each other in a ring; imports for types only and those inside functions count as well |
| look-up codes | in docstrings and comments: `DECISIONS 13`, `P9` and the like. The invariants I1 to I10 may stay |
| chat: ... | see `journey.py` |

No length is a bar: limits of length were kept once, and were met by squeezing. Which way imports
may point is in pyproject.toml and checked by import-linter.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import grimp

MAX_CALLS = 120
"""The most calls that a streamed token may take."""
JOURNEYS = 3
"""So often a chat that takes more is looked at: on a busy machine it meets more of what its processes
do meanwhile.
"""
CODE = re.compile(r"\bDECISIONS \d+|(?<![-\w])(?!F8|F16|F32|F64|U8)[PGSEWFTOUMA]\d{1,2}\b")
"""Not the names of tensors' types in safetensors, and no part of a longer name."""


@dataclass(frozen=True)
class Row:
    """`at_most` is the bar; without one the row is for information. `found` names what counts,
    where there are names.
    """

    name: str
    value: float
    at_most: float | None = None
    found: tuple[str, ...] = ()
    unit: str = ""

    @property
    def exceeded(self) -> bool:
        return self.at_most is not None and self.value > self.at_most


class Module:
    """One source file. Line numbers begin with 1."""

    def __init__(self, path: Path, *, sources: Path) -> None:
        inside = path.relative_to(sources)
        self.path = path
        self.is_package = path.name == "__init__.py"
        self.name = ".".join((inside.parent if self.is_package else inside.with_suffix("")).parts)
        self.text = path.read_text()
        self.lines = self.text.splitlines()
        self.nodes = list(ast.walk(ast.parse(self.text)))

    @cached_property
    def comments(self) -> list[tokenize.TokenInfo]:
        return [
            t
            for t in tokenize.generate_tokens(io.StringIO(self.text).readline)
            if t.type == tokenize.COMMENT
        ]

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """Those of attributes too: every statement that is only a string."""
        values = [node.value for node in self.nodes if isinstance(node, ast.Expr)]
        return [
            value
            for value in values
            if isinstance(value, ast.Constant) and isinstance(value.value, str)
        ]

    @cached_property
    def code_lines(self) -> set[int]:
        documented = {line for found in self.docstrings for line in _span(found)}
        written = {
            number
            for number, line in enumerate(self.lines, 1)
            if line.strip() and not line.lstrip().startswith("#")
        }
        return written - documented

    @property
    def classes(self) -> set[str]:
        return {node.name for node in self.nodes if isinstance(node, ast.ClassDef)}

    def codes(self) -> Iterator[str]:
        """What a reader would have to look up, each with its place."""
        texts = [(comment.start[0], comment.string) for comment in self.comments]
        texts += [(found.lineno, str(found.value)) for found in self.docstrings]
        for first, text in texts:
            for match in CODE.finditer(text):
                yield f"{self.name}:{first + text[: match.start()].count(chr(10))} {match[0]}"


def _span(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


# --- Rows -----------------------------------------------------------------------------------------


def rows(root: Path, *, journey: bool) -> list[Row]:
    modules = [
        Module(path, sources=root / "src")
        for path in sorted((root / "src" / "midflight").rglob("*.py"))
    ]
    found = [*_size_rows(modules), _names_row(modules), _circles_row(root), _codes_row(modules)]
    return found + _journey_rows(root) if journey else found


def _size_rows(modules: list[Module]) -> list[Row]:
    return [
        Row("files", len(modules)),
        Row("lines", sum(len(module.lines) for module in modules)),
        Row("code lines", sum(len(module.code_lines) for module in modules)),
    ]


def _names_row(modules: list[Module]) -> Row:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules:
        for name in sorted({name.lstrip("_") for name in module.classes}):
            homes[name].append(module.name.removeprefix("midflight."))
    twice = tuple(
        f"{name}: {', '.join(places)}" for name, places in sorted(homes.items()) if len(places) > 1
    )
    return Row("names with two meanings", len(twice), 3, twice)


def _circles_row(root: Path) -> Row:
    sys.path.insert(0, str(root / "src"))
    graph = grimp.build_graph("midflight", cache_dir=None)
    circles: set[str] = set()
    for module in graph.modules:
        circle = graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
        if circle:
            circles.add(" <-> ".join(sorted({module, *circle})))
    return Row("import circles", len(circles), 0, tuple(sorted(circles)))


def _codes_row(modules: list[Module]) -> Row:
    codes = tuple(code for module in modules for code in module.codes())
    return Row("look-up codes", len(codes), 0, codes)


def _journey_rows(root: Path) -> list[Row]:
    from journey import measure

    found = measure(root)
    for _ in range(JOURNEYS - 1):
        if found.calls_per_token > MAX_CALLS:
            found = measure(root)
    return [
        Row(
            "chat: modules",
            len(found.modules),
            None,
            tuple(f"{name} {number}" for name, number in found.modules.most_common()),
        ),
        Row("chat: functions", len(found.calls)),
        Row("chat: calls a token", found.calls_per_token, MAX_CALLS),
    ]


# --- The table ------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--journey", action="store_true", help="run the streamed chat too")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--list", action="store_true", help="name what counts in each row")
    options = parser.parse_args()
    found = rows(options.root.resolve(), journey=options.journey)
    for row in found:
        bar = "" if row.at_most is None else f"at most {row.at_most:g}"
        print(
            f"{row.name:27}{row.value:9.{1 if row.unit else 0}f}{row.unit:3}{bar:14}{'EXCEEDED' if row.exceeded else ''}".rstrip()
        )
        if row.exceeded or (options.list and row.at_most is not None):
            print("".join(f"    {line}\n" for line in row.found), end="")
    return 1 if any(row.exceeded for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
