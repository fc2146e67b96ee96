"""The launcher as a client of the gateways: it tells them which engines come and go, and that a
worker is ended for what no agent did. Nothing else does it ask of another process.
"""

import asyncio
from contextlib import suppress

import msgspec

from midflight.run.api import worker_wire as wire
from midflight.run.api.membership import EngineAddress
from midflight.run.api.membership_client import MembershipClient
from midflight.run.api.service import LIFE, PREFIX, DeviceOwner
from midflight.run.launcher.ring_context import RingContext
from midflight.run.parts import PartLost
from midflight.run.places.port import PartFailed
from midflight.wire.client import HttpClient

AGAIN_SECONDS = 2.0
"""The time between two attempts at a gateway that does not answer yet."""


class GatewayClient:
    """Waits for the answers. A gateway that is away sends no requests to an engine, so that nobody
    has to be told that the engine goes.
    """

    def __init__(self, context: RingContext) -> None:
        self._context = context

    async def spare(self, worker: str, *, url: str) -> None:
        """Tells the worker's gateway, at `url`, that no agent is to blame for the worker's end.
        Waits `stall_seconds` at most: a gateway that does not answer hangs itself.
        """
        said = wire.encode(wire.WorkerSpared(worker))
        seconds = self._context.config.run.stall_seconds
        with suppress(PartLost):
            async with self._http(url) as http:
                await http.call("POST", wire.SPARED_PATH, said, seconds=seconds)

    async def trainer_gone(self, life: int) -> None:
        """Tells the gateway that the trainer of that life has ended with all its ranks, so that
        engines which sleep for it wake. Waits for them, `stall_seconds` at most: the next trainer
        would find them asleep or on their way.
        """
        seconds = self._context.config.run.stall_seconds
        said = msgspec.json.encode({"of": DeviceOwner.ENGINES.value})
        headers = {LIFE: str(life)}
        with suppress(PartLost):
            async with self._http(self._context.gateways[0]) as http:
                await http.call("POST", f"{PREFIX}/turn", said, headers=headers, seconds=seconds)

    def _http(self, url: str) -> HttpClient:
        return HttpClient(url, lost=PartLost, token=self._context.control_token)

    async def announce(self, engine: str, address: str) -> None:
        """Tells the gateways where an engine is. Raises `PartFailed` if one does not admit it."""
        async with asyncio.TaskGroup() as told:
            for url in self._context.gateways:
                told.create_task(self._announce(engine, address, url=url))

    async def _announce(self, engine: str, address: str, *, url: str) -> None:
        """The gateway may not serve yet, and it asks the engine about itself, which takes longer
        the larger the engine's weights are.
        """
        config = self._context.config
        seconds = config.cluster.wait_seconds + config.run.stall_seconds
        async with self._http(url) as http:
            members = MembershipClient(http)
            while True:
                try:
                    answer = await members.put(engine, EngineAddress(address), seconds=seconds)
                    break
                except PartLost:
                    await asyncio.sleep(AGAIN_SECONDS)
        if answer.status not in (200, 201):
            said = answer.content.decode(errors="replace")
            raise PartFailed(
                f"{engine} at {address} was not admitted ({answer.status}): {said}", part=engine
            )

    async def leave(self, engine: str) -> str:
        """Waits for the requests of an engine, which end there or go on elsewhere. Returns the end
        of a sentence that says what became of them.
        """
        async with asyncio.TaskGroup() as told:
            urls = self._context.gateways
            left = [told.create_task(self._leave(engine, url=url)) for url in urls]
        answers = [task.result() for task in left]
        for answer in answers:
            if isinstance(answer, PartLost):
                return f"; the gateway {answer}"
        counts = [answer for answer in answers if isinstance(answer, int)]
        return f": {sum(counts)} requests go on elsewhere" if counts else ""

    async def _leave(self, engine: str, *, url: str) -> int | PartLost | None:
        """The number of requests that the gateway still had there; None if it does not know the
        engine.
        """
        config = self._context.config
        seconds = config.gateway.drain_seconds + config.run.stall_seconds
        try:
            async with self._http(url) as http:
                answer = await MembershipClient(http).leave(engine, force=True, seconds=seconds)
        except PartLost as lost:
            return lost
        if answer.status != 200:
            return None
        return msgspec.json.decode(answer.content)["resumed"]

    async def give_up(self, engine: str) -> None:
        """Tells the gateways that an engine will not come back, so that requests do not wait for
        it.
        """
        async with asyncio.TaskGroup() as told:
            for url in self._context.gateways:
                told.create_task(self._give_up(engine, url=url))

    async def _give_up(self, engine: str, *, url: str) -> None:
        seconds = self._context.config.run.stall_seconds
        with suppress(PartLost):
            async with self._http(url) as http:
                await MembershipClient(http).leave(
                    engine, force=True, drain_seconds=0, for_good=True, seconds=seconds
                )
