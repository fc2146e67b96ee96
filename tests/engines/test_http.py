"""The JSON control plane and the life of a connection."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import aiohttp
import pytest
from tests.engines.models import ask, make_engine
from tests.engines.reading import collect, ids, until_tokens
from tests.engines.test_contract import attached, served

from midflight.engines.embedded import scheduler
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.remote import RemoteEngine
from midflight.errors import EngineUnavailable, RequestRejected
from midflight.types import PauseMode
from midflight.types.facts import EngineStepped, Fact, record_nothing


def over_http(test: Callable[[aiohttp.ClientSession, EmbeddedEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = make_engine()
        headers = {"Authorization": "Bearer secret"}
        async with served(engine) as url, aiohttp.ClientSession(url, headers=headers) as session:
            await test(session, engine)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("pause", {"mode": "nap"}, 400, "mode", "nap"),
        ("abort", {}, 400, "rid", "names no request"),
        ("commit", {"version": 9}, 503, None, "version 9"),
        ("stage", {"version": 9}, 400, None, "fingerprint"),
        ("stage", {"version": 2**70, "fingerprint": "", "transport": "", "location": "", "tensors": []}, 400, "version", str(2**70)),
        ("commit", {"version": 2**70}, 400, "version", "2147483647"),
    ],
)
def test_bad_bodies_get_openai_errors_and_the_server_goes_on(path: str, body: object, status: int, param: str | None, says: str) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        async with session.post(f"/engine/v1/{path}", json=body) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (status, param)
            assert says in error["message"] and error["code"] and error["type"]
        assert (await session.post("/engine/v1/pause", json={"mode": "keep"})).status == 200

    over_http(test)


def test_steps_of_an_engine_whose_clock_began_days_before_are_told_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6))
    told: list[Fact] = []

    async def main() -> None:
        async with served(make_engine()) as url, attached(url, told.append) as remote:
            began = time.monotonic()
            assert len(ids(await collect(remote, ask("abc", max_tokens=5)))) == 5
            steps = [fact for fact in told if isinstance(fact, EngineStepped)]
            assert steps
            assert all(began - 0.01 <= step.started <= step.ended <= time.monotonic() for step in steps)

    asyncio.run(main())


def test_everything_but_health_needs_the_token() -> None:
    async def main() -> None:
        async with served(make_engine()) as url, aiohttp.ClientSession(url) as session:
            assert (await session.get("/health")).status == 200
            refused = await session.post("/engine/v1/pause", json={"mode": "keep"})
            assert refused.status == 401 and (await refused.json())["error"]["code"] == "invalid_api_key"
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect("/engine/v1/stream")
            stranger = RemoteEngine("stranger", url, token="wrong", record=record_nothing)
            task = asyncio.ensure_future(stranger.run())
            with pytest.raises(EngineUnavailable, match="did not answer within"):
                await stranger.connect(seconds=0.2)
            task.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("mode", PauseMode)
def test_a_pause_is_in_the_mode_that_was_sent(mode: PauseMode) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        assert (await session.post("/engine/v1/pause", json={"mode": mode})).status == 200
        assert engine._scheduler.paused is mode
        assert (await (await session.get("/health")).json())["paused"] is True
        assert (await session.post("/engine/v1/resume", json={})).status == 200
        assert engine._scheduler.paused is None

    over_http(test)


def test_metrics_show_progress_and_version() -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        await collect(engine, ask(max_tokens=6))
        metrics = await (await session.get("/metrics")).text()
        assert "midflight_engine_output_tokens_total 6.0" in metrics and "midflight_engine_weight_version 0.0" in metrics

    over_http(test)


def test_i9_a_lost_connection_ends_open_requests_at_once_and_a_new_one_serves_again() -> None:
    """I9: while there is no connection, requests are refused, not held."""

    async def main() -> None:
        async with served(make_engine()) as url:
            async with attached(url) as remote:
                chunks = remote.generate(ask(max_tokens=50))
                await until_tokens(chunks, 1)
                for protocol in list(remote._http._session.connector._acquired):  # type: ignore[union-attr]
                    protocol.transport.abort()
                with pytest.raises(EngineUnavailable, match="cut off"):
                    await until_tokens(chunks, 50)
                with pytest.raises(EngineUnavailable, match="not attached"):
                    await collect(remote, ask())
            async with attached(url) as remote:
                assert len(ids(await collect(remote, ask()))) == 8
                await remote.pause(PauseMode.DRAIN)
                assert (await remote.health()).num_running == 0

    asyncio.run(main())


def test_a_client_whose_server_dies_attaches_to_its_successor() -> None:
    async def main() -> None:
        async with served(make_engine()) as url:
            remote = RemoteEngine("remote", url, token="secret", record=record_nothing)
            task = asyncio.ensure_future(remote.run())
            await remote.connect(seconds=5)
            chunks = remote.generate(ask(max_tokens=50))
            await until_tokens(chunks, 1)
        with pytest.raises(EngineUnavailable, match="cut off"):
            await until_tokens(chunks, 50)
        async with served(make_engine(), port=int(url.rsplit(":", 1)[1])):
            await remote.connect(seconds=5)
            assert len(ids(await collect(remote, ask()))) == 8
        task.cancel()

    asyncio.run(main())


def test_a_request_that_the_wire_cannot_carry_is_refused_and_the_others_go_on() -> None:
    async def main() -> None:
        async with served(make_engine()) as url, attached(url) as remote, asyncio.TaskGroup() as tasks:
            other = tasks.create_task(collect(remote, ask(max_tokens=20)))
            with pytest.raises(RequestRejected, match="Send smaller numbers"):
                await collect(remote, ask(request_id="large", top_k=2**65))
            with pytest.raises(RequestRejected, match="top_k"):
                await collect(remote, ask(request_id="large", top_k=2**40))
            assert len(ids(await other)) == 20

    asyncio.run(main())
