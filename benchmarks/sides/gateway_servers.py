"""The servers that `gateway.py` measures, and the clients that load them.

    python -m sides.gateway_servers SIDE PORT ...

| side | what it is |
|---|---|
| upstream | a static OpenAI server: the same chat answer to every request, at once |
| engine | a trivial engine on the gateway's wire: the letter `a` as every token, a step as soon as the one before was sent |
| midflight | the gateway over that engine, every session and token recorded |
| aiohttp | a proxy of ten lines over `upstream` |
| load | keep-alive connections that send a chat request, wait for the whole answer, and send the next; or that open a session, ask it once and end it; prints one line of JSON |

Behind the port: microseconds from one step of the engine to the next, or the port behind; for
`load` see `load_side`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import time
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import numpy as np
import uvloop
from aiohttp import ClientSession, TCPConnector, WSMsgType, web

from midflight.engines.wire import (
    PREFIX,
    STREAM_PATH,
    Abort,
    Hello,
    Rejected,
    StepFrame,
    Submit,
    client_frame,
    decode_client_frames,
    encode,
)
from midflight.types import (
    Capabilities,
    EngineHealth,
    Finish,
    FinishReason,
    GenerateRequest,
    LogprobKind,
    PauseMode,
)

ANSWER_TOKENS = 16
"""The length of an answer that does not stream."""
ROW = np.dtype([("handle", "<i4"), ("token_id", "<i4"), ("logprob", "<f4"), ("kv_version", "<i4")])
"""A token of `StepFrame.rows`."""
CAPABILITIES = Capabilities(
    pause_modes=frozenset(PauseMode),
    logprob_kind=LogprobKind.SAMPLED,
    honours_seed=True,
    versions_per_token=True,
    stops_on_strings=False,
    aborts_single_requests=True,
    stages_weights=True,
    max_context=8192,
    vocab_size=262,
    max_running=1024,
)


# --- A static upstream ----------------------------------------------------------------------------


class StaticUpstream(asyncio.Protocol):
    """HTTP as little as it can be: headers are skipped, the body's length is all that is read of a
    request.
    """

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            start = end + 4
            if len(self._buffer) < start + length:
                return
            body = self._buffer[start : start + length]
            self._buffer = self._buffer[start + length :]
            self._transport.write(STREAM if b'"stream":true' in body else WHOLE)


def _http(body: bytes, kind: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: "
        + kind
        + b"\r\ncontent-length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    )


def _chat(choice: dict[str, object], kind: str, **more: object) -> bytes:
    return json.dumps(
        {
            "id": "chatcmpl-1",
            "object": kind,
            "created": 1,
            "model": "policy",
            "choices": [choice],
            **more,
        }
    ).encode()


STREAM_TOKENS = 256
_USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": ANSWER_TOKENS,
    "total_tokens": 20 + ANSWER_TOKENS,
}
_MESSAGE = {"role": "assistant", "content": "a" * ANSWER_TOKENS}
WHOLE = _http(
    _chat(
        {"index": 0, "message": _MESSAGE, "finish_reason": "length"},
        "chat.completion",
        usage=_USAGE,
    ),
    b"application/json",
)
_FRAMES = [
    _chat({"index": 0, "delta": {"content": "a"}, "finish_reason": None}, "chat.completion.chunk")
    for _ in range(STREAM_TOKENS)
]
STREAM = _http(
    b"".join(b"data: " + f + b"\n\n" for f in _FRAMES) + b"data: [DONE]\n\n", b"text/event-stream"
)


async def upstream(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(StaticUpstream, "127.0.0.1", port)
    await server.serve_forever()


# --- A trivial engine -----------------------------------------------------------------------------


class TrivialEngine:
    """No keys, no values, no model: a step costs what its message costs.

    Every running request gets one token a step. One that is not streamed is answered whole in the
    first, as the static upstream answers it.
    """

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._running: dict[int, GenerateRequest] = {}
        self._lengths: dict[int, int] = {}
        self._work = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._due = 0.0
        """When the last step was to begin: one that came late is made up for by the next."""
        self._num_tokens = 0
        self._version = 0
        self._staged: dict[str, str] = {}

    async def stream(self, request: web.Request) -> web.WebSocketResponse:
        socket_ = web.WebSocketResponse(compress=False, max_msg_size=0)
        await socket_.prepare(request)
        await socket_.send_bytes(encode(Hello("trivial", CAPABILITIES)))
        async with asyncio.TaskGroup() as tasks:
            stepping = tasks.create_task(self._step_all(socket_))
            async for message in socket_:
                if message.type is WSMsgType.BINARY:
                    for raw in decode_client_frames(message.data):
                        self._take(client_frame(raw))
            stepping.cancel()
        return socket_

    def _take(self, frame: Submit | Abort | Rejected) -> None:
        if isinstance(frame, Submit):
            self._running[frame.handle] = frame.request
            self._lengths[frame.handle] = frame.request.num_output_tokens
            self._work.set()
        else:
            self._running.pop(frame.handle, None)

    async def _step_all(self, socket_: web.WebSocketResponse) -> None:
        while True:
            await self._work.wait()
            await self._open.wait()
            await socket_.send_bytes(encode(self._step()))
            if not self._running:
                self._work.clear()
            await self._rest()

    async def _rest(self) -> None:
        """Waits until the next step is due. A thread keeps the time, because the event loop's
        timers know whole milliseconds only.
        """
        due = max(self._due + self._step_seconds, time.monotonic() - self._step_seconds)
        if self._step_seconds:
            await asyncio.to_thread(lambda: time.sleep(max(0.0, due - time.monotonic())))
        else:
            await asyncio.sleep(0)
        self._due = due

    def _step(self) -> StepFrame:
        handles: list[int] = []
        finishes: list[tuple[int, Finish]] = []
        for handle, request in list(self._running.items()):
            left = request.sampling.max_tokens - self._lengths[handle]
            num_new = 1 if request.eager else left
            handles += [handle] * num_new
            self._lengths[handle] += num_new
            if num_new == left:
                del self._running[handle], self._lengths[handle]
                finishes.append((handle, Finish(FinishReason.LENGTH)))
        self._num_tokens += len(handles)
        now = time.monotonic()
        rows = np.zeros(len(handles), dtype=ROW)
        rows["handle"] = handles
        rows["token_id"] = ord("a")
        rows["logprob"] = -0.5
        rows["kv_version"] = self._version
        return StepFrame(
            version=self._version,
            rows=rows.tobytes(),
            finishes=tuple(finishes),
            started=now,
            ended=now,
            num_running=len(handles),
        )

    async def health(self, request: web.Request) -> web.Response:
        state = EngineHealth(
            self._version, not self._open.is_set(), self._num_tokens, len(self._running), 0
        )
        return web.json_response({name: getattr(state, name) for name in EngineHealth.__slots__})

    async def pause(self, request: web.Request) -> web.Response:
        self._open.clear()
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        self._open.set()
        return web.json_response({})

    async def stage(self, request: web.Request) -> web.Response:
        self._staged = await request.json()
        return web.json_response({})

    async def commit(self, request: web.Request) -> web.Response:
        self._version = (await request.json())["version"]
        return web.json_response(
            {"version": self._version, "fingerprint": self._staged["fingerprint"]}
        )


async def engine(port: int, step_us: int) -> None:
    trivial = TrivialEngine(step_us * 1e-6)
    app = web.Application()
    app.add_routes(
        [web.get(STREAM_PATH, trivial.stream), web.get(f"{PREFIX}/health", trivial.health)]
    )
    verbs = {
        "pause": trivial.pause,
        "resume": trivial.resume,
        "stage": trivial.stage,
        "commit": trivial.commit,
    }
    app.add_routes([web.post(f"{PREFIX}/{name}", verb) for name, verb in verbs.items()])
    await _serve(app, port)


# --- The gateway, and a proxy ---------------------------------------------------------------------


async def midflight(port: int, engine_port: int) -> None:
    """Assembled as the rollout process is, the collector's threshold included."""
    import gc

    from midflight.config.sections import Config
    from midflight.engines.remote import RemoteEngine
    from midflight.gateway.answers.owned_sessions import OwnedSessions
    from midflight.gateway.http.http import build_app
    from midflight.observe.prometheus import Metrics
    from midflight.run.api.session_routes import SessionRoutes
    from midflight.run.launcher.child import GC_THRESHOLD
    from midflight.run.parts import serve_while
    from midflight.run.rollout.serving import Serving
    from midflight.text.byte_tokenizer import write_byte_tokenizer
    from midflight.text.tokenizer import Tokenizer
    from midflight.types import GroupKey, RolloutKey, SamplingParams
    from midflight.wire.server import serve_app

    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    metrics = Metrics()
    remote = RemoteEngine(
        "trivial", f"http://127.0.0.1:{engine_port}", token=None, record=metrics.apply
    )

    async def main() -> None:
        await remote.connect(seconds=30)
        with TemporaryDirectory() as folder:
            write_byte_tokenizer(Path(folder))
            tokenizer = Tokenizer.load(Path(folder))
        serving = Serving(
            Config(), tokenizer, [remote], record=metrics.apply, version=0, anonymous=True
        )
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS)
        tokens = [
            serving.gateway.open(
                RolloutKey(GroupKey(0, k), 0), sampling=sampling, tracked=True
            ).api_key
            for k in range(SESSIONS)
        ]
        routes = SessionRoutes(
            serving.gateway,
            OwnedSessions(serving.gateway, session_seconds=3600.0),
            token=CONTROL_TOKEN,
            sampling=sampling,
            served=serving.fleet.served_version,
        ).routes()
        with socket.create_server(("127.0.0.1", port)) as listener:
            await serve_app(
                build_app(serving.gateway, serving.control, extra_routes=routes),
                listener,
                ready=lambda: print(json.dumps(tokens), flush=True),
            )

    await serve_while(main(), remote.run())


CONTROL_TOKEN = "the-control-token-of-a-benchmark"
SESSIONS = 4096
"""Opened before the start: each request of the load goes to a session of its own, as those of an
agent's first turn do.
"""


async def aiohttp_proxy(port: int, upstream_port: int) -> None:
    async with ClientSession(connector=TCPConnector(limit=0)) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            async with session.post(
                f"http://127.0.0.1:{upstream_port}{request.path}", data=await request.read()
            ) as answer:
                return web.Response(
                    body=await answer.read(), status=answer.status, content_type=answer.content_type
                )

        app = web.Application()
        app.add_routes([web.post("/{path:.*}", forward)])
        await _serve(app, port)


async def _serve(app: web.Application, port: int) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


# --- Load -----------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One client. The answer ends by its content length, or by the last chunk."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._done: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._done is not None and not self._done.done() and self._is_whole():
            self._done.set_result(bytes(self._buffer))
            self._buffer.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("cut off"))

    async def ask(self, request: bytes) -> bytes:
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._done

    def _is_whole(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        if at < 0:
            return self._buffer.endswith(b"\r\n0\r\n\r\n")
        return len(self._buffer) >= end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0])


def request(*, key: str, stream: bool) -> bytes:
    message = {"role": "user", "content": "Spell midflight backward."}
    body: dict[str, object] = {
        "model": "policy",
        "messages": [message],
        "max_tokens": STREAM_TOKENS if stream else 16,
    }
    if stream:
        body["stream"] = True
    data = json.dumps(body, separators=(",", ":")).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer "
        f"{key}\r\ncontent-type: application/json\r\n"
    )
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


FRAMES_AROUND = 3
"""A stream has these frames beside those with tokens: the role, the finish, and `[DONE]`."""


async def load(
    port: int, connections: int, seconds: float, *, stream: bool, keys: list[str]
) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    requests = cycle([request(key=key, stream=stream) for key in keys])
    latencies: list[float] = []
    failures = num_frames = 0
    until = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal failures, num_frames
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        while (started := time.perf_counter()) < until:
            answer = await connection.ask(next(requests))
            latencies.append(time.perf_counter() - started)
            failures += not answer.startswith(b"HTTP/1.1 200")
            num_frames += answer.count(b"data: ")
        connection.transport.close()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(connections):
            clients.create_task(client())
    spent = time.perf_counter() - started
    latencies.sort()
    num_answers = len(latencies)
    num_tokens = num_answers * STREAM_TOKENS if stream else 0
    num_messages = max(1, num_frames - num_answers * FRAMES_AROUND)
    return {
        "rps": num_answers / spent,
        "p50_ms": statistics.median(latencies) * 1e3,
        "p99_ms": latencies[int(0.99 * (num_answers - 1))] * 1e3,
        "tokens_per_second": num_tokens / spent,
        "tokens_a_message": num_tokens / num_messages,
        "failures": failures,
    }


def session_request(path: str) -> bytes:
    """A request about a session, by whoever runs the agent."""
    head = (
        f"POST /midflight/v1/sessions{path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer "
        f"{CONTROL_TOKEN}\r\ncontent-type: application/json\r\n"
    )
    return f"{head}content-length: 2\r\n\r\n{{}}".encode()


async def sessions(port: int, connections: int, seconds: float) -> dict[str, float]:
    """Each connection opens a session, asks it once, ends it, and opens the next."""
    loop = asyncio.get_running_loop()
    ended = failures = 0
    until = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal ended, failures
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        while time.perf_counter() < until:
            opened = await connection.ask(session_request(""))
            session = json.loads(opened.partition(b"\r\n\r\n")[2])
            answer = await connection.ask(request(key=session["api_key"], stream=False))
            end = await connection.ask(session_request(f"/{session['session_id']}/end"))
            ended += 1
            failures += not all(one.startswith(b"HTTP/1.1 200") for one in (opened, answer, end))
        connection.transport.close()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(connections):
            clients.create_task(client())
    return {"sessions_per_second": ended / (time.perf_counter() - started), "failures": failures}


def load_side(port: int, connections: str, seconds: str, kind: str, keys: str) -> None:
    """`kind` is `whole`, `stream` or `session`; `keys` is a file with a list of API keys to take
    turns with, or `-`.
    """
    if kind == "session":
        found = uvloop.run(sessions(port, int(connections), float(seconds)))
        print(json.dumps(found))
        return
    own = ["sk-any"] if keys == "-" else json.loads(Path(keys).read_text())
    stream = kind == "stream"
    print(
        json.dumps(
            uvloop.run(load(port, int(connections), float(seconds), stream=stream, keys=own))
        )
    )


if __name__ == "__main__":
    side, port, *rest = sys.argv[1:]
    if side == "load":
        load_side(int(port), *rest)
    else:
        mains = {
            "upstream": upstream,
            "engine": engine,
            "midflight": midflight,
            "aiohttp": aiohttp_proxy,
        }
        uvloop.run(mains[side](int(port), *map(int, rest)))
