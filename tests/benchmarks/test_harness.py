"""What every benchmark is made of: the order of rounds, ratios with their intervals, options, and what is written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from harness.arguments import Arguments  # noqa: E402
from harness.report import Report, make_parts  # noqa: E402
from harness.rounds import Ratio, alternate, middle_and_range, timed, turns  # noqa: E402


def test_every_other_round_goes_backward_and_the_warm_up_does_not_count() -> None:
    order = list(turns(["a", "b"], rounds=2, warmup=1))
    assert order == [("a", False), ("b", False), ("b", True), ("a", True), ("a", True), ("b", True)]


def test_a_side_is_called_once_in_each_round() -> None:
    seen: list[str] = []
    found = alternate({"a": lambda: seen.append("a") or 1, "b": lambda: seen.append("b") or 2}, rounds=2, warmup=1)
    assert seen == ["a", "b", "b", "a", "a", "b"] and found == {"a": [1, 1], "b": [2, 2]}


def test_a_ratio_is_the_geometric_mean_of_the_rounds_with_its_interval() -> None:
    # The logarithms are 0 and ln 4: their mean is ln 2, their deviation ln 4 / sqrt 2, over sqrt 2: ln 2. Student's t of one degree is 12.706.
    ratio = Ratio.of([1.0, 4.0], [1.0, 1.0])
    assert ratio.mean == pytest.approx(2.0)
    assert ratio.low == pytest.approx(2.0 / 2.0**12.706) and ratio.high == pytest.approx(2.0 * 2.0**12.706)


def test_a_ratio_of_one_round_has_no_interval() -> None:
    assert Ratio.of([3.0], [2.0]) == Ratio(1.5) and str(Ratio(1.5)) == "1.50"


def test_a_ratio_of_equal_rounds_excludes_everything_else() -> None:
    assert str(Ratio.of([3.0] * 30, [2.0] * 30)) == "1.50 (95 %: 1.50 to 1.50)"


def test_the_middle_stands_beside_the_range() -> None:
    assert middle_and_range([3.0, 1.0, 2.5], digits=1) == "2.5 (1.0-3.0)"


def test_time_is_read_by_the_clock_that_is_asked_for() -> None:
    readings = iter([5.0, 7.5])
    result, cost = timed(lambda: "done", cpu=lambda: next(readings))
    assert result == "done" and cost.cpu == 2.5 and cost.wall >= 0


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str):
    monkeypatch.setattr(sys, "argv", ["script", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    arguments = Arguments("A benchmark.", rounds=5)
    arguments.option("--steps", 60, smoke=2)
    arguments.option("--parts", ["a"], smoke=["a", "b"], choices=["a", "b"])
    arguments.option("--fast", False)
    arguments.option("--folder", Path("runs"))
    return arguments.parse()


def test_the_smoke_form_has_smaller_values_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed(monkeypatch, "--smoke", "--steps", "7")
    assert (options.rounds, options.steps, options.parts, options.fast) == (1, 7, ["a", "b"], False)


def test_an_option_has_the_type_of_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    options = parsed(monkeypatch, "--rounds", "3", "--parts", "b", "a", "--fast", "--folder", "there")
    assert (options.rounds, options.steps, options.parts, options.fast) == (3, 60, ["b", "a"], True)
    assert options.folder == Path("there")


def test_an_option_that_went_is_refused_by_name_with_what_to_do_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--times=3"])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    arguments = Arguments("A benchmark.", rounds=5)
    arguments.gone("--times", "use --rounds")
    with pytest.raises(SystemExit, match="2"):
        arguments.parse()
    assert "--times is gone: use --rounds" in capsys.readouterr().err


def test_tables_and_figures_are_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(parsed(monkeypatch, "--json", str(tmp_path / "found.json")))
    report.table("side", "ms").row("ours", 3)
    report.figure("theirs / ours", 1.5)
    report.keep("samples", [1, 2])
    report.close()
    assert "| side | ms |\n|---|---|\n| ours | 3 |\n" in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tables"] == [{"headings": ["side", "ms"], "rows": [["ours", "3"]]}]
    assert (found["figures"], found["samples"]) == ({"theirs / ours": 1.5}, [1, 2])


def test_a_part_that_does_not_keep_its_bounds_ends_the_program_with_1_but_not_in_smoke(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def late(options: object, report: Report) -> bool:
        made.append("late")
        return False

    parts = {"a": late, "b": lambda options, report: made.append("free of bounds")}
    with pytest.raises(SystemExit) as ended:
        make_parts(parsed(monkeypatch, "--parts", "a", "b"), parts)
    assert ended.value.code == 1 and made == ["late", "free of bounds"], "the others are measured all the same"
    make_parts(parsed(monkeypatch, "--smoke"), parts)
    make_parts(parsed(monkeypatch, "--parts", "b"), parts)
