"""The contract of versions: what goes live when, what is refused, and which weights made which token."""

from __future__ import annotations

import asyncio

import pytest
from tests.engines.asking import Contract, long
from tests.engines.models import ask
from tests.engines.reading import LENGTH, collect, ids, labels, live_labels, logprobs, until_tokens
from tests.engines.sites import Damage, Site

from midflight.errors import EngineError, WeightsCorrupt
from midflight.types import Chunk, PauseMode

GREEDY = {"temperature": 0.0}
FREEZING = [PauseMode.KEEP, PauseMode.RECOMPUTE]
NUM_IN_FLIGHT = 16
PROMPT = "The quick brown fox jumps over the"
"""Long enough for any engine's prefix cache."""


async def update(site: Site, version: int, mode: PauseMode | None) -> None:
    manifest = site.publish(version)
    await site.engine.stage(manifest)
    if mode is not None:
        await site.engine.pause(mode)
    attestation = await site.engine.commit(version)
    assert (attestation.version, attestation.fingerprint) == (version, manifest.fingerprint)
    if mode is not None:
        await site.engine.resume()


def check_labels(chunks: list[Chunk]) -> None:
    """They never go back, cover all tokens, and none was told to be newer than it is in the end (I6)."""
    final, live = labels(chunks), live_labels(chunks)
    assert len(final) == len(live) == len(ids(chunks)) == len(logprobs(chunks))
    assert [v for v, _ in final] == sorted(v for v, _ in final)
    assert all(told <= true for (told, _), (true, _) in zip(live, final, strict=True))
    assert all(c.attested == () for c in chunks[:-1])


class WeightContract(Contract):
    keeps_keys = True
    """Whether the engine goes on over keys of older weights in `keep`. One that keeps nothing never does."""

    @pytest.mark.parametrize("mode", FREEZING)
    def test_i6_versions_change_in_mid_generation_at_the_commit(self, mode: PauseMode) -> None:
        """I6: tokens before the commit are of 0, after it of 1; in `keep` the keys stay old, with `recompute` they do not."""

        async def test(site: Site) -> None:
            request = ask(**GREEDY, **long(site.engine))
            await site.engine.stage(site.publish(1))
            chunks = site.engine.generate(request)
            got = await until_tokens(chunks, 3)
            await site.engine.pause(mode)
            await site.engine.commit(1)
            await site.engine.resume()
            got += [c async for c in chunks]
            check_labels(got)
            assert got[-1].finish == LENGTH and len(ids(got)) == request.sampling.max_tokens
            assert set(labels(got)) == {(0, 0), (1, 0 if mode is PauseMode.KEEP and self.keeps_keys else 1)}
            old, new = (site.chosen(version, request, ids(got)) for version in (0, 1))
            for (version, kv_version), of_old, of_new in zip(labels(got), old, new, strict=True):
                assert of_old if version == 0 else of_new or kv_version == 0
            assert (await site.engine.commit(1)).version == 1

        self.on(test)

    @pytest.mark.parametrize("mode", [None, *FREEZING, PauseMode.ABORT, PauseMode.DRAIN])
    def test_an_update_with_many_in_flight_ends_none_wrongly_and_later_answers_are_of_the_new_weights(self, mode: PauseMode | None) -> None:
        async def test(site: Site) -> None:
            engine, much = site.engine, long(site.engine)
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(collect(engine, ask(request_id=f"{i}", seed=i, **much))) for i in range(NUM_IN_FLIGHT)]
                await until_tokens(engine.generate(ask(request_id="watched", max_tokens=3)), 3)
                await update(site, 1, mode)
                assert (await engine.health()).version == 1 and not (await engine.health()).paused
                prompts = [f"{PROMPT} {i}" for i in range(4)]
                later = [tasks.create_task(collect(engine, ask(p, request_id=p, **GREEDY, max_tokens=20))) for p in prompts]
            for chunks in (task.result() for task in running):
                check_labels(chunks)
                if mode is not PauseMode.ABORT:
                    assert chunks[-1].finish == LENGTH and len(ids(chunks)) == much["max_tokens"]
            for prompt, task in zip(prompts, later, strict=True):
                assert all(site.chosen(1, ask(prompt, **GREEDY), ids(task.result())))
                assert set(labels(task.result())) == {(1, 1)}

        self.on(test)

    @pytest.mark.parametrize("mode", [None, *FREEZING])
    def test_a_prompt_asked_before_is_answered_by_the_new_weights_alone(self, mode: PauseMode | None) -> None:
        """Keys of the old ones, which prefix caches hold, are not used, also while another request still holds them."""

        async def test(site: Site) -> None:
            request = ask(PROMPT[:30], **GREEDY)
            assert all(site.chosen(0, request, ids(await collect(site.engine, request))))
            holding = site.engine.generate(ask(PROMPT[:30], request_id="holding", max_tokens=20))
            held = await until_tokens(holding, 1)
            await update(site, 1, mode)
            for _ in range(2):
                answer = await collect(site.engine, request)
                assert all(site.chosen(1, request, ids(answer))) and set(labels(answer)) == {(1, 1)}
            check_labels(held + [c async for c in holding])
            await update(site, 2, mode)
            assert all(site.chosen(2, request, ids(await collect(site.engine, request))))

        self.on(test)

    def test_of_two_staged_versions_the_last_is_committed(self) -> None:
        async def test(site: Site) -> None:
            await site.engine.stage(site.publish(1))
            await site.engine.stage(manifest := site.publish(2))
            with pytest.raises(EngineError, match="version 2 is staged"):
                await site.engine.commit(1)
            assert (await site.engine.commit(2)).fingerprint == manifest.fingerprint
            answer = await collect(site.engine, ask(**GREEDY))
            assert all(site.chosen(2, ask(**GREEDY), ids(answer)))

        self.on(test)

    def test_nothing_staged_is_nothing_to_commit(self) -> None:
        async def test(site: Site) -> None:
            with pytest.raises(EngineError, match=r"version 1.*nothing is staged"):
                await site.engine.commit(1)
            answer = await collect(site.engine, ask(**GREEDY))
            assert set(labels(answer)) == {(0, 0)} and all(site.chosen(0, ask(**GREEDY), ids(answer)))

        self.on(test)

    def test_i7_a_damaged_version_is_not_served(self) -> None:
        """I7: what fails leaves the weights as they were, while others are being answered and after."""

        async def test(site: Site) -> None:
            engine, request = site.engine, ask(**GREEDY, **long(site.engine))
            chunks = engine.generate(request)
            got = await until_tokens(chunks, 1)
            for damage in Damage:
                with pytest.raises(WeightsCorrupt, match="version 1"):
                    await engine.stage(site.publish(1, damage=damage))
                with pytest.raises(EngineError, match="nothing is staged"):
                    await engine.commit(1)
            got += [c async for c in chunks]
            assert set(labels(got)) == {(0, 0)} and all(site.chosen(0, request, ids(got)))
            assert (await engine.health()).version == 0
            await update(site, 1, None)
            assert all(site.chosen(1, ask(**GREEDY), ids(await collect(engine, ask(**GREEDY)))))

        self.on(test)
