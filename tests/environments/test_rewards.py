"""What is a reward and what is not."""

from __future__ import annotations

import numpy as np
import pytest

from midflight.environments.result_checks import checked_reward
from midflight.environments.single_turn import exact_match
from midflight.errors import BadReward

from .fakes import task


@pytest.mark.parametrize(
    ("value", "reward"), [(1, 1.0), (0.25, 0.25), (True, 1.0), (-3, -3.0), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (None, None)]
)
def test_finite_numbers_and_none_are_rewards(value: object, reward: float | None):
    checked = checked_reward(value, task=task())
    assert checked == reward and type(checked) is type(reward)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), "yes", "1.0", [1.0], 10**400, 1e300, np.float32("nan"), object]
)
def test_anything_else_is_refused_and_the_message_names_task_and_value(value: object):
    with pytest.raises(BadReward) as caught:
        checked_reward(value, task=task(17))
    assert str(caught.value).startswith(f"scoring task 17 of spell: reward was {value!r}, expected a finite number or None")


def test_exact_match_looks_past_white_space_at_the_ends_only():
    assert exact_match(" olleh\n", "olleh") == 1.0
    assert exact_match("oll eh", "olleh") == 0.0
    assert exact_match("Olleh", "olleh") == 0.0
