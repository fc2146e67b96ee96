"""What `tools/record.py` keeps of a checkout, and what it calls a difference."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import record
from recording import Found, bodies, chat, comparing, curves, dry_runs, suite

JUNIT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.a" name="test_good" time="0.1"/>
<testcase classname="tests.a" name="test_bad[1-2]"><failure message="no"/></testcase>
<testcase classname="tests.b" name="test_left"><skipped type="pytest.skip"/></testcase>
<testcase classname="tests.b" name="test_torn"/>
<testcase classname="tests.b" name="test_torn"><error message="at teardown"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def junit(tmp_path: Path) -> Path:
    file = tmp_path / "junit.xml"
    file.write_text(JUNIT)
    return file


def recorded(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["record.py", *map(str, arguments)])
    return record.main()


# --- Records and their differences ------------------------------------------------------------------------------------


def test_a_test_has_the_worst_result_that_pytest_reported(junit: Path) -> None:
    assert suite.results(junit) == {
        "tests.a::test_good": "passed",
        "tests.a::test_bad[1-2]": "failure",
        "tests.b::test_left": "skipped",
        "tests.b::test_torn": "error",
    }


def test_an_equal_record_has_no_difference(junit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--only", "tests", "--junit", junit)
    assert recorded(monkeypatch, tmp_path / "old", *asked) == 0
    assert recorded(monkeypatch, tmp_path / "new", *asked, "--against", tmp_path / "old") == 0
    assert json.loads((tmp_path / "new" / "tests.json").read_text()) == suite.results(junit)


def test_a_test_that_vanished_or_changed_is_named_and_a_new_one_is_no_difference(
    junit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record.write(tmp_path / "old", "tests", {**suite.results(junit), "tests.a::test_bad[1-2]": "passed", "tests.c::test_gone": "passed"})
    record.write(tmp_path / "older", "tests", {"tests.a::test_good": "passed"})
    asked = ("--only", "tests", "--junit", junit)
    assert recorded(monkeypatch, tmp_path / "new", *asked, "--against", tmp_path / "old") == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line] == [
        "  DIFFERS tests.a::test_bad[1-2]: failure, and passed before",
        "  DIFFERS tests.c::test_gone: vanished",
    ]
    assert recorded(monkeypatch, tmp_path / "new", *asked, "--against", tmp_path / "older") == 0
    assert "  new: tests.b::test_left" in capsys.readouterr().out


def test_an_earlier_record_is_neither_written_over_nor_guessed(
    junit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for other, reason in ((tmp_path / "new", "would be written over"), (tmp_path / "none", "has no record of tests")):
        with pytest.raises(SystemExit) as refused:
            recorded(monkeypatch, tmp_path / "new", "--only", "tests", "--junit", junit, "--against", other)
        assert refused.value.code == 2 and reason in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_of_a_long_text_only_the_lines_that_differ_are_shown() -> None:
    before = "".join(f"line {n}\n" for n in range(100))
    now = before.replace("line 7\n", "line seven\n")
    assert comparing.changed(before, now) == "\n    -line 7\n    +line seven"


# --- Curves -----------------------------------------------------------------------------------------------------------


def test_a_curve_is_the_same_to_the_last_bit_when_it_is_made_again() -> None:
    first, second = curves.ring(), curves.ring()
    assert first == second and first.count("loss") == curves.STEPS
    losses = {line.split()[1] for line in first.splitlines() if line.startswith("loss")}
    assert len(losses) == curves.STEPS


def test_curves_of_other_versions_are_not_compared() -> None:
    before: Found = {"made with torch": "2.12.0", "ring": "loss 1"}
    now: Found = {"made with torch": "2.13.0", "ring": "loss 2"}
    (refusal,) = curves.differences(before, now)
    assert refusal.startswith("made with torch 2.13.0, 2.12.0 before: bits may differ")
    (difference,) = curves.differences({**before, "made with torch": "2.13.0"}, now)
    assert difference == "ring: loss 2, and loss 1 before"


# --- Answers, dry runs and the journey --------------------------------------------------------------------------------


def test_ids_and_times_of_an_answer_are_masked_and_what_refers_to_an_id_still_does() -> None:
    one, other = "0123456789abcdef", "fedcba9876543210"
    text = f'{{"id":"resp_{one}","created_at":1795643275,"of":"{other}","again":"{one}","max":100}}'
    assert bodies.masked(text) == '{"id":"resp_<id 1>","created_at":<time>,"of":"<id 2>","again":"<id 1>","max":100}'


def test_a_difference_between_two_answers_is_shown_by_field() -> None:
    before = bodies.in_lines('{"model":"policy","choices":[{"index":0,"finish_reason":"stop"}]}')
    now = before.replace("stop", "length")
    assert comparing.changed(before, now) == '\n    -"finish_reason":"stop"}]}\n    +"finish_reason":"length"}]}'


def test_a_scripted_reply_calls_the_first_tool_that_is_offered_and_tells_prompts_apart() -> None:
    offered = bodies.reply('{"type": "function", "function": {"name": "look"}}')
    assert '{"name": "look", "arguments": {"input": "a"}}' in offered
    assert "tool_call" not in bodies.reply("hello") and bodies.reply("hello") != bodies.reply("hullo")


def test_what_the_machine_adds_to_a_dry_run_is_masked(tmp_path: Path) -> None:
    text = f"folder {tmp_path}/run  \n{dry_runs.ROOT}/configs: 3 threads on 2 cores, and this machine has 23.5 GB of memory\nright (off by at most 1.9e-06 nats)\n"
    assert dry_runs.masked(text, tmp_path) == (
        "folder <folder>/run\n<checkout>/configs: 3 threads on <number> cores, and this machine has <size> of memory\n"
        "right (off by at most <difference>)\n"
    )


def test_what_is_made_before_a_run_has_a_stand_in_and_a_file_of_the_checkout_has_none(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[model]\npath = "models/large"\n\n[warm_start]\ndata = "configs/some.jsonl"\n')
    assert list(dry_runs.stand_ins(config, tmp_path)) == [f"model.path={tmp_path}/model"]


def test_a_chat_that_costs_more_is_a_difference_and_one_that_costs_less_or_passes_other_modules_is_none() -> None:
    before: Found = {chat.TOTAL: "108.0", "gateway/http.py": "9.0"}
    (difference,) = chat.differences(before, {chat.TOTAL: "112.0"})
    assert difference == "calls a token: 112.0, and 108.0 before"
    assert not list(chat.differences(before, {chat.TOTAL: "99.0", "gateway/other.py": "1.0"}))
