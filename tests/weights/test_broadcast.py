"""The broadcast of the direct transport: all who want a version get it in one broadcast, and whoever dies, or stops, holds up nobody for long."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from tests.weights.test_transports import equal, tensors

from midflight.errors import ConfigError, EngineUnavailable, RequestRejected, RunFailed, SlotBusy, WeightsCorrupt
from midflight.models.names import as_tensors
from midflight.types import WeightManifest
from midflight.weights.manifest import ALIGNMENT, extent
from midflight.weights.transports import broadcast
from midflight.weights.transports.broadcast import BroadcastPublisher
from midflight.weights.transports.posted_files import check_readable
from midflight.weights.transports.process_group import BroadcastGroup, BroadcastReceiver, join_store
from midflight.weights.transports.rendezvous import (
    MAX_WAITING,
    Address,
    Answer,
    Ask,
    Gathering,
    Join,
    Refused,
    WaitingReceiver,
    buckets,
    line,
    read_answer,
)
from midflight.weights.transports.select import publisher, receiver

from .fleets import sent

DEADLINE = 0.6
"""Seconds: what a peer that stopped costs the others."""


@pytest.fixture
def sender() -> Iterator[BroadcastPublisher]:
    with BroadcastPublisher(bucket_bytes=1000, deadline_seconds=DEADLINE) as made:
        yield made


def all_fetch(receivers: list[BroadcastReceiver], manifest: WeightManifest) -> bool:
    """At the same time; whether each got what version's number makes."""
    with ThreadPoolExecutor(len(receivers)) as pool:
        got = list(pool.map(lambda r: r.fetch(manifest), receivers))
    return all(equal(as_tensors(manifest.tensors, g), tensors(manifest.version)) for g in got)


def publish_and(parent: Connection) -> None:
    """In another process: sends a version to whoever asks, and does to itself at the third bucket what it is told."""
    sender, given = BroadcastPublisher(bucket_bytes=64, deadline_seconds=DEADLINE), BroadcastGroup.broadcast
    parent.send(sender.publish(1, {"w": torch.arange(100)}))

    def broadcast(group: BroadcastGroup, part: torch.Tensor) -> None:
        nonlocal left
        if not left:
            os.kill(os.getpid(), deed)
        left -= 1
        given(group, part)

    while True:
        deed, left = parent.recv(), 2
        BroadcastGroup.broadcast = broadcast
        parent.send("ready")


@contextmanager
def another_process() -> Iterator[tuple[BaseProcess, Connection]]:
    """Forked, because to import torch again takes seconds."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=publish_and, args=(there,))
    process.start()
    there.close()
    try:
        yield process, here
    finally:
        process.kill()
        process.join()
        here.close()


def heard(process: Connection) -> object:
    assert process.poll(20)
    return process.recv()


@contextmanager
def asking(manifest: WeightManifest, **changes: object) -> Iterator[socket.socket]:
    """A receiver as far as its question."""
    address = Address.parse(manifest.location)
    with socket.create_connection((address.host, address.port), timeout=5) as connection:
        ask = {"token": address.token, "version": manifest.version, "fingerprint": manifest.fingerprint, "member": "x", "group": None}
        connection.sendall(line(Ask(**(ask | changes))))
        yield connection


def answered(connection: socket.socket) -> Answer:
    return read_answer(connection.makefile("rb").readline())


def joined(connection: socket.socket) -> BroadcastGroup:
    """The group that its question leads to; it waits for the others."""
    terms = answered(connection)
    assert isinstance(terms, Join)
    return BroadcastGroup(terms, join_store("127.0.0.1", terms), interface="127.0.0.1")


def within(seconds: float, done: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.005)
    return done()


# --- What arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [7, 64, 10**6])
def test_what_is_published_is_fetched_byte_for_byte_whatever_the_bucket(bucket_bytes: int):
    with BroadcastPublisher(bucket_bytes=bucket_bytes) as sender:
        manifest = sent(sender.publish(1, tensors(1)))
        got = receiver().fetch(manifest)
    assert equal(as_tensors(manifest.tensors, got), tensors(1))
    assert all(not view.readonly for view in got.values())
    addresses = [t.data_ptr() for t in as_tensors(manifest.tensors, got).values() if t.numel()]
    assert all(a % ALIGNMENT == 0 for a in addresses)


def test_a_version_without_any_bytes_arrives_too(sender: BroadcastPublisher):
    assert bytes(receiver().fetch(sender.publish(1, {"empty": torch.empty(0, 3)}))["empty"]) == b""


def test_the_tensors_may_change_and_the_version_be_replaced_once_it_is_fetched(sender: BroadcastPublisher):
    weights = tensors(1)
    manifest = sender.publish(1, weights)
    weights["z.weight"].zero_()
    got = receiver().fetch(manifest)
    sender.release(1)
    sender.publish(2, tensors(2))
    assert equal(as_tensors(manifest.tensors, got), tensors(1))


def test_i7_a_changed_byte_is_found(sender: BroadcastPublisher):
    manifest = sender.publish(1, tensors(1))
    sender._held[1].data[70] ^= 1
    with pytest.raises(WeightsCorrupt, match="version 1"):
        BroadcastReceiver().fetch(manifest)


def test_the_publisher_is_where_the_trainers_machine_is_reached(tmp_path: Path):
    with publisher("direct", name="x", folder=tmp_path, host="127.0.0.2") as sender:
        manifest = sender.publish(1, tensors(1))
        assert Address.parse(manifest.location).host == "127.0.0.2"
        assert equal(as_tensors(manifest.tensors, receiver().fetch(manifest)), tensors(1))


def test_differences_travel_as_well(tmp_path: Path):
    mine = receiver()
    with publisher("direct", name="x", folder=tmp_path, full_every=3) as sender:
        weights = {"w": torch.arange(10_000)}
        for version in range(1, 6):
            weights["w"][version] += 1
            manifest = sender.publish(version, weights)
            assert bytes(mine.fetch(manifest)["w"]) == weights["w"].numpy().tobytes()
            sender.release(version - 1)
        assert manifest.deltas
        assert bytes(receiver().fetch(manifest)["w"]) == weights["w"].numpy().tobytes(), "and to an engine that came back"


# --- Groups ----------------------------------------------------------------------------------------------------------


def test_receivers_meet_in_one_broadcast_and_their_group_is_used_again(sender: BroadcastPublisher):
    receivers = [BroadcastReceiver() for _ in range(3)]
    for version in (1, 2, 3):
        manifest = replace(sender.publish(version, tensors(version)), receivers=3)
        assert all_fetch(receivers, manifest)
        assert sender.service.num_groups == 1
        assert sender.service.num_bytes_broadcast == version * extent(manifest.tensors), "once, whoever listens"


def test_one_that_comes_late_gets_the_same_version_and_the_next_one_with_the_others(sender: BroadcastPublisher):
    first, late = BroadcastReceiver(), BroadcastReceiver()
    one = sender.publish(1, tensors(1))
    assert all_fetch([first], one)
    assert all_fetch([late], one)
    assert sender.service.num_groups == 2
    assert all_fetch([first, late], sender.publish(2, tensors(2)))
    assert all_fetch([first, late], sender.publish(3, tensors(3)))
    assert sender.service.num_groups == 3, "the third version's is the second's"


def test_expected_receivers_begin_at_once():
    """As many as were told to come, which each publication may say anew: engines come and go."""
    receivers = [BroadcastReceiver() for _ in range(3)]
    with BroadcastPublisher(quiet_seconds=60) as sender:
        for version, number in enumerate([2, 3, 1, 2], start=1):
            manifest = replace(sender.publish(version, tensors(version)), receivers=number)
            assert all_fetch(receivers[:number], sent(manifest))
            sender.release(version)


def test_receivers_of_different_versions_are_served_one_after_the_other(sender: BroadcastPublisher):
    one, two = sender.publish(1, tensors(1)), sender.publish(2, tensors(2))
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda m: all_fetch([BroadcastReceiver()], m), [one, two]))


# --- Who may not ask -------------------------------------------------------------------------------------------------


def test_without_the_secret_nothing_is_sent(sender: BroadcastPublisher):
    manifest = sender.publish(1, tensors(1))
    address = Address.parse(manifest.location)
    forged = replace(manifest, location=str(replace(address, token="guess")))
    with pytest.raises(WeightsCorrupt, match="another publisher's") as caught:
        BroadcastReceiver().fetch(forged)
    assert address.token not in str(caught.value)
    assert sender.service.num_groups == 0


def test_a_version_that_was_released_or_never_published_is_refused_by_name(sender: BroadcastPublisher):
    one, _ = sender.publish(1, tensors(1)), sender.publish(2, tensors(2))
    sender.release(1)
    with pytest.raises(WeightsCorrupt, match=r"released; there are versions: 2"):
        BroadcastReceiver().fetch(one)
    with pytest.raises(WeightsCorrupt, match="not published"):
        BroadcastReceiver().fetch(replace(one, version=2, fingerprint="0" * 64))


def test_a_location_that_names_no_publisher_is_refused(sender: BroadcastPublisher):
    manifest = sender.publish(1, tensors(1))
    check_readable(manifest)
    for location in ("/dev/shm/x", "tcp://127.0.0.1/t", "tcp://127.0.0.1:1/", "tcp://127.0.0.1:x/t"):
        with pytest.raises(RequestRejected):
            check_readable(replace(manifest, location=location))
        with pytest.raises(EngineUnavailable, match="version 1"):
            BroadcastReceiver().fetch(replace(manifest, location=location))


def test_a_manifest_of_a_transport_that_is_gone_is_refused_with_its_replacement(sender: BroadcastPublisher):
    with pytest.raises(RequestRejected, match=r"'collective': not one of them\. Publish by 'pull'"):
        check_readable(replace(sender.publish(1, tensors(1)), transport="collective"))


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", b"\xff\n", b"{}\n", b"x" * 10_000])
def test_connections_that_ask_nothing_sensible_end_and_cost_the_others_nothing(sender: BroadcastPublisher, said: bytes):
    manifest = sender.publish(1, tensors(1))
    address = Address.parse(manifest.location)
    with socket.create_connection((address.host, address.port), timeout=5 * DEADLINE) as connection:
        connection.sendall(said)
        assert all_fetch([BroadcastReceiver()], manifest)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b"", "silence ends at the deadline"


# --- Who dies, or stops ----------------------------------------------------------------------------------------------


def test_one_that_hangs_up_while_others_gather_is_left_out():
    with BroadcastPublisher(bucket_bytes=1000, quiet_seconds=0.3, deadline_seconds=30) as sender:
        manifest = sender.publish(1, tensors(1))
        with asking(manifest):
            pass
        assert all_fetch([BroadcastReceiver()], manifest)
        assert sender.service.num_groups == 1


def test_a_bucket_may_take_a_fourth_of_what_the_handover_gives_an_engine(tmp_path: Path):
    with publisher("direct", name="x", folder=tmp_path, stage_seconds=400) as sender, asking(sender.publish(1, tensors(1))) as slow:
        assert joined(slow).terms.deadline_seconds == 100


def test_one_that_never_comes_to_the_group_costs_the_others_a_deadline(sender: BroadcastPublisher):
    manifest = sender.publish(1, tensors(1))
    started = time.monotonic()
    with asking(manifest):
        assert all_fetch([BroadcastReceiver()], manifest), "at its second attempt"
        assert sender.service.num_groups == 2
        assert time.monotonic() - started < 10 * DEADLINE
        assert all_fetch([BroadcastReceiver()], sender.publish(2, tensors(2)))


@pytest.mark.parametrize("num_received", [0, 1])
def test_one_that_stops_in_mid_transfer_costs_the_others_a_deadline(num_received: int):
    weights = {"w": torch.zeros(30_000_000, dtype=torch.uint8)}  # more than sockets hold
    with BroadcastPublisher(bucket_bytes=15_000_000, deadline_seconds=DEADLINE) as sender:
        manifest = sender.publish(1, weights)
        with ThreadPoolExecutor(1) as pool, asking(manifest) as stopped:
            other = pool.submit(BroadcastReceiver().fetch, manifest)
            group = joined(stopped)
            for part in list(buckets(30_000_000, group.terms.bucket_bytes))[:num_received]:
                group.broadcast(torch.empty(part.stop - part.start, dtype=torch.uint8))
            started = time.monotonic()
            sender.publish(2, {"w": torch.zeros(3)})
            assert time.monotonic() - started < DEADLINE, "the trainer waits for nobody"
            assert bytes(other.result(10)["w"][-9:]) == bytes(9)
            assert time.monotonic() - started < 10 * DEADLINE
        del group


def test_a_group_that_breaks_again_is_an_error_that_says_so():
    mine, other = BroadcastReceiver(), BroadcastReceiver()
    with BroadcastPublisher(quiet_seconds=60, deadline_seconds=DEADLINE) as sender:
        manifest = replace(sender.publish(1, tensors(1)), receivers=2)
        with asking(manifest, member="x") as absent, ThreadPoolExecutor(1) as pool:
            fetching = pool.submit(mine.fetch, manifest)
            answered(absent)
            with asking(manifest, member="y"), pytest.raises(EngineUnavailable, match=r"version 1: the broadcast broke 2 times"):
                fetching.result(10)
        assert sender.service.num_groups == 2
        assert all_fetch([mine, other], manifest)


def test_one_that_dies_in_mid_transfer_is_seen_at_once_and_does_not_take_the_others_along():
    with BroadcastPublisher(bucket_bytes=100, quiet_seconds=1, deadline_seconds=20) as sender:
        manifest = replace(sender.publish(1, tensors(1)), receivers=2)
        with ThreadPoolExecutor(1) as pool, asking(manifest) as dying:
            other = pool.submit(all_fetch, [BroadcastReceiver()], manifest)
            group = joined(dying)
            for part in list(buckets(extent(manifest.tensors), 100))[:2]:
                group.broadcast(torch.empty(part.stop - part.start, dtype=torch.uint8))
            started = time.monotonic()
            group.close()  # as the kernel does for a process that was killed
            dying.close()
            assert other.result(15)
            assert time.monotonic() - started < 15, "at once, not at the deadline"
        assert sender.service.num_groups == 2


def test_another_process_sends_a_version_and_one_that_stops_or_is_killed_in_mid_transfer_is_an_error_and_not_a_hang():
    with another_process() as (process, its):
        manifest = heard(its)
        assert isinstance(manifest, WeightManifest)
        assert bytes(BroadcastReceiver().fetch(manifest)["w"]) == torch.arange(100).numpy().tobytes()
        for deed, seconds in ((signal.SIGSTOP, DEADLINE), (signal.SIGKILL, 20)):  # it may be busy with its round from before
            its.send(deed)
            assert heard(its) == "ready"
            started = time.monotonic()
            with pytest.raises(EngineUnavailable, match="fetching version 1"):
                BroadcastReceiver(answer_seconds=seconds).fetch(manifest)
            assert time.monotonic() - started < 10 * DEADLINE + seconds
            assert process.pid is not None
            os.kill(process.pid, signal.SIGCONT)
        process.join(5)
        assert process.exitcode == -signal.SIGKILL


# --- Slots and the end -----------------------------------------------------------------------------------------------


def test_versions_hold_their_buffers_until_released_and_the_buffers_stand():
    with BroadcastPublisher(num_slots=2) as sender:
        sender.publish(1, tensors(1))
        place = sender._held[1].data.data_ptr()
        second = sender.publish(2, tensors(2))
        with pytest.raises(SlotBusy, match="versions 1, 2 hold all slots"):
            sender.publish(3, tensors(3))
        with pytest.raises(SlotBusy, match="never reused"):
            sender.publish(2, tensors(3))
        sender.release(1)
        sender.release(77)
        sender.publish(3, tensors(3))
        assert sender._held[3].data.data_ptr() == place
        assert all_fetch([BroadcastReceiver()], second)


def test_closing_ends_those_who_wait_and_leaves_no_thread():
    before = set(threading.enumerate())
    sender = BroadcastPublisher(quiet_seconds=60)
    manifest = sender.publish(1, tensors(1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(BroadcastReceiver().fetch, manifest)
        assert within(5, lambda: len(sender.service._gathering._waiting) == 1)
        started = time.monotonic()
        sender.close()
        with pytest.raises(EngineUnavailable, match="publisher does not answer"):
            waiting.result(5)
        assert time.monotonic() - started < 1
    sender.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(RunFailed, match="publishing version 2"):
        sender.publish(2, tensors(2))


def test_closing_waits_for_a_receiver_that_stopped_no_longer_than_it_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broadcast, "CLOSE_SECONDS", 0.1)
    sender = BroadcastPublisher(deadline_seconds=30)
    with asking(sender.publish(1, {"w": torch.zeros(30_000_000, dtype=torch.uint8)})) as stopped:
        group = joined(stopped)
        assert within(5, lambda: sender.service.num_bytes_broadcast > 0)
        started = time.monotonic()
        sender.close()
        assert time.monotonic() - started < 5
        assert sender._thread.is_alive(), "until its deadline, or"
        group.close()
        sender._thread.join(5)
        assert not sender._thread.is_alive(), "its peer's end"


def test_an_address_that_is_not_this_machines_is_named():
    with pytest.raises(ConfigError, match=r"cannot listen on '192\.0\.2\.1'"):
        BroadcastPublisher("192.0.2.1")


# --- Gathering -------------------------------------------------------------------------------------------------------


def member(name: str, fingerprint: str = "a", *, since: float = 0.0, expected: int | None = None) -> WaitingReceiver:
    return WaitingReceiver(Ask("t", 1, fingerprint, name, None, expected), since, answer=lambda _: None, hang_up=lambda: None)


def test_members_go_when_none_has_come_for_a_while():
    gathering = Gathering(quiet_seconds=2)
    assert gathering.seconds_left(5) is None
    gathering.join(one := member("1", since=10))
    gathering.join(two := member("2", since=11))
    assert gathering.seconds_left(11.5) == 1.5
    assert gathering.seconds_left(14) == 0
    assert gathering.take() == [one, two]
    assert gathering.seconds_left(14) is None


def test_members_who_want_something_else_wait_for_the_next_round():
    gathering = Gathering(quiet_seconds=2)
    one, other, two = member("1", since=1, expected=2), member("2", "b", since=2), member("3", since=3)
    gathering.join(one)
    gathering.join(other)
    assert gathering.seconds_left(2) == 1
    gathering.join(two)
    assert gathering.seconds_left(3) == 0, "two were expected"
    assert gathering.take() == [one, two]
    gathering.leave(other)
    gathering.leave(one)
    assert gathering.take() == []


def test_a_receiver_has_one_place_and_the_places_are_bounded():
    gathering = Gathering(quiet_seconds=2)
    assert all(gathering.join(member(str(i))) for i in range(MAX_WAITING))
    assert not gathering.join(member("one too many"))
    assert gathering.join(again := member("7", since=9))
    assert len(taken := gathering.take()) == MAX_WAITING
    assert taken[-1] is again


def test_an_address_is_read_as_it_is_written():
    for address in (Address("127.0.0.1", 80, "t"), Address("::1", 80, "t")):
        assert Address.parse(str(address)) == address


def test_a_refusal_is_an_answer():
    assert read_answer(line(Refused("no"))) == Refused("no")
