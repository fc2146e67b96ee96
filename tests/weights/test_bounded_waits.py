"""An engine that answers nothing and breaks no connection (SIGSTOP) goes into quarantine (I7) and costs others one deadline."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from midflight.engines.remote import RemoteEngine
from midflight.errors import EngineUnavailable
from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.gateway.fleet.health import HealthWatch
from midflight.gateway.http.control import Control
from midflight.run.rollout.serving import HEALTH_SECONDS, Rejoin
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import PauseMode
from midflight.types.facts import record_nothing
from midflight.weights.handover import Handover

from .fleets import freeze, manifest

STAGE, COMMIT = 5.0, 2.0


class Site:
    """Engine `b` can be frozen; `a` and `c` are well."""

    def __init__(self, *, way: Literal["rolling", "barrier"] = "rolling") -> None:
        self.a, self.b, self.c = self.engines = [ScriptedEngine(name) for name in "abc"]
        self.fleet = Fleet()
        for engine in self.engines:
            self.fleet.attach(engine)
        self.handover = Handover(
            self.fleet,
            pause_mode=PauseMode.RECOMPUTE,
            way=way,
            stage_seconds=STAGE,
            commit_seconds=COMMIT,
            record=record_nothing,
        )
        self.control = Control(self.fleet, Generator(self.fleet, request_seconds=100), pause_seconds=3.0)

    def lose(self, *engines: ScriptedEngine) -> None:
        for engine in engines:
            self.fleet.quarantine(engine.name, EngineUnavailable("gone"))

    @property
    def out(self) -> list[str]:
        return [state.name for state in self.fleet.states() if state.error is not None]

    @property
    def versions(self) -> list[int]:
        return [engine.served.version for engine in self.engines]


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("way", ["rolling", "barrier"])
def test_publishing_past_a_frozen_engine_ends_by_the_deadline_of_staging(way: Literal["rolling", "barrier"]) -> None:
    async def main() -> None:
        site = Site(way=way)
        freeze(site.b)
        assert set((await site.handover.publish(manifest(1))).served_by) == {"a", "c"}
        assert now() == STAGE
        assert site.versions == [1, 0, 1] and site.out == ["b"]

    run_virtual(main())


def test_an_engine_that_hangs_when_it_rejoins_keeps_no_other_from_rejoining() -> None:
    async def main() -> None:
        site = Site()
        await site.handover.publish(manifest(1))
        freeze(site.a)
        site.lose(*site.engines)
        async with asyncio.TaskGroup() as group:
            rejoin = group.create_task(Rejoin(site.fleet, site.handover).run())
            await asyncio.sleep(HEALTH_SECONDS + 0.1)
            assert site.out == ["a"]
            await asyncio.sleep(20)
            site.lose(site.c)
            await asyncio.sleep(HEALTH_SECONDS + 0.1)
            assert site.out == ["a"], "however often it tries"
            rejoin.cancel()

    run_virtual(main())


def test_a_version_waits_for_engines_that_hang_when_they_rejoin_by_one_deadline_and_no_other_gets_in_before_it() -> None:
    async def main() -> None:
        site = Site()
        await site.handover.publish(manifest(1))
        freeze(site.a)
        freeze(site.b)
        site.lose(site.a, site.b)
        async with asyncio.TaskGroup() as group:
            rejoin = group.create_task(Rejoin(site.fleet, site.handover).run())
            await asyncio.sleep(HEALTH_SECONDS + 0.1)
            began = now()
            assert (await site.handover.publish(manifest(2))).served_by == ("c",)
            assert now() - began <= 2 * STAGE
            rejoin.cancel()

    run_virtual(main())


def test_before_the_first_version_too_a_frozen_engine_is_given_up_by_its_deadline() -> None:
    async def main() -> None:
        site = Site()
        freeze(site.b)
        site.lose(site.b)
        assert not await site.handover.rejoin("b")
        assert now() == COMMIT

    run_virtual(main())


def test_the_watch_reads_a_frozen_engine_for_as_long_as_one_may_stall_and_no_longer() -> None:
    async def main() -> None:
        site = Site()
        await site.b.pause(PauseMode.KEEP)
        freeze(site.b)
        watch = HealthWatch(site.fleet, interval_seconds=0.5, stall_seconds=1.0)
        for _ in range(2):
            await watch.check()
        assert now() == 2.0 and site.out == ["b"]
        site.b._hangs["health"] = 0  # It says that it is paused, and hangs when it is told to resume.
        await asyncio.sleep(1.0)
        await watch.check()
        assert now() == 4.0 and site.out == ["b"]

    run_virtual(main())


def test_an_operators_pause_and_resume_leave_a_frozen_engine_to_quarantine_after_their_deadline() -> None:
    async def main() -> None:
        site = Site()
        freeze(site.b)
        await site.control.pause()
        assert now() == 3.0 and site.out == ["b"]
        freeze(site.c)
        await site.control.resume()
        assert now() == 6.0 and site.out == ["b", "c"]
        assert site.a.paused is None and not site.control.paused

    run_virtual(main())


def test_an_operator_and_a_handover_at_the_same_frozen_engine_wait_for_it_once_each() -> None:
    """The engine is in the middle of its commit when it freezes; who pauses an engine waits his turn, within his own deadline."""

    async def main() -> None:
        site = Site()
        site.b.hang_next("pause")
        async with asyncio.TaskGroup() as group:
            group.create_task(site.handover.publish(manifest(1)))
            await asyncio.sleep(0.5)
            await site.control.pause()
            assert now() <= 3.5
            await site.control.resume()
        assert site.versions == [1, 0, 1] and site.out == ["b"]
        assert site.a.paused is site.c.paused is None

    run_virtual(main())


def test_a_process_that_takes_connections_and_answers_nothing_is_not_asked() -> None:
    async def main() -> None:
        async with await asyncio.start_server(lambda _, writer: frozen.append(writer), "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            remote = RemoteEngine("b", f"http://127.0.0.1:{port}", token=None, record=record_nothing)
            attaching = asyncio.ensure_future(remote.run())
            while not frozen:
                await asyncio.sleep(0.01)
            with pytest.raises(EngineUnavailable, match="not attached"):
                async with asyncio.timeout(2.0):
                    await remote.health()
            attaching.cancel()
            for writer in frozen:  # from Python 3.12 on a server waits for its connections
                writer.close()

    frozen: list[asyncio.StreamWriter] = []
    asyncio.run(main())
