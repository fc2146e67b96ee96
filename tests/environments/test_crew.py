"""Which worker runs which rollout, and who is to blame when one hangs or dies. On virtual time, with workers that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import pytest

from midflight.environments.crew import BLOCKING_SECONDS, GRACE_SECONDS, MAX_LEFT, SILENT_SECONDS, UNSEEN_SECONDS, Assignment, Crew, Seat
from midflight.errors import AgentFailed, EnvironmentFailed
from midflight.testing.virtual_time import run_virtual
from midflight.types import Task


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
    """A crew and what is asked of it."""

    recorder: Recorder = field(default_factory=Recorder)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.crew = Crew(self.recorder, say=self.said.append)
        self.rollouts: dict[str, asyncio.Task[float | None]] = {}
        self.outlets: dict[str, Worker] = {}

    def worker(self, name: str = "w0") -> Seat:
        return self.crew.join(name, self.outlets.setdefault(name, Worker()))

    async def rollout(self, *names: str) -> None:
        """Starts them, and waits until they have found their place."""
        for name in names:
            self.rollouts[name] = asyncio.ensure_future(self.crew.run(Task(name, "s"), Session(name)))
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


async def beating(crew: Crew, *seats: Seat, seconds: float) -> None:
    for _ in range(int(seconds)):
        for seat in seats:
            crew.hear(seat)
        await asyncio.sleep(1)


def test_rollouts_wait_in_line_for_a_worker_and_that_time_is_excused() -> None:
    async def main(it: Play) -> None:
        await it.rollout("a", "b")
        await asyncio.sleep(7)
        assert it.crew.excused("a") == pytest.approx(7, abs=0.01)
        seat = it.worker()
        assert it.of("w0") == ["a", "b"]
        await beating(it.crew, seat, seconds=5)
        assert it.crew.excused("a") == pytest.approx(7, abs=0.01)
        it.crew.ended(seat, "a", result=0.5)
        it.crew.ended(seat, "b", error=AgentFailed("LookupError: no"))
        assert await it.outcome("a") == 0.5 and str(await it.outcome("b")) == "LookupError: no"
        assert it.crew.excused("a") == 0

    play(main)


def test_a_task_that_is_no_json_fails_alone_and_names_itself() -> None:
    async def main(it: Play) -> None:
        it.worker()
        with pytest.raises(EnvironmentFailed, match="giving task odd of s to a worker: Object of type set is not JSON"):
            await it.crew.run(Task("odd", "s", {"words": {1, 2}}), Session("odd"))  # type: ignore[dict-item]

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
        it.crew.leave(first)
        await asyncio.sleep(0.001)
        assert sorted(it.recorder.reopened) == ["acts", "acts too", "waits"]
        assert it.crew.excused("waits") == pytest.approx(2, abs=0.01), "what is done again costs no deadline"
        assert it.of("w1") == ["waits"], "the others wait for a worker that has none"
        third = it.worker("w2")
        assert it.of("w2") == ["acts"]
        it.crew.leave(third)
        failed = await it.outcome("acts")
        assert isinstance(failed, AgentFailed) and "w2 ended while this agent ran in it" in str(failed)
        fourth = it.worker("w3")
        assert it.of("w3") == ["acts too"]
        await it.rollout("new")
        assert it.of("w1") == ["waits", "new"], "nobody joins one that is to be alone"
        it.crew.ended(fourth, "acts too", result=1.0)
        it.crew.ended(other, "waits", result=0.0)
        assert (await it.outcome("acts too"), await it.outcome("waits")) == (1.0, 0.0)

    play(main)


def test_the_only_rollout_of_a_dead_worker_has_failed_unless_it_waited_for_the_gateway() -> None:
    async def main(it: Play) -> None:
        seat = it.worker()
        await it.rollout("a")
        it.crew.leave(seat)
        assert isinstance(await it.outcome("a"), AgentFailed)
        it.recorder.waiting = {"b"}
        seat = it.worker()
        await it.rollout("b")
        for _ in range(3):
            assert not it.rollouts["b"].done()
            it.crew.leave(seat)
            await asyncio.sleep(0.001)
            seat = it.worker()
        assert isinstance(await it.outcome("b"), AgentFailed), "three workers are enough"

    play(main)


def test_a_blocked_loop_costs_the_blocker_its_deadline_and_nobody_else_theirs() -> None:
    async def main(it: Play) -> None:
        seat = it.worker()
        await it.rollout("blocks", "innocent")
        await asyncio.sleep(2)
        it.crew.blocked("w0", "blocks", where="sleep (agent.py:3)", seconds=2)
        await asyncio.sleep(58)
        assert it.crew.excused("blocks") == 0
        assert it.crew.excused("innocent") == pytest.approx(60, abs=0.1)
        assert not it.crew.look(), "its deadline has not passed"
        it.rollouts["blocks"].cancel()  # the deadline
        await asyncio.sleep(GRACE_SECONDS - 1)
        assert not it.crew.look()
        await asyncio.sleep(2)
        (hung,) = it.crew.look()
        assert hung.name == "w0" and "in sleep (agent.py:3)" in hung.why and not it.crew.look(), "said once"
        it.crew.leave(seat)
        it.worker("w0")
        await asyncio.sleep(0.001)
        assert it.of("w0") == ["blocks", "innocent", "innocent"]
        assert "each rollout is alone" in it.said[0]

    play(main)


def test_a_silence_that_ends_is_nobodys_time_but_the_blockers() -> None:
    async def main(it: Play) -> None:
        seat = it.worker()
        await it.rollout("blocks", "innocent")
        it.crew.blocked("w0", "blocks", where="", seconds=1)
        await asyncio.sleep(SILENT_SECONDS + 2)
        it.crew.hear(seat)
        assert it.crew.excused("innocent") == pytest.approx(SILENT_SECONDS + 2, abs=0.1) and it.crew.excused("blocks") == 0
        assert not it.said
        it.crew.blocked("w0", "blocks", where="", seconds=BLOCKING_SECONDS)
        assert it.crew.alone
        await it.rollout("next")
        assert it.of("w0") == ["blocks", "innocent"], "it waits for a worker without any"
        it.crew.ended(seat, "blocks", result=1.0)
        it.crew.ended(seat, "innocent", result=1.0)
        assert it.of("w0")[-1] == "next"

    play(main)


def test_a_worker_of_which_nobody_knows_why_it_is_silent_is_ended_after_a_minute() -> None:
    async def main(it: Play) -> None:
        it.worker()
        await it.rollout("a", "b")
        await asyncio.sleep(UNSEEN_SECONDS - 1)
        assert not it.crew.look()
        await asyncio.sleep(2)
        assert [hung.name for hung in it.crew.look()] == ["w0"]

    play(main)


def test_agents_that_do_not_end_with_their_rollouts_are_borne_up_to_a_number() -> None:
    async def main(it: Play) -> None:
        seat = it.worker()
        names = [f"r{i}" for i in range(MAX_LEFT)]
        await it.rollout(*names)
        for name in names[:-1]:
            it.rollouts[name].cancel()
        await asyncio.sleep(0.001)
        await beating(it.crew, seat, seconds=GRACE_SECONDS + 1)
        assert not it.crew.look()
        it.rollouts[names[-1]].cancel()
        await asyncio.sleep(0.001)
        await beating(it.crew, seat, seconds=GRACE_SECONDS + 1)
        assert "did not end with their rollouts" in it.crew.look()[0].why
        it.crew.ended(seat, names[0])

    play(main)
