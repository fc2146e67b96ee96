"""Places on a cluster. Each is a seat on a machine that has room for it, and a part is a process
below that seat.

| wait | waits for | ended by |
|---|---|---|
| `RayPlaces.take`, `take_all` | a machine with room | the cluster, cancellation, or `wait_seconds` unless it may wait for ever |
| `RayPlaces.watch` | its interval, and the cluster's word on machines that are to be taken away | cancellation |
| `ClusterPlace.ask` | the seat's answer | it, the seat's death, or `lost_seconds` without an answer |
"""

import asyncio
import secrets
import signal
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from midflight.errors import ConfigError, RunFailed
from midflight.run import parts
from midflight.run.places.actor import ActorOpened, ChildOutput, StartOrder
from midflight.run.places.port import KILLS, ChildOrder, HasDescriptor, PartFailed, Wants
from midflight.run.places.process import last_lines, of_status
from midflight.run.reminder import Reminder
from midflight.wire.hosts import is_loopback

AGAIN_SECONDS = 0.5
"""The time between two calls of a seat that cannot be reached, though its machine is said to live.
"""
ALONE = 2
"""The time by which a process outlives its launcher if Ray does not end it, as a multiple of
`lost_seconds`. It is longer than the launcher waits in silence.
"""
LOOK_SECONDS = 2.0
"""The time between two questions which machines are about to be taken away: these have half a
minute or more.
"""
KILL_SECONDS = 5.0
"""The time within which a seat must report that a killed process has ended. The end of a run waits
for that, also if the machine is gone.
"""
NODE_SHARE = 0.001
"""The share of a machine's resource `node:ADDRESS` that a seat asks for which is to be there. Ray
gives each machine one of it, and waits until the machine is there.
"""
OWN_RESOURCES = frozenset(("memory", "node", "object_store_memory", "accelerator_type"))
"""Resources that Ray gives each machine, in bytes or as marks; they are not shown to users."""


class Machine(msgspec.Struct, frozen=True):
    """A machine of the cluster. `resources` are all that it has, whether or not they are in use."""

    id: str
    address: str
    resources: Mapping[str, float]


def said_of(machines: Sequence[Machine]) -> str:
    """Returns the number of machines and their total resources, in use or not."""
    totals: dict[str, float] = {}
    for machine in machines:
        for name, amount in machine.resources.items():
            if name.partition(":")[0] not in OWN_RESOURCES:
                totals[name] = totals.get(name, 0.0) + amount
    have = ", ".join(f"{name}: {totals[name]:g}" for name in sorted(totals))
    plural = "s" if len(machines) != 1 else ""
    return f"{len(machines)} machine{plural} with {have or 'nothing'}"


class Cluster(Protocol):
    """The requests that are made of Ray. A seat is an actor's handle. Calls raise Ray's own errors;
    `why_lost` tells them from others.
    """

    def machines(self) -> Sequence[Machine]:
        """The machines that live."""
        ...

    def leaving(self) -> Collection[str]:
        """Addresses of machines that live and are about to be taken away: nothing new is placed
        there.
        """
        ...

    def seat(self, resources: Mapping[str, float], *, machine: str = "") -> Any:
        """Returns a new seat, on any machine with room, or on that machine. Does not wait."""
        ...

    async def group(
        self, resources: Mapping[str, float], count: int
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        """`count` seats, on as few machines as possible, and a function that gives their room back.
        Waits until there is room for all.
        """
        ...

    def call(self, seat: Any, method: str, *given: object) -> Awaitable[Any]:
        """Sends the call at once, whether its answer is waited for or not."""
        ...

    def kill(self, seat: Any) -> None: ...


def is_unreached(error: BaseException) -> bool:
    """True if Ray could not reach the seat. The seat may live all the same."""
    return any(kind.__name__ == "ActorUnavailableError" for kind in type(error).__mro__)


def why_lost(error: BaseException) -> str | None:
    """The first line of an error of Ray; None for any other error."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if "RayError" not in kinds:
        return None
    if "OutOfMemoryError" in kinds:
        return (
            "Ray's memory monitor ended it, because its machine was full; start Ray there with "
            "RAY_memory_monitor_refresh_ms=0"
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'without a word'}"


class ClusterPlace:
    """A place on some machine of the cluster."""

    def __init__(
        self,
        cluster: Cluster,
        seat: Any,
        opened: ActorOpened,
        *,
        lost_seconds: float,
        environ: Mapping[str, str],
        closed: Callable[[], None],
    ) -> None:
        """`environ` is for all processes of the place. `closed` is called when the seat was given
        back.
        """
        self._cluster = cluster
        self._seat = seat
        self._lost_seconds = lost_seconds
        self._environ = environ
        self._closed = closed
        self.host = opened.host
        self.port = opened.port
        self.fd = opened.fd
        self.gpus = opened.gpus
        self.machine = opened.machine
        self.lost = False
        self._is_closed = False
        self._recalled = asyncio.Event()

    @property
    def is_recalled(self) -> bool:
        return self._recalled.is_set()

    async def recalled(self) -> None:
        await self._recalled.wait()

    def recall(self) -> None:
        self._recalled.set()

    def child(
        self, order: ChildOrder, *, inherited: Sequence[HasDescriptor] = ()
    ) -> "ClusterChild":
        there = msgspec.structs.replace(
            order,
            log=str(Path(order.log).absolute()),
            environ={**self._environ, **order.environ},
            cwd=str(Path.cwd()),
        )
        start = StartOrder(secrets.token_hex(8), there, alone_seconds=ALONE * self._lost_seconds)
        return ClusterChild(self, start)

    def refuse(self) -> None:
        if not self.lost:
            self.order("refuse")

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._cluster.kill(self._seat)
            self._closed()

    async def ask(self, method: str, *given: object, of: str, hurry: bool = False) -> Any:
        """Asks the seat; all questions go this way. If no answer comes, the seat counts as lost,
        for whatever reason, and `PartFailed` of the part `of` is raised.

        A seat that cannot be reached is asked again for as long as its machine is listed, at most
        `lost_seconds`; with `hurry`, at most `KILL_SECONDS`.
        """
        seconds = min(self._lost_seconds, KILL_SECONDS) if hurry else self._lost_seconds
        try:
            async with asyncio.timeout(seconds):
                while True:
                    try:
                        return await self._cluster.call(self._seat, method, *given)
                    except Exception as error:
                        why = why_lost(error)
                        if why is None:
                            raise
                        if not is_unreached(error) or not self._is_listed():
                            raise self._gone(why, of=of) from error
                    await asyncio.sleep(AGAIN_SECONDS)
        except TimeoutError as error:
            raise self._gone(f"nothing was heard of it for {seconds:g} s", of=of) from error

    def _is_listed(self) -> bool:
        return any(machine.address == self.machine for machine in self._cluster.machines())

    def order(self, method: str, *given: object) -> None:
        """Sends the call without a wait for an answer. An error shows at the next question."""
        try:
            self._cluster.call(self._seat, method, *given)
        except Exception as error:
            if why_lost(error) is None:
                raise

    def _gone(self, why: str, *, of: str) -> PartFailed:
        self.lost = True
        return PartFailed(f"{of} has lost its seat on {self.machine}: {why}", part=of)


class ClusterChild:
    """A `Child` below a seat. The death of its machine is its death by SIGKILL."""

    pid = None

    def __init__(self, place: ClusterPlace, order: StartOrder) -> None:
        self.part = order.child.part
        self.name = order.child.name
        self._place = place
        self._order = order
        self._lock = asyncio.Lock()
        self._unread = deque[bytes]()
        self._heard = 0
        """The number of lines that came."""
        self._closed = False
        self._status: int | None = None
        self._log = ""
        self._why: str | None = None
        """The reason of an end that did not come from the process itself."""
        self._killed = False
        self.state = "?"
        self.was_started = False

    async def start(self) -> None:
        await self._ask("start", msgspec.json.encode(self._order))
        self.was_started = True

    @property
    def running(self) -> bool:
        return self.was_started and self._status is None

    async def tell(self, spec: parts.Spec) -> None:
        await self._ask("tell", self.name, parts.encode(spec) + b"\n")

    async def messages(self) -> AsyncIterator[parts.Message]:
        while self._unread or not self._closed:
            if self._unread:
                yield parts.decode_message(self._unread.popleft())
            else:
                await self._hear()

    async def ended(self) -> int:
        while self._status is None:
            await self._hear()
        return self._status

    async def _hear(self) -> None:
        """Waits for its next lines, or for its end. The loss of its seat is its end."""
        async with self._lock:
            if self._status is not None:
                return
            try:
                answer = await self._ask("hear", self.name, self._heard, hurry=self._killed)
            except PartFailed as lost:
                self._why = str(lost)
                self._closed = True
                self._status = -signal.SIGKILL
                self._log = last_lines(Path(self._order.child.log))
                return
            heard = msgspec.json.decode(answer, type=ChildOutput)
            if heard.recalled:
                self._place.recall()
            self._unread += heard.lines
            self._heard += len(heard.lines)
            self._closed = heard.closed
            self._status = heard.status
            self._log = heard.log
            self.state = heard.state

    async def stacks(self) -> str:
        with suppress(PartFailed):
            return await self._ask("stacks", self.name)
        return ""

    def cut_log(self) -> None:
        """Does nothing: the seat cuts the log."""

    def condemn(self, why: str) -> None:
        self._why = f"{why}. It was ended."
        self.signal(signal.SIGKILL)

    def died(self, status: int) -> PartFailed:
        how = f"{self.name} ended with {of_status(status)} on {self._place.machine}"
        said = self._why or how
        was_killed = self._why is None and status in KILLS
        return PartFailed(
            f"{said}; the end of {self._order.child.log}:\n{self._log}",
            part=self.name,
            was_killed=was_killed,
        )

    def signal(self, number: signal.Signals) -> None:
        if self.running and not self._place.lost:
            self._killed = self._killed or number is signal.SIGKILL
            self._place.order("signal", self.name, int(number))

    async def _ask(self, method: str, *given: object, hurry: bool = False) -> Any:
        return await self._place.ask(method, *given, of=self.name, hurry=hurry)


@dataclass(slots=True)
class RayPlaces:
    """Gives seats of a cluster to the parts. All seats of an attempt at a run are given back at its
    end, and die with this process at the latest.
    """

    cluster: Cluster
    resources: Mapping[parts.ProcessKind, Mapping[str, float]]
    """The resources that a seat of each kind asks for."""
    lost_seconds: float
    wait_seconds: float
    environ: Mapping[str, str]
    """It is for all processes."""
    say: Callable[[str], None]
    """Gets a message about each wait."""
    taken: list[ClusterPlace] = field(default_factory=list[ClusterPlace], init=False)

    def close(self) -> None:
        for place in self.taken:
            place.close()

    async def watch(self) -> None:
        while True:
            leaving = await asyncio.to_thread(self.cluster.leaving)
            for place in self.taken:
                if place.machine in leaving:
                    place.recall()
            await asyncio.sleep(LOOK_SECONDS)

    async def take(
        self,
        part: parts.ProcessKind,
        *,
        host: str | None = None,
        port: int = 0,
        for_ever: bool = False,
        wants: Wants | None = None,
    ) -> ClusterPlace:
        asked, machine = wants or Wants(self.resources[part], "")
        if machine:
            asked = {**asked, f"node:{machine}": NODE_SHARE}
        at = "" if host is None or is_loopback(host) else host
        async with self._patience(part, 1, asked, for_ever=for_ever):
            seat = self.cluster.seat(asked)
            try:
                return await self._opened(part, seat, at, port)
            except BaseException:
                self.cluster.kill(seat)
                raise

    async def take_all(self, part: parts.ProcessKind, count: int) -> Sequence[ClusterPlace]:
        asked = self.resources[part]
        async with self._patience(part, count, asked):
            seats, give_back = await self.cluster.group(asked, count)
        closed = 0

        def close() -> None:
            nonlocal closed
            closed += 1
            if closed == count:
                give_back()

        try:
            async with self._patience(part, count, asked):
                taken = [await self._opened(part, seat, "", 0, closed=close) for seat in seats]
        except BaseException:
            give_back()
            raise
        return sorted(taken, key=lambda place: (place.machine, place.gpus))

    async def _opened(
        self,
        part: parts.ProcessKind,
        seat: Any,
        host: str,
        port: int,
        *,
        closed: Callable[[], None] = lambda: None,
    ) -> ClusterPlace:
        """Waits until the seat is there, however long that takes."""
        try:
            answer = await self.cluster.call(seat, "open", host, port)
            opened = msgspec.json.decode(answer, type=ActorOpened)
        except Exception as error:
            why = why_lost(error)
            if why is None:
                raise
            raise PartFailed(f"{part} did not get its seat: {why}", part=str(part)) from error
        if opened.error:
            raise ConfigError(opened.error)
        place = ClusterPlace(
            self.cluster,
            seat,
            opened,
            lost_seconds=self.lost_seconds,
            environ=self.environ,
            closed=closed,
        )
        self.taken.append(place)
        return place

    @asynccontextmanager
    async def _patience(
        self,
        part: parts.ProcessKind,
        count: int,
        resources: Mapping[str, float],
        *,
        for_ever: bool = False,
    ) -> AsyncGenerator[None]:
        """Surrounds a wait for seats and reports it to the user again and again. Raises `RunFailed`
        after `wait_seconds`, unless the wait may last `for_ever`.
        """
        asked = ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())
        wanted = f"{count} x a machine with {asked or 'room'}"

        def say(_: float) -> None:
            self.say(
                f"{part} waits for {wanted}: what there is has no room, or is slow to start a seat "
                f"({said_of(self.cluster.machines())})"
            )

        limit = asyncio.timeout(None if for_ever else self.wait_seconds)
        try:
            with closing(Reminder(say)):
                async with limit:
                    yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise RunFailed(
                f"{part} has waited {self.wait_seconds:g} s for {wanted}, and had no room among "
                f"{said_of(self.cluster.machines())}; add machines or end what is on them, and go "
                "on with --resume, or raise cluster.wait_seconds."
            ) from None
