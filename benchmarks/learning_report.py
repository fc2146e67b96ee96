"""What `learning.py` found: a table, the check of the claim, and a picture of reward over wall
time.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BEGIN = "<!-- learning: begin -->"
END = "<!-- learning: end -->"
PICTURE = Path("images/learning.svg")
COLORS = {
    "synchronous": "#444b54",
    "one-step-off": "#8b3a8b",
    "async-1": "#2563a8",
    "async-4": "#2e8b57",
    "async-8": "#c2571a",
}
AGED = ("aged-4", "aged-8")
WINDOW = 9
"""Steps of the moving mean in the picture."""
WITHIN = 2.0
"""Standard errors of the difference that count as noise."""


@dataclass(frozen=True)
class Result:
    """One run. Seconds are of the phase between the evaluations before and after; `ess`,
    `divergence` are means over steps.
    """

    mode: str
    correction: str
    seed: int
    steps: int
    before: float
    after: float
    """Mean reward on held-out tasks of the first source."""
    num_heldout: int
    wall_seconds: float
    cpu_seconds: float
    """Of all processes."""
    mean_age: float
    """Over trained tokens."""
    max_age: int
    ess: float
    """Effective sample size of the weights used, over the number of tokens."""
    divergence: float
    """KL divergence between the policy that begins a step and the one that sampled its tokens."""
    peak_memory_mb: float
    trained_tokens: int
    generated_tokens: int
    curve: Sequence[tuple[float, float]]
    """Seconds, and mean reward of the rollouts of the first source that ended since the point
    before.
    """


Runs = Mapping[tuple[str, str], Sequence[Result]]


def read_results(path: Path, *, steps: int) -> list[Result]:
    """Of a file that need not exist. `SystemExit` if its runs had another number of steps."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [Result(**json.loads(line)) for line in lines]
    if others := {r.steps for r in found} - {steps}:
        raise SystemExit(
            f"{path} holds runs of {sorted(others)} steps, and {steps} were asked for: pass "
            "--steps, or choose another file."
        )
    return found


def report(results: Sequence[Result]) -> str:
    runs = _grouped(results)
    return "\n".join([*_table(runs), "", *_check(runs)])


def write_docs(results: Sequence[Result], docs: Path) -> None:
    """Replaces what stands between the two comments in benchmarks.md, and draws the picture."""
    page = docs / "benchmarks.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(
            f"{page} has no pair of {BEGIN} and {END} for the table to go between; put them back."
        )
    shown = f"![Reward over wall time]({PICTURE})\n\n{report(results)}"
    page.write_text(f"{before}{BEGIN}\n{shown}\n{END}{after}")
    draw(results, docs / PICTURE)


def _grouped(results: Sequence[Result]) -> Runs:
    """In the order of the modes, those with the correction first."""
    kinds = [(mode, correction) for correction in ("default", "off") for mode in (*COLORS, *AGED)]
    grouped = {kind: [r for r in results if (r.mode, r.correction) == kind] for kind in kinds}
    return {kind: found for kind, found in grouped.items() if found}


# --- Table and check ------------------------------------------------------------------------------


def _table(runs: Runs) -> list[str]:
    head = (
        "| mode | correction | held out before | after | wall s | CPU s | age: mean | max | "
        "ESS "
        "| divergence | peak MB |"
    )
    return [
        head,
        "|---" * (head.count("|") - 1) + "|",
        *(_row(*kind, found) for kind, found in runs.items()),
    ]


def _row(mode: str, correction: str, found: Sequence[Result]) -> str:
    def mean(value: Callable[[Result], float]) -> float:
        return statistics.mean(value(r) for r in found)

    wall = f"{mean(lambda r: r.wall_seconds):.1f} ± {_spread([r.wall_seconds for r in found]):.1f}"
    return (
        f"| {mode} | {correction} | {mean(lambda r: r.before):.3f} ± "
        f"{_spread([r.before for r in found]):.3f} | **{mean(lambda r: r.after):.3f}** ± "
        f"{_spread([r.after for r in found]):.3f} | {'' if mode in AGED else wall} | "
        f"{mean(lambda r: r.cpu_seconds):.1f} | {mean(lambda r: r.mean_age):.2f} | "
        f"{max(r.max_age for r in found)} | {mean(lambda r: r.ess):.3f} | "
        f"{mean(lambda r: r.divergence):.1g} | {max(r.peak_memory_mb for r in found):,.0f} |"
    )


def _check(runs: Runs) -> list[str]:
    """The claim; and what chance alone does: synchronous runs with and without a correction, which
    has nothing to correct there.
    """
    synchronous = ("synchronous", "default")
    pairs = [
        (("async-4", "default"), synchronous),
        (("aged-8", "default"), synchronous),
        (("aged-8", "off"), synchronous),
    ]
    pairs.append((("synchronous", "off"), synchronous))
    return [
        _difference(one, runs[one], other, runs[other])
        for one, other in pairs
        if one in runs and other in runs
    ]


def _difference(
    one: tuple[str, str], its: Sequence[Result], other: tuple[str, str], others: Sequence[Result]
) -> str:
    gap = statistics.mean(r.after for r in its) - statistics.mean(r.after for r in others)
    noise = math.hypot(_noise(its), _noise(others))
    verdict = "within noise" if abs(gap) <= WITHIN * noise else "NOT within noise"
    said = (
        f"- {'/'.join(one)} less {'/'.join(other)}: {gap:+.3f} held out, {gap / noise:+.1f} "
        f"times the noise of {noise:.3f}: **{verdict}**"
    )
    if one[0] in AGED:
        return said + "."
    wall = statistics.mean(r.wall_seconds for r in its) / statistics.mean(
        r.wall_seconds for r in others
    )
    return f"{said}, in **{wall:.2f}** of the wall time."


def _noise(found: Sequence[Result]) -> float:
    """Standard error of the mean over seeds; never below that of the held-out tasks alone, which
    few seeds may miss by luck.
    """
    score = statistics.mean(r.after for r in found)
    tasks = sum(r.num_heldout for r in found)
    return max(
        _spread([r.after for r in found]), math.sqrt(max(score * (1 - score), 1 / tasks) / tasks)
    )


def _spread(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 for one value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


# --- Picture --------------------------------------------------------------------------------------


def draw(results: Sequence[Result], picture: Path) -> None:
    """Reward over wall time: mean of the seeds, and the band from the lowest to the highest, to
    where the first of them ended.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "learning", "svg.fonttype": "none", "font.family": "sans-serif"}
    )
    from matplotlib import pyplot

    figure, both = pyplot.subplots(
        1, 2, figsize=(10, 4), sharex=True, sharey=True, layout="constrained"
    )
    for axes, (correction, title) in zip(
        both, {"default": "with the default correction", "off": "without"}.items(), strict=True
    ):
        for (mode, its), found in _grouped(results).items():
            if its == correction and mode in COLORS:
                _draw_mode(axes, mode, found)
        _style(axes, title)
    both[0].set_ylabel("reward, spelling backward")
    both[0].legend(frameon=False, loc="lower right")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)


def _draw_mode(axes: Any, mode: str, found: Sequence[Result]) -> None:
    curves = [np.array(r.curve) for r in found]
    end = min(curve[-1, 0] for curve in curves)
    times = np.linspace(max(curve[0, 0] for curve in curves), end, 120)
    rewards = np.stack([np.interp(times, curve[:, 0], _smooth(curve[:, 1])) for curve in curves])
    axes.plot(times, rewards.mean(0), color=COLORS[mode], linewidth=1.8, label=mode)
    axes.fill_between(
        times, rewards.min(0), rewards.max(0), color=COLORS[mode], alpha=0.15, linewidth=0
    )


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over `WINDOW` steps around each, fewer at the ends."""
    weights = np.ones(min(WINDOW, len(values)))
    return np.convolve(values, weights, "same") / np.convolve(np.ones(len(values)), weights, "same")


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_xlabel("seconds of training")
    axes.grid(axis="y", color="#e3e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
