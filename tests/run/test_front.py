"""The front of several gateways: whose request it is, and what a client hears while its gateway is away."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress

import pytest

from midflight.run.launcher.front import Front, Routes
from midflight.wire.server import serve_app

SESSION = "mf-s1-0-12-0-3-7.secret"


@pytest.mark.parametrize(
    ("path", "headers", "shard"),
    [
        (f"/s/{SESSION}/v1/chat/completions", {}, 1),
        ("/v1/chat/completions", {b"authorization": f"Bearer {SESSION}".encode()}, 1),
        ("/v1/messages", {b"x-api-key": SESSION.encode()}, 1),
        ("/v1/chat/completions", {b"authorization": b"Bearer mf-s0-0-12-0-3-7.secret"}, 0),
        ("/midflight/v1/sessions/mf-s1-0-12-0-3-7/reward", {b"authorization": b"Bearer control"}, 1),
        (f"/s/mf-s0-0-1-0-0-1.x/v1/{SESSION}", {b"authorization": f"Bearer {SESSION}".encode()}, 0),
        ("/s/mf-s2-0-12-0-3-7.secret/v1/models", {}, 0),
        ("/metrics", {}, 0),
        ("/v1beta/models/policy:generateContent", {b"x-goog-api-key": SESSION.encode()}, 1),
        (f"/v1beta/models/policy:generateContent?key={SESSION}", {}, 1),
        ("/v1/chat/completions", {b"authorization": b"Bearer none"}, 0),
    ],
)
def test_a_request_goes_to_the_gateway_whose_session_it_names_and_any_other_to_the_first(
    path: str, headers: dict[bytes, bytes], shard: int
) -> None:
    assert Routes(2).shard_of(asking("POST", path, headers)) == shard


def asking(method: str, address: str, headers: dict[bytes, bytes] | None = None) -> dict[str, object]:
    path, _, query = address.partition("?")
    return {"method": method, "path": path, "query_string": query.encode(), "headers": [*(headers or {}).items()]}


def test_sessions_are_opened_at_each_gateway_in_turn() -> None:
    routes = Routes(3)
    assert [routes.shard_of(asking("POST", "/midflight/v1/sessions")) for _ in range(4)] == [0, 1, 2, 0]
    assert routes.shard_of(asking("GET", "/midflight/v1/sessions")) == 0


def test_an_answer_comes_through_as_it_is_and_of_a_gateway_that_is_away_a_client_hears_that_asking_again_helps() -> None:
    async def gateway(scope, receive, send) -> None:
        asked = await receive()
        head = [(b"content-type", b"text/plain"), (b"x-own", b"1"), (b"x-own", b"2")]
        await send({"type": "http.response.start", "status": 418, "headers": head})
        said = [scope["method"].encode(), scope["raw_path"], scope["query_string"], asked["body"]]
        for piece in said:
            await send({"type": "http.response.body", "body": piece + b"\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def asked(front: Front, path: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        parts: list[dict[str, object]] = []
        body = iter([{"type": "http.request", "body": b"hello", "more_body": False}])

        async def receive() -> object:
            return next(body, None) or await asyncio.Event().wait()

        async def send(part: dict[str, object]) -> None:
            parts.append(part)

        scope = {"type": "http", "method": "PUT", "path": path, "raw_path": path.encode(), "query_string": b"a=%20b", "headers": []}
        await front(scope, receive, send)  # type: ignore[arg-type]
        return parts[0]["status"], parts[0]["headers"], b"".join(p.get("body", b"") for p in parts[1:])  # type: ignore[return-value, arg-type]

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as closed:
            away = closed.getsockname()[1]
            closed.close()
            ready = asyncio.Event()
            serving = asyncio.ensure_future(serve_app(gateway, listener, ready=ready.set))
            await ready.wait()
            front = Front([f"http://127.0.0.1:{listener.getsockname()[1]}", f"http://127.0.0.1:{away}"])
            async with front:
                status, head, body = await asked(front, "/s/mf-s0-1.x/v1/a%2Fb")
                assert (status, body) == (418, b"PUT\n/s/mf-s0-1.x/v1/a%2Fb\na=%20b\nhello\n")
                assert [value for name, value in head if name.lower() == b"x-own"] == [b"1", b"2"]
                status, head, body = await asked(front, "/s/mf-s1-1.x/v1/models")
                assert status == 503 and "ask again in a moment" in json.loads(body)["error"]["message"]
                assert b"secret" not in body and b"mf-s1-1.x" not in body
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving

    asyncio.run(main())
