"""Weights that come straight into a server's workers, by the server's own routes. Our plugin inside
the server makes these routes wait for nothing.

The companion gives orders and asks what the workers hold. In the pause the workers only exchange
the weights that they serve for those that have come.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from midflight.engines.servers.server import ServerClient, part
from midflight.errors import EngineError, EngineUnavailable
from midflight.ports import ServerWorkers, WorkerFeed
from midflight.types import TransferOrder, Version, WeightManifest, WorkerState

_log = logging.getLogger(__name__)
TRANSPORT = "direct"
_OF = "a server that Midflight's plugin is in"


class DirectServer(ServerWorkers, Protocol):
    async def take(self, version: Version, *, recompute: bool) -> None:
        """Serves the weights that came, or goes back to the weights that were served before them.
        All workers do so, or none. Called in a pause, or between two steps.
        """
        ...


class VllmWorkers:
    """vLLM's weight-transfer engine, for which our plugin has registered a backend."""

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


class SglangWorkers:
    """SGLang's weight update by a process group, which our plugin joins in the background."""

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
        body: dict[str, object] = {
            "names": [],
            "dtypes": [],
            "shapes": [],
            "group_name": "midflight:",
            "weight_version": str(version),
            "flush_cache": recompute,
        }
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


class DirectLoader:
    """Decides which versions come straight to one server's workers, and brings them."""

    def __init__(self, kind: str, feed: WorkerFeed) -> None:
        self._make = WORKERS[kind]
        self._feed = feed
        self._is_open: bool | None = None
        """True if the server can receive in this way. It is known after the first version."""
        self._changes = False
        """True if differences may be sent to the server."""
        self._said = set[str]()

    async def opens(
        self, client: ServerClient, manifest: WeightManifest, *, same_names: bool
    ) -> bool:
        """True if this version goes straight to the workers. Otherwise it is written as a folder
        like every other, and the log says why.
        """
        if manifest.transport != TRANSPORT:
            return False
        if not same_names:
            return self._closed(client, "its tensors have other names, or are adapters")
        if not self._is_open:
            try:
                states = await self._make(client).states()
            except EngineUnavailable:
                raise
            except EngineError as error:
                return self._closed(client, str(error))
            self._is_open = len(states) > 0
            self._changes = all(state.held is not None for state in states)
        if manifest.deltas and not self._changes:
            return self._closed(
                client, "it is a difference, for which the server's interpreter must have xxhash"
            )
        return True

    async def bring(self, client: ServerClient, manifest: WeightManifest) -> None:
        """Waits until each worker holds the version. The server generates meanwhile."""
        await self._feed.bring(manifest, self._make(client))

    async def take(self, client: ServerClient, version: Version, *, recompute: bool) -> None:
        await self._make(client).take(version, recompute=recompute)

    def _closed(self, client: ServerClient, why: str) -> bool:
        """Returns false, and logs each reason once."""
        if why not in self._said:
            _log.warning(
                "engine %s gets its weights from a folder and not straight from the trainer: %s",
                client.name,
                why,
            )
            self._said.add(why)
        return False
