"""Ends a command when the process that started it has ended: `python guard.py PARENT SIGNAL SECONDS
COMMAND...`.

This process becomes the command, so that its parent knows the command's number, pipes and exit
status. Beside it stays a guard, a small process that waits for the end of either:

| ended | what the guard does |
|---|---|
| the parent, in whichever way, at whichever instant | it sends SIGNAL to the command, and after SECONDS it kills the command's session |
| the command | it kills what the command has left behind in its session |

Nothing depends on the instant: the guard asks whether the parent is there, and a parent that ended
before the guard began is not. The guard is no child of the command, which may wait for its children
or kill them. This file is its whole program, and imports nothing of ours, so that it starts at once
and stays small. The name of the command is not on the guard's command line, so that a search for
the command by name finds it alone.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

GRACE_SECONDS = 5.0
"""The time that a command has which was asked to end: our own processes take half of it at most."""
LOOK_SECONDS = 0.5
"""The time between two looks, on a system that does not tell of the end of other processes."""
BESIDE = "beside"
"""The first word of the command line of a guard."""
IGNORED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""The guard ignores these: it belongs to the command's process group, and a signal to that group is
not for the guard.
"""


def guarded(
    command: Sequence[str],
    *,
    ask: signal.Signals | None = signal.SIGTERM,
    seconds: float | None = None,
) -> list[str]:
    """The command line that runs `command` with a guard. It is for a process that this one starts,
    in a session of its own.

    `ask` is the signal that asks the command to end when this process has ended; with none, the
    command must notice that by itself. `seconds` is the time that it has then, by default
    `GRACE_SECONDS`.
    """
    given = GRACE_SECONDS if seconds is None else seconds
    return [
        sys.executable,
        "-I",
        "-S",
        __file__,
        str(os.getpid()),
        str(int(ask or 0)),
        str(given),
        *command,
    ]


def main(parent: int, ask: int, seconds: float, command: Sequence[str]) -> None:
    """Becomes the command, and does not return."""
    stand_beside(parent, ask, seconds)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # the interpreter ignores them, and the command would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execvp(command[0], list(command))


def stand_beside(parent: int, ask: int, seconds: float) -> None:
    """Starts the guard of this process, and makes it the leader of a session. Ends it if its parent
    has ended already.
    """
    with suppress(PermissionError):  # it is the leader of a session already
        os.setsid()
    descriptors = _descriptors(parent, os.getpid())
    if os.getppid() != parent:
        os._exit(0)
    allowed = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
    between = os.fork()
    if between == 0:
        try:
            if os.fork() == 0:
                _become_guard(parent, ask, seconds, descriptors)
        finally:
            os._exit(0)
    os.waitpid(between, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, allowed)


def _become_guard(parent: int, ask: int, seconds: float, descriptors: Sequence[int]) -> None:
    """Becomes the guard, which is a program of its own and keeps nothing of the command."""
    _let_go(descriptors)
    given = [str(word) for word in (BESIDE, parent, ask, seconds, *descriptors)]
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, *given])


def _descriptors(parent: int, command: int) -> tuple[int, ...]:
    """Descriptors of both processes, for `Ends`, or none if the system does not have or allow
    them.
    """
    try:
        return os.pidfd_open(parent), os.pidfd_open(command)
    except ProcessLookupError:
        os._exit(0)  # the parent has ended
    except (AttributeError, OSError):
        return ()


class Ends:
    """The ends of the parent and of the command, as the guard waits for them."""

    def __init__(self, parent: int, command: int, descriptors: Sequence[int]) -> None:
        self._parent = parent
        self._command = command
        self._descriptors = descriptors
        """Descriptors of both processes, or none."""

    def wait_for_one(self) -> None:
        """Waits for the end of the parent or of the command."""
        if self._descriptors:
            _readable(self._descriptors, None)
            return
        while _is_there(self._parent) and _is_there(self._command):
            time.sleep(LOOK_SECONDS)

    def wait_for_command(self, seconds: float) -> None:
        """Waits for the end of the command, for `seconds` at most."""
        if self._descriptors:
            _readable(self._descriptors[1:], seconds)
            return
        deadline = time.monotonic() + seconds
        while _is_there(self._command) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)


def guard(parent: int, ask: int, seconds: float, *descriptors: int) -> None:
    """Waits for the end of the parent or of the command, and does not return."""
    # also the command's number, which no other process gets while the guard is in its session
    session = os.getsid(0)
    ends = Ends(parent, session, descriptors)
    ends.wait_for_one()
    if ask:
        with suppress(ProcessLookupError):
            os.kill(session, ask)
    ends.wait_for_command(seconds)
    _kill_session(session)


def _let_go(kept: Sequence[int]) -> None:
    """Closes the command's pipes, sockets and files but for `kept`, leaves its folder, and ignores
    signals to its group.
    """
    os.chdir("/")
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    first = 3
    for descriptor in sorted(kept):
        os.set_inheritable(descriptor, True)
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _kill_session(session: int) -> None:
    """Kills every process in the session, of whichever group, and this one last.

    A process that has been sent SIGKILL cannot start another. So when a search finds no new
    process, none is left.
    """
    killed = {os.getpid()}
    found = _members(session) - killed
    while found:
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        found = _members(session) - killed
    os.killpg(session, signal.SIGKILL)


def _members(session: int) -> set[int]:
    """The numbers of the processes in a session, or none if there is no /proc."""
    found: set[int] = set()
    with suppress(OSError), os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit() and _session_of(entry.path) == session:
                found.add(int(entry.name))
    return found


def _session_of(folder: str) -> int | None:
    """The number of the process's session; None for a process that has ended."""
    try:
        with open(f"{folder}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (pathlib takes long to be imported)
            # The command's name, in brackets, may itself hold brackets and spaces: the fields start
            # after the last one.
            return int(file.read().rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return None


def _readable(descriptors: Sequence[int], seconds: float | None) -> None:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(None if seconds is None else 1000 * seconds)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == BESIDE:
        guard(int(words[1]), int(words[2]), float(words[3]), *map(int, words[4:]))
    else:
        main(int(words[0]), int(words[1]), float(words[2]), words[3:])
