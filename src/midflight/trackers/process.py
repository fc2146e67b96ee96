"""The process of a run's trackers: `python -m midflight.trackers.process FOLDER`, started by the
launcher.

It reads the journal, which holds what a slow tracker has not been told yet, so nothing queues up in
memory and nothing is left out. Each tracker has a thread of its own: one that hangs delays no
other, and the run none. Standard input stays open for as long as the run goes on; once it ends, or
the launcher dies, all that is left is told, and the process ends.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from midflight.archive.journal import JOURNAL, Tail
from midflight.config.load import load_config
from midflight.config.sections import Config
from midflight.observe.lines import decode_line
from midflight.observe.logs import as_asked, log_failure
from midflight.observe.timeline import TIMELINE
from midflight.trackers.spans import RolloutSpans
from midflight.trackers.telling import Told, flat_summary, tell, tracked
from midflight.trackers.tracker import Tracker, made

LOOK_SECONDS = 0.5
"""Between two looks at the journal."""
AT_ONCE = 256
"""Rollouts that a tracker is given together: of a run that goes on, its past may be long."""
LAST_SECONDS = 120.0
"""For what is left once the launcher is gone; while it lives, it is the one that ends this."""


class TrackerSaid(msgspec.Struct, frozen=True):
    """To the launcher: that a tracker failed, or with no `error` that it has ended."""

    tracker: str
    error: str | None = None


class Teller(threading.Thread):
    """Tells one tracker what the journal says, until `ending` is set and everything is told."""

    def __init__(self, name: str, config: Config, folder: Path, ending: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._config = config
        self._folder = folder
        self._ending = ending
        self._told = Told(folder / "trackers" / f"{name.replace(':', '-')}.told")
        self._tail = Tail(folder / JOURNAL)
        self._timeline = Tail(folder / TIMELINE)
        self._rollouts = RolloutSpans(told=self._told.timeline)
        self._failed = False

    def run(self) -> None:
        try:
            tracker = self._opened()
        except BaseException as error:
            self._say(error, "could not be opened")
            say(TrackerSaid(self.name))
            return
        ending = False
        while not ending:
            ending = self._ending.wait(LOOK_SECONDS)
            self._tell(tracker)
        self._attempt(lambda: self._end(tracker), "failed at its end")
        say(TrackerSaid(self.name))

    def _opened(self) -> Tracker:
        tracker = made(self.name)
        again = not self._told.is_new
        found = tracker.open(
            tracked(self._config, self._folder, id=(self._told.id or "") if again else None)
        )
        if not again:
            self._told.add(f"id {found or ''}")
        return tracker

    def _tell(self, tracker: Tracker) -> None:
        """Of a file that was written anew everything is read again: `Told` knows what of it is
        new.
        """
        _, lines = self._tail.new()
        for line in lines:
            self._attempt(lambda line=line: tell(tracker, decode_line(line), self._told), "failed")
        timed = self._tell_spans(tracker) if type(tracker).spans is not Tracker.spans else False
        if lines or timed:
            self._attempt(tracker.flush, "failed")

    def _tell_spans(self, tracker: Tracker) -> bool:
        """Whether there were any. The timeline is only ever added to; what was told of it is told
        once, as of the journal.
        """
        _, lines = self._timeline.new()
        found = list(self._rollouts.of(lines))
        if self._rollouts.num_read > self._told.timeline:
            self._told.add(f"timeline {self._rollouts.num_read}")
        for at in range(0, len(found), AT_ONCE):
            self._attempt(lambda at=at: tracker.spans(found[at : at + AT_ONCE]), "failed")
        return bool(found)

    def _end(self, tracker: Tracker) -> None:
        if (plot := self._folder / "plot.png").exists():
            tracker.picture("plot", plot)
        tracker.close(flat_summary(self._folder / "summary.json"))

    def _attempt(self, deed: object, what: str) -> None:
        assert callable(deed)
        try:
            deed()
        except BaseException as error:
            self._say(error, what)

    def _say(self, error: BaseException, what: str) -> None:
        """The first time to people, always to the log."""
        log_failure(error)
        if not self._failed:
            self._failed = True
            reason = str(error).strip().partition("\n")[0]
            say(TrackerSaid(self.name, f"{what}: {type(error).__name__}: {reason}"))


_out = threading.Lock()


def say(said: TrackerSaid) -> None:
    """A launcher that is gone does not listen, and what is left is told all the same."""
    with _out, suppress(OSError):
        os.write(1, msgspec.json.encode(said) + b"\n")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher says when to end
    folder = Path(sys.argv[1])
    config = load_config(folder / "config.toml", [f"run.folder={folder}"])
    sys.stdout = sys.stderr  # prints of trackers are no messages
    as_asked()
    ending = threading.Event()
    tellers = [Teller(name, config, folder, ending) for name in config.observe.trackers]
    for teller in tellers:
        teller.start()
    sys.stdin.buffer.read()
    ending.set()
    deadline = time.monotonic() + LAST_SECONDS
    for teller in tellers:
        teller.join(max(0.0, deadline - time.monotonic()))


if __name__ == "__main__":
    main()
    os._exit(0)  # what a library left behind may refuse to end
