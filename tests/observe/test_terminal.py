"""The live view on a recorded console, and the plain lines of a log."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from tests.observe.facts import Clock

from midflight.observe.run_state import RunState
from midflight.observe.status import Bound, IdleTime, LearningStatus, MemberChanges, Phase, SourceStatus, Status, Totals, WarmStartStatus
from midflight.observe.terminal import PLAIN_SECONDS, Terminal, panel, plain_line
from midflight.types import Accounts, UnclaimedRollouts, facts
from midflight.types.facts import Shown

TRAINING = Status(
    phase=Phase.TRAINING,
    name="demo",
    step=120,
    steps=300,
    version=120,
    seconds=75.0,
    eta_seconds=90.0,
    reward=0.71,
    sources=(SourceStatus("spell_backward", 0.75, 9000, 256, 0.5, 0.8), SourceStatus("chain_sum", None)),
    staleness={0: 100, 1: 300, 2: 50},
    totals=Totals(500_000, 200_000, 9100, 0, 3000, 0, 120, 3),
    generation_rate=9120.4,
    training_rate=4040.0,
    num_running=128,
    waits=(IdleTime("trainer", "engines", 6.0, 0.08),),
    engine_busy=0.97,
    trainer_busy=0.9,
    overlap_share=0.88,
    bound=Bound.BALANCED,
)


def drawn(status: Status) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    console.print(panel(status))
    return console.file.getvalue()  # type: ignore[attr-defined]


def logged(status: Status) -> str:
    output = io.StringIO()
    with Terminal(Console(file=output, width=80), clock=Clock()) as terminal:
        terminal.show(status)
    return output.getvalue()


def test_training_shows_progress_reward_staleness_speed_waiting_and_eta() -> None:
    text = drawn(TRAINING)
    for words in (
        "demo  training  version 120  1 min 15 s",
        "step 120/300  ETA 1 min 30 s",
        "0.750  spell_backward   held out 0.500 → 0.800",
        "–  chain_sum",
        "mean 0.89, most 3",
        "generation 9,120 tok/s (128 running)   training 4,040 tok/s",
        "3,000 of 9,100 rollouts span versions",
        "engines busy 97%, trainer busy 90%, both 88%   balanced",
        "trainer for engines 8%",
    ):
        assert words in text, words
    assert "trouble" not in text and "advice" not in text


@pytest.mark.parametrize("width", [80, 140])
def test_nothing_is_cut_on_a_narrow_or_a_wide_terminal(width: int) -> None:
    advice = "the trainer is idle 50%, and every core computes already, so that more engines or threads would not help: a machine with more cores"
    status = replace(TRAINING, bound=Bound.GENERATION, advice=advice, failures={"ZeroDivisionError": 12, "KeyError": 3})
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    console.print(panel(status))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert {len(line) for line in lines} == {width} and not any("…" in line for line in lines)
    said = " ".join(line.strip("│").strip() for line in lines)
    assert advice in " ".join(said.split()) and "held out 0.500 → 0.800 (256 tasks)" in said


def test_the_handful_of_readings_that_matter_is_shown_and_the_advice() -> None:
    status = replace(
        TRAINING,
        learning=LearningStatus(210.4, 204.0, 0.031, 0.412, 0.125, lengths={"min": 4.0, "max": 1200.0}),
        trainer={"mismatch/mean": 0.00123, "clip/low_share": 0.01, "clip/high_share": 0.02, "rho/k3": 0.0004, "grad_norm": None},
        bound=Bound.GENERATION,
        advice="the trainer is idle 50%: more engine.count",
    )
    lines = (
        "spread 0.412, 12% of groups all alike",
        "210 tokens a rollout (4 to 1,200), 204 trained, 3% cut short",
        "mismatch 0.00123  KL 0.0004  gradient norm not finite  clipped 3.0%",
        "the trainer is idle 50%: more engine.count",
    )
    for text in (drawn(status), logged(status)):
        for words in lines:
            assert words in text, words


def test_failures_by_class_and_marked_evaluations_are_shown() -> None:
    failures = {"ToolError": 30, "RolloutTimeout": 2, "A": 1, "B": 1, "C": 1}
    source = SourceStatus("spell_backward", 0.75, 9000, 60, 0.5, 0.8, failed_after=4, incomplete=True)
    text = drawn(replace(TRAINING, failures=failures, sources=(source,)))
    assert "0 of 9,100 rollouts failed: 30 ToolError, 2 RolloutTimeout, 1 A, 1 B, 1 more" in text
    assert "held out 0.500 → 0.800 (0 and 4 of 64 tasks failed: do not compare)" in text
    assert "30 ToolError" in plain_line(replace(TRAINING, failures=failures))


def test_trouble_is_shown_when_there_is_some() -> None:
    text = drawn(
        replace(
            TRAINING,
            totals=Totals(failed_requests=2, generated_tokens=1),
            quarantined=("engine1",),
            accounts=Accounts(dropped={"stale": 4}),
        )
    )
    for words in ("2 requests failed", "in quarantine: engine1", "groups dropped: 4 stale"):
        assert words in text, words


def test_what_waits_to_be_claimed_is_shown_while_no_worker_has_any() -> None:
    waits = replace(TRAINING, unclaimed=UnclaimedRollouts(number=4, seconds=130.0, idle_seconds=130.0, claimed_seconds=185.0))
    words = "4 rollouts wait to be claimed, the oldest for 2 min 10 s; the last claim was 3 min 05 s ago"
    assert words in plain_line(waits) and "4 rollouts wait to be claimed" in drawn(waits)
    busy = replace(TRAINING, unclaimed=UnclaimedRollouts(number=4, seconds=130.0, idle_seconds=0.0, claimed_seconds=185.0))
    assert "claimed" not in plain_line(busy)


def test_the_warm_start_shows_its_own_numbers_only() -> None:
    status = Status(phase=Phase.WARM_START, warm_start=WarmStartStatus(150, 2000, loss=1.25, accuracy=0.31, target=0.5))
    text = drawn(status)
    assert "step 150/2000" in text and "1.250" in text and "0.310, until 0.500" in text and "staleness" not in text
    assert "loss 1.250  accuracy 0.310" in plain_line(status)


def test_an_evaluation_shows_how_many_tasks_are_answered() -> None:
    assert "task 30/296" in drawn(Status(phase=Phase.EVALUATION, evaluated=30, to_evaluate=296))


def test_an_empty_status_draws() -> None:
    assert "starting" in drawn(Status())


def test_without_a_terminal_a_line_comes_every_few_seconds_and_at_each_new_phase() -> None:
    clock, output = Clock(), io.StringIO()
    with Terminal(Console(file=output, width=80), clock=clock) as terminal:
        terminal.show(replace(TRAINING, step=1))
        clock.now += PLAIN_SECONDS - 1
        terminal.show(replace(TRAINING, step=2))
        terminal.show(replace(TRAINING, phase=Phase.EVALUATION))
        terminal.show(replace(TRAINING, step=3))
        clock.now += PLAIN_SECONDS
        terminal.show(replace(TRAINING, step=4))
        terminal.say("the end")
    found = output.getvalue().splitlines()
    assert [line.split("step ")[1].split("/")[0] for line in found if "step " in line] == ["1", "3", "4"]
    assert "reward 0.710" in found[0] and "trainer waits for engines 8%" in found[0]
    assert found[-1] == "the end"


def test_on_a_terminal_the_view_is_redrawn_and_gone_at_the_end() -> None:
    output = io.StringIO()
    with Terminal(Console(file=output, force_terminal=True, width=120)) as terminal:
        terminal.show(TRAINING)
        shown = output.getvalue()
    assert "spell_backward" in shown
    assert output.getvalue().endswith("\x1b[2K") or "\x1b[?25h" in output.getvalue()


EVERYTHING = replace(
    TRAINING,
    name="a-run-with-a-name-that-alone-would-fill-the-title-of-a-panel-eighty-columns-wide",
    learning=LearningStatus(210.4, 204.0, 0.031, 0.412, 0.125, lengths={"min": 4.0, "max": 1200.0}),
    trainer={"mismatch/mean": 0.00123, "clip/low_share": 0.01, "rho/k3": 0.0004, "grad_norm": 1.5, "entropy/estimate": 2.0},
    failures={"ToolError": 30, "RolloutTimeout": 2, "AVeryLongNameOfAnErrorThatSomebodyHasGivenToTheirOwnClass": 1},
    quarantined=("engine1",),
    accounts=Accounts(dropped={"stale": 4, "no_reward": 2}),
    waits=(
        IdleTime("trainer", "rollouts", 6.0, 0.08),
        IdleTime("admission", "engines", 3.0, 0.04),
        IdleTime("handover", "trainer", 1.0, 0.01),
    ),
    bound=Bound.GENERATION,
    advice="the trainer is idle 50%: more engine.count, engine.max_running or rollout.max_in_flight",
    sample=Shown(
        "spell_backward",
        "5567",
        1.0,
        "Be brief.\nSpell cat backward: " + "c-a-t " * 60,
        "tac\x1b[2J [bold] :smile:\n" + "and " * 80 + "\n3\n4\n5",
    ),
)


@pytest.mark.parametrize("width", [80, 200])
def test_the_panel_keeps_its_frame_and_says_everything_at_any_width(width: int) -> None:
    output = io.StringIO()
    Console(file=output, force_terminal=True, width=width, color_system=None).print(panel(EVERYTHING))
    lines = output.getvalue().splitlines()
    assert {len(line) for line in lines} == {width}, "every line reaches from edge to edge"
    assert all(line[0] == line[-1] == "│" for line in lines[1:-1]) and len(lines) <= (34 if width == 80 else 24)
    text = " ".join([lines[0], " ".join(" ".join(line.strip("│ ") for line in lines).split())])
    for words in (
        "a-run-with-a-name-that-alone-would-…  training  version 120  1 min 15 s",
        "step 120/300",
        "210 tokens a rollout (4 to 1,200), 204 trained, 3% cut short",
        "30 ToolError, 2 RolloutTimeout, 1 AVeryLongNameOfAnErrorThatSomebodyHasGivenToTheirOwnClass",
        "trainer for rollouts 8%, admission for engines 4%, handover for trainer 1%",
        "in quarantine: engine1",
        "more engine.count, engine.max_running or rollout.max_in_flight",
        "spell_backward, task 5567, reward 1.000",
        "< tac·[2J [bold] :smile:",
    ):
        assert words in text, words
    assert "\x1b[2J" not in output.getvalue(), "what a model writes does not steer the terminal"
    assert "Be brief." in text and "< 3" in text and "< 5" not in text
    assert ("…" in text) and text.count("and and") < 80, "long lines are cut at the edge"


@pytest.mark.parametrize("width", [80, 200])
def test_a_log_has_whole_lines_at_any_width_and_the_last_rollout_in_one(width: int) -> None:
    output = io.StringIO()
    with Terminal(Console(file=output, width=width), clock=Clock()) as terminal:
        terminal.show(EVERYTHING)
    lines = output.getvalue().splitlines()
    assert len(lines) == 3 and "30 ToolError, 2 RolloutTimeout" in lines[0] and "trainer waits for rollouts 8%" in lines[0]
    assert "210 tokens a rollout (4 to 1,200)" in lines[1]
    assert lines[2].startswith("  last rollout: spell_backward, task 5567, reward 1.000: ") and "→ tac·[2J [bold] :smile: and" in lines[2]


def test_as_json_each_message_is_an_object_on_a_line_of_its_own() -> None:
    output = io.StringIO()
    with Terminal(Console(file=output, force_terminal=True, width=80), clock=Clock(), as_json=True) as terminal:
        terminal.show(EVERYTHING)
        terminal.say("an alarm\nof two lines [bold]")
        terminal.say(panel(Status()))
    told = [json.loads(line) for line in output.getvalue().splitlines()]
    assert len(told) == 5 and all(line["process"] == "launcher" and line["time"].endswith("+00:00") for line in told)
    assert (told[0]["step"], told[0]["phase"], told[0]["failures"]["ToolError"], told[0]["reward"]) == (120, "training", 30, 0.71)
    assert told[3]["message"] == "an alarm\nof two lines [bold]" and "starting" in told[4]["message"]


def test_the_panel_says_which_engines_have_come_and_gone() -> None:
    state = RunState(name="run", steps=3)
    for name in "abcde":
        state.apply(facts.EngineJoined(name, f"http://{name}"))
    for name in "abde":
        state.apply(facts.Rejoined(name, 1))
    state.apply(facts.Quarantined("a", "dead"))
    state.apply(facts.EngineLeft("a", "was out of reach for 60 s", 0))
    status = state.status()
    assert status.members == MemberChanges(("b", "c", "d", "e"), ("c",), 1) and not status.quarantined
    drawn = Console(file=io.StringIO(), width=100)
    drawn.print(panel(status))
    assert "b, c, d, e joined (c yet to get the weights), 1 left" in drawn.file.getvalue()  # type: ignore[attr-defined]
