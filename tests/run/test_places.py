"""What a place and a child must be, on this machine and on a seat. The child is a few lines of Python, which start in milliseconds."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from midflight.errors import ConfigError, RunFailed
from midflight.run import reminder
from midflight.run.parts import Message, Notice, ProcessKind, WorkerSpec
from midflight.run.places import cluster as cluster_places
from midflight.run.places import process
from midflight.run.places.actor import ActorChild, PlaceActor
from midflight.run.places.cluster import RayPlaces
from midflight.run.places.local import LocalPlaces
from midflight.run.places.port import Child, ChildOrder, PartFailed, Place, Places, Wants, stop_all
from midflight.run.places.ray import RayActor

from .fake_cluster import ActorDiedError, ActorUnavailableError, FakeCluster, OutOfMemoryError

SPEC = WorkerSpec("w", "http://x", "secret", "{}")
PART = """
import json, os, signal, socket, sys
def say(text): print(json.dumps({"type": "words", "text": text}), flush=True)
sys.stdin.buffer.read(8)
signal.signal(signal.SIGUSR1, lambda *_: print("here I stand", file=sys.stderr, flush=True))
deeds = sys.argv[2:]
say("began")
if "deaf" in deeds: signal.signal(signal.SIGTERM, signal.SIG_IGN)
spec = json.loads(sys.stdin.readline() or "{}")
say("told " + spec.get("name", "nothing"))
for deed in deeds:
    word, _, value = deed.partition("=")
    if word == "environ": say(os.environ.get(value, "none"))
    if word == "exit": print("my last words", file=sys.stderr); sys.exit(int(value))
    if word == "answer":
        with socket.socket(fileno=int(value)) as listener:
            listener.accept()[0].sendall(b"hello")
    if word == "lines":
        for number in range(int(value)): say(str(number))
if "stay" in deeds: sys.stdin.readline(); signal.pause()
"""


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "part.py"
    script.write_text(PART)
    monkeypatch.setattr(process, "COMMAND", (sys.executable, "-I", "-S", str(script)))


def on_cluster(cluster: FakeCluster, *, lost_seconds: float = 60.0, wait_seconds: float = 60.0, said: list[str] | None = None) -> RayPlaces:
    asks, say = {kind: {"CPU": 1.0} for kind in ProcessKind}, (said if said is not None else []).append
    return RayPlaces(cluster, asks, lost_seconds=lost_seconds, wait_seconds=wait_seconds, environ={"GIVEN": "to all"}, say=say)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


@asynccontextmanager
async def started(place: Place, folder: Path, *deeds: str, name: str = "engine0", listens: bool = False) -> AsyncGenerator[Child]:
    child = place.child(ChildOrder(ProcessKind.ENGINE, name, str(folder / f"{name}.log"), {"MINE": "alone"}, deeds, listens=listens))
    await child.start()
    try:
        yield child
    finally:
        await stop_all([child], seconds=0)


async def words(child: Child) -> list[str]:
    return [text_of(message) async for message in child.messages()]


def text_of(message: Message) -> str:
    assert isinstance(message, Notice)
    return message.text


KINDS: dict[str, Callable[[], Places]] = {"local": LocalPlaces, "seats": lambda: on_cluster(FakeCluster())}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[[], Places]:
    return KINDS[request.param]


# --- The contract -----------------------------------------------------------------------------------------------------


def test_a_child_is_told_its_spec_and_everything_it_says_comes_in_order(kind: Callable[[], Places], tmp_path: Path) -> None:
    async def main() -> None:
        with closing(kind()) as places:
            place = await places.take(ProcessKind.ENGINE)
            async with started(place, tmp_path, "lines=300", "environ=MINE") as child:
                assert child.running and child.was_started
                await child.tell(SPEC)
                assert await words(child) == ["began", "told w", *map(str, range(300)), "alone"]
                assert await child.ended() == 0 and not child.running

    run(main)


def test_an_end_that_nobody_asked_for_has_its_status_and_the_end_of_its_log(kind: Callable[[], Places], tmp_path: Path) -> None:
    async def main() -> None:
        with closing(kind()) as places:
            place = await places.take(ProcessKind.ENGINE)
            async with started(place, tmp_path, "exit=7") as child:
                await child.tell(SPEC)
                status = await child.ended()
                assert status == 7 and str(child.died(status)).startswith("engine0 ended with exit status 7")
                assert str(child.died(status)).endswith("engine0.log:\nmy last words") and child.died(status).part == "engine0"
            async with started(place, tmp_path, "stay", name="engine1") as child:
                child.signal(signal.SIGKILL)
                status = await child.ended()
                assert status == -signal.SIGKILL and "signal SIGKILL" in str(child.died(status))
            async with started(place, tmp_path, "stay", name="engine2") as child:
                child.condemn("engine2 stood still")
                assert str(child.died(await child.ended())).startswith("engine2 stood still. It was ended.")

    run(main)


def test_an_end_is_told_with_the_log_of_this_process_and_not_of_an_earlier_one(kind: Callable[[], Places], tmp_path: Path) -> None:
    async def main() -> None:
        with closing(kind()) as places:
            place = await places.take(ProcessKind.ENGINE)
            (tmp_path / "engine0.log").write_text("an earlier one said this\n")
            async with started(place, tmp_path, "exit=7") as child:
                await child.tell(SPEC)
                assert str(child.died(await child.ended())).endswith("engine0.log:\nmy last words")

    run(main)


def test_the_address_outlives_the_process_that_listened_there(kind: Callable[[], Places], tmp_path: Path) -> None:
    async def main() -> None:
        with closing(kind()) as places:
            place = await places.take(ProcessKind.ENGINE)
            for life in range(2):
                async with started(place, tmp_path, f"answer={place.fd}", name=f"life{life}", listens=True) as child:
                    await child.tell(SPEC)
                    reader, writer = await asyncio.open_connection(place.host, place.port)
                    assert await reader.read() == b"hello"
                    writer.close()
                    assert await child.ended() == 0

    run(main)


def test_all_are_asked_to_end_and_who_does_not_is_killed(kind: Callable[[], Places], tmp_path: Path) -> None:
    async def main() -> None:
        with closing(kind()) as places:
            place = await places.take(ProcessKind.ENGINE)
            async with started(place, tmp_path, "stay") as good, started(place, tmp_path, "deaf", "stay", name="deaf") as deaf:
                for child in (good, deaf):
                    await child.tell(SPEC)
                    heard = child.messages()
                    assert [text_of(await anext(heard)), text_of(await anext(heard))] == ["began", "told w"]
                await stop_all([good, deaf], seconds=0.3)
                assert (await good.ended(), await deaf.ended()) == (-signal.SIGTERM, -signal.SIGKILL)

    run(main)


def test_what_a_child_said_before_its_end_can_be_read_after_it(kind: Callable[[], Places], tmp_path: Path) -> None:
    async def main() -> None:
        with closing(kind()) as places:
            place = await places.take(ProcessKind.ENGINE)
            async with started(place, tmp_path, "lines=3") as child:
                await child.tell(SPEC)
                assert await child.ended() == 0
                assert await words(child) == ["began", "told w", "0", "1", "2"]

    run(main)


def test_stacks_come_from_the_child_and_stay_in_its_log(
    kind: Callable[[], Places], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STACKS_SECONDS", 0.2)

    async def main() -> None:
        with closing(kind()) as places:
            place = await places.take(ProcessKind.ENGINE)
            async with started(place, tmp_path, "stay") as child:
                assert text_of(await anext(child.messages())) == "began"
                while "here I stand" not in await child.stacks():
                    await asyncio.sleep(0.05)
                assert "here I stand" in (tmp_path / "engine0.log").read_text()

    run(main)


def test_no_child_inherits_what_opens_the_run_or_the_cluster(
    kind: Callable[[], Places], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MIDFLIGHT_CONTROL_TOKEN", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "secret")

    async def main() -> None:
        with closing(kind()) as places:
            place = await places.take(ProcessKind.ROLLOUT)
            asked = ("environ=MIDFLIGHT_CONTROL_TOKEN", "environ=RAY_AUTH_TOKEN", "environ=RAY_AUTH_TOKEN_PATH")
            async with started(place, tmp_path, *asked) as child:
                await child.tell(SPEC)
                assert (await words(child))[2:] == ["none", "none", "none"]

    run(main)


def test_ports_differ_and_a_place_where_somebody_listens_is_refused_by_name(kind: Callable[[], Places]) -> None:
    async def main() -> None:
        with closing(kind()) as places:
            first, second = await places.take_all(ProcessKind.TRAINER, 2)
            assert (first.host, second.host) == ("127.0.0.1", "127.0.0.1") and first.port != second.port
            with pytest.raises(ConfigError, match=str(first.port)):
                await places.take(ProcessKind.ROLLOUT, host="127.0.0.1", port=first.port)

    run(main)


# --- On seats alone ---------------------------------------------------------------------------------------------------


def test_a_seat_that_cannot_be_reached_for_a_while_is_asked_again_and_nothing_is_lost_or_heard_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_places, "AGAIN_SECONDS", 0.001)
    cluster, failures = FakeCluster(), 0

    async def fail(method: str) -> None:
        nonlocal failures
        if method != "signal" and failures < 40 and len(cluster.calls) % 3:
            failures += 1
            raise ActorUnavailableError("the network broke")

    async def main() -> None:
        with closing(on_cluster(cluster)) as places:
            place = await places.take(ProcessKind.ENGINE)
            monkeypatch.setattr(cluster, "fail", fail)
            async with started(place, tmp_path, "lines=50", "environ=GIVEN") as child:
                await child.tell(SPEC)
                assert await words(child) == ["began", "told w", *map(str, range(50)), "to all"]
                assert await child.ended() == 0 and failures > 1

    run(main)


def test_an_answer_that_was_lost_on_its_way_starts_no_second_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_places, "AGAIN_SECONDS", 0.001)

    class Losing(FakeCluster):
        def call(self, seat: Any, method: str, *given: object) -> asyncio.Future[Any]:
            answer = super().call(seat, method, *given)

            async def lost() -> Any:
                said = await answer
                if method == "start" and self.calls.count("start") == 1:
                    raise ActorUnavailableError("the answer was lost")
                return said

            return asyncio.ensure_future(lost())

    async def main() -> None:
        with closing(on_cluster(cluster := Losing())) as places:
            place = await places.take(ProcessKind.ENGINE)
            async with started(place, tmp_path) as child:
                await child.tell(SPEC)
                assert await words(child) == ["began", "told w"] and cluster.calls.count("start") == 2

    run(main)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            ActorDiedError("\n  The actor died because its node has died.\n more of it"),
            "ActorDiedError: The actor died because its node has died.",
        ),
        (OutOfMemoryError("Task was killed due to the node running low on memory"), "RAY_memory_monitor_refresh_ms=0"),
    ],
)
def test_the_death_of_a_seat_is_that_of_its_child_with_rays_reason_and_the_end_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    cluster = FakeCluster()

    async def fail(method: str) -> None:
        if method == "hear":
            raise error

    async def main() -> None:
        with closing(on_cluster(cluster)) as places:
            place = await places.take(ProcessKind.ENGINE)
            async with started(place, tmp_path, "stay") as child:
                assert text_of(await anext(child.messages())) == "began"
                (tmp_path / "engine0.log").write_text("it had just begun")
                with monkeypatch.context() as patch:
                    patch.setattr(cluster, "fail", fail)
                    assert await words(child) == [] and await child.ended() == -signal.SIGKILL
                told = str(child.died(-signal.SIGKILL))
                assert told.startswith("engine0 has lost its seat on 127.0.0.1: ") and why in told and told.endswith("it had just begun")
                assert place.lost and not child.running
                child.signal(signal.SIGTERM)  # nobody is there any more
                place.lost = False
                os.killpg(cluster_pid(place), signal.SIGKILL)

    run(main)


def cluster_pid(place: Any) -> int:
    return place._seat._told["engine0"].child.pid


def test_a_seat_that_is_silent_is_lost_after_the_seconds_that_were_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()

    async def silence(method: str) -> None:
        if method == "open":
            await asyncio.Event().wait()

    async def main() -> None:
        with closing(on_cluster(cluster, lost_seconds=0.1)) as places:
            place = await places.take(ProcessKind.ENGINE)
            monkeypatch.setattr(cluster, "fail", silence)
            with pytest.raises(PartFailed, match=r"nothing was heard of it for 0.1 s"):
                await place.ask("open", "", 0, of="a place")
            assert place.lost

    run(main)


def test_a_seat_is_not_asked_again_when_its_machine_is_no_longer_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster()

    async def fail(method: str) -> None:
        cluster.alive.clear()
        raise ActorUnavailableError("no route to host")

    async def main() -> None:
        with closing(on_cluster(cluster)) as places:
            place = await places.take(ProcessKind.ENGINE)
            monkeypatch.setattr(cluster, "fail", fail)
            with pytest.raises(PartFailed, match="no route to host"):
                await place.ask("open", "", 0, of="a place")

    run(main)


def test_a_seat_is_waited_for_and_that_is_said_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reminder, "REMINDER_SECONDS", 0.01)
    cluster, said = FakeCluster(), list[str]()
    cluster.room.clear()

    async def main() -> None:
        with closing(on_cluster(cluster, said=said)) as places:
            taking = asyncio.create_task(places.take(ProcessKind.ENGINE))
            while len(said) < 2:
                await asyncio.sleep(0.01)
            cluster.room.set()
            await taking
        (words,) = set(said)
        assert words.startswith("engine waits for 1 x a machine with CPU: 1: what there is has no room, or is slow to start a seat")
        assert words.endswith("(1 machine with CPU: 8)")
        assert len(cluster.killed) == 1

    run(main)


def test_a_seat_at_a_machine_asks_for_what_only_that_machine_has() -> None:
    cluster = FakeCluster()

    async def main() -> None:
        with closing(on_cluster(cluster)) as places:
            place = await places.take(ProcessKind.ENGINE, wants=Wants({"GPU": 4.0}, "127.0.0.2"))
            assert (place.host, cluster.asked) == ("127.0.0.2", [{"GPU": 4.0, "node:127.0.0.2": 0.001}])

    run(main)


@pytest.mark.parametrize("count", [1, 2])
def test_a_seat_that_the_run_needs_is_not_waited_for_for_ever(count: int) -> None:
    cluster = FakeCluster()
    cluster.room.clear()

    async def main() -> None:
        with closing(on_cluster(cluster, wait_seconds=0.05)) as places:
            taking = places.take(ProcessKind.ENGINE) if count == 1 else places.take_all(ProcessKind.TRAINER, count)
            with pytest.raises(RunFailed, match=f"has waited 0.05 s for {count} x a machine with CPU: 1, and had no room among 1 machine"):
                await taking
            assert len(cluster.killed) == (count == 1), "nobody waits for it any more"
            waiting = asyncio.create_task(places.take(ProcessKind.ENGINE, for_ever=True))
            await asyncio.sleep(0.2)
            cluster.room.set()
            await waiting

    run(main)


def test_a_process_that_nobody_hears_any_more_ends_because_its_run_may_go_on_elsewhere(tmp_path: Path) -> None:
    async def main() -> None:
        child = process.LocalChild(ChildOrder(ProcessKind.WORKER, "worker0", str(tmp_path / "log"), {}))
        await child.start()
        told = ActorChild(child, "life", alone_seconds=0.2)
        await told.follow()
        assert await child.ended() == -signal.SIGKILL
        assert (await told.hear(0)).closed

    run(main)


def test_a_seat_says_that_its_process_is_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        with closing(on_cluster(FakeCluster())) as places:
            place = await places.take(ProcessKind.ENGINE)
            async with started(place, tmp_path, "stay") as child:
                heard = asyncio.create_task(words(child))
                while child.state not in "SR":
                    await asyncio.sleep(0.01)
                child.signal(signal.SIGSTOP)
                while child.state != "T":
                    await asyncio.sleep(0.01)
                child.signal(signal.SIGKILL)
                await heard

    run(main)


def test_an_engines_seat_that_is_told_to_end_says_so_once_and_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        with closing(on_cluster(FakeCluster())) as places:
            place = await places.take(ProcessKind.ENGINE)
            async with started(place, tmp_path, "stay") as child:
                heard = asyncio.create_task(words(child))
                word = asyncio.create_task(place.recalled())
                assert not place.is_recalled and seat_of(place).recall()
                await word
                assert place.is_recalled and child.running and not heard.done(), "it leaves before it ends"
                assert not seat_of(place).recall(), "told twice it ends at once"
                heard.cancel()

    run(main)


def test_a_seat_without_an_engine_ends_when_it_is_told_to(tmp_path: Path) -> None:
    async def main() -> None:
        with closing(on_cluster(FakeCluster())) as places:
            empty = await places.take(ProcessKind.ENGINE)
            assert not seat_of(empty).recall()
            place = await places.take(ProcessKind.TRAINER)
            child = place.child(ChildOrder(ProcessKind.TRAINER, "trainer", str(tmp_path / "log"), {}, ["stay"]))
            await child.start()
            assert not seat_of(place).recall()
            await stop_all([child], seconds=0)

    run(main)


def seat_of(place: Any) -> PlaceActor:
    return place._seat


def test_all_places_of_a_machine_that_is_to_be_taken_away_are_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_places, "LOOK_SECONDS", 0.01)
    cluster = FakeCluster()

    async def main() -> None:
        with closing(on_cluster(cluster)) as places:
            place = await places.take(ProcessKind.ENGINE)
            watch = asyncio.create_task(places.watch())
            await asyncio.sleep(0.05)
            assert not place.is_recalled
            cluster.drained.add("127.0.0.1")
            await place.recalled()
            watch.cancel()

    run(main)


def test_rays_worker_hears_the_signal_and_gives_the_second_one_to_ray() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        leaves, seat = iter([True, False]), RayActor()
        seat.recall = lambda: next(leaves)  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ranks_get_all_their_seats_or_none_and_the_room_of_all_is_given_back_with_the_last() -> None:
    cluster = FakeCluster()

    async def main() -> None:
        with closing(on_cluster(cluster)) as places:
            ranks = await places.take_all(ProcessKind.TRAINER, 3)
            assert cluster.asked == [{"CPU": 1.0}] * 3
            ranks[0].close()
            ranks[1].close()
            assert cluster.given_back == 0
            ranks[2].close()
            assert cluster.given_back == 1

    run(main)


def test_a_run_on_this_machine_imports_nothing_of_a_cluster() -> None:
    code = "import sys, midflight.run.launcher.launch; print(*(n for n in sys.modules if n.split('.')[0] == 'ray' or 'places' in n))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = "midflight.run.places"
    assert set(done.stdout.split()) == {ours, f"{ours}.port", f"{ours}.process", f"{ours}.local"}
