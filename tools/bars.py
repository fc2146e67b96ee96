"""The bars of the tree: measures them, prints a table, and exits with 1 where one is exceeded.

    python tools/bars.py                 what the sources say: about two seconds
    python tools/bars.py --journey       also a streamed chat through all processes (`journey.py`): about fifteen seconds more
    python tools/bars.py --root DIR      of another checkout
    python tools/bars.py --list          also what counts in each row; without this only where a bar is exceeded

| row | what is counted, under `src/midflight` unless said |
|---|---|
| import lines | physical lines of import statements, at any depth, as a share of code lines; these are neither blank, comment nor docstring |
| names with two meanings | class names that more than one module defines; leading underscores do not count |
| long files, long functions | of more than 400 lines; of more than 40 from `def` to the last one, docstring included |
| import circles | sets of modules that import each other in a ring; imports for types only and those inside functions count as well |
| look-up codes | in docstrings and comments: `DECISIONS 13`, `P9` and the like. The invariants I1 to I10 may stay |
| docs lines | README, AGENTS, CONTRIBUTING, ARCHITECTURE and all below docs without what is generated, without what tests/pages alone reads, and without the pages of the next row |
| a page aside | the longest of the pages in `ASIDE` |
| chat: ... | see `journey.py` |

Which way imports may point is in pyproject.toml and checked by import-linter.
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

CODE = re.compile(r"\bDECISIONS \d+|(?<![-\w])(?!F8|F16|F32|F64|U8)[PGSEWFTOUMA]\d{1,2}\b")
"""Not the names of tensors' types in safetensors, and no part of a longer name."""
UNSEEN = ("<!-- block: ", "<!-- try: ")
GENERATED = ("docs/configuration.md", "docs/models.md", "docs/fields.md", "docs/clients.md")
ASIDE = ("docs/cluster.md", "docs/performance.md", "docs/scale.md", "docs/adapters/")
"""Pages, or folders of them, for those who do just that. They are not in the sum: each has a bar of its own."""
MADE = re.compile(r"<!-- made by .*|<!-- learning: begin -->.*?<!-- learning: end -->", re.DOTALL)
"""The generated part of a page, which goes to its end, or to where the benchmark's table ends."""
MAX_FILE, MAX_FUNCTION = 400, 40
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Row:
    """`at_most` is the bar; without one the row is for information. `found` names what counts, where there are names."""

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
        self.is_package = path.name == "__init__.py"
        self.name = ".".join((inside.parent if self.is_package else inside.with_suffix("")).parts)
        self.text = path.read_text()
        self.lines = self.text.splitlines()
        self.nodes = list(ast.walk(ast.parse(self.text)))

    @cached_property
    def comments(self) -> list[tokenize.TokenInfo]:
        return [t for t in tokenize.generate_tokens(io.StringIO(self.text).readline) if t.type == tokenize.COMMENT]

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """Those of attributes too: every statement that is only a string."""
        values = [node.value for node in self.nodes if isinstance(node, ast.Expr)]
        return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]

    @cached_property
    def code_lines(self) -> set[int]:
        documented = {line for found in self.docstrings for line in _span(found)}
        written = {number for number, line in enumerate(self.lines, 1) if line.strip() and not line.lstrip().startswith("#")}
        return written - documented

    @cached_property
    def import_lines(self) -> set[int]:
        imports = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        return {line for node in imports for line in _span(node)} & self.code_lines

    @property
    def classes(self) -> set[str]:
        return {node.name for node in self.nodes if isinstance(node, ast.ClassDef)}

    @property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    def imported(self, known: set[str]) -> set[str]:
        """The modules of the tree that this one imports from."""
        found: set[str] = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(node)
                found.update(inner if (inner := f"{origin}.{alias.name}") in known else origin for alias in node.names)
        return found & known - {self.name}

    def _origin(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*kept, *filter(None, [node.module])])

    def codes(self) -> Iterator[str]:
        """What a reader would have to look up, each with its place."""
        texts = [(comment.start[0], comment.string) for comment in self.comments]
        texts += [(found.lineno, str(found.value)) for found in self.docstrings]
        for first, text in texts:
            for match in CODE.finditer(text):
                yield f"{self.name}:{first + text[: match.start()].count(chr(10))} {match[0]}"


def _span(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


# --- Rows ------------------------------------------------------------------------------------------------------------


def rows(root: Path, *, journey: bool) -> list[Row]:
    modules = [Module(path, sources=root / "src") for path in sorted((root / "src" / "midflight").rglob("*.py"))]
    found = [*_size_rows(modules), _names_row(modules), _circles_row(modules), _codes_row(modules), *_docs_rows(root)]
    return found + _journey_rows(root) if journey else found


def _size_rows(modules: list[Module]) -> list[Row]:
    num_code = sum(len(module.code_lines) for module in modules)
    num_imports = sum(len(module.import_lines) for module in modules)
    files = [f"{m.name} {len(m.lines)}" for m in modules if len(m.lines) > MAX_FILE]
    functions = [f"{m.name}.{f.name} {len(_span(f))}" for m in modules for f in m.functions if len(_span(f)) > MAX_FUNCTION]
    return [
        Row("files", len(modules)),
        Row("lines", sum(len(module.lines) for module in modules)),
        Row("code lines", num_code),
        Row("import lines", 100 * num_imports / num_code, 9, unit=" %"),
        Row(f"files over {MAX_FILE} lines", len(files), 0, tuple(files)),
        Row(f"functions over {MAX_FUNCTION} lines", len(functions), 0, tuple(functions)),
    ]


def _names_row(modules: list[Module]) -> Row:
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules:
        for name in sorted({name.lstrip("_") for name in module.classes}):
            homes[name].append(module.name.removeprefix("midflight."))
    twice = tuple(f"{name}: {', '.join(places)}" for name, places in sorted(homes.items()) if len(places) > 1)
    return Row("names with two meanings", len(twice), 3, twice)


def _circles_row(modules: list[Module]) -> Row:
    known = {module.name for module in modules}
    circles = tuple(" <-> ".join(circle) for circle in _circles({module.name: module.imported(known) for module in modules}))
    return Row("import circles", len(circles), 0, circles)


def _circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that all reach each other."""
    reached = {start: _reached(start, arrows) for start in arrows}
    rings = {tuple(sorted(other for other in reached[start] if start in reached[other])) for start in arrows}
    return [list(ring) for ring in sorted(rings) if ring]


def _reached(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = arrows[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def _codes_row(modules: list[Module]) -> Row:
    codes = tuple(code for module in modules for code in module.codes())
    return Row("look-up codes", len(codes), 0, codes)


def _docs_rows(root: Path) -> list[Row]:
    pages = [root / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "ARCHITECTURE.md")] + sorted(
        (root / "docs").rglob("*.md")
    )
    written = {str(page.relative_to(root)): MADE.sub("", page.read_text()).splitlines() for page in pages}
    seen = {name: [line for line in lines if not line.startswith(UNSEEN)] for name, lines in written.items() if name not in GENERATED}
    lengths = {name: len(lines) for name, lines in seen.items() if not name.startswith(ASIDE)}
    aside = {name: len(lines) for name, lines in seen.items() if name.startswith(ASIDE)}
    return [
        Row("docs lines", sum(lengths.values()), 3500, tuple(f"{name} {length}" for name, length in lengths.items())),
        Row("a page aside", max(aside.values(), default=0), 160, tuple(f"{name} {length}" for name, length in aside.items())),
        Row("ARCHITECTURE lines", lengths["ARCHITECTURE.md"], 300),
        Row("options", sum(line.startswith("| `") for line in (root / GENERATED[0]).read_text().splitlines())),
    ]


def _journey_rows(root: Path) -> list[Row]:
    from journey import measure

    found = measure(root)
    return [
        Row("chat: modules", len(found.modules), 42, tuple(f"{name} {number}" for name, number in found.modules.most_common())),
        Row("chat: functions", len(found.calls)),
        Row("chat: calls a token", found.calls_per_token, 120),
    ]


# --- The table -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journey", action="store_true", help="run the streamed chat too")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--list", action="store_true", help="name what counts in each row")
    options = parser.parse_args()
    found = rows(options.root.resolve(), journey=options.journey)
    for row in found:
        bar = "" if row.at_most is None else f"at most {row.at_most:g}"
        print(f"{row.name:27}{row.value:9.{1 if row.unit else 0}f}{row.unit:3}{bar:14}{'EXCEEDED' if row.exceeded else ''}".rstrip())
        if row.exceeded or (options.list and row.at_most is not None):
            print("".join(f"    {line}\n" for line in row.found), end="")
    return 1 if any(row.exceeded for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
