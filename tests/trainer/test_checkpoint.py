from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from midflight.errors import CheckpointCorrupt, ConfigError
from midflight.trainer.checkpoint import FILES, latest_checkpoint, load_checkpoint, save_checkpoint
from midflight.trainer.schedule import Schedule
from midflight.trainer.trainer import Fork, Trainer

from .fixtures import batch, tiny_model, trainer, weights


def fresh(seed: int = 0) -> Trainer:
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


def test_i8_only_the_newest_are_kept_and_latest_names_the_last(tmp_path: Path) -> None:
    ours = fresh()
    assert latest_checkpoint(tmp_path) is None
    for v in range(4):
        save_checkpoint(tmp_path, ours, cursor="", keep=2)
        ours.step(batch(version=v))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "version-00000002", "version-00000003"]
    assert latest_checkpoint(tmp_path) == tmp_path / "version-00000003"


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


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
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
    with pytest.raises(CheckpointCorrupt, match=r"(?s)version-00000001/.*Remove .*version-00000001"):
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
