"""Programs of sandboxes on this machine wait for a processor, and nothing counts that wait against them or their rollout."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.environments.test_sandboxes import made, opened

from midflight.config.bounds import RolloutBound
from midflight.environments.group_scoring import GroupScorer
from midflight.environments.processor_waits import ProcessorWaits
from midflight.environments.result_checks import UnscoredRollout
from midflight.environments.sandboxes import processors
from midflight.environments.sandboxes.port import ProgramResult, Sandbox
from midflight.environments.sandboxes.processors import Processors
from midflight.environments.tool_time import ToolTime
from midflight.environments.tools import CallableTool, Toolbox
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, Result, RolloutKey, Task

from .fakes import Rig, task

WORKS = "import time\nbegan = time.monotonic()\nwhile time.process_time() < 0.25: pass\nprint(began, time.monotonic())"
"""A program that needs a processor for a quarter of a second, and says when it began and ended."""


@pytest.fixture
def one_processor() -> Iterator[None]:
    """This process may use one processor, and so may its programs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture(params=["bubblewrap", "trusted"])
def kind(request: pytest.FixtureRequest) -> str:
    opened(request.param)
    return request.param


async def many(sandbox: Sandbox, code: str, number: int) -> list[ProgramResult]:
    return await asyncio.gather(*(sandbox.python(code) for _ in range(number)))


def most_at_once(ended: list[ProgramResult]) -> int:
    events: list[tuple[float, int]] = []
    for each in ended:
        began, end = map(float, each.stdout.split())
        events += [(began, 1), (end, -1)]
    running = most = 0
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    return most


@pytest.mark.usefixtures("one_processor")
def test_of_many_programs_at_once_one_runs_and_the_seconds_of_the_others_have_not_begun(kind: str) -> None:
    began = time.monotonic()
    ended = asyncio.run(many(made(kind=kind, seconds=60), WORKS, 12))
    assert {each.ended_by for each in ended} == {None} and most_at_once(ended) == 1
    assert sum(each.seconds for each in ended) <= time.monotonic() - began


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_programs_at_the_same_time_have_a_processor_each() -> None:
    async def both() -> tuple[int, int]:
        async with processors.processor_for(network=False) as one, processors.processor_for(network=False) as other:
            return one, other

    one, other = asyncio.run(both())
    assert one != other and {one, other} <= os.sched_getaffinity(0)


def test_a_program_runs_on_one_processor() -> None:
    opened("bubblewrap")
    (ended,) = asyncio.run(many(made(kind="bubblewrap"), "import os; print(*os.sched_getaffinity(0))", 1))
    assert {int(ended.stdout)} <= os.sched_getaffinity(0)


@pytest.mark.usefixtures("one_processor")
def test_programs_with_the_network_may_wait_for_each_other(tmp_path: Path) -> None:
    async def main() -> list[ProgramResult]:
        sandbox = made(kind="trusted", network=True)
        there = tmp_path / "there"
        waits = f"import os, time\nwhile not os.path.exists({str(there)!r}): time.sleep(0.01)"
        waiting = asyncio.create_task(sandbox.python(waits))
        await asyncio.sleep(0.1)
        return [await sandbox.python(f"open({str(there)!r}, 'w')"), await waiting]

    assert [each.ok for each in asyncio.run(main())] == [True, True]


@pytest.mark.usefixtures("one_processor")
def test_programs_of_other_threads_wait_too() -> None:
    sandbox = made(kind="trusted")
    ended: list[ProgramResult] = []
    threads = [threading.Thread(target=lambda: ended.append(asyncio.run(sandbox.python(WORKS)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 4 and most_at_once(ended) == 1


# --- The line -----------------------------------------------------------------------------------------------------------


class Line:
    """Programs that hold their processor until they are told to end."""

    def __init__(self) -> None:
        self.processors = Processors()
        self.began: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def _run(self, name: str) -> None:
        async with self.processors.one():
            self.began.append(name)
            await self.ends[name].wait()

    async def start(self, *names: str) -> list[asyncio.Task[None]]:
        self.ends.update({name: asyncio.Event() for name in names})
        tasks = [asyncio.create_task(self._run(name)) for name in names]
        await asyncio.sleep(1)
        return tasks

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await asyncio.sleep(1)


@pytest.fixture
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda _: {4, 7})


@pytest.mark.usefixtures("two_processors")
def test_the_first_that_came_is_the_next_and_who_is_cancelled_takes_no_place_along() -> None:
    async def main() -> None:
        line = Line()
        first, second, third, _, fifth, _ = await line.start(*"abcdef")
        assert line.began == ["a", "b"]
        third.cancel()
        await asyncio.sleep(1)
        assert third.cancelled() and line.began == ["a", "b"]
        await line.end("b")
        assert second.done() and line.began == ["a", "b", "d"]
        first.cancel()
        await asyncio.sleep(1)
        assert line.began == ["a", "b", "d", "e"]
        line.ends["e"].set()
        await fifth
        await line.end("d")
        assert line.began == ["a", "b", "d", "e", "f"]
        await line.end("f")
        await line.start("g", "h", "i")
        assert line.began[5:] == ["g", "h"]
        for name in "ghi":
            await line.end(name)
        assert line.began[5:] == ["g", "h", "i"]

    run_virtual(main)


@pytest.mark.usefixtures("two_processors")
def test_a_processor_that_was_given_in_the_moment_of_the_cancellation_goes_to_the_next() -> None:
    async def main() -> None:
        line = Line()
        first, _, third, _ = await line.start(*"abcd")
        line.ends["a"].set()
        await first
        third.cancel()
        await asyncio.sleep(1)
        assert line.began == ["a", "b", "d"]
        for name in "bd":
            await line.end(name)

    run_virtual(main)


@pytest.mark.usefixtures("two_processors")
def test_a_loop_that_was_closed_with_waiting_programs_holds_up_no_other() -> None:
    line = Line()
    gone = asyncio.new_event_loop()

    async def main() -> None:
        tasks = await line.start("a", "b")
        left = threading.Thread(target=lambda: gone.run_until_complete(until_it_waits()))
        left.start()
        left.join()
        gone.close()
        await line.start("c")
        await line.end("a")
        assert line.began == ["a", "b", "c"]
        await line.end("b")
        await line.end("c")
        assert all(task.done() for task in tasks)

    async def until_it_waits() -> None:
        abandoned.append(asyncio.ensure_future(line._run("abandoned")))
        await asyncio.sleep(0.01)

    abandoned: list[asyncio.Future[None]] = []
    run_virtual(main)
    assert not abandoned[0].done()


# --- What the wait costs a rollout ----------------------------------------------------------------------------------


async def waits_for_a_processor(line: Processors, seconds: float) -> None:
    """Another program has the processor for so long."""

    async def other() -> None:
        async with line.one():
            await asyncio.sleep(seconds)

    running = asyncio.create_task(other())
    await asyncio.sleep(0)
    async with line.one():
        pass
    await running


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Processors:
    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda _: {0})
    return Processors()


def test_waits_are_counted_once_however_many_programs_wait(line: Processors) -> None:
    async def main() -> None:
        told: list[tuple[float, bool]] = []
        waits = ProcessorWaits(lambda are: told.append((asyncio.get_running_loop().time(), are)))
        with waits.counting():
            await asyncio.gather(waits_for_a_processor(line, 10), waits_for_a_processor(line, 10))
        assert waits.seconds() == pytest.approx(20)
        await waits_for_a_processor(line, 5)
        assert waits.seconds() == pytest.approx(20)
        assert told == [(0.0, True), (20.0, False)]

    run_virtual(main)


@pytest.mark.parametrize("own", [False, True])
def test_a_rollout_has_its_seconds_beside_those_in_which_its_programs_wait(line: Processors, own: bool) -> None:
    async def agent(task: object, client: object) -> float:
        await asyncio.sleep(50)
        await waits_for_a_processor(line, 1000)
        await asyncio.sleep(5 if line_is_short else 20)
        return 0.5

    rig = Rig(agent)
    bound = RolloutBound(100)
    for line_is_short in (True, False):
        trajectory = run_virtual(lambda: rig.runner(own=own, bound=lambda: bound).run(RolloutKey(GroupKey(0, 5), 2), task()))
        assert trajectory.reward == (0.5 if line_is_short else None)
    assert trajectory.seconds == pytest.approx(1060) and "its agent took 60 s by itself (1000 s without a place" in str(trajectory.error)


def test_scoring_a_group_has_its_seconds_beside_them_too(line: Processors) -> None:
    class Judges:
        async def judge(self, task: Task, attempts: object, *, name: str) -> list[Result]:
            await waits_for_a_processor(line, 1000)
            await asyncio.sleep(50)
            return [Result(0.5)]

        def excused(self, session_id: str) -> float:
            return 0.0

        tool_seconds = excused

    async def main() -> Result:
        scorer = GroupScorer(Judges(), seconds=60)
        key = RolloutKey(GroupKey(0, 5), 0)
        scorer.joined(key.group)
        return await scorer.settled(key, task(), UnscoredRollout([], 0, [], {}, {}, {}))

    assert run_virtual(main).reward == 0.5


def test_a_tool_has_its_seconds_beside_them_and_they_count_once(line: Processors) -> None:
    async def patient() -> str:
        await waits_for_a_processor(line, 1000)
        await asyncio.sleep(2)
        return "there"

    async def main() -> None:
        waits = ProcessorWaits()
        tool = CallableTool.of(patient, where="environment.tools")
        toolbox = Toolbox([tool], seconds=3.0, slots=asyncio.Semaphore(1), one_by_one=False)
        with waits.counting():
            spent = ToolTime(waits.seconds)
            spent.begin(3.0)
            (answer,) = await toolbox.run([{"id": "c", "function": {"name": "patient", "arguments": "{}"}}])
            spent.end()
        assert answer["content"] == "there"
        assert (spent.seconds(), waits.seconds()) == (pytest.approx(2), pytest.approx(1000))

    run_virtual(main)
