"""Several observers as one."""

from __future__ import annotations

import logging

import pytest
from tests.facts import Facts
from tests.observe.facts import KEY, Observer, batch, commit, decode, rollout, step

from midflight.observe.observers import Observers
from midflight.types import Group, Reason
from midflight.types.facts import (
    Alarmed,
    Evaluated,
    Fact,
    GroupClosed,
    GroupFinished,
    Quarantined,
    Rejoined,
    RequestFailed,
    SessionEnded,
    TurnFinished,
    Waited,
)


def tell_everything(observer: Observer) -> None:
    decode(observer, 1.0, 2.0)
    observer.apply(TurnFinished(session_id="s", num_prompt_tokens=3, num_output_tokens=4, num_versions=2, num_resumes=1, seconds=0.1))
    observer.apply(SessionEnded(num_turns=3, num_branches=1, num_rewritten=1, num_mismatches=0))
    observer.apply(RequestFailed(session_id=None, status=503, error="no engine"))
    rollout(observer, None, error="KeyError: 'answer'")
    observer.apply(Alarmed(name="failure", text="look"))
    observer.apply(GroupFinished(Group(KEY.group, "task", "spell_backward", ()), order=1))
    observer.apply(GroupClosed(key=KEY.group, reason=Reason.STALE, num_tokens=9))
    observer.apply(Waited(who="trainer", for_whom="engines", seconds=1.5))
    batch(observer, 3, {0: 5, 2: 7})
    step(observer, 4, loss=0.25)
    commit(observer, 4)
    observer.apply(Quarantined(engine="engine0", error="died"))
    observer.apply(Rejoined(engine="engine0", version=4))
    observer.apply(Evaluated(version=4, source="a", num_tasks=10, mean_reward=0.75))


def test_one_failing_observer_hurts_neither_the_run_nor_the_others_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(fact: Fact) -> None:
        raise OSError("disk full")

    seen = Facts()
    with caplog.at_level(logging.ERROR):
        tell_everything(Observers([fail, seen.apply]))
    assert len(seen) == 15
    assert len(caplog.records) == 1 and "disk full" in caplog.text
