"""The reward and staleness of a run as a picture, drawn from its journal."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midflight.errors import ConfigError
from midflight.observe.activity import ProcessActivity
from midflight.observe.atomic_write import write_whole
from midflight.observe.history import JournalHistory, read_journal
from midflight.observe.lines import EvaluationLine, StepLine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOVING_STEPS = 15
"""Window of the moving average, in steps."""
COLORS = ("#2563a8", "#c2571a", "#2e8b57", "#8b3a8b", "#7a6a12", "#b03052")
GREY = "#9aa3ad"


def draw_plot(journal: Path, picture: Path, *, title: str) -> None:
    """Writes a PNG: reward per step with its moving average and held-out marks per source, and the
    age of trained tokens below.

    Raises `ConfigError` with the remedy if matplotlib is not installed; callers show it and go on.
    Nothing is drawn without steps.
    """
    draw_history(read_journal(journal), picture, title=title)


def draw_history(history: JournalHistory, picture: Path, *, title: str) -> None:
    """Does what `draw_plot` does, from lines that were read before."""
    with _figure(picture, title=title) as (top, bottom):
        _draw_reward(top, history)
        _draw_staleness(bottom, history.steps)


def draw_comparison(runs: Mapping[str, JournalHistory], picture: Path, *, title: str) -> None:
    """Compares several runs, given by their labels: the reward over all sources, held-out marks of
    each run's first source, and the mean age of trained tokens. It raises the errors of `draw_plot`.
    """
    with _figure(picture, title=title) as (top, bottom):
        for color, (label, history) in zip(_cycle(len(runs)), runs.items(), strict=True):
            scored = [line for line in history.steps if line.reward is not None]
            rewards = [line.reward for line in scored if line.reward is not None]
            top.plot(
                [line.step for line in scored],
                moving_average(rewards, MOVING_STEPS),
                color=color,
                linewidth=2,
                label=label,
            )
            _mark_heldout(top, _of_first_source(history.evaluations), color)
            aged = [line for line in history.steps if line.staleness_mean is not None]
            ages = [line.staleness_mean for line in aged if line.staleness_mean is not None]
            bottom.plot([line.step for line in aged], ages, color=color, linewidth=1.4)
        _style(top, "reward")
        top.legend(
            frameon=False, loc="best", title="moving mean; ◆ held out", title_fontsize="small"
        )
        _style(bottom, "staleness (versions)")
        bottom.set_xlabel("step")


def _of_first_source(evaluations: Sequence[EvaluationLine]) -> list[EvaluationLine]:
    if not evaluations:
        return []
    first = evaluations[0].source
    return [line for line in evaluations if line.source == first]


def draw_work(runs: Mapping[str, JournalHistory], picture: Path, *, title: str) -> None:
    """Draws the tokens that each run generated and trained per second, and below them the length of
    its rollouts. It raises the errors of `draw_plot`.
    """
    with _figure(picture, title=title) as (top, bottom):
        for color, (label, history) in zip(_cycle(len(runs)), runs.items(), strict=True):
            x = [line.step for line in history.steps]
            before = "" if len(runs) == 1 else f"{label}, "
            top.plot(
                x,
                [line.generation_rate for line in history.steps],
                color=color,
                linewidth=1.8,
                label=f"{before}generated",
            )
            top.plot(
                x,
                [line.training_rate for line in history.steps],
                color=color,
                linewidth=1.4,
                linestyle="--",
                label=f"{before}trained",
            )
            long = [line for line in history.steps if line.generated_length is not None]
            lengths = [line.generated_length for line in long if line.generated_length is not None]
            bottom.plot([line.step for line in long], lengths, color=color, linewidth=1.4)
        _style(top, "tokens / s")
        top.set_ylim(bottom=0)
        top.legend(frameon=False, loc="best")
        _style(bottom, "tokens of a rollout")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel("step")


@contextmanager
def _figure(picture: Path, *, title: str) -> Generator[tuple[Axes, Axes]]:
    """Gives two pairs of axes, the upper for rewards. At the end it writes the picture, whole."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError(
            f"no plot was drawn in {picture}: matplotlib is not installed; pip install "
            "'midflight[plot]'"
        ) from None
    figure, (top, bottom) = pyplot.subplots(
        2,
        1,
        figsize=(9, 6),
        sharex=True,
        height_ratios=(2.4, 1),
        layout="constrained",
        gridspec_kw={"hspace": 0.06},
    )
    try:
        yield top, bottom
        top.set_title(title, loc="left", fontweight="bold")
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=140, format="png")
        write_whole(picture, drawn.getvalue())
    finally:
        pyplot.close(figure)


def draw_in_process(
    folder: Path, *, title: str, seconds: float, patient: bool = False
) -> str | None:
    """Draws a run's `plot.png` in a process of its own, because matplotlib may take long to be
    imported. Waits for it, for `seconds` at most. If it is `patient`, only the time in which the
    process does nothing counts.

    Returns the reason why there is no plot, with the remedy, or None if there is one.
    """
    command = [sys.executable, "-m", "midflight.observe.plot", str(folder), title]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as drawing:
        motion = ProcessActivity(drawing.pid)
        try:
            while drawing.poll() is None:
                waited = motion.look() if patient else motion.seconds
                if waited >= seconds:
                    break
                with suppress(subprocess.TimeoutExpired):
                    drawing.communicate(timeout=min(1.0, seconds))
        except KeyboardInterrupt:
            return "no plot was drawn: interrupted"
        finally:
            drawing.kill()  # a process that has ended by itself keeps its status
        _, errors = drawing.communicate()
    if drawing.returncode < 0:
        return (
            f"no plot was drawn within {seconds:g} s; draw it with: python -m "
            f"midflight.observe.plot {folder}"
        )
    if drawing.returncode != 0:
        return f"no plot was drawn: {errors.strip().splitlines()[-1:]}"
    return None


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` before it."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        means.append(sum(recent) / len(recent))
    return means


def _draw_reward(axes: Axes, history: JournalHistory) -> None:
    sources = _sources(history)
    for color, source in zip(_cycle(len(sources)), sources, strict=True):
        steps: list[int] = []
        rewards: list[float] = []
        for line in history.steps:
            if line.reward_by_source and source in line.reward_by_source:
                steps.append(line.step)
                rewards.append(line.reward_by_source[source])
        axes.plot(steps, rewards, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(
            steps, moving_average(rewards, MOVING_STEPS), color=color, linewidth=2, label=source
        )
        _mark_heldout(axes, [line for line in history.evaluations if line.source == source], color)
    names = _components(history.steps)
    for name, style in zip(names, cycle((":", "--", "-.")), strict=False):
        steps = []
        values: list[float] = []
        for line in history.steps:
            if line.components and name in line.components:
                steps.append(line.step)
                values.append(line.components[name])
        means = moving_average(values, MOVING_STEPS)
        axes.plot(steps, means, color=GREY, linestyle=style, linewidth=1.4, label=name)
    _style(axes, "reward")
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), max(1.02, high))
    if sources or names:
        axes.legend(
            frameon=False, loc="best", title="moving mean; ◆ held out", title_fontsize="small"
        )


def _sources(history: JournalHistory) -> list[str]:
    """The sources of a run, in the order in which they are first seen."""
    found: dict[str, None] = {}
    for line in history.steps:
        found.update(dict.fromkeys(line.reward_by_source or {}))
    for line in history.evaluations:
        found[line.source] = None
    return list(found)


def _components(steps: Sequence[StepLine]) -> list[str]:
    found = set[str]()
    for line in steps:
        found.update(line.components or {})
    return sorted(found)


def _mark_heldout(axes: Axes, evaluations: Sequence[EvaluationLine], color: str) -> None:
    scored = [(line.step, line.mean_reward) for line in evaluations if line.mean_reward is not None]
    axes.scatter(
        [step for step, _ in scored],
        [reward for _, reward in scored],
        color=color,
        marker="D",
        s=46,
        zorder=3,
        edgecolors="white",
        clip_on=False,
    )
    for step, reward in scored[:1] + scored[1:][-1:]:
        axes.annotate(
            f"{reward:.2f}",
            (step, reward),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
            color=color,
            fontsize=9,
        )


def _draw_staleness(axes: Axes, steps: Sequence[StepLine]) -> None:
    aged = [
        line for line in steps if line.staleness_mean is not None and line.staleness_max is not None
    ]
    x = [line.step for line in aged]
    oldest = [line.staleness_max or 0 for line in aged]
    axes.fill_between(
        x,
        oldest,
        color=GREY,
        alpha=0.25,
        step="mid",
        linewidth=0,
        label="oldest token",
    )
    axes.plot(
        x,
        [line.staleness_mean or 0.0 for line in aged],
        color=COLORS[0],
        linewidth=1.6,
        label="mean",
    )
    _style(axes, "staleness (versions)")
    axes.set_xlabel("step")
    axes.set_ylim(0, max(1, max(oldest, default=1)) * 1.35)
    if aged:
        axes.legend(frameon=False, loc="upper right", ncols=2, fontsize="small")


def _style(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(axis="y", color="#e3e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    spines: Any = axes.spines
    spines[["top", "right"]].set_visible(False)


def _cycle(count: int) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(count)]


if __name__ == "__main__":
    try:
        run = Path(sys.argv[1])
        draw_plot(run / "metrics.jsonl", run / "plot.png", title=" ".join(sys.argv[2:]) or run.name)
    except (ConfigError, OSError) as error:
        sys.exit(str(error))
