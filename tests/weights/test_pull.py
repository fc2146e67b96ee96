"""The pull transport: buckets from whoever has them, each proven (I7); a source that lies or dies costs its own buckets a second question."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from tests.weights.test_transports import equal, tensors
from torch.distributed.tensor import Shard

from midflight.errors import ConfigError, EngineUnavailable, NotSupported, RequestRejected, SlotBusy, WeightsCorrupt
from midflight.models import sizes
from midflight.models.names import as_tensors
from midflight.models.sizes import fingerprint_views
from midflight.types import TensorSpec, WeightManifest
from midflight.weights.transports import pull_publisher, swarm
from midflight.weights.transports.bucket_server import SharedVersion
from midflight.weights.transports.delta_receiver import DeltaReceiver
from midflight.weights.transports.posted_files import check_readable
from midflight.weights.transports.pull import PullReceiver
from midflight.weights.transports.pull_publisher import PullPublisher
from midflight.weights.transports.select import publisher, receiver
from midflight.weights.transports.swarm import AT_ONCE, MAX_KNOWN, STRIKES, Leaf, Transfer, bucketed, cut, place, root, sources_in

from .fleets import sent

PIECE = 64
"""Bytes of a bucket here, so that small tensors have many."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "PIECE", PIECE)
    monkeypatch.setattr(swarm, "PIECE", PIECE)


@pytest.fixture
def sender() -> Iterator[PullPublisher]:
    with PullPublisher() as made:
        yield made


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[str], PullReceiver]]:
    """Receivers on machines of the names given: those of one name share its memory."""
    made: list[PullReceiver] = []

    def on(name: str) -> PullReceiver:
        (tmp_path / name).mkdir(exist_ok=True)
        made.append(PullReceiver(answer_seconds=20, patience=20, places=[tmp_path / name]))
        return made[-1]

    yield on
    for receiver_ in made:
        receiver_.close()


Machine = Callable[[str], PullReceiver]


def came(by: PullReceiver, manifest: WeightManifest) -> bool:
    return equal(as_tensors(manifest.tensors, by.fetch(manifest)), tensors(manifest.version))


# --- What is asked of whom -------------------------------------------------------------------------------------------


def transfer(num_buckets: int, *sources: str) -> Transfer:
    """From sources that have all."""
    made = Transfer(num_buckets, random.Random(0))
    for source in sources:
        assert made.hear_of(source)
        made.offers(source, range(num_buckets))
    return made


def test_every_bucket_is_asked_for_once_and_of_each_source_a_few_at_a_time():
    made = transfer(10, "a", "b")
    taken = [made.take() for _ in range(5)]
    assert taken[4] is None  # 2 of each
    assert sorted(source for source, _ in filter(None, taken)) == ["a", "a", "b", "b"]
    assert len({bucket for _, bucket in filter(None, taken)}) == 2 * AT_ONCE
    while not made.is_done:
        for _, bucket in filter(None, taken):
            made.arrived(bucket)
        taken = [made.take() for _ in range(5)]
    assert made.take() is None
    assert not made.is_lost


def test_engines_are_asked_before_the_trainer_which_gives_what_they_lack():
    made = Transfer(3, random.Random(0))
    made.hear_of("trainer", gives_last=True)
    made.offers("trainer", range(3))
    made.hear_of("engine")
    made.offers("engine", [2])
    assert made.take() == ("engine", 2)
    assert {made.take()[0], made.take()[0]} == {"trainer"}  # pyright: ignore[reportOptionalSubscript]


def test_a_source_of_wrong_bytes_is_named_and_asked_for_nothing_more_and_its_bucket_comes_from_another():
    made = transfer(1, "liar")
    assert made.take() == ("liar", 0)
    made.wrong(0)
    assert made.is_lost
    assert made.blamed == {"liar": "wrong bytes in bucket 0"}
    assert not made.hear_of("liar")
    made.hear_of("honest")
    made.offers("honest", [0])
    assert not made.is_lost
    assert made.take() == ("honest", 0)
    made.arrived(0)
    assert made.is_done


def test_a_source_that_fails_is_asked_again_after_its_next_offer_until_it_has_failed_too_often():
    made = transfer(1, "a")
    for _ in range(STRIKES - 1):
        assert made.take() == ("a", 0)
        made.failed(0, "reset")
        assert made.take() is None
        made.offers("a", [0])
    made.take()
    made.arrived(0)
    assert made.sources == ("a",)  # a bucket makes up for failures before it
    made = transfer(1, "http://a:1/x")
    for _ in range(STRIKES):
        made.offers("http://a:1/x", [0])
        made.take()
        made.failed(0, "reset")
    assert (made.sources, made.is_lost) == ((), True)
    assert made.complaint() == "1 of 1 buckets are missing, and no source is left (a:1: reset)"


def test_a_busy_source_loses_nothing_and_waits_for_its_next_offer():
    made = transfer(1, "a")
    for _ in range(2 * STRIKES):
        assert made.take() == ("a", 0)
        made.busy(0)
        assert made.take() is None
        made.offers("a", [0])
    assert not made.lost


def test_what_a_source_has_under_way_when_another_of_its_buckets_was_wrong_may_still_arrive():
    made = transfer(2, "a")
    (_, first), (_, second) = made.take() or ("", 0), made.take() or ("", 0)
    made.wrong(first)
    made.arrived(second)
    assert not made.is_done
    assert made.is_lost


def test_a_receiver_knows_so_many_sources_at_most_and_what_is_here_is_not_asked_for():
    made = transfer(2, *map(str, range(MAX_KNOWN)))
    assert not made.hear_of("one more")
    made.here([0])
    assert (made.take() or ("", 0))[1] == 1
    assert made.take() is None


# --- The tree --------------------------------------------------------------------------------------------------------


def leaves(*stops: int) -> tuple[Leaf, ...]:
    return tuple(Leaf(0, start, stop, bytes([stop])) for start, stop in zip((0, *stops), stops, strict=False))


@pytest.mark.parametrize(
    "tree",
    [
        (),
        (leaves(8),),
        (leaves(20),),
        (leaves(16), leaves(16)),
        ((Leaf(0, 8, 16, b""),),),
        ((Leaf(1, 0, 16, b""),),),
        ((Leaf(-1, 0, 16, b""),),),
        (leaves(8, 8, 16),),
    ],
)
def test_leaves_that_are_not_every_byte_once_are_refused(tree: tuple[tuple[Leaf, ...], ...]):
    with pytest.raises(ValueError, match="lea"):
        root(tree, [TensorSpec("w", "U8", (16,), 0, 16)])


def test_pieces_end_where_whole_tensors_are_cut_and_neighbours_fill_a_bucket():
    assert list(cut(40, 140)) == [(40, 64), (64, 128), (128, 140)]
    assert [[leaf.stop for leaf in bucket] for bucket in bucketed(leaves(30, 60, 124, 130))] == [[30, 60], [124], [130]]


def test_a_location_names_sources_and_is_shown_without_the_secret():
    assert sources_in("http://a:1/x http://b:2/y") == ("http://a:1/x", "http://b:2/y")
    assert place("http://a:1/x") == "a:1"
    for wrong in ("", "tcp://a:1/x", "http://a/x", "http://a:1", "http://:1/x"):
        with pytest.raises(ValueError, match=r"^its location"):
            sources_in(wrong)


# --- What arrives ----------------------------------------------------------------------------------------------------


def test_what_is_published_arrives_byte_for_byte_under_the_fingerprint_of_every_other_transport(sender: PullPublisher, machine: Machine):
    manifest = sent(sender.publish(1, tensors(1)))
    got = machine("m").fetch(manifest)
    assert equal(as_tensors(manifest.tensors, got), tensors(1))
    assert all(not view.readonly for view in got.values())
    assert manifest.fingerprint == fingerprint_views(manifest.tensors, got)
    check_readable(manifest)
    with pytest.raises(RequestRejected, match="its location is not http"):
        check_readable(replace(manifest, location="nowhere"))


def test_versions_are_served_in_the_precision_that_is_asked_for_and_others_as_they_are(machine: Machine):
    with PullPublisher(dtype=torch.bfloat16, threads=2) as sender:
        manifest = sender.publish(1, tensors(1))
        got = as_tensors(manifest.tensors, machine("m").fetch(manifest))
    assert equal(got, {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors(1).items()})


def test_engines_of_one_machine_have_one_copy_between_them_and_each_may_write_to_its_own(sender: PullPublisher, machine: Machine):
    first, second = machine("m"), machine("m")
    manifest = sender.publish(1, tensors(1))
    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(lambda r: r.fetch(manifest), (first, second))
    size = sum(s.num_bytes for s in manifest.tensors)
    assert first.num_bytes + second.num_bytes == size == sender.server.num_bytes
    ours["a.weight"][:] = bytes(len(ours["a.weight"]))
    assert equal(as_tensors(manifest.tensors, theirs), tensors(1))


def test_a_copy_lies_there_while_somebody_serves_from_it_and_goes_with_its_last_user(
    sender: PullPublisher, machine: Machine, tmp_path: Path
):
    one, other = machine("m"), machine("m")
    for version in (1, 2, 3, 4):
        manifest = sender.publish(version, tensors(version))
        assert came(one, manifest)
        assert came(other, manifest)
        sender.release(version - 1)
        assert len(list((tmp_path / "m").iterdir())) == min(version, 2)  # the one that is served, and the one before
    one.close()
    assert len(list((tmp_path / "m").iterdir())) == 2
    other.close()
    assert list((tmp_path / "m").iterdir()) == []


def test_a_fetch_that_was_killed_is_gone_on_with_from_what_is_there_and_torn_bytes_are_fetched_anew(
    sender: PullPublisher, machine: Machine, tmp_path: Path
):
    manifest = sender.publish(1, tensors(1))
    killed = machine("m")
    killed.fetch(manifest)
    (file,) = (tmp_path / "m").iterdir()
    data = bytearray(file.read_bytes())
    killed.close()
    data[10] ^= 1  # as if this bucket had not been written
    file.write_bytes(data)
    after = machine("m")
    file.write_bytes(data)  # to make a receiver removes what nobody uses
    assert came(after, manifest)
    assert 0 < after.num_bytes <= PIECE


def test_a_machine_that_has_a_version_gives_it_to_others_when_the_trainer_is_gone(sender: PullPublisher, machine: Machine):
    manifest = sender.publish(1, tensors(1))
    first, second = machine("one"), machine("two")
    assert came(first, manifest)
    sender.server.shares[manifest.fingerprint].held.clear()  # the trainer names the engine, and gives nothing else any more
    assert came(second, manifest)
    assert second.num_bytes == first.num_bytes == sender.server.num_bytes


def test_skipped_steps_give_the_same_weights_another_number_and_nothing_is_sent_again(sender: PullPublisher, machine: Machine):
    one = machine("m")
    first, second = sender.publish(1, tensors(1)), sender.publish(2, tensors(1))
    assert came(one, first)
    sender.release(1)
    before = one.num_bytes
    assert equal(as_tensors(second.tensors, one.fetch(second)), tensors(1))
    assert one.num_bytes == before
    assert equal(as_tensors(second.tensors, machine("late").fetch(second)), tensors(1))


def test_versions_hold_their_slots_until_they_are_released(sender: PullPublisher, machine: Machine):
    manifests = [sender.publish(version, tensors(version)) for version in (1, 2, 3)]
    with pytest.raises(SlotBusy, match="versions 1, 2, 3 hold all slots"):
        sender.publish(4, tensors(4))
    sender.release(1)
    with pytest.raises(EngineUnavailable, match=r"fetching version 1 by pull: nobody says .*: it answers 404"):
        machine("m").fetch(manifests[0])
    assert came(machine("m"), manifests[2])
    sender.publish(4, tensors(4))


def test_differences_travel_too_and_what_is_fetched_is_only_what_an_engine_lacks(tmp_path: Path, machine: Machine):
    base = {"w": torch.zeros(4000, dtype=torch.bfloat16)}
    with publisher("pull", name="unused", folder=tmp_path, full_every=4) as made:
        ours = machine("m")
        end = DeltaReceiver(ours)
        for version in range(1, 7):
            before = ours.num_bytes
            base["w"][version] += version
            manifest = sent(made.publish(version, base))
            assert equal(as_tensors(manifest.tensors, end.fetch(manifest)), base)
            assert len(manifest.deltas) == (version - 1) % 4
            assert ours.num_bytes - before == (manifest.deltas[-1].payload.num_bytes if manifest.deltas else 8000)
            made.release(version - 1)


class Rows:
    """What one of three ranks has of a tensor, as FSDP2 spreads it."""

    def __init__(self, whole: torch.Tensor, rank: int) -> None:
        self.shape, self.dtype, self.is_floating_point = whole.shape, whole.dtype, whole.is_floating_point
        self.placements, self.device_mesh = (Shard(0),), SimpleNamespace(ndim=1, size=lambda: 3, get_local_rank=lambda: rank)
        parts = whole.chunk(3)
        self.local = parts[rank] if rank < len(parts) else whole[:0]

    def to_local(self) -> torch.Tensor:
        return self.local


def test_ranks_give_away_their_own_rows_and_the_first_what_none_has_in_part(monkeypatch: pytest.MonkeyPatch, machine: Machine):
    """Of 7 rows two ranks have 3 and the third 1; of 2 rows the third has none."""
    monkeypatch.setattr(pull_publisher, "DTensor", Rows)
    whole = {"w": torch.randn(7, 9), "few": torch.randn(2, 3), "many": torch.arange(300).reshape(300, 1), "plain": torch.tensor(3.0)}
    said, met = [b"", b"", b""], threading.Barrier(3)

    def gather(rank: int, told: bytes) -> list[bytes]:
        said[rank] = told
        met.wait(20)
        return said

    def published(rank: int) -> WeightManifest:
        mine = {n: t if n == "plain" else Rows(t, rank) for n, t in whole.items()}
        return ranks[rank].publish(1, mine)  # pyright: ignore[reportArgumentType]

    ranks = [PullPublisher(dtype=torch.bfloat16, rank=rank, gather=partial(gather, rank)) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        manifests = list(pool.map(published, range(3)))
    assert manifests[0] == manifests[1] == manifests[2]
    end = machine("m")
    got = as_tensors(manifests[0].tensors, end.fetch(manifests[0]))
    assert equal(got, {n: t.bfloat16() if t.is_floating_point() else t for n, t in whole.items()})
    bfloat16, int64 = 2, 8
    sent_by = [3 * 9 * bfloat16 + 1 * 3 * bfloat16 + 100 * int64 for _ in range(3)]
    sent_by[0] += bfloat16
    sent_by[2] -= 2 * 9 * bfloat16 + 3 * bfloat16
    assert [rank.server.num_bytes for rank in ranks] == sent_by
    for rank in ranks:
        rank.close()


def test_a_tensor_that_ranks_have_in_other_parts_than_rows_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, sender: PullPublisher):
    monkeypatch.setattr(pull_publisher, "DTensor", Rows)
    columns = Rows(torch.ones(3, 3), 0)
    columns.placements = (Shard(1),)
    with pytest.raises(ConfigError, match=r"handing 'w' over: ranks have it as .*, not by rows"):
        sender.publish(1, {"w": columns})  # pyright: ignore[reportArgumentType]


# --- What is refused -------------------------------------------------------------------------------------------------


def spoil(sender: PullPublisher, manifest: WeightManifest) -> SharedVersion:
    """One of its bytes is wrong from now on, after it was hashed."""
    share = sender.server.shares[manifest.fingerprint]
    views = share.views[0]
    assert views is not None
    views[0][0] ^= 1
    return share


def test_wrong_bytes_of_one_source_come_from_another_and_the_source_is_counted(machine: Machine):
    with PullPublisher() as good, PullPublisher() as bad:
        manifest = good.publish(1, tensors(1))
        assert bad.publish(1, tensors(1)).fingerprint == manifest.fingerprint
        share = spoil(bad, manifest)
        good.server.shares[manifest.fingerprint].held.discard(0)
        share.held.intersection_update({0})  # so that it is asked
        both, end = f"{bad.server.url} {good.server.url}", machine("m")

        def has_it_too() -> None:
            while not bad.server.num_bytes:
                time.sleep(0.01)
            good.server.shares[manifest.fingerprint].held.add(0)

        later = threading.Thread(target=has_it_too, daemon=True)
        later.start()
        assert came(end, replace(manifest, location=both))
        later.join(20)
    assert end.blamed == {place(bad.server.url): 1}


def test_without_another_source_a_wrong_bucket_is_a_clear_error_and_nothing_of_it_stays(
    sender: PullPublisher, machine: Machine, tmp_path: Path
):
    end = machine("m")
    assert came(end, sender.publish(1, tensors(1)))
    manifest = sender.publish(2, tensors(2))
    spoil(sender, manifest)
    where = place(manifest.location)
    said = (
        rf"fetching version 2 by pull: \d+ of \d+ buckets are missing, and no source is left \({where}: wrong bytes in bucket 0\); what is "
    )
    with pytest.raises(WeightsCorrupt, match=said + "served stays"):
        end.fetch(manifest)
    assert end.blamed == {where: 1}
    assert len(list((tmp_path / "m").iterdir())) == 1
    assert came(end, sender.publish(3, tensors(3)))


def test_a_tree_of_other_leaves_is_refused_before_anything_is_asked_for(sender: PullPublisher, machine: Machine):
    manifest = sender.publish(1, tensors(1))
    share = sender.server.shares[manifest.fingerprint]
    lied = msgspec.structs.replace(share.tree[0][0], digest=b"x" * 16)
    share.tree = ((lied, *share.tree[0][1:]), *share.tree[1:])
    with pytest.raises(EngineUnavailable, match="its leaves are not this version's"):
        machine("m").fetch(manifest)
    assert sender.server.num_bytes == 0


def test_without_the_secret_nothing_is_said(sender: PullPublisher, machine: Machine):
    manifest = sender.publish(1, tensors(1))
    with pytest.raises(EngineUnavailable, match="it answers 404") as told:
        machine("m").fetch(replace(manifest, location=f"http://{place(manifest.location)}/wrong"))
    assert "wrong" not in str(told.value)


def test_a_trainer_that_is_gone_is_a_clear_error(sender: PullPublisher, machine: Machine):
    manifest = sender.publish(1, tensors(1))
    sender.close()
    with pytest.raises(EngineUnavailable, match=r"nobody says what it is made of .*refused"):
        machine("m").fetch(manifest)
    with pytest.raises(WeightsCorrupt, match="its location is not"):
        machine("m").fetch(replace(manifest, location="tcp://x:1/y"))
    with pytest.raises(NotSupported):
        receiver().fetch(replace(manifest, transport="push"))
