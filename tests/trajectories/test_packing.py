"""A batch packed, sent and read again; and what is refused on the way."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from midflight.errors import BatchCorrupt
from midflight.trajectories.database import decode_rows, encode_rows
from midflight.trajectories.packing import NO_ANSWER, from_bytes, merged, pack, to_bytes
from midflight.types import Batch, Group, PackedBatch, RolloutKey, Trajectory

from .making import group, key, row


def batch() -> Batch:
    """Two groups; the first has a rollout of two rows and one without any."""
    two_rows = (row((5, 6, 7), (False, True, True), version=3), row((8, 9), (False, True), version=2))
    rollouts = (
        Trajectory(RolloutKey(key(0), 0), "a", "letters", 0.5, two_rows, truncated=True, room=0),
        Trajectory(RolloutKey(key(0), 1), "a", "letters", -1.0, ()),
    )
    last = Trajectory(RolloutKey(key(1), 0), "b", "letters", 1.0, (row((1, 2), (False, True), version=4),))
    return Batch(12, 4, (Group(key(0), "a", "letters", rollouts), Group(key(1), "b", "letters", (last,))))


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def assert_same(one: PackedBatch, other: PackedBatch) -> None:
    for part in fields(PackedBatch):
        a, b = getattr(one, part.name), getattr(other, part.name)
        np.testing.assert_array_equal(a, b, err_msg=part.name)
        assert getattr(a, "dtype", type(a)) == getattr(b, "dtype", type(b)), part.name


def test_rows_lie_end_to_end_and_a_rollout_without_rows_keeps_its_reward() -> None:
    packed = pack(batch())
    assert packed.token_ids.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert packed.loss_mask.tolist() == [False, True, True, False, True, False, True]
    assert packed.versions.tolist() == [3, 3, 3, 2, 2, 4, 4]
    assert packed.row_offsets.tolist() == [0, 3, 5, 7]
    assert packed.row_rollout.tolist() == [0, 0, 2]
    assert packed.rewards.tolist() == [0.5, -1.0, 1.0]
    assert packed.rollout_group.tolist() == [0, 0, 1]
    assert packed.truncated.tolist() == [True, False, False]
    assert packed.room is not None and packed.room.tolist() == [0, NO_ANSWER, NO_ANSWER]
    assert (packed.lease, packed.train_version) == (12, 4)


def test_tokens_of_a_way_that_was_lost_count_as_of_the_version_that_trains_them() -> None:
    packed = pack(replace(batch(), train_version=3))
    assert packed.versions.tolist() == [3, 3, 3, 2, 2, 3, 3]
    assert from_bytes(to_bytes(packed)).train_version == 3


@given(st.lists(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=3), max_size=4), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_packed_batch_survives_the_wire(shape: list[list[list[int]]], version: int) -> None:
    groups = tuple(
        Group(
            key(i),
            "t",
            "s",
            tuple(
                Trajectory(RolloutKey(key(i), j), "t", "s", j / 3, tuple(row(tuple(range(n)), (True,) * n, version) for n in rows))
                for j, rows in enumerate(rollouts)
            ),
        )
        for i, rollouts in enumerate(shape)
    )
    packed = pack(Batch(3, version, groups))
    assert_same(from_bytes(to_bytes(packed)), packed)


def test_the_teachers_scores_survive_the_wire_and_without_a_teacher_there_are_none() -> None:
    packed = pack(batch())
    assert packed.teacher_logprobs is None and from_bytes(to_bytes(packed)).teacher_logprobs is None
    scored = replace(packed, teacher_logprobs=np.array([0, -1, -2.5, 0, -0.5, 0, -4], np.float32))
    assert_same(from_bytes(to_bytes(scored)), scored)


def with_kept() -> Batch:
    """The batch above, where the first row's second token has a record of two bytes and its third one of none."""
    made = batch()
    first = made.groups[0].trajectories[0]
    rows = (replace(first.rows[0], kept=np.array([0, 6], np.uint8), kept_lengths=int32(0, 2, 0)), first.rows[1])
    others = made.groups[0].trajectories[1:]
    return replace(made, groups=(replace(made.groups[0], trajectories=(replace(first, rows=rows), *others)), made.groups[1]))


def test_what_truncation_kept_lies_end_to_end_and_survives_wire_and_store() -> None:
    packed = pack(with_kept())
    assert packed.kept is not None and packed.kept.tolist() == [0, 6]
    assert packed.kept_lengths is not None and packed.kept_lengths.tolist() == [0, 2, 0, 0, 0, 0, 0]
    assert_same(from_bytes(to_bytes(packed)), packed)
    assert pack(batch()).kept is None and pack(batch()).kept_lengths is None
    rows = with_kept().groups[0].trajectories[0].rows
    for given_row, found in zip(rows, decode_rows(encode_rows(rows)), strict=True):
        np.testing.assert_array_equal(given_row.kept, found.kept)  # type: ignore[arg-type]
        np.testing.assert_array_equal(given_row.kept_lengths, found.kept_lengths)  # type: ignore[arg-type]
    assert rows[0].num_bytes == rows[1].num_bytes // 2 * 3 + 2 + 12


def test_i6_a_row_whose_records_are_not_as_long_as_it_says_is_not_made() -> None:
    with pytest.raises(AssertionError, match="I6"):
        replace(with_kept().groups[0].trajectories[0].rows[0], kept_lengths=int32(0, 3, 0))


def corrupted(**parts: object) -> bytes:
    return to_bytes(replace(pack(batch()), **parts))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (corrupted(logprobs=np.zeros(3, np.float32)), "lengths disagree"),
        (corrupted(rewards=np.zeros(2, np.float32)), "lengths disagree"),
        (corrupted(token_ids=np.zeros((7, 1), np.int32)), "token_ids"),
        (corrupted(row_offsets=int32(0, 5, 7)), "row_offsets"),
        (corrupted(row_offsets=int32(0, 3, 5, 9)), "row_offsets do not span"),
        (corrupted(row_offsets=int32(0, 5, 3, 7)), "row_offsets do not increase"),
        (corrupted(row_rollout=int32(0, 0, 3)), "row_rollout"),
        (corrupted(row_rollout=int32(-1, 0, 2)), "row_rollout"),
        (corrupted(rollout_group=int32(0, 0, 2)), "rollout_group"),
        (corrupted(rollout_group=int32(1, 1, 2)), "rollout_group"),
        (corrupted(rewards=np.array([0.5, np.nan, 1], np.float32)), "reward"),
        (corrupted(versions=int32(3, 3, 9, 2, 2, 4, 4)), "younger than train_version"),
        (corrupted(teacher_logprobs=np.zeros(6, np.float32)), "lengths disagree"),
        (corrupted(teacher_logprobs=np.zeros((7, 1), np.float32)), "teacher_logprobs"),
        (corrupted(teacher_logprobs=np.array([0, np.nan, 0, 0, 0, 0, 0], np.float32)), "of the teacher is not finite"),
        (corrupted(kept=np.zeros(2, np.uint8), kept_lengths=int32(0, 2, 0)), "lengths disagree"),
        (corrupted(kept=np.zeros(2, np.uint8), kept_lengths=int32(0, 3, 0, 0, 0, 0, 0)), "kept_lengths say 3 bytes, kept has 2"),
        (corrupted(kept=np.zeros(2, np.uint8)), "kept_lengths say 0 bytes, kept has 2"),
        (corrupted(lease=-1), "lease is '-1'"),
        (save(load(to_bytes(pack(batch())))), "format is None"),
        (to_bytes(pack(batch())).replace(b'"format_version":"1"', b'"format_version":"2"'), "format_version is '2'"),
        (to_bytes(pack(batch())).replace(b'"rewards"', b'"rewords"'), "arrays are"),
        (
            save(
                {"token_ids": np.zeros(3, np.int32)},
                {"format": "midflight.packed_batch", "format_version": "1", "lease": "1", "train_version": "0"},
            ),
            "arrays are",
        ),
        (b"", "0 bytes"),
        (b"not a batch at all", "18 bytes"),
    ],
)
def test_bytes_that_are_no_batch_are_refused_by_what_is_wrong(data: bytes, named: str) -> None:
    with pytest.raises(BatchCorrupt, match=named):
        from_bytes(data)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damage_is_refused_or_leaves_a_batch_whose_parts_agree(data: st.DataObject) -> None:
    """Cut or changed bytes never surface as another exception."""
    whole = to_bytes(pack(Batch(1, 2, (group(key(0)),))))
    damaged = bytearray(whole)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    for attempt in (bytes(damaged), whole[:at]):
        try:
            packed = from_bytes(attempt)
        except BatchCorrupt:
            continue
        assert len(packed.token_ids) == packed.row_offsets[-1]


def test_what_answers_earned_and_what_rewards_are_made_of_go_along_a_line_for_each_rollout() -> None:
    first, second = batch().groups
    told = replace(first.trajectories[0], turn_rewards=(0.25, 0.5), components={"right": 1.0})
    other = replace(first.trajectories[1], turn_rewards=(0.125,), components={"right": 0.0, "short": -1.0})
    rows = (replace(told.rows[0], turns=np.array([0, 0, 1], np.int32)), told.rows[1])
    told = replace(told, rows=rows)
    packed = pack(Batch(12, 4, (replace(first, trajectories=(told, other)), second)))
    assert packed.turn_rewards is not None and packed.turns is not None and packed.components is not None
    assert packed.turn_rewards.reshape(3, 2).tolist() == [[0.25, 0.5], [0.125, 0.0], [0.0, 0.0]]
    assert packed.turns.tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert packed.component_names == ("right", "short")
    np.testing.assert_array_equal(packed.components.reshape(3, 2), [[1.0, np.nan], [0.0, -1.0], [np.nan, np.nan]])
    assert_same(from_bytes(to_bytes(packed)), packed)


def test_tables_that_fit_no_rollouts_are_refused() -> None:
    packed = pack(batch())
    for wrong, said in (
        ({"turn_rewards": np.zeros(4, np.float32), "turns": np.zeros(7, np.int32)}, "4 turn_rewards for 3 rollouts"),
        ({"turns": np.zeros(7, np.int32)}, "come together"),
        ({"components": np.zeros(3, np.float32)}, "3 components for 3 rollouts and 0 names"),
        ({"components": np.full(3, np.inf, np.float32), "component_names": ("a",)}, "a component is not finite"),
    ):
        with pytest.raises(BatchCorrupt, match=said):
            from_bytes(to_bytes(replace(packed, **wrong)))


def test_records_of_experts_lie_beside_the_tokens_and_rows_without_one_are_marked() -> None:
    """Of another width is the record of another engine's model: it counts as none."""
    with_one = replace(row((5, 6, 7), (False, True, True)), experts=np.array([[1, 2], [3, 4], [255, 255]], np.uint8))
    narrow = replace(row((8, 9), (False, True)), experts=np.array([[1], [2]], np.uint8))
    trajectory = Trajectory(RolloutKey(key(0), 0), "a", "letters", 0.5, (with_one, narrow, row((1, 2), (False, True))))
    packed = from_bytes(to_bytes(pack(Batch(1, 4, (Group(key(0), "a", "letters", (trajectory,)),)))))
    assert packed.experts is not None and packed.experts.tolist() == [[1, 2], [3, 4], *[[255, 255]] * 5]
    assert pack(batch()).experts is None


def test_a_record_of_experts_that_is_not_as_long_as_the_tokens_is_refused() -> None:
    arrays = load(to_bytes(replace(pack(batch()), experts=np.zeros((6, 2), np.uint8))))
    assert arrays["experts"].shape == (6, 2)
    with pytest.raises(BatchCorrupt, match="lengths disagree"):
        from_bytes(to_bytes(replace(pack(batch()), experts=np.zeros((6, 2), np.uint8))))
    with pytest.raises(BatchCorrupt, match="two dimensions"):
        from_bytes(to_bytes(replace(pack(batch()), experts=np.zeros(7, np.uint8))))


def test_the_parts_of_a_batch_that_several_gateways_gave_are_together_what_one_would_have_packed() -> None:
    """Also where only one of them has rewards of turns and of components, or records of experts."""
    whole = batch()
    first, last = whole.groups
    (told,) = last.trajectories
    rows = tuple(replace(r, turns=int32(*range(len(r.token_ids))), experts=np.ones((len(r.token_ids), 2), np.uint8)) for r in told.rows)
    told = replace(told, rows=rows, turn_rewards=(0.5, 0.25), components={"form": 1.0})
    groups = (first, replace(last, trajectories=(told,)))
    for order in (groups, groups[::-1]):
        parts = [pack(Batch(lease, 4, (group,))) for lease, group in enumerate(order)]
        assert_same(merged(12, [from_bytes(to_bytes(part)) for part in parts]), pack(Batch(12, 4, order)))
    scored = [
        replace(pack(Batch(1, 4, (group,))), teacher_logprobs=np.full(n, -n, np.float32)) for group, n in zip(groups, (5, 2), strict=True)
    ]
    teacher = merged(12, scored).teacher_logprobs
    assert teacher is not None and teacher.tolist() == [-5.0] * 5 + [-2.0] * 2
