"""The process of a run's trackers. The launcher starts it, and waits for nothing of it before the
run has ended.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from midflight.config.sections import Config
from midflight.observe.logs import PROCESS_VARIABLE
from midflight.run.launcher.folder import LOGS
from midflight.run.orphan_guard import guarded
from midflight.run.places.process import child_environ
from midflight.trackers.process import LAST_SECONDS, TrackerMessage

ENDING_SECONDS = 60.0
"""The seconds that trackers may take to send their last numbers, once a run has finished."""
ALONE_SECONDS = LAST_SECONDS + 5.0
"""The seconds that the process may take to end by itself, once the launcher is gone. It notices
that, and has a limit of its own.
"""


class TrackerProcess:
    """Starts the process and ends it. It is synchronous: `hear` reads the process's messages in the
    thread that draws the terminal.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._names = config.observe.trackers
        self._folder = Path(config.run.folder)
        self._say = say
        self._environ = (
            {PROCESS_VARIABLE: "trackers"} if config.observe.log_format == "json" else {}
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        """The beginning of a message whose end has not come."""
        self._open: set[str] = set()

    def start(self) -> None:
        """Starts the process, unless it was started or the run has no trackers."""
        if not self._names or self._process is not None:
            return
        log = self._folder / LOGS / "trackers.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._open = set(self._names)
        self._unread = b""
        command = [sys.executable, "-m", "midflight.trackers.process", str(self._folder)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                guarded(command, ask=None, seconds=ALONE_SECONDS),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=child_environ(self._environ),
                start_new_session=True,  # Ctrl-C is the launcher's
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def hear(self) -> None:
        """Passes on the trackers' messages since the last call, or the news that their process
        died. None of this ends the run.
        """
        process = self._process
        if process is None:
            return
        assert process.stdout is not None
        log = self._folder / LOGS / "trackers.log"
        status = process.poll()
        *lines, self._unread = (self._unread + (process.stdout.read() or b"")).split(b"\n")
        for line in lines:
            said = msgspec.json.decode(line, type=TrackerMessage)
            if said.error is None:
                self._open.discard(said.tracker)
            else:
                self._say(
                    f"tracker {said.tracker} {said.error}\nThe run goes on, and metrics.jsonl has "
                    f"every number; further errors of it are in {log} alone."
                )
        if status and self._open:
            self._say(
                f"the process of the trackers ended with status {status}: "
                f"{', '.join(sorted(self._open))} will lack what follows; metrics.jsonl has every "
                f"number, and {log} says why."
            )
            self._open.clear()

    def end(self, *, seconds: float) -> None:
        """Waits until every tracker has received everything, for `seconds` at most. Called when
        plot and summary are there.
        """
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(seconds)
            self.hear()
        except subprocess.TimeoutExpired:
            self.hear()
            self._say(
                f"trackers that were not done within {seconds:g} s were ended: "
                f"{', '.join(sorted(self._open))}; metrics.jsonl has every number."
            )
        finally:
            self.drop()

    def drop(self) -> None:
        """Ends the process at once, as before a run begins again from nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
