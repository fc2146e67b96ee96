"""When the rollouts of a step were made: turns in the colours of their versions, and what lay between them."""

from __future__ import annotations

from itertools import pairwise

from midflight.observe.timeline import RolloutTimed
from midflight.types import TurnTimes
from midflight.view.bars import WAITING, figure
from midflight.view.charting import version_color
from midflight.view.rollout_times import FIRST_TOKEN, num_mixed, rollout_tracks


def turn(began: float, ended: float, *sampled: tuple[int, float]) -> TurnTimes:
    return TurnTimes(began=began, ended=ended, placed=(("engine0", began),), sampled=sampled, num_tokens=5)


def rollout(sample: int, began: float, ended: float, *turns: TurnTimes) -> RolloutTimed:
    return RolloutTimed((0, 7, 0, sample), "sums", began, ended, 1.0, 5, turns)


MIXED = rollout(1, 1.0, 9.0, turn(5.0, 8.0, (3, 5.5)), turn(1.25, 4.0, (2, 1.5), (3, 3.0)))
"""Its turns are in the order in which they were written."""
PLAIN = rollout(0, 0.5, 2.0, turn(0.5, 2.0, (2, 0.75)))


def test_each_moment_of_a_rollout_is_in_one_bar_with_what_it_was_spent_on() -> None:
    (bars,) = rollout_tracks([MIXED], lambda each: f"/{each.key[-1]}").values()
    assert [(bar.began, bar.ended, bar.color) for bar in bars] == [
        (1.0, 1.25, WAITING),
        (1.25, 1.5, FIRST_TOKEN),
        (1.5, 3.0, version_color(2)),
        (3.0, 4.0, version_color(3)),
        (4.0, 5.0, WAITING),
        (5.0, 5.5, FIRST_TOKEN),
        (5.5, 8.0, version_color(3)),
        (8.0, 9.0, WAITING),
    ]
    assert all(before.ended == after.began for before, after in pairwise(bars))
    assert {bar.link for bar in bars} == {"/1"}
    assert bars[3].text == "sample 1, turn 1 of 2: version 3"


def test_rollouts_are_in_the_order_in_which_they_began_and_those_of_several_versions_are_counted() -> None:
    tracks = rollout_tracks([MIXED, PLAIN], lambda each: "")
    assert list(tracks) == ["0-7-0-0", "0-7-0-1"]
    assert num_mixed([MIXED, PLAIN]) == 1


def test_a_turn_that_ended_before_its_first_token_is_a_wait() -> None:
    (bars,) = rollout_tracks([rollout(0, 0.0, 3.0, turn(0.0, 3.0))], lambda each: "").values()
    assert [(bar.ended, bar.color) for bar in bars] == [(3.0, FIRST_TOKEN)]


def test_tracks_without_names_are_as_high_as_they_are_asked_to_be() -> None:
    layout = figure(rollout_tracks([MIXED, PLAIN], lambda each: ""), height=10, named=False)["layout"]
    assert layout["height"] == 80
    assert not layout["yaxis"]["showticklabels"]
