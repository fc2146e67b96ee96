"""The whole rollout side and the trainer's loop on virtual time: what holds of every run, whatever happens in it."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from midflight.config.sections import WeightsSection
from midflight.environments.rollout import GRACE_SECONDS
from midflight.errors import EngineError, EngineUnavailable, RunFailed, first_error
from midflight.observe.activity import ProcessWork
from midflight.observe.alarms import Alarms
from midflight.run.heartbeat import Beat
from midflight.run.launcher.watchdog import LOOK_SECONDS, Watchdog
from midflight.run.rollout.standing import RolloutStanding
from midflight.testing.ring import SimulatedTrainer
from midflight.testing.virtual_time import run_virtual
from midflight.types import PackedBatch, PauseMode, Task
from midflight.types.facts import Alarmed, Fact, Leased, RolloutEnded, WeightsCommitted

from .site import MAX_TOKENS, Agents, Site, config, fast_engines

if TYPE_CHECKING:
    from openai import AsyncOpenAI


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_i2_i3_i5_a_quiet_run_keeps_every_invariant(tmp_path: Path, staleness: int, seed: int) -> None:
    async def main() -> Site:
        site = Site(config(staleness=staleness), tmp_path, engines=fast_engines(2, by_version=True), agents=Agents(seed))
        await site.run()
        return site

    site = run_virtual(main, seed=seed, max_seconds=3600)
    site.check()
    assert not site.failed_requests


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("every", "staleness"), [(2, 1), (3, 2), (3, 4), (5, 4)])
def test_i2_versions_that_are_published_every_few_steps_keep_the_bound_and_the_run_goes_on(
    tmp_path: Path, every: int, staleness: int, seed: int
) -> None:
    """With `every` - 1 = `staleness` the last step before a publication trains tokens that are as old as may be."""

    async def main() -> Site:
        made = config(staleness=staleness, steps=10).model_copy(update={"weights": WeightsSection(every=every)})
        site = Site(made, tmp_path, engines=fast_engines(2, by_version=True), agents=Agents(seed))
        await site.run()
        return site

    site = run_virtual(main, seed=seed, max_seconds=3600)
    site.check()
    live = sorted({fact.version for fact in site.seen.of(WeightsCommitted)} - {0})
    assert live == sorted({*range(every, 10, every), 10}), "every so many, and the last"
    assert site.trainer.passed_over == [version for version in range(1, 10) if version not in live]
    oldest = [int((batch.train_version - batch.versions[batch.loss_mask]).max()) for batch in site.trainer.batches]
    assert max(oldest) >= every - 1
    if every - 1 == staleness:
        assert oldest[every - 1] == staleness


@pytest.mark.parametrize("seed", range(4))
def test_i3_i10_an_environment_that_fails_costs_its_rollout_and_never_becomes_a_reward(tmp_path: Path, seed: int) -> None:
    async def main() -> Site:
        site = Site(config(staleness=1, size=3), tmp_path, engines=fast_engines(2), agents=Agents(seed, failing=0.3))
        await site.run()
        return site

    site = run_virtual(main, seed=seed, max_seconds=3600)
    site.check()
    assert isinstance(site.agents, Agents) and site.agents.num_failed > 3
    assert not site.failed_requests


def test_i9_an_environment_that_hangs_is_ended_by_its_deadline_and_the_run_goes_on(tmp_path: Path) -> None:
    async def main() -> tuple[Site, float]:
        site = Site(config(staleness=1, size=3), tmp_path, agents=Agents(2, hanging=0.1, longest=5))
        await site.run()
        return site, asyncio.get_running_loop().time()

    site, seconds = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert isinstance(site.agents, Agents) and site.agents.num_hung > 2
    assert seconds < 6 * (20 + 20 + 5), "a step waits for a hung rollout and its retry, no longer"


def test_i9_agents_that_refuse_to_be_cancelled_are_left_alone_and_their_groups_go_on(tmp_path: Path) -> None:
    async def main() -> tuple[Site, float]:
        site = Site(config(staleness=1, size=3), tmp_path, agents=Agents(2, clinging=0.1, longest=5))
        await site.run()
        return site, asyncio.get_running_loop().time()

    site, seconds = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert isinstance(site.agents, Agents) and site.agents.num_clung > 2
    abandoned = [ended for ended in site.seen.of(RolloutEnded) if (ended.error or "").startswith("RolloutAbandoned")]
    assert 2 < len(abandoned) <= site.agents.num_clung
    assert seconds < 6 * 2 * (20 + 2 * GRACE_SECONDS + 5), "a step waits for the deadline and two graces, and for those of the retry"


def test_i9_an_engine_out_of_memory_is_started_again_when_it_stays_in_quarantine(tmp_path: Path) -> None:
    """The launcher's part is played by the watchdog itself, over the absences that the rollout process tells."""

    async def main() -> Site:
        site = Site(config(staleness=1), tmp_path, engines=fast_engines(1, by_version=True), agents=Agents(3, longest=5))
        site.engines[0].exhaust()
        loop, restarts = asyncio.get_running_loop(), 0

        async def launcher() -> None:
            nonlocal restarts
            dog = Watchdog(stall_seconds=10, work=lambda pid: ProcessWork(0, 0, "S"), clock=loop.time)
            standing = RolloutStanding(site.ring.serving, clock=loop.time)
            dog.begin("rollout", 0)
            dog.begin("e0", 1)
            dog.ready("e0")
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                dog.hear("rollout", Beat(loop.time(), absences=standing.now().absences))
                dog.hear("e0", Beat(loop.time()))
                for hung in dog.look():
                    assert hung.name == "e0" and "out of memory" in hung.why
                    restarts += 1
                    site.engines[0].die()
                    site.engines[0].revive()
                    dog.begin("e0", 1)
                    dog.ready("e0")

        await site.run(launcher())
        assert restarts == 1
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert not [ended for ended in site.seen.of(RolloutEnded) if ended.error]


def test_i9_a_trainer_that_stands_for_minutes_and_agents_that_block_the_loop_cost_time_only(tmp_path: Path) -> None:
    async def main() -> Site:
        site = Site(config(staleness=1), tmp_path, engines=fast_engines(2), agents=Agents(1, blocking=0.3, longest=2))
        await site.run(step_seconds=300)
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert isinstance(site.agents, Agents) and site.agents.num_blocked > 5


class Storm:
    """Aborts, deaths, stalls, failed handovers and operator's pauses at random instants, on all engines but never for good."""

    def __init__(self, site: Site, seed: int) -> None:
        self._site, self._random = site, random.Random(f"storm {seed}")

    async def run(self) -> None:
        """Waits between faults; ended by its task group."""
        while True:
            await asyncio.sleep(self._random.uniform(0.05, 1.0))
            engine = self._random.choice(self._site.engines)
            match self._random.choice(["abort", "abort_all", "die", "stall", "freeze", "exhaust", "commit", "stage", "corrupt", "pause"]):
                case "abort":
                    engine.interrupt(self._random.randrange(MAX_TOKENS))
                case "abort_all":
                    with suppress(EngineUnavailable):
                        await engine.abort(None)
                case "die":
                    engine.die()
                    await asyncio.sleep(self._random.uniform(0.0, 2.0))
                    engine.revive()
                case "stall":
                    engine.stall()
                    await asyncio.sleep(self._random.uniform(0.0, 2.0))
                    engine.unstall()
                case "freeze":
                    engine.freeze()
                    await asyncio.sleep(self._random.uniform(0.0, 40.0))
                    engine.thaw()
                case "exhaust":
                    engine.exhaust()
                    await asyncio.sleep(self._random.uniform(0.0, 10.0))
                    engine.die()
                    engine.revive()
                case "commit":
                    engine.fail_next("commit", EngineError("committing: no."))
                case "stage":
                    engine.fail_next("stage", EngineUnavailable("staging: cut off."))
                case "corrupt":
                    engine.corrupt_next_commit()
                case _:
                    await self._pause()

    async def _pause(self) -> None:
        control = self._site.control
        with suppress(EngineError):
            await control.pause(self._random.choice(list(PauseMode)))
            await asyncio.sleep(self._random.uniform(0.0, 2.0))
            await control.resume()


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("seeds", [range(k, k + 10) for k in range(0, 30, 10)], ids=lambda r: f"{r[0]}-{r[-1]}")
def test_i1_to_i6_hold_whatever_engines_and_operators_do(tmp_path: Path, staleness: int, seeds: range) -> None:
    async def main(seed: int) -> Site:
        draw = random.Random(seed)
        pace = {"step_seconds": draw.choice((0.01, 0.05)), "chunk_tokens": draw.choice((1, 4)), "commit_seconds": draw.choice((0, 0.1))}
        engines = fast_engines(draw.randint(1, 3), by_version=draw.random() < 0.7, stage_seconds=draw.choice((0, 0.5)), **pace)
        mode = draw.choice(("auto", *PauseMode))
        made = config(
            staleness=staleness, groups=draw.randint(1, 3), size=draw.randint(1, 3), every=draw.choice((0, 2)), steps=4, pause_mode=mode
        )
        folder = tmp_path / str(seed)
        folder.mkdir()
        agents = Agents(seed, failing=0.03, hanging=0.01, clinging=0.01, blocking=0.02)
        site = Site(made, folder, engines=engines, agents=agents, sdk=seed % 10 == 0)
        await site.run(Storm(site, seed).run(), step_seconds=draw.choice((0.05, 0.5, 2.0)))
        return site

    spanning = 0
    for seed in seeds:
        site = run_virtual(main(seed), seed=seed, max_seconds=20_000)
        site.check()
        spanning += site.num_spanning
    assert staleness == 0 or spanning > 0, "commits fell into no rollout"


@pytest.mark.parametrize("seed", range(3))
def test_at_a_barrier_no_answer_goes_on_under_a_version_before_that_of_its_tokens(tmp_path: Path, seed: int) -> None:
    """Every other invariant besides, whatever engines and operators do; `check_turn` tells the two ways apart."""

    async def main() -> Site:
        engines = fast_engines(3, by_version=True, step_seconds=0.05, chunk_tokens=4, stage_seconds=0.3, commit_seconds=0.1)
        made = config(staleness=4, groups=2, steps=6).model_copy(update={"weights": WeightsSection(commit="barrier")})
        site = Site(made, tmp_path, engines=engines, agents=Agents(seed), sdk=False)
        await site.run(Storm(site, seed).run(), step_seconds=0.3)
        return site

    site = run_virtual(main, seed=seed, max_seconds=20_000)
    site.check()
    assert site.num_spanning > 0


def test_a_pause_of_the_operator_during_training_fails_nothing_however_long(tmp_path: Path) -> None:
    """Longer than any deadline of a request or a rollout: time in which generation stands is nobody's delay."""

    async def main() -> Site:
        site = Site(config(staleness=1), tmp_path, engines=fast_engines(2), agents=Agents(5, longest=3))

        async def operator() -> None:
            for mode in PauseMode:
                await asyncio.sleep(0.4)
                await site.control.pause(mode)
                made = [(await engine.health()).num_tokens for engine in site.engines]
                await asyncio.sleep(100)
                assert [(await engine.health()).num_tokens for engine in site.engines] == made
                await site.control.resume()

        await site.run(operator())
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert not site.failed_requests
    assert all(finished.error is None for finished in site.seen.of(RolloutEnded))


def test_i9_a_trainer_that_raises_ends_the_run_at_once_with_its_error(tmp_path: Path) -> None:
    def fail(batch: PackedBatch) -> None:
        if batch.train_version == 2:
            raise RunFailed("the loss is not a number")

    async def main() -> None:
        site = Site(config(staleness=1), tmp_path, agents=Agents(1, hanging=0.1))
        site.trainer = SimulatedTrainer(on_step=fail)
        loop, at = asyncio.get_running_loop(), []

        def listen(fact: Fact) -> None:
            if isinstance(fact, Leased):
                at.append(loop.time())

        site.on_fact = listen
        with pytest.RaisesGroup(pytest.RaisesExc(RunFailed, match="not a number"), flatten_subgroups=True):
            await site.run()
        assert site.trainer.version == 2
        assert loop.time() - at[2] < 1.0

    run_virtual(main, seed=0, max_seconds=3600)


def test_i9_an_engine_that_dies_for_good_leaves_the_run_to_the_other(tmp_path: Path) -> None:
    async def main() -> Site:
        site = Site(config(staleness=1), tmp_path, engines=fast_engines(2, by_version=True), agents=Agents(3))
        site.engines[0].interrupt(3, "die")
        await site.run()
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert not site.failed_requests
    assert [state.name for state in site.ring.serving.fleet.states() if state.error is not None] == ["e0"]
    assert any(turn.num_resumes for turns in site.turns.values() for turn in turns)


def test_i6_commits_in_mid_generation_make_rollouts_of_several_versions(tmp_path: Path) -> None:
    """Slow tokens and fast steps: an answer begun under one version goes on under the next, and each token says which."""

    async def main() -> Site:
        engines = fast_engines(1, by_version=True, step_seconds=0.1, chunk_tokens=4)
        site = Site(config(staleness=4, steps=10), tmp_path, engines=engines, agents=Agents(1, longest=0.5))
        await site.run(step_seconds=0.2)
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert any(len({s.version for s in turn.segments}) > 1 for turns in site.turns.values() for turn in turns)


def test_i9_agents_that_never_ask_the_model_end_the_run_with_what_they_should_use(tmp_path: Path) -> None:
    async def elsewhere(task: Task, client: AsyncOpenAI) -> float:
        """As in life: it kept its own provider."""
        await asyncio.sleep(1)
        return 1.0

    async def main() -> list[Alarmed]:
        site = Site(config(staleness=1), tmp_path, agents=elsewhere)
        site.on_fact = Alarms(site.seen.append, log="rollout.log").apply
        with pytest.raises(BaseExceptionGroup) as failed:
            await site.run()
        error = first_error(failed.value)
        assert isinstance(error, RunFailed) and str(error).startswith("8 groups in a row were scored without an answer of the model")
        assert "base_url=client.base_url" in str(error)
        assert asyncio.get_running_loop().time() < 10
        return site.seen.of(Alarmed)

    assert [alarm.name for alarm in run_virtual(main, seed=0, max_seconds=60)] == ["no_model_call", "group_dropped"]


def test_i9_an_environment_that_fails_half_the_time_is_said_by_class_with_its_place(tmp_path: Path) -> None:
    async def main() -> list[Alarmed]:
        site = Site(config(staleness=1, size=4), tmp_path, agents=Agents(0, failing=0.5))
        site.on_fact = Alarms(site.seen.append, log="rollout.log").apply
        await site.run()
        return site.seen.of(Alarmed)

    first, share = (alarm for alarm in run_virtual(main, seed=0, max_seconds=3600) if alarm.name != "group_dropped")
    assert first.name == "failure" and "RuntimeError: the sandbox is gone" in first.text and "site.py:" in first.text
    assert share.name == "failures" and "RuntimeError" in share.text
