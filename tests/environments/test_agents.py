"""Agents in this process: each has its own copy of the task, a plain one its own thread, and no client closes another's."""

from __future__ import annotations

import asyncio
import threading

import pytest

from midflight.environments.agents import LocalAgents, SharedClients
from midflight.environments.rollout import RolloutRunner
from midflight.environments.single_turn import LocalAnswers
from midflight.errors import EnvironmentFailed, NoEngine, Overloaded, RequestRejected
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, RolloutKey, SamplingParams
from midflight.types.facts import record_nothing

from .fakes import FakeFates, FakeSession, FakeSessions, Rig, task

KEY = RolloutKey(GroupKey(0, 0), 0)


def test_what_an_agent_does_to_its_task_no_other_rollout_sees() -> None:
    seen: list[object] = []

    async def meddles(given, client):
        seen.append((list(given.data["words"]), given.data.get("note")))
        given.data["words"].append("more")
        given.data["note"] = "was here"
        return 1.0

    async def main() -> None:
        one = task(words=["a"])
        runner = Rig(meddles).runner()
        for _ in range(3):
            await runner.run(KEY, one)
        assert seen == [(["a"], None)] * 3 and one.data == {"words": ["a"]}

    run_virtual(main)


def test_a_plain_function_runs_in_a_thread_of_its_own_with_a_plain_client() -> None:
    threads: list[threading.Thread] = []

    def plain(given, client):
        threads.append(threading.current_thread())
        assert client == "plain"
        if given.id == "3":
            raise SystemExit("bye")
        if given.id == "4":
            raise StopIteration
        return 0.5

    async def main() -> None:
        host = LocalAgents(plain, client_for=lambda session: "async", plain_client_for=lambda session: "plain")  # type: ignore[arg-type,return-value]
        options = {"sampling": SamplingParams(), "rollout_seconds": 60.0, "record": record_nothing, "fates": FakeFates()}
        runner = RolloutRunner(sessions=FakeSessions(), agents=host, **options)  # type: ignore[arg-type]
        done = await asyncio.gather(*(runner.run(KEY, task(number)) for number in (1, 2, 3, 4)))
        assert [t.reward for t in done] == [0.5, 0.5, None, None]
        assert [t.error for t in done] == [None, None, "SystemExit: bye", "StopIteration: "]
        assert len(set(threads)) == 4 and threading.main_thread() not in threads

    asyncio.run(main())


def test_a_client_that_is_closed_takes_no_other_along() -> None:
    async def main() -> None:
        async with SharedClients() as clients:
            session = FakeSession("1", KEY, True, base_url="http://127.0.0.1:9/s/1/v1")
            first, second = clients.client_for(session), clients.client_for(session)
            async with first:
                await first.close()
            assert not second.is_closed()
            await first._client.aclose()
            assert second.is_closed() and not clients.client_for(session).is_closed(), "a pool closed all the same is made anew"
            clients.plain_client_for(session).close()
            assert not clients.plain_client_for(session).is_closed()

    asyncio.run(main())


def test_the_built_in_environment_tries_again_when_the_gateway_is_busy_and_tells_what_else_it_says() -> None:
    asked: list[tuple[str, object]] = []
    said: list[str | Exception] = [Overloaded("full", retry_after_seconds=1), NoEngine("away"), " olleh", RequestRejected("no")]

    class Scripted:
        async def reply(self, token, messages) -> str:
            asked.append((token, messages))
            if isinstance(answer := said.pop(0), Exception):
                raise answer
            return answer

    async def main() -> None:
        session = FakeSession("1", KEY, True, api_key="mf-1.secret")
        assert await LocalAnswers(Scripted()).run(task(), session) == 1.0
        assert asked == [("mf-1.secret", [{"role": "user", "content": "Spell hello backward"}])] * 3
        with pytest.raises(EnvironmentFailed, match="answered 400: no"):
            await LocalAnswers(Scripted()).run(task(), session)
        said.extend([NoEngine("away")] * 3)
        with pytest.raises(EnvironmentFailed, match="answered 503: away"):
            await LocalAnswers(Scripted()).run(task(), session)

    run_virtual(main)
