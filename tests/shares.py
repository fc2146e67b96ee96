"""Which share of what an agent said can be trained, and what the heads of its answers say of the rest. Imports nothing of Midflight, because
clients of other people are tested in environments without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAST = 0.95
"""The least share of tokens that are trained, where a harness samples as the run does."""
NOT_POLICY_SAMPLED = "not_policy_sampled"


def check_trained_share(received: int, masked: Mapping[str, int], *, named: Mapping[str, int] | None = None) -> None:
    """Nearly everything that was received can be trained. Where it cannot, each masked token has fields that are `named`."""
    untrained = masked.get(NOT_POLICY_SAMPLED, 0)
    assert received > 0, "the agent got no token"
    if named:
        assert sum(named.values()) >= untrained > 0, (untrained, named)
    else:
        assert 1 - untrained / received >= LEAST, f"{untrained} of {received} tokens are masked"


class Heads:
    """An application, and the fields that the heads of its answers named as those for which they are masked."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.fields: set[str] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def seen(message: Any) -> None:
            if message["type"] == "http.response.start":
                for name, value in message["headers"]:
                    if name == b"x-midflight-masked":
                        self.fields.update(part.removeprefix("field=") for part in value.decode().split("; ")[1:])
            await send(message)

        await self._app(scope, receive, seen)
