"""A whole request to an ASGI application of this process without a client library, for code of ours
that asks thousands of times.
"""

import asyncio

from starlette.types import ASGIApp, Message

from midflight.wire.client import HttpAnswer


async def ask(app: ASGIApp, path: str, body: bytes) -> HttpAnswer:
    """Waits for the whole answer to a POST, in the task of the caller. The application gets the
    caller's cancellation as it is.
    """
    exchange = _MemoryExchange(body)
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-length", b"%d" % len(body))],
    }
    await app(scope, exchange.receive, exchange.send)
    return HttpAnswer(exchange.status, b"".join(exchange.parts))


class _MemoryExchange:
    def __init__(self, body: bytes) -> None:
        self.parts = list[bytes]()
        self.status = 500
        self._body: bytes | None = body

    async def receive(self) -> Message:
        """The body at the first call. A later call waits for a disconnection that never comes,
        until it is cancelled.
        """
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body = self._body
        self._body = None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))
