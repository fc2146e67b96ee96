from __future__ import annotations

import asyncio
import json
import logging
from functools import partial

import httpx2
import openai
import pytest
import uvicorn
from prometheus_client import CollectorRegistry, Counter
from tests.gateway.offered import DEFAULTS, KEY, RecordingControl, ScriptedGenerator, make_gateway, offered

from midflight.errors import EngineUnavailable, NoEngine, RequestRejected
from midflight.gateway.http.answer_stream import KEEP_ALIVE_SECONDS
from midflight.gateway.http.chats import InProcessChats
from midflight.gateway.http.http import build_app
from midflight.testing.virtual_time import run_virtual
from midflight.types import PauseMode, Reason
from midflight.types.facts import RequestFailed
from midflight.wire.memory import MemoryTransport

CHAT = [{"role": "user", "content": "hi"}]


def test_the_sdk_chats_in_a_session_over_several_turns() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["yo<|end|>", "bye<|end|>"])) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            client = it.sdk(base_url=handle.base_url)
            first = await client.chat.completions.create(model="policy", messages=CHAT, logprobs=True)
            assert first.choices[0].message.content == "yo"
            assert first.choices[0].finish_reason == "stop"
            assert (first.usage.prompt_tokens, first.usage.completion_tokens, first.usage.total_tokens) == (5, 3, 8)
            logprobs = first.choices[0].logprobs.content
            assert [(t.token, t.logprob, t.bytes) for t in logprobs[:2]] == [("y", -0.5, [121]), ("o", -1.0, [111])]
            again = [*CHAT, first.choices[0].message.model_dump(), {"role": "user", "content": "so?"}]
            second = await client.chat.completions.create(model="policy", messages=again, extra_body={"return_token_ids": True})
            assert second.prompt_token_ids == list(
                it.gateway.tokenizer.encode("<|user|>hi<|end|><|assistant|>yo<|end|><|user|>so?<|end|><|assistant|>")
            )
            assert second.choices[0].token_ids == [*b"bye", 256]
            assert second.choices[0].weight_versions == [{"version": 0, "start": 0, "end": 2}, {"version": 1, "start": 2, "end": 4}]
            record = it.gateway.close(handle.session_id)
            assert (record.num_turns, record.num_branches, len(record.rows), record.failed_requests) == (2, 0, 1, 0)

    run_virtual(main())


def test_a_streamed_chat_says_what_the_whole_one_says() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["ab東<|end|>"] * 2)) as it:
            client = it.sdk()
            whole = await client.chat.completions.create(model="policy", messages=CHAT, logprobs=True)
            stream = await client.chat.completions.create(
                model="policy", messages=CHAT, logprobs=True, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
            streamed = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
            assert streamed == whole.choices[0].logprobs.content
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
            assert chunks[-1].usage == whole.usage

    run_virtual(main())


def test_tokens_are_streamed_as_they_come() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["abc<|end|>"], seconds_per_token=1.0)) as it:
            stream = await it.sdk().chat.completions.create(model="policy", messages=CHAT, stream=True)
            times = [asyncio.get_running_loop().time() async for chunk in stream if chunk.choices[0].delta.content]
            assert [round(t - times[0]) for t in times] == [0, 1, 2]

    run_virtual(main())


def test_stop_strings_never_show_even_in_part() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["a ENd END"] * 2)) as it:
            client = it.sdk()
            stream = await client.chat.completions.create(model="policy", messages=CHAT, stop="END", stream=True)
            shown = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(shown) == "a ENd "
            whole = await client.chat.completions.create(model="policy", messages=CHAT, stop=["END"])
            assert whole.choices[0].message.content == "a ENd "

    run_virtual(main())


def test_text_completions_take_batches_and_keep_their_order() -> None:
    async def main() -> None:
        async with offered() as it:
            client = it.sdk()
            batch = await client.completions.create(model="policy", prompt=[[97, 98], [99]], n=2, max_tokens=3, logprobs=0, seed=1)
            assert [c.index for c in batch.choices] == [0, 1, 2, 3]
            assert batch.usage.prompt_tokens == 3
            assert [len(c.logprobs.tokens) for c in batch.choices] == [len(c.logprobs.token_logprobs) for c in batch.choices]
            assert batch.choices[0].logprobs.text_offset[:2] == [0, 1]
            stream = await client.completions.create(model="policy", prompt="ab", max_tokens=5, stream=True, seed=1)
            whole = await client.completions.create(model="policy", prompt="ab", max_tokens=5, seed=1)
            assert "".join([c.choices[0].text async for c in stream]) == whole.choices[0].text
            assert whole.choices[0].finish_reason == "length"

    run_virtual(main())


def test_native_generate_answers_as_sglang_does() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["ab<|end|>", "abc", "ab<|end|>"])) as it:
            body = {"input_ids": [1, 2], "rid": "r7", "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
            answer = (await it.http.post("/generate", json=body)).json()
            assert (answer["text"], answer["output_ids"]) == ("ab", [97, 98, 256])
            meta = answer["meta_info"]
            assert meta["finish_reason"] == {"type": "stop", "matched": 256}
            assert meta["output_token_logprobs"] == [[-0.5, 97, None], [-1.0, 98, None], [-1.5, 256, None]]
            assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == ("r7", 2, 3, "1")
            listed = (await it.http.post("/generate", json={"input_ids": [[1]], "sampling_params": {"max_new_tokens": 3}})).json()
            assert [a["meta_info"]["finish_reason"] for a in listed] == [{"type": "length", "length": 3}]
            streamed = (await it.http.post("/generate", json={"text": "x", "stream": True})).text
            frames = [line[6:] for line in streamed.split("\n\n") if line]
            assert frames[-1] == "[DONE]"
            assert [json.loads(f)["text"] for f in frames[:-1]] == ["a", "ab", "ab", "ab"]

    run_virtual(main())


def test_a_session_is_found_by_path_or_key_and_only_with_its_secret() -> None:
    async def main() -> None:
        async with offered() as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            await it.sdk(api_key=handle.api_key).chat.completions.create(model="policy", messages=CHAT)
            await it.sdk(base_url=handle.base_url).chat.completions.create(model="policy", messages=CHAT)
            await it.sdk(api_key="sk-none").chat.completions.create(model="policy", messages=CHAT)
            for client in (it.sdk(api_key=f"{handle.session_id}.no"), it.sdk(base_url=f"http://memory/s/{handle.session_id}.no/v1")):
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="policy", messages=CHAT)
            with pytest.raises(openai.NotFoundError):
                await it.sdk(base_url="http://memory/s/mf-x.y/v1").models.list()
            assert it.gateway.close(handle.session_id).num_turns == 2
            with pytest.raises(openai.APIStatusError) as caught:
                await it.sdk(base_url=handle.base_url).chat.completions.create(model="policy", messages=CHAT)
            assert (caught.value.status_code, caught.value.code) == (410, "session_closed")
            assert 410 not in [f.status for f in it.seen.of(RequestFailed)], "its owner has ended it: nothing has failed"

    run_virtual(main())


def test_without_anonymous_use_a_session_is_needed() -> None:
    async def main() -> None:
        async with offered(anonymous=False) as it:
            with pytest.raises(openai.AuthenticationError):
                await it.sdk().chat.completions.create(model="policy", messages=CHAT)

    run_virtual(main())


def test_errors_have_openais_shape_and_are_counted_at_the_edge() -> None:
    async def main() -> None:
        async with offered(strict=True) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            client = it.sdk(base_url=handle.base_url)
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="policy", messages=CHAT, max_tokens=10_000)
            assert caught.value.body == {
                "message": "This model's maximum context length is 256 tokens, but you asked for 10005 tokens (5 in the messages, 10000 in the"
                " answer). Shorten one of them.",
                "type": "invalid_request_error",
                "param": "max_tokens",
                "code": "context_length_exceeded",
            }
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.chat.completions.create(model="other", messages=CHAT)
            assert [f.status for f in it.seen.of(RequestFailed)] == [400, 404]
            assert it.gateway.close(handle.session_id).failed_requests == 2
            for method, path, status in [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/completions", 400)]:
                answer = await it.http.request(method, path)
                assert answer.status_code == status
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    run_virtual(main())


def test_an_engines_failure_says_when_to_try_again() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(error=NoEngine("no engine took it"))) as it:
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError) as caught:
                    await it.sdk().chat.completions.create(model="policy", messages=CHAT, stream=stream)
                assert (caught.value.status_code, caught.value.code) == (503, "no_engine")
                assert caught.value.response.headers["retry-after"] == "1"

    run_virtual(main())


def test_a_failure_in_mid_stream_is_the_streams_last_event() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(error=EngineUnavailable("gone"), error_after=2)) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            stream = await it.sdk(base_url=handle.base_url).chat.completions.create(model="policy", messages=CHAT, stream=True)
            text = ""
            with pytest.raises(openai.APIError, match="gone"):
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
            assert len(text) == 2
            record = it.gateway.close(handle.session_id)
            assert (record.failed_requests, record.dropped) == (1, {Reason.ABANDONED: 2})

    run_virtual(main())


def test_an_unexpected_failure_is_logged_and_tells_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(error=ZeroDivisionError("private"))) as it:
            with pytest.raises(openai.InternalServerError) as caught:
                await it.sdk().chat.completions.create(model="policy", messages=CHAT)
            assert caught.value.type == "internal_error" and "private" not in str(caught.value)

    with caplog.at_level(logging.ERROR):
        run_virtual(main())
    assert "private" in caplog.text


def test_silence_in_a_stream_is_filled_with_comments() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["a<|end|>"], seconds_per_token=2.5 * KEEP_ALIVE_SECONDS)) as it:
            body = {"model": "policy", "messages": CHAT, "stream": True}
            text = (await it.http.post("/v1/chat/completions", json=body, timeout=None)).text
            assert text.count(": waiting") == 4
            assert text.endswith("data: [DONE]\n\n")

    run_virtual(main())


def test_a_client_who_goes_takes_his_generation_with_him() -> None:
    async def main() -> None:
        long = "a longer answer than anyone waits for<|end|>"
        async with offered(ScriptedGenerator(texts=[long, long, long], seconds_per_token=1.0)) as it:
            for stream in (False, True):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(2.5):
                        answer = await it.sdk().chat.completions.create(model="policy", messages=CHAT, stream=stream)
                        async for _ in answer:
                            pass
                await asyncio.sleep(0.01)
                assert (it.gateway.num_running, it.generator.running) == (0, 0)
            stream = await it.sdk().chat.completions.create(model="policy", messages=CHAT, stream=True)
            await anext(stream.__aiter__())
            await stream.close()
            await asyncio.sleep(0.01)
            assert (it.gateway.num_running, it.generator.running) == (0, 0)
            assert it.seen.of(RequestFailed) == []

    run_virtual(main())


def test_a_request_is_under_way_until_its_answer_is_whole_or_its_client_has_gone() -> None:
    """An answer of 40 s, whole and as a stream that its client reads 100 s later; one that its client leaves after 2.5 s."""

    async def main() -> None:
        long = "a longer answer than anyone waits for<|end|>"
        async with offered(ScriptedGenerator(texts=[long, long, long], seconds_per_token=1.0)) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            clock, sdk = it.gateway.request_watch(handle.session_id), it.sdk(base_url=handle.base_url, api_key=handle.api_key)
            create = partial(sdk.chat.completions.create, model="policy", messages=CHAT, max_tokens=40)
            changes: list[bool] = []
            clock.on_change = lambda: changes.append(clock.waits)
            await create()
            assert clock.read().num_requests == 1 and clock.read().seconds == pytest.approx(38, abs=0.1)
            stream = await create(stream=True)
            await asyncio.sleep(138)
            assert clock.read().seconds == pytest.approx(2 * 38, abs=0.1) and not clock.waits
            await stream.close()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.5):
                    await create()
            await asyncio.sleep(0.01)
            assert clock.read().seconds == pytest.approx(2 * 38 + 2.5, abs=0.1) and changes == [True, False] * 3

    run_virtual(main())


def test_a_client_that_was_told_when_to_try_again_waits_until_then() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(), max_requests=0) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            clock, sdk = it.gateway.request_watch(handle.session_id), it.sdk(base_url=handle.base_url, api_key=handle.api_key)
            with pytest.raises(openai.RateLimitError) as caught:
                await sdk.chat.completions.create(model="policy", messages=CHAT)
            assert caught.value.response.headers["retry-after"] == "1" and clock.waits
            await asyncio.sleep(5)
            assert clock.read().seconds == pytest.approx(1, abs=0.01) and not clock.waits

    run_virtual(main())


def test_the_operators_routes_need_their_token_and_know_three_vocabularies() -> None:
    async def main() -> None:
        async with offered(control_token="t0p") as it:
            assert (await it.http.post("/pause_generation", json={"mode": "keep"})).status_code == 401
            headers = {"Authorization": "Bearer t0p"}
            for body in ({"mode": "keep"}, {"mode": "in_place"}, {"mode": "retract"}, {"mode": "wait"}, {"mode": "abort"}, {}):
                assert (await it.http.post("/pause_generation", json=body, headers=headers)).status_code == 200
            bad = await it.http.post("/pause_generation", json={"mode": "retreat"}, headers=headers)
            assert bad.status_code == 400 and "Did you mean 'retract'" in bad.json()["error"]["message"]
            await it.http.post("/continue_generation", headers=headers)
            await it.http.post("/abort_request", json={"rid": "x"}, headers=headers)
            await it.http.post("/abort_request", json={"abort_all": True}, headers=headers)
            assert (await it.http.post("/abort_request", json={}, headers=headers)).status_code == 400
            modes = [PauseMode.KEEP, PauseMode.KEEP, PauseMode.RECOMPUTE, PauseMode.DRAIN, PauseMode.ABORT, None]
            pauses = [
                act for mode in modes for act in ([("pause", mode), ("abort", None)] if mode is PauseMode.ABORT else [("pause", mode)])
            ]
            assert it.control.acts == [*pauses, ("resume", None), ("abort", "x"), ("abort", None)]

    run_virtual(main())


def test_models_and_health_tell_what_is_served() -> None:
    async def main() -> None:
        routable: list[str] = []
        async with offered(ready=lambda: bool(routable)) as it:
            assert [m.id for m in (await it.sdk().models.list()).data] == ["policy"]
            assert (await it.sdk().models.retrieve("policy")).id == "policy"
            with pytest.raises(openai.NotFoundError):
                await it.sdk().models.retrieve("other")
            assert (await it.http.get("/health")).status_code == 503
            routable.append("engine")
            assert (await it.http.get("/health")).status_code == 200

    run_virtual(main())


def test_the_metrics_ask_for_a_token_where_they_are_to() -> None:
    async def main() -> None:
        app = build_app(make_gateway(ScriptedGenerator()), RecordingControl(), metrics=CollectorRegistry(), metrics_token="secret")
        async with asyncio.TaskGroup() as tasks, httpx2.AsyncClient(transport=MemoryTransport(app, tasks), base_url="http://m") as http:
            assert (await http.get("/metrics")).status_code == 401
            assert (await http.get("/metrics", headers={"authorization": "Bearer secret"})).status_code == 200

    run_virtual(main())


def test_over_a_real_socket_the_sdk_sees_the_same(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        generator = ScriptedGenerator(texts=["yo<|end|>"] * 3, seconds_per_token=0.01)
        registry = CollectorRegistry()
        Counter("midflight_tests", "counts", registry=registry).inc()
        gateway = make_gateway(generator)
        app = build_app(gateway, RecordingControl(), metrics=registry)
        web = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, access_log=False, log_level="warning", lifespan="off"))
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(web.serve())
            while not web.started:
                await asyncio.sleep(0.01)
            port = web.servers[0].sockets[0].getsockname()[1]
            gateway.address = f"http://127.0.0.1:{port}"
            handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            async with openai.AsyncOpenAI(base_url=handle.base_url, api_key=handle.api_key, max_retries=0) as client:
                whole = await client.chat.completions.create(model="policy", messages=CHAT)
                assert whole.choices[0].message.content == "yo"
                stream = await client.chat.completions.create(model="policy", messages=CHAT, stream=True)
                assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "yo"
                generator.seconds_per_token = 0.05
                generator.texts = ["a" * 200] * 2
            async with openai.AsyncOpenAI(base_url=f"{gateway.address}/v1", api_key="any", max_retries=0) as client:
                for streaming in (False, True):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.12):
                            answer = await client.chat.completions.create(model="policy", messages=CHAT, stream=streaming, max_tokens=200)
                            async for _ in answer:
                                pass
                    async with asyncio.timeout(2):
                        while gateway.num_running:
                            await asyncio.sleep(0.01)
                metrics = await client._client.get(f"{gateway.address}/metrics")
                assert "midflight_tests_total 1.0" in metrics.text
            assert gateway.close(handle.session_id).num_turns == 2
            web.should_exit = True
            await serving
        assert handle.api_key not in caplog.text

    with caplog.at_level(logging.INFO, logger="uvicorn"):
        asyncio.run(main())


def test_a_chat_without_a_wire_is_recorded_as_that_of_a_client_and_its_refusals_are_counted() -> None:
    parts = [{"role": "system", "content": "spell"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]

    async def main() -> None:
        generator = ScriptedGenerator(texts=["yo<|end|>", "yo<|end|>"])
        async with offered(generator, run_name="demo", run_seed=17) as it:
            open_ = [it.gateway.open(KEY, sampling=DEFAULTS, tracked=True) for _ in range(2)]
            answer = await it.sdk(api_key=open_[0].api_key).chat.completions.create(model="policy", messages=parts)  # type: ignore[arg-type]
            assert await InProcessChats(it.gateway).reply(open_[1].api_key, parts) == answer.choices[0].message.content == "yo"
            by_sdk, here = generator.requests
            assert (here.input_ids, here.sampling, here.eager) == (by_sdk.input_ids, by_sdk.sampling, by_sdk.eager)
            with pytest.raises(RequestRejected, match=r"messages\.0\.role"):
                await InProcessChats(it.gateway).reply(open_[1].api_key, [{"role": "nobody", "content": "hi"}])
            records = [it.gateway.close(session.session_id) for session in open_]
            assert [record.rows[0].token_ids.tolist() for record in records] == [[*here.input_ids, 121, 111, 256]] * 2
            assert [record.failed_requests for record in records] == [0, 1]
            assert [failed.status for failed in it.seen.of(RequestFailed)] == [400]

    run_virtual(main())
