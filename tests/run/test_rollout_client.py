"""The trainer's way to the rollout process, over connections that break."""

from __future__ import annotations

import asyncio

import pytest

from midflight.run.api.rollout_client import RolloutClient
from midflight.run.parts import PartLost

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def asked(*answers: bytes) -> int:
    """Asks a server that gives each connection one of the answers and closes it, as it does with one that was idle too long."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        writer.close()

    async def main() -> int:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with RolloutClient(f"http://127.0.0.1:{port}", token="t") as client:
                await client.checkpointed(3)
        return len(left)

    return asyncio.run(main())


def test_a_connection_that_was_closed_meanwhile_is_made_anew() -> None:
    assert asked(b"", OK) == 0


def test_a_rollout_process_that_breaks_off_twice_is_lost() -> None:
    with pytest.raises(PartLost, match="the rollout process did not answer"):
        asked(b"", b"", OK)
