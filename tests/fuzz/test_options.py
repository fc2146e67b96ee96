"""What the dry run accepts makes a step, whatever options say. `HYPOTHESIS_PROFILE=explore` tries other configurations.

A failure shows the smallest set of values that fails. What was found so stands below as a case of its own.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from .drawing import settings_drawn
from .playing import Outcome, answering, checks_here, play, tidy, write_files

pytestmark = pytest.mark.timeout(1800)
NUM_CASES = int(os.environ.get("MIDFLIGHT_FUZZ_CASES", "300"))
"""`make test-options` plays two thousand, which takes about three minutes of processor time."""
PHASES = [phase for phase in Phase if phase is not Phase.explain]
"""Explaining a failure traces every line of every case: it takes a quarter of an hour."""
LEAST_STEPS = 0.2
"""The share of cases that are played to their steps. The others are refused, or too large to play."""


@dataclass
class Place:
    """A folder with what configurations name, and what became of those that were played there."""

    folder: Path
    words: dict[str, str]
    outcomes: Counter[Outcome] = field(default_factory=Counter)

    def play(self, drawn: dict[str, Any]) -> Outcome:
        try:
            outcome = play(drawn, self.words, self.folder)
        finally:
            tidy(self.folder)
        self.outcomes[outcome] += 1
        return outcome


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("fuzz")
    write_files(folder)
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch, answering() as url, checks_here():
        patch.chdir(folder)
        yield Place(folder, {"LIVE": url, "STORE": str(folder / "store"), "PYTHON": str(folder / "python")})
    logging.disable(logging.NOTSET)


def test_what_the_dry_run_accepts_makes_a_step(place: Place) -> None:
    @settings(max_examples=NUM_CASES, suppress_health_check=list(HealthCheck), phases=PHASES)
    @given(settings_drawn())
    def tried(drawn: dict[str, Any]) -> None:
        note("\n".join(f"{key} = {value!r}" for key, value in drawn.items()))
        place.play(drawn)

    tried()
    total = place.outcomes.total()
    assert total >= NUM_CASES and place.outcomes[Outcome.STEPPED] >= LEAST_STEPS * total, place.outcomes


def test_the_small_configuration_makes_its_steps(place: Place) -> None:
    assert place.play({}) is Outcome.STEPPED


FOUND: dict[str, tuple[dict[str, Any], Outcome]] = {
    "a step of a staleness of billions was looked for one by one": ({"rollout.max_staleness": 2**31}, Outcome.STEPPED),
    "more rollouts ran than there may be sessions": ({"gateway.max_sessions": 2, "rollout.max_in_flight": "none"}, Outcome.STEPPED),
    "a group had more rollouts than there may be sessions": ({"gateway.max_sessions": 1}, Outcome.REFUSED),
    "the gateway takes no such temperature": ({"environment.temperature": 1e300}, Outcome.REFUSED),
    "no number can be divided by such a temperature": ({"environment.temperature": 1e-300}, Outcome.REFUSED),
    "a stored configuration lost what was null": ({"environment.template_options": {"a b": None}}, Outcome.REFUSED),
    "no float has room for such a cap": ({"correction.cap": 1e300}, Outcome.REFUSED),
    "no generator takes such a seed": ({"run.seed": 2**64 + 1, "lora.rank": 1}, Outcome.REFUSED),
    "no engine gives a token in no time": ({"gateway.request_seconds": 1e-300}, Outcome.REFUSED),
    "no rollout takes no time": ({"environment.max_rollout_seconds": 1e-300}, Outcome.REFUSED),
    "every answer was late after a thousandth of a second": ({"gateway.request_seconds": 0.001}, Outcome.REFUSED),
    "every agent was late after a thousandth of a second": ({"environment.rollout_seconds": 0.001}, Outcome.REFUSED),
    "every rollout was late after a thousandth of a second": ({"environment.max_rollout_seconds": 0.001}, Outcome.REFUSED),
    "tools stand in every prompt, and left no room for an answer": (
        {"environment.rewards.*.entry": "tests.fuzz.own:score", "environment.tools": ["tests.fuzz.own:double"]},
        Outcome.REFUSED,
    ),
    "a step trained on its batch two billion times": ({"trainer.epochs_per_step": 2**31}, Outcome.REFUSED),
    "a step looked for two billion mini-batches one by one": ({"trainer.updates_per_step": 2**31}, Outcome.REFUSED),
    "an agent that returns a number gave no conversation to a reward": (
        {"environment.entry": "tests.fuzz.own:solve", "environment.rewards.*.entry": "tests.fuzz.own:score"},
        Outcome.REFUSED,
    ),
    "a host had a NUL": ({"gateway.host": "\0"}, Outcome.REFUSED),
    "a folder had a NUL": ({"run.folder": "run\0"}, Outcome.REFUSED),
    "a dataset without a name stood beside a path": ({"environment.sources.*.dataset": ""}, Outcome.REFUSED),
}
"""What the cases above have found, by what was wrong, and what becomes of it now."""


@pytest.mark.parametrize(("drawn", "outcome"), FOUND.values(), ids=FOUND.keys())
def test_what_was_found_stays_mended(place: Place, drawn: dict[str, Any], outcome: Outcome) -> None:
    assert place.play(drawn) is outcome
