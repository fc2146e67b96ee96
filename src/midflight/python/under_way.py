"""One start of a run, in a thread of this program: the launcher's thread hears the run, and whoever waits here is told of new lines."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from pathlib import Path

from rich.console import Console

from midflight.config import Config
from midflight.observe.journal import Line, decode_line
from midflight.observe.status import Status
from midflight.observe.summary import Summary
from midflight.run.launcher import launch
from midflight.run.launcher.ending import LOOK_SECONDS
from midflight.run.parts import Message, Progress

ENDING_SECONDS = 15.0
"""For a run to end in order where the program ends before it."""


class Lines:
    """The lines of a journal that nobody has read yet. After a crash of a part the file is written anew: what was read stays read."""

    def __init__(self, path: Path, *, read: frozenset[int] = frozenset()) -> None:
        """`read`: hashes of lines that are not to be read."""
        self._path = path
        self.read = set(read)
        self._place = (0, 0)
        """Which file it is, and how far it was read."""

    def new(self) -> list[Line]:
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                begin = self._place[1] if self._place[0] == found.st_ino and self._place[1] <= found.st_size else 0
                file.seek(begin)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._place = (found.st_ino, begin + len(whole) + len(newline))
        unread = [line for line in whole.split(b"\n") if line.strip() and hash(line) not in self.read]
        self.read.update(map(hash, unread))
        return [decode_line(line) for line in unread]


class UnderWay:
    """A run from its start to its end. Everything here may be called from any thread."""

    def __init__(self, config: Config, program: launch.Program, *, resume: bool, overwrite: bool, own_loss: str | None) -> None:
        self._config, self._own_loss, self._resume, self._overwrite = config, own_loss, resume, overwrite
        self._program, program.hear = program, self._hear
        self._journal = Path(config.run.folder) / "metrics.jsonl"
        before = Lines(self._journal)
        before.new()
        self.before = frozenset[int]() if resume else frozenset(before.read)
        """Lines that are of another run."""
        self._first = frozenset(before.read)
        self._told = threading.Condition()
        self._num_heard = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="midflight", daemon=True)
        self.status = Status(name=config.run.name, steps=config.run.steps)

    def begin(self) -> None:
        """A program that ends before its run ends that too, in order."""
        atexit.register(self._end)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive() and self._thread.ident is not None

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """In order; asked again, at once. Does not wait."""
        self._program.stop.ask(number)

    def lines(self, *, since_start: bool = False) -> Lines:
        """Those of the journal, for `wait`: of all starts of this run, or of this one."""
        return Lines(self._journal, read=self._first if since_start else self.before)

    def wait(self, lines: Lines) -> list[Line]:
        """Waits for new lines, until the run is over, and looks up now and then: then and in the end there may be none."""
        with self._told:
            heard = self._num_heard
        if not (found := lines.new()) and not self.over:
            with self._told:
                self._told.wait_for(lambda: self._num_heard != heard, timeout=LOOK_SECONDS)
            found = lines.new()
        return found

    @property
    def summary(self) -> Summary | None:
        """Of a run that is over, however it ended; none where it never began."""
        return self._program.summary

    def check(self) -> None:
        """Raises what ended it."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            launch.train(self._config, resume=self._resume, overwrite=self._overwrite, own_loss=self._own_loss, program=self._program)
        except BaseException as error:
            self._error = error
        finally:
            atexit.unregister(self._end)

    def _hear(self, message: Message) -> None:
        """In the launcher's thread."""
        with self._told:
            if isinstance(message, Progress):
                self.status = message.status
            self._num_heard += 1
            self._told.notify_all()

    def _end(self) -> None:
        """Waits for its end, at most `ENDING_SECONDS`."""
        self.stop(signal.SIGTERM)
        self._thread.join(ENDING_SECONDS)


def console(*, shown: bool) -> Console:
    """Where a run is shown. A notebook's own way of showing things belongs to the thread of a cell; lines of text may come from any."""
    return Console(file=sys.stdout, force_jupyter=False, quiet=not shown, soft_wrap=True)
