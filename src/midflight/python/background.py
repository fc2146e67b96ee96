"""A run in a thread of the program."""

import atexit
import signal
import threading
from pathlib import Path

from midflight.config import Config
from midflight.observe.journal import Line
from midflight.observe.status import Status
from midflight.observe.summary import Summary
from midflight.python.run_folder import JournalLines
from midflight.run.launcher import launch
from midflight.run.launcher.checks.check import Findings
from midflight.run.launcher.program import Program
from midflight.run.launcher.shutdown import LOOK_SECONDS
from midflight.run.parts import Message, Progress

ENDING_SECONDS = 15.0
"""The seconds that a run may take to end in order if the program ends before it, in addition to
`run.stop_seconds`, which its parts have.
"""


class BackgroundRun:
    """A run from its start to its end. Everything here may be called from any thread."""

    def __init__(
        self,
        config: Config,
        program: Program,
        *,
        resume: bool,
        overwrite: bool,
        found: Findings,
    ) -> None:
        self._config = config
        self._found = found
        self._resume = resume
        self._overwrite = overwrite
        self._program = program
        program.hear = self._hear
        self._journal = Path(config.run.folder) / "metrics.jsonl"
        before = JournalLines(self._journal)
        before.new()
        self.before = frozenset[int]() if resume else frozenset(before.read)
        """Hashes of lines that another run wrote."""
        self._first = frozenset(before.read)
        self._told = threading.Condition()
        self._num_heard = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="midflight", daemon=True)
        self.status = Status(name=config.run.name, steps=config.run.steps)

    def begin(self) -> None:
        """Starts the run. A program that ends before its run ends the run too, in order."""
        atexit.register(self._end)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive() and self._thread.ident is not None

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Asks the run to end in order; asked again, to end at once. It does not wait."""
        self._program.stop.ask(number)

    def lines(self, *, since_start: bool = False) -> JournalLines:
        """The journal, for `wait`: the lines of all starts of this run, or of this start alone."""
        return JournalLines(self._journal, read=self._first if since_start else self.before)

    def wait(self, lines: JournalLines) -> list[Line]:
        """Waits for new lines, at most `LOOK_SECONDS`. There may be none then, or when the run is
        over.
        """
        with self._told:
            heard = self._num_heard
        found = lines.new()
        if found or self.over:
            return found
        with self._told:
            self._told.wait_for(lambda: self._num_heard != heard, timeout=LOOK_SECONDS)
        return lines.new()

    @property
    def summary(self) -> Summary | None:
        """The summary of a run that is over, however it ended, or None if it never began."""
        return self._program.summary

    def check(self) -> None:
        """Raises the error that ended it, if one did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            launch.train(
                self._config,
                resume=self._resume,
                overwrite=self._overwrite,
                found=self._found,
                program=self._program,
            )
        except BaseException as error:
            self._error = error
        finally:
            atexit.unregister(self._end)

    def _hear(self, message: Message) -> None:
        """Receives a message, in the launcher's thread."""
        with self._told:
            if isinstance(message, Progress):
                self.status = message.status
            self._num_heard += 1
            self._told.notify_all()

    def _end(self) -> None:
        """Waits for its end, at most `run.stop_seconds` and `ENDING_SECONDS`."""
        self.stop(signal.SIGTERM)
        self._thread.join(self._config.run.stop_seconds + ENDING_SECONDS)
