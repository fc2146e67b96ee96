"""What each part of the contract starts from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from tests.engines.models import ask
from tests.engines.sites import Site

from midflight.ports import Engine
from midflight.types import Feature, GenerateRequest

LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz ")
_FORBIDDEN = tuple((i, -100.0) for i in range(262) if i not in LETTERS)
_DEADLINE_SECONDS = 60.0
"""For one test: a hang is a failure that says where."""


class Contract:
    def attached(self) -> AbstractAsyncContextManager[Site]:
        raise NotImplementedError

    def on(self, test: Callable[[Site], Awaitable[None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(_DEADLINE_SECONDS), self.attached() as site:
                await test(site)

        asyncio.run(main())


def long(engine: Engine) -> dict[str, int]:
    """Sampling of an answer that is under way for as long as the context allows, within reason."""
    return {"max_tokens": min(400, engine.capabilities.max_context - 14)}


def asked_for_letters(engine: Engine, text: str = "hello", **sampling: object) -> GenerateRequest:
    """A request whose answer is text: a model's tokens are not, unless it is biased. A script says letters anyway."""
    bias = _FORBIDDEN if Feature.LOGIT_BIAS in engine.capabilities.features else ()
    return ask(text, logit_bias=bias, **sampling)
