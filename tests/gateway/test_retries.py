from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx2
import openai
import pytest
from tests.gateway.offered import DEFAULTS, KEY, Offered, RecordingControl, ScriptedGenerator, make_gateway, offered

from midflight.errors import NoEngine
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.answers.readers import MAX_KEPT, MAX_KEY_CHARS
from midflight.gateway.http.http import build_app
from midflight.testing.virtual_time import run_virtual
from midflight.types import GroupKey, Reason, RolloutKey
from midflight.types.facts import RequestFailed
from midflight.wire.server import serve_app

TEXT = "abcdef<|end|>"
"""Seven tokens; at a second each it is whole after seven seconds."""
AGAIN = {"x-stainless-retry-count": "1"}


def slow(*texts: str, **options: Any) -> ScriptedGenerator:
    return ScriptedGenerator(texts=list(texts), seconds_per_token=1.0, **options)


def chat(text: str = "hi", **fields: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}], **fields}).encode()


def path(it: Offered) -> tuple[str, str]:
    """A new session's id and where its agent posts chats."""
    handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
    return handle.session_id, f"{handle.base_url}/chat/completions"


async def lose(it: Offered, url: str, body: bytes, *, after: float, **headers: str) -> str:
    """A client that goes after some seconds; what it had read."""
    read = ""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after), it.http.stream("POST", url, content=body, headers=headers, timeout=None) as answer:
            async for part in answer.aiter_text():
                read += part
    return read


async def ask(it: Offered, url: str, body: bytes, headers: dict[str, str] | None = None) -> httpx2.Response:
    return await it.http.post(url, content=body, headers=headers, timeout=None)


def frames(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def content(text: str) -> str:
    return "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames(text))


async def assert_nothing_is_left(it: Offered) -> None:
    await asyncio.sleep(0.01)
    requests = it.gateway.requests
    requests.find(None, now=asyncio.get_running_loop().time())
    assert (it.gateway.num_running, it.generator.running, requests.num_running, len(requests._tickets)) == (0, 0, 0, 0)


@pytest.mark.parametrize("after", [2.5, 20.0], ids=["running", "finished"])
def test_a_stream_cut_in_the_middle_is_told_again_from_its_first_token(after: float) -> None:
    async def main() -> None:
        async with offered(slow(TEXT)) as it:
            session_id, url = path(it)
            body = chat(stream=True, return_token_ids=True)
            read = await lose(it, url, body, after=2.5)
            assert content(read) == "ab"
            await asyncio.sleep(after - 2.5)
            told = (await ask(it, url, body, AGAIN)).text
            assert content(told) == "abcdef" and told.endswith("data: [DONE]\n\n")
            ids = [i for frame in frames(told) for i in frame["choices"][0].get("token_ids", [])]
            assert ids == list(it.gateway.tokenizer.encode(TEXT))
            assert {(f["id"], f["created"]) for f in frames(told)} == {(f["id"], f["created"]) for f in frames(read)}
            assert len(it.generator.requests) == 1
            record = it.gateway.close(session_id)
            assert (record.num_turns, record.failed_requests, record.dropped) == (1, 0, {})
            await assert_nothing_is_left(it)

    run_virtual(main())


@pytest.mark.parametrize("after", [2.5, 20.0], ids=["running", "finished"])
def test_a_whole_answer_whose_client_was_lost_is_given_to_the_retry(after: float) -> None:
    async def main() -> None:
        async with offered(slow(TEXT)) as it:
            session_id, url = path(it)
            await lose(it, url, chat(), after=2.5)
            await asyncio.sleep(after - 2.5)
            began = asyncio.get_running_loop().time()
            answer = (await ask(it, url, chat(), AGAIN)).json()
            assert answer["choices"][0]["message"]["content"] == "abcdef"
            assert asyncio.get_running_loop().time() - began == pytest.approx(max(0.0, 7.0 - after))
            assert it.gateway.close(session_id).num_turns == 1

    run_virtual(main())


def test_the_unmodified_sdk_retries_into_the_same_generation() -> None:
    class Cut(httpx2.AsyncBaseTransport):
        """Loses the first connection after some seconds."""

        def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
            self.inner, self.num_calls = inner, 0

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            self.num_calls += 1
            try:
                async with asyncio.timeout(1.5 if self.num_calls == 1 else None):
                    return await self.inner.handle_async_request(request)
            except TimeoutError:
                raise httpx2.ReadError("connection lost") from None

    async def main() -> None:
        async with offered(slow(TEXT)) as it:
            session_id, url = path(it)
            cut = Cut(it.http._transport)
            async with httpx2.AsyncClient(transport=cut) as http:
                client = openai.AsyncOpenAI(base_url=url.removesuffix("/chat/completions"), api_key="x", http_client=http, max_retries=2)
                answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].message.content == "abcdef"
            assert (cut.num_calls, len(it.generator.requests), it.gateway.close(session_id).num_turns) == (2, 1, 1)

    run_virtual(main())


def test_identical_parallel_calls_are_distinct_even_if_one_is_a_retry() -> None:
    async def main() -> None:
        async with offered(slow("a<|end|>", "b<|end|>", "c<|end|>")) as it:
            session_id, url = path(it)
            answers = await asyncio.gather(ask(it, url, chat()), ask(it, url, chat()), ask(it, url, chat(), AGAIN))
            assert [a.json()["choices"][0]["message"]["content"] for a in answers] == ["a", "b", "c"]
            assert it.gateway.close(session_id).num_turns == 3

    run_virtual(main())


def test_an_answer_that_was_delivered_is_nobodys_original_without_a_key() -> None:
    async def main() -> None:
        async with offered(slow("a<|end|>", "b<|end|>")) as it:
            _, url = path(it)
            for expected in ("a", "b"):
                assert (await ask(it, url, chat(), AGAIN)).json()["choices"][0]["message"]["content"] == expected
            await assert_nothing_is_left(it)

    run_virtual(main())


def test_two_lost_calls_with_one_body_go_to_two_retries() -> None:
    async def main() -> None:
        async with offered(slow(TEXT, "xyz<|end|>")) as it:
            session_id, url = path(it)
            await asyncio.gather(lose(it, url, chat(), after=0.5), lose(it, url, chat(), after=0.5))
            answers = await asyncio.gather(ask(it, url, chat(), AGAIN), ask(it, url, chat(), AGAIN))
            assert sorted(a.json()["choices"][0]["message"]["content"] for a in answers) == ["abcdef", "xyz"]
            assert it.gateway.close(session_id).num_turns == 2

    run_virtual(main())


@pytest.mark.parametrize("stream", [False, True])
def test_calls_with_one_key_share_one_answer_even_side_by_side(stream: bool) -> None:
    async def main() -> None:
        async with offered(slow(TEXT)) as it:
            session_id, url = path(it)
            key = {"Idempotency-Key": "k1"}
            first, second = await asyncio.gather(*(ask(it, url, chat(stream=stream), key) for _ in range(2)))
            later = await ask(it, url, chat(stream=stream), key)
            if stream:
                assert [content(a.text) for a in (first, second, later)] == ["abcdef"] * 3
            else:
                assert first.json() == second.json() == later.json()
            assert it.gateway.close(session_id).num_turns == len(it.generator.requests) == 1
            await assert_nothing_is_left(it)

    run_virtual(main())


def test_a_key_stands_for_one_body_and_for_one_session() -> None:
    async def main() -> None:
        async with offered(slow(TEXT, "x<|end|>", "y<|end|>")) as it:
            _, url = path(it)
            other = it.gateway.open(RolloutKey(GroupKey(0, 4, 0), 0), sampling=DEFAULTS, tracked=True)
            key = {"Idempotency-Key": "k1"}
            assert (await ask(it, url, chat(), key)).status_code == 200
            refused = await ask(it, url, chat("ho"), key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_conflict")
            assert refused.headers["x-should-retry"] == "false"
            elsewhere = await ask(it, f"{other.base_url}/chat/completions", chat("ho"), key)
            assert elsewhere.json()["choices"][0]["message"]["content"] == "x"
            long = await ask(it, url, chat(), {"Idempotency-Key": "k" * (MAX_KEY_CHARS + 1)})
            assert (long.status_code, long.json()["error"]["param"]) == (400, "Idempotency-Key")
            await asyncio.sleep(31)
            assert (await ask(it, url, chat("ho"), key)).json()["choices"][0]["message"]["content"] == "y"

    run_virtual(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_nobody_reads_is_cancelled_after_the_bound(stream: bool) -> None:
    async def main() -> None:
        async with offered(slow("abcdefgh<|end|>", "x<|end|>"), orphan_seconds=3.0) as it:
            session_id, url = path(it)
            await lose(it, url, chat(stream=stream), after=2.5)
            await asyncio.sleep(2.9)
            assert it.generator.running == 1
            await asyncio.sleep(0.2)
            await assert_nothing_is_left(it)
            again = await ask(it, url, chat(stream=stream), AGAIN)
            assert "x" in again.text and "abc" not in again.text
            record = it.gateway.close(session_id)
            assert (record.num_turns, record.dropped, it.seen.of(RequestFailed)) == (1, {Reason.ABANDONED: 5}, [])

    run_virtual(main())


def test_a_retry_that_is_lost_too_starts_the_bound_anew() -> None:
    async def main() -> None:
        async with offered(slow("abcdefg<|end|>"), orphan_seconds=3.0) as it:
            session_id, url = path(it)
            await lose(it, url, chat(), after=1.5)
            await lose(it, url, chat(), after=2.0, **AGAIN)
            await asyncio.sleep(2.0)
            assert (await ask(it, url, chat(), AGAIN)).status_code == 200
            assert it.gateway.close(session_id).num_turns == 1

    run_virtual(main())


def test_an_anonymous_generation_ends_with_its_client_unless_it_has_a_key() -> None:
    async def main() -> None:
        async with offered(slow(TEXT, TEXT, "x<|end|>")) as it:
            url = "/v1/chat/completions"
            await lose(it, url, chat(), after=1.5)
            await asyncio.sleep(0.01)
            await assert_nothing_is_left(it)
            key = {"Idempotency-Key": "k1", "Authorization": "Bearer mine"}
            await lose(it, url, chat(), after=1.5, **key)
            assert (await ask(it, url, chat(), key)).json()["choices"][0]["message"]["content"] == "abcdef"
            stranger = await ask(it, url, chat(), key | {"Authorization": "Bearer yours"})
            assert stranger.json()["choices"][0]["message"]["content"] == "x"

    run_virtual(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_not_kept_and_reaches_every_reader_once(stream: bool) -> None:
    async def main() -> None:
        async with offered(slow(error=NoEngine("no engine took it"), error_after=0)) as it:
            session_id, url = path(it)
            key = {"Idempotency-Key": "k1"}
            failed = await ask(it, url, chat(stream=stream), key)
            assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
            it.generator.error = None
            assert (await ask(it, url, chat(stream=stream), key)).status_code == 200
            assert it.gateway.close(session_id).failed_requests == 1
            await assert_nothing_is_left(it)

    run_virtual(main())


def test_closing_a_session_ends_its_orphans_at_once() -> None:
    async def main() -> None:
        async with offered(slow(TEXT, TEXT)) as it:
            session_id, url = path(it)
            await lose(it, url, chat(), after=1.4)
            await lose(it, url, chat("ho", stream=True), after=1.4)
            record = it.gateway.close(session_id)
            await asyncio.sleep(0.01)
            await assert_nothing_is_left(it)
            assert (record.num_turns, record.dropped) == (0, {Reason.ABANDONED: 3})

    run_virtual(main())


def test_more_requests_than_allowed_are_told_when_to_come_back() -> None:
    async def main() -> None:
        async with offered(slow(TEXT, TEXT, TEXT), max_requests=2) as it:
            running = [asyncio.ensure_future(ask(it, "/v1/chat/completions", chat())) for _ in range(2)]
            await asyncio.sleep(1)
            refused = await ask(it, "/v1/chat/completions", chat())
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"] == {
                "message": "2 requests are under way, the most allowed: try again in 1 s, or raise gateway.max_sessions.",
                "type": "rate_limit_error",
                "param": None,
                "code": "overloaded",
            }
            assert [(await r).status_code for r in running] == [200, 200]
            assert (await ask(it, "/v1/chat/completions", chat())).status_code == 200
            await assert_nothing_is_left(it)

    run_virtual(main())


def test_a_full_gateway_still_gives_a_retry_its_original() -> None:
    async def main() -> None:
        async with offered(slow(TEXT), max_requests=1) as it:
            _, url = path(it)
            await lose(it, url, chat(), after=1.5)
            assert (await ask(it, url, chat("ho"))).status_code == 429
            assert (await ask(it, url, chat(), AGAIN)).status_code == 200

    run_virtual(main())


def test_the_advice_to_come_back_follows_the_pace_of_the_gateway() -> None:
    """Ends every 7 s: the mean interval, from 0 with weight 0.1, is 7 (1 - 0.9^3) = 1.897 after four ends, so 2 whole seconds."""

    async def main() -> None:
        async with offered(slow(*[TEXT] * 5), max_requests=1) as it:
            for _ in range(4):
                await ask(it, "/v1/chat/completions", chat())
            running = asyncio.ensure_future(ask(it, "/v1/chat/completions", chat()))
            await asyncio.sleep(1)
            assert (await ask(it, "/v1/chat/completions", chat())).headers["retry-after"] == "2"
            await running

    run_virtual(main())


def test_answers_kept_for_retries_are_bounded() -> None:
    async def main() -> None:
        async with offered(ScriptedGenerator(seconds_per_token=0.0)) as it:
            for k in range(MAX_KEPT + 20):
                await ask(it, "/v1/chat/completions", chat(max_tokens=1), {"Idempotency-Key": f"k{k}"})
            await asyncio.sleep(0.01)
            assert len(it.gateway.requests._tickets) == MAX_KEPT
            await asyncio.sleep(31)
            await assert_nothing_is_left(it)

    run_virtual(main())


def test_a_slow_reader_is_told_all_that_waits_at_once() -> None:
    """The application may run 64 parts ahead; what comes after them waits as one."""

    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["a" * 200], seconds_per_token=0.01)) as it:
            async with it.http.stream("POST", "/v1/chat/completions", content=chat(stream=True, max_tokens=200)) as answer:
                await asyncio.sleep(10)
                assert it.generator.running == 0
                parts = [part async for part in answer.aiter_text()]
            assert content("".join(parts)) == "a" * 200
            assert len(parts) < 70

    run_virtual(main())


def test_over_a_real_socket_a_client_that_reads_late_gets_every_token_once_and_in_order() -> None:
    """1 500 tokens are 350 KB, more than the server's 64 KB and the socket's buffers hold: in between it must wait for the client."""
    text = 'a"東\n' * 250

    async def main() -> None:
        generator = ScriptedGenerator(texts=[text], seconds_per_token=0.0)
        gateway = make_gateway(generator, limits=EngineLimits(4096, 262))
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        started = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve_app(build_app(gateway, RecordingControl()), listener, ready=started.set))
            await started.wait()
            reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=2**12)
            body = chat(stream=True, max_tokens=2000)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            while not (len(generator.requests) == 1 and generator.running == 0):
                await asyncio.sleep(0.01)
            answer = await reader.readuntil(b"\r\n\r\n")
            parts: list[bytes] = []
            while size := int(await reader.readline(), 16):
                parts.append((await reader.readexactly(size + 2))[:-2])
            writer.close()
            assert answer.startswith(b"HTTP/1.1 200")
            told = b"".join(parts).decode()
            assert content(told) == text and told.endswith("data: [DONE]\n\n")
            assert len(parts) < 1500, "what waited for the client is told at once"
            serving.cancel()

    asyncio.run(main())


def test_over_a_real_socket_a_client_who_times_out_is_given_the_rest_of_his_answer() -> None:
    """The SDK gives up after a second, closes its connection and tries again half a second later; the answer takes 2.8 s."""

    async def main() -> None:
        generator = ScriptedGenerator(texts=[TEXT], seconds_per_token=0.4)
        gateway = make_gateway(generator)
        listener = socket.create_server(("127.0.0.1", 0))
        started = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve_app(build_app(gateway, RecordingControl()), listener, ready=started.set))
            await started.wait()
            gateway.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            async with openai.AsyncOpenAI(base_url=handle.base_url, api_key="x", max_retries=4, timeout=1.0) as client:
                answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
            assert answer.choices[0].message.content == "abcdef"
            assert (len(generator.requests), gateway.close(handle.session_id).num_turns) == (1, 1)
            serving.cancel()

    asyncio.run(main())
