"""What only real servers can show: their death, their silence, other hands on them, and weights that are not as they were.

The last tests kill the server, and start it again on the same port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import torch
from tests.engines.contract_weights import check_labels, update
from tests.engines.models import ask
from tests.engines.reading import ABORTED, LENGTH, collect, ids, labels, logprobs, until_tokens
from tests.engines.sites import ModelSite
from tests.real_engines.process import ServerProcess
from tests.real_engines.reference import labelled_logprobs
from tests.real_engines.sites import STAGING, attached, untied

from midflight.errors import EngineError, EngineUnavailable
from midflight.models.names import named_tensors
from midflight.types import PauseMode

GREEDY = {"temperature": 0.0}
LONG = {"max_tokens": 150}
GIVE_UP_SECONDS = 0.5
"""A caller's patience with a server that does not answer."""


@pytest.fixture
def on(untied_server: ServerProcess) -> Callable[[Callable[[ModelSite], Awaitable[None]]], None]:
    def run(test: Callable[[ModelSite], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(100), attached(untied_server, untied) as site:
                await test(site)

        asyncio.run(main())

    return run


async def post(server: ServerProcess, path: str, body: dict[str, object] | None = None) -> None:
    async with aiohttp.ClientSession() as session, session.post(server.url + path, json=body or {}) as answer:
        assert answer.status == 200, await answer.text()


def test_in_keep_tokens_after_the_commit_are_of_the_new_weights_over_the_keys_of_the_old(on: Any) -> None:
    """So the boundary is exactly where the engine says that it is."""

    async def test(site: ModelSite) -> None:
        request = ask("The quick brown fox", **LONG)
        chunks = site.engine.generate(request)
        got = await until_tokens(chunks, 5)
        await update(site, 1, PauseMode.KEEP)
        got += [c async for c in chunks]
        check_labels(got)
        assert set(labels(got)) == {(0, 0), (1, 0)}
        expected = labelled_logprobs(site.models, request.input_ids, ids(got), labels(got))
        assert logprobs(got) == pytest.approx(expected, abs=1e-4, rel=0)

    on(test)


def test_with_recompute_tokens_after_the_commit_are_of_the_new_weights_alone(on: Any) -> None:
    async def test(site: ModelSite) -> None:
        request = ask("The quick brown fox", **LONG)
        chunks = site.engine.generate(request)
        got = await until_tokens(chunks, 5)
        await update(site, 1, PauseMode.RECOMPUTE)
        got += [c async for c in chunks]
        check_labels(got)
        boundary = [v for v, _ in labels(got)].index(1)
        expected = site.logprobs(0, request, ids(got))[:boundary] + site.logprobs(1, request, ids(got))[boundary:]
        assert logprobs(got) == pytest.approx(expected, abs=1e-4, rel=0)

    on(test)


def test_weights_in_another_precision_are_converted(on: Any) -> None:
    async def test(site: ModelSite) -> None:
        rounded = {name: tensor.bfloat16() for name, tensor in named_tensors(site.models(1)).items()}
        await site.engine.stage(site.receiver.publish_tensors(1, rounded))
        await site.engine.commit(1)
        site.models = lambda _: as_served
        assert logprobs(got := await collect(site.engine, request)) == pytest.approx(site.logprobs(1, request, ids(got)), abs=1e-4, rel=0)

    request = ask("The quick brown fox", max_tokens=20)
    as_served = untied.__wrapped__(1)
    with torch.no_grad():
        for parameter in as_served.parameters():
            parameter.copy_(parameter.bfloat16())
    on(test)


def test_i7_a_version_whose_file_cannot_be_loaded_leaves_the_version_before_it_and_the_next_one_is_served(on: Any) -> None:
    """SGLang goes back to the file that it could not read, and would end of it."""

    async def test(site: ModelSite) -> None:
        await site.engine.stage(site.publish(1))
        files = STAGING.glob("midflight-test-*/*/model.safetensors")
        newest = max(files, key=lambda file: file.stat().st_mtime_ns)
        newest.write_bytes(b"damaged")
        with pytest.raises(EngineError, match="serves version 0 again"):
            await site.engine.commit(1)
        for version in (0, 2):
            if version:
                await update(site, version, PauseMode.RECOMPUTE)
            answer = await collect(site.engine, request)
            assert set(labels(answer)) == {(version, version)}
            assert logprobs(answer) == pytest.approx(site.logprobs(version, request, ids(answer)), abs=1e-4, rel=0)

    request = ask("The quick brown fox", max_tokens=20)
    on(test)


def test_a_server_that_others_paused_is_resumed_when_it_is_attached(untied_server: ServerProcess) -> None:
    async def main() -> None:
        async with attached(untied_server, untied) as first:
            await first.engine.pause(PauseMode.KEEP)
        async with asyncio.timeout(60), attached(untied_server, untied) as second:
            assert not (await second.engine.health()).paused
            assert len(ids(await collect(second.engine, ask()))) == 8

    asyncio.run(main())


def test_a_server_with_weights_of_others_is_given_its_own_when_it_is_attached(untied_server: ServerProcess) -> None:
    async def main() -> None:
        async with attached(untied_server, untied) as first:
            await update(first, 1, None)
        async with asyncio.timeout(60), attached(untied_server, untied) as second:
            assert (await second.engine.health()).version == 0
            answer = await collect(second.engine, ask(**GREEDY))
            assert all(second.chosen(0, ask(**GREEDY), ids(answer))) and set(labels(answer)) == {(0, 0)}

    asyncio.run(main())


def test_a_paused_server_is_healthy(on: Any, untied_server: ServerProcess) -> None:
    async def test(site: ModelSite) -> None:
        for mode in (PauseMode.KEEP, PauseMode.RECOMPUTE, PauseMode.ABORT):
            await site.engine.pause(mode)
            async with asyncio.timeout(5):
                assert (await site.engine.health()).paused
            await site.engine.resume()
        async with aiohttp.ClientSession() as session, session.get(untied_server.url + "/health") as answer:
            assert answer.status == 200

    on(test)


def test_calls_to_a_server_that_hangs_end_when_their_caller_gives_up_and_it_works_when_it_is_back(
    on: Any, untied_server: ServerProcess
) -> None:
    async def test(site: ModelSite) -> None:
        engine, request = site.engine, ask(request_id="watched", **LONG)
        chunks = engine.generate(request)
        got = await until_tokens(chunks, 2)
        await engine.stage(site.publish(1))
        calls = {
            "health": engine.health,
            "commit": lambda: engine.commit(1),
            "pause": lambda: engine.pause(PauseMode.RECOMPUTE),
            "resume": engine.resume,
            "generate": lambda: collect(engine, ask()),
        }
        untied_server.freeze()
        try:
            for call in calls.values():
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(GIVE_UP_SECONDS):
                        await call()
            async with asyncio.timeout(GIVE_UP_SECONDS + 2.5):  # the server's last words are waited for
                await engine.abort("watched")
                got += [c async for c in chunks]
            assert got[-1].finish == ABORTED
        finally:
            untied_server.thaw()
        await engine.resume()
        await engine.pause(PauseMode.RECOMPUTE)
        await engine.stage(site.publish(2))
        await engine.commit(2)
        await engine.resume()
        answer = await collect(engine, ask(**GREEDY))
        assert all(site.chosen(2, ask(**GREEDY), ids(answer)))

    on(test)


def test_a_killed_server_ends_its_requests_at_once_and_is_given_its_version_when_it_is_back(on: Any, untied_server: ServerProcess) -> None:
    async def test(site: ModelSite) -> None:
        engine = site.engine
        await update(site, 1, None)
        chunks = engine.generate(ask(**LONG))
        await until_tokens(chunks, 2)
        frozen = engine.generate(ask(request_id="frozen", **LONG))
        await until_tokens(frozen, 1)
        await asyncio.to_thread(untied_server.kill)
        async with asyncio.timeout(2):
            for stream in (chunks, frozen):
                with pytest.raises(EngineUnavailable):
                    await until_tokens(stream, 1000)
            for call in (engine.health, lambda: collect(engine, ask()), lambda: engine.pause(PauseMode.KEEP)):
                with pytest.raises(EngineUnavailable):
                    await call()
        untied_server.start()
        await asyncio.to_thread(untied_server.wait)
        assert (await engine.health()).version == 1
        await engine.resume()
        answer = await collect(engine, ask(**GREEDY))
        assert answer[-1].finish == LENGTH
        assert all(site.chosen(1, ask(**GREEDY), ids(answer))) and set(labels(answer)) == {(1, 1)}

    on(test)
