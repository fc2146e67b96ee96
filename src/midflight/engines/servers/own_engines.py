"""Weights that a server's own transfer engine receives by the server's public routes: vLLM's NCCL
engine, and SGLang's update by a process group. Untested on a GPU.

They load bucket by bucket, and each worker takes its share. Our plugin adds what they lack: it keeps
the weights that were served, and says the digest of each bucket that has arrived.

| | where it loads | the pause |
|---|---|---|
| GPUs that have room for the weights twice | into a model beside the served one, while the server generates | exchanges the two |
| others | in place | is as long as the load |
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from midflight.engines.servers.plugin_workers import SglangWorkers, VllmWorkers
from midflight.engines.servers.server import ServerClient, part
from midflight.errors import EngineError
from midflight.models.sizes import DTYPE_NAMES
from midflight.ports import ServerWorkers
from midflight.types import Meeting, TransferOrder, Version, WorkerState

TORCH_NAMES = {name: torch for torch, name in DTYPE_NAMES.items()}
"""The names that servers use, by safetensors' own. They take no others from us."""


class OwnEngine(ServerWorkers, Protocol):
    """One update at a time: `receive`, then `states`, then `serve`. `abandon` ends one that failed;
    then `take` of the version before takes its weights back.
    """

    is_beside: bool
    """True if the next `receive` loads beside the served weights, so that it needs no pause. Only
    workers that say `stages` can.
    """

    async def serve(self, version: Version, *, recompute: bool) -> None:
        """Ends an update whose buckets have all arrived as they were sent."""
        ...

    async def abandon(self) -> None:
        """Ends an update that failed. Raises nothing that the server says."""
        ...

    async def take(self, version: Version, *, recompute: bool) -> None:
        """Takes back the weights of that version, which were served before the last update."""
        ...


def _arrived(states: Sequence[WorkerState], order: TransferOrder) -> Sequence[WorkerState]:
    """The states, in the words of an order. The server has said that it has done what it was
    told.
    """
    return [
        replace(state, version=order.version, done=True, digests=state.arrived, error="")
        for state in states
    ]


def _forms(
    order: TransferOrder, names: Sequence[str]
) -> tuple[Sequence[str], Sequence[tuple[int, ...]]]:
    """The types of these tensors in the words of servers, and their shapes."""
    specs = {name: (dtype, shape) for name, dtype, shape, *_ in order.tensors}
    dtypes = [TORCH_NAMES[specs[name][0]] for name in names]
    return dtypes, [specs[name][1] for name in names]


class SglangOwnEngine:
    """SGLang's update by a process group, which its workers join as `torch.distributed` makes one."""

    meets: Meeting = "torch"
    is_beside = False

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._plugin = SglangWorkers(client)
        self._group = ""
        self._order: TransferOrder | None = None
        """The update that is under way."""

    async def states(self) -> Sequence[WorkerState]:
        states = await self._plugin.states()
        return states if self._order is None else _arrived(states, self._order)

    async def receive(self, order: TransferOrder) -> None:
        """Returns when the server has loaded the last bucket."""
        if not order.again:
            await self._join(order)
        group = self._group
        if self.is_beside:
            await self._plugin.tell("midflight:stage", flush_cache=False)
            group = f"midflight:beside:{group}"
        else:
            await self._open()
        self._order = order
        for names in order.buckets:
            dtypes, shapes = _forms(order, names)
            bucket = {
                "names": names,
                "dtypes": dtypes,
                "shapes": shapes,
                "load_format": "flattened_bucket",
                "group_name": group,
                "flush_cache": False,
            }
            await self._client.post("/update_weights_from_distributed", bucket)

    async def serve(self, version: Version, *, recompute: bool) -> None:
        """See `OwnEngine`. SGLang labels weights in an update, which may be empty."""
        if self.is_beside:
            await self._plugin.serve("midflight:swap", version, recompute=recompute)
        else:
            await self._plugin.serve(self._group, version, recompute=recompute)
            await self._client.post("/end_weight_update", {})
        self._order = None

    async def abandon(self) -> None:
        """See `OwnEngine`. SGLang knows of no update that comes beside the served weights."""
        self._order = None
        if self.is_beside:
            return
        with suppress(EngineError):
            await self._client.post("/end_weight_update", {})

    async def take(self, version: Version, *, recompute: bool) -> None:
        """Takes back the weights that the plugin has kept."""
        await self._plugin.serve("midflight:own", version, recompute=recompute)

    async def _join(self, order: TransferOrder) -> None:
        left = self._group
        self._group = ""
        if left:
            with suppress(EngineError):
                await self._client.post("/destroy_weights_update_group", {"group_name": left})
        body = {
            "master_address": order.host,
            "master_port": order.port,
            "rank_offset": order.rank,
            "world_size": order.world,
            "group_name": order.group,
            "backend": order.backend,
        }
        await self._client.post("/init_weights_update_group", body)
        self._group = order.group

    async def _open(self) -> None:
        """Begins an update. One that broke off is ended first."""
        try:
            await self._client.post("/begin_weight_update", {})
        except EngineError:
            await self._client.post("/end_weight_update", {})
            await self._client.post("/begin_weight_update", {})


class VllmOwnEngine:
    """vLLM's NCCL engine, whose workers join by NCCL's unique id."""

    meets: Meeting = "nccl_id"
    is_beside = False

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._plugin = VllmWorkers(client)
        self._joined = False
        self._unfinished = False
        """True if buckets of an update are loaded, and vLLM has not been told that it is over."""
        self._order: TransferOrder | None = None
        """The update that is under way."""

    async def states(self) -> Sequence[WorkerState]:
        states = await self._plugin.states()
        return states if self._order is None else _arrived(states, self._order)

    async def receive(self, order: TransferOrder) -> None:
        """Returns when the server has loaded the last bucket. It cuts the buckets by itself. Beside
        the served weights it loads one bucket at a time, because it makes no step meanwhile.
        """
        await self._finish()  # what it has loaded is loaded again
        if not order.again:
            await self._join(order)
        await self._prepare()
        self._order = order
        await self._open()
        if self.is_beside:
            for names in order.buckets:
                await self._update(order, names)
            await self._finish()
        else:
            await self._update(order, [name for bucket in order.buckets for name in bucket])

    async def serve(self, version: Version, *, recompute: bool) -> None:
        """See `OwnEngine`. The pause has cleared caches, where they had to be."""
        if self.is_beside:
            await self._call("midflight_swap", await self._label())
            await self._relabel(version)
        else:
            self._unfinished = False
            await self._client.post("/finish_weight_update", {"weight_version": str(version)})
        self._order = None

    async def abandon(self) -> None:
        self._order = None
        with suppress(EngineError):
            await self._finish()

    async def take(self, version: Version, *, recompute: bool) -> None:
        """Takes back the weights that the plugin has kept."""
        await self._call("midflight_take_back", str(version), await self._label())
        await self._relabel(version)

    async def _relabel(self, version: Version) -> None:
        await self._client.post("/update_weight_version", {"new_version": str(version)})

    async def _prepare(self) -> None:
        """Makes the workers load the next update beside what they serve, or keep what they serve."""
        method = "midflight_stage" if self.is_beside else "midflight_keep"
        await self._call(method, await self._label())

    async def _open(self) -> None:
        """Begins an update. One that broke off is ended first."""
        try:
            await self._client.post("/start_weight_update")
        except EngineError:
            await self._client.post("/finish_weight_update", {})
            await self._prepare()
            await self._client.post("/start_weight_update")

    async def _update(self, order: TransferOrder, names: Sequence[str]) -> None:
        dtypes, shapes = _forms(order, names)
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        self._unfinished = False  # an update that fails is over for vLLM
        await self._client.post("/update_weights", {"update_info": info})
        self._unfinished = True

    async def _finish(self) -> None:
        if self._unfinished:
            self._unfinished = False
            await self._client.post("/finish_weight_update", {})

    async def _join(self, order: TransferOrder) -> None:
        if self._joined:
            self._joined = False
            with suppress(EngineError):
                await self._client.post("/shutdown_weight_transfer_engine")
        # The second is of a group that is not of NCCL, which vLLM itself cannot make.
        place = {"nccl_unique_id_b64": order.nccl_id}
        if not order.nccl_id:
            place = {"master_address": order.host, "master_port": order.port}
        info = {
            **place,
            "rank_offset": order.rank,
            "world_size": order.world,
            "packed": True,
            "packed_buffer_size_bytes": order.bucket_bytes,
            "packed_num_buffers": 2,
        }
        await self._client.post("/init_weight_transfer_engine", {"init_info": info})
        self._joined = True

    async def _label(self) -> str:
        return str(part(await self._client.get("/weight_info"), "weight_version", of="vLLM"))

    async def _call(self, method: str, *args: str) -> None:
        await self._client.post("/collective_rpc", {"method": method, "args": args})


OWN_ENGINES: Mapping[str, Callable[[ServerClient], OwnEngine]] = {
    "vllm": VllmOwnEngine,
    "sglang": SglangOwnEngine,
}
