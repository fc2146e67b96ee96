"""The head of a run's page: what it has reached on held-out tasks, its reward, how far it is, and
which side bounds it. All of it is HTML that needs no program.
"""

from collections.abc import Sequence
from html import escape

from midflight.archive.runs import RunCondition, RunDescription
from midflight.observe.history import JournalHistory
from midflight.observe.plot import MOVING_STEPS, moving_average
from midflight.observe.readable import UNKNOWN, duration, number, percent
from midflight.observe.status import Bound, SourceStatus
from midflight.observe.summary import Summary
from midflight.view.panels import Points, thinned
from midflight.view.widgets import meter, tag, told

CONDITION_TAGS = {
    RunCondition.RUNNING: "live",
    RunCondition.FINISHED: "good",
    RunCondition.STOPPED: "warn",
    RunCondition.CRASHED: "bad",
}
BOUND_TAGS = {Bound.BALANCED: "good", Bound.UNKNOWN: ""}
IN_LEAD = ("state", "steps", "version", "reward, last step", "time", "who was busy", "advice")
"""The figures that have a place in the lead; `held-out ...` have one too."""
LEVEL = 0.0005
"""A difference of scores that no shown digit tells."""


def lead(of: RunDescription, past: JournalHistory) -> str:
    """The head of the page. Its figures are those of `RunDescription.rows`, in the same words."""
    texts = dict(of.rows())
    cards = _scores(of.summary, past, texts)
    cards.append(_reward(past, texts))
    cards.append(_progress(of, past, texts))
    cards.append(_verdict(of.summary, texts))
    if "advice" in texts:
        cards.append(
            f'<div class="panel advice"><span class="note">advice</span>'
            f"{told('advice', texts['advice'])}</div>"
        )
    return f'<div class="lead">{"".join(cards)}</div>'


def other_figures(of: RunDescription) -> list[tuple[str, str]]:
    """The figures that the lead does not have."""
    return [
        (label, text)
        for label, text in of.rows()
        if label not in IN_LEAD and not label.startswith("held-out ")
    ]


def condition_tag(of: RunDescription) -> str:
    return tag(of.condition.value, CONDITION_TAGS[of.condition])


def _card(label: str, *parts: str, wide: bool = False) -> str:
    kind = "panel wide" if wide else "panel"
    return f'<div class="{kind}"><span class="note">{escape(label)}</span>{"".join(parts)}</div>'


# --- Held-out tasks -------------------------------------------------------------------------------


def _scores(summary: Summary, past: JournalHistory, texts: dict[str, str]) -> list[str]:
    """A card for each source that was evaluated, the primary one first."""
    names = [name for name, source in summary.sources.items() if source.was_evaluated]
    names.sort(key=lambda name: name != summary.primary)
    if not names:
        nothing = '<span class="big">–</span>'
        return [_card("held-out tasks", nothing, '<span class="fine">not evaluated so far</span>')]
    return [_score(name, summary.sources[name], past, texts) for name in names]


def _score(name: str, source: SourceStatus, past: JournalHistory, texts: dict[str, str]) -> str:
    label = f"held-out {name}"
    points: Points = [
        (line.step, line.mean_reward)
        for line in past.evaluations
        if line.source == name and line.mean_reward is not None
    ]
    newest = number(source.heldout_newest)
    return _card(
        label,
        f'<span class="row"><span class="big">{newest}</span>{_change(source)}</span>',
        sparkline(points),
        told(label, texts.get(label, UNKNOWN)),
    )


def _change(source: SourceStatus) -> str:
    """The difference between the first score and the last, unless they can't be compared."""
    before = source.heldout_before
    after = source.heldout_after
    if before is None or after is None or source.incomplete:
        return ""
    change = after - before
    if abs(change) < LEVEL:
        return '<span class="delta level">unchanged</span>'
    if change > 0:
        return f'<span class="delta up">+{change:.3f}</span>'
    return f'<span class="delta down">−{-change:.3f}</span>'


# --- Reward, progress and verdict -----------------------------------------------------------------


def reward_points(past: JournalHistory) -> Points:
    """The moving mean of the training rollouts' reward."""
    known = [(line.step, line.reward) for line in past.steps if line.reward is not None]
    means = moving_average([reward for _, reward in known], MOVING_STEPS)
    return [(step, mean) for (step, _), mean in zip(known, means, strict=True)]


def _reward(past: JournalHistory, texts: dict[str, str]) -> str:
    label = "reward, last step"
    points = reward_points(past)
    fine = f"line: mean of {MOVING_STEPS} steps" if len(points) > 1 else "of training rollouts"
    return _card(
        label,
        f'<span class="big">{told(label, texts[label])}</span>',
        sparkline(points),
        f'<span class="fine">{fine}</span>',
    )


def _progress(of: RunDescription, past: JournalHistory, texts: dict[str, str]) -> str:
    share = None
    if of.max_steps:
        share = of.summary.steps / of.max_steps
    left = ""
    if past.steps and of.condition is RunCondition.RUNNING:
        left = f", {told('ETA', duration(past.steps[-1].eta_seconds))} to go"
    return _card(
        "steps",
        f'<span class="big">{told("steps", texts["steps"])}</span>',
        meter(share),
        f'<span class="note">{told("time", texts["time"])}{left}</span>',
        f'<span class="note">version {told("version", texts["version"])}, '
        f"{told('state', texts['state'])}</span>",
    )


def _verdict(summary: Summary, texts: dict[str, str]) -> str:
    if "who was busy" not in texts:
        said = '<span class="note">Not known yet: no step has told who was busy.</span>'
        return _card("verdict", said, wide=True)
    bars = {"engines": summary.engine_busy, "their slots": summary.slots_used}
    bars["trainer"] = summary.trainer_busy
    rows = "".join(
        f"<span>{name}</span>{meter(share)}<span>{percent(share)}</span>"
        for name, share in bars.items()
        if share is not None
    )
    return _card(
        "verdict",
        f'<span class="row">{tag(summary.bound.value, BOUND_TAGS.get(summary.bound, "warn"))}</span>',
        f'<div class="meters">{rows}</div>',
        f'<span class="fine">{told("who was busy", texts["who was busy"])}</span>',
        wide=True,
    )


# --- A line without axes --------------------------------------------------------------------------

WIDTH = 100
HEIGHT = 30


def sparkline(points: Sequence[tuple[float, float]]) -> str:
    """A small line of rewards as SVG, from 0 to 1 unless some lie beyond. What it says that matters
    stands beside it as text.
    """
    shown = thinned(list(points))
    if len(shown) < 2:
        return ""
    ats = [at for at, _ in shown]
    values = [value for _, value in shown]
    wide = max(ats) - min(ats) or 1.0
    low = min([0.0, *values])
    high = max([1.0, *values])
    places: list[str] = []
    for at, value in shown:
        x = WIDTH * (at - ats[0]) / wide
        y = HEIGHT - 2 - (HEIGHT - 4) * (value - low) / (high - low)
        places.append(f"{x:.1f},{y:.1f}")
    line = " L".join(places)
    return (
        f'<svg class="spark" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'aria-hidden="true"><path class="under" d="M0,{HEIGHT} L{line} L{WIDTH},{HEIGHT} Z"/>'
        f'<path d="M{line}"/></svg>'
    )
