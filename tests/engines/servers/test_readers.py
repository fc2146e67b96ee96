"""What vLLM and SGLang say of a request, event by event, in the words they were heard to use."""

from __future__ import annotations

import json

import pytest
from tests.engines.models import ask

from midflight.engines.servers.server import EventReader, EventTokens, ServerRequest, cut
from midflight.engines.servers.sglang import SglangReader, SglangServer
from midflight.engines.servers.vllm import VllmReader
from midflight.engines.streams import ChunkStream
from midflight.errors import EngineUnavailable, RequestRejected
from midflight.types import Finish, FinishReason, Grammar, GrammarKind

ABORT = Finish(FinishReason.ABORT)


def event(**said: object) -> bytes:
    return json.dumps(said).encode()


def sglang(ids: list[int], *, done: int, num_logprobs: int | None = None, finish: object = None, **meta: object) -> bytes:
    logprobs = [[-0.5 - i, token, None] for i, token in enumerate(ids)][: len(ids) if num_logprobs is None else num_logprobs]
    said = {"id": "a", "completion_tokens": done, "finish_reason": finish, "output_token_logprobs": logprobs, **meta}
    return event(text="x", output_ids=ids, meta_info=said)


def vllm(ids: list[int], *, finish: str | None = None, tops: list[list[tuple[int, float]]] | None = None, **choice: object) -> bytes:
    listed = tops or [[] for _ in ids]
    content = [
        {"token": f"token_id:{t}", "token_id": t, "logprob": -0.5, "top_logprobs": [{"token_id": i, "logprob": p} for i, p in top]}
        for t, top in zip(ids, listed, strict=True)
    ]
    return event(choices=[{"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish, **choice}])


def read(reader: EventReader, *events: bytes) -> list[EventTokens]:
    return [reader.read(e) for e in events]


def test_sglang_with_all_tokens_in_each_event_gives_the_new_ones() -> None:
    pieces = read(
        SglangReader(ask()),
        sglang([7], done=1),
        sglang([7, 8, 9], done=3),
        sglang([7, 8, 9, 5], done=4, finish={"type": "length"}, weight_versions=[{"version": "3", "start": 0, "end": 4}]),
    )
    assert [p.token_ids for p in pieces] == [(7,), (8, 9), (5,)]
    assert [p.logprobs for p in pieces] == [(-0.5,), (-1.5, -2.5), (-3.5,)]
    assert [p.finish for p in pieces] == [None, None, Finish(FinishReason.LENGTH)]
    assert pieces[-1].spans == (("3", 0, 4),)


def test_sglang_with_new_tokens_in_each_event_gives_them() -> None:
    pieces = read(
        SglangReader(ask()), sglang([7], done=1), sglang([8, 9], done=3), sglang([5], done=4, finish={"type": "stop", "matched": 5})
    )
    assert [p.token_ids for p in pieces] == [(7,), (8, 9), (5,)]
    assert pieces[-1].finish == Finish(FinishReason.STOP, 5)


def test_sglang_repeats_the_last_id_on_an_abort_and_it_is_not_said_twice() -> None:
    pieces = read(SglangReader(ask()), sglang([7, 8], done=2), sglang([8], done=2, finish={"type": "abort", "message": "Aborted"}))
    assert [(p.token_ids, p.logprobs, p.finish) for p in pieces] == [((7, 8), (-0.5, -1.5), None), ((), (), ABORT)]


@pytest.mark.parametrize("said", [sglang([7, 8], done=2, num_logprobs=1), sglang([7], done=2), sglang([], done=1)])
def test_sglang_tokens_that_lack_ids_or_log_probabilities_are_nonsense(said: bytes) -> None:
    with pytest.raises(EngineUnavailable, match="log-probabilities"):
        SglangReader(ask()).read(said)


def test_an_abort_by_sglang_that_counts_tokens_it_does_not_bring_loses_them() -> None:
    """They are made again where the request is resumed."""
    pieces = read(SglangReader(ask()), sglang([7], done=1), sglang([9], done=5, finish={"type": "abort", "message": "Aborted"}))
    assert [(p.token_ids, p.logprobs, p.finish) for p in pieces] == [((7,), (-0.5,), None), ((), (), ABORT)]


def test_sglang_alternatives_come_with_their_tokens() -> None:
    tops = [[[-0.1, 3, None], [-0.5, 7, None]]]
    (piece,) = read(SglangReader(ask(top_logprobs=2)), sglang([7], done=1, output_top_logprobs=tops))
    assert piece.top_logprobs == (((3, -0.1), (7, -0.5)),)


def test_what_sglang_refuses_when_the_stream_has_begun_is_the_requests_fault_too() -> None:
    with pytest.raises(RequestRejected, match="too long"):
        SglangReader(ask()).read(event(error={"message": "too long", "type": "BadRequest", "code": 400}))
    with pytest.raises(EngineUnavailable, match="on fire"):
        SglangReader(ask()).read(event(error={"message": "on fire", "code": 500}))


@pytest.mark.parametrize("status", [400, 422])
def test_what_sglang_refuses_is_the_requests_fault(status: int) -> None:
    finish = {"type": "abort", "message": "too long", "status_code": status}
    with pytest.raises(RequestRejected, match="too long"):
        SglangReader(ask()).read(sglang([], done=0, finish=finish))


def test_what_sglang_gives_up_is_not_the_requests_fault() -> None:
    with pytest.raises(EngineUnavailable, match="out of memory"):
        SglangReader(ask()).read(sglang([], done=0, finish={"type": "abort", "message": "out of memory", "status_code": 500}))


def test_vllm_gives_new_tokens_and_at_the_end_their_versions() -> None:
    spans = [{"version": "0", "start": 0, "end": 2}, {"version": "1", "start": 2, "end": 3}]
    pieces = read(VllmReader(ask()), vllm([7, 8]), vllm([9], finish="length", weight_versions=spans))
    assert [p.token_ids for p in pieces] == [(7, 8), (9,)]
    assert pieces[-1] == EventTokens((9,), (-0.5,), (), Finish(FinishReason.LENGTH), (("0", 0, 2), ("1", 2, 3)))


def test_vllm_names_what_stopped_it_and_an_abort_may_have_no_tokens() -> None:
    assert VllmReader(ask()).read(vllm([5], finish="stop", stop_reason=5)).finish == Finish(FinishReason.STOP, 5)
    assert VllmReader(ask()).read(vllm([5], finish="stop", stop_reason="\n")).finish == Finish(FinishReason.STOP, "\n")
    assert VllmReader(ask()).read(vllm([], finish="abort")) == EventTokens(finish=ABORT)


def test_vllm_puts_the_sampled_token_first_and_the_likeliest_are_those_by_rank() -> None:
    tops = [[(7, -0.5), (3, -0.1), (9, -2.0)]]
    assert VllmReader(ask(top_logprobs=2)).read(vllm([7], tops=tops)).top_logprobs == (((3, -0.1), (7, -0.5)),)


def test_a_greedy_token_of_vllm_has_its_alternatives_too() -> None:
    said = VllmReader(ask(top_logprobs=2, temperature=0.0)).read(vllm([7], tops=[[(7, -0.5), (3, -1.0), (9, -2.0)]]))
    assert (said.logprobs, said.top_logprobs) == ((-0.5,), (((7, -0.5), (3, -1.0)),))


@pytest.mark.parametrize("reader", [SglangReader(ask()), VllmReader(ask())])
@pytest.mark.parametrize(
    "nonsense", [b"{", b"[]", b"7", b"{}", b"\xff\xfe", b'{"choices": []}', b'{"output_ids": "abc"}', b'{"error": {"message": "dead"}}']
)
def test_nonsense_and_errors_are_the_engines_fault(reader: EventReader, nonsense: bytes) -> None:
    with pytest.raises(EngineUnavailable):
        reader.read(nonsense)


@pytest.mark.parametrize("reader", [SglangReader(ask()), VllmReader(ask())])
def test_an_unknown_way_to_end_is_the_engines_fault(reader: EventReader) -> None:
    with pytest.raises(EngineUnavailable, match="nobody knows"):
        reader.read(
            sglang([], done=0, finish={"type": "nobody knows"}) if isinstance(reader, SglangReader) else vllm([], finish="nobody knows")
        )


def test_what_comes_after_the_end_of_an_answer_is_cut() -> None:
    piece = EventTokens((1, 5, 2, 5), (-1.0, -2.0, -3.0, -4.0), (((1, -1.0),),) * 4)
    assert cut(piece, ends=(5,), start=0, min_tokens=0) == EventTokens(
        (1, 5), (-1.0, -2.0), (((1, -1.0),),) * 2, Finish(FinishReason.STOP, 5)
    )
    assert cut(piece, ends=(5,), start=0, min_tokens=1).token_ids == (1, 5)
    assert cut(piece, ends=(5,), start=0, min_tokens=2).token_ids == (1, 5, 2, 5)
    assert cut(piece, ends=(5,), start=7, min_tokens=8).token_ids == (1, 5)
    assert cut(piece, ends=(9,), start=0, min_tokens=0) is piece


def test_a_grammar_that_vllm_alone_cannot_compile_is_refused_and_no_reason_to_doubt_the_engine() -> None:
    """Its llguidance may be older than ours."""
    failed = event(error={"message": "Internal server error", "type": "InternalServerError", "code": 500})
    shaped = ask(grammar=Grammar(GrammarKind.REGEX, "a"))
    with pytest.raises(RequestRejected) as caught:
        VllmReader(shaped).read(failed)
    assert caught.value.param == "grammar"
    begun = VllmReader(shaped)
    begun.read(vllm([97]))
    for reader in (begun, VllmReader(ask())):
        with pytest.raises(EngineUnavailable):
            reader.read(failed)


@pytest.mark.parametrize(("seed", "sent"), [(7, 7), (2**63 + 5, 5)])
def test_sglang_is_sent_the_seed_of_each_request_where_it_is_deterministic_and_none_elsewhere(seed: int, sent: int) -> None:
    def sampling(*, deterministic: bool) -> dict[str, object]:
        server = SglangServer(vocab_size=262, max_running=8, max_context=64, deterministic=deterministic)
        asked = ServerRequest(ask(seed=seed), ChunkStream(eager=True))
        return server.body(asked, salt="")[1]["sampling_params"]  # type: ignore[return-value]

    assert sampling(deterministic=True)["sampling_seed"] == sent
    assert "sampling_seed" not in sampling(deterministic=False)
