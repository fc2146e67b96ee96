"""Versions that a server's workers read on the trainer's device, by handles. Files stand for a GPU's memory (`buckets`); all the rest is what
runs on one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from tests.weights.buckets import Driver, stand_in
from tests.weights.test_direct import DEADLINE, STOPPED_DEADLINE, Workers, bring_all, midflight_direct, tensors

from midflight.errors import EngineUnavailable
from midflight.types import Meeting, TransferOrder, WorkerState
from midflight.weights import device_handles
from midflight.weights.device_handles import HandleRefused, given_bucket, opened_bucket
from midflight.weights.transports.broadcast import BroadcastPublisher, WholeVersion
from midflight.weights.transports.direct import DirectFeed
from midflight.weights.transports.process_group import BroadcastReceiver

ROOT = Path(__file__).parents[2]
GIVE_UP_SECONDS = 30.0


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(tmp_path)
    stand_in(monkeypatch, midflight_direct, made)
    return made


@pytest.fixture
def deadline() -> float:
    return DEADLINE


@pytest.fixture
def sender(driver: Driver, deadline: float) -> Iterator[BroadcastPublisher]:
    with BroadcastPublisher(backend="handles", bucket_bytes=20, quiet_seconds=0.02, deadline_seconds=deadline) as made:
        yield made
    assert driver.num_given == 0, "all memory is given back"


def by_handles(server: Workers) -> list[bool]:
    return [order.bucket is not None for order in server.orders]


def test_the_workers_of_all_servers_read_a_version_in_one_bucket_and_close_it(sender: BroadcastPublisher, driver: Driver) -> None:
    servers, feeds = [Workers(2), Workers(1)], [DirectFeed(), DirectFeed()]

    async def main() -> None:
        for version in (1, 2, 3):
            assert await bring_all(feeds, sender.publish(version, tensors(version)), servers) == [None, None]
            sender.release(version - 1)
            assert not any(s.serves(version) for s in servers)
            assert (driver.num_open, len(driver.opened)) == (0, 3 * version)
            for server in servers:
                server.take(version)
            assert all(s.serves(version) for s in servers)

    asyncio.run(main())
    assert [order.backend for server in servers for order in server.orders] == ["handles"] * 6
    assert len(driver.given) == 1, "the same bucket serves all versions"
    servers[0].take(2)  # what was served before is beside it
    assert servers[0].serves(2)


def test_what_reads_from_host_memory_meets_the_publisher_by_gloo(sender: BroadcastPublisher, driver: Driver) -> None:
    manifest = sender.publish(1, tensors(1))
    assert bytes(BroadcastReceiver().fetch(manifest)["a"]) == bytes(torch.ones(4).numpy().data)
    assert not driver.opened


def test_a_worker_with_other_bytes_is_found_by_the_digest_of_a_bucket(sender: BroadcastPublisher, monkeypatch: pytest.MonkeyPatch) -> None:
    server, feed = Workers(1), DirectFeed()
    from tests.weights.buckets import FileBucket

    read = FileBucket.read

    def torn(bucket: FileBucket, part: torch.Tensor) -> None:
        read(bucket, part)
        part[-1] ^= 1

    monkeypatch.setattr(FileBucket, "read", torn)
    with pytest.raises(EngineUnavailable, match="bucket 0 of worker 0 is not what was sent"):
        asyncio.run(feed.bring(replace(sender.publish(1, tensors(1)), receivers=1), server))


def test_a_version_that_cannot_be_read_in_the_middle_gives_the_bucket_back(
    sender: BroadcastPublisher, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, feed = Workers(1), DirectFeed()
    parts = WholeVersion.parts
    breaks = [True, True]

    def torn(version: WholeVersion, meets: Meeting, bucket_bytes: int) -> Iterator[torch.Tensor]:
        for number, part in enumerate(parts(version, meets, bucket_bytes)):
            if number == 1 and breaks:
                breaks.pop()
                raise RuntimeError("CUDA out of memory")
            yield part

    monkeypatch.setattr(WholeVersion, "parts", torn)
    manifest = replace(sender.publish(1, tensors(1)), receivers=1)
    with pytest.raises(EngineUnavailable, match=r"the trainer has ended the transfer|did not come to its end"):
        asyncio.run(feed.bring(manifest, server))
    asyncio.run(feed.bring(manifest, server))
    server.take(1)
    assert server.serves(1) and driver.num_open == 0


# --- Refused ----------------------------------------------------------------------------------------------------------


def test_workers_that_cannot_open_the_bucket_get_this_and_all_later_versions_over_host_memory_and_the_log_says_why(
    sender: BroadcastPublisher, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    server, feed = Workers(2), DirectFeed()
    driver.refuses = "cuIpcOpenMemHandle_v2 says: peer access is not supported"

    async def main() -> None:
        for version in (1, 2):
            await feed.bring(replace(sender.publish(version, tensors(version)), receivers=1), server)
            server.take(version)
            assert server.serves(version)
            driver.refuses = ""  # the way is chosen once

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert by_handles(server) == [True, False, False] and server.orders[1].backend == "gloo"
    (told,) = [record.getMessage() for record in caplog.records if record.name.endswith("direct")]
    assert "cpu cannot read memory of the trainer's cpu: cuIpcOpenMemHandle_v2 says: peer access is not supported" in told
    assert 'set weights.transport = "shared_memory"' in told


def test_a_server_that_cannot_open_the_bucket_takes_nothing_from_the_others(
    sender: BroadcastPublisher, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, feeds = [Workers(1), Workers(2)], [DirectFeed(), DirectFeed()]
    opened = driver.opened_bucket
    ranks: list[int] = []

    def open_bucket(handle: str, device: torch.device) -> object:
        ranks.append(len(ranks))
        if len(ranks) == 1:
            raise HandleRefused("it is in another container")
        return opened(handle, device)

    monkeypatch.setattr(device_handles, "opened_bucket", open_bucket)

    async def main() -> None:
        for version in (1, 2):
            assert await bring_all(feeds, sender.publish(version, tensors(version)), servers) == [None, None]
            for server in servers:
                server.take(version)
            assert all(s.serves(version) for s in servers)

    asyncio.run(main())
    ways = sorted([by_handles(server) for server in servers], key=str)
    assert ways == [[True, False, False], [True, True, True]]


def test_a_bucket_that_could_be_opened_before_and_cannot_now_is_no_silent_change_of_the_way(
    sender: BroadcastPublisher, driver: Driver
) -> None:
    server, feed = Workers(1), DirectFeed()

    async def main() -> None:
        await feed.bring(replace(sender.publish(1, tensors(1)), receivers=1), server)
        driver.refuses = "invalid device context"
        manifest = replace(sender.publish(2, tensors(2)), receivers=1)
        with pytest.raises(EngineUnavailable, match="invalid device context"):
            await feed.bring(manifest, server)
        driver.refuses = ""
        await feed.bring(manifest, server)

    asyncio.run(main())
    assert by_handles(server) == [True] * 4


def test_a_worker_of_another_machine_does_not_try(
    sender: BroadcastPublisher, driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = iter(["here", "there"])
    monkeypatch.setattr(device_handles, "machine", lambda: next(names))
    server, feed = Workers(1), DirectFeed()
    with caplog.at_level(logging.WARNING):
        asyncio.run(feed.bring(replace(sender.publish(1, tensors(1)), receivers=1), server))
    assert by_handles(server) == [True, False] and not driver.opened
    assert any("is on another machine than" in record.getMessage() for record in caplog.records)


def test_a_device_that_gives_no_bucket_is_known_before_the_first_version(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.gives_none = "cuMemAlloc_v2 says: out of memory"
    server = Workers(1)
    with (
        caplog.at_level(logging.WARNING),
        BroadcastPublisher(backend="handles", bucket_bytes=20, quiet_seconds=0.02) as sender,
    ):
        assert any("cuMemAlloc_v2 says: out of memory" in record.getMessage() for record in caplog.records)
        asyncio.run(DirectFeed().bring(replace(sender.publish(1, tensors(1)), receivers=1), server))
    assert by_handles(server) == [False]


def test_a_machine_without_the_driver_refuses_in_words() -> None:
    for deed in (lambda: given_bucket(torch.device("cpu"), 20), lambda: opened_bucket("00" * 64, torch.device("cpu"))):
        with pytest.raises(HandleRefused, match="memory of cpu has no handles"):
            deed()


# --- Workers in processes of their own ---------------------------------------------------------------------------------


class ProcessWorker:
    """Implements `ports.ServerWorkers`: one worker, in a process that may die or stop."""

    meets: Meeting = "plugin"

    def __init__(self) -> None:
        self.orders: list[TransferOrder] = []
        self.start()

    def start(self) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        command = [sys.executable, "-m", "tests.weights.handle_worker"]
        self.process = subprocess.Popen(command, env=environ, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(self, told: object) -> dict[str, object]:
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            raise EngineUnavailable("the server is gone") from error

    async def states(self) -> Sequence[WorkerState]:
        said = await asyncio.to_thread(self.say, {})
        return msgspec.convert([said], tuple[WorkerState, ...])

    async def receive(self, order: TransferOrder) -> None:
        self.orders.append(order)
        await asyncio.to_thread(self.say, {"order": msgspec.to_builtins(order), "index": 0, "workers": 1})

    def take(self, version: int) -> bool:
        return bool(self.say({"take": version})["serves"])

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def worker() -> Iterator[ProcessWorker]:
    made = ProcessWorker()
    yield made
    made.end()


def test_a_worker_in_another_process_reads_the_bucket_and_takes_a_version_back(sender: BroadcastPublisher, worker: ProcessWorker) -> None:
    feed = DirectFeed()

    async def main() -> None:
        for version in (1, 2):
            await feed.bring(replace(sender.publish(version, tensors(version)), receivers=1), worker)
            assert worker.take(version)

    asyncio.run(main())
    assert worker.take(1) and worker.take(2)


def test_a_worker_that_is_killed_in_mid_version_holds_up_nobody(sender: BroadcastPublisher, driver: Driver, worker: ProcessWorker) -> None:
    other, feeds = Workers(1), [DirectFeed(), DirectFeed()]
    worker.say({"die": 2})

    async def main() -> None:
        manifest = replace(sender.publish(1, tensors(1)), receivers=2)
        async with asyncio.timeout(GIVE_UP_SECONDS):
            bringing = [feed.bring(manifest, server) for feed, server in zip(feeds, (other, worker), strict=True)]
            survived, died = await asyncio.gather(*bringing, return_exceptions=True)
        assert survived is None and isinstance(died, EngineUnavailable)
        worker.end()
        worker.start()
        await DirectFeed().bring(replace(manifest, receivers=1), worker)

    asyncio.run(main())
    other.take(1)
    assert other.serves(1) and worker.take(1)
    assert driver.num_given == 1, "its death has closed the bucket"


@pytest.mark.parametrize("deadline", [STOPPED_DEADLINE])
def test_the_bucket_that_a_stopped_worker_has_open_is_neither_used_nor_freed_until_it_goes_on_or_is_dead(
    sender: BroadcastPublisher, driver: Driver, worker: ProcessWorker
) -> None:
    other, feed = Workers(1), DirectFeed()
    worker.say({"stop": 2})

    async def bring(version: int, to: DirectFeed, workers: ProcessWorker | Workers) -> None:
        await to.bring(replace(sender.publish(version, tensors(version)), receivers=1), workers)

    async def main() -> None:
        stopped = asyncio.create_task(bring(1, DirectFeed(), worker))
        await asyncio.sleep(3 * STOPPED_DEADLINE)  # the round has broken by its deadline
        stopped.cancel()
        sender.release(1)
        held = worker.orders[0].bucket
        assert held is not None
        await bring(2, feed, other)
        assert other.orders[0].bucket is not None and other.orders[0].bucket.handle != held.handle
        assert driver.num_given == 2
        os.kill(worker.process.pid, signal.SIGCONT)
        sender.release(2)
        while driver.num_given > 1:
            version = 3 + len(other.orders)
            await bring(version, feed, other)
            sender.release(version)

    asyncio.run(main())
    version = other.orders[-1].version
    other.take(version)
    assert other.serves(version)
