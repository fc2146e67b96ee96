"""The places of several gateways, whether one that dies is started again alone, and who hears of engines that come and go."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from midflight.config.load import load_config
from midflight.config.sections import Config
from midflight.run.launcher.gateway_client import GatewayClient
from midflight.run.launcher.gateways import GatewayPart, Gateways, take_gateways
from midflight.run.launcher.restarts import RestartBudgets
from midflight.run.parts import Purpose, Restarted
from midflight.run.places.port import PartFailed

TWO = ("gateway.shards=2", "rollout.groups_per_step=4")


@dataclass
class Seats:
    """Places, each at the address that it is asked for, or at its machine's own."""

    asked: list[str | None] = field(default_factory=list[str | None])

    async def take(self, part: object, *, host: str | None = None, port: int = 0) -> SimpleNamespace:
        self.asked.append(host)
        return SimpleNamespace(host=host or f"10.0.0.{len(self.asked)}", port=port or 41000 + len(self.asked), fd=3, lost=False)


def taken(*options: str) -> tuple[Seats, list[GatewayPart]]:
    seats = Seats()
    return seats, asyncio.run(take_gateways(load_config(None, [*TWO, *options]), seats, Purpose.TRAIN))  # type: ignore[arg-type]


def test_on_one_machine_all_gateways_listen_at_its_address() -> None:
    seats, parts = taken("gateway.host=10.0.0.9")
    assert seats.asked == ["10.0.0.9", "10.0.0.9"] and [part.name for part in parts] == ["rollout", "rollout1"]


@pytest.mark.parametrize(("host", "others"), [("10.0.0.9", None), ("0.0.0.0", "0.0.0.0"), ("::", "::"), ("127.0.0.1", None)])
def test_on_a_cluster_the_first_gateway_has_the_address_and_the_others_that_of_their_machines(host: str, others: str | None) -> None:
    seats, parts = taken("cluster.kind=ray", f"gateway.host={host}")
    assert seats.asked == [host, others]
    assert parts[1].url == f"http://{others or '10.0.0.2'}:41002"


@dataclass
class Lives:
    """Stands in for the ring's context and its children: the first life of a gateway ends, with or without its place; the second goes on."""

    config: Config
    part: GatewayPart
    machine_is_lost: bool
    ready: set[str] = field(default_factory=set[str])
    said: list[Restarted] = field(default_factory=list[Restarted])
    started: int = 0

    async def life(self, part: GatewayPart, *, again: bool) -> None:
        self.started += 1
        self.ready.add(part.name)
        if self.started == 2:
            assert again
            return
        part.place.lost = self.machine_is_lost  # type: ignore[misc]
        raise PartFailed("it ended", part=part.name)

    async def kill(self, name: str) -> None:
        assert name == self.part.name


def kept(*, machine_is_lost: bool) -> Lives:
    _, parts = taken("cluster.kind=ray")
    lives = Lives(load_config(None, [*TWO]), parts[1], machine_is_lost)
    children = SimpleNamespace(ready=lives.ready, kill=lives.kill)
    context: Any = SimpleNamespace(children=children, budgets=RestartBudgets(3), say=lives.said.append)
    gateways = Gateways(context, parts, None)  # type: ignore[arg-type]
    gateways._life = lives.life  # type: ignore[method-assign]
    asyncio.run(gateways.keep(parts[1]))
    return lives


def test_one_of_several_gateways_whose_process_dies_is_started_again_in_its_seat() -> None:
    lives = kept(machine_is_lost=False)
    assert lives.started == 2 and "the other gateways stay" in lives.said[0].error


def test_i8_one_whose_machine_is_lost_ends_the_attempt_because_its_store_has_steps_that_no_copy_has() -> None:
    with pytest.raises(PartFailed, match="it ended"):
        kept(machine_is_lost=True)


async def gateway(status: int, heard: list[str]) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        heard.append(head.split("\r\n")[0].rpartition(" ")[0])
        body = json.dumps({"resumed": 3}).encode()
        writer.write(b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


def test_every_gateway_hears_where_an_engine_is_and_that_it_leaves() -> None:
    async def main() -> None:
        heard: list[list[str]] = [[], []]
        servers = [await gateway(200, each) for each in heard]
        urls = tuple(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers)
        context: Any = SimpleNamespace(config=load_config(None, []), gateways=urls, control_token="control")
        client = GatewayClient(context)
        await client.announce("engine0", "http://10.0.0.7:41001")
        assert await client.leave("engine0") == ": 6 requests go on elsewhere", "three of each gateway"
        await client.give_up("engine0")
        for server in servers:
            server.close()
        path = "/midflight/v1/engines/engine0"
        for each in heard:
            assert each == [f"PUT {path}", f"DELETE {path}?force=true", f"DELETE {path}?force=true&drain_seconds=0&for_good=true"]

    asyncio.run(main())


def test_an_engine_that_one_gateway_does_not_admit_is_not_admitted() -> None:
    async def main() -> None:
        servers = [await gateway(status, []) for status in (200, 422)]
        urls = tuple(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers)
        context: Any = SimpleNamespace(config=load_config(None, []), gateways=urls, control_token="control")
        with pytest.raises(ExceptionGroup) as failed:
            await GatewayClient(context).announce("engine0", "http://10.0.0.7:41001")
        assert "was not admitted (422)" in str(failed.value.exceptions[0])
        for server in servers:
            server.close()

    asyncio.run(main())
