"""How often a part is started again, and when that ends the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from midflight.errors import ConfigError
from midflight.run.launcher.restarts import FAILED_STARTS, REPLENISH_SECONDS, RestartBudget, RestartBudgets, RestartRule
from midflight.run.parts import PartLost, Restarted
from midflight.run.places.port import PartFailed
from midflight.testing.virtual_time import run_virtual


def test_a_restart_that_was_spent_comes_back_and_each_in_a_row_waits_longer() -> None:
    budget = RestartBudget(RestartRule(3))
    assert [budget.spend(0.0), budget.spend(1.0), budget.spend(2.0), budget.spend(3.0)] == [0.0, 2.0, 4.0, None]
    assert budget.seconds_to_next(3.0) == REPLENISH_SECONDS - 3
    assert budget.left(REPLENISH_SECONDS) == 1 and budget.spend(REPLENISH_SECONDS) == 4.0
    assert budget.left(10 * REPLENISH_SECONDS) == 3 and budget.spend(10 * REPLENISH_SECONDS) == 0.0
    assert RestartBudget(RestartRule(0)).spend(5.0) is None


def test_a_part_that_has_worked_since_its_last_start_has_all_its_restarts_again_and_waits_no_less() -> None:
    budget = RestartBudget(RestartRule(1))
    waits: list[float | None] = []
    for second in range(8):
        waits.append(budget.spend(float(second)))
        budget.earn()
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert [budget.spend(8.0), budget.spend(9.0)] == [30.0, None]


def test_a_death_that_does_not_count_takes_no_restart_and_has_the_next_one_wait_longer() -> None:
    budget = RestartBudget(RestartRule(1))
    assert [budget.spend(float(second), counts=False) for second in range(3)] == [0.0, 2.0, 4.0]
    assert budget.left(3.0) == 1
    assert [budget.spend(3.0), budget.spend(4.0)] == [8.0, None]
    assert budget.spend(5.0, counts=False) == 16.0
    assert RestartBudget(RestartRule(0)).spend(0.0, counts=False) is None, "nothing is to be started again"


def test_a_worker_that_fails_at_its_start_is_started_again_at_once_and_its_restarts_come_back_by_work_alone() -> None:
    budget = RestartBudget(FAILED_STARTS)
    assert [budget.spend(at) for at in (0.0, 1e6, 2e6)] == [0.0, 0.0, None]
    budget.earn()
    assert {budget.spend(2e6, counts=False) for _ in range(2000)} == {0.0}, "agents may end it again and again"
    assert budget.spend(2e6, counts=False) == 0.0 and [budget.spend(at) for at in (2e6, 3e6, 4e6)] == [0.0, 0.0, None]


def test_a_step_is_work_where_the_run_has_never_come_so_far() -> None:
    """It fails at step 4 again and again, and goes on from step 2 each time."""
    budgets = RestartBudgets(2)
    assert [budgets.is_further(step) for step in (0, 1, 2, 3, 3, 2, 3, 2, 3, 4)] == [False, True, True, True, *[False] * 5, True]


def test_parts_do_not_spend_each_others_restarts() -> None:
    budgets = RestartBudgets(1)
    assert budgets.of("engine0").spend(0.0) == 0.0 and budgets.of("engine0").spend(0.0) is None
    assert budgets.of("engine1").spend(0.0) == 0.0


def lives(*ends: BaseException | None, restarts: int = 2, possible: Callable[[], bool] = lambda: True) -> tuple[list[int], list[Restarted]]:
    """The numbers of the lives that ended so, and what was said between them. Raises what `keep` raises."""
    budgets, left, begun, said = RestartBudgets(restarts), list(ends), list[int](), list[Restarted]()

    async def live(number: int) -> None:
        begun.append(number)
        if (end := left.pop(0)) is not None:
            raise end

    async def between(restart: Restarted) -> None:
        said.append(restart)

    run_virtual(budgets.keep(live, between=between, possible=possible))
    return begun, said


DIED = PartFailed("trainer died", part="trainer")


def test_lives_follow_each_other_until_one_ends_without_a_failure() -> None:
    begun, said = lives(DIED, BaseExceptionGroup("parts ended", [DIED]), None)
    assert begun == [0, 1, 2]
    assert said == [Restarted("trainer", "trainer died", 1, 0.0), Restarted("trainer", "trainer died", 0, 2.0)]


def test_the_failure_is_raised_when_no_restart_is_left_or_none_would_help() -> None:
    with pytest.raises(PartFailed, match="trainer died"):
        lives(DIED, DIED, None, restarts=1)
    with pytest.raises(PartFailed, match="trainer died"):
        lives(DIED, None, possible=lambda: False)
    with pytest.raises(ConfigError, match="no such task"):
        lives(BaseExceptionGroup("parts ended", [DIED, ConfigError("no such task")]), None)
    with pytest.raises(PartLost, match="did not answer"):
        lives(PartLost("the gateway did not answer"), None)
