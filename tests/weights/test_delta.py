"""Differences: what arrives is the version bit for bit, from wherever the engine starts, or an error says why not."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from midflight.errors import ConfigError, RequestRejected, SlotBusy, WeightsCorrupt
from midflight.models.names import as_tensors
from midflight.types import TensorSpec, Version, WeightManifest
from midflight.weights.difference_codec import BLOCK, Frames, encode
from midflight.weights.manifest import ALIGNMENT, MAX_DELTAS, check_extents
from midflight.weights.transports import memory_files
from midflight.weights.transports.delta_receiver import DeltaReceiver
from midflight.weights.transports.deltas import DeltaPublisher
from midflight.weights.transports.file_receiver import FileReceiver
from midflight.weights.transports.memory_files import SHARED
from midflight.weights.transports.publisher import Publisher
from midflight.weights.transports.select import publisher, receiver

from .fleets import sent

NAME = f"midflight-delta-{os.getpid()}"
FULL_BYTES = 4000 * 2 + 300 * 4 + 9 * 8 + 2


def weights(version: int) -> dict[str, Tensor]:
    """Several dtypes, a view that is not contiguous, a scalar, an empty one; one word in a hundred changes from version to version."""
    large = torch.randn(4000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    large[version % 100 :: 100] += version
    return {
        "large": large.view(50, 80),
        "transposed": torch.arange(300.0).view(20, 15).t(),
        "counts": torch.arange(9) * version,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float(version), dtype=torch.bfloat16),
    }


def equal(manifest: WeightManifest, got: Mapping[str, memoryview], expected: dict[str, Tensor]) -> bool:
    tensors = as_tensors(manifest.tensors, got)
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[n], t) and tensors[n].dtype == t.dtype for n, t in expected.items()
    )


@pytest.fixture(params=["under /dev/shm", "in a folder"])
def sender(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    if request.param == "in a folder":
        monkeypatch.setattr(memory_files, "SHARED", tmp_path / "absent")
    with publisher("shared_memory", name=NAME, folder=tmp_path / "weights", full_every=4) as made:
        yield made


@pytest.fixture
def shared() -> Iterator[DeltaPublisher]:
    with publisher("shared_memory", name=NAME, folder=Path(), full_every=4) as made:
        assert isinstance(made, DeltaPublisher)
        yield made


def publish(sender: Publisher, versions: range) -> list[WeightManifest]:
    """As a trainer does: a version is released when the next one is live."""
    made: list[WeightManifest] = []
    for version in versions:
        made.append(sent(sender.publish(version, weights(version))))
        sender.release(version - 1)
    return made


class Counting:
    """A receiver that remembers the names of what it fetched."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
        self.fetched.append("whole" if manifest.tensors[0].name != "delta" else "delta")
        return FileReceiver().fetch(manifest)


# --- The codec -------------------------------------------------------------------------------------------------------


def changed(old: bytes, new: bytes, width: int) -> tuple[bytes, int]:
    """What the decoder makes of the encoder's bytes, and how many those were."""
    payload = b"".join(encode(memoryview(old), memoryview(new), width=width))
    onto = bytearray(old)
    frames = Frames(memoryview(payload))
    frames.apply(memoryview(onto), width=width)
    frames.end()
    return bytes(onto), len(payload)


@given(st.data(), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=100, deadline=None)
def test_any_words_become_any_others_bit_for_bit(data: st.DataObject, width: int):
    old = data.draw(st.binary(max_size=300).map(lambda b: b[: len(b) - len(b) % width]))
    new = data.draw(st.binary(min_size=len(old), max_size=len(old)))
    assert changed(old, new, width)[0] == new


@given(num_words=st.integers(1, 5000), share=st.sampled_from([0.0, 0.001, 0.05, 0.4, 0.6, 1.0]), width=st.sampled_from([1, 2, 4, 8]), seed=st.integers(0, 99))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_few_or_many_changed_words_arrive_bit_for_bit(num_words: int, share: float, width: int, seed: int):
    draw = random.Random(seed)
    old = draw.randbytes(num_words * width)
    words = [old[i : i + width] for i in range(0, len(old), width)]
    new = b"".join(draw.randbytes(width) if draw.random() < share else word for word in words)
    assert changed(old, new, width)[0] == new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_more_words_than_a_block_arrive_with_not_a_numbers_infinities_and_the_sign_of_zero(dtype: torch.dtype):
    old = (torch.randn(BLOCK + 77, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    new = old.clone()
    if dtype.is_floating_point:
        new[[0, 5, 254, 255, 256, 70_000, BLOCK - 1, BLOCK, BLOCK + 76]] = torch.tensor(
            [float("nan"), -0.0, 0.0, float("inf"), float("-inf"), 1e-38, -1e-45, 3e38, -float("nan")]
        ).to(dtype)
        payload_of_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32).to(dtype)
        new[1234] = payload_of_nan[0]
    else:
        new[[0, 254, 255, 256, BLOCK - 1, BLOCK + 76]] += 1
    raw = [bytes(t.view(torch.uint8).numpy()) for t in (old, new)]
    got, num_bytes = changed(raw[0], raw[1], dtype.itemsize)
    assert got == raw[1]
    assert num_bytes < 300


def test_what_a_small_step_changes_takes_a_small_part_of_its_bytes():
    """One word in twenty, by one unit in the last place: entropy 0.29 + 0.05 bits of 16, so 2.1 %; zlib's Huffman gets near it."""
    draw = torch.Generator().manual_seed(2)
    old = torch.randint(0, 1 << 15, (200_000,), generator=draw, dtype=torch.int16)
    step = (torch.rand(200_000, generator=draw) < 0.05) * (2 * torch.randint(0, 2, (200_000,), generator=draw) - 1)
    raw = [bytes(t.view(torch.uint8).numpy()) for t in (old, (old + step).to(torch.int16))]
    got, num_bytes = changed(raw[0], raw[1], 2)
    assert got == raw[1]
    assert 0.021 < num_bytes / len(raw[0]) < 0.03


def test_noise_takes_hardly_more_than_its_own_bytes():
    draw = random.Random(3)
    old, new = draw.randbytes(100_000), draw.randbytes(100_000)
    got, num_bytes = changed(old, new, 4)
    assert got == new
    assert num_bytes < 100_100


@given(st.binary(max_size=200), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=200, deadline=None)
def test_garbage_is_a_value_error_or_wrong_words_and_nothing_worse(garbage: bytes, width: int):
    taken_for_difference(garbage, bytearray(64 * width), width)


def taken_for_difference(payload: bytes | memoryview, onto: bytearray, width: int) -> bool:
    size, frames = len(onto), Frames(memoryview(payload))
    try:
        frames.apply(memoryview(onto), width=width)
        frames.end()
    except ValueError:
        return False
    return len(onto) == size


@given(st.integers(0, 10_000), st.integers(0, 7), st.integers(0, 300))
@settings(max_examples=200, deadline=None)
def test_a_flipped_bit_or_a_cut_in_a_real_payload_is_a_value_error_or_wrong_words(position: int, bit: int, cut: int):
    old, new = bytes(2000), bytes(i % 7 if i % 5 == 0 else 0 for i in range(2000))
    payload = bytearray(b"".join(encode(memoryview(old), memoryview(new), width=2)))
    assert taken_for_difference(payload, bytearray(old), 2)
    payload[position % len(payload)] ^= 1 << bit
    taken_for_difference(memoryview(payload)[: len(payload) - cut], bytearray(old), 2)


def test_what_inflates_to_more_than_the_words_need_is_refused_before_it_is_inflated():
    import struct
    import tracemalloc
    import zlib

    made = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = made.compress(bytes(50_000_000)) + made.flush()
    for count, lengths, body in ((10, (len(bomb), 0, 0), bomb), (1000, (0, len(bomb), 0), bomb)):
        payload = struct.pack("<4I", count, *lengths) + body
        tracemalloc.start()
        with pytest.raises(ValueError, match="inflate"):
            Frames(memoryview(payload)).apply(memoryview(bytearray(2000)), width=2)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


# --- From publisher to receiver --------------------------------------------------------------------------------------


def test_each_version_arrives_and_every_fourth_is_whole(sender: Publisher):
    engine, numbers = receiver(), []
    for version in range(1, 11):
        (manifest,) = publish(sender, range(version, version + 1))
        numbers.append(len(manifest.deltas))
        assert equal(manifest, engine.fetch(manifest), weights(version))
        if manifest.deltas:
            assert manifest.deltas[-1].payload.num_bytes < 0.2 * FULL_BYTES
    assert numbers == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_the_fingerprint_is_that_of_the_whole_version(sender: Publisher, tmp_path: Path):
    with publisher("pull", name=NAME, folder=tmp_path / "whole") as plain:
        for version in (1, 2, 3):
            assert sender.publish(version, weights(version)).fingerprint == plain.publish(version, weights(version)).fingerprint


def test_an_engine_that_was_never_here_starts_from_the_whole_version(sender: Publisher):
    newest = publish(sender, range(1, 5))[-1]
    assert len(newest.deltas) == 3
    inner = Counting()
    assert equal(newest, DeltaReceiver(inner).fetch(newest), weights(4))
    assert inner.fetched == ["whole", "delta", "delta", "delta"]


def test_an_engine_that_skipped_a_version_starts_from_the_one_it_has(sender: Publisher):
    inner = Counting()
    engine = DeltaReceiver(inner)
    engine.fetch(publish(sender, range(1, 3))[-1])
    inner.fetched.clear()
    newest = publish(sender, range(3, 5))[-1]
    assert equal(newest, engine.fetch(newest), weights(4))
    assert inner.fetched == ["delta", "delta"], "from version 2"
    inner.fetched.clear()
    assert equal(newest, engine.fetch(newest), weights(4))
    assert inner.fetched == [], "staged again"
    after = publish(sender, range(5, 7))[-1]
    assert equal(after, engine.fetch(after), weights(6)), "the way from version 4 was skipped: it begins at the whole version 5"
    assert inner.fetched == ["whole", "delta"]


def test_the_same_weights_under_the_next_number_take_a_few_bytes(sender: Publisher):
    sender.publish(1, weights(1))
    manifest = sender.publish(2, weights(1))
    assert manifest.deltas[0].payload.num_bytes == 4 * 4, "one count for each tensor that has words"
    assert equal(manifest, receiver().fetch(manifest), weights(1))


def test_without_differences_nothing_is_kept(sender: Publisher):
    engine = DeltaReceiver(FileReceiver())
    engine.fetch(publish(sender, range(1, 2))[0])
    assert engine._standing is None


def test_what_is_fetched_is_the_callers_alone_aligned_and_writable(sender: Publisher):
    engine = receiver()
    second = publish(sender, range(1, 3))[-1]
    got = engine.fetch(second)
    for tensor in as_tensors(second.tensors, got).values():
        assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT == 0
        tensor.zero_()
    third = publish(sender, range(3, 4))[0]
    later = engine.fetch(third)
    assert equal(third, later, weights(3))
    assert not any(bytes(view).strip(b"\0") for view in got.values())


def test_i7_a_changed_byte_in_the_payload_is_found_and_the_next_attempt_begins_with_the_whole_version(sender: Publisher):
    inner = Counting()
    engine = DeltaReceiver(inner)
    for manifest in publish(sender, range(1, 3)):
        engine.fetch(manifest)
    third = publish(sender, range(3, 4))[0]
    flip(third)
    with pytest.raises(WeightsCorrupt, match="version 3"):
        engine.fetch(third)
    flip(third)
    inner.fetched.clear()
    assert equal(third, engine.fetch(third), weights(3))
    assert inner.fetched == ["whole", "delta", "delta"]


def flip(manifest: WeightManifest) -> None:
    delta = manifest.deltas[-1]
    with Path(delta.location).open("r+b") as file:
        file.seek(delta.payload.offset + delta.payload.num_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_i7_a_difference_applied_to_another_base_is_found(shared: Publisher):
    manifests = publish(shared, range(1, 5))
    second, third, fourth = manifests[1:]
    wrong = replace(fourth, deltas=(*second.deltas, fourth.deltas[-1]))
    engine = receiver()
    with pytest.raises(WeightsCorrupt, match="differences lead to"):
        engine.fetch(wrong)
    assert equal(third, engine.fetch(third), weights(3))


def test_i7_a_payload_that_is_no_difference_is_found(shared: Publisher):
    """Another tensor's bytes under their true fingerprint: the receiver below is content, the codec is not."""
    shared.publish(1, weights(1))
    manifest = shared.publish(2, weights(2))
    inner = FileReceiver()
    noise = random.Random(0).randbytes(manifest.deltas[0].payload.num_bytes)

    class Lying:
        def fetch(self, manifest: WeightManifest) -> Mapping[str, memoryview]:
            return {"delta": memoryview(noise)} if manifest.tensors[0].name == "delta" else inner.fetch(manifest)

    with pytest.raises(WeightsCorrupt, match="from version 1 is none"):
        DeltaReceiver(Lying()).fetch(manifest)


def test_two_threads_get_what_they_asked_for(shared: Publisher):
    manifests = publish(shared, range(1, 5))[1:]
    engine, got = receiver(), {}
    threads = [threading.Thread(target=lambda m=m: got.update({m.version: engine.fetch(m)})) for m in manifests * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(equal(m, got[m.version], weights(m.version)) for m in manifests)


def test_differences_go_by_broadcast_too():
    with publisher("direct", name=NAME, folder=Path(), full_every=4) as sender:
        engine, late = receiver(), receiver()
        for version in (1, 2, 3):
            manifest = sender.publish(version, weights(version))
            assert equal(manifest, engine.fetch(manifest), weights(version))
            sender.release(version - 1)
        assert len(manifest.deltas) == 2
        assert equal(manifest, late.fetch(manifest), weights(3))


# --- When a version is whole -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["shape", "dtype", "name", "more"])
def test_other_names_shapes_or_dtypes_begin_anew(sender: Publisher, change: str):
    base = {"a": torch.arange(1000.0), "b": torch.ones(8)}
    other = {
        "shape": base | {"a": base["a"].view(10, 100)},
        "dtype": base | {"b": torch.ones(8, dtype=torch.int32)},
        "name": {"a": base["a"], "c": base["b"]},
        "more": base | {"c": torch.ones(3000)},
    }[change]
    engine = receiver()
    for version, tensors, whole in ((1, base, True), (2, base, False), (3, other, True), (4, other, False)):
        manifest = sender.publish(version, tensors)
        assert (not manifest.deltas) == whole
        assert equal(manifest, engine.fetch(manifest), tensors)
        sender.release(version - 1)


def test_noise_is_published_whole_and_only_one_version_in_a_period_is_tried(shared: DeltaPublisher, monkeypatch: pytest.MonkeyPatch):
    from midflight.weights.transports import deltas as module

    tried: list[int] = []
    monkeypatch.setattr(module, "encode", lambda old, new, *, width: tried.append(version) or encode(old, new, width=width))
    engine = receiver()
    for version in range(1, 11):
        noise = {"w": torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int32)}
        manifest = shared.publish(version, noise)
        assert manifest.deltas == ()
        assert equal(manifest, engine.fetch(manifest), noise)
        shared.release(version - 1)
    assert tried == [2, 6, 10]


def test_differences_of_a_period_together_are_no_larger_than_the_weights():
    """Half of each word is noise: a difference is a bit more than half the size, so two would be more than the whole."""
    draw = torch.Generator().manual_seed(0)
    with publisher("shared_memory", name=NAME, folder=Path(), full_every=10) as sender:
        lengths = []
        for version in range(1, 8):
            manifest = sender.publish(version, {"w": torch.randint(0, 2**16 + 2**12, (20_000,), generator=draw, dtype=torch.int32)})
            lengths.append(len(manifest.deltas))
            check_extents(manifest)
            sender.release(version - 1)
    assert lengths == [0, 1, 0, 1, 0, 1, 0]


def test_a_version_that_failed_to_be_published_is_no_base(shared: DeltaPublisher, monkeypatch: pytest.MonkeyPatch):
    shared.publish(1, weights(1))
    with monkeypatch.context() as broken, pytest.raises(ConfigError):
        broken.setattr(shared._inner, "publish", failing)
        shared.publish(2, weights(2))
    manifest = shared.publish(3, weights(3))
    assert manifest.deltas == ()
    assert equal(manifest, receiver().fetch(manifest), weights(3))


def failing(version: Version, tensors: Mapping[str, Tensor]) -> WeightManifest:
    raise ConfigError(f"no room for {version} of {len(tensors)} tensors")


# --- What is kept ----------------------------------------------------------------------------------------------------


def published_bytes() -> int:
    return sum(p.stat().st_size for p in SHARED.glob(f"{NAME}*"))


def test_the_way_to_a_version_stays_until_its_release(shared: DeltaPublisher):
    first = shared.publish(1, weights(1))
    second = shared.publish(2, weights(2))
    shared.release(1)
    assert equal(second, receiver().fetch(second), weights(2)), "version 1 is released and still on the way"
    for version in (3, 4):
        shared.publish(version, weights(version))
        shared.release(version - 1)
    fifth = shared.publish(5, weights(5))
    assert fifth.deltas == ()
    assert Path(first.location).exists(), "version 4, which is live, is reached from it"
    shared.release(4)
    shared.publish(6, weights(6))
    assert not Path(first.location).exists()
    assert equal(fifth, receiver().fetch(fifth), weights(5))


def test_the_newest_version_is_gone_on_from_even_if_it_was_released(shared: DeltaPublisher):
    for version in (1, 2, 3):
        manifest = shared.publish(version, weights(version))
        shared.release(version)
    assert len(manifest.deltas) == 2
    assert equal(manifest, receiver().fetch(manifest), weights(3))


def test_a_fourth_version_waits_for_a_release(sender: Publisher):
    for version in (1, 2, 3):
        sender.publish(version, weights(version))
    with pytest.raises(SlotBusy, match="versions 1, 2, 3 hold all slots"):
        sender.publish(4, weights(4))
    sender.release(1)
    with pytest.raises(SlotBusy, match="never reused"):
        sender.publish(3, weights(3))
    manifest = sender.publish(4, weights(4))
    assert equal(manifest, receiver().fetch(manifest), weights(4))
    sender.release(99)


def test_memory_is_one_whole_version_and_differences_but_for_two_during_a_refresh(shared: DeltaPublisher):
    most: dict[bool, int] = {True: 0, False: 0}
    for version in range(1, 30):
        whole = not shared.publish(version, weights(version)).deltas
        most[whole] = max(most[whole], published_bytes())
        shared.release(version - 1)
    page, differences = 4096, 3 * 0.2 * FULL_BYTES
    assert most[False] < FULL_BYTES + differences + page
    assert most[True] < 2 * FULL_BYTES + differences + 2 * page
    shared.close()
    assert published_bytes() == 0


def test_at_worst_memory_is_four_times_the_weights():
    """A chain as long as its rule lets it grow is live while two versions of noise wait."""
    draw, most = torch.Generator().manual_seed(0), 0
    with publisher("shared_memory", name=NAME, folder=Path(), full_every=10) as sender:
        for version in range(1, 30):
            noisy = version % 4 in (3, 0)
            words = torch.randint(0, 2**31 if noisy else 2**12, (20_000,), generator=draw, dtype=torch.int32)
            sender.publish(version, {"w": words})
            most = max(most, published_bytes())
            sender.release(version - 2)
    assert most <= 4 * 80_000 + 1000


# --- Manifests from outside ------------------------------------------------------------------------------------------


def test_a_manifest_whose_differences_make_no_sense_is_refused_by_both_ends(shared: Publisher):
    shared.publish(1, weights(1))
    good = shared.publish(2, weights(2))
    delta = good.deltas[0]
    assert sent(good) == good
    for spec in (
        replace(delta.payload, dtype="F32"),
        replace(delta.payload, num_bytes=-5, shape=(-5,)),
        replace(delta.payload, offset=-1),
        replace(delta.payload, shape=(3, 4)),
    ):
        refused(replace(good, deltas=(replace(delta, payload=spec),)), "difference claims")
    huge = TensorSpec("delta", "U8", (1 << 60,), 0, 1 << 60)
    refused(replace(good, deltas=(replace(delta, payload=huge),)), f"weights of {FULL_BYTES}")
    refused(replace(good, deltas=(delta,) * (MAX_DELTAS + 1)), "65 differences")


def refused(manifest: WeightManifest, match: str) -> None:
    with pytest.raises(RequestRejected, match=match):
        sent(manifest)
    with pytest.raises(RequestRejected, match=match):
        receiver().fetch(manifest)


def test_the_way_arrives_over_the_trainers_route(shared: Publisher):
    from midflight.run.api.trainer_routes import WeightsBody

    shared.publish(1, weights(1))
    manifest = shared.publish(2, weights(2))
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=WeightsBody).deltas == manifest.deltas


def test_a_manifest_whose_payload_cannot_be_read_is_refused_at_the_door(shared: Publisher, tmp_path: Path):
    from midflight.weights.transports.posted_files import check_readable

    shared.publish(1, weights(1))
    good = shared.publish(2, weights(2))
    check_readable(good)
    delta = good.deltas[0]
    (tmp_path / "short").write_bytes(b"abc")
    for location in ("absent", "short"):
        wrong = replace(good, deltas=(replace(delta, location=str(tmp_path / location)),))
        with pytest.raises(RequestRejected, match=location):
            check_readable(wrong)
        with pytest.raises(WeightsCorrupt):
            receiver().fetch(wrong)
