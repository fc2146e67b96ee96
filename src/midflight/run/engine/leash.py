"""Holds a command that must not outlive us: `python leash.py STOP_SECONDS COMMAND...`, with a pipe as standard input.

When the pipe closes, which it does at the latest when the process at its other end dies, however that happens, the command is
asked to end, and after STOP_SECONDS its whole process group is killed. When the command ends by itself, what it left behind
is killed. Ends as the command did. A file of its own that imports nothing of ours: it stays, and stays small.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main(stop_seconds: float, command: list[str]) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    threading.Thread(target=_end_with_input, args=(process, stop_seconds), daemon=True).start()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet: its number is still its group's, and nobody else's
    _kill_group(process.pid)
    status = process.wait()
    return status if status >= 0 else 128 - status


def _end_with_input(process: subprocess.Popen[bytes], stop_seconds: float) -> None:
    """Waits for the end of standard input, then for `stop_seconds`; ended by the process's end."""
    while os.read(0, 1024):
        pass
    os.kill(process.pid, signal.SIGTERM)  # the process alone: servers end their own children in order
    threading.Event().wait(stop_seconds)
    _kill_group(process.pid)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    os._exit(main(float(sys.argv[1]), sys.argv[2:]))
