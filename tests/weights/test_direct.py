"""The direct transport: a server's own workers take part in the broadcast, and its companion knows what each of them holds.

The workers here are the plugin's own code around a small model of torch; real servers have it in `tests/real_engines`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from midflight.engines.servers.command import INSIDE
from midflight.errors import EngineError, EngineUnavailable, WeightsCorrupt
from midflight.types import Meeting, TensorSpec, TransferOrder, WeightManifest, WorkerState
from midflight.weights.transports.broadcast import BroadcastPublisher
from midflight.weights.transports.deltas import DeltaPublisher
from midflight.weights.transports.direct import DirectFeed, DirectRound, RoundBroken, legs
from midflight.weights.transports.rendezvous import Join, KeepGroup, LastBucketSent, Refused

sys.path.append(str(INSIDE))
import midflight_direct

DEADLINE = 20.0
"""Seconds: more than a peer needs that is only slow."""
STOPPED_DEADLINE = 1.0
"""Seconds: what a peer that stopped costs the others."""
SPECS = (TensorSpec("a", "F32", (3,), 128, 12), TensorSpec("b", "BF16", (2, 2), 192, 8))
MANIFEST = WeightManifest(7, "ffff", "direct", "tcp://127.0.0.1:5000/secret", SPECS, receivers=2)
TERMS = Join(group="g", rank=3, world=5, port=6000, backend="gloo", bucket_bytes=64, deadline_seconds=2.0)
HELD = WorkerState(version=7, done=True, digests=("x", "y"), error="", live=6)


def ordered(group: str | None = None) -> DirectRound:
    """Two workers that are told to meet in group g, as ranks 3 and 4."""
    at = DirectRound(legs(MANIFEST, set())[0], member="m", group=group, workers=2)
    at.order(TERMS, None, host="10.0.0.1")
    at.sent(LastBucketSent(("x", "y")))
    return at


def test_a_server_asks_for_its_workers_and_tells_them_where_the_bytes_go() -> None:
    at = DirectRound(legs(MANIFEST, set())[0], member="m", group=None, workers=2)
    ask = at.ask("secret")
    assert (ask.fingerprint, ask.workers, ask.ranks, ask.group, ask.expected) == ("ffff", 2, 2, None, 2)
    order = at.order(TERMS, None, host="10.0.0.1")
    # Packed anew: the second tensor begins at the next multiple of 64, and the last ends 8 bytes after it.
    assert order.tensors == (("a", "F32", (3,), 0, 12), ("b", "BF16", (2, 2), 64, 8)) and order.num_bytes == 72
    assert (order.rank, order.workers, order.world, order.again) == (3, 2, 5, False)
    assert (order.fingerprint, order.base, order.keeps, order.serves) == ("ffff", "", False, True)


def test_what_each_worker_holds_decides_and_nothing_else() -> None:
    assert ordered().landed((HELD, replace(HELD, done=False, digests=("x",)))) is None
    assert ordered().landed((HELD, HELD)) == TERMS


@pytest.mark.parametrize(
    ("states", "why"),
    [
        ((HELD,), "has 1 workers and had 2"),
        ((HELD, HELD, HELD), "has 3 workers and had 2"),
        ((HELD, replace(HELD, version=None)), "worker 1 has none of it: it was started again"),
        ((replace(HELD, error="gone"), HELD), "worker 0 has none of it: gone"),
        ((HELD, replace(HELD, digests=("x", "z"))), "bucket 1 of worker 1 is not what was sent"),
        ((HELD, replace(HELD, digests=("x",))), "bucket 1 of worker 1 is not what was sent"),
    ],
)
def test_i7_workers_that_do_not_hold_just_what_was_sent_break_the_round(states: Sequence[WorkerState], why: str) -> None:
    with pytest.raises(RoundBroken, match=why):
        ordered().landed(states)


def test_a_group_that_the_workers_were_never_in_a_broadcast_that_ends_early_and_a_refusal_end_the_round() -> None:
    at = DirectRound(legs(MANIFEST, set())[0], member="m", group="g", workers=2)
    with pytest.raises(RoundBroken, match="never made"):
        at.order(KeepGroup(), None, host="h")
    assert at.order(KeepGroup(), TERMS, host="h").again
    with pytest.raises(RoundBroken, match="did not come to its end"):
        at.sent(None)
    with pytest.raises(WeightsCorrupt, match="was released"):
        at.order(Refused("it was released"), None, host="h")


# --- With a publisher and the plugin's own code ------------------------------------------------------------------------


class Small(nn.Module):
    """A layer whose weight is fused of two tensors, as servers have them, and an output head that is tied to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.fused = nn.Linear(width, 2 * width, bias=False)
        self.head = nn.Linear(width, 2 * width, bias=False)
        self.head.weight = self.fused.weight

    def load_weights(self, tensors: list[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.fused.weight.data.chunk(2)[name == "b"].copy_(tensor)


class Workers:
    """Of one server. `said` is how many it says to them that they are."""

    meets: Meeting = "plugin"

    def __init__(self, count: int, *, width: int = 2) -> None:
        self.models = [Small(width) for _ in range(count)]
        self.buffers = [self._buffer(model) for model in self.models]
        self.said = count
        self.orders: list[TransferOrder] = []

    def _buffer(self, model: Small) -> Any:
        def prepare(tensors: list[tuple[str, Tensor]]) -> Small:
            ready = midflight_direct.beside(model)
            ready.load_weights(tensors)
            return ready

        return midflight_direct.DoubleBuffer(prepare, lambda ready: midflight_direct.exchange(model, ready))

    def restart(self) -> None:
        self.buffers = [self._buffer(model) for model in self.models]

    async def states(self) -> Sequence[WorkerState]:
        return msgspec.convert([buffer.state() for buffer in self.buffers], tuple[WorkerState, ...])

    async def receive(self, order: TransferOrder) -> None:
        self.orders.append(order)
        try:
            for index, buffer in enumerate(self.buffers):
                buffer.begin(msgspec.to_builtins(order), index=index, workers=self.said)
        except ValueError as error:
            raise EngineError(str(error)) from error

    def serves(self, version: int) -> bool:
        return all(torch.equal(m.head.weight, m.fused.weight) and bool((m.fused.weight == version).all()) for m in self.models)

    def take(self, version: int) -> None:
        for buffer in self.buffers:
            buffer.take(version)


def tensors(version: int, width: int = 2) -> dict[str, Tensor]:
    return {name: torch.full((width, width), float(version)) for name in "ab"}


@pytest.fixture
def deadline() -> float:
    return DEADLINE


@pytest.fixture
def sender(deadline: float) -> Iterator[BroadcastPublisher]:
    with BroadcastPublisher(bucket_bytes=20, quiet_seconds=0.02, deadline_seconds=deadline) as made:
        yield made


async def bring_all(feeds: list[DirectFeed], manifest: WeightManifest, servers: list[Workers]) -> list[BaseException | None]:
    manifest = replace(manifest, receivers=len(servers))
    return await asyncio.gather(*(f.bring(manifest, s) for f, s in zip(feeds, servers, strict=True)), return_exceptions=True)


def test_the_workers_of_all_servers_get_a_version_in_one_broadcast_and_swap_it_with_what_they_serve(sender: BroadcastPublisher) -> None:
    servers, feeds = [Workers(2), Workers(1)], [DirectFeed(), DirectFeed()]

    async def main() -> None:
        for version in (1, 2):
            assert await bring_all(feeds, sender.publish(version, tensors(version)), servers) == [None, None]
            assert not any(s.serves(version) for s in servers)
            for server in servers:
                server.take(version)
            assert all(s.serves(version) for s in servers)

    asyncio.run(main())
    assert sender.service.num_groups == 1  # the trainer and three workers, who meet again
    assert [order.world for order in servers[0].orders] == [4, 4]
    # What was served before is beside it, and can be taken back.
    servers[0].take(1)
    assert servers[0].serves(1) and {s.live for s in asyncio.run(servers[0].states())} == {1}


def test_a_worker_that_dies_in_mid_broadcast_holds_up_nobody_and_leaves_what_is_served(
    sender: BroadcastPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, feeds = [Workers(1), Workers(2)], [DirectFeed(), DirectFeed()]
    parts = list[int]()
    received = midflight_direct.GroupSeat.receive

    def receive(seat: Any, part: Tensor) -> None:
        parts.append(seat.rank)
        if seat.rank == dying_rank() and parts.count(seat.rank) == 2:
            seat._group = seat._store = None  # its connections are closed, as by its death
            raise ConnectionError("killed")
        received(seat, part)

    def dying_rank() -> int:
        return servers[1].orders[0].rank + 1

    monkeypatch.setattr(midflight_direct.GroupSeat, "receive", receive)

    async def main() -> None:
        assert await bring_all(feeds, sender.publish(1, tensors(1)), servers) == [None, None]

    asyncio.run(main())
    assert sender.service.num_groups == 2  # the second is whole
    assert not any(s.serves(1) for s in servers)
    for server in servers:
        server.take(1)
    assert all(s.serves(1) for s in servers)


@pytest.mark.parametrize("deadline", [STOPPED_DEADLINE])
def test_a_server_that_was_started_again_is_met_in_a_new_group_and_one_of_another_size_is_refused(sender: BroadcastPublisher) -> None:
    server, feed = Workers(2), DirectFeed()

    async def main() -> None:
        await feed.bring(sender.publish(1, tensors(1)), server)
        server.restart()
        await feed.bring(sender.publish(2, tensors(2)), server)
        assert [order.again for order in server.orders] == [False, True, False]
        server.take(2)
        assert server.serves(2)
        with pytest.raises(ValueError, match="version 1 is not here"):
            server.take(1)
        server.said = 3
        with pytest.raises(EngineUnavailable, match="this server has 3 workers, and the order is for 2"):
            await feed.bring(sender.publish(3, tensors(3)), server)
        assert server.serves(2)

    asyncio.run(main())


def test_differences_come_straight_too_after_the_whole_version_where_a_worker_has_not_the_one_before() -> None:
    server, feed = Workers(2, width=40), DirectFeed()
    # 2 x 40 x 40 numbers of 4 bytes, in buckets of 6 400; of a difference every tensor has one frame.
    inner = BroadcastPublisher(bucket_bytes=6400, num_slots=6, quiet_seconds=0.02, deadline_seconds=DEADLINE)

    async def bring(sender: DeltaPublisher, version: int) -> list[tuple[int, bool, bool]]:
        """What was ordered: of which version, whether as a difference, and whether to be served."""
        del server.orders[:]
        await feed.bring(replace(sender.publish(version, tensors(version, 40)), receivers=1), server)
        sender.release(version - 1)
        assert not server.serves(version)
        server.take(version)
        assert server.serves(version)
        return [(order.version, bool(order.base), order.serves) for order in server.orders]

    async def main(sender: DeltaPublisher) -> None:
        assert await bring(sender, 1) == [(1, False, True)]
        assert await bring(sender, 2) == [(1, False, False), (2, True, True)]  # only now it is known that there are differences
        assert await bring(sender, 3) == [(3, True, True)] and server.orders[0].num_bytes < 1000
        server.buffers[1]._kept[1][0] ^= 1  # a bit of the bytes that are kept is wrong: what comes of them is not version 4
        assert await bring(sender, 4) == [(4, True, True), (1, False, False), (2, True, False), (3, True, False), (4, True, True)]
        assert await bring(sender, 5) == [(5, False, True)]
        assert await bring(sender, 6) == [(6, True, True)]
        server.restart()  # twice the first: it is not in the group any more
        assert await bring(sender, 7) == [(5, False, False), (5, False, False), (6, True, False), (7, True, True)]

    with DeltaPublisher(inner, full_every=4) as sender:
        asyncio.run(main(sender))


def test_what_was_exchanged_is_gone_with_its_last_user() -> None:
    """A model is large, and the collector may come late."""
    gc.disable()
    try:
        model = Small(2)
        other = midflight_direct.exchange(model, midflight_direct.beside(model))
        gone = [weakref.ref(other), weakref.ref(other.fused.weight)]
        del other
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


class Half(Small):
    """A worker's half of the rows of a layer that two workers share."""

    def __init__(self, width: int, *, second: bool) -> None:
        super().__init__(width // 2)
        self._rows = slice(width // 2, width) if second else slice(0, width // 2)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            part = self.fused.weight.data.chunk(2)[name == "b"]
            part.copy_(tensor[self._rows, : part.shape[1]])


def test_a_worker_of_several_holds_its_share_and_a_bucket_with_a_tensor_and_never_the_whole_version() -> None:
    width, bucket = 64, 3000
    server, feed = Workers(2), DirectFeed()
    server.models = [Half(width, second=False), Half(width, second=True)]
    server.restart()
    given = {name: torch.arange(width * width, dtype=torch.float32).reshape(width, width) * (1 + (name == "b")) for name in "ab"}
    with BroadcastPublisher(bucket_bytes=bucket, quiet_seconds=0.02, deadline_seconds=DEADLINE) as sender:
        asyncio.run(feed.bring(sender.publish(1, given), server))
    server.take(1)
    for model, rows in zip(server.models, (slice(0, 32), slice(32, 64)), strict=True):
        assert torch.equal(model.fused.weight, torch.cat([given["a"][rows, :32], given["b"][rows, :32]]))
    one = given["a"].nbytes
    assert [buffer._coming.most_bytes for buffer in server.buffers] == [bucket + one] * 2 and bucket + one < 2 * one


def test_weights_that_are_loaded_in_place_can_be_taken_back_too() -> None:
    model = Small(2)
    server, feed = Workers(1), DirectFeed()
    in_place = midflight_direct.LoadedInPlace(model.load_weights)
    server.models = [model]
    server.buffers = [midflight_direct.DoubleBuffer(midflight_direct.in_host_memory, in_place.swap)]
    with BroadcastPublisher(bucket_bytes=20, quiet_seconds=0.02, deadline_seconds=DEADLINE) as sender:
        for version in (1, 2, 3):
            asyncio.run(feed.bring(sender.publish(version, tensors(version)), server))
            sender.release(version)
            server.take(version)
            assert server.serves(version)
            if version == 1:  # those before it came from a folder, which the companion has
                with pytest.raises(ValueError, match="version 0 is not here"):
                    server.take(0)
            else:
                for other in (version - 1, version, version):
                    server.take(other)
                    assert server.serves(other)


def test_a_version_in_whose_place_others_were_loaded_is_not_said_to_be_served(sender: BroadcastPublisher) -> None:
    server, feed = Workers(1), DirectFeed()
    asyncio.run(feed.bring(sender.publish(1, tensors(1)), server))
    server.take(1)
    server.models[0].load_weights([("a", torch.zeros(2, 2)), ("b", torch.zeros(2, 2))])
    server.buffers[0].forget_live()
    assert [state.live for state in asyncio.run(server.states())] == [None]
    with pytest.raises(ValueError, match="version 1 is not here"):
        server.take(1)


def test_tensors_without_numbers_come_too() -> None:
    seen: list[tuple[str, tuple[int, ...]]] = []

    def prepare(arriving: Iterable[tuple[str, Tensor]]) -> list[str]:
        seen.extend((name, tuple(tensor.shape)) for name, tensor in arriving)
        return []

    server, feed = Workers(1), DirectFeed()
    server.buffers = [midflight_direct.DoubleBuffer(prepare, lambda ready: ready)]
    with BroadcastPublisher(bucket_bytes=20, quiet_seconds=0.02, deadline_seconds=DEADLINE) as sender:
        given = {"first": torch.zeros(0, 2), "a": torch.ones(7), "last": torch.zeros(2, 0)}
        asyncio.run(feed.bring(sender.publish(1, given), server))
    assert sorted(seen) == [("a", (7,)), ("first", (0, 2)), ("last", (2, 0))]


def test_a_publisher_that_is_gone_is_an_error_at_once(sender: BroadcastPublisher) -> None:
    manifest = sender.publish(1, tensors(1))
    sender.close()
    with pytest.raises(EngineUnavailable, match="the publisher does not answer"):
        asyncio.run(DirectFeed().bring(manifest, Workers(1)))
