"""The engine port's contract before a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.engines.contract import EngineContract
from tests.engines.sites import Site
from tests.real_engines.direct import DirectContract
from tests.real_engines.process import ServerProcess
from tests.real_engines.shaped import ShapedContract
from tests.real_engines.sites import attached


class TestVllm(EngineContract, ShapedContract, DirectContract):
    @pytest.fixture(autouse=True)
    def _server(self, vllm: ServerProcess) -> None:
        self.server = vllm

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Site]:
        async with attached(self.server) as site:
            yield site
