"""Weights that come straight into both workers of a server that is laid over two processes of a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.real_engines.conftest import started
from tests.real_engines.direct import DifferencesContract, DirectContract
from tests.real_engines.process import Kind, ServerProcess


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def over_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    kind: Kind = request.param
    yield from started(kind, tmp_path_factory.mktemp(kind), tensor_parallel=2)


class TestOverTwo(DirectContract, DifferencesContract):
    @pytest.fixture(autouse=True)
    def _server(self, over_two: ServerProcess) -> None:
        self.server = over_two
