"""What waits for a server, and what ends each wait: its answer, somebody's deadline, or the adapter's own end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.engines.models import TOKENIZER, MemoryReceiver, ask
from tests.engines.reading import ABORTED, collect, ids, rest, until_tokens
from tests.engines.servers.fakes import Fake, FakeSglang, FakeVllm, attached
from tests.models.tiny import tiny_model

from midflight.engines.servers.engine import ServerEngine
from midflight.engines.servers.server import Works
from midflight.engines.servers.staged import StagingArea
from midflight.errors import EngineError, EngineUnavailable
from midflight.models.load import save_model
from midflight.ports import verified_pause
from midflight.types import PauseMode, WeightManifest

SOON = 5.0
"""Seconds: what is not done by then hangs."""


async def paused(engine: ServerEngine) -> None:
    while not engine.reading().paused:
        await asyncio.sleep(0.01)


def test_a_drain_waits_for_no_request_that_came_after_it(tmp_path: Path) -> None:
    """Such a request waits for the end of the pause: each would wait for the other."""

    async def main() -> None:
        async with attached(FakeSglang(), tmp_path) as (engine, _), asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            before = engine.generate(ask("before", max_tokens=20))
            first = await until_tokens(before, 1)
            drain = tasks.create_task(engine.pause(PauseMode.DRAIN))
            await paused(engine)
            after = tasks.create_task(collect(engine, ask("after")))
            assert len(ids(first + await rest(before))) == 20
            await drain
            await engine.pause(PauseMode.DRAIN)
            assert not after.done()
            await engine.resume()
            assert len(ids(await after)) == 8

    asyncio.run(main())


def test_a_drain_that_was_resumed_on_the_way_pauses_nothing_later(tmp_path: Path) -> None:
    """Whoever wanted it has given up, and would never resume it."""

    async def main() -> None:
        fake = FakeSglang()
        async with attached(fake, tmp_path) as (engine, _), asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            chunks = engine.generate(ask("before", max_tokens=20))
            await until_tokens(chunks, 1)
            drain = tasks.create_task(engine.pause(PauseMode.DRAIN))
            await paused(engine)
            await engine.resume()
            await rest(chunks)
            await drain
            assert not engine.reading().paused and fake.pause[0] not in [path for path, _ in fake.calls]
            assert len(ids(await collect(engine, ask()))) == 8

    asyncio.run(main())


def test_tokens_without_log_probabilities_cost_their_request_and_not_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        fake = FakeVllm()
        async with attached(fake, tmp_path) as (engine, _), asyncio.timeout(SOON):
            fake.says_instead = b'{"choices": [{"token_ids": [97], "logprobs": null}]}'
            with pytest.raises(EngineUnavailable, match="1 tokens with 0 log-probabilities"):
                await collect(engine, ask())
            fake.says_instead = None
            assert len(ids(await collect(engine, ask()))) == 8

    asyncio.run(main())


@pytest.mark.parametrize("kind", [FakeSglang, FakeVllm])
def test_a_pause_waits_for_the_step_under_way_however_long_it_is(kind: type[Fake], tmp_path: Path) -> None:
    """SGLang says that it is paused when it has been told, and its step goes on."""

    async def main() -> None:
        fake = kind()
        fake.step_seconds = 0.2
        async with attached(fake, tmp_path) as (engine, _), asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(collect(engine, ask(request_id=f"{i}", max_tokens=5))) for i in range(4)]
            while not engine.reading().num_tokens:
                await asyncio.sleep(0.01)
            async with verified_pause(engine, PauseMode.KEEP):
                await asyncio.sleep(0.3)
            await engine.resume()
            assert [len(ids(await answer)) for answer in answers] == [5] * 4

    asyncio.run(main())


def test_an_abort_that_the_server_forgets_ends_a_request_without_tokens_all_the_same(tmp_path: Path) -> None:
    """It may come before the request, and then the answer would go on to its end."""

    async def main() -> None:
        fake = FakeSglang()
        fake.step_seconds = 0.3
        async with attached(fake, tmp_path) as (engine, _), asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(collect(engine, ask(max_tokens=2)))
            while not engine.reading().num_running:
                await asyncio.sleep(0.01)
            await engine.abort(None)
            got = await answer
            assert (ids(got), got[-1].finish) == ((), ABORTED)

    asyncio.run(main())


def test_when_the_adapter_ends_its_requests_end_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(SOON):
            async with attached(FakeSglang(), tmp_path) as (engine, _):
                chunks = engine.generate(ask(max_tokens=60))
                await until_tokens(chunks, 1)
            with pytest.raises(EngineUnavailable, match="has been left"):
                await rest(chunks)
            with pytest.raises(EngineUnavailable, match="is not attached"):
                await collect(engine, ask())

    asyncio.run(main())


def test_a_failure_to_attach_is_an_error_by_itself_and_no_group(tmp_path: Path) -> None:
    """The companion tells by its kind whether starting it again may help."""

    async def main() -> None:
        save_model(tiny_model(), tmp_path)
        engine = ServerEngine(
            "nobody",
            "http://127.0.0.1:9",
            FakeSglang().adapter(),
            tokenizer=TOKENIZER,
            model=tmp_path,
            receiver=MemoryReceiver(),
            staging=tmp_path / "staging",
        )
        with pytest.raises(EngineUnavailable, match=r"did not answer /openapi\.json"):
            await engine.run()

    asyncio.run(main())


@pytest.mark.parametrize("works", [None, lambda: lambda: False], ids=["unseen", "idle"])
def test_a_server_that_answers_nothing_lets_nobody_wait_for_ever(works: Works | None, tmp_path: Path) -> None:
    """Callers over the wire may be gone: their deadlines end nothing here."""

    async def main() -> None:
        fake = FakeSglang()
        async with attached(fake, tmp_path, start_seconds=1.0, works=works) as (engine, receiver), asyncio.timeout(10 * SOON):
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            fake.thawed.clear()
            with pytest.raises(EngineUnavailable, match=r"did not answer /model_info for 1 s.*engine.start_seconds"):
                await engine.health()
            with pytest.raises(EngineUnavailable, match="for 1 s"):
                await engine.commit(1)
            fake.thawed.set()
            assert (await engine.commit(1)).version == 1
            await engine.resume()
            assert len(ids(await collect(engine, ask()))) == 8

    asyncio.run(main())


def test_a_server_that_works_has_as_long_as_it_takes_for_each_answer(tmp_path: Path) -> None:
    """Weights that are loaded, a step that it ends first, a machine that is busy."""

    async def main() -> None:
        fake = FakeVllm()
        fake.thawed.clear()
        asyncio.get_running_loop().call_later(0.5, fake.thawed.set)
        async with attached(fake, tmp_path, start_seconds=0.1, works=lambda: lambda: True) as (engine, receiver), asyncio.timeout(SOON):
            for version in (1, 2):
                await engine.stage(receiver.publish(version, tiny_model(seed=version)))
                fake.thawed.clear()
                asyncio.get_running_loop().call_later(0.5, fake.thawed.set)
                assert (await engine.commit(version)).version == version
            assert len(ids(await collect(engine, ask()))) == 8

    asyncio.run(main())


def test_those_who_ask_for_the_health_of_a_frozen_server_ask_it_once(tmp_path: Path) -> None:
    """Each second somebody asks, and may be gone when it answers."""

    async def main() -> None:
        fake = FakeSglang()
        async with attached(fake, tmp_path) as (engine, _), asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            fake.calls.clear()
            fake.thawed.clear()
            asked = [tasks.create_task(engine.health()) for _ in range(20)]
            await asyncio.sleep(0.2)
            fake.thawed.set()
            assert [(await one).version for one in asked] == [0] * 20
            assert [path for path, _ in fake.calls] == ["/model_info"]

    asyncio.run(main())


def test_what_the_server_said_before_a_commit_is_no_sign_of_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        fake = FakeSglang()
        async with attached(fake, tmp_path) as (engine, receiver), asyncio.timeout(SOON):
            await engine.pause(PauseMode.KEEP)
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            fake.done_meanwhile = engine.commit(1)
            fake.calls.clear()
            assert (await engine.health()).version == 1
            assert "/continue_generation" not in [path for path, _ in fake.calls], "it would have ended the pause"

    asyncio.run(main())


def test_a_version_waits_for_one_that_nobody_waits_for_any_more(tmp_path: Path) -> None:
    """I7: threads that write go on when their callers are gone, and no two may write one folder."""

    class Slow(MemoryReceiver):
        def __init__(self) -> None:
            super().__init__()
            self.go_on = threading.Event()

        def fetch(self, manifest: WeightManifest):  # type: ignore[no-untyped-def]
            views = super().fetch(manifest)
            if manifest.version == 1:
                assert self.go_on.wait(SOON)
            return views

    async def main() -> None:
        save_model(tiny_model(), tmp_path / "model")
        receiver = Slow()
        area = StagingArea(tmp_path / "staging", model=tmp_path / "model", receiver=receiver)
        manifests = [receiver.publish(version, tiny_model(seed=version)) for version in (1, 2)]
        async with asyncio.TaskGroup() as tasks:
            first, second = (tasks.create_task(asyncio.to_thread(area.write, m, beside=None)) for m in manifests)
            await asyncio.sleep(0.1)
            assert not second.done()
            receiver.go_on.set()
            await first

    asyncio.run(main())


def test_a_restarted_server_that_cannot_be_given_its_weights_is_asked_for_no_token(tmp_path: Path) -> None:
    """I7: after a load that failed they may be of both."""

    async def main() -> None:
        fake = FakeSglang()
        async with attached(fake, tmp_path) as (engine, receiver), asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            await engine.stage(receiver.publish(1, tiny_model(seed=1)))
            await engine.commit(1)
            fake.label, fake.model, fake.num_failing_loads = "default", str(tmp_path / "model"), 1
            with pytest.raises(EngineError, match="another model"):
                await engine.health()
            with pytest.raises(EngineError, match="not whole"):
                await engine.resume()
            fake.calls.clear()
            waiting = tasks.create_task(collect(engine, ask()))
            await asyncio.sleep(0.05)
            assert fake.calls == []
            assert not (await engine.health()).paused
            assert len(ids(await waiting)) == 8

    asyncio.run(main())


def test_an_sglang_that_was_not_started_to_be_deterministic_is_not_attached_to_as_such(tmp_path: Path) -> None:
    """It would ignore seeds, and its numbers would depend on what shares a step."""

    async def attach(*, is_deterministic: bool) -> bool:
        fake = FakeSglang()
        fake.is_deterministic, fake.asked_to_be_deterministic = is_deterministic, True
        async with attached(fake, tmp_path) as (engine, _):
            return engine.capabilities.honours_seed

    assert asyncio.run(attach(is_deterministic=True))
    with pytest.RaisesGroup(
        pytest.RaisesExc(EngineError, match="started without --enable-deterministic-inference"), flatten_subgroups=True
    ):
        asyncio.run(attach(is_deterministic=False))
