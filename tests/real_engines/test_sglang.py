"""The engine port's contract before a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.engines.contract import EngineContract
from tests.engines.models import ask
from tests.engines.reading import labels, live_labels, rest, until_tokens
from tests.engines.sites import ModelSite, Site
from tests.real_engines.direct import PROMPT, SWAPS, DirectContract
from tests.real_engines.process import ServerProcess
from tests.real_engines.shaped import ShapedContract
from tests.real_engines.sites import attached, tied

from midflight.models.names import named_tensors
from midflight.weights.transports.broadcast import BroadcastPublisher

WAITING_SECONDS = 0.2


class TestSglang(EngineContract, ShapedContract, DirectContract):
    @pytest.fixture(autouse=True)
    def _server(self, sglang: ServerProcess) -> None:
        self.server = sglang

    def test_i6_tokens_that_wait_at_the_detokeniser_while_versions_are_swapped_are_of_the_version_that_made_them(self) -> None:
        """The answer that the new version is served does not wait there."""

        async def test(site: ModelSite, sender: BroadcastPublisher) -> None:
            for version in range(1, SWAPS + 1):
                await site.engine.stage(sender.publish(version, named_tensors(tied(version))))
                chunks = site.engine.generate(ask(PROMPT, max_tokens=400, temperature=1.0))
                got = await until_tokens(chunks, 3)
                with self.server.frozen("sglang::detokenizer"):
                    await asyncio.sleep(WAITING_SECONDS)
                    await site.engine.commit(version)
                sender.release(version - 1)
                got += await rest(chunks)
                assert live_labels(got) == labels(got)
                if len({made for made, _ in labels(got)}) > 1:
                    return
            pytest.fail("each answer had ended before its swap: the machine is too busy")

        self._on(test)

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Site]:
        async with attached(self.server) as site:
            yield site
