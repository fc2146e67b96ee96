"""Games of gymnasium and textarena are played and trained: real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from .adapted import adapted
from .processes import steps

pytestmark = pytest.mark.timeout(170)

MOVES = """
def read(said):
    return sum(map(ord, said)) % 2
"""
BLACKJACK = """
entry = "midflight.adapters.gymnasium:play"
max_tokens = 4
[[environment.sources]]
entry = "midflight.adapters.gymnasium:tasks"
content = "seed"
heldout = 4
options = { env = "Blackjack-v1", size = 60, read = "moves:read", max_turns = 20 }
"""
GUESSES = """
entry = "midflight.adapters.textarena:play"
max_tokens = 8
[[environment.sources]]
entry = "midflight.adapters.textarena:tasks"
content = "seed"
heldout = 4
options = { env = "GuessTheNumber-v0-raw", size = 60, max_turns = 12 }
"""


def test_a_game_of_gymnasium_is_trained_with_a_reward_for_each_answer(tmp_path: Path) -> None:
    (tmp_path / "moves.py").write_text(MOVES)
    summary = adapted(tmp_path, BLACKJACK)
    measured = [step for step in steps(tmp_path / "run") if step["rollouts"]]
    assert measured and all(step["components"]["game"] == pytest.approx(step["reward"]) for step in measured)
    assert -1 <= summary["heldout_after"] <= 1


def test_a_game_of_textarena_is_trained(tmp_path: Path) -> None:
    summary = adapted(tmp_path, GUESSES)
    assert summary["heldout_after"] == 0.0  # two answers without a number end a game
    measured = [step for step in steps(tmp_path / "run") if step["rollouts"]]
    assert measured and all(step["metrics"]["game/spoilt"] == 1.0 for step in measured)
