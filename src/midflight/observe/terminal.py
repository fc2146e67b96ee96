"""The terminal of a run: a status as a few lines, redrawn in place, or a plain line every few
seconds where nothing can be redrawn.
"""

from __future__ import annotations

import io
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from midflight.observe.completions import in_a_line, visible
from midflight.observe.failures import most_common
from midflight.observe.logs import json_line
from midflight.observe.status import (
    UNKNOWN,
    Bound,
    MemberChanges,
    Phase,
    SourceStatus,
    Status,
    duration,
    heldout,
    number,
    percent,
    unclaimed_words,
)
from midflight.types import facts

PLAIN_SECONDS = 5.0
"""Between two lines of a log: often enough to see that it lives, seldom enough to read."""

SHOWN_SECONDS = 1.0
"""Workers that claim one rollout after the other leave moments between two claims, which are no
trouble.
"""


class Terminal:
    """Shows the newest status. Synchronous: drawing takes a few milliseconds and happens only when
    `show` is called.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        as_json: bool = False,
    ) -> None:
        """`as_json`: everything is one JSON object a line, and nothing is redrawn."""
        self._console = console or Console()
        self._clock = clock
        self._json = as_json
        redraws = self._console.is_terminal and not as_json
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if redraws else None
        )
        self._last_line: tuple[float, Phase] | None = None
        self._last_step = 0
        self.status = Status()

    def __enter__(self) -> Terminal:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: Status) -> None:
        self.status = status
        if self._live is not None:
            self._live.update(panel(status), refresh=True)
        elif self._line_is_due(status.phase):
            self.say(plain_line(status), _numbers(status))
            if status.step > self._last_step:
                self._last_step = status.step
                self.say(
                    "  ".join(
                        [
                            "",
                            *(text for _, text in learning(status)),
                            *([status.advice] if _is_lopsided(status) else []),
                        ]
                    )
                )
                if status.sample is not None:
                    self.say(f"  last rollout: {in_a_line(status.sample)}")

    def say(self, message: RenderableType, numbers: Mapping[str, object] | None = None) -> None:
        """Prints something that stays, above the live view. `numbers` stand beside it in JSON."""
        if self._json:
            message = json_line(
                "launcher",
                (message if isinstance(message, str) else _drawn(message)).strip(),
                numbers=numbers,
            )
        # as it is: brackets and colons are no markup, and a log's lines are not folded
        plain = isinstance(message, str)
        self._console.print(
            message, highlight=False, markup=not plain, emoji=not plain, soft_wrap=plain
        )

    def _line_is_due(self, phase: Phase) -> bool:
        """Now and then, and at once when a phase begins."""
        now = self._clock()
        if (
            self._last_line is not None
            and self._last_line[1] is phase
            and now - self._last_line[0] < PLAIN_SECONDS
        ):
            return False
        self._last_line = (now, phase)
        return True


def _drawn(message: RenderableType) -> str:
    drawing = Console(file=io.StringIO(), width=100, color_system=None)
    drawing.print(message)
    return cast(io.StringIO, drawing.file).getvalue()


def _numbers(status: Status) -> dict[str, object]:
    found = {
        "phase": status.phase.value,
        "step": status.step,
        "steps": status.steps,
        "version": status.version,
        "reward": status.reward,
    }
    rates = {
        "generation_rate": status.generation_rate,
        "training_rate": status.training_rate,
        "eta_seconds": status.eta_seconds,
    }
    return {**found, **rates, "failures": status.failures or None}


BAR_WIDTH = 30
MAX_NAME = 36
"""Letters of a run's name in the title, so that what it does stands behind it within 80 columns."""
LEVELS = "▁▂▃▄▅▆▇█"
MAX_WAITS = 3
MAX_JOINED = 4


def panel(status: Status) -> RenderableType:
    """The live view. Rows that have nothing to say yet are left out."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    rows.add_column()
    for label, content in _rows(status):
        rows.add_row(label, content)
    name = Text(status.name or "midflight", style="bold")
    name.truncate(MAX_NAME, overflow="ellipsis")
    title = Text.assemble(
        name, f"  {status.phase.value}  version {status.version}  {duration(status.seconds)}"
    )
    return Panel(rows, title=title, title_align="left", border_style="cyan")


def plain_line(status: Status) -> str:
    """The same in one line, where there is no terminal to redraw."""
    done, total, what = progress(status)
    parts = [
        f"{duration(status.seconds):>12}",
        status.phase.value,
        f"{what} {done}/{total}" if total else "",
    ]
    if status.phase is Phase.WARM_START and status.warm_start is not None:
        parts += [
            f"loss {number(status.warm_start.loss)}",
            f"accuracy {number(status.warm_start.accuracy)}",
        ]
    if status.phase is Phase.TRAINING:
        parts += [
            f"reward {number(status.reward)}",
            f"version {status.version}",
            f"staleness {_mean_age(status)}",
        ]
        parts += [
            f"{status.generation_rate:,.0f} tok/s generated",
            f"{status.training_rate:,.0f} tok/s trained",
        ]
        parts += [
            f"ETA {duration(status.eta_seconds)}",
            *(f"{w.who} waits for {w.for_whom} {w.share:.0%}" for w in status.waits[:1]),
        ]
    parts += _troubles(status)
    return "  ".join(part for part in parts if part)


def learning(status: Status) -> list[tuple[str, str]]:
    """What the last steps had to learn from, and what the trainer says of them."""
    said = (
        ("groups", _groups(status)),
        ("tasks", _tasks(status)),
        ("lengths", _lengths(status)),
        ("trainer", _trainer(status)),
    )
    return [(label, text) for label, text in said if text]


def progress(status: Status) -> tuple[int, int, str]:
    """How far the phase is: done, total (0 if unknown), and of what."""
    if status.phase is Phase.WARM_START and status.warm_start is not None:
        return status.warm_start.step, status.warm_start.max_steps, "step"
    if status.phase is Phase.EVALUATION:
        return status.evaluated, status.to_evaluate, "task"
    return status.step, status.steps, "step"


def _rows(status: Status) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = [("progress", _bar(status))]
    if status.phase is Phase.WARM_START:
        return rows + _warm_start(status)
    rows += [
        ("reward" if index == 0 else "", _source(source))
        for index, source in enumerate(status.sources)
    ]
    rows += [(label, Text(text)) for label, text in learning(status)]
    if status.staleness:
        rows.append(
            (
                "staleness",
                Text(
                    f"{_histogram(status.staleness)}  mean {_mean_age(status)}, most "
                    f"{status.totals.max_token_staleness}"
                ),
            )
        )
    if status.totals.generated_tokens:
        rows.append(("speed", Text(_speed(status))))
    if status.engine_busy is not None:
        rows.append(("busy", Text(_busy(status))))
    if status.members.joined or status.members.num_left:
        rows.append(("engines", Text(_members(status.members))))
    if _is_lopsided(status):
        rows.append(("advice", Text(status.advice)))
    if status.waits:
        waits = (f"{w.who} for {w.for_whom} {w.share:.0%}" for w in status.waits[:MAX_WAITS])
        rows.append(("waiting", Text(", ".join(waits))))
    return [
        *rows,
        *_trouble(status),
        *([] if status.sample is None else [("last rollout", _sample(status.sample))]),
    ]


PROMPT_LINES = 2
COMPLETION_LINES = 4


def _sample(shown: facts.Shown) -> RenderableType:
    """The end of its prompt and the beginning of what was written, each line cut at the panel's
    edge.
    """
    lines = [(f"> {line}", "dim") for line in visible(shown.prompt).splitlines()[-PROMPT_LINES:]]
    lines += [
        (f"< {line}", "") for line in visible(shown.completion).splitlines()[:COMPLETION_LINES]
    ]
    head = Text(f"{shown.source}, task {shown.task_id}, reward {number(shown.reward)}")
    return Group(
        head, *(Text(line, style=style, no_wrap=True, overflow="ellipsis") for line, style in lines)
    )


def _bar(status: Status) -> RenderableType:
    done, total, what = progress(status)
    if not total:
        return Text("…")
    line = Table.grid(padding=(0, 1))
    eta = f"  ETA {duration(status.eta_seconds)}" if status.phase is Phase.TRAINING else ""
    line.add_row(
        ProgressBar(total=total, completed=min(done, total), width=BAR_WIDTH),
        Text(f"{what} {done}/{total}{eta}"),
    )
    return line


def _warm_start(status: Status) -> list[tuple[str, RenderableType]]:
    if status.warm_start is None:
        return []
    target = (
        "" if status.warm_start.target is None else f", until {number(status.warm_start.target)}"
    )
    return [
        ("loss", Text(number(status.warm_start.loss))),
        ("accuracy", Text(f"{number(status.warm_start.accuracy)}{target}")),
    ]


def _source(source: SourceStatus) -> RenderableType:
    scores = (
        (f"   held out {heldout(source)}", "yellow" if source.is_incomplete else "")
        if source.was_evaluated
        else ""
    )
    return Text.assemble((f"{number(source.reward):>6}", "bold green"), f"  {source.name}", scores)


def _groups(status: Status) -> str:
    of = status.learning
    if of.generated_length is None:
        return ""
    return f"spread {number(of.reward_spread)}, {percent(of.zero_spread_share)} of groups all alike"


def _tasks(status: Status) -> str:
    """`12 unseen, 3 hard, 40 learnable, 9 easy; pass rate 45%`."""
    of = status.learning.curriculum
    pools = ", ".join(
        f"{size:,.0f} {name.removeprefix('pool/')}"
        for name, size in of.items()
        if name.startswith("pool/")
    )
    return f"{pools}; pass rate {percent(of.get('pass_rate'))}" if pools else ""


def _lengths(status: Status) -> str:
    """`210 tokens a rollout (4 to 600), 204 trained, 3% cut short`."""
    of = status.learning
    if of.generated_length is None:
        return ""
    reach = f" ({of.lengths['min']:,.0f} to {of.lengths['max']:,.0f})" if of.lengths else ""
    trained = UNKNOWN if of.trained_length is None else f"{of.trained_length:,.0f}"
    return (
        f"{of.generated_length:,.0f} tokens a rollout{reach}, {trained} trained, "
        f"{percent(of.truncated_share)} cut short"
    )


_READINGS = {
    "mismatch/mean": "mismatch",
    "entropy/estimate": "entropy",
    "rho/k3": "KL",
    "grad_norm": "gradient norm",
    "critic/explained_variance": "critic explains",
}
"""How `TRAINER_KEYS` are called here; the two clips are added up."""


def _trainer(status: Status) -> str:
    shown = [
        f"{words} {_reading(status.trainer[key])}"
        for key, words in _READINGS.items()
        if key in status.trainer
    ]
    clips = [
        share
        for key, share in status.trainer.items()
        if key.startswith("clip/") and share is not None
    ]
    return "  ".join([*shown, *([f"clipped {sum(clips):.1%}"] if clips else [])])


def _reading(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _is_lopsided(status: Status) -> bool:
    return status.bound in (Bound.GENERATION, Bound.TRAINER)


def _histogram(staleness: dict[int, int]) -> str:
    """One bar per age that occurs, youngest first, as tall as its share of the tokens."""
    most = max(staleness.values()) or 1
    return "  ".join(
        f"{age}:{LEVELS[round(count / most * (len(LEVELS) - 1))]}"
        for age, count in sorted(staleness.items())
    )


def _mean_age(status: Status) -> str:
    tokens = sum(status.staleness.values())
    return (
        f"{sum(age * n for age, n in status.staleness.items()) / tokens:.2f}" if tokens else UNKNOWN
    )


def _speed(status: Status) -> str:
    t = status.totals
    return (
        f"generation {status.generation_rate:,.0f} tok/s ({status.num_running} running)   training "
        f"{status.training_rate:,.0f} tok/s   {t.rollouts_spanning_versions:,} of {t.rollouts:,} "
        "rollouts span versions"
    )


def _busy(status: Status) -> str:
    slots = "" if status.slots_used is None else f" ({percent(status.slots_used)} of slots)"
    shares = (
        f"engine {percent(status.engine_busy)}{slots}, trainer "
        f"{percent(status.trainer_busy)}, both {percent(status.overlap_share)}"
    )
    return f"{shares}   {status.bound.value}"


def _members(changes: MemberChanges) -> str:
    """`b, c joined (c yet to get the weights), 2 left`."""
    names = [
        *changes.joined[:MAX_JOINED],
        *([f"{len(changes.joined) - MAX_JOINED} more"] if len(changes.joined) > MAX_JOINED else []),
    ]
    waiting = (
        f" ({', '.join(changes.joining[:MAX_JOINED])} yet to get the weights)"
        if changes.joining
        else ""
    )
    said = [
        f"{', '.join(names)} joined{waiting}" if names else "",
        f"{changes.num_left} left" if changes.num_left else "",
    ]
    return ", ".join(filter(None, said))


def _trouble(status: Status) -> list[tuple[str, RenderableType]]:
    found = _troubles(status)
    return [("trouble", Group(*(Text(line, style="yellow") for line in found)))] if found else []


def _troubles(status: Status) -> list[str]:
    found: list[str] = []
    t = status.totals
    if t.failed_rollouts or status.failures:
        classes = most_common(Counter(status.failures))
        found.append(
            f"{t.failed_rollouts:,} of {t.rollouts:,} rollouts failed"
            + (f": {classes}" if classes else "")
        )
    if t.failed_requests:
        found.append(f"{t.failed_requests:,} requests failed")
    if status.quarantined:
        found.append(f"in quarantine: {', '.join(status.quarantined)}")
    if status.unclaimed is not None and status.unclaimed.idle_seconds >= SHOWN_SECONDS:
        found.append(unclaimed_words(status.unclaimed))
    if status.dropped:
        found.append(
            "groups dropped: "
            + ", ".join(f"{count} {reason}" for reason, count in status.dropped.items())
        )
    return found
