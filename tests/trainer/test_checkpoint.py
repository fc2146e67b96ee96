from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from tests.folders import mode_of, umask

from midflight.errors import CheckpointCorrupt, ConfigError
from midflight.trainer.checkpoint import load_checkpoint, stage
from midflight.trainer.folders import checkpoints, latest_checkpoint, newest_whole
from midflight.trainer.schedule import Schedule
from midflight.trainer.trainer import Fork, PolicyTrainer

from .fixtures import batch, save_checkpoint, tiny_model, trainer, weights


def fresh(seed: int = 0) -> PolicyTrainer:
    return trainer(tiny_model(seed=seed), schedule=Schedule("linear", warmup_steps=2, total_steps=9))


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    straight = fresh()
    for v in range(5):
        straight.step(batch(seed=v, version=v))
    first = fresh()
    for v in range(3):
        first.step(batch(seed=v, version=v))
    torch.manual_seed(11)
    save_checkpoint(tmp_path, first, cursor="row 17", keep=2)
    drawn = torch.rand(3)
    second = fresh(seed=99)
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    state = load_checkpoint(folder, second)
    assert torch.equal(torch.rand(3), drawn)
    assert (state.cursor, second.version, second.num_steps, second.lineage) == ("row 17", 3, 3, ())
    for v in range(3, 5):
        second.step(batch(seed=v, version=v))
    assert torch.equal(weights(second.model), weights(straight.model))


def test_the_files_of_a_checkpoint_may_be_read_as_any_new_file(tmp_path: Path) -> None:
    with umask(0o022):
        save_checkpoint(tmp_path, fresh(), cursor="", keep=1)
    assert {(path.suffix, mode_of(path)) for path in tmp_path.glob("version-*/*")} == {(".json", 0o644), (".safetensors", 0o644)}


def test_i8_only_the_newest_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    ours = fresh()
    assert latest_checkpoint(tmp_path) is None
    for v in range(4):
        save_checkpoint(tmp_path, ours, cursor="", keep=2)
        ours.step(batch(version=v))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "version-00000002", "version-00000003"]
    assert latest_checkpoint(tmp_path) == tmp_path / "version-00000003"


def saved_versions(folder: Path, versions: int) -> None:
    ours = fresh()
    for v in range(versions):
        save_checkpoint(folder, ours, cursor="", keep=versions)
        ours.step(batch(version=v))


def spoil(folder: Path) -> None:
    weights = folder / "rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")


def test_i8_the_newest_whole_checkpoint_takes_the_place_of_a_corrupt_one_which_is_said(tmp_path: Path) -> None:
    saved_versions(tmp_path, 3)
    said: list[str] = []
    assert newest_whole(tmp_path, said.append) == tmp_path / "version-00000002" and not said
    spoil(tmp_path / "version-00000002")
    (tmp_path / "version-00000001" / "state.json").unlink()
    assert newest_whole(tmp_path, said.append) == latest_checkpoint(tmp_path) == tmp_path / "version-00000000"
    (words,) = said
    assert "version-00000002/rank-00000.safetensors does not match the hash" in words and "version-00000001/state.json is missing" in words
    assert "goes on from version-00000000" in words
    left = ["abandoned-version-00000001", "abandoned-version-00000002", "latest", "version-00000000"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    said.clear()
    assert newest_whole(tmp_path, said.append) == tmp_path / "version-00000000" and not said


@pytest.mark.parametrize("written", ["", "version-00000009\n", "..", None])
def test_i8_a_latest_that_names_nothing_is_no_reason_to_remove_anything(tmp_path: Path, written: str | None) -> None:
    saved_versions(tmp_path, 2)
    (tmp_path / "latest").unlink() if written is None else (tmp_path / "latest").write_text(written)
    said: list[str] = []
    assert newest_whole(tmp_path, said.append) == latest_checkpoint(tmp_path) == tmp_path / "version-00000001"
    assert "latest names no checkpoint" in said[0] and "emove" not in said[0]


def test_i8_a_checkpoint_newer_than_the_one_that_is_gone_on_from_is_of_another_line(tmp_path: Path) -> None:
    saved_versions(tmp_path, 3)
    (tmp_path / "latest").write_text("version-00000001")
    assert newest_whole(tmp_path, pytest.fail) == tmp_path / "version-00000001"
    assert checkpoints(tmp_path) == [tmp_path / "version-00000001", tmp_path / "version-00000000"]


def test_i8_where_no_checkpoint_is_whole_all_are_named(tmp_path: Path) -> None:
    assert newest_whole(tmp_path, pytest.fail) is None
    saved_versions(tmp_path, 2)
    spoil(tmp_path / "version-00000000")
    spoil(tmp_path / "version-00000001")
    with pytest.raises(CheckpointCorrupt, match=r"version-00000001.*version-00000000.*put back a copy.*--overwrite"):
        newest_whole(tmp_path, pytest.fail)
    assert len(checkpoints(tmp_path)) == 2


def test_i8_a_crash_while_writing_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fresh()
    save_checkpoint(tmp_path, ours, cursor="a", keep=2)
    ours.step(batch())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, ours, cursor="b", keep=2)
    folder = latest_checkpoint(tmp_path)
    assert folder is not None and load_checkpoint(folder, fresh()).cursor == "a"
    assert save_checkpoint(tmp_path, ours, cursor="b", keep=2).name == "version-00000001"
    assert not list(tmp_path.glob(".writing-*"))


def test_i8_a_crash_while_an_old_one_is_removed_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fresh()
    save_checkpoint(tmp_path, ours, cursor="a", keep=1)
    ours.step(batch())

    def half(folder: Path) -> None:
        (folder / "manifest.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, ours, cursor="b", keep=1)
    assert [folder.name for folder in tmp_path.glob("version-*")] == ["version-00000001"]
    save_checkpoint(tmp_path, ours, cursor="c", keep=1)
    assert not list(tmp_path.glob(".writing-*"))


def test_i8_saving_a_version_again_never_removes_the_one_that_latest_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = fresh()
    save_checkpoint(tmp_path, ours, cursor="a", keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, ours, cursor="b", keep=1)
    folder = latest_checkpoint(tmp_path)
    assert folder is not None and load_checkpoint(folder, fresh()).cursor == "a"
    newest = save_checkpoint(tmp_path, ours, cursor="c", keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", newest.name]
    assert load_checkpoint(newest, fresh()).cursor == "c"
    assert [load_checkpoint(save_checkpoint(tmp_path, ours, cursor=c, keep=1), fresh()).cursor for c in "defg"] == list("defg")


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named_with_the_remedy_and_nothing_is_loaded(tmp_path: Path, name: str, damage: str) -> None:
    saved = fresh()
    saved.step(batch())
    path = save_checkpoint(tmp_path, saved, cursor="", keep=1) / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 0x80
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    ours = fresh(seed=5)
    before = weights(ours.model)
    with pytest.raises(CheckpointCorrupt, match=r"version-00000001/"):
        load_checkpoint(path.parent, ours)
    assert torch.equal(weights(ours.model), before)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, fresh(), cursor="", keep=1)
    with pytest.raises(ConfigError, match=r"another model.*float64.*float32"):
        load_checkpoint(folder, trainer(tiny_model(torch.float32)))


def test_numbers_handed_out_before_a_crash_are_not_used_again(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, fresh(), cursor="", keep=1)
    ours = fresh()
    load_checkpoint(folder, ours, as_version=4)
    assert (ours.version, ours.num_steps, ours.lineage) == (4, 0, (Fork(0, 4),))
    ours.step(batch(version=4))
    again = fresh()
    load_checkpoint(save_checkpoint(tmp_path, ours, cursor="", keep=1), again)
    assert (again.version, again.num_steps, again.lineage) == (5, 1, (Fork(0, 4),))
    with pytest.raises(ConfigError, match="that number is used"):
        load_checkpoint(tmp_path / "version-00000005", again, as_version=3)


def test_a_checkpoint_is_whole_wherever_it_is_moved(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "a", fresh(), cursor="x", keep=1)
    shutil.move(folder, tmp_path / "elsewhere")
    assert load_checkpoint(tmp_path / "elsewhere", fresh()).cursor == "x"


def test_the_trainer_steps_on_while_its_copy_is_written(tmp_path: Path) -> None:
    ours = fresh()
    ours.step(batch())
    before = weights(ours.model)
    copied = stage(ours, cursor="row 4")
    ours.step(batch(seed=1, version=1))
    copied.write(tmp_path, keep=1)
    again = fresh(seed=5)
    assert load_checkpoint(tmp_path / "version-00000001", again).cursor == "row 4"
    assert torch.equal(weights(again.model), before)
    again.step(batch(seed=1, version=1))
    assert torch.equal(weights(again.model), weights(ours.model)), "the moments were those of then, too"


def keep_writing(ours: PolicyTrainer, root: Path, ready: Connection) -> None:
    """Every weight is the version's number; the next version is made while this one is written."""
    torch.set_num_threads(1)
    ready.send(None)
    with torch.no_grad(), ThreadPoolExecutor(1) as disk:
        while True:
            for parameter in ours.model.parameters():
                parameter.fill_(ours.version)
            copied = stage(ours, cursor="")
            writing = disk.submit(copied.write, root, keep=2)
            ours.version += 1
            for parameter in ours.model.parameters():
                parameter.fill_(ours.version)
            writing.result()


def test_i8_death_at_any_of_a_hundred_instants_leaves_a_whole_checkpoint_and_never_an_older_one(tmp_path: Path) -> None:
    """Ten processes are killed. Each is stopped nine times before, for that leaves on disk what a kill would, and costs no new process."""
    dice, fork = random.Random(0), multiprocessing.get_context("fork")
    ours, read, versions = fresh(), fresh(), [0]
    save_checkpoint(tmp_path, ours, cursor="", keep=2)
    for _ in range(10):
        ours.version = versions[-1] + 1
        here, there = fork.Pipe()
        process = fork.Process(target=keep_writing, args=(ours, tmp_path, there))
        process.start()
        here.recv()
        pid = process.pid
        assert pid is not None
        for instant in range(10):
            time.sleep(dice.uniform(0, 0.04))  # from nothing to a whole write or more
            os.kill(pid, signal.SIGKILL if instant == 9 else signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
            versions.append(whole_version(tmp_path, read))
            os.kill(pid, signal.SIGCONT)
        process.join()
        assert process.exitcode == -9, "it was killed at work"
    assert versions == sorted(versions) and len(set(versions)) > 20


def whole_version(root: Path, read: PolicyTrainer) -> int:
    """Of the latest checkpoint, whose weights must be those of its version."""
    folder = latest_checkpoint(root)
    assert folder is not None
    version = load_checkpoint(folder, read).version
    assert version == 0 or set(weights(read.model).tolist()) == {version}
    return version


def test_loading_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = fresh()
    saved.step(batch())
    folder = save_checkpoint(tmp_path, saved, cursor="", keep=1)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refuse)
    ours = fresh(seed=5)
    load_checkpoint(folder, ours)
    assert torch.equal(weights(ours.model), weights(saved.model))


def test_a_file_that_is_not_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, fresh(), cursor="", keep=1)
    shutil.copy(folder / "rank-00000.safetensors", folder / "rank-00001.safetensors")
    with pytest.raises(CheckpointCorrupt, match=r"rank-00001.safetensors is not of this checkpoint"):
        load_checkpoint(folder, fresh())


def test_a_checkpoint_of_another_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, fresh(), cursor="", keep=1)
    state = json.loads((folder / "state.json").read_text())
    del state["format"]  # as the first format, which did not have the number
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(json.dumps({"files": {"state.json": sha256((folder / "state.json").read_bytes()).hexdigest()}}))
    with pytest.raises(ConfigError, match=r"has format 1, this version of midflight reads 2"):
        load_checkpoint(folder, fresh())


def test_moments_of_parameters_that_are_not_trained_now_are_refused(tmp_path: Path) -> None:
    saved = fresh()
    saved.step(batch())
    folder = save_checkpoint(tmp_path, saved, cursor="", keep=1)
    ours = fresh()
    next(iter(ours.model.parameters())).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"was training '.*embed.*', this run does not"):
        load_checkpoint(folder, ours)
