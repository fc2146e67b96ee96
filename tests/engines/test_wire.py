"""Steps and requests over the wire."""

import numpy as np
import pytest
from tests.engines.models import ask

from midflight.engines.streams import ChunkStream, ChunkStreams, StepOutput, TokenRow, Top
from midflight.engines.wire import (
    Abort,
    StepFrame,
    Submit,
    client_frame,
    decode_client_frames,
    decode_engine_frame,
    encode,
    pack_chunks,
    pack_step,
    step_rows,
    step_tops,
)
from midflight.errors import RequestRejected
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, Finish, FinishReason, Grammar, GrammarKind, Segment

PLAIN = StepOutput(
    version=3,
    handles=np.array([11, 12, 13]),
    token_ids=np.array([5, 6, 7]),
    logprobs=np.array([-0.5, -1.5, -2.5]),
    kv_versions=np.array([2, 3, 3]),
    outlets=np.array([1, 2, 1]),
    finishes=((13, 1, Finish(FinishReason.LENGTH)),),
    touched=frozenset({1, 2}),
)
TOPPED = StepOutput(
    **{name: getattr(PLAIN, name) for name in StepOutput.__dataclass_fields__}
    | {
        "top_ids": np.array([[5, 9, -1], [-1, -1, -1], [1, 7, 2]]),
        "top_logprobs": np.array([[-0.5, -1.0, 0.0], [0.0, 0.0, 0.0], [-0.25, -2.5, -3.0]]),
    }
)
TOPS = [((5, -0.5), (9, -1.0)), None, ((1, -0.25), (7, -2.5), (2, -3.0))]


def carried(step: StepOutput) -> tuple[int, list[TokenRow], list[Top], tuple[tuple[int, Finish], ...]]:
    """What the other side reads, by the client's numbers 1, 2, 3."""
    frame = decode_engine_frame(encode(pack_step(step, {11: 1, 12: 2, 13: 3})))
    assert isinstance(frame, StepFrame)
    return frame.version, step_rows(frame), step_tops(frame), frame.finishes


@pytest.mark.parametrize(("step", "tops"), [(PLAIN, []), (TOPPED, TOPS)])
def test_a_step_arrives_as_it_left(step: StepOutput, tops: list[Top]) -> None:
    rows = [(1, 5, -0.5, 2), (2, 6, -1.5, 3), (3, 7, -2.5, 3)]
    assert carried(step) == (3, rows, tops, ((3, Finish(FinishReason.LENGTH)),))


def test_an_empty_step_arrives_too() -> None:
    assert carried(StepOutput(version=1)) == (1, [], [], ())


def test_alternatives_that_nobody_asked_for_take_no_byte() -> None:
    assert b"top_" not in encode(pack_step(PLAIN, {11: 1, 12: 2, 13: 3}))


def test_versions_told_at_the_end_travel_with_the_end_and_take_no_byte_elsewhere() -> None:
    end = Chunk((5, 6), (-0.5, -1.5), 3, 3, Finish(FinishReason.ABORT), attested=(Segment(2, 1, 0, 4), Segment(3, 1, 4, 7)))
    frame = decode_engine_frame(encode(pack_chunks([(4, end)], started=0, ended=0, num_running=1)))
    assert isinstance(frame, StepFrame) and frame.attested == ((4, end.attested),)
    assert b"attested" not in encode(pack_step(PLAIN, {11: 1, 12: 2, 13: 3}))


def test_older_keys_travel_with_the_first_token_and_take_no_byte_elsewhere() -> None:
    runs = ((2, 40), (3, 5))
    values = {name: getattr(PLAIN, name) for name in StepOutput.__dataclass_fields__}
    frame = decode_engine_frame(encode(pack_step(StepOutput(**values | {"key_runs": ((11, runs),)}), {11: 1, 12: 2, 13: 3})))
    assert isinstance(frame, StepFrame) and frame.key_runs == ((1, runs),)
    assert b"key_runs" not in encode(pack_step(PLAIN, {11: 1, 12: 2, 13: 3}))
    frame = decode_engine_frame(encode(pack_chunks([(4, Chunk((5,), (-0.5,), 3, 2, key_runs=runs))], started=0, ended=0, num_running=1)))
    assert isinstance(frame, StepFrame) and frame.key_runs == ((4, runs),)


def test_chunks_arrive_as_they_left_several_of_one_request_too() -> None:
    first = Chunk((5, 6), (-0.5, -1.5), 3, 2)
    top = Chunk((7, 8), (-0.25, -0.75), 3, 3, None, (((7, -0.25), (1, -2.0)), ((9, -0.5),)))
    last = Chunk((9,), (-2.5,), 3, 2, Finish(FinishReason.LENGTH))
    end = Chunk((), (), 3, 3, Finish(FinishReason.ABORT))

    async def main() -> None:
        streams = ChunkStreams()
        one, two, three = (ChunkStream(eager=True) for _ in range(3))
        for number, stream in enumerate((one, two, three), start=1):
            streams.open(number, stream)
        frame = pack_chunks([(1, first), (2, top), (1, last), (3, end)], started=1.0, ended=2.0, num_running=3)
        frame = decode_engine_frame(encode(frame))
        assert isinstance(frame, StepFrame) and (frame.started, frame.ended, frame.num_running) == (1.0, 2.0, 3)
        streams.take(frame.version, step_rows(frame), step_tops(frame), finishes=frame.finishes)
        assert await anext(one) == Chunk((5, 6, 9), (-0.5, -1.5, -2.5), 3, 2, Finish(FinishReason.LENGTH))
        assert await anext(two) == top
        assert await anext(three) == end

    run_virtual(main())


def test_an_outlet_gets_its_own_alternatives_and_failures_and_no_column_more() -> None:
    failure = RequestRejected("no", param="response_format")
    values = {name: getattr(TOPPED, name) for name in StepOutput.__dataclass_fields__}
    step = StepOutput(**values | {"failures": ((14, 1, failure), (15, 2, failure)), "key_runs": ((11, ((2, 4), (3, 1))),)})
    one, two = step.for_outlet(1), step.for_outlet(2)
    assert one.top_ids.tolist() == [[5, 9, -1], [1, 7, 2]] and two.top_ids.shape == two.top_logprobs.shape == (1, 0)
    assert one.key_runs == ((11, ((2, 4), (3, 1))),) and two.key_runs == ()
    assert [h for h, _, _ in one.failures] == [14] and [h for h, _, _ in two.failures] == [15]


def test_a_request_arrives_with_all_it_asks_for() -> None:
    request = ask(
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias=((3, -100.0), (4, 2.5)),
        grammar=Grammar(GrammarKind.LARK, 'start: "a"'),
        top_logprobs=7,
    )
    said = encode([Submit(5, request), Abort(4)])
    assert [client_frame(raw) for raw in decode_client_frames(said)] == [Submit(5, request), Abort(4)]
