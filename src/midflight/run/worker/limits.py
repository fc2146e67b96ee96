"""Limits on the resources of a worker that agents may take. This is no sandbox: harmful code has
ways around it.
"""

import asyncio
import resource
import sys
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from midflight.errors import TooManyProcesses

STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty"})
"""The interpreter's audit events of a process that is about to start."""


def limit_memory(megabytes: int) -> None:
    """From now on an allocation beyond the limit raises `MemoryError` where it is made: mostly in
    the agent that takes too much.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = megabytes * 2**20
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class StartedProcesses:
    """Counts the processes that each agent has started, also from its threads. Raises
    `TooManyProcesses` in the agent that starts more than `most`.
    """

    def __init__(self, most: int, *, session: ContextVar[str]) -> None:
        """`session` holds the session of the agent whose code runs."""
        self._most = most
        self._session = session
        self._started = Counter[str]()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Counts for as long as the process lives. uvloop starts processes where the interpreter
        does not see them, so that its methods are wrapped.
        """

        def audit(event: str, _: object) -> None:
            if event in STARTS:
                self.start()

        sys.addaudithook(audit)
        if not isinstance(loop, asyncio.BaseEventLoop):
            for name in ("subprocess_exec", "subprocess_shell"):
                setattr(loop, name, self._counted(getattr(loop, name)))

    def start(self) -> None:
        """A process is about to start. It counts only where an agent's code runs."""
        session_id = self._session.get(None)
        if session_id is None:
            return
        if self._started[session_id] >= self._most:
            raise TooManyProcesses(
                f"starting a process: this rollout has started {self._most}, which is "
                "environment.max_processes; start fewer, or raise it."
            )
        self._started[session_id] += 1

    def forget(self, session_id: str) -> None:
        self._started.pop(session_id, None)

    def _counted(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*command: Any, **options: Any) -> Any:
            self.start()
            return start(*command, **options)

        return counted
