"""Places on this machine: a listening socket for each part, and the processes below this one."""

import asyncio
import socket
from collections.abc import Sequence

from midflight.run import parts
from midflight.run.places.port import ChildOrder, HasDescriptor, Wants
from midflight.run.places.process import LocalChild
from midflight.wire.server import listen

HOST = "127.0.0.1"


class LocalPlace:
    lost = False
    is_recalled = False

    def __init__(self, listener: socket.socket) -> None:
        self.fd = listener.fileno()
        self._listener = listener
        self.host, self.port = listener.getsockname()[:2]

    def child(self, order: ChildOrder, *, inherited: Sequence[HasDescriptor] = ()) -> LocalChild:
        sockets = (self._listener,) if order.listens else ()
        return LocalChild(order, inherited=(*sockets, *inherited))

    async def recalled(self) -> None:
        await asyncio.Event().wait()

    def refuse(self) -> None:
        self._listener.close()

    def close(self) -> None:
        """Closes the socket. Processes are ended by the code that started them."""
        self._listener.close()


class LocalPlaces:
    def __init__(self) -> None:
        self._taken: list[LocalPlace] = []

    def close(self) -> None:
        for place in self._taken:
            place.close()

    async def watch(self) -> None:
        """Ends at once: no place is taken away here."""

    async def take(
        self,
        part: parts.ProcessKind,
        *,
        host: str | None = None,
        port: int = 0,
        for_ever: bool = False,
        wants: Wants | None = None,
    ) -> LocalPlace:
        place = LocalPlace(listen(host or HOST, port))
        self._taken.append(place)
        return place

    async def take_all(self, part: parts.ProcessKind, count: int) -> Sequence[LocalPlace]:
        return [await self.take(part) for _ in range(count)]
