"""Real servers for the tests: started as runs start them, once for each file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.real_engines.process import Kind, ServerProcess
from tests.real_engines.sites import save, tied, untied


def started(
    kind: Kind, folder: Path, *, is_tied: bool = True, arguments: tuple[str, ...] = (), tensor_parallel: int = 1
) -> Iterator[ServerProcess]:
    model = save(tied(0) if is_tied else untied(0), folder / "model")
    with ServerProcess(kind, model, log=folder / f"{kind}.log", arguments=arguments, tensor_parallel=tensor_parallel) as server:
        server.wait()
        yield server


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It takes long prompts in pieces, at which a seed would kill it."""
    yield from started("vllm", tmp_path_factory.mktemp("vllm"), arguments=("--max-num-batched-tokens=64",))


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    yield from started("sglang", tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def untied_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Of a model whose output head is its own; SGLang without its overlap scheduler, so that both are tested."""
    kind: Kind = request.param
    arguments = ("--disable-overlap-schedule",) if kind == "sglang" else ()
    yield from started(kind, tmp_path_factory.mktemp(kind), is_tied=False, arguments=arguments)
