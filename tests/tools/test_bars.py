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
        "from midflight.two import (\n    Thing,\n    other,\n)\n\n"
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
    for name, text in MODULES.items():
        (tmp_path / "src" / "midflight" / name).write_text(text)
    return tmp_path


def run(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, BARS, "--root", root, "--list"], capture_output=True, text=True)


def test_the_table_has_what_a_reader_counts(root: Path) -> None:
    said = run(root).stdout
    rows = {line[:27].strip(): line[27:].split()[0] for line in said.splitlines() if not line.startswith(" ")}
    # Code: in one.py 4 lines of import, 2 of the class, 41 of the function; in two.py all 6.
    assert (rows["files"], rows["code lines"]) == ("3", "53")
    assert (rows["names with two meanings"], rows["import circles"]) == ("1", "1")
    assert "Thing: one, two" in said and "midflight.one <-> midflight.two" in said
    assert [line.split()[1] for line in said.splitlines() if line.startswith("    midflight.one:")] == ["P9", "DECISIONS"]


def test_a_bar_that_is_exceeded_is_named_and_fails(root: Path) -> None:
    done = run(root)
    exceeded = [line[:27].strip() for line in done.stdout.splitlines() if line.endswith("EXCEEDED")]
    assert exceeded == ["import circles", "look-up codes"] and done.returncode == 1


def test_a_tree_below_all_bars_passes(root: Path) -> None:
    for name in ("one.py", "two.py"):
        (root / "src" / "midflight" / name).write_text('"""Nothing."""\n\nSIZE = 1\n')
    assert run(root).returncode == 0
