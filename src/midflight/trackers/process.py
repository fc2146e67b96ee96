"""The process of a run's trackers: `python -m midflight.trackers.process FOLDER`, started by the
launcher.

It reads the journal, which keeps the lines that a slow tracker has not received yet. So nothing
queues up in memory and nothing is left out. Each tracker has a thread of its own: one that hangs
delays neither another tracker nor the run. Standard input stays open for as long as the run goes
on. Once it ends, or the launcher dies, the process sends the remaining lines, and ends.
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
from midflight.observe.logs import log_failure, use_json_logs
from midflight.observe.timeline import TIMELINE
from midflight.trackers.delivery import DeliveryLog, flat_summary, tell, tracked
from midflight.trackers.spans import RolloutSpans
from midflight.trackers.tracker import Tracker, make_tracker

LOOK_SECONDS = 0.5
"""Seconds between two looks at the journal."""
AT_ONCE = 256
"""The number of rollouts that a tracker is given together. The past of a run that goes on may be
long.
"""
LAST_SECONDS = 120.0
"""The seconds for which this process may send the remaining lines once the launcher is gone. While
the launcher lives, it ends this process.
"""


class TrackerMessage(msgspec.Struct, frozen=True):
    """A message to the launcher: a tracker has failed, or has ended if there is no `error`."""

    tracker: str
    error: str | None = None


class TrackerThread(threading.Thread):
    """Sends the journal's lines to one tracker, until `ending` is set and all are sent."""

    def __init__(self, name: str, config: Config, folder: Path, ending: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._config = config
        self._folder = folder
        self._ending = ending
        self._told = DeliveryLog(folder / "trackers" / f"{name.replace(':', '-')}.told")
        self._tail = Tail(folder / JOURNAL)
        self._timeline = Tail(folder / TIMELINE)
        self._rollouts = RolloutSpans(told=self._told.timeline)
        self._failed = False

    def run(self) -> None:
        try:
            tracker = self._opened()
        except BaseException as error:
            self._say(error, "could not be opened")
            say(TrackerMessage(self.name))
            return
        ending = False
        while not ending:
            ending = self._ending.wait(LOOK_SECONDS)
            self._tell(tracker)
        self._attempt(lambda: self._end(tracker), "failed at its end")
        say(TrackerMessage(self.name))

    def _opened(self) -> Tracker:
        tracker = make_tracker(self.name)
        is_new = self._told.is_new
        id = None if is_new else self._told.id or ""
        found = tracker.open(tracked(self._config, self._folder, id=id))
        if is_new:
            self._told.add(f"id {found or ''}")
        return tracker

    def _tell(self, tracker: Tracker) -> None:
        """Sends the new lines. A file that was written anew is read from its beginning:
        `DeliveryLog` knows which of its lines were sent.
        """
        _, lines = self._tail.new()
        for line in lines:
            self._attempt(lambda line=line: tell(tracker, decode_line(line), self._told), "failed")
        timed = False
        if type(tracker).spans is not Tracker.spans:
            timed = self._tell_spans(tracker)
        if lines or timed:
            self._attempt(tracker.flush, "failed")

    def _tell_spans(self, tracker: Tracker) -> bool:
        """Sends the rollouts of the timeline, and returns whether there were any. The timeline only
        grows, and each of its lines is sent once, as in the journal.
        """
        _, lines = self._timeline.new()
        found = list(self._rollouts.of(lines))
        if self._rollouts.num_read > self._told.timeline:
            self._told.add(f"timeline {self._rollouts.num_read}")
        for at in range(0, len(found), AT_ONCE):
            self._attempt(lambda at=at: tracker.spans(found[at : at + AT_ONCE]), "failed")
        return bool(found)

    def _end(self, tracker: Tracker) -> None:
        plot = self._folder / "plot.png"
        if plot.exists():
            tracker.picture("plot", plot)
        tracker.close(flat_summary(self._folder / "summary.json"))

    def _attempt(self, deed: object, what: str) -> None:
        assert callable(deed)
        try:
            deed()
        except BaseException as error:
            self._say(error, what)

    def _say(self, error: BaseException, what: str) -> None:
        """Writes an error to the log. The first error is also sent to the launcher."""
        log_failure(error)
        if not self._failed:
            self._failed = True
            reason = str(error).strip().partition("\n")[0]
            say(TrackerMessage(self.name, f"{what}: {type(error).__name__}: {reason}"))


_out = threading.Lock()


def say(said: TrackerMessage) -> None:
    """Sends the launcher a message. If the launcher is gone, this process goes on with its
    remaining work.
    """
    with _out, suppress(OSError):
        os.write(1, msgspec.json.encode(said) + b"\n")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher says when to end
    folder = Path(sys.argv[1])
    config = load_config(
        folder / "config.toml", [f"run.folder={folder}"], note=lambda _: None
    )  # the launcher has said what is read as its replacement
    sys.stdout = sys.stderr  # prints of trackers are no messages
    use_json_logs()
    ending = threading.Event()
    tellers = [TrackerThread(name, config, folder, ending) for name in config.observe.trackers]
    for teller in tellers:
        teller.start()
    sys.stdin.buffer.read()
    ending.set()
    deadline = time.monotonic() + LAST_SECONDS
    for teller in tellers:
        teller.join(max(0.0, deadline - time.monotonic()))


if __name__ == "__main__":
    main()
    os._exit(0)  # threads that a library left may refuse to end
