"""Whatever a client sends or fails to send costs his request alone: the right status in the shape clients read, or a clean close."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.gateway.offered import DEFAULTS, KEY, RecordingControl, ScriptedGenerator, make_gateway, offered

from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.http.http import DIALECTS, build_app
from midflight.testing.virtual_time import run_virtual
from midflight.types.facts import RequestFailed
from midflight.wire import edge as wire
from midflight.wire import server
from midflight.wire.server import serve_app

NUM_EACH = 250
"""Requests of each kind, over each wire."""

CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 2}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"model": "policy", "prompt": "hi", "max_tokens": 2},
    "/v1/messages": {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"model": "policy", "input": "hi", "max_output_tokens": 2},
    "/v1beta/models/policy:generateContent": CONTENTS,
    "/v1beta/models/policy:streamGenerateContent?alt=sse": CONTENTS,
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
}
FIELDS = [
    "model",
    "messages",
    "prompt",
    "input",
    "text",
    "input_ids",
    "sampling_params",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "stream",
    "stream_options",
    "return_token_ids",
    "logprobs",
    "top_logprobs",
    "rid",
    "tools",
    "tool_choice",
    "logit_bias",
    "response_format",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "user",
    "metadata",
    "system",
    "instructions",
    "best_of",
    "echo",
    "suffix",
    "chat_template_kwargs",
    "thinking",
    "reasoning",
    "parallel_tool_calls",
    "functions",
    "return_logprob",
    "contents",
    "generationConfig",
    "systemInstruction",
    "toolConfig",
]
VALUES: list[Any] = [
    None, True, 0, -1, 1, 2.5, -0.0, 2**31, 2**63, 2**64, -(2**70), 10**400, 1e308, -1e308, "", "x", "\x00", "\u2028", "a" * 5000, [], [[]],
    [None], [0], [-1], [2**40], [10**30], [True], ["", "\x00"], {}, {"": None}, {"type": "text"}, {"role": 1}, [{"role": "user"}],
    [{"role": "user", "content": [{"type": "text", "text": None}]}], [{"role": "tool", "content": {"a": [1]}}], [{"content": "x"}],
    [[0, "x"]], {"0": 1e308}, {"type": "function", "function": {"name": "\x00"}}, [{"type": "function"}], [{"type": "function", "function": {}}],
]  # fmt: skip
SPELLINGS = [
    b"NaN",
    b"Infinity",
    b"1e999999",
    b"-1e999999",
    b"0." + b"1" * 9000,
    b"9" * 9000,
    b'"\\ud800"',
    b'"\\udfff\\ud800"',
    b'"\\u0000"',
    b"0x10",
    b"01",
]
"""Values that Python's own encoder does not write."""


def with_value(good: dict[str, Any], field: str, value: bytes) -> bytes:
    rest = json.dumps({name: kept for name, kept in good.items() if name != field}).encode()
    return rest[:-1] + b', "' + field.encode() + b'": ' + value + b"}"


def wrong_values(draw: random.Random, good: dict[str, Any]) -> bytes:
    value = draw.choice([*SPELLINGS, *(json.dumps(v).encode() for v in VALUES)])
    return with_value(good, draw.choice(FIELDS), value)


def cut_or_garbled(draw: random.Random, good: dict[str, Any]) -> bytes:
    body = bytearray(json.dumps(good).encode())
    if draw.random() < 0.5:
        return bytes(body[: draw.randrange(len(body))])
    for _ in range(draw.randrange(1, 4)):
        body[draw.randrange(len(body))] = draw.randrange(256)
    return bytes(body)


def not_an_object(draw: random.Random, good: dict[str, Any]) -> bytes:
    return draw.choice(
        [b"", b"[]", b"null", b"1", b'"x"', b"{}", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"\x00", b"{}{}", draw.randbytes(50)]
    )


def deep(draw: random.Random, good: dict[str, Any]) -> bytes:
    depth = draw.choice([10, 150, 199, 500, 3000, 100_000])
    opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"content":', b"}]")])
    bomb = opening * depth + b"1" + closing * (depth if draw.random() < 0.7 else 0)
    return bomb if draw.random() < 0.3 else with_value(good, draw.choice(FIELDS), bomb)


KINDS: dict[str, Callable[[random.Random, dict[str, Any]], bytes]] = {
    "wrong values": wrong_values,
    "cut or garbled JSON": cut_or_garbled,
    "no JSON object": not_an_object,
    "deep nesting": deep,
}


def assert_shaped(status: int, body: bytes) -> None:
    """200, or a fault of the client in the shape of his dialect; never one of ours."""
    assert status == 200 or 400 <= status < 500, (status, body)
    if status != 200:
        error = json.loads(body)["error"]
        assert (error.get("type") or error["status"]) and error["message"], body


@dataclass
class Served:
    """A gateway behind a real socket."""

    gateway: Gateway
    generator: ScriptedGenerator
    port: int

    async def raw(self, sent: bytes, *, half_close: bool = False) -> bytes:
        """Everything that comes back until the server closes, or has answered."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            if half_close:
                writer.write_eof()
            async with asyncio.timeout(10):
                return await reader.read(-1)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def is_quiet(self) -> None:
        """Waits until nothing runs any more: no generation, no request, no turn, no task."""
        async with asyncio.timeout(5):
            while self.gateway.num_running or self.gateway.requests.num_running or self.generator.running:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def served(generator: ScriptedGenerator | None = None, **options: Any) -> AsyncIterator[Served]:
    """Checks at its end that a good request is answered and that nothing was left behind."""
    generator = generator or ScriptedGenerator(seconds_per_token=0.0)
    gateway = make_gateway(generator, **options)
    listener = socket.create_server(("127.0.0.1", 0))
    started = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve_app(build_app(gateway, RecordingControl()), listener, ready=started.set))
        await started.wait()
        before = len(asyncio.all_tasks())
        it = Served(gateway, generator, listener.getsockname()[1])
        try:
            yield it
            await it.is_quiet()
            assert b" 200 OK" in await it.raw(request(json.dumps(GOOD["/v1/completions"]).encode()))
            await it.is_quiet()
            async with asyncio.timeout(5):
                while len(asyncio.all_tasks()) > before:
                    await asyncio.sleep(0.01)
            assert not gateway._scopes and len(gateway.requests._tickets) == 0
        finally:
            serving.cancel()


def request(
    body: bytes, path: bytes = b"/v1/completions", *, headers: bytes = b"", method: bytes = b"POST", length: object = None
) -> bytes:
    """One request on a connection of its own."""
    declared = str(len(body) if length is None else length).encode()
    head = method + b" " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: " + declared + b"\r\n"
    return head + headers + b"\r\n" + body


def parsed(answer: bytes) -> tuple[int, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"chunked" in head:
        body = b"".join(chunk.partition(b"\r\n")[2] for chunk in body.split(b"\r\n0\r\n")[0].split(b"\r\n\r\n"))
    return int(head.split()[1]), body


async def many(works: list[Awaitable[None]]) -> None:
    """Runs them, at most 32 at a time."""
    slots = asyncio.Semaphore(32)

    async def one(work: Awaitable[None]) -> None:
        async with slots:
            await work

    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(one(work))


def test_every_dialect_is_tried() -> None:
    assert {path.partition("?")[0] for path in GOOD} == {dialect.path.replace("{model}", "policy") for dialect in DIALECTS}


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_bodies_are_the_clients_fault_in_memory(kind: str, path: str) -> None:
    async def main() -> None:
        draw = random.Random(f"{kind} {path}")
        async with offered(ScriptedGenerator(seconds_per_token=0.0)) as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            for k in range(NUM_EACH):
                body = KINDS[kind](draw, GOOD[path])
                base = handle.base_url.removesuffix("/v1") if k % 2 else ""
                answer = await it.http.post(base + path, content=body, timeout=None)
                if b'"stream": true' not in body.lower() and "text/event-stream" not in answer.headers.get("content-type", ""):
                    assert_shaped(answer.status_code, answer.content)
            assert not [f for f in it.seen.of(RequestFailed) if f.status >= 500]
            await asyncio.sleep(0.1)
            assert (it.gateway.num_running, it.gateway.requests.num_running, len(it.gateway.requests._tickets)) == (0, 0, 0)
            session = it.gateway.session_for(path_token=handle.api_key, api_key=None)
            assert not session._open
            it.gateway.close(handle.session_id)
            assert not it.gateway._scopes

    run_virtual(main())


@pytest.mark.parametrize("kind", KINDS)
def test_bad_bodies_are_the_clients_fault_over_a_socket(kind: str) -> None:
    async def main() -> None:
        draw = random.Random(kind)

        async def one(it: Served) -> None:
            path = draw.choice(list(GOOD))
            body = KINDS[kind](draw, GOOD[path])
            answer = await it.raw(request(body, path.encode()))
            if b"text/event-stream" not in answer:
                assert_shaped(*parsed(answer))

        async with served() as it:
            await many([one(it) for _ in range(NUM_EACH)])

    asyncio.run(main())


def test_paths_tokens_and_headers_of_any_bytes_are_refused_cleanly() -> None:
    async def main() -> None:
        draw = random.Random(7)
        body = json.dumps(GOOD["/v1/completions"]).encode()

        def garbage(alphabet: bytes, most: int) -> bytes:
            return bytes(draw.choice(alphabet) for _ in range(draw.randrange(1, most)))

        visible = bytes(range(33, 127)).replace(b"?", b"").replace(b"#", b"")
        high = bytes(range(128, 256))

        def token() -> bytes:
            kind = draw.randrange(4)
            if kind == 0:
                return b"".join(b"%%%02x" % draw.randrange(256) for _ in range(draw.randrange(1, 40)))
            return garbage([visible, high, visible + high][kind - 1], 300)

        async def one(it: Served, k: int) -> None:
            match k % 5:
                case 0:
                    sent = request(body, b"/s/" + token() + b"/v1/completions")
                case 1:
                    sent = request(body, b"/" + token())
                case 2:
                    sent = request(body, headers=b"Authorization: Bearer mf-" + garbage(visible + high, 200) + b".x\r\n")
                case 3:
                    sent = request(body, headers=garbage(visible + high, 60) + b": " + garbage(visible + high, 60) + b"\r\n")
                case _:
                    name = draw.choice(
                        [
                            b"x-api-key",
                            b"x-goog-api-key",
                            b"x-midflight-session",
                            b"idempotency-key",
                            b"x-stainless-retry-count",
                            b"content-type",
                            b"accept",
                        ]
                    )
                    sent = request(
                        body, headers=b"".join(name + b": " + garbage(visible + high, 60) + b"\r\n" for _ in range(draw.randrange(1, 50)))
                    )
            answer = await it.raw(sent)
            if answer and b" 200 OK" not in answer[:20]:
                assert_shaped(*parsed(answer))

        async with served() as it:
            await many([one(it, k) for k in range(4 * NUM_EACH)])
            it.gateway.requests._expire(float("inf"))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (request(b"{}", length="x"), 400),
        (request(b"{}", length="-1"), 400),
        (request(b"{}", length="9" * 30), 400),
        (request(b"{}", headers=b"Content-Length: 3\r\n"), 400),
        (request(b"{}", length=2**40), 413),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET\r\n\r\n", 400),
        (request(b"", b"/v1/completions", method=b"GET"), 405),
        (request(b"", b"/v1/models", method=b"DELETE"), 405),
        (request(b"", b"/nowhere"), 404),
        (request(b"", b"/s//v1/completions"), 404),
        (request(b"", b"/s/x"), 404),
        (request(b"", b"/health", method=b"BREW"), 400),
    ],
)  # fmt: skip
def test_wrong_requests_get_the_right_status_before_any_body_is_waited_for(sent: bytes, status: int) -> None:
    async def main() -> None:
        async with served() as it:
            answer = parsed(await it.raw(sent, half_close=False))
            assert answer[0] == status
            assert_shaped(*answer)

    asyncio.run(main())


def test_options_and_head_say_what_there_is() -> None:
    async def main() -> None:
        async with served() as it:
            options = await it.raw(request(b"", method=b"OPTIONS"))
            assert options.startswith(b"HTTP/1.1 204") and b"allow: POST" in options
            head = await it.raw(request(b"", b"/v1/models", method=b"HEAD"))
            assert head.startswith(b"HTTP/1.1 200") and head.endswith(b"\r\n\r\n")

    asyncio.run(main())


def test_a_body_that_grows_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(wire, "MAX_BODY_BYTES", 1000)
        async with served() as it:
            chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            status, body = parsed(await it.raw(head + chunk))
            assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")

    asyncio.run(main())


def test_a_body_that_trickles_for_ever_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(server, "HEAD_SECONDS", 0.1)
        monkeypatch.setattr(server, "BODY_SECONDS", 0.2)
        async with served() as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(request(b"{", length=1000).replace(b"Connection: close\r\n", b""))
            answer = b""
            async with asyncio.timeout(5):
                while not answer.endswith(b"}}"):
                    writer.write(b" ")
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            answer += await reader.read(10_000)
            writer.close()
            assert b"connection: close" in answer
            status, body = parsed(answer)
            assert (status, json.loads(body)["error"]["code"]) == (408, "body_too_slow")

    asyncio.run(main())


def test_a_body_may_take_as_long_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a slow link, or from a machine that is busy."""

    async def main() -> None:
        monkeypatch.setattr(server, "HEAD_SECONDS", 0.1)
        monkeypatch.setattr(server, "BODY_SECONDS", 0.2)
        monkeypatch.setattr(server, "BODY_BYTES", 2)
        async with served() as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            body = json.dumps(GOOD["/v1/completions"]).encode()
            head, whole = request(body).split(b"\r\n\r\n", 1)
            writer.write(head + b"\r\n\r\n")
            for begin in range(0, len(whole), len(whole) // 20):
                writer.write(whole[begin : begin + len(whole) // 20])
                await asyncio.sleep(0.05)
            async with asyncio.timeout(5):
                status, _ = parsed(await reader.read())
            writer.close()
            assert status == 200

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_who_ends_his_side_is_cut_off_cleanly_and_his_request_ends(stream: bool) -> None:
    async def main() -> None:
        async with served(ScriptedGenerator(seconds_per_token=0.1)) as it:
            body = json.dumps({**GOOD["/v1/completions"], "max_tokens": 200, "stream": stream}).encode()
            answer = await it.raw(request(body), half_close=True)
            assert b"[DONE]" not in answer and b'"text":"' not in answer

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_clients_who_vanish_leave_nothing_behind(reset: bool, stream: bool) -> None:
    """At every moment: with half a head, half a body, while they wait, and in the middle of a stream."""

    async def main() -> None:
        draw = random.Random(3)
        body = json.dumps({**GOOD["/v1/completions"], "max_tokens": 200, "stream": stream}).encode()
        whole = request(body)

        async def one(it: Served, k: int) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(whole if k % 2 else whole[: draw.randrange(len(whole))])
            if k % 2:
                await asyncio.sleep(draw.random() * 0.05)
            if reset:
                linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()

        async with served(ScriptedGenerator(seconds_per_token=0.05)) as it:
            await many([one(it, k) for k in range(NUM_EACH)])

    asyncio.run(main())


def test_a_client_who_reads_nothing_slows_no_other_and_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(server, "UNREAD_SECONDS", 0.5)
        long = {"model": "policy", "prompt": list(range(97, 107)), "max_tokens": 200, "stream": True, "logprobs": 0, "n": 64}
        async with served(ScriptedGenerator(seconds_per_token=0.0), max_requests=9) as it:
            stuck = []
            for _ in range(8):
                link = socket.socket()
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                link.connect(("127.0.0.1", it.port))
                link.sendall(request(json.dumps(long).encode()))
                stuck.append(link)
            for _ in range(20):
                assert b" 200 OK" in await it.raw(request(json.dumps(GOOD["/v1/completions"]).encode()))
            await it.is_quiet()
            await asyncio.sleep(0.8)
            for link in stuck:
                link.close()

    asyncio.run(main())
