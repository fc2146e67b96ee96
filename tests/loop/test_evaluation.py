"""Evaluations while training goes on, on virtual time: each is of one version, and holds back nobody who has another engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from midflight.config.evaluation import EvaluationSection, SuiteSection
from midflight.config.sections import WeightsSection
from midflight.config.sources import CurriculumSection
from midflight.errors import EngineUnavailable
from midflight.testing.virtual_time import run_virtual
from midflight.types import Kind, SessionRecord, Task, Version
from midflight.types.facts import Evaluated, Fact, RolloutEnded, Stepped, WeightsCommitted

from .site import Agents, Site, config, fast_engines
from .test_ring import Storm

if TYPE_CHECKING:
    from openai import AsyncOpenAI

HELD_OUT = tuple(Task(f"h{i}", "numbers", {"question": f"held out {i}"}) for i in range(4))


class Examined(Agents):
    """On held-out tasks it asks `num_turns` times, with half a second between; on `quick` ones once."""

    def __init__(self, seed: int, *, num_turns: int, quick: tuple[str, ...]) -> None:
        super().__init__(seed, longest=1.0)
        self._num_turns, self._quick = num_turns, quick

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float | None:
        if not str(task.data["question"]).startswith("held out"):
            return await super().__call__(task, client)
        for turn in range(1 if task.id in self._quick else self._num_turns):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": f"{task.id} {turn}"}])
            await asyncio.sleep(0.5)
        return 0.5


class Evaluating(Site):
    """A site that holds tasks out, and remembers of which versions each of its evaluations' sessions had tokens."""

    def __init__(
        self,
        folder: Path,
        *,
        engines: int,
        every: int,
        steps: int,
        num_turns: int,
        quick: tuple[str, ...] = (),
        pin_seconds: float = 60.0,
        publish_every: int = 1,
        suites: tuple[SuiteSection, ...] = (),
        passes: float = 1.0,
    ) -> None:
        section = EvaluationSection(eval_every=every, pin_seconds=pin_seconds, suites=suites)
        sections = {"evaluation": section, "weights": WeightsSection(every=publish_every), "curriculum": CurriculumSection(passes=passes)}
        made = config(steps=steps, staleness=2).model_copy(update=sections)
        agents = Examined(0, num_turns=num_turns, quick=quick)
        super().__init__(made, folder, engines=fast_engines(engines, by_version=True), agents=agents, sdk=False)
        self.sources = [replace(self.sources[0], heldout=HELD_OUT)]
        self.versions: list[frozenset[Version]] = []
        self.served: list[tuple[float, Version]] = []
        self.sampled: list[float] = []
        """Temperature of each of its evaluations' sessions."""

    async def evaluate(self, *beside: Callable[[], None], at_step: Version = 0) -> None:
        """A whole run. `beside` is done as soon as the step that makes version `at_step` is over."""

        def listen(fact: Fact) -> None:
            if isinstance(fact, Stepped) and fact.version == at_step:
                for act in beside:
                    asyncio.get_running_loop().call_later(0.1, act)

        self.on_fact = listen
        await self.run()

    def _follow(self, ring) -> None:
        super()._follow(ring)
        close, told, opened = ring.serving.gateway.close, ring.serving.fleet.on_served, ring.serving.gateway.open

        def opening(key, *, sampling, **options):
            self.sampled += [sampling.temperature] if key.kind is Kind.EVALUATION else []
            return opened(key, sampling=sampling, **options)

        def closing(session_id: str) -> SessionRecord:
            record = close(session_id)
            if f"{Kind.EVALUATION}-" in session_id:
                self.versions.append(record.versions)
            return record

        def serving(version: Version) -> None:
            self.served.append((asyncio.get_running_loop().time(), version))
            told(version)

        ring.serving.gateway.open, ring.serving.gateway.close = opening, closing
        ring.serving.fleet.on_served = serving

    @property
    def evaluations(self) -> list[tuple[Version, int]]:
        """(version, scored tasks) of each."""
        return [(e.version, e.num_tasks) for e in self.seen.of(Evaluated)]

    @property
    def examined(self) -> list[RolloutEnded]:
        """Evaluation rollouts."""
        return [r for r in self.seen.of(RolloutEnded) if r.key.kind is Kind.EVALUATION]

    @property
    def failed(self) -> list[str | None]:
        return [r.error for r in self.examined if r.reward is None]

    def before(self, evaluation: Version, kind: type) -> list:
        """Facts of a kind from before an evaluation ended."""
        end = next(i for i, e in enumerate(self.seen) if isinstance(e, Evaluated) and e.version == evaluation)
        return [e for e in self.seen[:end] if isinstance(e, kind)]

    def commits(self, engine: str) -> list[Version]:
        return [c.version for c in self.seen.of(WeightsCommitted) if c.engine == engine]


def test_what_falls_due_at_a_version_that_is_not_published_is_evaluated_at_the_next_that_is(tmp_path: Path) -> None:
    """Due are 4 and 8; published are 3, 6, 9 and the last, 10, which is evaluated after training."""

    async def main() -> Evaluating:
        site = Evaluating(tmp_path, engines=2, every=4, steps=10, num_turns=1, publish_every=3)
        await site.evaluate()
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert site.evaluations == [(0, 4), (6, 4), (9, 4), (10, 4)]


def test_suites_ask_the_same_version_again_as_each_says(tmp_path: Path) -> None:
    """Four tasks are held out: the usual evaluation asks them once, `greedy` once, `two` twice; before and after two steps."""

    async def main() -> Evaluating:
        suites = (SuiteSection(name="greedy", temperature=0), SuiteSection(name="two", samples=2))
        site = Evaluating(tmp_path, engines=1, every=0, steps=2, num_turns=1, suites=suites, passes=0.5)
        await site.evaluate()
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    told = [(e.version, e.source, e.num_tasks, e.num_failed) for e in site.seen.of(Evaluated)]
    assert told == [(v, source, n, 0) for v in (0, 2) for source, n in (("numbers", 4), ("greedy/numbers", 4), ("two/numbers", 8))]
    usual = site.sampled[0]
    assert usual > 0 and site.sampled == ([usual] * 4 + [0.0] * 4 + [usual] * 8) * 2
    assert site.seen.of(Evaluated)[2].at == {"samples": 2, "temperature": usual, "pass@1": 1, "best@1": 0.5, "pass@2": 1, "best@2": 0.5}
    assert all(len(versions) <= 1 for versions in site.versions)


def test_with_two_engines_versions_go_live_on_one_while_the_other_is_evaluated(tmp_path: Path) -> None:
    """Twelve turns are six seconds or more, a step is 0.3: the evaluation of version 2 outlives at least three further versions."""

    async def main() -> Evaluating:
        site = Evaluating(tmp_path, engines=2, every=2, steps=14, num_turns=12)
        await site.evaluate()
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert site.evaluations[:2] == [(0, 4), (2, 4)] and site.evaluations[-1] == (14, 4)
    assert not site.failed and not site.failed_requests
    assert all(len(versions) == 1 for versions in site.versions), "each session is of one version"
    trained = [s.version for s in site.before(2, Stepped)]
    assert trained[-1] >= 5, "training went on"
    committed = {c.engine: c.version for c in site.before(2, WeightsCommitted)}
    assert min(committed.values()) == 2 and max(committed.values()) >= 5
    (kept,) = (engine for engine, version in committed.items() if version == 2)
    caught_up = next(v for v in site.commits(kept) if v > 2)
    assert caught_up >= max(committed.values()), "it caught up at once with the newest, not with those between"
    served = [version for _, version in site.served]
    assert served == sorted(served) == list(range(1, 15)), "admission saw every version, and none twice"
    assert [s.version for s in site.ring.serving.fleet.states()] == [14, 14]
    assert not any(s.reserved for s in site.ring.serving.fleet.states())


def test_with_one_engine_a_version_waits_for_the_evaluation(tmp_path: Path) -> None:
    async def main() -> Evaluating:
        site = Evaluating(tmp_path, engines=1, every=2, steps=6, num_turns=8)
        await site.evaluate()
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert site.evaluations == [(0, 4), (2, 4), (4, 4), (6, 4)] and not site.failed
    assert all(len(versions) <= 1 for versions in site.versions)
    assert [c.version for c in site.before(2, WeightsCommitted)][-1] == 2
    assert [s.version for s in site.before(2, Stepped)][-1] > 2, "training went on, up to its bound"


def test_with_one_engine_an_evaluation_that_outlives_the_deadline_is_cut_and_its_rest_has_failed(tmp_path: Path) -> None:
    """Twenty turns are ten seconds or more; a version waits for two. Two agents are done by then: they have scores."""

    async def main() -> Evaluating:
        site = Evaluating(tmp_path, engines=1, every=3, steps=5, num_turns=20, quick=("h0", "h1"), pin_seconds=2.0)
        await site.evaluate()
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert site.evaluations == [(0, 4), (3, 2), (5, 4)]
    assert len(site.failed) == 2 and all("a new version came" in str(error) for error in site.failed)
    waited = {version: at for at, version in site.served}
    assert 2.0 < waited[4] - waited[3] < 4.0, "no longer than the deadline and a step"


def test_a_version_waits_for_an_evaluation_no_longer_than_until_another_engine_is_back(tmp_path: Path) -> None:
    """The engine beside the evaluated one is away for two seconds, and the deadline is twenty."""

    async def main() -> Evaluating:
        site = Evaluating(tmp_path, engines=2, every=2, steps=6, num_turns=30, pin_seconds=20.0)

        def kill_the_other_when_reserved() -> None:
            """Polls: the deed must fall between the reservation and the next version."""
            assert site.ring is not None
            kept = [s for s in site.ring.serving.fleet.states() if s.reserved and s.num_requests]
            if not kept:
                asyncio.get_running_loop().call_later(0.005, kill_the_other_when_reserved)
                return
            other = next(e for e in site.engines if e.name != kept[0].name)
            other.die()
            asyncio.get_running_loop().call_later(2.0, other.revive)

        await site.evaluate(kill_the_other_when_reserved, at_step=1)
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert (2, 4) in site.evaluations and not site.failed
    served = {version: at for at, version in site.served}
    assert served[3] - served[2] < 5.0


def test_the_last_score_is_of_the_last_version_though_its_handover_failed_and_the_engine_came_back(tmp_path: Path) -> None:
    async def main() -> Evaluating:
        site = Evaluating(tmp_path, engines=1, every=0, steps=3, num_turns=2)

        def fail(fact: Fact) -> None:
            if isinstance(fact, Stepped) and fact.version == 3:
                site.engines[0].fail_next("stage", EngineUnavailable("staging: no answer in 60 s"))

        site.on_fact = fail

        await site.run()
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    assert site.evaluations == [(0, 4), (3, 4)] and not site.failed


def test_an_evaluation_whose_engine_dies_goes_on_where_its_version_is_served_too(tmp_path: Path) -> None:
    """Killed before version 3 is live. The other engine keeps version 2 in its place; the dead one comes back for training."""

    async def main() -> Evaluating:
        site = Evaluating(tmp_path, engines=3, every=2, steps=12, num_turns=12)

        def kill() -> None:
            assert site.ring is not None
            (kept,) = (s for s in site.ring.serving.fleet.states() if s.reserved)
            assert kept.num_requests, "it dies with requests of the evaluation"
            engine = next(e for e in site.engines if e.name == kept.name)
            engine.die()
            asyncio.get_running_loop().call_later(1.0, engine.revive)

        def kill_when_reserved() -> None:
            """Polls: the deed must fall between the reservation and the next version."""
            assert site.ring is not None
            kept = [s for s in site.ring.serving.fleet.states() if s.reserved and s.num_requests]
            kill() if kept else asyncio.get_running_loop().call_later(0.005, kill_when_reserved)

        await site.evaluate(kill_when_reserved, at_step=1)
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert (2, 4) in site.evaluations and not site.failed
    assert all(len(versions) == 1 for versions in site.versions)
    assert [s.version for s in site.before(2, Stepped)][-1] >= 4
    assert [s.version for s in site.ring.serving.fleet.states()] == [12, 12, 12]


def test_an_evaluation_whose_version_nobody_serves_any_more_has_failed_at_once(tmp_path: Path) -> None:
    async def main() -> Evaluating:
        site = Evaluating(tmp_path, engines=2, every=2, steps=8, num_turns=12)

        def kill() -> None:
            assert site.ring is not None
            (kept,) = (s for s in site.ring.serving.fleet.states() if s.reserved)
            assert site.ring.serving.fleet.served_version() > kept.version
            engine = next(e for e in site.engines if e.name == kept.name)
            engine.die()
            engine.revive()

        await site.evaluate(kill, at_step=4)
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    site.check()
    assert site.evaluations[:2] == [(0, 4), (2, 0)], "nothing was scored at version 2"
    assert len(site.failed) == 4
    assert all(len(versions) <= 1 for versions in site.versions)
    assert [s.version for s in site.ring.serving.fleet.states()] == [8, 8]


def test_a_rollout_that_another_version_answered_has_no_score(tmp_path: Path) -> None:
    """As if the engine took a version behind the fleet's back: the label of the tokens decides."""

    async def main() -> Evaluating:
        site = Evaluating(tmp_path, engines=1, every=0, steps=1, num_turns=3)
        async with site.opened() as ring:
            evaluator = ring.system._evaluations._evaluator  # type: ignore[attr-defined]
            scores = await evaluator.run(HELD_OUT, version=1)
            assert [(s.num_scored, s.num_failed, s.mean_reward) for s in scores] == [(0, 4, None)]
        return site

    site = run_virtual(main, seed=0, max_seconds=3600)
    assert site.evaluations == [(1, 0)]
    assert site.failed == ["asked of version 1 alone, it was answered by version 0"] * 4


@pytest.mark.parametrize("seeds", [range(k, k + 5) for k in range(0, 15, 5)], ids=lambda r: f"{r[0]}-{r[-1]}")
def test_i1_to_i6_hold_and_every_score_is_of_one_version_whatever_engines_and_operators_do(tmp_path: Path, seeds: range) -> None:
    async def main(seed: int) -> Evaluating:
        draw = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        site = Evaluating(
            folder, engines=draw.randint(1, 3), every=draw.choice((1, 2)), steps=6, num_turns=draw.choice((2, 6)), pin_seconds=2.0
        )
        await site.run(Storm(site, seed).run(), step_seconds=draw.choice((0.05, 0.5)))
        return site

    scored = 0
    for seed in seeds:
        site = run_virtual(main(seed), seed=seed, max_seconds=20_000)
        site.check()
        assert all(r.num_versions == 1 for r in site.examined if r.reward is not None)
        scored += sum(num for _, num in site.evaluations)
        assert not any(s.reserved for s in site.ring.serving.fleet.states())
    assert scored
