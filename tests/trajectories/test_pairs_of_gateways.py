"""A checkpoint of a run with several gateways has a copy of each one's store, and each goes on from its own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from midflight.archive.store_reader import copy_in_words, reading, stores_of
from midflight.config.shards import shard_folder
from midflight.trajectories.pairs import copy_name, copy_store, drafted, go_on, newest_copy, readable, shard_folders

from .test_pairs import Run, temporary  # noqa: F401


def gateway(run: Path, disk: Path, number: int) -> Run:
    """One of the run's gateways, with its store on that disk."""
    folder = shard_folder(run, number)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Run(folder, disk)


def save(gateways: list[Run], version: int) -> None:
    """As the trainer and the rollout processes do it."""
    run = gateways[0].folder

    def pair(draft: Path) -> bool:
        for one in gateways:
            with closing(one.open()) as store:
                store.copied(version)
                store.has_increment(copy_store(store.path, drafted(one.folder, version)))
            place = draft / one.folder.relative_to(run)
            place.mkdir(parents=True, exist_ok=True)
            drafted(one.folder, version).replace(place / copy_name(version))
        return True

    assert gateways[0].save(version, beside=pair)


@pytest.fixture
def two(tmp_path: Path) -> list[Run]:
    """Two gateways on machines of their own, at version 2 of which there is a checkpoint, and one step further."""
    made = [gateway(tmp_path / "run", tmp_path / f"disk{number}", number) for number in range(2)]
    (made[0].folder / "config.toml").write_text(f'[run]\nstore_folder = "{made[0].disk}"\n')
    for version in (1, 2):
        for one in made:
            one.step(version)
    save(made, 2)
    for one in made:
        one.step(3)
    return made


def test_i8_a_gateway_whose_machine_is_lost_goes_on_from_its_own_copy_and_the_other_from_its_store(two: list[Run], tmp_path: Path) -> None:
    first, second = two
    assert first.path.name != second.path.name, "stores of one run may lie on one disk"
    newest = (first.folder / "checkpoints" / "latest").read_text().strip()
    found = newest_copy(second.folder)
    assert found is not None and found.path == first.folder / "checkpoints" / newest / "shards" / "1" / "store-2.increment"
    moved = gateway(first.folder, tmp_path / "other", 1)
    said = go_on(moved.folder, moved.disk)
    assert said is not None and "a copy of version 2" in said and moved.groups() == [1, 2]
    assert go_on(first.folder, first.disk) is None and first.groups() == [1, 2, 3]
    for one in (first, moved):
        with closing(one.open()) as store:
            assert len(store.groups_after(2)) == (1 if one is first else 0), "what came after the checkpoint waits again, once"


def test_what_can_be_read_of_all_gateways_is_read_and_of_which_there_is_a_copy_is_said(two: list[Run], tmp_path: Path) -> None:
    first, second = two
    assert shard_folders(first.folder) == [second.folder]
    copy = newest_copy(second.folder)
    assert copy is not None
    assert [each.path for each in stores_of(first.folder)] == [first.path, copy.to_read()], "the second's disk is not here"
    said = copy_in_words(first.folder)
    assert said is not None and "version 2" in said
    with reading(first.folder) as store:
        assert store.ask("SELECT COUNT(*) FROM groups") == [(5,)], "three of the first, two of the second's copy"
    assert readable(second.folder, second.disk) == second.path


def test_a_run_whose_folder_is_called_like_a_gateways_is_none(tmp_path: Path) -> None:
    run = gateway(tmp_path / "mine", tmp_path / "disk", 3)
    run.step(1)
    assert run.save(1) and newest_copy(run.folder) is not None
    assert shard_folders(tmp_path / "mine" / "shards" / "3") == []
