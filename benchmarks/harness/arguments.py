"""The options of a benchmark.

Every benchmark has `--smoke` and `--json`, and those that measure in rounds have `--rounds`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final

SAME: Final = object()
"""The smoke form has the same value."""


class Arguments:
    """The command line of a benchmark.

    Each option has a value for a measurement, and one for `--smoke`, which takes seconds and shows
    only that everything runs. What is given on the command line counts in both.
    """

    def __init__(self, doc: str | None, *, rounds: int | None = None) -> None:
        """`doc`: the docstring of the script. `rounds`: how many there are, if it has rounds."""
        self._parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self._smaller: dict[str, object] = {}
        self._gone: dict[str, str] = {}
        self._parser.add_argument(
            "--smoke",
            action="store_true",
            help="take seconds instead of minutes, to see that everything runs",
        )
        self._parser.add_argument(
            "--json", type=Path, metavar="FILE", help="write tables and figures there too"
        )
        if rounds is not None:
            self.option("--rounds", rounds, smoke=1, help="how often each side is measured")

    def option(self, name: str, default: object, *, smoke: object = SAME, **more: Any) -> None:
        """Adds an option. Its type is that of the default; a list takes several values, and a
        default of `False` makes a switch. `more` goes to `add_argument`.
        """
        if default is False:
            more["action"] = "store_true"
        elif isinstance(default, list | tuple):
            more.setdefault("nargs", "+")
            more.setdefault("type", type(default[0]) if default else str)
        elif default is not None:
            more.setdefault("type", type(default))
        action = self._parser.add_argument(name, default=default, **more)
        if smoke is not SAME:
            self._smaller[action.dest] = smoke

    def gone(self, name: str, instead: str) -> None:
        """An option that there was. It is refused by its name, with what to do instead."""
        self._gone[name] = instead

    def parse(self) -> argparse.Namespace:
        """Reads the command line. From now on SIGTERM ends the program in order, so that it ends
        the processes that it has started.
        """
        signal.signal(signal.SIGTERM, _end)
        for word in sys.argv[1:]:
            name = word.partition("=")[0]
            if name in self._gone:
                self._parser.error(f"{name} is gone: {self._gone[name]}")
        if self._parser.parse_args().smoke:
            self._parser.set_defaults(**self._smaller)
        return self._parser.parse_args()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
