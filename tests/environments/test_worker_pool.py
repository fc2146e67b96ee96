"""Which worker runs which rollout, and who is to blame when one hangs or dies. On virtual time, with workers that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest

from midflight.environments.worker_pool import (
    BEAT_SECONDS,
    GRACE_SECONDS,
    LOOK_SECONDS,
    MAX_LEFT,
    REST_SECONDS,
    SILENT_BEATS,
    Assignment,
    HungWorker,
    PoolWorker,
    RolloutPlacement,
    WorkerPool,
)
from midflight.errors import AgentFailed, EnvironmentFailed
from midflight.testing.virtual_time import run_virtual
from midflight.types import Task

STALL = 120.0
SILENT_SECONDS = SILENT_BEATS * BEAT_SECONDS


@dataclass(frozen=True)
class Session:
    session_id: str
    base_url: str = "http://gateway/v1"
    api_key: str = "key"


@dataclass
class Recorder:
    """A gateway that knows who waits for it, and who began again."""

    waiting: set[str] = field(default_factory=set)
    reopened: list[str] = field(default_factory=list)

    def reopen(self, session_id: str) -> Session:
        self.reopened.append(session_id)
        return Session(session_id)

    def awaits(self, session_id: str) -> bool:
        return session_id in self.waiting


@dataclass
class Worker:
    given: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def run(self, job: Assignment) -> None:
        self.given.append(job.session.session_id)

    def cancel(self, session_id: str) -> None:
        self.cancelled.append(session_id)


@dataclass
class Play:
    """A pool and what is asked of it."""

    recorder: Recorder = field(default_factory=Recorder)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = WorkerPool(self.recorder, stall_seconds=STALL, names=("w0", "w1"), say=self.said.append)
        self.rollouts: dict[str, asyncio.Task[float | None]] = {}
        self.outlets: dict[str, Worker] = {}

    def worker(self, name: str = "w0") -> PoolWorker:
        return self.pool.join(name, self.outlets.setdefault(name, Worker()))

    async def rollout(self, *names: str) -> None:
        """Starts them, and waits until they have found their place."""
        for name in names:
            self.rollouts[name] = asyncio.ensure_future(self.pool.run(Task(name, "s"), Session(name)))
        await asyncio.sleep(0.001)

    def of(self, name: str) -> list[str]:
        return self.outlets[name].given

    async def outcome(self, name: str) -> object:
        return (await asyncio.gather(self.rollouts[name], return_exceptions=True))[0]


def play(main: Callable[[Play], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        it = Play()
        await main(it)
        for rollout in it.rollouts.values():
            rollout.cancel()
        await asyncio.gather(*it.rollouts.values(), return_exceptions=True)

    run_virtual(run)


async def looking(pool: WorkerPool, *, seconds: float, beating: tuple[PoolWorker, ...] = ()) -> list[HungWorker]:
    """What is found in that time, with a look each second, while these workers beat."""
    found: list[HungWorker] = []
    for _ in range(int(seconds)):
        await asyncio.sleep(LOOK_SECONDS)
        for worker in beating:
            pool.hear(worker)
        found += pool.look()
    return found


async def beating(pool: WorkerPool, *workers: PoolWorker, seconds: float) -> None:
    for _ in range(int(seconds)):
        for worker in workers:
            pool.hear(worker)
        await asyncio.sleep(1)


def test_rollouts_wait_in_line_for_a_worker_and_that_time_is_excused() -> None:
    async def main(it: Play) -> None:
        await it.rollout("a", "b")
        await asyncio.sleep(7)
        assert it.pool.excused("a") == pytest.approx(7, abs=0.01)
        worker = it.worker()
        assert it.of("w0") == ["a", "b"]
        await beating(it.pool, worker, seconds=5)
        assert it.pool.excused("a") == pytest.approx(7, abs=0.01)
        it.pool.ended(worker, "a", result=0.5)
        it.pool.ended(worker, "b", error=AgentFailed("LookupError: no"))
        assert await it.outcome("a") == 0.5 and str(await it.outcome("b")) == "LookupError: no"
        assert it.pool.excused("a") == 0

    play(main)


def test_a_task_that_is_no_json_fails_alone_and_names_itself() -> None:
    async def main(it: Play) -> None:
        it.worker()
        with pytest.raises(EnvironmentFailed, match="giving task odd of s to a worker: Object of type set is not JSON"):
            await it.pool.run(Task("odd", "s", {"words": {1, 2}}), Session("odd"))  # type: ignore[dict-item]

    play(main)


def test_each_goes_to_the_worker_with_the_fewest_and_one_that_is_over_is_cancelled_there() -> None:
    async def main(it: Play) -> None:
        it.worker("w0"), it.worker("w1")
        await it.rollout("a", "b", "c", "d")
        assert (it.of("w0"), it.of("w1")) == (["a", "c"], ["b", "d"])
        it.rollouts["b"].cancel()
        await asyncio.sleep(0.001)
        assert it.outlets["w1"].cancelled == ["b"]

    play(main)


def test_i8_who_waited_for_the_gateway_begins_again_elsewhere_and_who_did_not_begins_again_alone() -> None:
    async def main(it: Play) -> None:
        first = it.worker("w0")
        await it.rollout("waits", "acts", "acts too")
        await asyncio.sleep(2)
        it.recorder.waiting = {"waits"}
        other = it.worker("w1")
        it.pool.leave(first)
        await asyncio.sleep(0.001)
        assert sorted(it.recorder.reopened) == ["acts", "acts too", "waits"]
        assert it.pool.excused("waits") == pytest.approx(2, abs=0.01), "what is done again costs no deadline"
        assert it.of("w1") == ["waits"], "the others wait for a worker that has none"
        third = it.worker("w2")
        assert it.of("w2") == ["acts"]
        it.pool.leave(third)
        failed = await it.outcome("acts")
        assert isinstance(failed, AgentFailed) and "w2 ended while this agent ran in it" in str(failed)
        fourth = it.worker("w3")
        assert it.of("w3") == ["acts too"]
        await it.rollout("new")
        assert it.of("w1") == ["waits", "new"], "nobody joins one that is to be alone"
        it.pool.ended(fourth, "acts too", result=1.0)
        it.pool.ended(other, "waits", result=0.0)
        assert (await it.outcome("acts too"), await it.outcome("waits")) == (1.0, 0.0)

    play(main)


def test_the_only_rollout_of_a_dead_worker_has_failed_unless_it_waited_for_the_gateway() -> None:
    async def main(it: Play) -> None:
        worker = it.worker()
        await it.rollout("a")
        it.pool.leave(worker)
        assert isinstance(await it.outcome("a"), AgentFailed)
        it.recorder.waiting = {"b"}
        worker = it.worker()
        await it.rollout("b")
        for _ in range(3):
            assert not it.rollouts["b"].done()
            it.pool.leave(worker)
            await asyncio.sleep(0.001)
            worker = it.worker()
        assert isinstance(await it.outcome("b"), AgentFailed), "three workers are enough"

    play(main)


def test_a_blocked_loop_costs_the_blocker_its_deadline_and_nobody_else_theirs() -> None:
    async def main(it: Play) -> None:
        worker = it.worker()
        await it.rollout("blocks", "innocent")
        await asyncio.sleep(2)
        it.pool.blocked("w0", "blocks", where="sleep (agent.py:3)", seconds=2)
        assert not await looking(it.pool, seconds=58), "its deadline has not passed"
        assert it.pool.excused("blocks") == 0
        assert it.pool.excused("innocent") == pytest.approx(60, abs=0.1)
        it.rollouts["blocks"].cancel()  # the deadline
        assert not await looking(it.pool, seconds=GRACE_SECONDS)
        (hung,) = await looking(it.pool, seconds=3)
        assert hung.name == "w0" and "in sleep (agent.py:3)" in hung.why, "said once"
        it.pool.leave(worker)
        it.worker("w0")
        await asyncio.sleep(0.001)
        assert it.of("w0") == ["blocks", "innocent", "innocent"]
        assert "each rollout is alone" in it.said[0]

    play(main)


def test_a_silence_that_ends_is_nobodys_time_but_the_blockers() -> None:
    async def main(it: Play) -> None:
        worker = it.worker()
        await it.rollout("blocks", "innocent")
        it.pool.blocked("w0", "blocks", where="", seconds=1)
        await asyncio.sleep(SILENT_SECONDS + 2)
        it.pool.hear(worker)
        assert it.pool.excused("innocent") == pytest.approx(SILENT_SECONDS + 2, abs=0.1) and it.pool.excused("blocks") == 0
        it.pool.blocked("w0", "blocks", where="", seconds=STALL - 1)
        assert not it.said
        it.pool.blocked("w0", "blocks", where="", seconds=STALL)
        assert it.pool.alone
        await it.rollout("next")
        assert it.of("w0") == ["blocks", "innocent"], "it waits for a worker without any"
        it.pool.ended(worker, "blocks", result=1.0)
        it.pool.ended(worker, "innocent", result=1.0)
        assert it.of("w0")[-1] == "next"

    play(main)


def test_an_agent_that_holds_up_others_for_the_stall_seconds_goes_on_alone_and_nobody_has_failed() -> None:
    async def main(it: Play) -> None:
        worker = it.worker()
        await it.rollout("blocks", "innocent")
        it.pool.blocked("w0", "blocks", where="sleep (agent.py:3)", seconds=1)
        assert not await looking(it.pool, seconds=STALL - 1)
        (hung,) = await looking(it.pool, seconds=3)
        assert "blocks the event loop of w0 since 120 s, in sleep (agent.py:3), and holds up 1 others" in hung.why
        it.pool.leave(worker)
        await asyncio.sleep(0.001)
        assert it.recorder.reopened == ["blocks", "innocent"]
        first, second = it.worker("w0"), it.worker("w1")
        assert [len(worker.jobs) for worker in (first, second)] == [1, 1], "each is alone"
        (alone,) = (worker for worker in (first, second) if "blocks" in worker.jobs)
        it.pool.blocked(alone.name, "blocks", where="", seconds=1)
        other = second if alone is first else first
        assert not await looking(it.pool, seconds=3 * STALL, beating=(other,)), "alone it has all of its deadline"

    play(main)


def test_words_that_come_late_from_a_busy_machine_are_excused_for_all_but_a_blocker() -> None:
    """Beats that should come every second come after 1, 2.5 and 2.2 s; before the last the loop is blocked by one agent."""

    async def main(it: Play) -> None:
        worker = it.worker()
        await it.rollout("blocks", "innocent")
        await asyncio.sleep(1)
        it.pool.hear(worker)
        assert it.pool.excused("blocks") == pytest.approx(0, abs=0.01)
        await asyncio.sleep(2.5)
        it.pool.hear(worker)
        assert it.pool.excused("blocks") == pytest.approx(1.5, abs=0.01)
        await asyncio.sleep(2.2)
        it.pool.blocked("w0", "blocks", where="", seconds=1)
        it.pool.hear(worker)
        assert it.pool.excused("blocks") == pytest.approx(1.5, abs=0.01)
        assert it.pool.excused("innocent") == pytest.approx(2.7, abs=0.01)

    play(main)


def test_the_wait_of_programs_for_a_processor_is_excused_once_also_in_tools_and_in_a_silence() -> None:
    async def main(it: Play) -> None:
        it.recorder.waiting.add("a")
        worker = it.worker()
        await it.rollout("a")
        before = it.pool.excused("a")
        it.pool.in_tools(worker, "a", 30.0)
        await asyncio.sleep(1)
        it.pool.wait_for_processor(worker, "a", waits=True)
        await asyncio.sleep(100)
        assert it.pool.excused("a") - before == pytest.approx(100) and it.pool.tool_seconds("a") == pytest.approx(1)
        it.pool.hear(worker)
        assert it.pool.excused("a") - before == pytest.approx(100)
        it.pool.wait_for_processor(worker, "a", waits=False)
        await asyncio.sleep(2)
        assert it.pool.excused("a") - before == pytest.approx(100) and it.pool.tool_seconds("a") == pytest.approx(3)
        it.pool.wait_for_processor(worker, "ended long ago", waits=True)
        it.pool.wait_for_processor(worker, "a", waits=True)
        it.pool.leave(worker)
        await asyncio.sleep(50)
        it.worker()
        await asyncio.sleep(2)
        assert it.pool.excused("a") == pytest.approx(153, abs=0.01), "it began again, and does not wait any more"

    play(main)


def test_who_blocks_its_loop_is_not_excused_for_a_program_whose_end_nobody_could_tell() -> None:
    async def main(it: Play) -> None:
        worker = it.worker()
        await it.rollout("a")
        it.pool.wait_for_processor(worker, "a", waits=True)
        await asyncio.sleep(2)
        it.pool.blocked("w0", "a", where="", seconds=1)
        await asyncio.sleep(20)
        assert it.pool.excused("a") == pytest.approx(2, abs=0.01)

    play(main)


def test_tools_count_up_to_their_limit_and_are_forgotten_when_the_agent_begins_again() -> None:
    async def main(it: Play) -> None:
        it.recorder.waiting.add("a")
        worker = it.worker()
        await it.rollout("a")
        assert it.pool.tool_seconds("a") == it.pool.tool_seconds("nobody") == 0
        it.pool.in_tools(worker, "a", 30.0)
        await asyncio.sleep(10)
        assert it.pool.tool_seconds("a") == pytest.approx(10)
        it.pool.in_tools(worker, "a", None)
        await asyncio.sleep(10)
        it.pool.in_tools(worker, "a", 30.0)
        await asyncio.sleep(100)
        assert it.pool.tool_seconds("a") == pytest.approx(40)
        it.pool.in_tools(worker, "ended long ago", None)
        it.pool.leave(worker)
        await asyncio.sleep(0.001)
        assert it.pool.tool_seconds("a") == 0

    play(main)


def test_an_agent_that_blocks_its_loop_while_the_gateway_answers_it_hangs_as_little_as_the_gateway() -> None:
    async def main(it: Play) -> None:
        it.worker()
        await it.rollout("asks", "innocent")
        it.recorder.waiting = {"asks"}
        it.pool.blocked("w0", "asks", where="", seconds=1)
        assert not await looking(it.pool, seconds=10 * STALL)

    play(main)


def test_a_worker_of_which_nobody_knows_why_it_is_silent_is_ended_after_the_launcher_would_have() -> None:
    async def main(it: Play) -> None:
        it.worker()
        await it.rollout("a", "b")
        assert not await looking(it.pool, seconds=STALL + REST_SECONDS - 1)
        (hung,) = await looking(it.pool, seconds=3)
        assert hung.name == "w0" and "its connection is lost" in hung.why

    play(main)


def test_the_only_rollout_of_a_silent_worker_has_no_deadline_until_it_is_known_to_block_it() -> None:
    async def main(it: Play) -> None:
        worker = it.worker()
        await it.rollout("a")
        await asyncio.sleep(60)
        assert it.pool.excused("a") == pytest.approx(60, abs=0.1)
        it.pool.hear(worker)
        assert it.pool.excused("a") == pytest.approx(60, abs=0.1)

    play(main)


def test_of_a_worker_that_was_stopped_nobody_is_to_blame_and_all_begin_again_elsewhere_with_any_others() -> None:
    async def main(it: Play) -> None:
        worker, names = it.worker("w0"), ["a", "b", "c"]
        await it.rollout(*names)
        for _ in range(4):
            it.pool.spare("w0")
            await it.rollout("late")
            assert it.of("w0")[-1] != "late", "one that is about to end gets nothing"
            it.pool.leave(worker)
            await asyncio.sleep(0.001)
            worker = it.worker("w0")
            it.rollouts.pop("late").cancel()
            await asyncio.sleep(0.001)
            assert set(worker.jobs) == set(names)
        assert not any(it.rollouts[name].done() for name in names) and not it.pool.alone

    play(main)


def test_a_busy_machine_whose_words_come_late_loses_no_worker_for_that() -> None:
    """The rollout process itself looks late and hears late: first by a little, then by more than the stall seconds."""

    async def main(it: Play) -> None:
        first, second = it.worker("w0"), it.worker("w1")
        await it.rollout("a", "b")
        for pause in (1, 5, 20, 60, 115, 170, 200, 200, 1, 1):
            await asyncio.sleep(pause)
            assert not it.pool.look(), f"before what came in {pause} s was heard"
            it.pool.hear(first)
            it.pool.hear(second)
            assert not it.pool.look()

    play(main)


def test_a_rollout_in_line_waits_for_the_worker_that_is_missing_and_one_that_runs_is_with_its_own() -> None:
    async def main(it: Play) -> None:
        await it.rollout("a")
        assert it.pool.placement("a") == RolloutPlacement("w0", waits=True)
        first = it.worker("w0")
        assert it.pool.placement("a") == RolloutPlacement("w0")
        await asyncio.sleep(SILENT_SECONDS + 1)
        await it.rollout("b")
        assert it.pool.placement("b") == RolloutPlacement("w1", waits=True)
        it.worker("w1")
        assert it.pool.placement("b") == RolloutPlacement("w1")
        it.pool.leave(first)
        assert it.pool.placement("nobody") == RolloutPlacement("")

    play(main)


def test_agents_that_do_not_end_with_their_rollouts_are_borne_up_to_a_number() -> None:
    async def main(it: Play) -> None:
        worker = it.worker()
        names = [f"r{i}" for i in range(MAX_LEFT)]
        await it.rollout(*names)
        for name in names[:-1]:
            it.rollouts[name].cancel()
        await asyncio.sleep(0.001)
        assert not await looking(it.pool, seconds=GRACE_SECONDS + 1, beating=(worker,))
        it.rollouts[names[-1]].cancel()
        await asyncio.sleep(0.001)
        (hung,) = await looking(it.pool, seconds=GRACE_SECONDS + 1, beating=(worker,))
        assert "did not end with their rollouts" in hung.why
        it.pool.ended(worker, names[0])

    play(main)
