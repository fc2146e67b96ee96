"""What bounds a client of one server."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from midflight.errors import EngineUnavailable
from midflight.run.parts import WorkerSpec
from midflight.run.worker.worker_process import gateway_client
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


async def asked_late(http: HttpClient, url: str, *, seconds: float | None = None) -> bytes:
    """The answer of a server that accepts after 0.3 s: the kernel takes no more connections until the first ones were accepted."""
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for early in waiting:
            early.setblocking(False)
            early.connect_ex(address)
        try:
            async with http:
                asked = asyncio.create_task(http.call("GET", "/", seconds=seconds))
                await asyncio.sleep(0.3)
                for early in waiting:
                    early.close()
                threading.Thread(target=answer_all, args=(listener,), daemon=True).start()
                return (await asked).content
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_connecting_may_take_as_long_as_the_caller_bears_the_answer() -> None:
    url = free_url()
    http = HttpClient(url, lost=EngineUnavailable, connect_seconds=0.1)
    assert asyncio.run(asked_late(http, url, seconds=60)) == b"ok"


def test_connecting_is_bounded_where_the_caller_does_not_bound_the_call() -> None:
    url = free_url()
    http = HttpClient(url, lost=EngineUnavailable, connect_seconds=0.1)
    with pytest.raises(EngineUnavailable, match="did not answer"):
        asyncio.run(asked_late(http, url))


def test_a_worker_waits_for_the_rollout_process_however_long_connecting_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs of its rewards may leave it no processor for seconds; a lost call would end the run."""
    known = HttpClient.__init__.__kwdefaults__
    assert known is not None
    monkeypatch.setitem(known, "connect_seconds", 0.1)
    url = free_url()
    http = gateway_client(WorkerSpec("worker0", url, "token", "{}"))
    assert asyncio.run(asked_late(http, url)) == b"ok"
