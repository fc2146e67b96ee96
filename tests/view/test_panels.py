"""What charts show, worked out from a journal."""

from __future__ import annotations

from msgspec import structs

from midflight.observe.history import JournalHistory
from midflight.observe.learning import Histogram, histogram
from midflight.observe.lines import EvaluationLine, StepLine
from midflight.observe.status import Totals
from midflight.view.panels import Panel, of_run


def step(number: int, **histograms: Histogram) -> StepLine:
    return StepLine(
        step=number, version=number, seconds=float(number), step_seconds=1.0, tokens=1, rollouts=1,
        generation_rate=1.0, training_rate=1.0, histograms=histograms, totals=Totals(),
    )  # fmt: skip


def panel(name: str, *steps: StepLine) -> Panel:
    return next(panel for panel in of_run(JournalHistory.of(steps)) if panel.title == name)


def test_lengths_generated_trained_and_cut_short_stand_beside_each_other_in_the_same_bins() -> None:
    """Of two steps; each length is counted where it is, though each step has bins of its own."""
    first = step(1, generated_length=histogram([3, 4, 4, 9]), trained_length=histogram([4, 4]), truncated_length=histogram([9]))
    second = step(2, generated_length=histogram([0, 3]), trained_length=histogram([3]))
    found = panel("Rollouts by length", first, second)
    assert found.options["xAxis"]["data"] == [str(length) for length in range(10)]
    assert {drawn["name"]: drawn["data"] for drawn in found.options["series"]} == {
        "generated": [1, 0, 0, 2, 2, 0, 0, 0, 0, 1],
        "trained": [0, 0, 0, 1, 2, 0, 0, 0, 0, 0],
        "cut short": [0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    }
    assert "6 generated, 3 trained, 1 cut short" in found.note


def test_long_rollouts_share_at_most_sixteen_bars() -> None:
    found = panel("Rollouts by length", step(1, generated_length=histogram([10, 1000])))
    assert found.options["xAxis"]["data"][0] == "0-60" and len(found.options["xAxis"]["data"]) == 16
    assert sum(found.options["series"][0]["data"]) == 2


def test_a_noisy_line_is_drawn_as_its_moving_mean_over_the_steps_themselves() -> None:
    steps = [structs.replace(step(number), trainer={"grad_norm": float(number % 2)}) for number in range(1, 41)]
    each, mean = panel("Gradient norm", *steps).options["series"]
    assert each["lineStyle"]["opacity"] < 1 and mean["lineStyle"]["opacity"] == 1
    assert {value for _, value in each["data"]} == {0.0, 1.0}
    assert all(0.4 < value < 0.6 for _, value in mean["data"][15:])


def test_a_legend_names_the_held_out_scores_of_a_source_only_where_it_has_no_line() -> None:
    trained = structs.replace(step(1), reward_by_source={"sums": 0.1, "words": 0.2})
    scores = [EvaluationLine(version=0, step=0, seconds=0.0, source=source, mean_reward=0.5, num_tasks=1) for source in ("sums", "rare")]
    found = of_run(JournalHistory.of([trained, *scores]))[0]
    assert found.title == "Reward by source" and found.options["legend"]["data"] == ["sums", "words", "rare, held out"]
