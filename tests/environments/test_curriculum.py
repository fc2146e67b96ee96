"""Pools by pass rate, and the choice among them: what comes up how often, and that nothing but seed, position and results decides."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations

import pytest

from midflight.config import load_config
from midflight.config.sources import CurriculumSection
from midflight.environments.curriculum import Pool, SourcePools
from midflight.environments.seeded_stream import SeededStream
from midflight.environments.sources import Source
from midflight.environments.tasks import TaskStream
from midflight.errors import ConfigError
from midflight.types import GroupKey, Task
from midflight.types.rollouts import GroupScores

BY_LEARNABILITY = CurriculumSection(priority="learnability")


def source(name: str, size: int, *, weight: float = 1.0) -> Source:
    return Source(name, weight, tuple(Task(str(i), name) for i in range(size)), heldout=(Task("held", name),))


def streamed(curriculum: CurriculumSection, *sources: Source, seed: int = 1) -> SeededStream:
    return SeededStream(sources, seed=seed, curriculum=curriculum)


def played(stream: SeededStream, number: int, rewards: Callable[[Task], Sequence[float]]) -> list[tuple[GroupKey, Task, str]]:
    """So many groups one after the other, with the pool that each was drawn from."""
    drawn: list[tuple[GroupKey, Task, str]] = []
    for _ in range(number):
        key, task = stream.next()
        begun = stream.curriculum.begun(key)
        assert begun is not None
        drawn.append((key, task, begun.pool))
        stream.curriculum.ended(key, rewards(task))
    return drawn


def thirds(task: Task) -> list[float]:
    """Tasks 0 to 9 are always passed, 10 to 19 never, 20 to 29 in every second rollout."""
    return [[1.0] * 4, [0.0] * 4, [1.0, 0.0] * 2][int(task.id) // 10]


# --- One source -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passed", "pool"), [(None, Pool.UNSEEN), (0, Pool.HARD), (1, Pool.LEARNABLE), (9, Pool.LEARNABLE), (10, Pool.EASY)]
)
def test_a_task_is_in_the_pool_of_its_pass_rate(passed: int | None, pool: Pool) -> None:
    """Of ten rollouts; hard is below 0.1 and easy above 0.9."""
    pools = SourcePools(3)
    if passed is not None:
        pools.begin(1)
        pools.end(1, (GroupKey(0, 0), passed, 10))
    assert pools.pool(1) is pool
    assert pools.sizes == Counter([Pool.UNSEEN, Pool.UNSEEN, pool]) | dict.fromkeys(set(Pool) - {Pool.UNSEEN, pool}, 0)


def test_the_rate_looks_back_on_the_newest_groups_in_whatever_order_they_ended() -> None:
    """The window of 16 holds the groups at 2 and 3: (2 + 6) / (8 + 8). The oldest, all passed, is forgotten."""
    ended = [(GroupKey(0, 1), 8, 8), (GroupKey(0, 2), 2, 8), (GroupKey(0, 3), 6, 8)]
    for order in permutations(ended):
        pools = SourcePools(1)
        for _ in order:
            pools.begin(0)
        for passes in order:
            pools.end(0, passes)
        assert pools.rate(0) == 0.5 and (pools.passed, pools.scored) == (8, 16)


def test_nine_of_ten_draws_are_of_tasks_that_may_teach_in_proportion_to_their_learnability() -> None:
    """Pass rates 1/2, 3/4, 0: the first two have 4 p (1 - p) of 1 and 0.75, and 3150 of 3500 draws: 1800 and 1350."""
    pools = SourcePools(3)
    for place, passed in enumerate((2, 3, 0)):
        pools.begin(place)
        pools.end(place, (GroupKey(0, place), passed, 4))
    chance = random.Random(0)
    found = Counter(pools.choose(chance) for _ in range(3500))
    for place, expected in enumerate((1800, 1350, 350)):
        assert abs(found[place] - expected) < 5 * 30  # five standard deviations of the most uncertain one


def test_tasks_under_way_are_not_drawn_until_all_are() -> None:
    pools = SourcePools(3)
    for place in (0, 2):
        pools.begin(place)
    assert {pools.choose(random.Random(seed)) for seed in range(20)} == {1}
    pools.begin(1)
    assert {pools.choose(random.Random(seed)) for seed in range(50)} == {0, 1, 2}


def test_a_group_whose_rollouts_all_failed_says_nothing_of_its_task() -> None:
    stream = streamed(BY_LEARNABILITY, source("a", 2))
    played(stream, 10, lambda task: [])
    assert stream.curriculum.sizes == {"unseen": 2, "hard": 0, "learnable": 0, "easy": 0} and stream.curriculum.pass_rate is None


# --- The stream -------------------------------------------------------------------------------------------------------


def test_what_teaches_is_drawn_more_and_everything_is_seen_again() -> None:
    """Once all are known, nine of ten draws are of the ten tasks that teach."""
    drawn = played(streamed(BY_LEARNABILITY, source("a", 30)), 1500, thirds)
    late = [int(task.id) // 10 for _, task, _ in drawn[300:]]
    assert abs(late.count(2) / len(late) - 0.9) < 0.05
    assert {task.id for _, task, _ in drawn[300:]} == {str(i) for i in range(30)}, "hard and easy ones too, and nothing held out"


def test_where_no_task_may_teach_the_others_are_drawn() -> None:
    assert len(played(streamed(BY_LEARNABILITY, source("a", 3)), 50, lambda task: [1.0])) == 50


def test_sources_keep_their_shares_whatever_their_tasks_teach() -> None:
    stream = streamed(BY_LEARNABILITY, source("a", 40, weight=3), source("b", 40))
    for epoch in range(3):
        drawn = played(stream, 80, lambda task: [1.0, 0.0] if task.source == "b" else [1.0, 1.0])
        assert [key.epoch for key, *_ in drawn] == [epoch] * 80
        assert Counter(task.source for _, task, _ in drawn) == {"a": 60, "b": 20}


def test_the_reward_of_a_pass_is_an_option_so_rewards_may_be_any_numbers() -> None:
    stream = streamed(CurriculumSection(priority="learnability", passes=-2.0), source("a", 1))
    played(stream, 1, lambda task: [-5.0, -2.0, 40.0, -2.5])
    assert stream.curriculum.pass_rate == 0.5


def test_a_restored_stream_draws_what_the_first_one_draws() -> None:
    """Two groups run when it ends: one ran on in another process, the other is in line, and both have the task that was chosen."""
    sources = [source("a", 20), source("b", 10, weight=2)]
    first, ended = streamed(BY_LEARNABILITY, *sources), list[GroupScores]()
    for number in range(120):
        key, task = first.next()
        first.curriculum.begun(key)
        running = number in (110, 117)
        passed = 0 if running else int(task.id) % 3
        if not running:
            first.curriculum.ended(key, [1.0] * passed + [0.0] * (2 - passed))
        ended.append(GroupScores(key, task, not running, 0 if running else 2, 0, passed, float(passed)))
    again = streamed(BY_LEARNABILITY, *sources)
    again.curriculum.restore(reversed(ended))
    again.seek(*first.position)
    for group in ended:
        assert again.task_at(group.key.epoch, group.key.index).id == group.task.id
        if not group.is_over:
            again.curriculum.begun(group.key)
    assert again.curriculum.sizes == first.curriculum.sizes and again.curriculum.pass_rate == first.curriculum.pass_rate
    assert [task.id for _, task, _ in played(again, 100, thirds)] == [task.id for _, task, _ in played(first, 100, thirds)]


def test_a_run_whose_curriculum_was_taken_away_goes_on_with_the_tasks_that_it_had_chosen() -> None:
    first, usual = streamed(BY_LEARNABILITY, source("a", 50)), streamed(CurriculumSection(), source("a", 50))
    chosen = [(key, task) for key, task, _ in played(first, 20, lambda task: [1.0, 0.0])]
    usual.curriculum.restore(GroupScores(key, task, False, 0, 0, 0, 0.0) for key, task in chosen)
    assert [usual.task_at(key.epoch, key.index).id for key, _ in chosen] == [task.id for _, task in chosen]
    usual.seek(0, 20)
    assert usual.next()[1] == streamed(CurriculumSection(), source("a", 50)).task_at(0, 20)


def test_without_a_curriculum_nothing_is_told_and_tasks_have_their_turns() -> None:
    stream = TaskStream([source("a", 5)], None, seed=0)
    assert stream.curriculum is not None
    key = stream.draw()
    assert key is not None and stream.curriculum.begun(key) is None
    assert stream.task_of(key) == SeededStream([source("a", 5)], seed=0).next()[1]


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["curriculum.priority=learnability", "environment.sources=[{posted=true}]"], "what is posted is tried once each"),
        (["curriculum.priority=learnability", "environment.sources.0.shuffle=false"], "shuffle = false keeps the order"),
    ],
)
def test_a_curriculum_that_cannot_be_is_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, options)
    assert message in str(refused.value)
