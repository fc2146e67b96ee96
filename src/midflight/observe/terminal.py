"""The terminal of a run: redrawn in place, or a plain line every few seconds where nothing can be redrawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live

from midflight.observe.panel import panel, plain_line
from midflight.observe.status import Phase, Status

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
