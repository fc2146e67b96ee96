"""The JSON control plane and the life of a connection."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from tests.engines.models import ask, make_engine
from tests.engines.reading import collect, ids, until_tokens
from tests.engines.test_contract import attached, served

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.remote import RemoteEngine
from midflight.errors import EngineUnavailable
from midflight.types import PauseMode
from midflight.types.facts import unheard


def over_http(test: Callable[[aiohttp.ClientSession, EmbeddedEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = make_engine()
        headers = {"Authorization": "Bearer secret"}
        async with served(engine) as url, aiohttp.ClientSession(url, headers=headers) as session:
            await test(session, engine)

    asyncio.run(main())


BODY = {
    "input_ids": list(b"hello"),
    "rid": "r",
    "sampling_params": {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": True},
    "return_logprob": True,
}


def test_generate_answers_in_sglangs_shape() -> None:
    expected = make_engine().generate_all([ask(seed=5, max_tokens=6)])[0]

    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        async with session.post("/generate", json=BODY) as answer:
            assert answer.status == 200
            body = await answer.json()
        assert tuple(body["output_ids"]) == expected.token_ids
        meta = body["meta_info"]
        assert meta["id"] == "r" and meta["prompt_tokens"] == 5 and meta["completion_tokens"] == 6
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        assert meta["weight_version"] == "0" and meta["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
        assert meta["output_token_logprobs"] == [
            [pytest.approx(p), i, None] for p, i in zip(expected.logprobs, expected.token_ids, strict=True)
        ]
        text = {**BODY, "text": "hello", "input_ids": None}
        async with session.post("/generate", json=text) as answer:
            assert (await answer.json())["output_ids"] == body["output_ids"]

    over_http(test)


def test_generate_takes_sglangs_names_for_penalties_biases_grammars_and_alternatives() -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        async def answer(top: int = 0, **params: object) -> dict[str, Any]:
            body = {**BODY, "top_logprobs_num": top, "sampling_params": {**BODY["sampling_params"], "temperature": 0.01, **params}}  # type: ignore[dict-item]
            async with session.post("/generate", json=body) as response:
                assert response.status == 200
                return await response.json()

        four = {str(i): 60 for i in (70, 71, 72, 73)}
        said = (await answer(max_new_tokens=4, presence_penalty=2.0, frequency_penalty=0.0, repetition_penalty=1.0, logit_bias=four))[
            "output_ids"
        ]
        assert sorted(said) == [70, 71, 72, 73]
        assert (await answer(regex="(ab){2}"))["output_ids"] == [*b"abab", 256]
        assert (await answer(ebnf='start: "a" "b"'))["text"] == "ab"
        assert (await answer(json_schema='{"const": 7, "x-guidance": {"whitespace_flexible": false}}'))["text"] == "7"
        meta = (await answer(top=2, temperature=1.0))["meta_info"]
        assert [len(likeliest) for likeliest in meta["output_top_logprobs"]] == [2] * 6
        assert all(p <= 0 and 0 <= i < 262 and text is None for token in meta["output_top_logprobs"] for p, i, text in token)
        assert (await answer())["meta_info"].get("output_top_logprobs") is None

    over_http(test)


def test_a_streamed_answer_ends_as_the_whole_one() -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        async with session.post("/generate", json=BODY) as answer:
            whole = await answer.json()
        async with session.post("/generate", json={**BODY, "stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            events = [line[6:] for line in (await answer.text()).split("\n\n") if line]
        assert events[-1] == "[DONE]"
        parts = [json.loads(e) for e in events[:-1]]
        lengths = [len(p["output_ids"]) for p in parts]
        assert lengths == sorted(set(lengths)) and lengths[0] < lengths[-1] == 6
        assert parts[-1] == whole

    over_http(test)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("/generate", {**BODY, "sampling_params": {"temperature": -1}}, 400, "temperature", "-1"),
        ("/generate", {**BODY, "sampling_params": {"temprature": 1}}, 400, "sampling_params", "temprature"),
        ("/generate", {**BODY, "sampling_params": {"n": 2}}, 400, "n", "2"),
        ("/generate", {**BODY, "sampling_params": {"repetition_penalty": 0}}, 400, "repetition_penalty", "0"),
        ("/generate", {**BODY, "sampling_params": {"logit_bias": {"a": 1}}}, 400, "logit_bias", "'a'"),
        ("/generate", {**BODY, "sampling_params": {"logit_bias": {"300": 1}}}, 400, "logit_bias", "300"),
        ("/generate", {**BODY, "sampling_params": {"regex": "a", "ebnf": 'start: "a"'}}, 400, "json_schema", "one form"),
        ("/generate", {**BODY, "sampling_params": {"regex": "("}}, 400, "grammar", "unclosed"),
        ("/generate", {**BODY, "top_logprobs_num": 21}, 400, "top_logprobs", "21"),
        ("/generate", {**BODY, "input_ids": [5, 300]}, 400, "input_ids", "300"),
        ("/generate", {**BODY, "input_ids": [5] * 64}, 400, "input_ids", "64"),
        ("/generate", {"rid": "x"}, 400, "input_ids", "exactly one"),
        ("/generate", {**BODY, "input_ids": "five", "stream": True}, 400, "input_ids", "input_ids"),
        ("/pause_generation", {"mode": "nap"}, 400, "mode", "nap"),
        ("/abort_request", {}, 400, "rid", "names no request"),
        ("/commit_weights", {"version": 9}, 503, None, "version 9"),
        ("/stage_weights", {"version": 9}, 400, None, "fingerprint"),
    ],
)
def test_bad_bodies_get_openai_errors_and_the_server_goes_on(path: str, body: object, status: int, param: str | None, says: str) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        async with session.post(path, json=body) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (status, param)
            assert says in error["message"] and error["code"] and error["type"]
        async with session.post("/generate", json=BODY) as answer:
            assert answer.status == 200

    over_http(test)


def test_everything_but_health_needs_the_token() -> None:
    async def main() -> None:
        async with served(make_engine()) as url, aiohttp.ClientSession(url) as session:
            assert (await session.get("/health")).status == 200
            refused = await session.post("/generate", json=BODY)
            assert refused.status == 401 and (await refused.json())["error"]["code"] == "invalid_api_key"
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect("/engine/v1/stream")
            stranger = RemoteEngine("stranger", url, token="wrong", record=unheard)
            task = asyncio.ensure_future(stranger.run())
            with pytest.raises(EngineUnavailable, match="did not answer within"):
                await stranger.connect(seconds=0.2)
            task.cancel()

    asyncio.run(main())


@pytest.mark.parametrize(("name", "mode"), [("in_place", PauseMode.KEEP), ("retract", PauseMode.RECOMPUTE), ("drain", PauseMode.DRAIN)])
def test_pauses_go_by_sglangs_names_and_our_own(name: str, mode: PauseMode) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        assert (await session.post("/pause_generation", json={"mode": name})).status == 200
        assert engine._scheduler.paused is mode
        assert (await (await session.get("/health")).json())["paused"] is True
        assert (await session.post("/continue_generation", json={})).status == 200
        assert engine._scheduler.paused is None

    over_http(test)


def test_metrics_and_model_info_show_progress_and_version() -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        await session.post("/generate", json=BODY)
        metrics = await (await session.get("/metrics")).text()
        assert "midflight_engine_output_tokens_total 6.0" in metrics and "midflight_engine_weight_version 0.0" in metrics
        info = await (await session.get("/model_info")).json()
        assert info["weight_version"] == "0" and info["capabilities"]["vocab_size"] == 262

    over_http(test)


def test_a_client_that_leaves_frees_its_slot() -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        await engine.pause(PauseMode.KEEP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.post("/generate", json=BODY)
        await engine.resume()
        await engine.pause(PauseMode.DRAIN)
        health = await engine.health()
        assert health.num_tokens < 6 and health.num_running + health.num_waiting == 0

    over_http(test)


def test_i9_a_lost_connection_ends_open_requests_at_once_and_a_new_one_serves_again() -> None:
    """I9: while there is no connection, requests are refused, not held."""

    async def main() -> None:
        async with served(make_engine()) as url:
            async with attached(url) as remote:
                chunks = remote.generate(ask(max_tokens=50))
                await until_tokens(chunks, 1)
                for protocol in list(remote._session.connector._acquired):  # type: ignore[union-attr]
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
            remote = RemoteEngine("remote", url, token="secret", record=unheard)
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
