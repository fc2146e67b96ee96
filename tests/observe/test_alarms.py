"""What is said aloud, how often, and what it names."""

from __future__ import annotations

import traceback

import pytest
from tests.facts import Facts
from tests.observe.facts import KEY, Clock, rollout

from midflight.observe.alarms import REPEAT_SECONDS, Alarms
from midflight.observe.failures import MAX_CLASSES, OTHER, Failures, failure_class, own_frames
from midflight.types import Reason
from midflight.types.facts import Alarmed, Evaluated, Quarantined, Rejoined, RolloutEnded, SessionEnded, Stepped


class Watched:
    """Alarms, what they said, and the time."""

    def __init__(self, step_rollouts: int | None = 4) -> None:
        self.facts, self.clock = Facts(), Clock()
        self.alarms = Alarms(self.facts.apply, log="run/logs/rollout.log", step_rollouts=step_rollouts, clock=self.clock)

    def apply(self, fact: object) -> None:
        self.alarms.apply(fact)  # type: ignore[arg-type]

    def fail(self, error: str | None, trace: str | None = None) -> None:
        self.apply(RolloutEnded(KEY, "spell", None, num_tokens=3, num_versions=1, seconds=0.5, error=error, trace=trace))

    def said(self, name: str) -> list[str]:
        return [alarm.text for alarm in self.facts.of(Alarmed) if alarm.name == name]


def trace_of(error: Exception) -> str:
    try:
        raise error
    except Exception as raised:
        return "".join(traceback.format_exception(raised))


def test_the_first_failure_of_each_class_is_said_with_the_users_own_lines_and_the_rest_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for _ in range(3):
        watched.fail("ZeroDivisionError: division by zero", trace_of(ZeroDivisionError("division by zero")))
    watched.fail("KeyError: 'answer'", trace_of(KeyError("answer")))
    watched.fail(None)
    first, second, third = watched.said("failure")
    assert first.splitlines()[0] == "a rollout of spell got no reward, the first by ZeroDivisionError: division by zero"
    assert first.splitlines()[1].endswith("in trace_of: raise error") and "test_alarms.py:" in first.splitlines()[1]
    assert first.splitlines()[2] == "  the whole traceback: run/logs/rollout.log" and len(first.splitlines()) == 3
    assert "KeyError: 'answer'" in second and third.splitlines() == ["a rollout of spell got no reward, the first by a reward of None"]
    assert [record.message.count("Traceback") for record in caplog.records] == [1, 1]


def test_an_environment_that_fails_half_the_time_is_said_again_only_after_a_while() -> None:
    watched = Watched()
    for _ in range(40):
        watched.fail("ToolError: gone")
        rollout(watched, 1.0)
    (said,) = watched.said("failures")
    assert said.startswith("8 of the last 15 rollouts got no reward: 8 ToolError.")
    watched.clock.now += REPEAT_SECONDS
    watched.fail("ToolError: gone")
    assert len(watched.said("failures")) == 2 and len(watched.said("failure")) == 1


def test_one_failure_in_twenty_is_no_alarm_but_is_said_once() -> None:
    watched = Watched()
    for number in range(400):
        watched.fail("ToolError: gone") if number % 20 == 0 else rollout(watched, number % 2)
    assert not watched.said("failures") and len(watched.said("failure")) == 1


def test_a_scored_rollout_without_a_model_call_names_what_the_agent_should_use() -> None:
    watched = Watched()
    for _ in range(5):
        rollout(watched, 1.0, num_turns=0)
    (said,) = watched.said("no_model_call")
    assert "base_url=client.base_url" in said and "scored 1.000 without an answer" in said


def test_equal_rewards_are_said_after_three_steps_of_them() -> None:
    watched = Watched(step_rollouts=4)
    for reward in [0.0] * 11 + [1.0] + [0.0] * 11:
        rollout(watched, reward)
    assert not watched.said("rewards_equal")
    rollout(watched, 0.0)
    (said,) = watched.said("rewards_equal")
    assert said.startswith("the last 12 rollouts (3 steps) all got reward 0.000")


def test_a_run_that_learns_from_a_teacher_alone_may_have_equal_rewards() -> None:
    watched = Watched(step_rollouts=None)
    for _ in range(500):
        rollout(watched, 0.0)
    assert not watched.facts


@pytest.mark.parametrize(("num_failed", "is_said"), [(3, False), (4, True)])
def test_an_evaluation_of_which_more_than_a_twentieth_failed_is_said(num_failed: int, is_said: bool) -> None:
    watched = Watched()
    watched.apply(Evaluated(7, "spell", 64 - num_failed, 0.8, num_failed, "ToolError: gone"))
    said = watched.said("evaluation_incomplete")
    assert bool(said) is is_said
    if is_said:
        assert said[0].startswith("the held-out score of spell at version 7 is 0.800 over 60 of 64 tasks; 4 failed (ToolError: gone).")


def test_an_engine_that_falls_out_and_comes_back_is_said_and_one_that_flaps_is_not_said_each_time() -> None:
    watched = Watched()
    for _ in range(5):
        watched.apply(Quarantined("engine1", "EngineUnavailable: it does not answer\nmore"))
        watched.apply(Rejoined("engine1", 4))
    assert watched.said("engine_lost") == ["engine1 gets no more requests: EngineUnavailable: it does not answer"]
    assert watched.said("engine_back") == ["engine1 gets requests again, at version 4"]


def test_classes_are_names_of_exceptions_and_of_bounded_number() -> None:
    assert failure_class("openai.APIError: 503 - busy") == "openai.APIError"
    assert failure_class("asked of version 3 alone, it was answered by version 2: odd") == OTHER
    failures = Failures()
    for number in range(100):
        failures.add(f"Error{number}: x")
    assert len(failures.counts) == MAX_CLASSES + 1 and failures.counts[OTHER] == 100 - MAX_CLASSES


def test_without_a_line_of_the_user_the_last_place_is_shown() -> None:
    trace = 'Traceback (most recent call last):\n  File "/x/site-packages/lib.py", line 3, in call\n    go()\n    ^^\nE: x\n'
    assert own_frames(trace) == ["/x/site-packages/lib.py:3 in call: go()"]
    assert own_frames("E: x") == []
    assert own_frames(trace.replace("site-packages", "own").replace("go()", "g" * 500))[0].endswith("g…")


def test_steps_far_from_their_policy_are_said_with_their_readings_and_not_again_for_a_while() -> None:
    watched = Watched()
    for version in range(1, 13):
        far = () if version in (1, 3) else ("k1 is 0.5, beyond 0.1",)
        watched.apply(Stepped(version, version, 0.0, 1.0, num_tokens=5, metrics={}, alarms=far))
    (said,) = watched.said("off_policy")
    assert (
        said.startswith("the step to version 11, the last of 8 in a row: k1 is 0.5, beyond 0.1. ") and "lower rollout.max_staleness" in said
    )


def session(*, num_trainable: int, masked: int, **by: int) -> SessionEnded:
    fates = {Reason.NOT_POLICY_SAMPLED: masked} if masked else {}
    return SessionEnded(1, 0, 0, 0, num_trainable=num_trainable, masked=fates, masked_by=by)


def test_a_session_of_which_everything_is_masked_is_said_with_the_field_that_caused_it() -> None:
    watched = Watched()
    watched.apply(session(num_trainable=0, masked=0))
    watched.apply(session(num_trainable=3, masked=500, temperature=500))
    assert watched.said("all_masked") == []
    watched.apply(session(num_trainable=0, masked=503, temperature=503))
    watched.apply(session(num_trainable=0, masked=342, temperature=342))
    (said,) = watched.said("all_masked")
    assert said.startswith("all 503 tokens of a session are masked (not_policy_sampled), because of temperature: nothing of it is trained.")
    assert 'gateway.sampling = "run"' in said
    watched.apply(session(num_trainable=0, masked=9, response_format=9))
    assert len(watched.said("all_masked")) == 2, "another field is another cause"
