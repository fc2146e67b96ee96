"""Transports: what is published in one process arrives in another byte for byte, or an error says why not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import Tensor

from midflight.errors import ConfigError, NotSupported, RequestRejected, SlotBusy, WeightsCorrupt
from midflight.models.names import as_tensors
from midflight.types import TensorSpec
from midflight.weights.manifest import ALIGNMENT, layout, set_aside, views
from midflight.weights.transports import memory_files
from midflight.weights.transports.memory_files import SHARED, remove_stale
from midflight.weights.transports.publisher import Publisher
from midflight.weights.transports.select import publisher, receiver
from midflight.weights.transports.shared_memory import SharedMemoryPublisher

from .fleets import sent
from .posted import PostedFiles

NAME = f"midflight-test-{os.getpid()}"


def tensors(version: int) -> dict[str, Tensor]:
    """Odd sizes, several dtypes, a view that is not contiguous, a scalar, an empty one."""
    draw = torch.Generator().manual_seed(version)
    return {
        "z.weight": torch.randn(7, 5, generator=draw),
        "a.weight": torch.randn(3, 300, generator=draw).to(torch.bfloat16),
        "transposed": torch.randn(4, 6, generator=draw).t(),
        "scalar": torch.tensor(float(version)),
        "empty": torch.empty(0, 3),
        "counts": torch.arange(9) * version,
    }


@pytest.fixture(params=["under /dev/shm", "in a folder", "posted"])
def sender(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    if request.param == "posted":
        made: Publisher = PostedFiles(tmp_path / "weights")
    else:
        made = publisher("shared_memory", name=NAME, folder=tmp_path / "weights")
    if request.param == "in a folder":
        monkeypatch.setattr(memory_files, "SHARED", tmp_path / "absent")
    with made:
        yield made


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[n], t) and got[n].dtype == t.dtype for n, t in expected.items())


# --- Versions that are files -------------------------------------------------------------------------------------------------


def test_what_is_published_is_fetched_byte_for_byte(sender: Publisher):
    manifest = sent(sender.publish(1, tensors(1)))
    got = receiver().fetch(manifest)
    assert equal(as_tensors(manifest.tensors, got), tensors(1))


def test_another_process_without_torch_fetches_and_verifies_it(sender: Publisher, tmp_path: Path):
    manifest = sender.publish(1, tensors(1))
    (tmp_path / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    program = """if True:
        import sys, pathlib
        import msgspec
        from midflight.types import WeightManifest
        from midflight.weights.transports.select import receiver
        got = receiver().fetch(msgspec.json.decode(pathlib.Path(sys.argv[1]).read_bytes(), type=WeightManifest))
        assert "torch" not in sys.modules
        print(bytes(got["counts"]).hex())
    """
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "manifest.json")], capture_output=True, text=True)
    assert done.stdout.strip() == (torch.arange(9)).numpy().tobytes().hex(), done.stderr
    assert Path(manifest.location).exists(), "the end of a reader must not remove what was published"


def test_the_fingerprint_does_not_depend_on_the_transport(tmp_path: Path):
    with PostedFiles(tmp_path) as file, publisher("shared_memory", name=NAME, folder=tmp_path) as shared:
        assert file.publish(1, tensors(1)).fingerprint == shared.publish(1, tensors(1)).fingerprint
        assert file.publish(2, tensors(2)).fingerprint != file.publish(3, tensors(3)).fingerprint


@pytest.mark.parametrize("tensor", range(6))
def test_i7_a_changed_byte_in_any_tensor_is_found(sender: Publisher, tensor: int):
    manifest = sender.publish(1, tensors(1))
    spec = manifest.tensors[tensor]
    with Path(manifest.location).open("r+b") as file:
        file.seek(spec.offset + spec.num_bytes // 2)
        byte = file.read(1)[0]
        file.seek(spec.offset + spec.num_bytes // 2)
        file.write(bytes([byte ^ 1]))
    if spec.num_bytes:
        with pytest.raises(WeightsCorrupt, match="version 1"):
            receiver().fetch(manifest)


def test_i7_bytes_that_are_missing_or_gone_are_found(sender: Publisher):
    manifest = sender.publish(1, tensors(1))
    size = max(s.offset + s.num_bytes for s in manifest.tensors)
    os.truncate(manifest.location, size - 3)
    with pytest.raises(WeightsCorrupt, match="ends inside tensor"):
        receiver().fetch(manifest)
    Path(manifest.location).unlink()
    with pytest.raises(WeightsCorrupt, match="No such file"):
        receiver().fetch(manifest)


def test_i7_memory_is_used_again_when_nobody_sees_any_of_it_and_not_before() -> None:
    specs = layout([("a", "U8", (300_001,))])

    def place(memory: memoryview) -> int:
        return int(torch.frombuffer(memory, dtype=torch.uint8).data_ptr())

    first = set_aside(specs)
    part, at = as_tensors(specs, views(specs, first))["a"][10:20], place(first)
    part.fill_(7)
    del first
    second = set_aside(specs)
    assert place(second) != at and part.tolist() == [7] * 10
    del part
    assert place(set_aside(specs)) == at
    assert len(set_aside(layout([("a", "U8", (300_002,))]))) == 300_002


def test_i7_what_the_publisher_does_afterwards_does_not_reach_the_bytes_fetched(sender: Publisher):
    manifest = sender.publish(1, tensors(1))
    got = as_tensors(manifest.tensors, receiver().fetch(manifest))
    for version in (1, 2, 3):
        sender.release(version)
        sender.publish(version + 1, tensors(version + 1))
    sender.close()
    assert equal(got, tensors(1))


def test_closing_removes_everything_and_may_be_repeated(sender: Publisher):
    location = Path(sender.publish(1, tensors(1)).location)
    sender.close()
    sender.close()
    assert [p for p in location.parent.iterdir() if p.name.startswith(NAME) or p.suffix == ".safetensors"] == []


# --- Shared memory ---------------------------------------------------------------------------------------------------


def test_a_slot_is_not_overwritten_before_its_release():
    with SharedMemoryPublisher(NAME) as sender:
        first, second, third = (sender.publish(version, tensors(version)) for version in (1, 2, 3))
        with pytest.raises(SlotBusy, match="versions 1, 2, 3 hold all slots"):
            sender.publish(4, tensors(4))
        assert equal(as_tensors(first.tensors, receiver().fetch(first)), tensors(1))
        sender.release(1)
        fourth = sender.publish(4, tensors(4))
        assert fourth.location == first.location, "the slots stand"
        assert fourth.tensors == first.tensors
        for manifest in (second, third):
            assert equal(as_tensors(manifest.tensors, receiver().fetch(manifest)), tensors(manifest.version))
        with pytest.raises(WeightsCorrupt):
            receiver().fetch(first)
        with pytest.raises(SlotBusy, match="never reused"):
            sender.publish(4, tensors(4))
        sender.release(77)


def test_versions_with_more_tensors_than_the_first_are_refused_by_name():
    with SharedMemoryPublisher(NAME) as sender:
        sender.publish(1, tensors(1))
        with pytest.raises(ConfigError, match="same tensors"):
            sender.publish(2, tensors(2) | {"more": torch.zeros(10_000)})


def test_files_of_killed_publishers_are_removed_and_those_of_living_ones_stay():
    program = f"""if True:
        import torch, time
        from midflight.weights.transports.shared_memory import SharedMemoryPublisher
        sender = SharedMemoryPublisher("{NAME}")
        print(sender.publish(1, {{"w": torch.ones(3)}}).location, flush=True)
        time.sleep(60)
    """
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    left = Path(child.stdout.readline().strip())
    with SharedMemoryPublisher(NAME) as living:
        mine = Path(living.publish(1, tensors(1)).location)
        assert remove_stale(NAME, [SHARED]) == []
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert left.exists()
        assert remove_stale(NAME, [SHARED]) == [left]
        assert mine.exists()
    assert list(SHARED.glob(f"{NAME}*")) == []


@pytest.mark.parametrize("full_every", [1, 3])
def test_closing_during_a_publication_hides_no_other_error_and_leaves_no_file(full_every: int, monkeypatch: pytest.MonkeyPatch):
    """A run that fails closes the publisher while a thread still publishes."""
    from midflight.weights.transports import shared_memory

    sender = publisher("shared_memory", name=NAME, folder=Path(), full_every=full_every)

    def closing(specs: tuple[TensorSpec, ...], view: memoryview, *, threads: int) -> str:
        sender.close()
        return ""

    monkeypatch.setattr(shared_memory, "fingerprint", closing)
    sender.publish(1, tensors(1))
    assert list(SHARED.glob(f"{NAME}*")) == []


@pytest.fixture
def small_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 100 000 bytes in the place of /dev/shm."""
    shared, reserved = tmp_path / "shm", os.posix_fallocate
    shared.mkdir()

    def free() -> int:
        return 100_000 - sum(path.stat().st_size for path in shared.iterdir())

    def reserve(file: int, offset: int, length: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().parent == shared and length > free():
            raise OSError(errno.ENOSPC, "No space left on device")
        reserved(file, offset, length)

    monkeypatch.setattr(memory_files, "SHARED", shared)
    monkeypatch.setattr(memory_files.os, "posix_fallocate", reserve)
    monkeypatch.setattr(memory_files.shutil, "disk_usage", lambda path: SimpleNamespace(free=free() if path == shared else 2**40))
    return shared


@pytest.mark.parametrize("full_every", [1, 3])
def test_what_has_no_room_under_dev_shm_is_a_file_in_the_runs_folder(full_every: int, small_shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    folder = Path("run/weights")
    with publisher("shared_memory", name=NAME, folder=folder, full_every=full_every) as sender:
        small = {"w": torch.ones(4000)}
        assert Path(sender.publish(1, small).location).parent == small_shared
    large = {"w": torch.zeros(30_000)}
    with publisher("shared_memory", name=NAME, folder=folder, full_every=full_every) as sender:
        for version in (1, 2, 3, 4):
            large["w"][version] += version
            manifest = sender.publish(version, large)
            monkeypatch.chdir("/")
            assert equal(as_tensors(manifest.tensors, receiver().fetch(manifest)), large)
            monkeypatch.chdir(tmp_path)
            assert Path(manifest.location).parent == folder.absolute(), "an engine may have another working folder"
            sender.release(version - 1)
        assert remove_stale(NAME, [folder]) == [], "it is locked, as it would be under /dev/shm"
    assert list(folder.iterdir()) == [] and list(small_shared.iterdir()) == []


def test_room_for_what_servers_load_is_left_under_dev_shm(small_shared: Path, tmp_path: Path):
    weights = {"w": torch.ones(4000)}  # three slots of 16 384 bytes leave 50 848
    for spare, place in ((50_848, small_shared), (50_849, tmp_path / "weights")):
        with publisher("shared_memory", name=NAME, folder=tmp_path / "weights", spare=spare) as sender:
            assert Path(sender.publish(1, weights).location).parent == place
    assert list(small_shared.iterdir()) == []


def test_without_room_anywhere_the_remedies_are_named(small_shared: Path, tmp_path: Path):
    (tmp_path / "weights").write_text("in the way")
    weights = {"w": torch.zeros(30_000)}
    remedies = r"No space left on device.*--shm-size\), or make room in .*weights"
    with publisher("shared_memory", name=NAME, folder=tmp_path / "weights") as sender, pytest.raises(ConfigError, match=remedies):
        sender.publish(1, weights)
    assert list(small_shared.iterdir()) == []


# --- The life of a version -------------------------------------------------------------------------------------------


def test_the_version_that_is_live_can_be_fetched_while_one_is_handed_over_and_one_waits(sender: Publisher):
    live = sender.publish(1, tensors(1))
    for version in (2, 3):
        sender.publish(version, tensors(version))
    assert equal(as_tensors(live.tensors, receiver().fetch(live)), tensors(1))


# --- Manifests -------------------------------------------------------------------------------------------------------


def test_tensors_are_packed_in_order_and_aligned():
    specs = layout([("a", "F32", (3,)), ("b", "BF16", (5, 2)), ("c", "U8", ())], start=10)
    assert [(s.offset, s.num_bytes) for s in specs] == [(64, 12), (128, 20), (192, 1)]
    assert all(s.offset % ALIGNMENT == 0 for s in specs)


def test_a_manifest_that_makes_no_sense_is_refused_by_name(sender: Publisher):
    manifest = sender.publish(1, tensors(1))
    assert sent(manifest) == manifest
    wrong = replace(manifest, tensors=(TensorSpec("w", "F32", (2,), 0, 9),))
    with pytest.raises(RequestRejected, match="'w' claims 9 bytes"):
        sent(wrong)


def test_unknown_transports_are_named_with_the_nearest():
    with pytest.raises(ConfigError, match="'shared_memory'"):
        publisher("shared-memory", name=NAME, folder=Path())
    with pytest.raises(ConfigError, match="Known: direct, pull, shared_memory"):
        publisher("file", name=NAME, folder=Path())
    with SharedMemoryPublisher(NAME) as sender, pytest.raises(NotSupported, match="'nccl'"):
        receiver().fetch(replace(sender.publish(1, tensors(1)), transport="nccl"))
