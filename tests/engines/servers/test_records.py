"""The experts that servers say they sent tokens to, as rows have them."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from tests.engines.models import ask

from midflight.engines.servers.server import Attempt, EventTokens, ServerRequest
from midflight.engines.servers.sglang import SglangReader
from midflight.engines.servers.vllm import VllmReader
from midflight.engines.streams import ChunkStream
from midflight.errors import EngineUnavailable
from midflight.types import Finish, FinishReason, UInt8

NUMBERS = np.arange(4 * 2 * 2).reshape(4, 2, 2) % 8
"""Of a prompt of three tokens and an answer of two, whose last one was sent nowhere: two layers, two of eight experts."""


def sglang(numbers: np.ndarray, *, finish: str | None = "length", num_experts: int = 8) -> UInt8 | None:
    meta = {
        "completion_tokens": 2,
        "finish_reason": finish and {"type": finish},
        "output_token_logprobs": [[-0.1, 5, None], [-0.2, 6, None]],
        "routed_experts": base64.b64encode(numbers.astype("<i4").tobytes()).decode(),
    }
    event = json.dumps({"output_ids": [5, 6], "meta_info": meta}).encode()
    return SglangReader(ask("abc"), num_experts=num_experts, num_choices=4).read(event).experts


def vllm(numbers: np.ndarray, *, num_experts: int = 8) -> UInt8 | None:
    saved = io.BytesIO()
    np.save(saved, numbers.astype("u1" if num_experts <= 256 else "<u2"))
    choice = {"token_ids": [5, 6], "finish_reason": "length", "routed_experts": base64.b64encode(saved.getvalue()).decode()}
    return VllmReader(ask("abc"), num_experts=num_experts).read(json.dumps({"choices": [choice]}).encode()).experts


@pytest.mark.parametrize("read", [sglang, vllm])
def test_a_record_is_a_byte_for_each_layer_and_expert_and_two_for_many_experts(read) -> None:
    few, many = read(NUMBERS), read(NUMBERS + 300, num_experts=384)
    assert few is not None and few.tolist() == NUMBERS.reshape(4, 4).tolist() and few.dtype == np.uint8
    assert many is not None and many.view("<u2").tolist() == (NUMBERS + 300).reshape(4, 4).tolist()


def test_a_record_counts_at_the_end_of_an_answer_and_only_where_it_is_wanted() -> None:
    assert sglang(NUMBERS, finish=None) is None
    assert sglang(NUMBERS, num_experts=0) is None and vllm(NUMBERS, num_experts=0) is None


def test_a_record_that_fits_no_tokens_is_the_servers_fault() -> None:
    with pytest.raises(EngineUnavailable, match=r"record of experts.*routing_replay = false"):
        sglang(NUMBERS.flatten()[:-1])


def test_a_request_ends_with_a_record_of_the_tokens_that_it_was_given() -> None:
    """The server made one token more than a stop id allows; and the last token of an answer has no record."""
    record = NUMBERS.reshape(4, 4).astype(np.uint8)
    for tokens, expected in (((5, 6), [*record.tolist(), [255] * 4]), ((9, 6), record.tolist())):
        request = ServerRequest(ask("abc", ignore_eos=False), ChunkStream(eager=True), ends=(9,))
        attempt = Attempt(0)
        given = request.take(attempt, EventTokens(tokens, (-0.1, -0.1), finish=Finish(FinishReason.LENGTH), experts=record))
        found = request._record(record, attempt)
        assert np.frombuffer(found, np.uint8).reshape(-1, 4).tolist() == expected and given.finish is not None
