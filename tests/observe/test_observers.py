"""Facts as values, and observers that pass them on."""

from __future__ import annotations

import inspect
import logging

import msgspec
import pytest
from tests.observe.facts import KEY, batch, commit, decode, rollout, step

from midflight.observe.events import Event, Relay, RolloutFinished, StepFinished, deliver
from midflight.observe.observers import Fanout, Recorder, Silent
from midflight.ports import Observer
from midflight.types import Reason


def tell_everything(observer: Observer) -> None:
    decode(observer, 1.0, 2.0)
    observer.turn_finished(session_id="s", num_prompt_tokens=3, num_output_tokens=4, num_versions=2, num_resumes=1, seconds=0.1)
    observer.session_closed(num_turns=3, num_branches=1, num_rewritten=1, num_mismatches=0)
    observer.request_failed(session_id=None, status=503, error="no engine")
    rollout(observer, None)
    observer.group_finished(key=KEY.group, num_trajectories=8, mean_reward=0.5)
    observer.group_dropped(key=KEY.group, reason=Reason.STALE, num_tokens=9)
    observer.waited(who="trainer", for_whom="engines", seconds=1.5)
    batch(observer, 3, {0: 5, 2: 7})
    step(observer, 4, loss=0.25)
    commit(observer, 4)
    observer.engine_quarantined(engine="engine0", error="died")
    observer.engine_rejoined(engine="engine0", version=4)
    observer.evaluated(version=4, source="a", num_tasks=10, mean_reward=0.75)


def test_every_method_of_the_port_becomes_one_event() -> None:
    recorder = Recorder()
    tell_everything(recorder)
    methods = [name for name, _ in inspect.getmembers(Observer, inspect.isfunction) if not name.startswith("_")]
    assert sorted(str(event.__struct_config__.tag) for event in recorder.events) == sorted(methods)


def test_events_are_the_same_after_a_trip_between_processes_and_can_be_told_again() -> None:
    first, second = Recorder(), Recorder()
    tell_everything(first)
    for event in msgspec.msgpack.decode(msgspec.msgpack.encode(first.events), type=list[Event]):
        deliver(event, second)
    assert second.events == first.events


def test_a_recorder_finds_events_of_one_kind() -> None:
    recorder = Recorder()
    tell_everything(recorder)
    assert [event.version for event in recorder.of(StepFinished)] == [4]
    assert [event.reward for event in recorder.of(RolloutFinished)] == [None]


def test_silence_takes_everything() -> None:
    tell_everything(Silent())


def test_one_failing_observer_hurts_neither_the_run_nor_the_others_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise OSError("disk full")

    recorder = Recorder()
    with caplog.at_level(logging.ERROR):
        tell_everything(Fanout([Relay(fail), recorder]))
    assert len(recorder.events) == 14
    assert len(caplog.records) == 1 and "disk full" in caplog.text
