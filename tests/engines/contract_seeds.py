"""The contract of engines that honour seeds: the same tokens whatever happens on the way."""

from __future__ import annotations

import asyncio

import pytest
from tests.engines.asking import Contract, long
from tests.engines.models import ask
from tests.engines.reading import LENGTH, collect, ids, needs, rejection, resumed, until_tokens
from tests.engines.sites import Damage, Site

from midflight.errors import WeightsCorrupt
from midflight.ports import Engine
from midflight.types import Feature, Grammar, GrammarKind, PauseMode

BAD_GRAMMAR = Grammar(GrammarKind.REGEX, "(a")


def needs_seeds(engine: Engine) -> None:
    if not engine.capabilities.honours_seed:
        pytest.skip("the engine honours no seed")


class SeedContract(Contract):
    def test_a_seeded_generation_has_the_tokens_of_an_inline_run(self) -> None:
        async def test(site: Site) -> None:
            needs_seeds(site.engine)
            request = ask(seed=5)
            assert ids(await collect(site.engine, request)) == await site.seeded(request)

        self.on(test)

    def test_a_grammar_shapes_one_answer_and_a_bad_one_ends_no_other(self) -> None:
        async def test(site: Site) -> None:
            needs(site.engine, Feature.GRAMMARS)
            needs_seeds(site.engine)
            much = long(site.engine)
            request = ask(request_id="other", seed=6, **much)
            async with asyncio.TaskGroup() as tasks:
                other = tasks.create_task(collect(site.engine, request))
                refused = [tasks.create_task(rejection(site.engine, ask(request_id=f"{i}", grammar=BAD_GRAMMAR))) for i in range(3)]
                shaped = await collect(site.engine, ask(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["red", "green"]}'), **much))
                assert bytes(ids(shaped)[:-1]).strip() in (b'"red"', b'"green"')
                assert (shaped[-1].finish.reason, shaped[-1].finish.matched) == ("stop", 256)  # type: ignore[union-attr]
                assert [(await r).param for r in refused] == ["grammar"] * 3
                assert ids(await other) == await site.seeded(request)

        self.on(test)

    @pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
    def test_a_freezing_pause_changes_no_token(self, mode: PauseMode) -> None:
        async def test(site: Site) -> None:
            needs_seeds(site.engine)
            request = ask(seed=9, **long(site.engine))
            chunks = site.engine.generate(request)
            got = await until_tokens(chunks, 3)
            await site.engine.pause(mode)
            await site.engine.resume()
            got += [c async for c in chunks]
            assert ids(got) == await site.seeded(request)

        self.on(test)

    def test_a_version_that_is_corrupt_changes_no_token(self) -> None:
        async def test(site: Site) -> None:
            needs_seeds(site.engine)
            with pytest.raises(WeightsCorrupt):
                await site.engine.stage(site.publish(1, damage=Damage.CORRUPT))
            request = ask(seed=2)
            assert ids(await collect(site.engine, request)) == await site.seeded(request)

        self.on(test)

    def test_i5_a_resumed_request_goes_on_as_if_never_aborted(self) -> None:
        """I5, wherever it was cut; one that was complete ends at once."""

        async def test(site: Site) -> None:
            needs_seeds(site.engine)
            request = ask(seed=3, max_tokens=30)
            expected = await site.seeded(request)
            for cut in (0, 1, 7, 29):
                assert ids(await collect(site.engine, resumed(request, expected[:cut]))) == expected[cut:]
            whole = await collect(site.engine, resumed(request, expected))
            assert ids(whole) == () and whole[-1].finish == LENGTH

        self.on(test)
