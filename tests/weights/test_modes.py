"""Which commits need a pause of the handover's, and which the engine makes room for itself."""

from __future__ import annotations

from dataclasses import replace

from tests.weights.fleets import only

from midflight.types import PauseMode
from midflight.weights.handover import commit_mode, swaps_between_steps

KEEPING = replace(only(*PauseMode).capabilities, stages_weights=True)
RECOMPUTING = replace(KEEPING, commit_mode=PauseMode.RECOMPUTE)


def test_auto_takes_the_mode_in_which_an_engine_commits_by_itself():
    assert commit_mode("a", KEEPING, "auto") is PauseMode.KEEP
    assert commit_mode("a", RECOMPUTING, "auto") is PauseMode.RECOMPUTE


def test_a_commit_in_the_engines_own_mode_needs_no_pause_and_in_another_it_does():
    assert swaps_between_steps(KEEPING, PauseMode.KEEP) and not swaps_between_steps(KEEPING, PauseMode.RECOMPUTE)
    assert swaps_between_steps(RECOMPUTING, PauseMode.RECOMPUTE) and not swaps_between_steps(RECOMPUTING, PauseMode.KEEP)


def test_an_engine_that_cannot_stage_is_paused_while_weights_come_in():
    assert not swaps_between_steps(replace(RECOMPUTING, stages_weights=False), PauseMode.RECOMPUTE)
