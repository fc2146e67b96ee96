"""Named evaluations of several answers: pass@k and best@k without bias, greedy beside sampled, and failures in no mean."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from tests.facts import Facts

from midflight.config import load_config
from midflight.config.evaluation import SuiteSection
from midflight.environments.evaluation import Evaluator, Suite, best_at, evaluation_key, pass_at, suite_scores
from midflight.errors import ConfigError
from midflight.observe.lines import EvaluationLine
from midflight.observe.metrics import metrics_of
from midflight.testing.virtual_time import run_virtual
from midflight.types import RolloutKey, Task, Trajectory
from midflight.types.facts import Evaluated

from .fakes import task

TASKS = [task(0), task(1), task(2, source="sums", question="q")]


class Worth:
    """Rollouts whose rewards are these, by place of the task and number of the sample; None failed."""

    def __init__(self, rewards: dict[tuple[int, int], float | None]) -> None:
        self._rewards, self.keys = rewards, list[RolloutKey]()

    async def run(self, key: RolloutKey, task: Task, *, version: int) -> Trajectory:
        await asyncio.sleep(1)
        self.keys.append(key)
        reward = self._rewards.get((key.group.index, key.group.attempt), 0.0)
        return Trajectory(key, task.id, task.source, reward=reward, rows=(), error=None if reward is not None else "gone")


def evaluated(section: SuiteSection, rewards: dict[tuple[int, int], float | None]) -> dict[str, Evaluated]:
    facts = Facts()
    usual, worth = Worth({}), Worth(rewards)
    evaluator = Evaluator(rollouts=usual, slots=asyncio.Semaphore(64), record=facts.apply, suites=[Suite(section, 0.5, worth)])
    asked = [each for each in TASKS if not section.sources or each.source in section.sources]
    assert evaluator.num_rollouts(TASKS) == 3 + section.samples * len(asked)
    run_virtual(lambda: evaluator.run(TASKS, version=7))
    assert usual.keys == [evaluation_key(number) for number in range(3)] and len(set(worth.keys)) == section.samples * len(asked)
    return {fact.source: fact for fact in facts if isinstance(fact, Evaluated)}


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, 1.0, 0.5], [0.0, 0.0, 0.0], [1.0, 1.0]])
def test_pass_and_best_at_k_are_the_means_over_all_ways_to_draw_k_answers(rewards: list[float]) -> None:
    passed = sum(reward >= 1 for reward in rewards)
    for k in range(1, len(rewards) + 1):
        draws = list(itertools.combinations(rewards, k))
        assert pass_at(len(rewards), passed, k) == pytest.approx(sum(max(draw) >= 1 for draw in draws) / len(draws))
        assert best_at(rewards, k) == pytest.approx(sum(max(draw) for draw in draws) / len(draws))


def test_a_suite_asks_each_task_several_times_and_is_told_by_its_own_name() -> None:
    section = SuiteSection(name="four", samples=4)
    found = evaluated(section, {(0, 0): 1.0, (0, 3): 1.0, (1, 1): 0.5})
    assert set(found) == {"spell", "sums", "four/spell", "four/sums"}
    spell = found["four/spell"]
    assert (spell.num_tasks, spell.num_failed, spell.mean_reward) == (8, 0, 2.5 / 8)
    # of the first task 2 of 4 passed: 1 - C(2, 2) / C(4, 2) = 5/6 at 2; the second has none
    expected = {"samples": 4, "temperature": 0.5, "pass@1": 1 / 4, "pass@2": 5 / 12, "pass@4": 1 / 2}
    # of 1, 1, 0, 0 the best of two is 1 in 5 of 6 draws; of 0.5, 0, 0, 0 it is 0.5 in 3 of 6
    expected |= {"best@1": 2.5 / 8, "best@2": (5 / 6 + 1 / 4) / 2, "best@4": 0.75}
    assert spell.at == pytest.approx(expected)
    assert found["four/sums"].at == pytest.approx({**dict.fromkeys(expected, 0.0), "samples": 4, "temperature": 0.5})
    assert found["spell"].at is None


def test_i10_an_answer_that_failed_is_no_zero() -> None:
    found = evaluated(SuiteSection(name="two", samples=2), {(0, 0): 1.0, (0, 1): None, (1, 0): 0.0, (1, 1): 0.0})["two/spell"]
    assert (found.num_tasks, found.num_failed, found.mean_reward) == (3, 1, 1 / 3)
    assert found.at is not None
    assert (found.at["pass@1"], found.at["pass@2"]) == (0.5, 0.0)  # the first task has one answer, so it is in no mean of two


def test_pass_at_k_is_told_for_the_powers_of_two_and_for_all_samples() -> None:
    assert [SuiteSection(name="a", samples=number).ks for number in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)]


def test_an_answer_has_passed_from_the_reward_of_the_curriculum() -> None:
    section = SuiteSection(name="a", samples=2)
    found = [Trajectory(evaluation_key(n), "t", "s", reward=reward, rows=()) for n, reward in enumerate((-1.0, -3.0))]
    assert [suite_scores(section, found, temperature=1.0, passes=passes)[0].at["pass@2"] for passes in (-1.0, 0.0)] == [1.0, 0.0]


def test_a_suite_of_one_source_asks_no_other() -> None:
    assert set(evaluated(SuiteSection(name="greedy", temperature=0, sources=("sums",)), {})) == {"spell", "sums", "greedy/sums"}


def test_what_a_suite_found_has_names_of_its_own_in_the_metrics() -> None:
    line = EvaluationLine(version=3, step=3, seconds=1.0, source="four/spell", num_tasks=8, mean_reward=0.5, at={"pass@4": 0.75})
    assert metrics_of(line) == {
        "eval/four/spell/reward": 0.5,
        "eval/four/spell/num_tasks": 8.0,
        "eval/four/spell/num_failed": 0.0,
        "eval/four/spell/pass@4": 0.75,
    }


@pytest.mark.parametrize(
    ("suite", "said"),
    [
        ('name = "a"\nsamples = 4\ntemperature = 0', "would be the same answer each time at temperature 0"),
        ('name = "a"\nsources = ["sums"]', "names 'sums', which holds nothing out; those that do are spell_backward"),
        ('name = "a/b"', "give it one without a slash"),
        ('name = "a"\n[[evaluation.suites]]\nname = "a"', "has 'a' twice"),
    ],
)
def test_a_suite_that_makes_no_sense_is_refused_with_a_remedy(tmp_path, suite: str, said: str) -> None:
    path = tmp_path / "suite.toml"
    path.write_text(f"[[evaluation.suites]]\n{suite}\n")
    with pytest.raises(ConfigError, match=said):
        load_config(path)
