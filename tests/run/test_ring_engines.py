"""Engines of a ring over their lives: which join later, which are moved, which end the run. No processes: a child ends when a test says so."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from midflight.config.load import load_config
from midflight.errors import RunFailed
from midflight.run.launcher.engines import EnginePart, Engines
from midflight.run.launcher.killed_starts import MAX_KILLED
from midflight.run.launcher.restarts import RestartBudgets
from midflight.run.launcher.ring_context import RingContext
from midflight.run.parts import TEACHER, EngineSpec, Message, ModelReady, Notice, ProcessKind, Purpose, Restarted, Spec
from midflight.run.places.port import PartFailed, Wants
from midflight.testing.virtual_time import run_virtual

GATEWAY = "http://10.0.0.1:80"


class Spot:
    """A place without a machine."""

    fd = 7

    def __init__(self, number: int) -> None:
        self.host, self.port = f"10.0.0.{number}", 1000 + number
        self.lost = self.closed = False
        self.recall = asyncio.Event()

    @property
    def is_recalled(self) -> bool:
        return self.recall.is_set()

    async def recalled(self) -> None:
        await self.recall.wait()

    def close(self) -> None:
        self.closed = True


class Life:
    """A process: it ends by `die`."""

    def __init__(self, name: str, place: Spot) -> None:
        self.name, self.place, self.killed = name, place, False
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def die(self, *, machine: bool = False, was_killed: bool = False) -> None:
        self.place.lost = machine
        self.end.set_exception(PartFailed(f"{self.name} died", part=self.name, was_killed=was_killed))


class Site:
    """Engines on a cluster that has `room` for so many, and their children."""

    def __init__(self, *options: str, room: int, gateway: str = GATEWAY, purpose: Purpose = Purpose.TRAIN) -> None:
        self.room = asyncio.Semaphore(room)
        self.refusals: list[Exception] = []
        self.spots: list[Spot] = []
        self.wanted: list[Wants | None] = []
        self.specs: list[EngineSpec] = []
        self.lives: list[Life] = []
        self.said: list[Message] = []
        self.announced: list[str] = []
        self.ready = set[str]()
        self.loading = set[str]()
        """Engines that do not come up."""
        self.budgets = RestartBudgets(1)
        config = load_config(None, ["cluster.kind=ray", *options])
        site = self

        class Watched(Engines):
            async def _announce(self, part: EnginePart) -> None:
                site.announced.append(f"{part.name} {part.address}")

            def _memory(self) -> str:
                return "There are 2.0 GB."

        context = RingContext(
            config,
            purpose,
            self,  # pyright: ignore[reportArgumentType]
            self,  # pyright: ignore[reportArgumentType]
            self.budgets,
            self.said.append,
            gateways=(gateway,),
            control_token="control",
            engine_token="engine",
            worker_token="worker",
            segment="segment",
            seconds=lambda: 0.0,
        )
        self.engines = Watched(context)

    async def take(self, part: ProcessKind, *, for_ever: bool = False, wants: Wants | None = None) -> Spot:
        self.wanted.append(wants)
        if self.refusals:
            raise self.refusals.pop()
        await self.room.acquire()
        self.spots.append(Spot(len(self.spots)))
        return self.spots[-1]

    async def start(self, part: ProcessKind, name: str, place: Spot, *, listens: bool, arguments: Sequence[str]) -> Life:
        assert part is ProcessKind.ENGINE and listens and arguments
        self.lives.append(Life(name, place))
        return self.lives[-1]

    async def brief_and_follow(self, life: Life, spec: Callable[[ModelReady], Spec]) -> None:
        told = spec(ModelReady("first", 0))
        assert isinstance(told, EngineSpec) and told.name == life.name
        self.specs.append(told)
        if life.name not in self.loading:
            self.ready.add(life.name)
            self.engines.came_up(life.name)
        await life.end

    async def kill(self, name: str) -> None:
        self.newest(name).killed = True

    def newest(self, engine: str) -> Life:
        return next(life for life in reversed(self.lives) if life.name == engine)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_run_starts_with_the_engines_it_must_have_and_the_others_join_when_there_is_room() -> None:
    async def main() -> None:
        site = Site("engine.count=4", "cluster.engines_min=2", room=2)
        kept = await site.engines.take(with_teacher=True)
        assert site.engines.addresses() == {"engine0": "http://10.0.0.0:1000", "engine1": "http://10.0.0.1:1001"}
        tasks = [asyncio.ensure_future(one) for one in kept]
        await settle()
        assert [life.name for life in site.lives] == ["engine0", "engine1"] and site.announced == []
        site.room.release()
        await settle()
        assert [life.name for life in site.lives] == ["engine0", "engine1", "engine2"]
        assert site.announced == ["engine2 http://10.0.0.2:1002"] and len(tasks) == 4
        for task in tasks:
            task.cancel()

    run(main)


def test_engines_that_differ_ask_for_seats_of_their_own_and_read_their_own_server() -> None:
    servers = "engine.servers=[{host='10.0.0.9', tensor_parallel=4}, {pipeline_parallel=2}]"

    async def main() -> None:
        site = Site("engine.kind=vllm", "engine.device=cuda", servers, room=2)
        kept = await site.engines.take(with_teacher=True)
        assert site.wanted == [Wants({"CPU": 1.0, "GPU": 4.0}, "10.0.0.9"), Wants({"CPU": 1.0, "GPU": 2.0}, "")]
        tasks = [asyncio.ensure_future(one) for one in kept]
        await settle()
        told = [json.loads(spec.config)["engine"]["servers"] for spec in site.specs]
        sizes = [[(server["tensor_parallel"], server["pipeline_parallel"]) for server in servers] for servers in told]
        assert sizes == [[(4, 1)], [(1, 2)]]
        for task in tasks:
            task.cancel()

    run(main)


def test_an_engine_is_moved_when_its_machine_is_lost_and_no_restart_is_spent() -> None:
    async def main() -> None:
        site = Site(room=3)
        (kept,) = await site.engines.take(with_teacher=True)
        task = asyncio.ensure_future(kept)
        for loss in range(2):
            await settle()
            site.lives[-1].die(machine=True)
            await settle()
            assert site.spots[loss].closed and len(site.lives) == loss + 2
        assert site.announced == ["engine0 http://10.0.0.1:1001", "engine0 http://10.0.0.2:1002"]
        assert site.said == [Restarted("engine0", "engine0 died", None)] * 2 and "engine0" in site.ready
        task.cancel()

    run(main)


class Gateway:
    """Answers one request at a time, when a test lets it; `asked` are their first lines."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        assert "Authorization: Bearer control" in head
        self.asked.append(head[0].removesuffix(" HTTP/1.1"))
        await self.answers.wait()
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 31\r\n\r\n{"name":"engine1","resumed": 3}')
        writer.close()


def test_an_engine_whose_place_is_taken_away_leaves_the_run_before_it_ends_and_comes_back_elsewhere() -> None:
    """The gateway drains it, and answers when it has aborted the rest and has it resumed elsewhere."""

    async def main() -> None:
        gateway = Gateway()
        async with await asyncio.start_server(gateway, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            site = Site("engine.count=2", room=3, gateway=f"http://127.0.0.1:{port}")
            tasks = [asyncio.ensure_future(kept) for kept in await site.engines.take(with_teacher=True)]
            await settle()
            site.spots[1].recall.set()
            while not gateway.asked:
                await asyncio.sleep(0.01)
            await settle()
            assert gateway.asked == ["DELETE /midflight/v1/engines/engine1?force=true"]
            assert not site.lives[1].killed and not site.spots[1].closed and len(site.lives) == 2, "it goes on while it has requests"
            gateway.answers.set()
            while len(site.lives) < 3:
                await asyncio.sleep(0.01)
            await settle()
            assert site.lives[1].killed and site.spots[1].closed and not site.lives[0].killed
            assert site.announced == ["engine1 http://10.0.0.2:1002"], "in its new place it joins"
            (said,) = site.said
            assert said == Restarted("engine1", f"{LEAVES}: 3 requests go on elsewhere", None)
            for task in tasks:
                task.cancel()

    run(main)


LEAVES = "engine1 leaves its place at 10.0.0.1, which is about to be taken away"


def test_an_engine_whose_place_is_taken_away_is_moved_also_where_no_gateway_answers() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            gateway = f"http://127.0.0.1:{found.getsockname()[1]}"
        site = Site("engine.count=2", room=3, gateway=gateway)
        tasks = [asyncio.ensure_future(kept) for kept in await site.engines.take(with_teacher=True)]
        await settle()
        site.spots[1].recall.set()
        while len(site.lives) < 3:
            await asyncio.sleep(0.01)
        (said,) = site.said
        assert isinstance(said, Restarted) and said.error.startswith(f"{LEAVES}; the gateway did not answer")
        for task in tasks:
            task.cancel()

    run(main)


def test_an_engine_finds_a_place_though_a_machine_dies_that_was_to_give_it_one_and_though_it_waits_long() -> None:
    """A seat that is lost as it is taken costs a restart of the engine; that there is no room ends the run only where nobody else serves."""

    async def main() -> None:
        site = Site("engine.count=2", room=3)
        first, second = (asyncio.ensure_future(kept) for kept in await site.engines.take(with_teacher=True))
        await settle()
        site.refusals = [RunFailed("engine has waited 1 s"), PartFailed("engine did not get its seat", part="engine")]
        site.lives[1].die(machine=True)
        await settle()
        assert len(site.lives) == 3 and site.said[1] == Restarted("engine1", "engine did not get its seat", 0, 0.0)
        second.cancel()
        site.ready.discard("engine1")
        site.refusals = [RunFailed("engine has waited 1 s")]
        site.lives[0].die(machine=True)
        with pytest.raises(RunFailed, match="engine has waited 1 s"):
            await first

    run(main)


def test_an_engine_that_is_trained_does_not_wait_for_its_restarts_while_only_one_apart_serves() -> None:
    async def main() -> None:
        site = Site("engine.count=2", "environment.untracked.engines=1", room=2)
        first, second = (asyncio.ensure_future(kept) for kept in await site.engines.take(with_teacher=True))
        for _ in range(2):
            await settle()
            site.ready.discard("engine0")
            site.newest("engine0").die()
        with pytest.raises(PartFailed, match="engine0 died"):
            await first
        second.cancel()

    run(main)


class SpentOnce:
    """The budget of every part: nothing is left of it the first time, and soon something is."""

    spent = False

    def of(self, part: str) -> SpentOnce:
        return self

    def spend(self, now: float, *, counts: bool) -> float | None:
        self.spent, before = True, self.spent
        return 0.0 if before else None

    def seconds_to_next(self, now: float) -> float:
        return 0.01

    def left(self, now: float) -> int:
        return 0


def test_an_engine_apart_whose_restarts_are_spent_has_left_the_run_until_it_is_started_again() -> None:
    async def main() -> None:
        gateway = Gateway()
        gateway.answers.set()
        async with await asyncio.start_server(gateway, "127.0.0.1", 0) as server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            site = Site("engine.count=2", "environment.untracked.engines=1", room=2, gateway=address)
            site.engines._context = replace(site.engines._context, budgets=SpentOnce())  # type: ignore[arg-type]
            tasks = [asyncio.ensure_future(kept) for kept in await site.engines.take(with_teacher=True)]
            await settle()
            site.lives[1].die()
            while not site.announced:
                await asyncio.sleep(0.01)
            assert gateway.asked == ["DELETE /midflight/v1/engines/engine1?force=true&drain_seconds=0&for_good=true"]
            assert site.announced == ["engine1 http://10.0.0.1:1001"] and not site.spots[1].closed, "where it was, it joins again"
            for task in tasks:
                task.cancel()

    run(main)


def test_an_engine_that_dies_is_started_again_in_its_place_within_the_budget() -> None:
    async def main() -> None:
        site = Site(room=1)
        (kept,) = await site.engines.take(with_teacher=True)
        task = asyncio.ensure_future(kept)
        await settle()
        site.lives[0].die()
        await settle()
        assert len(site.lives) == 2 and site.lives[1].place is site.spots[0] and site.announced == []
        site.lives[1].die()
        with pytest.raises(PartFailed, match="engine0 died"):
            await task

    run(main)


def test_a_teacher_whose_machine_is_lost_ends_the_attempt_for_its_address_is_told_at_the_start() -> None:
    async def main() -> None:
        site = Site(room=2)
        site.engines._config = site.engines._config.model_copy(
            update={"distillation": site.engines._config.distillation.model_copy(update={"teacher": "folder"})}
        )
        engine, teacher = await site.engines.take(with_teacher=True)
        tasks = [asyncio.ensure_future(one) for one in (engine, teacher)]
        await settle()
        assert [life.name for life in site.lives] == ["engine0", TEACHER]
        site.lives[1].die(machine=True)
        with pytest.raises(PartFailed, match="teacher died"):
            await tasks[1]
        tasks[0].cancel()

    run(main)


def test_the_run_goes_on_while_an_engine_that_may_come_up_is_being_started_and_ends_when_none_is_left() -> None:
    """The first has spent its restarts while the second loads its model."""

    async def main() -> None:
        site = Site("engine.count=2", room=2)
        tasks = [asyncio.ensure_future(kept) for kept in await site.engines.take(with_teacher=True)]
        await asyncio.sleep(1)
        site.loading.add("engine1")
        site.newest("engine1").die()
        await asyncio.sleep(1)
        for _ in range(2):
            site.newest("engine0").die()
            await asyncio.sleep(1)
        assert "Its restarts are spent; engine1 is being started, and requests wait for that." in site.said[-1].error  # type: ignore[union-attr]
        await asyncio.sleep(40)
        waits = "no engine has served for 30 s: requests wait for engine0, which is being started. Its log is logs/engine0.log in "
        assert not any(task.done() for task in tasks) and any(isinstance(one, Notice) and waits in one.text for one in site.said)
        site.newest("engine1").die()
        with pytest.raises(PartFailed, match="engine1 died"):
            await tasks[1]
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])

    run_virtual(main())


async def killed_at_each_start(site: Site, *engines: str, number: int) -> None:
    """They die in turn, each as soon as it is started."""
    for _ in range(number):
        await asyncio.sleep(31)
        for engine in engines:
            site.newest(engine).die(was_killed=True)
    await settle()


def test_a_run_ends_with_the_remedy_when_no_engine_comes_up_because_each_start_is_killed() -> None:
    async def main() -> None:
        site = Site("engine.count=2", room=2)
        site.loading |= {"engine0", "engine1"}
        tasks = [asyncio.ensure_future(kept) for kept in await site.engines.take(with_teacher=True)]
        await killed_at_each_start(site, "engine0", "engine1", number=MAX_KILLED - 1)
        assert not any(task.done() for task in tasks)
        await killed_at_each_start(site, "engine0", number=1)
        assert not any(task.done() for task in tasks), "the other may come up"
        site.newest("engine1").die(was_killed=True)
        with pytest.raises(RunFailed, match=r"no engine could be started.*engine0 and engine1.*10 times.*There are 2.0 GB") as failed:
            await tasks[1]
        assert not isinstance(failed.value, PartFailed), "what a new ring would do as well"
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])

    run_virtual(main())


def test_a_run_goes_on_while_one_engine_works_however_often_another_is_killed_as_it_starts() -> None:
    async def main() -> None:
        site = Site("engine.count=2", room=2)
        site.loading.add("engine1")
        tasks = [asyncio.ensure_future(kept) for kept in await site.engines.take(with_teacher=True)]
        await killed_at_each_start(site, "engine1", number=3 * MAX_KILLED)
        assert not any(task.done() for task in tasks)
        site.loading.add("engine0")
        site.newest("engine0").die()
        await killed_at_each_start(site, "engine0", "engine1", number=MAX_KILLED - 1)
        assert not any(task.done() for task in tasks), "what was killed while another worked does not count"
        site.loading.clear()
        await asyncio.sleep(31)
        assert site.ready == {"engine0", "engine1"}
        for engine in ("engine0", "engine1"):
            site.loading.add(engine)
            site.budgets.of(engine).earn()
            site.newest(engine).die()
        await killed_at_each_start(site, "engine0", "engine1", number=MAX_KILLED - 1)
        for task in tasks:
            assert not task.done(), "both came up in between"
            task.cancel()
        await asyncio.wait(tasks)

    run_virtual(main())


def test_a_teacher_that_is_killed_at_each_start_ends_the_run_though_engines_work() -> None:
    async def main() -> None:
        site = Site(room=2)
        site.engines._config = site.engines._config.model_copy(
            update={"distillation": site.engines._config.distillation.model_copy(update={"teacher": "folder"})}
        )
        site.loading.add(TEACHER)
        engine, teacher = (asyncio.ensure_future(one) for one in await site.engines.take(with_teacher=True))
        await killed_at_each_start(site, TEACHER, number=MAX_KILLED)
        with pytest.raises(RunFailed, match="teacher could not be started"):
            await teacher
        engine.cancel()
        await asyncio.wait([engine])

    run_virtual(main())


def test_what_serves_holds_its_requests_however_often_an_engine_is_killed_as_it_starts() -> None:
    async def main() -> None:
        site = Site(room=1, purpose=Purpose.SERVE)
        (kept,) = await site.engines.take(with_teacher=True)
        task = asyncio.ensure_future(kept)
        site.loading.add("engine0")
        await killed_at_each_start(site, "engine0", number=MAX_KILLED + 1)
        site.loading.clear()
        await asyncio.sleep(31)
        assert len(site.lives) == MAX_KILLED + 2 and "engine0" in site.ready and not task.done()
        restarts = [said for said in site.said if isinstance(said, Restarted)]
        assert [said.seconds for said in restarts] == [0.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 6]
        told = [number for number, said in enumerate(restarts, start=1) if "There are 2.0 GB" in said.error]
        assert told == [2, 4, 8] and "engine0 was killed 4 times in a row while it started" in restarts[3].error
        waits = [said.text.partition(":")[0] for said in site.said if isinstance(said, Notice)]
        assert waits == [f"no engine has served for {since}" for since in ("30 s", "1 min 00 s", "2 min 00 s", "4 min 00 s")]
        await asyncio.sleep(1000)
        assert len([said for said in site.said if isinstance(said, Notice)]) == len(waits), "it serves, and nothing waits for it"
        task.cancel()
        await asyncio.wait([task])

    run_virtual(main())


def test_an_engine_that_dies_as_often_as_it_has_worked_is_started_again_and_one_that_never_works_ends_the_run() -> None:
    async def main() -> None:
        site = Site(room=1)
        (kept,) = await site.engines.take(with_teacher=True)
        task = asyncio.ensure_future(kept)
        for _ in range(5):
            await asyncio.sleep(31)
            site.budgets.of("engine0").earn()
            site.newest("engine0").die(was_killed=True)
        await asyncio.sleep(31)
        site.newest("engine0").die(was_killed=True)
        with pytest.raises(PartFailed, match="engine0 died"):
            await task
        assert len(site.lives) == 6

    run_virtual(main())


def test_a_model_that_cannot_be_loaded_ends_the_run_with_its_error() -> None:
    async def main() -> None:
        site = Site("engine.count=2", room=2)
        site.loading |= {"engine0", "engine1"}
        tasks = [asyncio.ensure_future(kept) for kept in await site.engines.take(with_teacher=True)]
        await asyncio.sleep(1)
        for _ in range(2):
            for engine in ("engine0", "engine1"):
                site.newest(engine).die()
            await asyncio.sleep(1)
        assert tasks[1].done() and str(tasks[1].exception()) == "engine1 died" and len(site.lives) == 4
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])

    run_virtual(main())
