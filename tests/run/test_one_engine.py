"""`midflight engine`: the gateway's routes over one engine in the same process, and weights from outside."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.engines.reading import collect, ids
from tests.engines.sites import tiny_version
from tests.engines.test_contract import attached, running
from tests.models.tiny import tiny_model

from midflight.config.sections import Config
from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.engines.relay import relay_steps
from midflight.errors import RequestRejected
from midflight.run.launcher.one_engine import OneEngineSite
from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.types import PauseMode
from midflight.weights.transports.select import receiver
from midflight.wire.server import listen


@asynccontextmanager
async def alone(engine: EmbeddedEngine, folder: Path, *, token: str | None = "secret") -> AsyncIterator[str]:
    """The URL."""
    write_byte_tokenizer(folder)
    ready = asyncio.Event()
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        site = OneEngineSite(Config(), folder, Tokenizer.load(folder), listener, url, token, ready=lambda url: ready.set(), alarmed=print)
        async with running(engine), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(site.serve(engine, relay_steps, scorer=engine))
            await ready.wait()
            try:
                yield url
            finally:
                task.cancel()


@pytest.fixture
def over_http(tmp_path: Path) -> Callable[[Callable[[aiohttp.ClientSession, EmbeddedEngine], Awaitable[None]]], None]:
    def run(test: Callable[[aiohttp.ClientSession, EmbeddedEngine], Awaitable[None]]) -> None:
        async def main() -> None:
            engine = make_engine(receiver=MemoryReceiver())
            headers = {"Authorization": "Bearer secret"}
            async with alone(engine, tmp_path / "model") as url, aiohttp.ClientSession(url, headers=headers) as session:
                await test(session, engine)

        asyncio.run(main())

    return run


BODY = {
    "input_ids": list(b"hello"),
    "rid": "r",
    "sampling_params": {"max_new_tokens": 6, "temperature": 1.0, "sampling_seed": 5, "ignore_eos": True},
    "return_logprob": True,
}


def test_generate_answers_in_sglangs_shape(over_http: Any) -> None:
    expected = make_engine().generate_all([ask(seed=5, max_tokens=6)])[0]

    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        async with session.post("/generate", json=BODY) as answer:
            assert answer.status == 200
            body = await answer.json()
        assert tuple(body["output_ids"]) == expected.token_ids
        meta = body["meta_info"]
        assert meta["id"] == "r" and meta["prompt_tokens"] == 5 and meta["completion_tokens"] == 6
        assert meta["finish_reason"] == {"type": "length", "length": 6}
        assert meta["weight_version"] == "0" and meta["weight_versions"] == [{"version": 0, "start": 0, "end": 6}]
        assert meta["output_token_logprobs"] == [
            [pytest.approx(p), i, None] for p, i in zip(expected.logprobs, expected.token_ids, strict=True)
        ]
        text = {**BODY, "text": "hello", "input_ids": None}
        async with session.post("/generate", json=text) as answer:
            assert (await answer.json())["output_ids"] == body["output_ids"]

    over_http(test)


def test_generate_takes_sglangs_names_for_penalties_biases_grammars_and_alternatives(over_http: Any) -> None:
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


def test_a_streamed_answer_ends_as_the_whole_one(over_http: Any) -> None:
    def rounded(number: str) -> float:  # the keys of the second request's prompt are those of the first
        return round(float(number), 4)

    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        async with session.post("/generate", json=BODY) as answer:
            whole = json.loads(await answer.text(), parse_float=rounded)
        step = engine._scheduler.step
        engine._scheduler.step = lambda: (time.sleep(0.05), step())[1]  # type: ignore[method-assign]  # so that it comes in pieces
        async with session.post("/generate", json={**BODY, "stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            events = [line[6:] for line in (await answer.text()).split("\n\n") if line]
        assert events[-1] == "[DONE]"
        parts = [json.loads(e, parse_float=rounded) for e in events[:-1]]
        lengths = [len(p["output_ids"]) for p in parts]
        assert lengths == sorted(lengths) and lengths[0] < lengths[-1] == 6
        assert parts[-1] == whole

    over_http(test)


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("/generate", {**BODY, "sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature", "-1"),
        ("/generate", {**BODY, "sampling_params": {"temprature": 1}}, 400, "sampling_params.temprature", "temprature"),
        ("/generate", {**BODY, "sampling_params": {"repetition_penalty": 0}}, 400, "sampling_params.repetition_penalty", "0"),
        ("/generate", {**BODY, "sampling_params": {"logit_bias": {"a": 1}}}, 400, "sampling_params.logit_bias.a", "'a'"),
        ("/generate", {**BODY, "sampling_params": {"logit_bias": {"300": 1}}}, 400, "sampling_params.logit_bias", "300"),
        (
            "/generate",
            {**BODY, "sampling_params": {"regex": "a", "ebnf": 'start: "a"'}},
            400,
            "sampling_params.ebnf",
            "sampling_params.regex and sampling_params.ebnf",
        ),
        ("/generate", {**BODY, "sampling_params": {"regex": "("}}, 400, "sampling_params.regex", "unclosed"),
        ("/generate", {**BODY, "top_logprobs_num": 21}, 400, "top_logprobs_num", "21"),
        ("/generate", {**BODY, "input_ids": [5, 300]}, 400, "input_ids", "300"),
        ("/generate", {**BODY, "input_ids": [5] * 64}, 400, "input_ids", "64"),
        ("/generate", {"rid": "x"}, 400, "input_ids", "exactly one"),
        ("/generate", {**BODY, "input_ids": [1.5], "stream": True}, 400, "input_ids.0", "input_ids"),
        ("/pause_generation", {"mode": "nap"}, 400, "mode", "nap"),
        ("/abort_request", {}, 400, "rid", "rid is missing"),
        ("/commit_weights", {"version": 9}, 503, None, "version 9"),
        ("/stage_weights", {"version": 9}, 400, None, "fingerprint"),
    ],
)
def test_bad_bodies_get_openai_errors_and_the_server_goes_on(
    over_http: Any, path: str, body: object, status: int, param: str | None, says: str
) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        async with session.post(path, json=body) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (status, param)
            assert says in error["message"] and error["code"] and error["type"]
        async with session.post("/generate", json=BODY) as answer:
            assert answer.status == 200

    over_http(test)


@pytest.mark.parametrize(("name", "mode"), [("in_place", PauseMode.KEEP), ("retract", PauseMode.RECOMPUTE), ("drain", PauseMode.DRAIN)])
def test_pauses_go_by_sglangs_names_and_our_own(over_http: Any, name: str, mode: PauseMode) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        assert (await session.post("/pause_generation", json={"mode": name})).status == 200
        assert engine._scheduler.paused is mode
        assert (await (await session.get("/engine/v1/health")).json())["paused"] is True
        assert (await session.post("/continue_generation", json={})).status == 200
        assert engine._scheduler.paused is None

    over_http(test)


def test_metrics_and_model_info_show_progress_and_version(over_http: Any) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        await session.post("/generate", json=BODY)
        metrics = await (await session.get("/metrics")).text()
        assert "midflight_engine_output_tokens_total 6.0" in metrics and "midflight_engine_weight_version 0.0" in metrics
        info = await (await session.get("/model_info")).json()
        assert info["weight_version"] == "0" and info["capabilities"]["vocab_size"] == 262

    over_http(test)


def test_a_client_that_leaves_frees_its_slot(over_http: Any) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        await engine.pause(PauseMode.KEEP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await session.post("/generate", json=BODY)
        async with asyncio.timeout(10):
            while (health := await engine.health()).num_running + health.num_waiting:
                await asyncio.sleep(0.01)
        await engine.resume()
        await engine.pause(PauseMode.DRAIN)
        health = await engine.health()
        assert health.num_tokens < 6 and health.num_running + health.num_waiting == 0

    over_http(test)


def test_the_apis_of_the_gateway_come_with_it(over_http: Any) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True, "n": 2}
        async with session.post("/v1/chat/completions", json=chat) as answer:
            assert answer.status == 200 and (await answer.json())["usage"]["completion_tokens"] == 10
        async with session.post("/generate", json={**BODY, "sampling_params": {**BODY["sampling_params"], "n": 2}}) as answer:  # type: ignore[dict-item]
            assert [len(each["output_ids"]) for each in await answer.json()] == [6, 6]
        assert [model["id"] for model in (await (await session.get("/v1/models")).json())["data"]] == ["policy"]

    over_http(test)


def test_weights_from_outside_are_served_and_named_in_answers_also_after_a_pause(over_http: Any) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        receiver = engine._weights._receiver
        assert isinstance(receiver, MemoryReceiver)
        for version in (1, 2):
            manifest = receiver.publish(version, tiny_version(version))
            if version == 2:
                assert (await session.post("/pause_generation", json={"mode": "in_place"})).status == 200
            data = msgspec.json.encode(manifest)
            assert (await session.post("/stage_weights", data=data)).status == 200
            async with session.post("/commit_weights", json={"version": version}) as answer:
                assert await answer.json() == {"version": version, "fingerprint": manifest.fingerprint}
            if version == 2:
                assert (await session.post("/continue_generation")).status == 200
            async with session.post("/generate", json=BODY) as answer:
                assert (await answer.json())["meta_info"]["weight_version"] == str(version)
            assert (await (await session.get("/model_info")).json())["weight_version"] == str(version)

    over_http(test)


def test_tokens_of_prompts_are_scored(over_http: Any) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        prompt = list(b"hello")
        scores = await engine.score(np.array(prompt, np.int32), np.array([0, 5], np.int32), temperature=1.0)
        async with session.post("/generate", json=BODY | {"logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}) as answer:
            told = (await answer.json())["meta_info"]["input_token_logprobs"]
        assert [i for _, i, _ in told] == prompt and told[0][0] is None
        assert [p for p, _, _ in told[1:]] == pytest.approx(scores[1:].tolist())
        async with attached(str(session._base_url)) as remote:
            likely = await remote.prompt_logprobs(prompt, top=2)
            assert [(at[0][0], len(at)) for at in likely] == [(i, 3) for i in prompt[1:]]
            with pytest.raises(RequestRejected, match="300"):
                await remote.prompt_logprobs([1, 300], top=0)

    over_http(test)


def test_weights_are_taken_from_a_folder_as_sglangs_clients_ask(tmp_path: Path) -> None:
    async def main() -> None:
        model, new = tmp_path / "model", tmp_path / "new"
        tiny_model().save_pretrained(model)
        changed = tiny_model()
        with torch.no_grad():
            for parameter in changed.parameters():
                parameter.mul_(1.5)
        changed.save_pretrained(new)
        engine = make_engine(receiver=receiver())
        async with alone(engine, model, token=None) as url, aiohttp.ClientSession(url) as session:

            async def update(status: int, **body: object) -> Any:
                async with session.post("/update_weights_from_disk", json=body) as answer:
                    told = await answer.json()
                    assert answer.status == status, told
                    return told

            assert "no model.safetensors" in (await update(400, model_path=str(tmp_path)))["error"]["message"]
            assert (await update(200, model_path=str(new), abort_all_requests=True))["success"] is True
            async with session.post("/generate", json=BODY) as answer:
                told = await answer.json()
            assert told["meta_info"]["weight_version"] == "1"
            assert tuple(told["output_ids"]) == make_engine(changed).generate_all([ask(seed=5, max_tokens=6)])[0].token_ids
            assert (await update(200, model_path=str(model), weight_version="7"))["weight_version"] == "7"
            assert "version 7 is served" in (await update(400, model_path=str(model), weight_version="7"))["error"]["message"]

    asyncio.run(main())


def test_a_rollout_process_can_attach_to_it(over_http: Any) -> None:
    async def test(session: aiohttp.ClientSession, engine: EmbeddedEngine) -> None:
        async with attached(str(session._base_url)) as remote:
            assert len(ids(await collect(remote, ask()))) == 8
            await remote.pause(PauseMode.KEEP)
            assert (await remote.health()).paused
            await remote.resume()

    over_http(test)


def test_everything_but_health_asks_for_the_token_and_without_one_nothing_does(tmp_path: Path) -> None:
    async def main() -> None:
        paths = ("/generate", "/v1/chat/completions", "/pause_generation", "/stage_weights", "/commit_weights", "/engine/v1/pause")
        async with alone(make_engine(), tmp_path / "a") as url, aiohttp.ClientSession(url) as stranger:
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                for path in paths:
                    async with stranger.post(path, json=BODY, headers=headers) as answer:
                        assert answer.status == 401 and (await answer.json())["error"]["code"] == "invalid_api_key"
                for path in ("/metrics", "/model_info", "/v1/models", "/openapi.json"):
                    assert (await stranger.get(path, headers=headers)).status == 401
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    await stranger.ws_connect("/engine/v1/stream", headers=headers)
            assert (await stranger.get("/health")).status == 200
        async with alone(make_engine(), tmp_path / "b", token=None) as url, aiohttp.ClientSession(url) as anyone:
            assert (await anyone.post("/generate", json=BODY)).status == 200
            assert (await anyone.post("/pause_generation")).status == 200
            assert (await anyone.get("/metrics")).status == 200

    asyncio.run(main())
