"""Clients of sessions: bound to their session, on one pool, through no proxy."""

from __future__ import annotations

import asyncio

import pytest

from midflight.environments.agents import SharedClients
from midflight.types import GroupKey, RolloutKey

from .fakes import FakeSession


def session(number: int) -> FakeSession:
    return FakeSession(
        str(number), RolloutKey(GroupKey(0, 0), 0), True, base_url=f"http://127.0.0.1:9/s/{number}/v1", api_key=f"key-{number}"
    )


def test_each_client_is_bound_to_its_session_and_all_share_the_pool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:3128")

    async def main():
        clients = SharedClients()
        first, second = clients.client_for(session(1)), clients.client_for(session(2))
        assert (str(first.base_url), first.api_key) == ("http://127.0.0.1:9/s/1/v1/", "key-1")
        assert (str(second.base_url), second.api_key) == ("http://127.0.0.1:9/s/2/v1/", "key-2")
        assert first._client is second._client and not first._client._mounts
        await clients.close()
        assert first.is_closed()

    asyncio.run(main())


def test_an_agent_elsewhere_is_given_an_address_that_begins_as_the_gateways_does_there():
    async def main():
        there = session(1)
        address = "https://proxy.example/s/key-1/v1/"
        elsewhere = SharedClients(public_url="https://proxy.example/")
        client = elsewhere.client_for(
            FakeSession(there.session_id, there.key, True, base_url="http://127.0.0.1:9/s/key-1/v1", api_key="key-1")
        )
        assert client.public_url == address and str(client.base_url) == "http://127.0.0.1:9/s/key-1/v1/"
        role = client.role("critic")
        assert role.public_url == f"https://proxy.example/s/{role.api_key}/v1/"
        await elsewhere.close()
        assert SharedClients().client_for(there).public_url == "http://127.0.0.1:9/s/1/v1/"

    asyncio.run(main())
