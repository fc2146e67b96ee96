"""The charts of a run's page, made from journals: one run in detail, or several over each other."""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, TypeAlias

from midflight.archive.runs import ArchivedRun, differences
from midflight.observe.history import JournalHistory
from midflight.observe.lines import StepLine
from midflight.observe.metrics import points_of
from midflight.observe.plot import MOVING_STEPS, moving_average
from midflight.observe.readable import number
from midflight.observe.run_state import RECENT_BATCHES
from midflight.view.charting import COLORS, DASHES, GREY, axes

Points: TypeAlias = "list[tuple[float, float]]"

MAX_POINTS = 400
"""Points of a line: more than a chart has columns. For longer runs each point is a mean."""
BESIDE = (", least", ", most", ", held out")
"""The ends of the names of series that belong to a line, and have its colour."""
SEEDS_ASIDE = ("run.seed", "run.name")
"""The options in which runs of one experiment may differ."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `note` describes it in words."""

    title: str
    options: Mapping[str, Any]
    note: str = ""


@dataclass(slots=True)
class Chart:
    """Series of a chart while it is put together."""

    series: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def line(
        self,
        name: str,
        points: Points,
        *,
        color: str,
        dash: str = "solid",
        faint: bool = False,
        **more: Any,
    ) -> None:
        """Draws a line. Without points it draws nothing."""
        if not points:
            return
        style = {
            "color": color,
            "width": 1 if faint else 2,
            "opacity": 0.3 if faint else 1,
            "type": dash,
        }
        series: dict[str, Any] = {
            "type": "line",
            "name": name,
            "data": thinned(points),
            "showSymbol": len(points) == 1,
            "lineStyle": style,
            "itemStyle": {"color": color},
            "silent": faint,
        }
        self.series.append(series | more)

    def smooth(self, name: str, points: Points, *, color: str, dash: str = "solid") -> None:
        """Draws the points faintly, and their moving mean."""
        self.line(name, points, color=color, faint=True, tooltip={"show": False})
        means = moving_average([value for _, value in points], MOVING_STEPS)
        smoothed = [(at, mean) for (at, _), mean in zip(points, means, strict=True)]
        self.line(name, smoothed, color=color, dash=dash)

    def marks(self, name: str, points: Points, *, color: str) -> None:
        if not points:
            return
        series = {
            "type": "scatter",
            "name": name,
            "data": points,
            "symbol": "diamond",
            "symbolSize": 11,
            "itemStyle": {"color": color, "borderColor": "#fff", "borderWidth": 1},
        }
        self.series.append(series)

    def band(self, name: str, runs: Sequence[Points], *, color: str) -> None:
        """Draws the mean over runs at each step that all of them have, in a band from their least
        to their most.
        """
        by_step: defaultdict[float, list[float]] = defaultdict(list)
        for points in runs:
            for at, value in points:
                by_step[at].append(value)
        whole = [(at, values) for at, values in sorted(by_step.items()) if len(values) == len(runs)]
        bare = {
            "type": "line",
            "showSymbol": False,
            "lineStyle": {"opacity": 0},
            "stack": name,
            "silent": True,
            "tooltip": {"show": False},
        }
        lows = thinned([(at, min(v)) for at, v in whole])
        highs = thinned([(at, max(v)) for at, v in whole])
        self.series.append({**bare, "name": f"{name}, least", "data": lows})
        spans = [(at, high - low) for (at, low), (_, high) in zip(lows, highs, strict=True)]
        area = {"color": color, "opacity": 0.2}
        self.series.append({**bare, "name": f"{name}, most", "data": spans, "areaStyle": area})
        self.line(name, [(at, sum(v) / len(v)) for at, v in whole], color=color)

    def panel(self, title: str, *, note: str = "", **more: Any) -> Panel | None:
        if not self.series:
            return None
        drawn = dict.fromkeys(series["name"] for series in self.series)
        names = [name for name in drawn if not _belongs_to_another(name, drawn)]
        options: dict[str, Any] = axes(x="step", **more) | {"series": self.series}
        options["legend"] = {**options["legend"], "data": names, "show": len(names) > 1}
        if len(names) == 1:
            options["grid"] = {**options["grid"], "top": 10}
        return Panel(title, options, note)


def _belongs_to_another(name: str, drawn: Container[str]) -> bool:
    """True if a legend does not need this series, because it names the line it belongs to."""
    return any(name.endswith(end) and name.removesuffix(end) in drawn for end in BESIDE)


def thinned(points: Points) -> Points:
    """At most `MAX_POINTS` points. Each is the mean of as many neighbours as that takes."""
    size = -(-len(points) // MAX_POINTS) or 1
    if size == 1:
        return points
    means: Points = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        mean = sum(value for _, value in part) / len(part)
        means.append((part[-1][0], mean))
    return means


SECTIONS = {
    "Reward": "Learning",
    "Reward by source": "Learning",
    "Entropy": "Learning",
    "Gradient norm": "Learning",
    "Staleness": "Age of what is trained",
    "Staleness, mean": "Age of what is trained",
    "Tokens by age": "Age of what is trained",
    "Effective sample size": "Age of what is trained",
    "KL from what sampled": "Age of what is trained",
    "Reward by component": "Rollouts",
    "Tokens of a rollout": "Rollouts",
    "Rollouts by length": "Rollouts",
    "A rollout's time": "Rollouts",
}
"""The section of each chart."""
OTHERS = "Engines and trainer"
"""The section of the other charts."""


def sectioned(panels: Iterable[Panel]) -> dict[str, list[Panel]]:
    """The charts by the title of their section, in the order of the page."""
    order = [*dict.fromkeys(SECTIONS.values()), OTHERS]
    found: dict[str, list[Panel]] = {title: [] for title in order}
    for panel in panels:
        found[SECTIONS.get(panel.title, OTHERS)].append(panel)
    return {title: those for title, those in found.items() if those}


# --- One run --------------------------------------------------------------------------------------


def of_run(past: JournalHistory) -> list[Panel]:
    """Returns the charts in the order of the page. Numbers that were never measured have no
    chart.
    """
    steps = past.steps
    found = [
        _reward(past),
        _several("Reward by component", _by_key(steps, lambda step: step.components)),
        _staleness(steps),
        _ages(steps),
        _lengths(steps),
        _length_histograms(steps),
        _speeds(steps),
        _idle(past),
        _several(
            "Effective sample size",
            _named(steps, {"share of the tokens": "train/rho/ess"}),
            note="1 means that no token weighs more than another; below 0.5 the weights of old "
            "tokens hold few.",
        ),
        _several(
            "Mismatch",
            _named(steps, {"mean": "train/mismatch/mean"}),
            note="Mean |Δ log-probability| of a token between engine and trainer under the same "
            "weights.",
        ),
        _several(
            "Entropy",
            _named(steps, {"nats per token": "train/entropy/estimate"}),
            note="It falls as the policy makes up its mind; near 0 nothing new is tried.",
        ),
        _several(
            "KL from what sampled",
            _named(steps, {"k3": "train/rho/k3"}),
            note="Between the policy that sampled and the one that is trained.",
        ),
        _several("Gradient norm", _named(steps, {"before clipping": "train/grad_norm"})),
    ]
    return [panel for panel in found if panel is not None]


def _reward(past: JournalHistory) -> Panel | None:
    lines = Chart()
    rewards = _by_key(past.steps, lambda step: step.reward_by_source)
    scores: defaultdict[str, Points] = defaultdict(list)
    for score in past.evaluations:
        of_source = scores[score.source]
        if score.mean_reward is not None:
            of_source.append((score.step, score.mean_reward))
    for at, source in enumerate(dict.fromkeys(chain(rewards, scores))):
        color = COLORS[at % len(COLORS)]
        lines.smooth(source, rewards.get(source, []), color=color, dash=DASHES[at % 3])
        lines.marks(f"{source}, held out", scores.get(source, []), color=color)
    return lines.panel(
        "Reward by source",
        note=f"Lines are means of {MOVING_STEPS} steps, here and below; each step is faint. "
        "Diamonds are held-out tasks.",
    )


def _speeds(steps: Sequence[StepLine]) -> Panel | None:
    names = {"generated": "rollout/tokens_per_second", "trained": "train/tokens_per_second"}
    return _several("Tokens per second", _named(steps, names))


def _staleness(steps: Sequence[StepLine]) -> Panel | None:
    return _several(
        "Staleness",
        _named(steps, {"mean": "train/staleness_mean", "oldest token": "train/staleness_max"}),
        note="Age of the trained tokens, in versions.",
    )


def _ages(steps: Sequence[StepLine]) -> Panel | None:
    ages: Counter[int] = Counter()
    for step in steps[-RECENT_BATCHES:]:
        ages.update(step.staleness or {})
    return bars(
        "Tokens by age",
        sorted(ages),
        {"trained tokens": [ages[age] for age in sorted(ages)]},
        x="versions",
        note=f"Of the last {RECENT_BATCHES} steps.",
    )


def _lengths(steps: Sequence[StepLine]) -> Panel | None:
    names = {
        "generated": "rollout/length_mean",
        "longest": "rollout/length_max",
        "trained": "train/length_mean",
    }
    cut = [
        step.truncated_share for step in steps[-RECENT_BATCHES:] if step.truncated_share is not None
    ]
    note = ""
    if cut:
        note = f"{sum(cut) / len(cut):.1%} of the last rollouts were cut short by their limit."
    return _several("Tokens of a rollout", _named(steps, names), note=note)


LENGTHS = {
    "generated": "generated_length",
    "trained": "trained_length",
    "cut short": "truncated_length",
}
LENGTH_BARS = 16


def _length_histograms(steps: Sequence[StepLine]) -> Panel | None:
    """Rollouts by tokens generated and trained, and those that were cut short on their own. A bin
    of the journal counts with its middle.
    """
    found = {title: _lengths_of(steps, name) for title, name in LENGTHS.items()}
    lengths = set(chain.from_iterable(found.values()))
    if not lengths:
        return None
    longest = max(lengths)
    width = -(-(longest + 1) // LENGTH_BARS)
    lows = range(0, longest + 1, width)
    values = {title: _in_bars(counts, lows) for title, counts in found.items()}
    note = ", ".join(f"{sum(counts.values())} {title}" for title, counts in found.items())
    names = [str(low) for low in lows]
    if width > 1:
        names = [f"{low}-{low + width - 1}" for low in lows]
    return bars(
        "Rollouts by length",
        names,
        values,
        x="tokens",
        note=f"Of the last {RECENT_BATCHES} steps: {note}.",
    )


def _lengths_of(steps: Sequence[StepLine], name: str) -> Counter[int]:
    """Returns the number of rollouts of the last steps that had each length."""
    found = Counter[int]()
    for step in steps[-RECENT_BATCHES:]:
        histogram = (step.histograms or {}).get(name)
        if histogram is None:
            continue
        for (low, high), count in zip(pairwise(histogram.edges), histogram.counts, strict=True):
            found[round((low + high) / 2)] += count
    return found


def _in_bars(counts: Mapping[int, int], lows: range) -> list[int]:
    """The counts of lengths in bars that begin at `lows`."""
    numbers = [0] * len(lows)
    for length, count in counts.items():
        numbers[length // lows.step] += count
    return numbers


def idle_shares(past: JournalHistory) -> dict[str, Points]:
    """Returns how long each side waited for another, as shares of the time between two steps. Its
    keys are such as `trainer for generation`.
    """
    found: defaultdict[str, Points] = defaultdict(list)
    names = _keys(step.waits for step in past.steps)
    for before, step in pairwise(past.steps):
        seconds = step.seconds - before.seconds
        if seconds <= 0:
            continue
        waits = step.waits or {}
        for name in names:
            share = min(1.0, waits.get(name, 0.0) / seconds)
            found[name].append((step.step, share))
    return dict(found)


def _idle(past: JournalHistory) -> Panel | None:
    shares = idle_shares(past)
    recent: dict[str, float] = {}
    for name, points in shares.items():
        last = points[-RECENT_BATCHES:]
        recent[name] = sum(share for _, share in last) / len(last)
    most = sorted(recent.items(), key=lambda item: -item[1])
    note = "; ".join(f"{name} {share:.0%} of the time" for name, share in most[:3])
    return _several("Idle, and for whom", shares, note=f"Lately: {note}." if note else "")


# --- Several runs ---------------------------------------------------------------------------------

OVERLAID = {
    "Reward": "rollout/reward_mean",
    "Staleness, mean": "train/staleness_mean",
    "Tokens of a rollout": "rollout/length_mean",
    "Tokens per second, generated": "rollout/tokens_per_second",
    "Tokens per second, trained": "train/tokens_per_second",
    "Effective sample size": "train/rho/ess",
    "Mismatch": "train/mismatch/mean",
    "Entropy": "train/entropy/estimate",
    "KL from what sampled": "train/rho/k3",
    "Gradient norm": "train/grad_norm",
}


def of_runs(runs: Sequence[ArchivedRun]) -> list[Panel]:
    """The charts of several runs over each other. Runs that differ only in their seeds are one line
    with a band.
    """
    families = seeds(runs)
    found = [_overlaid(title, name, families) for title, name in OVERLAID.items()]
    return [panel for panel in found if panel is not None]


def seeds(runs: Sequence[ArchivedRun]) -> dict[str, list[ArchivedRun]]:
    """Families of runs that are alike except for their seeds, each by the label of its first
    run.
    """
    families: list[list[ArchivedRun]] = []
    for run in runs:
        for family in families:
            if set(differences([family[0].config(), run.config()])) <= set(SEEDS_ASIDE):
                family.append(run)
                break
        else:
            families.append([run])
    return {_label(family): family for family in families}


def _label(family: Sequence[ArchivedRun]) -> str:
    slug = family[0].slug
    return slug if len(family) == 1 else f"{slug} and {len(family) - 1} more seeds"


def _overlaid(title: str, name: str, families: Mapping[str, Sequence[ArchivedRun]]) -> Panel | None:
    lines = Chart()
    said = list[str]()
    for at, (label, runs) in enumerate(families.items()):
        color = COLORS[at % len(COLORS)]
        each: list[Points] = [points_of(run.readings.past.steps, name) for run in runs]
        if len(runs) > 1 and all(each):
            lines.band(label, each, color=color)
        else:
            for points in each:
                lines.smooth(label, points, color=color, dash=DASHES[at % 3])
        last = [points[-1][1] for points in each if points]
        if last:
            said.append(f"{label} {readable(sum(last) / len(last))}")
    return lines.panel(title, note="Last: " + ", ".join(said))


# --- Pieces ---------------------------------------------------------------------------------------


MAX_LABEL = 12
"""Letters of a bar's name. Longer names are broken into lines."""


def readable(value: float) -> str:
    """A number of any size: with three decimals, unless it is large or very small."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if value and abs(value) < 0.001:
        return f"{value:.1e}"
    return number(value)


def _several(title: str, of: Mapping[str, Points], *, note: str = "") -> Panel | None:
    lines = Chart()
    for at, (name, points) in enumerate(of.items()):
        lines.smooth(name, points, color=COLORS[at % len(COLORS)], dash=DASHES[at % 3])
    last = ", ".join(f"{name} {readable(points[-1][1])}" for name, points in of.items() if points)
    return lines.panel(title, note=f"Last: {last}. {note}".strip() if last else note)


def bars(
    title: str,
    names: Sequence[object],
    values: Mapping[str, Sequence[float]],
    *,
    x: str,
    note: str = "",
) -> Panel | None:
    if not names or not values:
        return None
    drawn = [
        {"type": "bar", "name": name, "data": list(found), "itemStyle": {"color": COLORS[at]}}
        for at, (name, found) in enumerate(values.items())
    ]
    options: dict[str, Any] = axes(x=x, kind="category") | {"series": drawn}
    options["yAxis"] = {**options["yAxis"], "scale": False}  # bars begin at zero
    label: dict[str, Any] = {"color": GREY, "hideOverlap": True}
    if max(len(str(name)) for name in names) > MAX_LABEL:
        label = {"color": GREY, "interval": 0, "width": 84, "overflow": "break", "lineHeight": 14}
    options["xAxis"] = {
        **options["xAxis"],
        "data": [str(name) for name in names],
        "axisLabel": label,
    }
    if len(drawn) == 1:
        options["legend"] = {**options["legend"], "show": False}
        options["grid"] = {**options["grid"], "top": 10}
    return Panel(title, options, note)


def _named(steps: Sequence[StepLine], names: Mapping[str, str]) -> dict[str, Points]:
    return {label: points_of(steps, name) for label, name in names.items()}


def _by_key(
    steps: Sequence[StepLine], values_of: Callable[[StepLine], Mapping[str, float] | None]
) -> dict[str, Points]:
    """A line for each key of a step's values, in the order in which the keys are first seen."""
    found: defaultdict[str, Points] = defaultdict(list)
    for step in steps:
        for key, value in (values_of(step) or {}).items():
            found[key].append((step.step, value))
    return dict(found)


def _keys(of_steps: Iterable[Mapping[str, object] | None]) -> list[str]:
    found: dict[str, None] = {}
    for values in of_steps:
        found.update(dict.fromkeys(values or {}))
    return list(found)
