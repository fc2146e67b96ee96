"""How dense the source is, measured in syntax: a table, and on request the places behind one of its rows.

    python tools/density.py                      of src/midflight
    python tools/density.py DIR FILE ...         of these folders and files
    python tools/density.py --list parallel      the places that a row counts, each as file:line and its text

| row | what is counted |
|---|---|
| files, code lines | as `bars.py` counts them: without blank lines, comments and docstrings |
| AST nodes | what `ast.walk` gives |
| functions | lines of each, from `def` to its end: median, 90th percentile, maximum |
| ternaries | conditional expressions |
| nested | comprehensions and conditional expressions that stand inside another one |
| parallel | `a, b = c, d`; not a swap, which needs the values from before |
| starred | calls with a tuple or list that is written out and starred: `f(*(a, b))` |
| fragments | docstring sentences that begin with "Of", "By", "That" and the like, without a main verb |
| two thoughts | docstrings whose first sentence has "; and" |

Main verbs are found by a list of verbs, so a few fragments are none, and a few are missed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bars import Module

ROOT = Path(__file__).parents[1]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
INLINE = (*COMPREHENSIONS, ast.IfExp)
"""Expressions that say what a statement could."""


@dataclass(frozen=True)
class Place:
    """Where something stands, and its text or lines as one line."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{os.path.relpath(self.path)}:{self.line}: {self.text}"


def source_files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.rglob("*.py"))
        else:
            yield path


def modules_in(paths: Iterable[Path]) -> list[Module]:
    return [Module(path, sources=path.parent) for path in source_files(paths)]


# --- Expressions and statements ---------------------------------------------------------------------------------------


def ternaries(module: Module) -> Iterator[Place]:
    for node in module.nodes:
        if isinstance(node, ast.IfExp):
            yield _place(module, node)


def nested(module: Module) -> Iterator[Place]:
    """Each inner expression once, however deep it stands."""
    found: set[ast.expr] = set()
    for outer in module.nodes:
        if isinstance(outer, INLINE):
            found.update(
                node for node in ast.walk(outer) if isinstance(node, INLINE) and node is not outer
            )
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)):
        yield _place(module, node)


def parallel(module: Module) -> Iterator[Place]:
    for node in module.nodes:
        if isinstance(node, ast.Assign) and any(
            _is_parallel(target, node.value) for target in node.targets
        ):
            yield _place(module, node)


def _is_parallel(target: ast.expr, value: ast.expr) -> bool:
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    if any(isinstance(part, ast.Starred) for part in (*target.elts, *value.elts)):
        return False
    return len(target.elts) == len(value.elts) and not _is_swap(target.elts, value.elts)


def _is_swap(targets: Sequence[ast.expr], values: Sequence[ast.expr]) -> bool:
    """Whether one statement after the other would give something else: a value reads what a target on its left replaces."""
    replaced: set[str] = set()
    for target, value in zip(targets, values, strict=True):
        read = {ast.unparse(node) for node in ast.walk(value) if isinstance(node, ast.expr)}
        if read & replaced:
            return True
        replaced.add(ast.unparse(target))
    return False


def starred(module: Module) -> Iterator[Place]:
    for node in module.nodes:
        if isinstance(node, ast.Call) and any(
            _is_starred_literal(argument) for argument in node.args
        ):
            yield _place(module, node)


def _is_starred_literal(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List)


def _place(module: Module, node: ast.expr | ast.stmt) -> Place:
    lines = module.lines[node.lineno - 1 : node.end_lineno]
    return Place(module.path, node.lineno, " ".join(line.strip() for line in lines))


# --- Docstrings -------------------------------------------------------------------------------------------------------

OPENERS = re.compile(r"(Of|By|That|With|Without|Where)\s")
SINGULAR = re.compile(r"That (is|was|has|does|can|may|must|will|would|\w+s)\b")
"""Here "that" is the subject, as in "That is refused"; in "That were told" it begins half a sentence."""
SUBORDINATE = re.compile(
    r"\b(that|which|who|whom|whose|what|where|when|while|if|how|whether|once|until|because|as|than)\b[^,]*",
    re.IGNORECASE,
)
"""A clause with a verb of its own, which is not the verb of the sentence. A comma ends it."""
CODE = re.compile(r"`[^`]*`")
VERBS = re.compile(
    r"(?<!\bthe )(?<!\bits )(?<!\bof )(?<!\ball )(?<!\ba )(?<!\bno )\b("
    r"is|are|was|were|has|have|had|does|do|did|can|cannot|may|might|must|will|would|could|should"
    r"|applies|begins?|breaks?|brings?|carries|changes?|comes?|computes?|costs|counts|decides?|ends"
    r"|fails?|follows?|forgets?|gets?|gives?|goes|go|grows?|happens?|holds?|keeps?|knows?|learns?"
    r"|leaves?|lies|loads?|looks?|loses?|makes?|means?|meets?|moves?|needs?|raises?|reads?|receives?"
    r"|remains?|returns?|runs?|says?|sees?|sends?|serves?|shows?|starts?|stays?|stands?|stops?|takes?"
    r"|tells?|trains?|uses?|waits?|wants?|works?|writes?)\b"
)
"""Verbs that make a sentence, but not behind a word that makes a noun of them."""
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"])")
NO_PROSE = re.compile(r"\s*(\||>>>|[-*] |\d+\. )|\s{4,}\S")
"""Rows of tables, lists, and what is indented: formulas and commands."""


@dataclass(frozen=True)
class Sentence:
    """A sentence of a docstring. Lines are counted in the file."""

    line: int
    text: str


def sentences(docstring: ast.Constant) -> Iterator[Sentence]:
    """A blank line ends a sentence too."""
    number = docstring.lineno
    for paragraph in re.split(r"(\n[ \t]*\n)", _unindented(docstring)):
        yield from _sentences_of(paragraph, number)
        number += paragraph.count("\n")


def _unindented(docstring: ast.Constant) -> str:
    """The text without the indentation that the code around it has."""
    indent = "\n" + " " * docstring.col_offset
    return str(docstring.value).replace(indent, "\n")


def _sentences_of(paragraph: str, number: int) -> Iterator[Sentence]:
    prose = "\n".join("" if NO_PROSE.match(line) else line for line in paragraph.split("\n"))
    start = 0
    for end in [*(match.end() for match in SENTENCE_END.finditer(prose)), len(prose)]:
        words = prose[start:end].split()
        if words:
            yield Sentence(number + prose.count("\n", 0, start), " ".join(words))
        start = end


def is_fragment(sentence: str) -> bool:
    """Whether a sentence begins like a part of another one and has no main verb.

    What follows a colon or a semicolon is another sentence.
    """
    if not OPENERS.match(sentence) or SINGULAR.match(sentence):
        return False
    first = re.split("[:;]", CODE.sub("`", sentence))[0]
    return VERBS.search(SUBORDINATE.sub("", first)) is None


def fragments(module: Module) -> Iterator[Place]:
    for docstring in module.docstrings:
        for sentence in sentences(docstring):
            if is_fragment(sentence.text):
                yield Place(module.path, sentence.line, sentence.text)


def two_thoughts(module: Module) -> Iterator[Place]:
    for docstring in module.docstrings:
        first = next(sentences(docstring), None)
        if first is not None and "; and" in first.text:
            yield Place(module.path, first.line, first.text)


# --- The table --------------------------------------------------------------------------------------------------------

COUNTED = {
    "ternaries": ternaries,
    "nested": nested,
    "parallel": parallel,
    "starred": starred,
    "fragments": fragments,
    "two thoughts": two_thoughts,
}
"""What `--list` can name."""


def rows(modules: Sequence[Module]) -> list[tuple[str, str]]:
    """Each row's name and figures."""
    num_lines = sum(len(module.code_lines) for module in modules)
    num_nodes = sum(len(module.nodes) for module in modules)
    sizes = [
        ("files", f"{len(modules)}"),
        ("code lines", f"{num_lines}"),
        ("AST nodes", f"{num_nodes}"),
    ]
    sizes.append(("nodes a line", f"{num_nodes / max(1, num_lines):.1f}"))
    return [*sizes, ("functions", _lengths(modules)), *_rates(modules, num_lines)]


def _lengths(modules: Sequence[Module]) -> str:
    lengths = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    if len(lengths) < 2:
        return "too few for quantiles"
    ninth_decile = statistics.quantiles(lengths, n=10)[-1]
    return f"median {statistics.median(lengths):g}, p90 {ninth_decile:g}, max {max(lengths)} lines"


def _rates(modules: Sequence[Module], num_lines: int) -> Iterator[tuple[str, str]]:
    for name, places in COUNTED.items():
        number = sum(1 for module in modules for _ in places(module))
        yield name, f"{number:6}{1000 * number / max(1, num_lines):8.1f} per 1 000 lines"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "src" / "midflight"])
    parser.add_argument("--list", choices=COUNTED, help="print the places that this row counts")
    options = parser.parse_args()
    modules = modules_in(options.paths)
    if options.list is None:
        for name, figures in rows(modules):
            print(f"{name:14}{figures}")
    else:
        for module in modules:
            for place in COUNTED[options.list](module):
                print(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
