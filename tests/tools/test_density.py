"""What `tools/density.py` counts, on lines of which every number can be told by looking at them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import density
import pytest
from bars import Module

DENSITY = Path(__file__).parents[2] / "tools" / "density.py"


def places(count: Callable[[Module], Iterator[density.Place]], folder: Path, text: str) -> list[str]:
    """Lines and texts of what is found."""
    (folder / "one.py").write_text(text)
    (module,) = density.modules_in([folder])
    return [f"{place.line}: {place.text}" for place in count(module)]


def test_the_table_has_what_a_reader_counts(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""Of it."""\n\na, b = 1, 2\n\n\ndef f() -> None:\n    """A; and B."""\n    print(a if b else 0)\n')
    (tmp_path / "two.py").write_text("# Nothing.\n\n\ndef g() -> None:\n    pass\n")
    done = subprocess.run([sys.executable, DENSITY, tmp_path], capture_output=True, text=True, check=True)
    rows = {line[:14].strip(): line[14:].split() for line in done.stdout.splitlines()}
    # Code: the assignment, `def` and `print`; in the other file `def` and `pass`. Each count is one in five lines.
    assert (rows["files"], rows["code lines"]) == (["2"], ["5"])
    assert rows["functions"][:2] == ["median", "2.5,"] and rows["functions"][-3:] == ["max", "3", "lines"]
    counted = {name: figures[:2] for name, figures in rows.items() if figures[-1] == "lines" and name != "functions"}
    once, never = ["1", "200.0"], ["0", "0.0"]
    assert counted == {
        "ternaries": once,
        "nested": never,
        "parallel": once,
        "starred": never,
        "fragments": once,
        "two thoughts": once,
    }


def test_a_list_names_each_place_by_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("\na, b = 1, 2\n")
    command = [sys.executable, DENSITY, "--list", "parallel", tmp_path / "one.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "one.py:2: a, b = 1, 2\n"


@pytest.mark.parametrize(
    "inner",
    [
        "[x for x in [y for y in z]]",
        "[x if x else 0 for x in z]",
        "{x: 0 for x in z} if z else {}",
        "a if b else c if d else e",
    ],
)
def test_an_expression_inside_another_is_nested(inner: str, tmp_path: Path) -> None:
    assert len(places(density.nested, tmp_path, f"v = {inner}\n")) == 1


def test_expressions_side_by_side_are_not_nested(tmp_path: Path) -> None:
    assert not places(density.nested, tmp_path, "v = f([x for x in z], a if b else c)\n")


def test_a_swap_is_not_a_parallel_assignment(tmp_path: Path) -> None:
    text = "a, b = b, a\nx, y = x + 1, x\nself.a, self.b = self.b, self.a\na, b = f()\n(a, *b) = c, d\n"
    assert not places(density.parallel, tmp_path, text)


def test_values_that_could_be_assigned_one_after_the_other_are_parallel(tmp_path: Path) -> None:
    text = "a, b = 1, 2\na, b = b, 0\nself.n, m = self.n + 1, m\n"
    assert [place[:2] for place in places(density.parallel, tmp_path, text)] == ["1:", "2:", "3:"]


def test_a_starred_literal_counts_and_a_starred_name_does_not(tmp_path: Path) -> None:
    assert places(density.starred, tmp_path, "f(*(a, b))\nf(*a)\nf((a, *b))\ng(*[a])\n") == ["1: f(*(a, b))", "4: g(*[a])"]


@pytest.mark.parametrize(
    "sentence",
    [
        "Of each group.",
        "Of `midflight train`, once that is known.",
        "Of a server that runs already; none starts one.",
        "By which its requests are told from those of others.",
        "That were told before this process was there.",
        "With the last message.",
        "Where a run was taken up again: weights go on under a new number.",
    ],
)
def test_half_a_sentence_is_a_fragment(sentence: str) -> None:
    assert density.is_fragment(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "Of equal engines the one of lower order is taken.",
        "By default it waits.",
        "That is refused.",
        "With several ranks each has a trainer.",
        "Without points nothing is drawn.",
        "Where the kernel does not say it, it is set to be read.",
        "The end of a line.",
        "Often there is none.",
    ],
)
def test_a_whole_sentence_is_none(sentence: str) -> None:
    assert not density.is_fragment(sentence)


def test_a_fragment_is_found_at_its_own_line_and_not_in_tables_or_formulas(tmp_path: Path) -> None:
    text = '''class A:
    """A thing. It stands for
    two. Of the third
    one.

    | Of | tables |

        Of formulas = 1

    By name.
    """
'''
    assert places(density.fragments, tmp_path, text) == ["3: Of the third one.", "10: By name."]


def test_only_the_first_sentence_may_not_hold_two_thoughts(tmp_path: Path) -> None:
    text = '"""One.\n\nIt waits; and it ends.\n"""\n\nA = 1\n"""A number; and\nanother."""\n'
    assert places(density.two_thoughts, tmp_path, text) == ["7: A number; and another."]
