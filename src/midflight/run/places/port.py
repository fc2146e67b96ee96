"""What the ring needs of a place and of a process there, wherever that is.

A place holds what must outlive a process: the listening socket, so that the address stands through
restarts, and on a cluster the GPUs.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from midflight.errors import ConfigError, MidflightError, RunFailed
from midflight.run import parts

STACKS_SIGNAL = signal.SIGUSR1
"""Has a child write the stacks of its threads into its log."""


class HasDescriptor(Protocol):
    """A socket, or an open file."""

    def fileno(self) -> int: ...


KILLS = frozenset((-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM))
"""Exit statuses of a process that somebody has ended: a user, or the kernel for its memory."""


class PartFailed(RunFailed):
    """A process ended that should not have, and a restart may help."""

    def __init__(self, message: str, *, part: str, was_killed: bool = False) -> None:
        """`was_killed`: from outside the run, which says nothing about the part."""
        super().__init__(message)
        self.part = part
        self.was_killed = was_killed


class Child(Protocol):
    """A part of the run in a process of its own, here or elsewhere.

    It imports what it needs as soon as it is started and waits for its spec; what it says comes
    back as messages, what it prints goes to its log. It never outlives the launcher, and what it
    has started in its session never outlives it (`run/guard.py`).
    """

    @property
    def part(self) -> parts.ProcessKind: ...
    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int | None:
        """On this machine; none where it is on another."""
        ...

    @property
    def state(self) -> str:
        """Of a process elsewhere, its state's letter as its machine said it last."""
        ...

    @property
    def was_started(self) -> bool:
        """Unless that was cut short."""
        ...

    @property
    def running(self) -> bool: ...

    async def start(self) -> None:
        """Waits until it is there. `PartFailed` where its machine is not."""
        ...

    async def tell(self, spec: parts.Spec) -> None:
        """Sends the spec. Waits for the pipe only; ended by the child reading it or dying."""
        ...

    def messages(self) -> AsyncIterator[parts.Message]:
        """Everything the child says, in order; ends when it closes its end, which it does at the
        latest by dying.
        """
        ...

    async def ended(self) -> int:
        """Waits for the exit status; ended by the child, or by the end of its machine, which is
        SIGKILL.
        """
        ...

    async def stacks(self) -> str:
        """The Python stacks of its threads as they are now, which go to its log too. Waits for it
        to write them, a fixed time.
        """
        ...

    def cut_log(self) -> None:
        """Of a log that grew too long the end is kept."""
        ...

    def condemn(self, why: str) -> None:
        """Ends it at once, for a reason that is then said to be that of its end."""
        ...

    def died(self, status: int) -> PartFailed:
        """The error for an end that nobody asked for, with the last lines of its log."""
        ...

    def signal(self, number: signal.Signals) -> None:
        """No error where it has ended."""
        ...


class Place(Protocol):
    """An address, and what was set aside there for the processes of a part. Several processes may
    live in one.
    """

    @property
    def host(self) -> str:
        """By which the others reach it."""
        ...

    @property
    def port(self) -> int: ...
    @property
    def fd(self) -> int:
        """Number of the listening socket in a child that `listens`."""
        ...

    @property
    def lost(self) -> bool:
        """Its machine is gone, and so is everything that ran there: another place must be taken."""
        ...

    @property
    def is_recalled(self) -> bool:
        """It is about to be taken away, alone or with its machine: what can leave it in order
        should.
        """
        ...

    async def recalled(self) -> None:
        """Waits until it is; for ever where nobody says so. Ended by that, or by cancellation."""
        ...

    def child(
        self,
        part: parts.ProcessKind,
        name: str,
        *,
        log: Path,
        environ: Mapping[str, str],
        arguments: Sequence[str] = (),
        objects: bytes = ...,
        listens: bool = False,
        inherited: Sequence[HasDescriptor] = (),
    ) -> Child:
        """A process that is to be started there. `objects`: what the program gives to its run,
        packed. `inherited`: files of the launcher that it gets under their numbers, where it is on
        the launcher's machine."""
        ...

    async def free_port(self) -> int:
        """One at `host` that nobody listens on now."""
        ...

    def refuse(self) -> None:
        """Nobody can connect any more, once no process listens there."""
        ...

    def close(self) -> None:
        """Gives all back; what still runs there is killed."""
        ...


class Wants(NamedTuple):
    """What a seat on a cluster asks for, where that is not what all of its kind ask for."""

    resources: Mapping[str, float]
    machine: str
    """Its address; empty is any."""


class Places(AbstractAsyncContextManager["Places", None], Protocol):
    """Gives places to the parts of one attempt at a run. At its end all are closed, and nothing of
    them is left.
    """

    @property
    def spread(self) -> bool:
        """Whether places may be on different machines."""
        ...

    async def watch(self) -> None:
        """Finds out which places are recalled, until it is cancelled; ends at once where none can
        be.
        """
        ...

    async def take(
        self,
        part: parts.ProcessKind,
        *,
        host: str | None = None,
        port: int = 0,
        for_ever: bool = False,
        wants: Wants | None = None,
    ) -> Place:
        """A place whose socket listens at `host`, by default where the other parts reach it and
        nobody else need. Waits until there is room for it; ended by that, by cancellation, or,
        unless `for_ever`, by a limit: `RunFailed`. `ConfigError` where it cannot listen there."""
        ...

    async def take_all(self, part: parts.ProcessKind, count: int) -> Sequence[Place]:
        """So many places or none, ordered by machine and GPU. Waits until there is room for all;
        `RunFailed` after a limit.
        """
        ...


async def stop_all(children: Sequence[Child], *, seconds: float) -> None:
    """Asks every child to end, and kills those that have not after `seconds`. Nothing is left
    running (I9).
    """
    live = [child for child in children if child.running]
    for child in live:
        child.signal(signal.SIGTERM)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for child in live:
                    await child.ended()
    finally:  # a cancellation does not wait, and leaves nothing either
        for child in live:
            child.signal(signal.SIGKILL)
    for child in live:
        await child.ended()


def error_of(name: str, said: parts.Failed) -> MidflightError:
    """The launcher's error for a part's last words: what a user can mend is one message, a crash
    has its traceback (I9).
    """
    match said.verdict:
        case parts.Verdict.CONFIG:
            return ConfigError(said.error)
        case parts.Verdict.FINAL:
            return RunFailed(said.error)
        case parts.Verdict.LOST:
            return parts.PartLost(f"{name}: {said.error}")
        case parts.Verdict.CRASH | parts.Verdict.KILLED:
            was_killed = said.verdict is parts.Verdict.KILLED
            return PartFailed(
                f"{name} failed: {said.error}\n{said.traceback}".rstrip(),
                part=name,
                was_killed=was_killed,
            )
