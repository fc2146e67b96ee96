"""Segments: tokens beside the index, what is read of them when one is damaged, and what a run keeps."""

from __future__ import annotations

import os
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from midflight.errors import StoreCorrupt, StoreFailed, StoreNewer, TokensRemoved
from midflight.trajectories import database, segments
from midflight.trajectories.database import OLDER_VERSION, SCHEMA_VERSION, encode_rows
from midflight.trajectories.increments import INCREMENTS, path_of, restore, write_increment
from midflight.trajectories.pairs import oldest_checkpoint
from midflight.trajectories.segments import SEGMENTS, place_of, read
from midflight.trajectories.store import Store
from midflight.types import Batch, Reason, RolloutKey, Row, Trajectory
from midflight.types.facts import TrajectoryKept

from .keeping import Keeper
from .making import key, trajectory


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


def files(path: Path) -> list[Path]:
    """The segments, the oldest first."""
    return sorted((path.parent / SEGMENTS).glob("*.segment"), key=lambda file: file.stat().st_mtime_ns)


def long(sample: int, *, index: int = 0, num_tokens: int = 16_000) -> Trajectory:
    """A rollout with a prompt of a tenth of its tokens, sampled by two versions."""
    draw = np.random.default_rng(sample)
    written = np.arange(num_tokens) >= num_tokens // 10
    versions = np.where(np.arange(num_tokens) < num_tokens // 2, 3, 4).astype(np.int32)
    logprobs = np.where(written, -draw.random(num_tokens), 0).astype(np.float32)
    ids = draw.integers(0, 150_000, num_tokens).astype(np.int32)
    row = Row(ids, written, written, logprobs, versions, versions, turns=np.zeros(num_tokens, np.int32))
    return Trajectory(RolloutKey(key(index), sample), "task", "letters", 1.0, (row,))


def flip(path: Path, rollout: RolloutKey) -> Path:
    """Flips a bit in the middle of a rollout's tokens. Returns the segment."""
    with closing(sqlite3.connect(path)) as index:
        where = "epoch = ? AND position = ? AND attempt = ? AND sample = ?"
        values = (rollout.group.epoch, rollout.group.index, rollout.group.attempt, rollout.sample)
        ((value,),) = index.execute(f"SELECT rows FROM rollouts WHERE {where}", values).fetchall()
    place = place_of(value)
    assert place is not None
    file = path.parent / SEGMENTS / f"{place.segment:016x}.segment"
    data = bytearray(file.read_bytes())
    data[place.offset + place.length // 2] ^= 4
    file.write_bytes(data)
    return file


def train(store: Keeper, index: int, *, version: int) -> None:
    """A group from its admission to a step that a checkpoint has."""
    made = store.finish(index)
    store.lease(Batch(version, version - 1, (made,)))
    store.done(version)


# --- What is on disk ------------------------------------------------------------------------------


def test_a_token_takes_at_most_14_bytes_and_the_index_has_none_of_them(path: Path) -> None:
    store = Keeper(path)
    store.admit(key(0))
    for sample in range(8):
        store.keep(long(sample))
    store.close()
    num_tokens = 8 * 16_000
    on_disk = sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())
    assert 8 <= on_disk / num_tokens <= 14
    assert path.stat().st_size < num_tokens


def test_rows_come_back_to_the_last_bit_whether_or_not_they_lie_in_runs() -> None:
    draw = np.random.default_rng(1)
    plain = long(0, num_tokens=600).rows[0]
    nan = np.full(600, np.nan, np.float32)
    nan[::7] = -0.0
    mixed = draw.integers(0, 2, 600).astype(np.bool_)
    odd = Row(plain.token_ids, mixed, mixed[::-1].copy(), nan, plain.token_ids, plain.versions, kept_lengths=np.zeros(600, np.int32))
    empty = Row(*(array[:0] for array in (plain.token_ids, mixed, mixed, nan, plain.versions, plain.versions)))
    rows = (plain, odd, empty)
    blob = encode_rows(rows)
    assert len(encode_rows((plain,))) < 600 * 8.3, "ids and log-probabilities in full, of all else the runs"
    for before, after in zip(rows, database.decode_rows(blob), strict=True):
        for name in ("token_ids", "generated", "loss_mask", "logprobs", "versions", "kv_versions", "turns"):
            was, now = getattr(before, name), getattr(after, name)
            if was is None:
                assert now is None
            else:
                assert (was.dtype, was.tobytes()) == (now.dtype, now.tobytes()), name


def test_the_rollouts_of_a_transaction_are_written_together_up_to_a_size(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pwrite = os.pwrite

    def counted(handle: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return pwrite(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", counted)
    store = Keeper(path)
    store.admit(key(0))
    store.write([TrajectoryKept(long(sample, num_tokens=1000), {}, {}) for sample in range(8)])
    assert len(sizes) == 1, "a write gives the interpreter's lock away"
    monkeypatch.setattr(segments, "GATHERED_BYTES", 3 * sizes[0] // 8)
    store.write([TrajectoryKept(long(sample, num_tokens=1000), {}, {}) for sample in range(8, 16)])
    assert len(sizes) == 4 and max(sizes[1:]) <= sizes[0] // 2
    store.close()
    (unfinished,) = Keeper(path).unfinished()
    for made in unfinished.finished:
        np.testing.assert_array_equal(made.rows[0].token_ids, long(made.key.sample, num_tokens=1000).rows[0].token_ids)
    assert len(unfinished.finished) == 16


def test_nobody_looks_for_runs_in_the_rows_of_a_short_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(database, "run_lengths", lambda array: looked.append(array.nbytes))
    short = long(0, num_tokens=32).rows
    (back,) = database.decode_rows(encode_rows(short))
    assert not looked and back.versions.tobytes() == short[0].versions.tobytes()
    encode_rows(long(0, num_tokens=200).rows)
    assert min(looked) == 200


def test_a_full_segment_is_followed_by_another_and_a_process_never_appends_to_that_of_one_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 200_000)
    store = Keeper(path)
    store.admit(key(0))
    for sample in range(4):
        store.keep(long(sample))
    sizes = {file: file.stat().st_size for file in files(path)}
    assert len(sizes) == 2 and max(sizes.values()) < 200_000 + 16_000 * 9
    store.close()
    store = Keeper(path)
    store.keep(long(4))
    assert {file: file.stat().st_size for file in files(path) if file in sizes} == sizes and len(files(path)) == 3
    (unfinished,) = store.unfinished()
    for made in unfinished.finished:
        expected = long(made.key.sample).rows[0]
        np.testing.assert_array_equal(made.rows[0].token_ids, expected.token_ids)
        np.testing.assert_array_equal(made.rows[0].logprobs, expected.logprobs)


def test_a_copy_for_a_checkpoint_has_no_tokens_and_reads_them_where_they_lie(path: Path, tmp_path: Path) -> None:
    store = Keeper(path)
    store.admit(key(0))
    for sample in range(8):
        store.keep(long(sample))
    store.copied(1)
    made = write_increment(path, tmp_path / INCREMENTS)
    increment = path_of(made.name, tmp_path / INCREMENTS)
    assert increment.stat().st_size < 200_000 < sum(file.stat().st_size for file in files(path)), "128 000 tokens"
    copy = tmp_path / "restored.sqlite"
    restore(made.name, tmp_path / INCREMENTS, copy)
    with closing(Store(copy, run=None, segments=path.parent / SEGMENTS)) as there:
        (unfinished,) = there.unfinished()
        np.testing.assert_array_equal(unfinished.finished[7].rows[0].token_ids, long(7).rows[0].token_ids)


# --- What goes wrong ------------------------------------------------------------------------------


def test_a_flipped_bit_is_named_with_its_segment_and_all_else_is_read(path: Path) -> None:
    store = Keeper(path)
    for index in range(3):
        store.finish(index)
    file = flip(path, RolloutKey(key(1), 0))
    ((damaged, said),) = store.damaged()
    assert damaged == key(1)
    assert str(file) in said and "restore the file from a copy" in said
    seen = [(trajectory.key, len(trajectory.rows), trajectory.error) for trajectory, *_ in store.ended()]
    assert [(of, 1 if error is None else 0, error) for of, _, error in seen] == seen
    assert [(of.group.index, of.sample) for of, num_rows, _ in seen if not num_rows] == [(1, 0)] and len(seen) == 6


def test_a_damaged_group_begins_again_and_its_tokens_stay_in_the_accounts(path: Path) -> None:
    store = Keeper(path)
    for index in range(2):
        store.finish(index)
    before = sum(store.fates.values())
    flip(path, RolloutKey(key(0), 1))
    store.close_group(key(0), Reason.DAMAGED, successor=key(0, attempt=1))
    assert not list(store.damaged()) and [made.key for made in store.waiting] == [key(1)]
    assert [unfinished.key for unfinished in store.unfinished()] == [key(0, attempt=1)]
    assert sum(store.fates.values()) == before


def test_a_segment_that_is_gone_is_named_as_one_that_is_not_there(path: Path) -> None:
    store = Keeper(path)
    store.finish(0)
    (file,) = files(path)
    file.unlink()
    ((damaged, said),) = store.damaged()
    assert damaged == key(0) and str(file) in said and "is not there" in said


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system refuses to let a file grow further, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_in_mid_segment_gives_a_sentence_and_loses_nothing(path: Path) -> None:
    store = Keeper(path)
    store.admit(key(0))
    store.keep(long(0))
    (file,) = files(path)
    size = file.stat().st_size
    with files_of_at_most(size + 50_000), pytest.raises(StoreFailed) as failed:
        store.keep(long(1))
    assert str(failed.value).count(". ") == 0 and str(file) in str(failed.value) and "free some space and resume" in str(failed.value)
    assert file.stat().st_size == size, "the half that was written is taken back"
    store.keep(long(1))
    store.close()
    (unfinished,) = Keeper(path).unfinished()
    for made in unfinished.finished:
        np.testing.assert_array_equal(made.rows[0].token_ids, long(made.key.sample).rows[0].token_ids)
    assert len(unfinished.finished) == 2


# --- A store of the commit before -----------------------------------------------------------------


def as_before(path: Path) -> None:
    """Makes a store one of schema 5: all rows lie in full in the index, and there are no segments."""
    with closing(sqlite3.connect(path)) as index:
        for rowid, value in index.execute("SELECT rowid, rows FROM rollouts").fetchall():
            rows = database.decode_rows(read((path.parent / SEGMENTS,), value))
            index.execute("UPDATE rollouts SET rows = ? WHERE rowid = ?", (in_full(rows), rowid))
        index.executescript(
            f"PRAGMA user_version = {OLDER_VERSION}; DROP TABLE sources; DROP INDEX groups_by_task; DROP INDEX groups_by_fate;"
            "DROP INDEX rollouts_failed; CREATE INDEX groups_by_state ON groups (state, finished)"
        )
    for file in files(path):
        file.unlink()


def in_full(rows: tuple[Row, ...]) -> bytes:
    stored: list[object] = []
    for row in rows:
        arrays = (row.token_ids, row.generated, row.loss_mask, row.logprobs, row.versions, row.kv_versions)
        turns = None if row.turns is None else row.turns.tobytes()
        stored.append([*(array.tobytes() for array in arrays), turns, b"", b"", b"", "", []])
    return msgspec.msgpack.encode(stored)


def test_a_store_of_the_commit_before_is_read_and_continued_and_then_refused_by_it(path: Path) -> None:
    store = Keeper(path)
    for index in range(2):
        store.finish(index)
    store.close()
    as_before(path)
    with closing(Store(path, run=None)) as reading:
        assert [len(made.rows) for made, *_ in reading.ended()] == [1, 1, 1, 1]
    with closing(sqlite3.connect(path)) as index:
        assert index.execute("PRAGMA user_version").fetchone() == (OLDER_VERSION,), "who reads it changes nothing"
    store = Keeper(path)
    store.finish(2)
    assert [made.key for made in store.waiting] == [key(0), key(1), key(2)] and not list(store.damaged())
    store.close()
    with closing(sqlite3.connect(path)) as index:
        assert index.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert index.execute("SELECT name FROM sources").fetchall() == [("letters",)]
        values = [place_of(value) is None for (value,) in index.execute("SELECT rows FROM rollouts ORDER BY position")]
        assert values == [True, True, True, True, False, False]
        index.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(StoreNewer, match=f"its schema is {SCHEMA_VERSION + 1}"):
        Keeper(path)


# --- What a run keeps -----------------------------------------------------------------------------


@pytest.fixture
def trained(path: Path, monkeypatch: pytest.MonkeyPatch) -> Keeper:
    """A store with a segment for each rollout: groups 0 to 3 are trained by the steps 1 to 4, which a checkpoint has; group 4 waits."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 1)
    store = Keeper(path)
    for index in range(4):
        train(store, index, version=index + 1)
    store.checkpoint(4)
    store.finish(4)
    return store


def test_by_size_the_oldest_go_and_what_a_trainer_may_go_back_to_stays(trained: Keeper, path: Path) -> None:
    size = files(path)[0].stat().st_size
    num = len(files(path))
    digests = trained.seal()
    assert trained.remove_old(2, max_bytes=(num - 1) * size) == size and len(files(path)) == num - 1
    trained.remove_old(2, max_bytes=0)
    assert trained.seal() == digests and not list(trained.damaged())
    gone = [made.key.group.index for made, *_ in trained.ended() if not made.rows]
    assert gone == [0, 0, 1, 1], "steps 3 and 4 may be made again from the checkpoint of version 2"
    assert [made.key.index for made in trained.groups_after(2)] == [2, 3]
    with pytest.raises(TokensRemoved, match=r"run\.keep_trajectories removed these tokens"):
        trained.group(key(0))
    assert trained.go_back(2) == [key(2), key(3), key(4)]


def test_by_age_those_go_that_were_last_written_before(trained: Keeper, path: Path) -> None:
    old = files(path)[:3]
    for file in old:
        os.utime(file, (1, 1))
    assert trained.remove_old(4, max_seconds=3600.0) > 0
    assert not any(file.exists() for file in old) and len(files(path)) == 7
    trained.remove_old(4, max_seconds=3600.0)
    assert len(files(path)) == 7, "asked again it removes no more"


def test_what_waits_stays_however_little_is_kept(trained: Keeper, path: Path) -> None:
    trained.remove_old(4, max_bytes=0, max_seconds=0.0)
    assert [made.key for made in trained.waiting] == [key(4)]
    trained.keep(trajectory(key(5), 0))
    assert [len(made.rows) for made, *_ in trained.ended()][-2:] == [1, 1]


def test_the_oldest_checkpoint_bounds_what_goes_also_for_a_gateway_of_several(tmp_path: Path) -> None:
    for version in (12, 8):
        (tmp_path / "checkpoints" / f"version-{version:08d}").mkdir(parents=True)
    (tmp_path / "checkpoints" / "abandoned-3").mkdir()
    assert oldest_checkpoint(tmp_path, 12) == oldest_checkpoint(tmp_path / "shards" / "1", 12) == 8
    assert oldest_checkpoint(tmp_path / "elsewhere", 5) == 5


def test_a_reader_that_finds_a_place_in_no_segment_of_its_run_names_the_first(tmp_path: Path) -> None:
    value = segments.SegmentPlace(255, 0, 10, 0).encode()
    with pytest.raises(StoreCorrupt, match=r"00000000000000ff\.segment: the segment is not there"):
        read((tmp_path,), value)
