"""What `tools/bars.py` counts, on a small tree of which every number can be told by looking at it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BARS = Path(__file__).parents[2] / "tools" / "bars.py"
MODULES = {
    "__init__.py": '"""A tree."""\n',
    "one.py": (
        '"""Refers to DECISIONS 7, and to I3, which may stay."""\n\n'
        "from midflight.two import (\n    Thing,\n    other,\n)\n\n"  # 4 lines of import
        "# As P9 demands; F32 is a type of tensors, and MiniMax-M1 a paper.\n"
        "class _Thing(Thing):\n"
        '    """Two\n    lines."""\n\n'
        "    size = 1\n"
        '    """Of it."""\n\n\n'
        "def long() -> None:\n" + "    other()\n" * 40
    ),
    "two.py": (
        "from typing import TYPE_CHECKING\n\n"
        "if TYPE_CHECKING:\n    from midflight import one\n\n\n"
        "class Thing:\n    back: one._Thing\n\n\n"
        "def other() -> None: ...\n"
    ),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "src" / "midflight").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for name, text in MODULES.items():
        (tmp_path / "src" / "midflight" / name).write_text(text)
    for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "docs/page.md"):
        (tmp_path / name).write_text("a line\n" * 10)
    (tmp_path / "docs" / "configuration.md").write_text("| `steps` | a whole number |\n" * 2)
    return tmp_path


def run(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, BARS, "--root", root, "--list"], capture_output=True, text=True)


def test_the_table_has_what_a_reader_counts(root: Path) -> None:
    said = run(root).stdout
    rows = {line[:27].strip(): line[27:].split()[0] for line in said.splitlines() if not line.startswith(" ")}
    # Code: in one.py 4 lines of import, 2 of the class, 41 of the function; in two.py all 6.
    assert (rows["files"], rows["code lines"], rows["import lines"]) == ("3", "53", f"{100 * 6 / 53:.1f}")
    assert (rows["functions over 40 lines"], rows["names with two meanings"], rows["import circles"]) == ("1", "1", "1")
    assert (rows["docs lines"], rows["ARCHITECTURE lines"], rows["options"]) == ("50", "10", "2")
    assert "Thing: one, two" in said and "midflight.one <-> midflight.two" in said and "midflight.one.long 41" in said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("    midflight.one:")] == ["P9", "DECISIONS"]


def test_a_bar_that_is_exceeded_is_named_and_fails(root: Path) -> None:
    done = run(root)
    exceeded = [line[:27].strip() for line in done.stdout.splitlines() if line.endswith("EXCEEDED")]
    assert exceeded == ["import lines", "functions over 40 lines", "import circles", "look-up codes"] and done.returncode == 1


def test_a_page_aside_has_a_bar_of_its_own_and_is_not_in_the_sum(root: Path) -> None:
    (root / "docs" / "adapters").mkdir()
    for name, length in (("scale.md", 160), ("adapters/one.md", 161)):
        (root / "docs" / name).write_text("x\n" * length)
    rows = {line[:27].strip(): line[27:].split() for line in run(root).stdout.splitlines() if not line.startswith(" ")}
    assert rows["docs lines"][0] == "50"
    assert rows["a page aside"][0] == "161" and rows["a page aside"][-1] == "EXCEEDED"


def test_a_tree_below_all_bars_passes(root: Path) -> None:
    for name in ("one.py", "two.py"):
        (root / "src" / "midflight" / name).write_text('"""Nothing."""\n\nSIZE = 1\n')
    assert run(root).returncode == 0
