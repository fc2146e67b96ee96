"""A seat: an actor on a machine of the cluster. It holds an address and the resources that Ray set
aside there, and has our processes below it.

Only text, numbers and bytes go in and out, so nothing of ours is pickled. The seat dies with the
launcher, and its processes die with it.
"""

import asyncio
import os
import platform
import signal
import socket
from collections import deque
from contextlib import suppress
from importlib import import_module, metadata
from pathlib import Path

import msgspec

from midflight.errors import MidflightError
from midflight.observe.activity import own_work
from midflight.run.parts import SEATED_VARIABLE, ProcessKind
from midflight.run.places.port import ChildOrder
from midflight.run.places.process import LocalChild
from midflight.version import __version__
from midflight.wire.server import listen

HEAR_SECONDS = 1.0
"""An answer to `hear` comes after this time at the latest, so that the launcher knows that the
machine is there.
"""
MONITOR_VARIABLE = "RAY_memory_monitor_refresh_ms"
"""A variable of the machine's Ray. With 0 it kills no process for the memory that others use."""


class MachineGreeting(msgspec.Struct, frozen=True):
    """A machine's description of itself, before anything is started."""

    address: str
    python: str
    midflight: str
    torch: str
    kills_for_memory: bool
    """Ray's memory monitor is on."""
    has_folder: bool
    """The folder is there in which the launcher was started."""


class ActorOpened(msgspec.Struct, frozen=True):
    """The seat listens, or `error` holds the reason why it does not."""

    host: str = ""
    port: int = 0
    fd: int = -1
    machine: str = ""
    """The machine's address, as Ray knows it."""
    gpus: str = ""
    error: str = ""


class StartOrder(msgspec.Struct, frozen=True):
    """A process to be started."""

    life: str
    """An id that no other process has."""
    child: ChildOrder
    alone_seconds: float
    """`ActorChild` explains it."""


class ChildOutput(msgspec.Struct, frozen=True):
    """The lines of a child after those that were heard before, and its state."""

    lines: list[bytes]
    closed: bool
    """No line comes after these."""
    status: int | None
    """The exit status, if the child ended."""
    log: str = ""
    """The end of the child's log, if the child ended."""
    recalled: bool = False
    """The seat is about to be taken away."""
    state: str = "?"
    """The letter of the process's state."""


class ActorChild:
    """A child, and its lines that the launcher has not heard yet."""

    def __init__(self, child: LocalChild, life: str, *, alone_seconds: float) -> None:
        """Ends the child when the launcher has not asked for its lines for `alone_seconds`: then the
        launcher is gone or cut off, and may have gone on with the run elsewhere, in the same folder.
        """
        self.child = child
        self.life = life
        self.lines = deque[bytes]()
        self.first = 0
        """The number of the first of these lines."""
        self.closed = False
        self.changed = asyncio.Event()
        self._alone_seconds = alone_seconds
        self._alone = asyncio.get_running_loop().call_later(
            alone_seconds, child.signal, signal.SIGKILL
        )

    async def follow(self) -> None:
        """Waits for the child's lines; ended by its end."""
        stdout = self.child.process.stdout
        assert stdout is not None
        try:
            async for line in stdout:
                self.lines.append(line)
                self.changed.set()
        finally:
            await self.child.ended()
            self._alone.cancel()
            self.closed = True
            self.changed.set()

    def _was_asked(self) -> None:
        self._alone.cancel()
        self._alone = asyncio.get_running_loop().call_later(
            self._alone_seconds, self.child.signal, signal.SIGKILL
        )

    async def hear(self, after: int) -> ChildOutput:
        """Waits for lines after the first `after`, which were heard, or for the end; a second at
        most. The same question may come again: it changes nothing.
        """
        self._was_asked()
        while self.lines and self.first < after:
            self.lines.popleft()
            self.first += 1
        if not self.lines and not self.closed:
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(HEAR_SECONDS):
                    await self.changed.wait()
        self.child.cut_log()
        lines = list(self.lines)
        if not self.closed:
            work = own_work(self.child.pid)
            state = "?" if work is None else work.state
            return ChildOutput(lines, False, None, state=state)
        status = await self.child.ended()
        return ChildOutput(lines, True, status, self.child.last_lines())


class PlaceActor:
    """The actor. Its methods are async, because some wait long and others are called meanwhile.
    Names are those of parts, such as `engine0`.
    """

    def __init__(self, address: str = "") -> None:
        """`address` is that of this machine, if it is not the one by which Ray knows it."""
        self._address = address
        self._told: dict[str, ActorChild] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        """The tasks that follow the processes. An actor has no main task whose group could hold
        them: they end with their processes, and with the actor.
        """
        self._listener: socket.socket | None = None
        self._is_recalled = False

    def recall(self) -> bool:
        """Notes that this process is about to be ended soon; the next answer tells the launcher.
        Returns whether something can still leave in order: only engines can, and only after the
        first call.
        """
        if self._is_recalled:
            return False
        self._is_recalled = True
        return any(
            told.child.part is ProcessKind.ENGINE and told.child.running
            for told in self._told.values()
        )

    async def hello(self, folder: str, nonce: str, cwd: str) -> bytes:
        """Describes the machine. `nonce` is written into a file of that name in `folder`, for the
        launcher to find there.
        """
        with suppress(OSError):
            await asyncio.to_thread((Path(folder) / nonce).write_text, nonce)
        greeting = MachineGreeting(
            address=self._here(),
            python=platform.python_version(),
            midflight=__version__,
            torch=metadata.version("torch"),
            kills_for_memory=os.environ.get(MONITOR_VARIABLE) != "0",
            has_folder=await asyncio.to_thread(Path(cwd).is_dir),
        )
        return msgspec.json.encode(greeting)

    async def open(self, host: str, port: int) -> bytes:
        """Listens at `host`; if that is empty, at the machine's own address. A second call answers
        as the first.
        """
        try:
            self._listener = self._listener or listen(host or self._here(), port)
        except MidflightError as error:
            return msgspec.json.encode(ActorOpened(error=str(error)))
        at = self._listener.getsockname()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        host = self._here() if at[0] == "0.0.0.0" else at[0]
        opened = ActorOpened(host, at[1], self._listener.fileno(), self._here(), gpus)
        return msgspec.json.encode(opened)

    async def start(self, order: bytes) -> None:
        """Starts a process, which takes the place of the one of that name. The same order may come
        again: it changes nothing.
        """
        asked = msgspec.json.decode(order, type=StartOrder)
        name = asked.child.name
        if name in self._told and self._told[name].life == asked.life:
            return
        assert self._listener is not None
        given = {variable: value for variable, value in asked.child.environ.items() if value}
        child = LocalChild(
            msgspec.structs.replace(asked.child, environ={SEATED_VARIABLE: "1", **given}),
            inherited=[self._listener] if asked.child.listens else [],
        )
        await child.start()
        told = ActorChild(child, asked.life, alone_seconds=asked.alone_seconds)
        self._told[name] = told
        self._following[name] = asyncio.create_task(told.follow())

    async def tell(self, name: str, spec: bytes) -> None:
        await self._told[name].child.write(spec)

    async def hear(self, name: str, after: int) -> bytes:
        heard = await self._told[name].hear(after)
        return msgspec.json.encode(msgspec.structs.replace(heard, recalled=self._is_recalled))

    async def stacks(self, name: str) -> str:
        return await self._told[name].child.stacks()

    async def signal(self, name: str, number: int) -> None:
        self._told[name].child.signal(signal.Signals(number))

    async def refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _here(self) -> str:
        if not self._address:
            self._address = str(import_module("ray.util").get_node_ip_address())
        return self._address
