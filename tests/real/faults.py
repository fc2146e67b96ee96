"""Faults that another process can ask for by a signal, and that no program would give itself. Run by `template` in each part of a run of which
`VARIABLE` names this file."""

import asyncio
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path


def block() -> None:
    """The main thread, on which the event loop is, never comes back."""
    time.sleep(3600)


def exhaust() -> None:
    raise MemoryError("as if an allocation had failed")


def disconnect() -> None:
    """As a network does that goes away: no connection is left. Addresses stay, for they are the launcher's."""
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def on(number: int, fault: Callable[[], None]) -> None:
    """A process that has no running loop yet gets the signal again a little later: while it imports, much is allowed to it."""

    def handle(*_: object) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        else:
            fault()

    signal.signal(number, handle)


VARIABLE = "PLAYED_FAULTS"
BLOCK, EXHAUST, DISCONNECT = signal.SIGUSR2, signal.SIGRTMIN, signal.SIGRTMIN + 1

if __name__ == "__main__":
    on(EXHAUST, exhaust)
    on(DISCONNECT, disconnect)
    on(BLOCK, block)
