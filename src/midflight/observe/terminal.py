"""The terminal of a run: a status as a few lines, redrawn in place, or a plain line every few
seconds if nothing can be redrawn.
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
from midflight.observe.readable import (
    UNKNOWN,
    busy_words,
    duration,
    heldout,
    number,
    percent,
    unclaimed_words,
)
from midflight.observe.status import (
    Bound,
    MemberChanges,
    Phase,
    SourceStatus,
    Status,
    mean_age,
)
from midflight.types import facts

PLAIN_SECONDS = 5.0
"""Seconds between two lines of a log: often enough to see that the run lives, seldom enough to
read.
"""

SHOWN_SECONDS = 1.0
"""Seconds without a claim before unclaimed rollouts are shown as trouble: workers that claim one
rollout after the other leave moments between two claims.
"""


class Terminal:
    """Shows the newest status. It is synchronous: drawing takes a few milliseconds and happens only
    when `show` is called.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        as_json: bool = False,
    ) -> None:
        """With `as_json` each line is one JSON object, and nothing is redrawn."""
        self._console = console or Console()
        self._clock = clock
        self._json = as_json
        self._live: Live | None = None
        if self._console.is_terminal and not as_json:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
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
                self._say_step(status)

    def _say_step(self, status: Status) -> None:
        parts = [""] + [text for _, text in learning(status)]
        if _is_lopsided(status):
            parts.append(status.advice)
        self.say("  ".join(parts))
        if status.sample is not None:
            self.say(f"  last rollout: {in_a_line(status.sample)}")

    def say(self, message: RenderableType, numbers: Mapping[str, object] | None = None) -> None:
        """Prints something that stays, above the live view. `numbers` stand beside it in JSON."""
        if self._json:
            text = message if isinstance(message, str) else _drawn(message)
            message = json_line("launcher", text.strip(), numbers=numbers)
        # A string is printed as it is: brackets and colons are no markup, and a log's lines are not
        # folded.
        plain = isinstance(message, str)
        self._console.print(
            message, highlight=False, markup=not plain, emoji=not plain, soft_wrap=plain
        )

    def _line_is_due(self, phase: Phase) -> bool:
        """True if a line is due: when a phase begins, and every `PLAIN_SECONDS` after that."""
        now = self._clock()
        if self._last_line is not None:
            said_at, last_phase = self._last_line
            if last_phase is phase and now - said_at < PLAIN_SECONDS:
                return False
        self._last_line = (now, phase)
        return True


def _drawn(message: RenderableType) -> str:
    drawing = Console(file=io.StringIO(), width=100, color_system=None)
    drawing.print(message)
    return cast(io.StringIO, drawing.file).getvalue()


def _numbers(status: Status) -> dict[str, object]:
    return {
        "phase": status.phase.value,
        "step": status.step,
        "steps": status.steps,
        "version": status.version,
        "reward": status.reward,
        "generation_rate": status.generation_rate,
        "training_rate": status.training_rate,
        "eta_seconds": status.eta_seconds,
        "failures": status.failures or None,
    }


BAR_WIDTH = 30
MAX_NAME = 36
"""Letters of a run's name in the title, so that the phase fits behind it within 80 columns."""
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
    """Returns the same in one line, for output that cannot be redrawn."""
    done, total, what = progress(status)
    parts = [f"{duration(status.seconds):>12}", status.phase.value]
    if total:
        parts.append(f"{what} {done}/{total}")
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
            f"{status.generation_rate:,.0f} tok/s generated",
            f"{status.training_rate:,.0f} tok/s trained",
            f"ETA {duration(status.eta_seconds)}",
        ]
        if status.waits:
            longest = status.waits[0]
            parts.append(f"{longest.who} waits for {longest.for_whom} {percent(longest.share)}")
    parts += _troubles(status)
    return "  ".join(part for part in parts if part)


def learning(status: Status) -> list[tuple[str, str]]:
    """Returns the lines about the material of the last steps, and about the trainer's readings of
    them.
    """
    said = (
        ("groups", _groups(status)),
        ("tasks", _tasks(status)),
        ("lengths", _lengths(status)),
        ("trainer", _trainer(status)),
    )
    return [(label, text) for label, text in said if text]


def progress(status: Status) -> tuple[int, int, str]:
    """Returns the progress of the phase: the number done, the total number (0 if unknown), and the
    name of the unit.
    """
    if status.phase is Phase.WARM_START and status.warm_start is not None:
        return status.warm_start.step, status.warm_start.max_steps, "step"
    if status.phase is Phase.EVALUATION:
        return status.evaluated, status.to_evaluate, "task"
    return status.step, status.steps, "step"


def _rows(status: Status) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = [("progress", _bar(status))]
    if status.phase is Phase.WARM_START:
        return rows + _warm_start(status)
    for index, source in enumerate(status.sources):
        label = "reward" if index == 0 else ""
        rows.append((label, _source(source)))
    rows += [(label, Text(text)) for label, text in learning(status)]
    if status.staleness:
        rows.append(("staleness", Text(_staleness(status))))
    if status.totals.generated_tokens:
        rows.append(("speed", Text(_speed(status))))
    if status.engine_busy is not None:
        rows.append(("busy", Text(_busy(status))))
    if status.members.joined or status.members.num_left:
        rows.append(("engines", Text(_members(status.members))))
    if _is_lopsided(status):
        rows.append(("advice", Text(status.advice)))
    if status.waits:
        waits = (f"{wait} {percent(wait.share)}" for wait in status.waits[:MAX_WAITS])
        rows.append(("waiting", Text(", ".join(waits))))
    troubles = _troubles(status)
    if troubles:
        rows.append(("trouble", Group(*[Text(line, style="yellow") for line in troubles])))
    if status.sample is not None:
        rows.append(("last rollout", _sample(status.sample)))
    return rows


PROMPT_LINES = 2
COMPLETION_LINES = 4


def _sample(shown: facts.Shown) -> RenderableType:
    """The end of a rollout's prompt and the beginning of its answer. Each line is cut at the edge
    of the panel.
    """
    head = Text(f"{shown.source}, task {shown.task_id}, reward {number(shown.reward)}")
    prompt = visible(shown.prompt).splitlines()[-PROMPT_LINES:]
    completion = visible(shown.completion).splitlines()[:COMPLETION_LINES]
    lines = [_cut_line(f"> {line}", style="dim") for line in prompt]
    lines += [_cut_line(f"< {line}", style="") for line in completion]
    return Group(head, *lines)


def _cut_line(line: str, *, style: str) -> Text:
    return Text(line, style=style, no_wrap=True, overflow="ellipsis")


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
    accuracy = number(status.warm_start.accuracy)
    if status.warm_start.target is not None:
        accuracy += f", until {number(status.warm_start.target)}"
    return [("loss", Text(number(status.warm_start.loss))), ("accuracy", Text(accuracy))]


def _source(source: SourceStatus) -> RenderableType:
    text = Text.assemble((f"{number(source.reward):>6}", "bold green"), f"  {source.name}")
    if source.was_evaluated:
        text.append(f"   held out {heldout(source)}", "yellow" if source.incomplete else "")
    return text


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
"""The words for `TRAINER_KEYS` here. The two shares that are clipped are shown as their sum."""


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
    if clips:
        shown.append(f"clipped {sum(clips):.1%}")
    return "  ".join(shown)


def _reading(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _is_lopsided(status: Status) -> bool:
    return status.bound in (Bound.GENERATION, Bound.TRAINER)


def _staleness(status: Status) -> str:
    most = status.totals.max_token_staleness
    return f"{_histogram(status.staleness)}  mean {_mean_age(status)}, most {most}"


def _histogram(staleness: dict[int, int]) -> str:
    """One bar per age that occurs, youngest first, as tall as its share of the tokens."""
    most = max(staleness.values()) or 1
    return "  ".join(
        f"{age}:{LEVELS[round(count / most * (len(LEVELS) - 1))]}"
        for age, count in sorted(staleness.items())
    )


def _mean_age(status: Status) -> str:
    age = mean_age(status.staleness)
    return UNKNOWN if age is None else f"{age:.2f}"


def _speed(status: Status) -> str:
    t = status.totals
    return (
        f"generation {status.generation_rate:,.0f} tok/s ({status.num_running} running)   training "
        f"{status.training_rate:,.0f} tok/s   {t.rollouts_spanning_versions:,} of {t.rollouts:,} "
        "rollouts span versions"
    )


def _busy(status: Status) -> str:
    shares = busy_words(
        engine_busy=status.engine_busy,
        trainer_busy=status.trainer_busy,
        slots_used=status.slots_used,
    )
    return f"{shares}, both {percent(status.overlap_share)}   {status.bound}"


def _members(changes: MemberChanges) -> str:
    """`b, c joined (c yet to get the weights), 2 left`."""
    names = list(changes.joined[:MAX_JOINED])
    if len(changes.joined) > MAX_JOINED:
        names.append(f"{len(changes.joined) - MAX_JOINED} more")
    waiting = ""
    if changes.joining:
        waiting = f" ({', '.join(changes.joining[:MAX_JOINED])} yet to get the weights)"
    said: list[str] = []
    if names:
        said.append(f"{', '.join(names)} joined{waiting}")
    if changes.num_left:
        said.append(f"{changes.num_left} left")
    return ", ".join(said)


def _troubles(status: Status) -> list[str]:
    found: list[str] = []
    t = status.totals
    if t.failed_rollouts or status.failures:
        failed = f"{t.failed_rollouts:,} of {t.rollouts:,} rollouts failed"
        classes = most_common(Counter(status.failures))
        found.append(f"{failed}: {classes}" if classes else failed)
    if t.failed_requests:
        found.append(f"{t.failed_requests:,} requests failed")
    if status.quarantined:
        found.append(f"in quarantine: {', '.join(status.quarantined)}")
    if status.unclaimed is not None and status.unclaimed.idle_seconds >= SHOWN_SECONDS:
        found.append(unclaimed_words(status.unclaimed))
    if status.dropped:
        counts = ", ".join(f"{count} {reason}" for reason, count in status.dropped.items())
        found.append(f"groups dropped: {counts}")
    return found
