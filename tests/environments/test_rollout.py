"""The rollout of one agent: whatever happens, its session is closed and nothing false becomes a reward (I10)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import weakref

import pytest

from midflight.environments import rollout
from midflight.environments.rollout import GRACE_SECONDS
from midflight.environments.rollout_time import RolloutTime
from midflight.environments.single_turn import answer
from midflight.errors import BadReward, ConfigError, RunFailed
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, Reason, RolloutKey

from .fakes import FakeClient, FakeSessions, Rig, task

KEY = RolloutKey(GroupKey(0, 5), 2)


OWN = pytest.mark.parametrize("own", [False, True])
"""With a task of the agent's own, and in that of the rollout."""


def run(rig: Rig, *, of=None, **options):
    return run_virtual(lambda: rig.runner(**options).run(KEY, of or task()))


def test_a_rollout_gives_reward_rows_and_time():
    rig = Rig(answer, client=FakeClient(" olleh ", seconds=2.5))
    trajectory = run(rig)
    assert (trajectory.key, trajectory.task_id, trajectory.source) == (KEY, "17", "spell")
    assert (trajectory.reward, trajectory.error, trajectory.seconds, trajectory.truncated) == (1.0, None, 2.5, True)
    assert trajectory.num_trainable == 3 and rig.sessions.closed == {"s0": 1}
    assert rig.client.requests == [{"model": "policy", "messages": [{"role": "user", "content": "Spell hello backward"}]}]


def test_a_rollout_is_observed_with_its_tokens_and_versions_and_the_gateways_fates_are_passed_on():
    rig = Rig(answer)
    run(rig)
    (seen,) = rig.observer.rollouts
    assert (seen.key, seen.reward, seen.num_tokens, seen.num_versions, seen.error) == (KEY, 1.0, 3 + 2, 2, None)
    assert (seen.num_turns, seen.truncated, seen.trace) == (1, True, None)
    assert rig.fates.masked == {Reason.NOT_POLICY_SAMPLED: 2} and rig.fates.dropped == {Reason.OVERSHOOT: 1} and not rig.fates.discarded


@OWN
def test_nothing_of_a_rollout_is_left_to_the_collector(own: bool):
    async def environment(task, client):
        await asyncio.sleep(1)
        return 1.0

    rig = Rig(environment)

    async def one() -> weakref.ref[RolloutTime]:
        runner = rig.runner(own=own)
        running = asyncio.ensure_future(runner.run(KEY, task()))
        await asyncio.sleep(0.5)
        (time,) = [weakref.ref(time) for time in runner.times.values()]
        await running
        return time

    gc.collect()
    gc.disable()
    try:
        assert run_virtual(one)() is None
    finally:
        gc.enable()


@OWN
def test_i10_an_exception_of_the_environment_is_no_reward(own: bool):
    async def broken(task, client):
        raise ZeroDivisionError("the scorer broke")

    rig = Rig(broken)
    trajectory = run(rig, own=own)
    assert trajectory.reward is None and trajectory.error == "ZeroDivisionError: the scorer broke"
    assert rig.sessions.closed == {"s0": 1} and rig.observer.rollouts[0].error == trajectory.error
    trace = rig.observer.rollouts[0].trace or ""
    assert trace.endswith("ZeroDivisionError: the scorer broke\n") and f'File "{__file__}"' in trace


def test_the_secret_of_a_sessions_address_is_in_no_message():
    async def refused(task, client):
        raise OSError("404 of http://127.0.0.1:1/s/k1.Sup3rS3cret/v1")

    rig = Rig(refused)
    assert run(rig).error == "OSError: 404 of http://127.0.0.1:1/s/k1..../v1"
    assert "of http://127.0.0.1:1/s/k1..../v1\n" in (rig.observer.rollouts[0].trace or "")


@pytest.mark.parametrize("value", [float("nan"), "yes"])
def test_i10_a_bad_reward_is_counted_as_an_error_and_the_rollout_goes_without(value):
    async def environment(task, client):
        return value

    trajectory = run(Rig(environment))
    assert trajectory.reward is None and trajectory.error is not None
    assert trajectory.error.startswith(f"{BadReward.__name__}: scoring task 17 of spell: reward was {value!r}")


def test_a_task_without_the_needed_field_names_field_task_and_what_it_has():
    trajectory = run(Rig(answer), of=task(17, prompt="x", answer="y"))
    assert trajectory.error == (
        "TaskFieldMissing: task 17 of spell has no field 'question' (it has: answer, prompt); "
        "add the field to the task or use another environment."
    )


def test_an_answer_that_is_not_text_is_missing_too():
    trajectory = run(Rig(answer), of=task(17, question="x", answer=None))
    assert "holds None in field 'answer'" in (trajectory.error or "")


def test_i10_a_session_that_cannot_be_opened_is_no_reward():
    rig = Rig(answer, sessions=FakeSessions(max_open=0))
    trajectory = run(rig)
    assert trajectory.reward is None and trajectory.rows == () and "Overloaded" in (trajectory.error or "")
    assert not rig.sessions.closed and len(rig.observer.rollouts) == 1


async def hung(task, client):
    await asyncio.Event().wait()


@OWN
def test_a_hung_environment_is_ended_at_its_deadline_and_counted(own: bool):
    rig = Rig(hung)
    trajectory = run(rig, rollout_seconds=60.0, own=own)
    assert trajectory.reward is None and trajectory.seconds == 60.0
    assert "RolloutTimeout: task 17 of spell" in (trajectory.error or "") and "60 s" in (trajectory.error or "")
    assert rig.sessions.closed == {"s0": 1}


def test_an_environment_that_answers_after_its_deadline_gets_no_reward():
    async def stubborn(task, client):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 1.0

    trajectory = run(Rig(stubborn))
    assert trajectory.reward is None and "RolloutTimeout" in (trajectory.error or "")


def stubborn(way: str, released: asyncio.Event):
    """Agents that no deadline of their own ends."""

    async def hangs_in_finally(task, client):
        try:
            await asyncio.Event().wait()
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()
            await released.wait()

    async def tries_again(task, client):
        while not released.is_set():
            with contextlib.suppress(BaseException):  # as a retry loop with a bare except does
                await asyncio.wait_for(released.wait(), 3)

    return {"finally": hangs_in_finally, "bare except": tries_again}[way]


@pytest.mark.parametrize("way", ["finally", "bare except"])
def test_an_agent_that_refuses_to_end_is_cancelled_twice_and_then_abandoned(way: str):
    async def main():
        released = asyncio.Event()
        rig = Rig(stubborn(way, released))
        trajectory = await rig.runner(rollout_seconds=60.0).run(KEY, task())
        assert rig.sessions.closed == {"s0": 1} and [seen.error for seen in rig.observer.rollouts] == [trajectory.error]
        released.set()
        await asyncio.sleep(10)
        return trajectory

    trajectory = run_virtual(main)
    assert trajectory.reward is None and trajectory.seconds == 60 + 2 * GRACE_SECONDS
    assert (trajectory.error or "").startswith("RolloutAbandoned: task 17 of spell: the agent did not end within 10 s")
    assert f"{__file__}:" in (trajectory.error or ""), "it says where the agent is"


def test_an_agent_that_needs_the_second_cancellation_is_not_abandoned():
    async def slow(task, client):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1000)

    trajectory = run(Rig(slow))
    assert trajectory.seconds == 60 + GRACE_SECONDS and (trajectory.error or "").startswith("RolloutTimeout")


def test_cancelled_from_outside_a_rollout_waits_no_longer_for_its_agent_than_two_graces():
    async def main():
        released = asyncio.Event()
        running = asyncio.create_task(Rig(stubborn("finally", released)).runner().run(KEY, task()))
        await asyncio.sleep(1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        ended = asyncio.get_running_loop().time()
        released.set()
        await asyncio.sleep(1)
        return ended

    assert run_virtual(main) == 1 + 2 * GRACE_SECONDS


def test_too_many_agents_that_refuse_to_end_end_the_run(monkeypatch):
    monkeypatch.setattr(rollout, "MAX_ABANDONED", 2)

    async def main():
        released = asyncio.Event()
        runner = Rig(stubborn("finally", released)).runner()
        with pytest.RaisesGroup(pytest.RaisesExc(RunFailed, match="2 agents refuse to end; the last is that of task 17")):
            async with asyncio.TaskGroup() as group:
                for sample in range(3):
                    group.create_task(runner.run(RolloutKey(GroupKey(0, 0), sample), task()))
        released.set()
        await asyncio.sleep(1)

    run_virtual(main)


def test_an_agent_that_cancels_its_own_task_costs_its_rollout_only():
    async def suicidal(task, client):
        current = asyncio.current_task()
        assert current is not None
        current.cancel()
        await asyncio.sleep(1)

    trajectory = run(Rig(suicidal))
    assert trajectory.reward is None and "CancelledError" in (trajectory.error or "")


def test_a_rollout_that_takes_too_long_says_what_else_may_be_to_blame():
    trajectory = run(Rig(hung), trouble=lambda: "Meanwhile engine0 is in quarantine (out of memory).")
    assert (trajectory.error or "").endswith("of its own. Meanwhile engine0 is in quarantine (out of memory).")


def test_a_timeout_of_the_environments_own_is_told_apart_from_the_deadline():
    async def impatient(task, client):
        async with asyncio.timeout(3):
            await asyncio.Event().wait()

    trajectory = run(Rig(impatient))
    assert trajectory.seconds == 3.0 and (trajectory.error or "").startswith("TimeoutError")


@OWN
def test_cancellation_propagates_closes_the_session_and_drops_its_tokens(own: bool):
    rig = Rig(hung)

    async def main():
        rollout = asyncio.create_task(rig.runner(own=own).run(KEY, task()))
        await asyncio.sleep(1)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    run_virtual(main)
    assert rig.sessions.closed == {"s0": 1} and rig.fates.discarded == {Reason.SHUTDOWN: 3} and not rig.observer.rollouts


def test_a_cancellation_that_the_environment_lets_escape_costs_the_rollout_only():
    async def careless(task, client):
        inner = asyncio.create_task(asyncio.sleep(100))
        await asyncio.sleep(1)
        inner.cancel()
        await inner

    trajectory = run(Rig(careless))
    assert trajectory.reward is None and "CancelledError" in (trajectory.error or "")


def test_an_environment_that_exits_the_interpreter_costs_the_rollout_only():
    async def quits(task, client):
        sys.exit(3)

    assert run(Rig(quits)).error == "SystemExit: 3"


@OWN
def test_an_error_priced_at_the_run_is_raised(own: bool):
    async def misconfigured(task, client):
        raise ConfigError("no judge is configured")

    rig = Rig(misconfigured)
    with pytest.raises(ConfigError):
        run(rig, own=own)
    assert rig.sessions.closed == {"s0": 1} and rig.fates.discarded == {Reason.SHUTDOWN: 3}


def test_none_from_the_environment_is_no_reward_and_no_error():
    async def unscored(task, client):
        return None

    trajectory = run(Rig(unscored))
    assert trajectory.reward is None and trajectory.error is None
