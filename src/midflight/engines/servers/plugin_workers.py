"""A server's workers that our plugin is in: orders to them by the server's own routes, and what they
hold. The plugin makes these routes wait for nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from midflight.engines.servers.server import ServerClient, part
from midflight.errors import EngineError
from midflight.ports import ServerWorkers
from midflight.types import Meeting, TransferOrder, Version, WorkerState

_OF = "a server that Midflight's plugin is in"


class DirectServer(ServerWorkers, Protocol):
    async def take(self, version: Version, *, recompute: bool) -> None:
        """Serves the weights that came, or goes back to the weights that were served before them.
        All workers do so, or none. Called in a pause, or between two steps.
        """
        ...

    async def let_go(self) -> None:
        """Gives back the memory of the weights that came and are not served."""
        ...


class VllmWorkers:
    """vLLM's weight-transfer engine, for which our plugin has registered a backend."""

    meets: Meeting = "plugin"

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    async def states(self) -> Sequence[WorkerState]:
        answer = await self._client.post("/collective_rpc", {"method": "midflight_landed"})
        return _states(part(answer, "results", of=_OF))

    async def receive(self, order: TransferOrder) -> None:
        await self._client.post(
            "/init_weight_transfer_engine", {"init_info": {"order": msgspec.to_builtins(order)}}
        )

    async def take(self, version: Version, *, recompute: bool) -> None:
        """See `DirectServer`. The pause has cleared caches, where they had to be."""
        await self._client.post("/start_weight_update")
        await self._client.post("/update_weights", {"update_info": {"version": version}})
        await self._client.post("/finish_weight_update", {"weight_version": str(version)})

    async def let_go(self) -> None:
        await self._client.post("/collective_rpc", {"method": "midflight_let_go"})


class SglangWorkers:
    """SGLang's weight update by a process group, which our plugin joins in the background."""

    meets: Meeting = "plugin"

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    async def states(self) -> Sequence[WorkerState]:
        info = await self._client.get("/server_info")
        return _states(part(info, "internal_states", 0, "midflight", of=_OF))

    async def receive(self, order: TransferOrder) -> None:
        body = {
            "master_address": order.host,
            "master_port": order.port,
            "rank_offset": order.rank,
            "world_size": order.world,
            "group_name": f"midflight:{msgspec.json.encode(order).decode()}",
            "backend": order.backend,
        }
        await self._client.post("/init_weights_update_group", body)

    async def take(self, version: Version, *, recompute: bool) -> None:
        """See `DirectServer`. SGLang refuses to clear its cache while requests hold keys, and only
        retracted requests hold none.
        """
        await self.serve("midflight:", version, recompute=recompute)

    async def serve(self, group: str, version: Version, *, recompute: bool) -> None:
        """Serves the version that lies where the name of the group says."""
        await self.tell(group, weight_version=str(version), flush_cache=recompute)

    async def let_go(self) -> None:
        await self.tell("midflight:let_go", flush_cache=False)

    async def tell(self, group: str, **more: object) -> None:
        """An update without tensors. The name of its group is an order to our plugin."""
        body = {"names": [], "dtypes": [], "shapes": [], "group_name": group, **more}
        await self._client.post("/update_weights_from_distributed", body)


def _states(said: object) -> Sequence[WorkerState]:
    try:
        return msgspec.convert(said, tuple[WorkerState, ...])
    except msgspec.ValidationError as error:
        raise EngineError(f"reading {str(said)[:200]!r}: {error}. Attach to {_OF}.") from error


WORKERS: Mapping[str, Callable[[ServerClient], DirectServer]] = {
    "vllm": VllmWorkers,
    "sglang": SglangWorkers,
}
