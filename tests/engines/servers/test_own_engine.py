"""The companion where a server's own transfer engine receives versions: a stub of its routes on the other side, and real broadcasts between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engines.models import ask
from tests.engines.reading import collect
from tests.engines.servers.fakes import attached
from tests.engines.servers.own_sglang import StubSglang
from tests.engines.servers.own_vllm import StubVllm
from tests.engines.servers.own_workers import Worker
from tests.models.tiny import tiny_model
from torch import Tensor

from midflight.engines.servers.direct import DirectLoader
from midflight.engines.servers.engine import ServerEngine
from midflight.errors import EngineError
from midflight.models.names import named_tensors
from midflight.weights.transports.broadcast import BroadcastPublisher
from midflight.weights.transports.direct import DirectFeed
from midflight.weights.transports.process_group import BroadcastGroup
from midflight.weights.transports.rendezvous import packs

Stub = StubVllm | StubSglang
Kind = type[StubVllm] | type[StubSglang]
Test = Callable[[Stub, ServerEngine, BroadcastPublisher], Awaitable[None]]
both = pytest.mark.parametrize("kind", [StubVllm, StubSglang])
JOINS = {StubVllm: "init_weight_transfer_engine", StubSglang: "init_weights_update_group"}


def in_pause(kind: Kind, num_buckets: int) -> list[str]:
    """The orders by which a version comes and is served. vLLM cuts the buckets by itself; SGLang labels weights in one more update."""
    if kind is StubVllm:
        return ["start_weight_update", "update_weights", "finish_weight_update"]
    return ["begin_weight_update", *["update_weights_from_distributed"] * (num_buckets + 1), "end_weight_update"]


def before_pause(kind: Kind, num_buckets: int) -> list[str]:
    """Those by which it comes beside what is served."""
    if kind is StubVllm:
        return ["start_weight_update", *["update_weights"] * num_buckets, "finish_weight_update"]
    return ["midflight:stage", *["midflight:beside"] * num_buckets]


def weights(version: int) -> Mapping[str, Tensor]:
    return {name: tensor * (1 + version) for name, tensor in named_tensors(tiny_model()).items()}


def on(kind: Kind, tmp_path: Path, test: Test, *, workers: int = 2, bucket_bytes: int = 5000, stages: bool = False) -> None:
    """Without `stages` the last worker has no room for weights beside those that it serves."""

    async def main() -> None:
        stub = kind(weights(0), workers=workers)
        stub.workers[-1].update.can_stage = stages
        way = DirectLoader("vllm" if kind is StubVllm else "sglang", DirectFeed(), by_own_engine=True)
        with BroadcastPublisher(bucket_bytes=bucket_bytes, quiet_seconds=0.02) as sender:
            async with asyncio.timeout(60), attached(stub, tmp_path, direct=way) as (engine, _):
                stub.orders.clear()
                stub.calls.clear()
                await test(stub, engine, sender)
        assert not list((tmp_path / "staging").glob("*/model.safetensors"))

    asyncio.run(main())


async def update(engine: ServerEngine, sender: BroadcastPublisher, version: int) -> None:
    manifest = sender.publish(version, weights(version))
    await engine.stage(manifest)
    attestation = await engine.commit(version)
    assert (attestation.version, attestation.fingerprint) == (version, manifest.fingerprint)
    sender.release(version)


@both
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [100, 5000, 10**8])
def test_i7_versions_come_by_its_own_routes_in_a_pause_each_worker_takes_its_share(
    kind: Kind, tmp_path: Path, workers: int, bucket_bytes: int
) -> None:
    async def test(stub: Stub, engine: ServerEngine, sender: BroadcastPublisher) -> None:
        manifest = sender.publish(1, weights(1))
        orders = in_pause(kind, len([*packs(manifest.tensors, bucket_bytes)]))
        await engine.stage(manifest)
        assert not stub.orders and stub.holds(weights(0))  # nothing moves before the pause
        await engine.commit(1)
        assert stub.orders == [JOINS[kind], *orders] and stub.holds(weights(1)) and stub.label == "1"
        routes = [path.strip("/") for path, _ in stub.calls]
        pause, resume = ("pause", "resume") if kind is StubVllm else ("pause_generation", "continue_generation")
        assert routes.index(pause) < routes.index(orders[1]) < routes.index(resume)
        stub.orders.clear()
        await update(engine, sender, 2)
        assert stub.orders == orders and stub.holds(weights(2)) and sender.service.num_groups == 1

    on(kind, tmp_path, test, workers=workers, bucket_bytes=bucket_bytes)


@both
def test_i7_a_bucket_that_did_not_arrive_as_it_was_sent_is_found_and_the_version_before_is_put_back(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(stub: Stub, engine: ServerEngine, sender: BroadcastPublisher) -> None:
        await update(engine, sender, 1)
        await engine.stage(sender.publish(2, weights(2)))
        sent = BroadcastGroup.broadcast
        with monkeypatch.context() as changed:
            changed.setattr(BroadcastGroup, "broadcast", lambda group, part: sent(group, part.clone().bitwise_xor_(1)))
            with pytest.raises(EngineError, match=r"bucket 0 of worker 0 is not what was sent.*It serves version 1 again"):
                await engine.commit(2)
        assert stub.holds(weights(1)) and stub.label == "1" and not (await engine.health()).paused
        await engine.commit(2)
        assert stub.holds(weights(2)) and stub.label == "2"

    on(kind, tmp_path, test)


@both
@pytest.mark.parametrize("bucket", [0, 1])
def test_i7_a_worker_that_cannot_load_a_bucket_gets_back_what_it_served_though_its_model_is_open(
    kind: Kind, tmp_path: Path, bucket: int
) -> None:
    async def test(stub: Stub, engine: ServerEngine, sender: BroadcastPublisher) -> None:
        await update(engine, sender, 1)
        places = [parameter.data_ptr() for worker in stub.workers for parameter in worker.model.parameters()]
        stub.workers[1].fails_at = bucket
        await engine.stage(sender.publish(2, weights(2)))
        with pytest.raises(EngineError, match="It serves version 1 again"):
            await engine.commit(2)
        assert stub.holds(weights(1)) and stub.label == "1"
        stub.workers[1].fails_at = None
        await engine.commit(2)
        assert stub.holds(weights(2))
        assert [parameter.data_ptr() for worker in stub.workers for parameter in worker.model.parameters()] == places

    on(kind, tmp_path, test)


@both
def test_i7_a_version_that_is_gone_before_an_update_has_begun_leaves_what_is_served(kind: Kind, tmp_path: Path) -> None:
    async def test(stub: Stub, engine: ServerEngine, sender: BroadcastPublisher) -> None:
        for version in (1, 2):
            await update(engine, sender, version)
        await engine.stage(sender.publish(3, weights(3)))
        sender.release(3)
        stub.orders.clear()
        with pytest.raises(EngineError, match=r"not published or were released.*It serves version 2 again"):
            await engine.commit(3)
        assert not set(stub.orders) & set(in_pause(kind, 1)[:2]) and stub.holds(weights(2)) and stub.label == "2"
        assert not (await engine.health()).paused
        await update(engine, sender, 4)
        assert stub.holds(weights(4))

    on(kind, tmp_path, test)


# --- Beside the weights that are served -----------------------------------------------------------


@both
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [100, 5000, 10**8])
def test_i7_where_all_workers_have_room_a_version_comes_bucket_by_bucket_before_the_pause_which_only_swaps(
    kind: Kind, tmp_path: Path, workers: int, bucket_bytes: int
) -> None:
    async def test(stub: Stub, engine: ServerEngine, sender: BroadcastPublisher) -> None:
        for version in (1, 2, 3):
            manifest = sender.publish(version, weights(version))
            stub.orders.clear()
            await engine.stage(manifest)
            orders = before_pause(kind, len([*packs(manifest.tensors, bucket_bytes)]))
            assert [order for order in stub.orders if order != JOINS[kind]] == orders
            assert stub.holds(weights(version - 1)) and stub.label == str(version - 1)
            stub.orders.clear()
            stub.calls.clear()
            attestation = await engine.commit(version)
            assert attestation.fingerprint == manifest.fingerprint
            assert stub.holds(weights(version)) and stub.label == str(version)
            methods = [body.get("method") for _, body in stub.calls if "method" in body]
            assert (stub.orders, methods.count("midflight_swap")) == (([], 1) if kind is StubVllm else (["midflight:swap"], 0))
            sender.release(version)
        assert sender.service.num_groups == 1

    on(kind, tmp_path, test, workers=workers, bucket_bytes=bucket_bytes, stages=True)


@both
def test_answers_go_on_while_a_version_comes_beside(kind: Kind, tmp_path: Path) -> None:
    """SGLang by itself waits for their end before it takes a bucket."""

    async def test(stub: Stub, engine: ServerEngine, sender: BroadcastPublisher) -> None:
        stub.step_seconds = 0.1
        answer = asyncio.create_task(collect(engine, ask("abc", max_tokens=30)))
        while not any(path == stub.generate for path, _ in stub.calls):
            await asyncio.sleep(0.01)
        await engine.stage(sender.publish(1, weights(1)))
        assert not answer.done() and stub.holds(weights(0))
        stub.step_seconds = 0.001
        await answer
        await engine.commit(1)
        assert stub.holds(weights(1))

    on(kind, tmp_path, test, stages=True)


@both
def test_i7_a_bucket_that_comes_damaged_or_cannot_be_loaded_beside_leaves_what_is_served_and_the_next_attempt_works(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(stub: Stub, engine: ServerEngine, sender: BroadcastPublisher) -> None:
        await update(engine, sender, 1)
        manifest = sender.publish(2, weights(2))
        sent = BroadcastGroup.broadcast
        with monkeypatch.context() as changed:
            changed.setattr(BroadcastGroup, "broadcast", lambda group, part: sent(group, part.clone().bitwise_xor_(1)))
            with pytest.raises(EngineError, match="bucket 0 of worker 0 is not what was sent"):
                await engine.stage(manifest)
        stub.workers[1].fails_at = 1
        # SGLang answers for its first worker only
        with pytest.raises(EngineError, match="out of memory" if kind is StubVllm else "bucket 1 of worker 1 is not what was sent"):
            await engine.stage(manifest)
        assert stub.holds(weights(1)) and stub.label == "1"
        with pytest.raises(EngineError, match="nothing is staged"):
            await engine.commit(2)
        stub.workers[1].fails_at = None
        await engine.stage(manifest)
        await engine.commit(2)
        assert stub.holds(weights(2)) and stub.label == "2"

    on(kind, tmp_path, test, stages=True)


@both
def test_i7_a_swap_that_one_worker_fails_is_taken_back_in_the_others_and_the_version_comes_in_the_pause(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(stub: Stub, engine: ServerEngine, sender: BroadcastPublisher) -> None:
        await update(engine, sender, 1)
        manifest = sender.publish(2, weights(2))
        await engine.stage(manifest)

        def fails(label: str) -> None:
            raise RuntimeError("an illegal memory access")

        with monkeypatch.context() as changed:
            changed.setattr(stub.workers[1].update, "swap", fails)
            with pytest.raises(EngineError, match=r"an illegal memory access.*It serves version 1 again"):
                await engine.commit(2)
        assert stub.holds(weights(1)) and stub.label == "1" and not (await engine.health()).paused
        stub.orders.clear()
        await engine.commit(2)
        assert stub.orders == in_pause(kind, len([*packs(manifest.tensors, 5000)])) and stub.holds(weights(2)) and stub.label == "2"
        await update(engine, sender, 3)
        assert stub.holds(weights(3))

    on(kind, tmp_path, test, stages=True)


@pytest.mark.parametrize(("kind", "stages"), [(StubVllm, True), (StubSglang, True), (StubSglang, False)])
def test_an_update_that_nobody_ended_is_ended_before_the_next_one_comes(kind: Kind, stages: bool, tmp_path: Path) -> None:
    async def test(stub: Stub, engine: ServerEngine, sender: BroadcastPublisher) -> None:
        await update(engine, sender, 1)
        if isinstance(stub, StubSglang):
            stub._begin()
        else:
            for worker in stub.workers:
                worker.stage(stub.label)
            stub._start()
        await update(engine, sender, 2)
        assert stub.holds(weights(2))

    on(kind, tmp_path, test, stages=stages)


def test_weights_that_an_update_in_place_has_left_half_are_put_back_before_one_comes_beside() -> None:
    worker = Worker(weights(1), 0, 1, torch.device("cpu"))
    worker.update.begin("1")
    for parameter in worker.model.parameters():
        parameter.data.zero_()
    worker.stage("1")
    assert all(torch.equal(worker.model.get_parameter(worker.model.held[name]), tensor) for name, tensor in weights(1).items())
    with pytest.raises(ValueError, match="not kept"):
        worker.update.take_back("1", "2")


def test_a_version_that_no_servers_own_engine_takes_is_written_as_a_folder_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        stub = StubVllm(weights(0), workers=1)
        stub.workers[0].update.can_keep = False
        way = DirectLoader("vllm", DirectFeed(), by_own_engine=True)
        with BroadcastPublisher(quiet_seconds=0.02) as sender:
            async with asyncio.timeout(60), attached(stub, tmp_path, direct=way) as (engine, receiver):
                await engine.stage(replace(receiver.publish(1, tiny_model()), transport="direct"))
                await engine.commit(1)
                assert "/update_weights" not in [path for path, _ in stub.calls]
            assert sender.service.num_groups == 0

    asyncio.run(main())
    assert "keeps weights where our plugin cannot put old ones back" in caplog.text
