"""What the page of a run draws, as options of charts made of journals: one run in detail, or
several over each other.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from midflight.archive.runs import ArchivedRun, differences
from midflight.observe.history import PastLines
from midflight.observe.lines import StepLine
from midflight.observe.named import named
from midflight.observe.plot import MOVING_STEPS, moving_average
from midflight.observe.readable import number
from midflight.view.charting import COLORS, DASHES, GREY, axes

Points: TypeAlias = "list[tuple[float, float]]"

MAX_POINTS = 400
"""Of a line: more than there are columns of a chart; of longer runs each point is a mean."""
RECENT_STEPS = 20
"""That histograms are of."""
SEEDS_ASIDE = ("run.seed", "run.name")
"""In what runs of one experiment may differ."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: `note` says in words what it shows."""

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
        """Without points nothing is drawn."""
        if points:
            style = {
                "color": color,
                "width": 1 if faint else 2,
                "opacity": 0.3 if faint else 1,
                "type": dash,
            }
            shown = {
                "type": "line",
                "name": name,
                "data": thinned(points),
                "showSymbol": len(points) == 1,
                "lineStyle": style,
            }
            self.series.append({**shown, "itemStyle": {"color": color}, "silent": faint, **more})

    def smooth(self, name: str, points: Points, *, color: str, dash: str = "solid") -> None:
        """The points faintly, and their moving mean."""
        self.line(name, points, color=color, faint=True, tooltip={"show": False})
        means = moving_average([value for _, value in points], MOVING_STEPS)
        self.line(
            name, list(zip([at for at, _ in points], means, strict=True)), color=color, dash=dash
        )

    def marks(self, name: str, points: Points, *, color: str) -> None:
        if points:
            style = {"color": color, "borderColor": "#fff", "borderWidth": 1}
            self.series.append(
                {
                    "type": "scatter",
                    "name": name,
                    "data": points,
                    "symbol": "diamond",
                    "symbolSize": 11,
                    "itemStyle": style,
                }
            )

    def band(self, name: str, runs: Sequence[Points], *, color: str) -> None:
        """The mean over runs at each step that all of them have, between their least and their
        most.
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
        self.series.append(
            {
                **bare,
                "name": f"{name}, most",
                "data": spans,
                "areaStyle": {"color": color, "opacity": 0.2},
            }
        )
        self.line(name, [(at, sum(v) / len(v)) for at, v in whole], color=color)

    def panel(self, title: str, *, note: str = "", y: str = "", **more: Any) -> Panel | None:
        if not self.series:
            return None
        names = list(
            dict.fromkeys(
                s["name"] for s in self.series if not s["name"].endswith((", least", ", most"))
            )
        )
        options: dict[str, Any] = axes(x="step", y=y, **more) | {"series": self.series}
        options["legend"] = {**options["legend"], "data": names, "show": len(names) > 1}
        return Panel(title, options, note)


def thinned(points: Points) -> Points:
    """At most `MAX_POINTS`: means of as many neighbours each as it takes."""
    size = -(-len(points) // MAX_POINTS) or 1
    if size == 1:
        return points
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


# --- One run --------------------------------------------------------------------------------------


def of_run(past: PastLines) -> list[Panel]:
    """In the order of the page; what was never measured has no chart."""
    steps = past.steps
    found = [
        _reward(past),
        _several(
            "Reward by component",
            {
                n: _of(steps, lambda s, n=n: (s.components or {}).get(n))
                for n in _keys(steps, "components")
            },
        ),
        _staleness(steps),
        _ages(steps),
        _lengths(steps),
        _length_histograms(steps),
        _several(
            "Tokens per second",
            _named(
                steps,
                {"generated": "rollout/tokens_per_second", "trained": "train/tokens_per_second"},
            ),
        ),
        _idle(past),
        _several(
            "Effective sample size",
            _named(steps, {"share of the tokens": "train/rho/ess"}),
            note=(
                "1 means that no token weighs more than another; below 0.5 the weights of old "
                "tokens hold few."
            ),
        ),
        _several(
            "Mismatch",
            _named(steps, {"mean": "train/mismatch/mean"}),
            note=(
                "Mean |Δ log-probability| of a token between engine and trainer under the same "
                "weights."
            ),
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


def _reward(past: PastLines) -> Panel | None:
    lines = Chart()
    sources = dict.fromkeys(
        [*_keys(past.steps, "reward_by_source"), *(score.source for score in past.evaluations)]
    )
    for at, source in enumerate(sources):
        color = COLORS[at % len(COLORS)]
        lines.smooth(
            source,
            _of(past.steps, lambda s, n=source: (s.reward_by_source or {}).get(n)),
            color=color,
            dash=DASHES[at % 3],
        )
        scored = [
            (score.step, score.mean_reward) for score in past.evaluations if score.source == source
        ]
        lines.marks(
            f"{source}, held out",
            [(at, reward) for at, reward in scored if reward is not None],
            color=color,
        )
    return lines.panel(
        "Reward by source",
        note=f"Mean of {MOVING_STEPS} steps, each step faintly; diamonds are held-out tasks.",
    )


def _staleness(steps: Sequence[StepLine]) -> Panel | None:
    return _several(
        "Staleness",
        _named(steps, {"mean": "train/staleness_mean", "oldest token": "train/staleness_max"}),
        note="Age of the trained tokens, in versions.",
    )


def _ages(steps: Sequence[StepLine]) -> Panel | None:
    ages: Counter[int] = Counter()
    for step in steps[-RECENT_STEPS:]:
        ages.update(step.staleness or {})
    return bars(
        "Tokens by age",
        sorted(ages),
        {"trained tokens": [ages[age] for age in sorted(ages)]},
        x="versions",
        note=f"Of the last {RECENT_STEPS} steps.",
    )


def _lengths(steps: Sequence[StepLine]) -> Panel | None:
    names = {
        "generated": "rollout/length_mean",
        "longest": "rollout/length_max",
        "trained": "train/length_mean",
    }
    cut = [
        step.truncated_share for step in steps[-RECENT_STEPS:] if step.truncated_share is not None
    ]
    note = (
        f"{sum(cut) / len(cut):.1%} of the last rollouts were cut short by their limit."
        if cut
        else ""
    )
    return _several("Tokens of a rollout", _named(steps, names), note=note)


LENGTHS = {
    "generated": "generated_length",
    "trained": "trained_length",
    "cut short": "truncated_length",
}
LENGTH_BARS = 16


def _length_histograms(steps: Sequence[StepLine]) -> Panel | None:
    """Rollouts by tokens generated and trained, those cut short by themselves. Of a bin of the
    journal its middle is counted.
    """
    found = {title: Counter[int]() for title in LENGTHS}
    for title, name in LENGTHS.items():
        for histogram in ((step.histograms or {}).get(name) for step in steps[-RECENT_STEPS:]):
            if histogram is not None:
                for (low, high), count in zip(
                    pairwise(histogram.edges), histogram.counts, strict=True
                ):
                    found[title][round((low + high) / 2)] += count
    longest = max((length for counts in found.values() for length in counts), default=None)
    if longest is None:
        return None
    width = -(-(longest + 1) // LENGTH_BARS)
    lows = range(0, longest + 1, width)
    values = {
        title: [sum(n for at, n in counts.items() if low <= at < low + width) for low in lows]
        for title, counts in found.items()
    }
    note = ", ".join(f"{sum(counts.values())} {title}" for title, counts in found.items())
    names = [f"{low}" if width == 1 else f"{low}-{low + width - 1}" for low in lows]
    return bars(
        "Rollouts by length",
        names,
        values,
        x="tokens",
        note=f"Of the last {RECENT_STEPS} steps: {note}.",
    )


def idle_shares(past: PastLines) -> dict[str, Points]:
    """By `who for whom`: the share of the time since the step before in which one was idle because
    of the other.
    """
    found: defaultdict[str, Points] = defaultdict(list)
    names = {name for step in past.steps for name in step.waits or {}}
    for before, step in pairwise(past.steps):
        if (seconds := step.seconds - before.seconds) > 0:
            for name in names:
                found[name].append(
                    (step.step, min(1.0, (step.waits or {}).get(name, 0.0) / seconds))
                )
    return dict(found)


def _idle(past: PastLines) -> Panel | None:
    shares = idle_shares(past)
    recent = {
        name: sum(v for _, v in points[-RECENT_STEPS:]) / len(points[-RECENT_STEPS:])
        for name, points in shares.items()
    }
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
    """Runs that differ in nothing but their seeds are one line with a band."""
    families = seeds(runs)
    found = [_overlaid(title, name, families) for title, name in OVERLAID.items()]
    return [panel for panel in found if panel is not None]


def seeds(runs: Sequence[ArchivedRun]) -> dict[str, list[ArchivedRun]]:
    """Runs by the label of the first of those that are alike but for their seeds."""
    families: list[list[ArchivedRun]] = []
    for run in runs:
        for family in families:
            if set(differences([family[0].config(), run.config()])) <= set(SEEDS_ASIDE):
                family.append(run)
                break
        else:
            families.append([run])
    return {
        f"{of[0].slug} and {len(of) - 1} more seeds" if len(of) > 1 else of[0].slug: of
        for of in families
    }


def _overlaid(title: str, name: str, families: Mapping[str, Sequence[ArchivedRun]]) -> Panel | None:
    lines = Chart()
    said = list[str]()
    for at, (label, runs) in enumerate(families.items()):
        each: list[Points] = [_points(run.readings.past.steps, name) for run in runs]
        if len(runs) > 1 and all(each):
            lines.band(label, each, color=COLORS[at % len(COLORS)])
        else:
            for points in each:
                lines.smooth(label, points, color=COLORS[at % len(COLORS)], dash=DASHES[at % 3])
        last = [points[-1][1] for points in each if points]
        said += [f"{label} {number(sum(last) / len(last))}"] if last else []
    return lines.panel(title, note="Last: " + ", ".join(said))


# --- Pieces ---------------------------------------------------------------------------------------


def _several(title: str, of: Mapping[str, Points], *, note: str = "") -> Panel | None:
    lines = Chart()
    for at, (name, points) in enumerate(of.items()):
        lines.line(name, points, color=COLORS[at % len(COLORS)], dash=DASHES[at % 3])
    last = ", ".join(f"{name} {number(points[-1][1])}" for name, points in of.items() if points)
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
    options["xAxis"] = {
        **options["xAxis"],
        "data": [str(name) for name in names],
        "axisLabel": {"color": GREY},
    }
    return Panel(title, options, note)


def _named(steps: Sequence[StepLine], names: Mapping[str, str]) -> dict[str, Points]:
    return {label: _points(steps, name) for label, name in names.items()}


def _points(steps: Sequence[StepLine], name: str) -> Points:
    return [(step.step, found[name]) for step in steps if name in (found := named(step))]


def _of(steps: Iterable[StepLine], value: Callable[[StepLine], float | None]) -> Points:
    return [(step.step, found) for step in steps if (found := value(step)) is not None]


def _keys(steps: Iterable[StepLine], name: str) -> list[str]:
    return list(dict.fromkeys(key for step in steps for key in getattr(step, name) or {}))
