"""Ids that share their memory are the tuple that they stand for."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midflight.engines.wire import Submit, client_frame, decode_client_frames, encode, pack_client_frame
from midflight.trajectories.database import decode_turn, encode_turn, whole_turns
from midflight.types import Finish, FinishReason, GenerateRequest, SamplingParams, Segment, Turn
from midflight.types.token_ids import SharedIds, packed, unpacked

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def shared(*parts: list[int], after: int = 0) -> SharedIds:
    pieces = [packed(part) for part in parts]
    return SharedIds(sum(len(part) for part in parts), lambda: pieces, after=after, tail=pieces[-1])


@given(IDS, IDS)
def test_they_equal_their_tuple_in_every_way(first: list[int], second: list[int]) -> None:
    ids, plain = shared(first, second), (*first, *second)
    assert ids == plain and plain == ids and hash(ids) == hash(plain) and ids == shared(first + second)
    assert list(ids) == list(plain) and len(ids) == len(plain)
    assert ids[: len(first)] == tuple(first) and ids[len(first) :] == tuple(second)
    assert ids + (1,) == (*plain, 1) and (1,) + ids == (1, *plain)  # noqa: RUF005
    assert unpacked(packed(ids)) == plain
    assert ids != (*plain, 1) and ids != "ids"


def test_they_go_to_an_engine_as_bytes_and_come_out_as_a_tuple() -> None:
    request = GenerateRequest("r", shared([1, 2], [70000]), 3, SamplingParams(max_tokens=4), wants_kept=True)
    (raw,) = decode_client_frames(encode([pack_client_frame(Submit(7, request))]))
    assert client_frame(raw) == Submit(7, GenerateRequest("r", (1, 2, 70000), 3, SamplingParams(max_tokens=4), wants_kept=True))


def turn(prompt: tuple[int, ...] | SharedIds, *output: int) -> Turn:
    return Turn(prompt, output, (-0.5,) * len(output), (Segment(0, 0, 0, len(output)),), Finish(FinishReason.STOP))


def test_a_file_has_what_is_new_in_a_turn_and_gives_the_whole() -> None:
    long = list(range(1000, 3000))
    turns = [
        turn(tuple(long), 1, 2),
        turn(shared([*long, 1, 2], [3, 4]), 5),
        turn((9, 9), 8),
        turn(shared([*long, 1, 2, 3, 4, 5], [6], after=1), 7),
        turn(shared([*long, 1, 2], [30]), 50),
    ]
    blobs = [encode_turn(made) for made in turns]
    assert len(blobs[0]) > 4000 and all(len(blob) < 400 for blob in blobs[1:])
    assert whole_turns([(number, decode_turn(blob)) for number, blob in enumerate(blobs)]) == turns


def test_a_turn_in_a_file_of_before_is_whole() -> None:
    made = turn((1, 2, 3), 4)
    assert whole_turns([(0, decode_turn(msgspec.msgpack.encode(made)))]) == [made]


def test_a_turn_whose_beginning_is_gone_is_named() -> None:
    blob = encode_turn(turn(shared([1], [2], after=3), 4))
    with pytest.raises(ValueError, match="turn 5 continues turn 3, which is not there"):
        whole_turns([(5, decode_turn(blob))])
