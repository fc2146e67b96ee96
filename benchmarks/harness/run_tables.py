"""What a table of runs found: its rows, and a picture of the scores over time. All of it is read
from the runs' folders.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness.pages import markdown, mean_and_error, panels, style
from midflight.observe.history import JournalHistory, read_journal
from midflight.observe.plot import COLORS, moving_average

USED = "used.json"
UNTRAINED = "untrained.json"
"""Files in a run's folder: the processor time of its starts so far, and the score of the model as
it was fetched.
"""
WINDOW = 5
"""Steps of the moving mean in the picture."""


@dataclass(frozen=True)
class Recipe:
    """One row of a table: a configuration with settings of its own."""

    name: str
    config: Path
    panel: str
    """Title of its part of the picture."""
    label: str
    """What it is called there."""
    settings: tuple[str, ...] = ()
    promised: float | None = None
    """The least rise of the held-out score that is promised, in the mean of the seeds."""


@dataclass(frozen=True)
class Outcome:
    """One run that has finished."""

    recipe: Recipe
    seed: int
    untrained: float | None
    """Held-out score before the warm start; none where there was no warm start."""
    before: float
    """Held-out score before the first step of reinforcement learning."""
    after: float
    num_heldout: int
    seconds: float
    """The time from the command to its end, over all starts."""
    cpu_seconds: float | None
    """The CPU time of all processes and starts; none where a start was killed too soon."""
    mean_age: float
    """The age in versions, over trained tokens."""
    max_age: int
    rollouts: int
    spanning: int
    """Rollouts of several versions."""
    failed_requests: int
    overlap: float | None
    peak_mb: float
    rewards: Sequence[tuple[float, float]]
    """Seconds, and the mean reward of the training rollouts that ended since the point before."""
    heldout: Sequence[tuple[float, float]]
    """Seconds, and the held-out score."""
    training_seconds: float = 0.0
    """The time from the end of the evaluation before the first step to the end of the last step."""
    ess: float = 1.0
    """Effective sample size of the weights used, over the number of tokens; mean of the steps."""
    divergence: float = 0.0
    """KL divergence between the policy that begins a step and the one that sampled its tokens; the
    mean of the steps.
    """

    @property
    def rise(self) -> float:
        return self.after - self.before

    @property
    def line(self) -> str:
        began = ""
        if self.untrained is not None:
            began = f"{self.untrained:.3f} before its warm start, then "
        return (
            f"{self.recipe.name}, seed {self.seed}: held out {began}{self.before:.3f} -> "
            f"{self.after:.3f} ({self.num_heldout} tasks), {_minutes(self.seconds)} in all; "
            f"{self.spanning:,} of {self.rollouts:,} rollouts of several versions, "
            f"{self.failed_requests} failed requests"
        )


def read_outcome(recipe: Recipe, seed: int, folder: Path) -> Outcome:
    """Reads what the finished run in the folder found."""
    summary = msgspec.json.decode((folder / "summary.json").read_bytes())
    history = read_journal(folder / "metrics.jsonl")
    primary = summary["primary"]
    ages = history.trained_ages
    return Outcome(
        recipe=recipe,
        seed=seed,
        untrained=_kept(folder / UNTRAINED, "score"),
        before=summary["heldout_before"],
        after=summary["heldout_after"],
        num_heldout=summary["sources"][primary]["num_heldout"],
        seconds=summary["seconds"],
        cpu_seconds=_kept(folder / USED, "cpu_seconds"),
        mean_age=sum(age * count for age, count in ages.items()) / max(1, sum(ages.values())),
        max_age=summary["max_token_staleness"],
        rollouts=summary["rollouts"],
        spanning=summary["rollouts_spanning_versions"],
        failed_requests=summary["failed_requests"],
        overlap=summary["overlap_share"],
        peak_mb=summary["peak_memory_mb"],
        rewards=_rewards(history, primary),
        heldout=_heldout(history, primary),
        training_seconds=_training_seconds(history),
        ess=_mean_reading(history, "rho/ess"),
        divergence=_mean_reading(history, "rho/k3"),
    )


def _kept(place: Path, name: str) -> float | None:
    return json.loads(place.read_text())[name] if place.exists() else None


def _rewards(history: JournalHistory, source: str) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for line in history.steps:
        reward = (line.reward_by_source or {}).get(source)
        if reward is not None:
            found.append((line.seconds, reward))
    return found


def _heldout(history: JournalHistory, source: str) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for line in history.evaluations:
        if line.source == source and line.mean_reward is not None:
            found.append((line.seconds, line.mean_reward))
    return found


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)} min {seconds % 60:.0f} s"


def _training_seconds(history: JournalHistory) -> float:
    began = max((line.seconds for line in history.evaluations if line.step == 0), default=0.0)
    return history.steps[-1].seconds - began


def _mean_reading(history: JournalHistory, key: str) -> float:
    """Returns the mean over the steps that have the reading; not a number where none has."""
    readings = [(line.trainer or {}).get(key) for line in history.steps]
    known = [reading for reading in readings if reading is not None]
    return statistics.fmean(known) if known else float("nan")


# --- Table ----------------------------------------------------------------------------------------

Cell = Callable[[Sequence[Outcome]], str]
Columns = Mapping[str, Cell]
"""What stands in a row, by heading."""


def mean_of(value: Callable[[Outcome], float], digits: int) -> Cell:
    return lambda found: mean_and_error([value(outcome) for outcome in found], digits)


def _after(found: Sequence[Outcome]) -> str:
    return f"**{mean_and_error([outcome.after for outcome in found], 3)}**"


def _cpu_minutes(found: Sequence[Outcome]) -> str:
    spent = [o.cpu_seconds / 60 for o in found if o.cpu_seconds is not None]
    return mean_and_error(spent, 1) if len(spent) == len(found) else "not known"


def _spanning(found: Sequence[Outcome]) -> str:
    rollouts = sum(outcome.rollouts for outcome in found)
    return f"{sum(outcome.spanning for outcome in found):,} of {rollouts:,}"


SCORES: Columns = {
    "held out before": mean_of(lambda o: o.before, 3),
    "after": _after,
    "rise": mean_of(lambda o: o.rise, 3),
}
TIMES: Columns = {
    "minutes": mean_of(lambda o: o.seconds / 60, 1),
    "CPU minutes": _cpu_minutes,
}
AGES: Columns = {
    "age: mean": lambda found: f"{statistics.mean(o.mean_age for o in found):.2f}",
    "oldest": lambda found: str(max(o.max_age for o in found)),
}
OTHERS: Columns = {
    "rollouts of several versions": _spanning,
    "failed requests": lambda found: str(sum(o.failed_requests for o in found)),
    "peak MB": lambda found: f"{max(o.peak_mb for o in found):,.0f}",
}


def table_of(outcomes: Sequence[Outcome], columns: Columns) -> str:
    """A row for each recipe, in the mean of its seeds; ± is the standard error of the mean."""
    rows: list[list[str]] = []
    for found in _by_recipe(outcomes):
        cells = [cell(found) for cell in columns.values()]
        rows.append([found[0].recipe.name, str(len(found)), *cells])
    return markdown(["run", "seeds", *columns], rows)


def _by_recipe(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.recipe.name, []).append(outcome)
    return list(found.values())


def shortfalls(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence for each recipe whose score rises by less than is promised."""
    found: list[str] = []
    for its in _by_recipe(outcomes):
        promised = its[0].recipe.promised
        rise = statistics.mean(outcome.rise for outcome in its)
        if promised is not None and rise < promised:
            found.append(
                f"{its[0].recipe.name}: the held-out score rises by {rise:.3f} in the mean of "
                f"{len(its)} seeds, {promised:g} is promised."
            )
    return found


# --- Picture --------------------------------------------------------------------------------------


def write_picture(outcomes: Sequence[Outcome], picture: Path) -> None:
    """A panel for each title: the moving mean of the training reward over minutes, a line a run,
    and its held-out scores.
    """
    by_title: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_title.setdefault(outcome.recipe.panel, []).append(outcome)
    size = (5.0 * len(by_title), 3.6)
    with panels(picture, len(by_title), size=size) as axes:
        for place, (title, its) in zip(axes, by_title.items(), strict=True):
            _draw_panel(place, its)
            style(place, title)
            place.set_xlim(left=0)
            place.set_ylim(0, 1.02)
            place.set_xlabel(_legend_of(its))
        axes[0].set_ylabel("score")


def _draw_panel(axes: Any, outcomes: Sequence[Outcome]) -> None:
    by_recipe = _by_recipe(outcomes)
    for color, found in zip(COLORS, by_recipe, strict=False):
        for number, outcome in enumerate(found):
            _draw_run(axes, outcome, color, label=outcome.recipe.label if number == 0 else None)
    if len(by_recipe) > 1:
        axes.legend(frameon=False, loc="best")
    else:
        _write_scores(axes, outcomes)


def _draw_run(axes: Any, outcome: Outcome, color: str, *, label: str | None) -> None:
    minutes = [seconds / 60 for seconds, _ in outcome.rewards]
    rewards = moving_average([reward for _, reward in outcome.rewards], WINDOW)
    axes.plot(minutes, rewards, color=color, linewidth=1.4, alpha=0.7, label=label)
    times = [seconds / 60 for seconds, _ in outcome.heldout]
    scores = [score for _, score in outcome.heldout]
    axes.scatter(
        times, scores, color=color, marker="D", s=36, zorder=3, edgecolors="white", clip_on=False
    )
    if outcome.untrained is not None:
        axes.scatter(
            [0],
            [outcome.untrained],
            color="white",
            marker="D",
            s=30,
            zorder=3,
            edgecolors=color,
            clip_on=False,
        )


def _write_scores(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """The mean of the seeds beside the first and the last held-out scores."""
    for place in (0, -1):
        minutes = statistics.mean(outcome.heldout[place][0] for outcome in outcomes) / 60
        scores = [outcome.heldout[place][1] for outcome in outcomes]
        text = f"{statistics.mean(scores):.2f}"
        axes.annotate(
            text,
            (minutes, max(scores)),
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
            color=COLORS[0],
            fontsize=9,
        )


def _legend_of(outcomes: Sequence[Outcome]) -> str:
    warm = any(outcome.untrained is not None for outcome in outcomes)
    more = ", ◇ before the warm start" if warm else ""
    return f"minutes (line: training, ◆ held out{more})"
