"""What bounds a client of one server."""

from __future__ import annotations

import asyncio
import socket
import threading

from midflight.errors import EngineUnavailable
from midflight.wire.client import HttpClient

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"


def answer_all(listener: socket.socket) -> None:
    """Answers whoever says something, until the listener is closed."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            if connection.recv(4096):
                connection.sendall(ANSWER)


def test_connecting_may_take_as_long_as_the_caller_bears_the_answer() -> None:
    """As on a slow network: the kernel takes no more connections until the first ones were accepted."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for early in waiting:
            early.setblocking(False)
            early.connect_ex(address)

        async def ask() -> bytes:
            async with HttpClient(f"http://127.0.0.1:{address[1]}", lost=EngineUnavailable, connect_seconds=0.1) as http:
                asked = asyncio.create_task(http.call("GET", "/", seconds=60))
                await asyncio.sleep(0.3)
                for early in waiting:
                    early.close()
                threading.Thread(target=answer_all, args=(listener,), daemon=True).start()
                return (await asked).content

        assert asyncio.run(ask()) == b"ok"
        listener.shutdown(socket.SHUT_RDWR)
