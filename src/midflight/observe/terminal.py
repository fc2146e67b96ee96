"""The terminal of a run: a status as a few lines, redrawn in place, or a plain line every few seconds where nothing can be redrawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from midflight.observe.status import UNKNOWN, Phase, SourceStatus, Status, duration, number, percent

PLAIN_SECONDS = 5.0
"""Between two lines of a log: often enough to see that it lives, seldom enough to read."""


class Terminal:
    """Shows the newest status. Synchronous: drawing takes a few milliseconds and happens only when `show` is called."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console()
        self._clock = clock
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        self._last_line: tuple[float, Phase] | None = None
        self.status = Status()

    def __enter__(self) -> Terminal:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: Status) -> None:
        self.status = status
        if self._live is not None:
            self._live.update(panel(status), refresh=True)
        elif self._line_is_due(status.phase):
            self._console.print(plain_line(status), highlight=False, soft_wrap=True)

    def say(self, message: RenderableType) -> None:
        """Prints something that stays, above the live view."""
        plain = isinstance(message, str)  # as it is: brackets are no markup, and a log's lines are not folded
        self._console.print(message, highlight=False, markup=not plain, soft_wrap=plain)

    def _line_is_due(self, phase: Phase) -> bool:
        """Now and then, and at once when a phase begins."""
        now = self._clock()
        if self._last_line is not None and self._last_line[1] is phase and now - self._last_line[0] < PLAIN_SECONDS:
            return False
        self._last_line = (now, phase)
        return True


BAR_WIDTH = 40
LEVELS = "▁▂▃▄▅▆▇█"
MAX_WAITS = 3


def panel(status: Status) -> RenderableType:
    """The live view. Rows that have nothing to say yet are left out."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", justify="right")
    rows.add_column()
    for label, content in _rows(status):
        rows.add_row(label, content)
    title = f"[bold]{status.name or 'midflight'}[/]  {status.phase.value}  version {status.version}  {duration(status.seconds)}"
    return Panel(rows, title=title, title_align="left", border_style="cyan")


def plain_line(status: Status) -> str:
    """The same in one line, where there is no terminal to redraw."""
    done, total, what = progress(status)
    parts = [f"{duration(status.seconds):>12}", status.phase.value, f"{what} {done}/{total}" if total else ""]
    if status.phase is Phase.WARM_START and status.warm_start is not None:
        parts += [f"loss {number(status.warm_start.loss)}", f"accuracy {number(status.warm_start.accuracy)}"]
    if status.phase is Phase.TRAINING:
        parts += [f"reward {number(status.reward)}", f"version {status.version}", f"staleness {_mean_age(status)}"]
        parts += [f"{status.generation_rate:,.0f} tok/s generated", f"{status.training_rate:,.0f} tok/s trained"]
        parts += [f"ETA {duration(status.eta_seconds)}", *(f"{w.who} waits for {w.for_whom} {w.share:.0%}" for w in status.waits[:1])]
    return "  ".join(part for part in parts if part)


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
    rows += [("reward" if index == 0 else "", _source(source)) for index, source in enumerate(status.sources)]
    if status.staleness:
        rows.append(
            ("staleness", Text(f"{_histogram(status.staleness)}  mean {_mean_age(status)}, most {status.totals.max_token_staleness}"))
        )
    if status.totals.generated_tokens:
        rows.append(("speed", Text(_speed(status))))
    if status.engine_busy is not None:
        rows.append(("busy", Text(_busy(status))))
    if status.waits:
        waits = (f"{w.who} for {w.for_whom} {w.share:.0%}" for w in status.waits[:MAX_WAITS])
        rows.append(("waiting", Text(", ".join(waits))))
    return rows + _trouble(status)


def _bar(status: Status) -> RenderableType:
    done, total, what = progress(status)
    if not total:
        return Text("…")
    line = Table.grid(padding=(0, 1))
    eta = f"  ETA {duration(status.eta_seconds)}" if status.phase is Phase.TRAINING else ""
    line.add_row(ProgressBar(total=total, completed=min(done, total), width=BAR_WIDTH), Text(f"{what} {done}/{total}{eta}"))
    return line


def _warm_start(status: Status) -> list[tuple[str, RenderableType]]:
    if status.warm_start is None:
        return []
    target = "" if status.warm_start.target is None else f", until {number(status.warm_start.target)}"
    return [("loss", Text(number(status.warm_start.loss))), ("accuracy", Text(f"{number(status.warm_start.accuracy)}{target}"))]


def _source(source: SourceStatus) -> RenderableType:
    heldout = ""
    if source.heldout_before is not None:
        last = f" → {number(source.heldout_last)}" if source.heldout_last is not None else ""
        heldout = f"   held out {number(source.heldout_before)}{last}"
    return Text.assemble((f"{number(source.reward):>6}", "bold green"), f"  {source.name}{heldout}")


def _histogram(staleness: dict[int, int]) -> str:
    """One bar per age that occurs, youngest first, as tall as its share of the tokens."""
    most = max(staleness.values()) or 1
    return "  ".join(f"{age}:{LEVELS[round(count / most * (len(LEVELS) - 1))]}" for age, count in sorted(staleness.items()))


def _mean_age(status: Status) -> str:
    tokens = sum(status.staleness.values())
    return f"{sum(age * n for age, n in status.staleness.items()) / tokens:.2f}" if tokens else UNKNOWN


def _speed(status: Status) -> str:
    t = status.totals
    return (
        f"generation {status.generation_rate:,.0f} tok/s ({status.num_running} running)   training {status.training_rate:,.0f} tok/s   "
        f"{t.rollouts_spanning_versions:,} of {t.rollouts:,} rollouts span versions"
    )


def _busy(status: Status) -> str:
    shares = f"engine {percent(status.engine_busy)}, trainer {percent(status.trainer_busy)}, both {percent(status.overlap_share)}"
    return f"{shares}   {status.bound.value}"


def _trouble(status: Status) -> list[tuple[str, RenderableType]]:
    found: list[str] = []
    if status.totals.failed_requests or status.totals.failed_rollouts:
        found.append(f"{status.totals.failed_requests} requests and {status.totals.failed_rollouts} rollouts failed")
    if status.quarantined:
        found.append(f"in quarantine: {', '.join(status.quarantined)}")
    if status.dropped:
        found.append("groups dropped: " + ", ".join(f"{count} {reason}" for reason, count in status.dropped.items()))
    return [("trouble", Group(*(Text(line, style="yellow") for line in found)))] if found else []
