"""The ports of the ring: a place, which may be on any machine, and a process there.

A place holds the things that must outlive a process: the listening socket, so that the address
stays the same through restarts, and on a cluster the GPUs.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import msgspec

from midflight import given
from midflight.errors import ConfigError, MidflightError, RunFailed
from midflight.run import parts

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a child write the stacks of its threads into its log."""


class HasDescriptor(Protocol):
    """A socket, or an open file."""

    def fileno(self) -> int: ...


KILLS = frozenset((-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM))
"""Exit statuses of a process that was ended from outside: by a user, or by the kernel for its
memory.
"""


class ChildOrder(msgspec.Struct, frozen=True):
    """A part's process that is to be started."""

    part: parts.ProcessKind
    name: str
    log: str
    """The file to which its prints go."""
    environ: dict[str, str]
    """It is added to the environment of the process that starts it."""
    arguments: Sequence[str] = ()
    objects: bytes = given.NOTHING
    """The objects that the program gives to its run, pickled."""
    listens: bool = False
    """It gets the listening socket of its place."""
    cwd: str | None = None
    """Its working folder, if that is not the one of the process that starts it."""


class PartFailed(RunFailed):
    """A process ended unexpectedly, and a restart may help."""

    def __init__(self, message: str, *, part: str, was_killed: bool = False) -> None:
        """`was_killed` from outside the run says nothing about the part."""
        super().__init__(message)
        self.part = part
        self.was_killed = was_killed


class Process(Protocol):
    """A process that can be ended."""

    @property
    def running(self) -> bool: ...
    async def ended(self) -> int:
        """Waits for the exit status; ended by the process, or by the end of its machine, which is
        SIGKILL.
        """
        ...

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal. It is no error if the process has ended."""
        ...


class Child(Process, Protocol):
    """A part of the run in a process of its own, here or elsewhere.

    It imports its modules as soon as it is started, and waits for its spec. It sends messages; its
    prints go to its log. It never outlives the launcher, and the processes of its session never
    outlive it (`run/orphan_guard.py`).
    """

    @property
    def part(self) -> parts.ProcessKind: ...
    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int | None:
        """The process id on this machine, or None if the process is on another."""
        ...

    @property
    def state(self) -> str:
        """The letter of the state of a process elsewhere, as its machine reported it last."""
        ...

    @property
    def was_started(self) -> bool:
        """True if `start` has ended. It has not ended if it was cut short."""
        ...

    async def start(self) -> None:
        """Starts the process, and waits until it is there. Raises `PartFailed` if its machine is
        gone.
        """
        ...

    async def tell(self, spec: parts.Spec) -> None:
        """Sends the spec. Waits for the pipe only; ended by the child reading it or dying."""
        ...

    def messages(self) -> AsyncIterator[parts.Message]:
        """All messages of the child, in order. Ends when the child closes its end of the pipe, at
        the latest by dying.
        """
        ...

    async def stacks(self) -> str:
        """The Python stacks of its threads as they are now, which go to its log too. Waits a fixed
        time for the process to write them.
        """
        ...

    def cut_log(self) -> None:
        """Cuts a log that grew too long; its end is kept."""
        ...

    def condemn(self, why: str) -> None:
        """Ends the process at once. `why` is then the reason in the error of its end."""
        ...

    def died(self, status: int) -> PartFailed:
        """The error for an end that the launcher did not ask for, with the last lines of the log."""
        ...


class Place(Protocol):
    """An address, and the resources that were set aside there for the processes of a part. Several
    processes may live in one place.
    """

    @property
    def host(self) -> str:
        """The host by which the other parts reach it."""
        ...

    @property
    def port(self) -> int: ...
    @property
    def fd(self) -> int:
        """The number of the listening socket in a child that `listens`."""
        ...

    @property
    def lost(self) -> bool:
        """Its machine is gone, and so is everything that ran there: another place must be taken."""
        ...

    @property
    def is_recalled(self) -> bool:
        """True if it is about to be taken away, alone or with its machine. Parts that can leave it
        in order should do so.
        """
        ...

    async def recalled(self) -> None:
        """Waits until it is recalled, which may never be. It is ended by that, or by
        cancellation.
        """
        ...

    def child(self, order: ChildOrder, *, inherited: Sequence[HasDescriptor] = ()) -> Child:
        """Returns a process that is to be started there. `inherited` are files of the launcher that
        the process gets under their numbers, if it runs on the launcher's machine.
        """
        ...

    def refuse(self) -> None:
        """Refuses connections from now on, once no process listens there."""
        ...

    def close(self) -> None:
        """Gives everything back; processes that still run there are killed."""
        ...


class Wants(NamedTuple):
    """The wishes of a seat on a cluster, if they are not those of all seats of its kind."""

    resources: Mapping[str, float]
    machine: str
    """The machine's address; empty is any machine."""


class Places(Protocol):
    """Gives places to the parts of one attempt at a run."""

    def close(self) -> None:
        """Closes all places, of which nothing is left then."""
        ...

    async def watch(self) -> None:
        """Finds out which places are recalled, until it is cancelled. Ends at once if none can be
        recalled.
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
        """Returns a place whose socket listens at `host`; by default at an address that the other
        parts can reach. Waits until there is room for it; ended by that, by cancellation, or,
        unless `for_ever`, by a limit: `RunFailed`. Raises `ConfigError` if it cannot listen there.
        """
        ...

    async def take_all(self, part: parts.ProcessKind, count: int) -> Sequence[Place]:
        """`count` places or none, ordered by machine and GPU. Waits until there is room for all;
        `RunFailed` after a limit.
        """
        ...


async def stop_all(processes: Sequence[Process], *, seconds: float) -> None:
    """Asks every process to end, and kills those that have not after `seconds`. Nothing is left
    running (I9).
    """
    live = [process for process in processes if process.running]
    for process in live:
        process.signal(signal.SIGTERM)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for process in live:
                    await process.ended()
    finally:  # a cancellation does not wait, and leaves nothing either
        for process in live:
            process.signal(signal.SIGKILL)
    for process in live:
        await process.ended()


def error_of(name: str, said: parts.Failed) -> MidflightError:
    """The launcher's error for a part's last message. An error that a user can mend is one message;
    a crash has its traceback (I9).
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
