"""I8: the process that writes the store is killed at two hundred random instants. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trajectories.test_kill import die_often

pytestmark = pytest.mark.timeout(300)


def test_i8_two_hundred_deaths_at_random_instants_lose_no_group_and_no_token(tmp_path: Path) -> None:
    die_often(tmp_path, times=200, seed=0)
