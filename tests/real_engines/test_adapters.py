"""Versions that are adapters, side by side in real servers: each answers by its own, at once, and nothing pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.models import ask
from tests.engines.reading import LENGTH, collect, ids, labels, logprobs, rest, until_tokens
from tests.engines.sites import ModelSite
from tests.real_engines.process import Kind, ServerProcess
from tests.real_engines.sites import adapted, attached, save, tied
from tests.real_engines.test_mixtures import trained

from midflight.errors import EngineError
from midflight.models.names import named_tensors

ROOM = 4
"""Versions that the server keeps, as where the bound on age is 2."""
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    kind: Kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    with ServerProcess(kind, save(adapted(0), folder / "model"), log=folder / "log", num_adapters=ROOM) as started:
        started.wait()
        yield started


def on(server: ServerProcess, test) -> None:
    async def main() -> None:
        async with asyncio.timeout(200), attached(server, adapted, num_adapters=ROOM) as site:
            await test(site)

    asyncio.run(main())


def size(version: int, model=adapted) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in named_tensors(model(version)).values())


def test_three_versions_answer_at_once_each_with_the_log_probabilities_of_its_own_adapters(server: ServerProcess) -> None:
    paused = list[object]()

    async def test(site: ModelSite) -> None:
        site.engine._server.pause = lambda *words: paused.append(words)  # type: ignore[attr-defined]
        requests = [ask(PROMPT, request_id=f"r{version}", max_tokens=150, ignore_eos=True) for version in range(3)]
        streams, got, longest = [site.engine.generate(request) for request in requests], [], 0.0
        loop = asyncio.get_running_loop()
        for version, stream in enumerate(streams):
            if version:
                began = loop.time()
                await site.engine.stage(site.publish(version))
                staged = loop.time()
                await site.engine.commit(version)
                longest = max(longest, loop.time() - staged)
                print(f"{server.kind}: staged in {staged - began:.3f} s, committed in {loop.time() - staged:.6f} s")
            got.append(await until_tokens(stream, 3))
        assert (await site.engine.health()).num_running == 3, "all three are under way"
        for version, (stream, chunks) in enumerate(zip(streams, got, strict=True)):
            chunks += await rest(stream)
            assert chunks[-1].finish == LENGTH and set(labels(chunks)) == {(version, version)}
            expected = site.logprobs(version, requests[version], ids(chunks))
            assert logprobs(chunks) == pytest.approx(expected, abs=1e-4, rel=0)
            other = site.logprobs((version + 1) % 3, requests[version], ids(chunks))
            assert max(abs(a - b) for a, b in zip(expected, other, strict=True)) > 0.1, "versions differ"
        assert not paused, "no version pauses the server"
        print(f"{server.kind}: {size(1)} bytes a version, {size(0, tied)} of the whole model")

    on(server, test)


def test_the_oldest_leaves_for_the_newest_and_no_other(server: ServerProcess) -> None:
    async def test(site: ModelSite) -> None:
        for version in range(1, 7):
            await site.engine.stage(site.publish(version))
            await site.engine.commit(version)
            request = ask(PROMPT, max_tokens=20, ignore_eos=True)
            answer = await collect(site.engine, request)
            assert logprobs(answer) == pytest.approx(site.logprobs(version, request, ids(answer)), abs=1e-4, rel=0)
        assert await site.engine._there() == {3, 4, 5, 6}  # type: ignore[attr-defined]

    on(server, test)


def test_an_answer_under_the_oldest_version_goes_on_while_newer_ones_come_until_it_is_too_old(server: ServerProcess) -> None:
    async def test(site: ModelSite) -> None:
        request = ask(PROMPT, max_tokens=220, ignore_eos=True)
        stream = site.engine.generate(request)
        got = await until_tokens(stream, 3)
        for version in (1, 2, 3):
            await site.engine.stage(site.publish(version))
            await site.engine.commit(version)
        got += await rest(stream)
        assert set(labels(got)) == {(0, 0)} and 3 <= len(ids(got)) <= 220
        assert logprobs(got) == pytest.approx(site.logprobs(0, request, ids(got)), abs=1e-4, rel=0)

    on(server, test)


def test_adapters_of_another_width_are_refused_and_the_last_version_answers(server: ServerProcess) -> None:
    async def test(site: ModelSite) -> None:
        await site.engine.stage(site.publish(1))
        await site.engine.commit(1)
        with pytest.raises(EngineError):
            await site.engine._shelf.load_adapter(site.engine._client, "policy-v9", "/nowhere")  # type: ignore[attr-defined]
        request = ask(PROMPT, max_tokens=20, ignore_eos=True)
        answer = await collect(site.engine, request)
        assert logprobs(answer) == pytest.approx(site.logprobs(1, request, ids(answer)), abs=1e-4, rel=0)

    on(server, test)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_run_trains_adapters_on_a_server_that_answers_by_each_version(kind: Kind, tmp_path: Path) -> None:
    """A version that the server did not serve would show in the mismatch; one that it paused for, in its log."""
    trained(save(tied(0), tmp_path / "base"), tmp_path, kind=kind, more=("lora.rank=4",))
    said = (tmp_path / "run" / "logs" / "engine0.server.log").read_text(errors="replace")
    assert "policy-v1" in said
