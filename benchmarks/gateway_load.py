"""Load for `gateway.py`: keep-alive connections that send a chat request, wait for the whole answer, and send the next.

python gateway_load.py PORT CONNECTIONS SECONDS [--stream] [--keys FILE]     prints one line of JSON
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from itertools import cycle
from pathlib import Path

import uvloop

STREAM_TOKENS = 256


class Connection(asyncio.Protocol):
    """One client. The answer ends by its content length, or by the last chunk."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._done: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

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
    body: dict[str, object] = {"model": "policy", "messages": [message], "max_tokens": STREAM_TOKENS if stream else 16}
    if stream:
        body["stream"] = True
    data = json.dumps(body, separators=(",", ":")).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def load(port: int, connections: int, seconds: float, *, stream: bool, keys: list[str]) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    requests = cycle([request(key=key, stream=stream) for key in keys])
    latencies: list[float] = []
    failures = 0
    until = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal failures
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        while (started := time.perf_counter()) < until:
            answer = await connection.ask(next(requests))
            latencies.append(time.perf_counter() - started)
            failures += not answer.startswith(b"HTTP/1.1 200")
        connection.transport.close()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(connections):
            clients.create_task(client())
    spent = time.perf_counter() - started
    latencies.sort()
    return {
        "rps": len(latencies) / spent,
        "p50_ms": statistics.median(latencies) * 1e3,
        "p99_ms": latencies[int(0.99 * (len(latencies) - 1))] * 1e3,
        "tokens_per_second": len(latencies) * STREAM_TOKENS / spent if stream else 0.0,
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("connections", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--keys", type=Path, help="JSON list of API keys to take turns with")
    options = parser.parse_args()
    keys = json.loads(options.keys.read_text()) if options.keys else ["sk-any"]
    print(json.dumps(uvloop.run(load(options.port, options.connections, options.seconds, stream=options.stream, keys=keys))))


if __name__ == "__main__":
    main()
