"""A worker and the rollout process's end of it, over a real socket in one process: what agents may do, and what its token opens."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing, suppress
from typing import Any

import pytest
from starlette.applications import Starlette
from tests.environments.talking import says
from tests.environments.test_worker_pool import Recorder, Session

from midflight.config.sections import EnvironmentSection
from midflight.environments.agents import LocalAgents
from midflight.environments.built_in_loop import BuiltInLoop
from midflight.environments.result_checks import UnscoredRollout
from midflight.environments.sandboxes import processors
from midflight.environments.worker_pool import WorkerPool
from midflight.errors import AgentFailed, ConfigError, first_error
from midflight.run.api import worker_wire as wire
from midflight.run.api.worker_routes import WorkerRoutes
from midflight.run.parts import PartLost, Ready, WorkerSpec, serve_while
from midflight.run.worker import worker_process
from midflight.run.worker.worker_process import LoopWatch, Worker
from midflight.types import Result, Task
from midflight.wire.client import HttpAnswer, HttpClient
from midflight.wire.server import listen, serve_app

TOKEN = "worker-token-of-the-test"
CONTROL_TOKEN = "control-token-of-the-test"


class Odd(BaseException):
    pass


async def agent(task: Task, client: object) -> object:
    match task.id:
        case "raises":
            raise LookupError("no key")
        case "odd":
            raise Odd("odd")
        case "exits":
            sys.exit(4)
        case "bad":
            return "yes"
        case "config":
            raise ConfigError("the judge's address is missing")
        case "cancels itself":
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            await asyncio.sleep(10)
        case "swallows":
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            await asyncio.sleep(60)
        case "blocks":
            await asyncio.create_task(blocking())
        case _:
            pass
    task.data["seen"] = task.data.get("seen", 0) + 1  # type: ignore[index,operator]
    return task.data["seen"]


async def blocking() -> None:
    time.sleep(0.7)


class Told:
    def __init__(self) -> None:
        self.messages: list[object] = []

    def tell(self, message: object) -> None:
        self.messages.append(message)


def with_worker(
    main: Callable[[WorkerPool], Coroutine[Any, Any, None]], *, token: str = TOKEN, host: Any = None, addresses: list[str] | None = None
) -> None:
    """`addresses` gets where the rollout process is reached."""

    async def run() -> None:
        pool = WorkerPool(Recorder(), stall_seconds=120)
        with listen("127.0.0.1", 0) as listener:
            spec = WorkerSpec("worker0", f"http://127.0.0.1:{listener.getsockname()[1]}", token, "{}")
            (addresses if addresses is not None else []).append(spec.url)
            app = Starlette(routes=[*WorkerRoutes(pool, token=TOKEN, control_token=CONTROL_TOKEN).routes()])
            agents = host or LocalAgents(agent, client_for=lambda session: None, plain_client_for=lambda session: None)  # type: ignore[arg-type,return-value]
            async with HttpClient(spec.url, lost=PartLost, token=token) as http:
                worker = Worker(spec.name, agents, http, LoopWatch(spec, asyncio.get_running_loop()), cancels=True)
                told = Told()
                await serve_while(main(pool), serve_app(app, listener, ready=lambda: None), worker.run(told))  # type: ignore[arg-type]
                assert told.messages == [Ready()]

    asyncio.run(run())


async def outcome(pool: WorkerPool, name: str) -> object:
    try:
        ended = await pool.run(Task(name, "s", {"words": ["a"]}), Session(name))
        return ended.reward if isinstance(ended, Result) else ended
    except (AgentFailed, ConfigError) as error:
        return error


def test_an_agent_ends_with_its_reward_or_its_error_and_each_task_is_its_own() -> None:
    async def main(pool: WorkerPool) -> None:
        names = ("raises", "odd", "exits", "bad", "cancels itself", "config")
        fine, again, *failed = await asyncio.gather(*(outcome(pool, name) for name in ("fine", "again", *names)))
        assert (fine, again) == (1.0, 1.0)
        said = [str(error) for error in failed]
        assert said[:3] == ["LookupError: no key", "Odd: odd", "SystemExit: 4"]
        assert "reward was 'yes'" in said[3] and "CancelledError" in said[4]
        assert isinstance(failed[5], ConfigError) and said[5] == "the judge's address is missing"
        first = failed[0]
        assert isinstance(first, AgentFailed) and first.trace is not None and 'LookupError("no key")' in first.trace

    with_worker(main)


def test_of_a_long_traceback_the_last_whole_lines_are_told() -> None:
    error = ValueError("\n".join(f"/s/{number}.secret/v1" for number in range(5000)))
    lines = worker_process._failed("s", error).trace.splitlines()
    assert 1000 < len(lines) < 5000 and all(re.fullmatch(r"/s/\d+\.secret/v1", line) for line in lines)


def test_an_agent_that_swallows_its_cancellation_is_cancelled_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "AGAIN_SECONDS", 0.05)

    async def main(pool: WorkerPool) -> None:
        running = asyncio.ensure_future(outcome(pool, "swallows"))
        await outcome(pool, "fine")
        (worker,) = pool._workers.values()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert list(worker.left) == ["swallows"]
        async with asyncio.timeout(5):
            while worker.left:
                await asyncio.sleep(0.01)

    with_worker(main)


def test_a_blocked_loop_is_told_with_the_agent_and_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout process is another one in life; here both share the loop, so the words come when it turns again."""
    monkeypatch.setattr(worker_process, "BLOCKED_SECONDS", 0.2)
    monkeypatch.setattr(worker_process, "LOOK_SECONDS", 0.05)
    told: list[tuple[str, str | None, str]] = []
    monkeypatch.setattr(WorkerPool, "blocked", lambda self, name, session_id, *, where, seconds: told.append((name, session_id, where)))

    async def main(pool: WorkerPool) -> None:
        assert await outcome(pool, "blocks") == 1.0
        async with asyncio.timeout(5):
            while not told:
                await asyncio.sleep(0.01)
        name, session_id, where = told[0]
        assert (name, session_id) == ("worker0", "blocks") and where.startswith("blocking (") and "test_worker.py" in where

    with_worker(main)


def test_a_loop_that_is_busy_with_one_agent_after_the_other_is_not_blocked_by_any() -> None:
    """It last turned at 100, and stands still from 103 on, when it is seen in the same step again and again."""
    with closing(asyncio.new_event_loop()) as loop:
        watch, one, other = LoopWatch(WorkerSpec("worker0", "http://x", "t", "{}"), loop), object(), object()
        watch._turned = 100.0
        assert [watch._stands(now, task) for now, task in ((100.5, one), (102.0, other), (103.0, one))] == [0, 0, 0]
        assert [watch._stands(now, one) for now in (104.0, 113.5)] == [1.0, 10.5]
        watch._turned = 114.0
        assert watch._stands(114.5, one) == 0.5


def test_a_worker_says_which_agents_it_runs_and_that_one_of_them_holds_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "BLOCKED_SECONDS", 0.2)
    monkeypatch.setattr(worker_process, "LOOK_SECONDS", 0.05)
    workers, held = list[Worker](), list[str]()

    async def main(pool: WorkerPool) -> None:
        (worker,) = workers
        assert worker.situation().doing == () and worker.situation().counters == "0 agents run"
        running = asyncio.ensure_future(outcome(pool, "blocks"))
        while not worker.situation().doing:
            await asyncio.sleep(0)
        (doing,) = worker.situation().doing
        assert doing.what == "runs the agent of blocks" and doing.limit is None and time.monotonic() - doing.since < 5
        assert await running == 1.0 and worker.situation().doing == ()
        assert held and set(held) == {"is blocked by the agent of blocks"}
        async with asyncio.timeout(5):
            while worker._watch.held():
                await asyncio.sleep(0.01)

    def holds(self: LoopWatch, seconds: float, *, made=LoopWatch._holds) -> Any:
        found = made(self, seconds)
        held.extend(doing.what for doing in found if doing.holds_loop)
        return found

    monkeypatch.setattr(LoopWatch, "_holds", holds)
    monkeypatch.setattr(Worker, "__init__", lambda self, *a, made=Worker.__init__, **k: (made(self, *a, **k), workers.append(self))[0])
    with_worker(main)


@pytest.mark.parametrize(("token", "status"), [(CONTROL_TOKEN, 200), (TOKEN, 401)])
def test_that_no_agent_is_to_blame_is_the_launchers_to_say_and_no_agents(token: str, status: int) -> None:
    async def main(pool: WorkerPool) -> None:
        running = asyncio.ensure_future(outcome(pool, "swallows"))
        await outcome(pool, "fine")
        async with HttpClient(addresses[0], lost=PartLost, token=token) as http:
            answer = await http.call("POST", wire.SPARED_PATH, wire.encode(wire.WorkerSpared("worker0")))
        (worker,) = pool._workers.values()
        assert answer.status == status and worker.spared is (status == 200)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    addresses: list[str] = []
    with_worker(main, addresses=addresses)


def test_without_the_workers_token_nothing_opens() -> None:
    async def main(pool: WorkerPool) -> None:
        await asyncio.sleep(5)

    with pytest.raises(BaseExceptionGroup) as caught:
        with_worker(main, token="some-other-token-of-a-test")
    assert isinstance(first_error(caught.value), PartLost)


def test_tools_that_run_in_a_worker_are_told_with_their_limit() -> None:
    async def post(path: str, body: bytes) -> HttpAnswer:
        asked.append(path)
        return HttpAnswer(200, json.dumps({"choices": [{"message": says("5") if len(asked) > 1 else says("", ("rests", {}))}]}).encode())

    async def main(pool: WorkerPool) -> None:
        running = asyncio.ensure_future(pool.run(Task("a", "s", {"question": "2 + 3?", "answer": "5"}), Session("a")))
        async with asyncio.timeout(5):
            while not pool.tool_seconds("a"):
                await asyncio.sleep(0.01)
        ended = await running
        assert isinstance(ended, Result) and ended.reward == 1.0

    asked: list[str] = []
    tools, rewards = ["tests.environments.some_tools:rests"], [{"entry": "tests.environments.some_tools:correct"}]
    with_worker(main, host=BuiltInLoop(EnvironmentSection.model_validate({"tools": tools, "rewards": rewards}), post))


@pytest.mark.parametrize("of_group", [False, True])
def test_programs_that_wait_for_a_processor_in_a_worker_are_told(monkeypatch: pytest.MonkeyPatch, of_group: bool) -> None:
    async def runs(*_: object, **__: object) -> float:
        async with line.one():
            return 1.0

    async def judges(*_: object, **__: object) -> list[Result]:
        return [Result(await runs())]

    async def main(pool: WorkerPool) -> None:
        task = Task("a", "s", {})
        async with line.one():
            running = asyncio.ensure_future(pool.judge(task, [], name="a") if of_group else pool.run(task, Session("a")))
            async with asyncio.timeout(5):
                while pool.excused("a") < 0.3:
                    await asyncio.sleep(0.01)
        await running

    monkeypatch.setattr(processors.os, "sched_getaffinity", lambda _: {0})
    line = processors.Processors()
    host = LocalAgents(runs, client_for=lambda session: None, plain_client_for=lambda session: None)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(host, "judge", judges)
    with_worker(main, host=host)


class ScoresGroups(LocalAgents):
    """Its agents are scored beside the others of their group."""

    def __init__(self) -> None:
        super().__init__(agent, client_for=lambda session: None, plain_client_for=lambda session: None)  # type: ignore[arg-type,return-value]

    async def run(self, task: Task, session: object) -> UnscoredRollout:
        return UnscoredRollout([{"role": "assistant", "content": task.id}], 0, [1], {"f": [1]}, {"m": 2.0}, {"own": None, "short": 0.5})

    async def judge(self, task: Task, attempts: Sequence[UnscoredRollout], *, name: str) -> list[Result]:
        if task.id == "broken":
            raise LookupError("no judge")
        best = max(str(attempt.messages[-1]["content"]) for attempt in attempts)
        return [
            Result(float(attempt.messages[-1]["content"] == best), attempt.components, attempt.metrics, (), attempt.fields)
            for attempt in attempts
        ]


def test_attempts_of_a_group_come_back_whole_and_are_scored_together_in_a_worker() -> None:
    async def main(pool: WorkerPool) -> None:
        attempts = [await pool.run(Task(name, "s", {}), Session(name)) for name in ("a", "b")]
        assert attempts[0] == UnscoredRollout(
            [{"role": "assistant", "content": "a"}], 0, [1], {"f": [1]}, {"m": 2.0}, {"own": None, "short": 0.5}
        )
        found = await pool.judge(Task("a", "s", {}), attempts, name="g")  # type: ignore[arg-type]
        assert found == [Result(reward, {"short": 0.5}, {"m": 2.0}, (), {"f": [1]}) for reward in (0.0, 1.0)]
        with pytest.raises(AgentFailed, match="LookupError: no judge"):
            await pool.judge(Task("broken", "s", {}), attempts, name="h")  # type: ignore[arg-type]

    with_worker(main, host=ScoresGroups())
