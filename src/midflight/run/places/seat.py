"""A seat: an actor on a machine of the cluster, which holds an address and what Ray set aside
there, and has our processes below it.

Only text, numbers and bytes go in and out, so nothing of ours is pickled. It dies with the
launcher, and its processes with it.
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
from midflight.run.parts import SEATED_VARIABLE, ProcessKind
from midflight.run.places.process import LocalChild, last_lines
from midflight.run.places.vitals import vitals_of
from midflight.version import __version__
from midflight.wire.server import listen

HEAR_SECONDS = 1.0
"""An answer to `hear` comes at the latest after this, so that whoever asks knows that the machine
is there.
"""
MONITOR_VARIABLE = "RAY_memory_monitor_refresh_ms"
"""Of the machine's Ray: 0 has it kill nobody for what others keep in memory."""


class Greeting(msgspec.Struct, frozen=True):
    """What a machine says of itself before anything is started."""

    address: str
    python: str
    midflight: str
    torch: str
    kills_for_memory: bool
    """Ray's memory monitor is on."""
    has_folder: bool
    """That the launcher was started in."""


class SeatOpened(msgspec.Struct, frozen=True):
    """The seat listens, or `error` says why it does not."""

    host: str = ""
    port: int = 0
    fd: int = -1
    machine: str = ""
    """Its address, as Ray knows it."""
    gpus: str = ""
    error: str = ""


class Order(msgspec.Struct, frozen=True):
    """A process to be started."""

    life: str
    """No other process has it."""
    log: str
    cwd: str
    environ: dict[str, str]
    arguments: list[str]
    objects: bytes
    """What the program gives to its run, packed."""
    listens: bool
    alone_seconds: float
    """See `BelowSeat`."""


class Heard(msgspec.Struct, frozen=True):
    """What a child has said behind the lines that were heard before."""

    lines: list[bytes]
    closed: bool
    """Nothing comes behind them."""
    status: int | None
    """With which it ended."""
    log: str = ""
    """The end of its log, where it ended."""
    recalled: bool = False
    """The seat is about to be taken away."""
    state: str = "?"
    """Its process's."""


class BelowSeat:
    """A child and what it has said that nobody has heard yet."""

    def __init__(self, child: LocalChild, life: str, *, alone_seconds: float) -> None:
        """Ends the child when nobody has heard it for `alone_seconds`: the launcher is gone or cut
        off then, and may have gone on with the run elsewhere, in the same folder."""
        self.child = child
        self.life = life
        self.lines = deque[bytes]()
        self.first = 0
        """Number of the first of them."""
        self.closed = False
        self.changed = asyncio.Event()
        self._alone_seconds = alone_seconds
        self._alone = asyncio.get_running_loop().call_later(
            alone_seconds, child.signal, signal.SIGKILL
        )

    async def follow(self) -> None:
        """Waits for what the child says; ended by its end."""
        stdout = self.child.process.stdout
        assert stdout is not None
        try:
            while line := await stdout.readline():
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

    async def hear(self, after: int) -> Heard:
        """Waits for lines behind the first `after`, which were heard, or for the end; a second at
        most. To be asked again it changes nothing.
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
        if not self.closed:
            return Heard([*self.lines], False, None, state=vitals_of(self.child.pid).state)
        return Heard([*self.lines], True, await self.child.ended(), last_lines(self.child.log))


class SeatActor:
    """The actor. All methods are async: some wait long, and others are called meanwhile. Names are
    of parts, such as `engine0`.
    """

    def __init__(self, address: str = "") -> None:
        """`address` of this machine, if not the one that Ray knows it by."""
        self._address = address
        self._told: dict[str, BelowSeat] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        """An actor has no main task whose group these could be in: they end with their processes,
        and with the actor.
        """
        self._listener: socket.socket | None = None
        self._is_recalled = False

    def recall(self) -> bool:
        """The machine, or whoever ends this process, will not wait long. Whether the launcher can
        make something of that, which it is told with the next answer: an engine leaves in order. Of
        the other parts none can, and asked twice none should."""
        first = not self._is_recalled
        self._is_recalled = True
        return first and any(
            told.child.part is ProcessKind.ENGINE and told.child.running
            for told in self._told.values()
        )

    async def hello(self, folder: str, nonce: str, cwd: str) -> bytes:
        """What the machine is. `nonce` is written into a file of that name in `folder`, for the
        launcher to find there.
        """
        with suppress(OSError):
            await asyncio.to_thread((Path(folder) / nonce).write_text, nonce)
        return msgspec.json.encode(
            Greeting(
                address=self._here(),
                python=platform.python_version(),
                midflight=__version__,
                torch=metadata.version("torch"),
                kills_for_memory=os.environ.get(MONITOR_VARIABLE) != "0",
                has_folder=await asyncio.to_thread(Path(cwd).is_dir),
            )
        )

    async def open(self, host: str, port: int) -> bytes:
        """Listens at `host`; where that is empty, at the machine's own address. A second call
        answers as the first.
        """
        try:
            self._listener = self._listener or listen(host or self._here(), port)
        except MidflightError as error:
            return msgspec.json.encode(SeatOpened(error=str(error)))
        at = self._listener.getsockname()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        host = self._here() if at[0] == "0.0.0.0" else at[0]
        return msgspec.json.encode(
            SeatOpened(host, at[1], self._listener.fileno(), self._here(), gpus)
        )

    async def start(self, part: str, name: str, order: bytes) -> None:
        """A process, which takes the place of the one of that name. To be asked again for the same
        process changes nothing.
        """
        asked = msgspec.json.decode(order, type=Order)
        if name in self._told and self._told[name].life == asked.life:
            return
        assert self._listener is not None
        child = LocalChild(
            ProcessKind(part),
            name,
            log=Path(asked.log),
            environ={
                SEATED_VARIABLE: "1",
                **{name: value for name, value in asked.environ.items() if value},
            },
            inherited=[self._listener] if asked.listens else [],
            arguments=asked.arguments,
            objects=asked.objects,
            cwd=Path(asked.cwd),
        )
        await child.start()
        self._told[name] = told = BelowSeat(child, asked.life, alone_seconds=asked.alone_seconds)
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

    async def free_port(self) -> int:
        with socket.create_server((self._here(), 0)) as found:
            return found.getsockname()[1]

    async def refuse(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _here(self) -> str:
        if not self._address:
            self._address = str(import_module("ray.util").get_node_ip_address())
        return self._address
