"""A batch of a thousand long rows takes half a second to make, to write and to read: no event loop does that itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from tests.run.test_sharded import OneShard
from tests.run.test_trainer_routes import CONTROL, Service, one_batch, site

from midflight.run.api import rollout_client, trainer_routes
from midflight.run.api.rollout_client import RolloutClient
from midflight.run.rollout import system
from midflight.run.rollout.system import RolloutSystem
from midflight.run.trainer import shards
from midflight.run.trainer.shards import ShardedRollouts
from midflight.trajectories.packing import to_bytes
from midflight.types import Batch, GroupKey, PackedBatch
from midflight.types.rollouts import Group, Seal


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str], list[bool]]:
    """Watches a function of a module: for each call, whether an event loop ran in the thread that made it."""

    def watch(module: ModuleType, name: str) -> list[bool]:
        function, on_a_loop = getattr(module, name), list[bool]()

        def watched(*args: Any) -> Any:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                on_a_loop.append(False)
            else:
                on_a_loop.append(True)
            return function(*args)

        monkeypatch.setattr(module, name, watched)
        return on_a_loop

    return watch


@pytest.mark.parametrize(("kind", "name"), [("application/octet-stream", "to_bytes"), ("application/json", "batch_as_lists")])
def test_the_route_has_the_bytes_of_a_batch_made_beside_the_loop(called: Callable[..., list[bool]], kind: str, name: str) -> None:
    made = called(trainer_routes, name)

    async def main() -> None:
        async with site(service=Service()) as at:
            answer = await at.http.post("/midflight/v1/take", json={"train_version": 0}, headers={**CONTROL, "accept": kind})
            assert answer.status_code == 200

    asyncio.run(main())
    assert made == [False]


def test_the_trainers_client_reads_a_batch_beside_the_loop(called: Callable[..., list[bool]]) -> None:
    read = called(rollout_client, "from_bytes")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        data = to_bytes(one_batch(0))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
        writer.close()

    async def main() -> PackedBatch:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with RolloutClient(f"http://127.0.0.1:{port}", token="t") as client:
                return await client.take(0)

    assert asyncio.run(main()).lease == 3 and read == [False]


def test_parts_of_several_gateways_are_joined_beside_the_loop(called: Callable[..., list[bool]]) -> None:
    joined = called(shards, "merged")

    async def main() -> PackedBatch:
        return await ShardedRollouts([OneShard(1), OneShard(2)]).take(4)  # type: ignore[list-item]

    assert asyncio.run(main()).lease == 4 and joined == [False]


def test_groups_become_arrays_beside_the_loop(called: Callable[..., list[bool]]) -> None:
    packed = called(system, "pack")

    class Writer:
        async def read(self, question: object) -> Seal:
            return Seal(1, b"head")

    async def main() -> PackedBatch:
        made = object.__new__(RolloutSystem)
        made._writer, made._teacher = Writer(), None  # type: ignore[assignment]
        return await made._packed(Batch(1, 0, (Group(GroupKey(0, 0), "t", "s", ()),)))

    assert asyncio.run(main()).seals == (Seal(1, b"head"),) and packed == [False]
