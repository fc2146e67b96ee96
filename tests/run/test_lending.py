"""An engine in the trainer's place: it generates while the trainer waits, and makes way for it, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from tests.loop.site import TOKENIZER, Agents, Site, config
from tests.loop.test_lost_trainer import Lives

from midflight.allowance import Allowance
from midflight.config import load_config
from midflight.config.derived import num_engines, placement
from midflight.config.seats import device_map
from midflight.config.sections import EngineSection
from midflight.errors import ConfigError
from midflight.gateway.fleet.fleet import Fleet, Lease
from midflight.run.rollout.lending import OWNER, Lending
from midflight.testing.script import Script
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, GenerateRequest
from midflight.types.facts import Quarantined, Rejoined

LENT = "engine1"


def held(fleet: Fleet) -> bool:
    return OWNER in next(state for state in fleet.states() if state.name == LENT).held_by


def fleet_of_two() -> Fleet:
    fleet = Fleet()
    for name in ("engine0", LENT):
        fleet.attach(ScriptedEngine(name))
    return fleet


def test_it_is_lent_while_the_trainer_waits_and_has_no_batch_at_work() -> None:
    fleet = fleet_of_two()
    lending = Lending(fleet, LENT)
    assert held(fleet)
    with lending.while_waiting():
        assert not held(fleet)
        lending.given(1)
        assert held(fleet), "the batch is there"
    with lending.while_waiting():  # for the next, while it makes the step of this one
        assert held(fleet)
        lending.given(2)
        lending.done(1)
        assert held(fleet), "the next step begins at once"
    lending.done(2)
    assert held(fleet), "nobody waits"
    with lending.while_waiting(), lending.while_waiting():  # a connection was lost, and it asked again
        assert not held(fleet)
    assert held(fleet)
    lending.given(3)
    lending.done()  # the trainer died, and its successor has no batch
    with lending.while_waiting():
        assert not held(fleet)


@pytest.mark.parametrize(("slots", "moved"), [(64, 2), (4, 4)])
def test_the_youngest_requests_move_there_a_third_of_the_load_and_all_that_only_wait_for_a_slot(slots: int, moved: int) -> None:
    async def main() -> None:
        fleet = Fleet()
        for name in ("engine0", LENT):
            fleet.attach(ScriptedEngine(name, capabilities=replace(CAPABLE, max_running=slots)))
        lending = Lending(fleet, LENT)
        leases = [await fleet.place(fleet.ticket(), tokens=100, affinity="", allowance=Allowance(60)) for _ in range(8)]
        with lending.while_waiting():
            assert [lease.moved for lease in leases] == [False] * (8 - moved) + [True] * moved

    run_virtual(main)


def test_it_keeps_no_version_for_an_evaluation() -> None:
    fleet = fleet_of_two()
    with Lending(fleet, LENT).while_waiting():
        assert fleet.reserve(0).engine == "engine0"


class Watched(ScriptedEngine):
    """Counts who is asked for the same answer: by prompt and seed, of all engines together."""

    asked: ClassVar = Counter[object]()
    asking: ClassVar = Counter[object]()
    most = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        kind, answer = type(self), (request.input_ids[: request.num_prompt_tokens], request.sampling.seed)
        kind.asked[answer] += 1
        kind.asking[answer] += 1
        kind.most = max(kind.most, kind.asking[answer])
        try:
            async for chunk in super().generate(request):
                yield chunk
        finally:
            kind.asking[answer] -= 1


def lending_site(folder: Path, seed: int, *, kind: type[ScriptedEngine] = ScriptedEngine) -> Site:
    """Steps are short beside generation, so that the trainer waits; answers of one turn to three."""
    made = config(staleness=1, steps=8).model_copy(update={"engine": EngineSection(lend=True, max_running=4)})
    script = Script(mean_length=8)
    engines = [kind(name, script=script, tokenizer=TOKENIZER, step_seconds=0.05) for name in ("engine0", LENT)]
    return Site(made, folder, engines=engines, agents=Agents(seed, longest=1), sdk=False)


def test_i1_to_i6_hold_while_it_comes_and_goes_and_every_answer_is_whole(tmp_path: Path) -> None:
    """Each answer is what one uninterrupted engine says (I5), and the handover reaches it, lent or not."""

    async def main() -> Site:
        site = lending_site(tmp_path, 1)
        await site.run(step_seconds=0.3)
        return site

    site = run_virtual(main, seed=1, max_seconds=20_000)
    site.check()
    assert not site.failed_requests
    lent = site.engines[1]
    assert lent.requests and lent.served.version == site.engines[0].served.version == 8
    resumed = [r for engine in site.engines for r in engine.requests if len(r.input_ids) > r.num_prompt_tokens]
    assert resumed, "some answers moved, with the tokens that they had"


def test_i5_a_request_that_is_moved_is_resumed_once_by_one_engine_at_a_time_with_every_token_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token is in an answer twice or lost: `check` plays every turn again."""
    moved, move = list[Lease](), Lease.move

    def moving(lease: Lease, why: str) -> None:
        moved.extend([lease] * (lease.lost is None))
        move(lease, why)

    monkeypatch.setattr(Lease, "move", moving)
    monkeypatch.setattr(Watched, "asked", Counter())
    site = lending_site(tmp_path, 2, kind=Watched)
    run_virtual(lambda: site.run(step_seconds=0.3), seed=2, max_seconds=20_000)
    site.check()
    assert Watched.most == 1
    assert Watched.asked.total() - len(Watched.asked) == len(moved) >= 5
    turns = [turn for turns in site.turns.values() for turn in turns]
    resumed = sum(turn.num_resumes for turn in turns)
    assert len(moved) - (len(Watched.asked) - len(turns)) <= resumed <= len(moved), "all but of those under way at the end"
    assert resumed >= 5


def test_its_death_while_lent_costs_its_requests_nothing_but_a_resume_and_it_comes_back_held(tmp_path: Path) -> None:
    async def main() -> Site:
        site = lending_site(tmp_path, 1)
        lent = site.engines[1]

        async def dying() -> None:
            while not lent.requests:
                await asyncio.sleep(0.01)
            lent.die()
            await asyncio.sleep(3.0)
            lent.revive()

        await site.run(dying(), step_seconds=0.3)
        return site

    site = run_virtual(main, seed=1, max_seconds=20_000)
    site.check()
    assert not site.failed_requests
    assert {fact.engine for fact in site.seen.of(Quarantined)} == {LENT} == {fact.engine for fact in site.seen.of(Rejoined)}


@pytest.mark.parametrize("seed", range(3))
def test_i1_to_i8_hold_where_the_trainer_dies_while_its_place_is_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Requests that are there move at once: what comes after the death has the place for itself."""
    without_batch, leave = list[bool](), Lending._leave

    def leaving(lending: Lending, engine: str) -> None:
        without_batch.append(not lending._at_work)
        leave(lending, engine)

    monkeypatch.setattr(Lending, "_leave", leaving)
    draw = random.Random(seed)
    lives = Lives(tmp_path, staleness=1, seed=seed, lend=True)

    async def main() -> None:
        async with lives.site.opened() as ring:
            await ring.serve(lives.train(ring, *(draw.uniform(0.2, 1.2) for _ in range(3))))

    run_virtual(main, seed=seed, max_seconds=20_000)
    lives.check()
    assert lives.num_lost == 3 and without_batch.count(True) and lives.site.engines[1].requests


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["engine.kind=vllm"], 'engine.lend is one more embedded engine in the trainer\'s place, and engine.kind is "vllm"'),
        (["engine.servers=[{}]"], "and engine.servers are given"),
        (["cluster.kind=ray"], "where the trainer may be on another machine"),
        (["trainer.device=cuda"], "engine.device (cpu) is another kind than trainer.device (cuda)"),
        (["gateway.shards=2"], "gateway.shards is 2"),
        (["engine.count=2", "environment.untracked.engines=1"], "environment.untracked.engines (1) sets the last engines apart"),
    ],
)
def test_what_cannot_be_lent_is_refused(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, ["engine.lend=true", *options])
    assert words in str(refused.value)


def test_it_is_one_more_engine_on_the_gpu_of_the_first_rank() -> None:
    made = load_config(None, ["engine.lend=true", "engine.count=2", "engine.device=cuda", "trainer.device=cuda", "trainer.ranks=2"])
    laid = {part.who: part.devices for part in device_map(made)}
    assert laid == {"trainer": (0,), "trainer1": (1,), "engine0": (2,), "engine1": (3,), "engine2": (0,)}
    assert num_engines(made.engine) == 3
    assert next(place for place in placement(made) if place.process == "engine").task.endswith(", the last while the trainer waits")
