"""One answer: its tokens become text once."""

from __future__ import annotations

import pytest
from tests.gateway.generating import Heard
from tests.gateway.offered import ScriptedGenerator, offered

from midflight.errors import EngineUnavailable
from midflight.testing.virtual_time import run_virtual
from midflight.text import Tokenizer
from midflight.text.detokenizer import IncrementalDetokenizer
from midflight.types import Chunk, Finish, FinishReason, GenerateRequest, OlderKeys, SamplingParams

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "stop": ["END"]}


@pytest.mark.parametrize("stream", [False, True])
def test_with_a_stop_string_each_token_is_detokenised_once(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text that the agent sees and the match of the stop string come from the same letters."""
    pushed: list[int] = []
    decoded: list[int] = []
    push, decode = IncrementalDetokenizer.push, Tokenizer.decode

    def pushing(detokenizer: IncrementalDetokenizer, token_id: int) -> str:
        pushed.append(token_id)
        return push(detokenizer, token_id)

    def decoding(tokenizer: Tokenizer, token_ids: tuple[int, ...], **options: bool) -> str:
        decoded.extend(token_ids)
        return decode(tokenizer, token_ids, **options)

    async def main() -> None:
        async with offered(ScriptedGenerator(texts=["a few letters, then END and more"])) as it:
            monkeypatch.setattr(IncrementalDetokenizer, "push", pushing)
            monkeypatch.setattr(Tokenizer, "decode", decoding)
            answer = await it.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            assert '"stop_reason":"END"' in answer.text

    run_virtual(main())
    assert (bytes(pushed), decoded) == (b"a few letters, then END", [])


def recorded(num_tokens: int, number: int) -> bytes:
    """Of all tokens but the last, two bytes each."""
    return bytes([number, number] * (num_tokens - 1) + [255, 255])


def test_an_answer_of_two_attempts_has_the_experts_of_the_one_that_sampled_each_token() -> None:
    asked = GenerateRequest("r", (1, 2, 3), 3, SamplingParams(max_tokens=4, ignore_eos=True))
    answer = Heard(asked)
    answer.next_request("a")
    answer.accept(Chunk((4, 5), (-0.1, -0.1), 0, 0, Finish(FinishReason.ABORT), experts=recorded(5, 7)), vocab_size=262)
    answer.next_request("b")
    answer.accept(Chunk((6, 7), (-0.1, -0.1), 1, 1, Finish(FinishReason.LENGTH), experts=recorded(7, 8)), vocab_size=262)
    assert list(answer.close().experts[::2]) == [7, 7, 7, 7, 8, 8, 255]


def test_a_record_does_not_hold_what_was_cut() -> None:
    answer = Heard(GenerateRequest("r", (1, 2, 3), 3, SamplingParams(max_tokens=2, ignore_eos=True)))
    answer.next_request("a")
    answer.accept(Chunk((4, 5, 6), (-0.1,) * 3, 0, 0, Finish(FinishReason.LENGTH), experts=recorded(6, 7)), vocab_size=262)
    assert (answer.close().experts, answer.num_overshoot) == (bytes([7, 7] * 5), 1)


def test_an_answer_says_which_older_keys_each_attempt_began_with() -> None:
    answer = Heard(GenerateRequest("r", (1, 2, 3), 3, SamplingParams(max_tokens=4, ignore_eos=True)))
    answer.next_request("a")
    answer.accept(Chunk((4,), (-0.1,), 2, 1, key_runs=((1, 2), (2, 1))), vocab_size=262)
    answer.accept(Chunk((5,), (-0.1,), 3, 1, Finish(FinishReason.ABORT)), vocab_size=262)
    answer.next_request("b")
    answer.accept(Chunk((6, 7), (-0.1, -0.1), 3, 2, Finish(FinishReason.LENGTH), key_runs=((2, 3), (3, 2))), vocab_size=262)
    told = (OlderKeys(0, ((1, 2), (2, 1))), OlderKeys(2, ((2, 3), (3, 2))))
    assert answer.close().older_keys == told
    again = Heard(answer.request)
    again.replay(answer.turn)
    assert again.close() == answer.turn


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (((1, 2), (2, 2)), r"lengths \[2, 2\] for 3 tokens"),
        (((1, 4), (2, -1)), r"lengths \[4, -1\] for 3 tokens"),
        (((0, 2), (2, 1)), r"keys are of version 1, its runs of keys of \[0, 2\]"),
    ],
)
def test_older_keys_that_do_not_fit_the_tokens_are_nonsense(runs: tuple[tuple[int, int], ...], why: str) -> None:
    answer = Heard(GenerateRequest("r", (1, 2, 3), 3, SamplingParams(max_tokens=2, ignore_eos=True)))
    answer.next_request("a")
    with pytest.raises(EngineUnavailable, match=why):
        answer.accept(Chunk((4,), (-0.1,), 2, 1, key_runs=runs), vocab_size=262)


def test_a_record_that_does_not_fit_the_tokens_is_nonsense() -> None:
    answer = Heard(GenerateRequest("r", (1, 2, 3), 3, SamplingParams(max_tokens=2, ignore_eos=True)))
    answer.next_request("a")
    with pytest.raises(EngineUnavailable, match="7 bytes for 5 tokens"):
        answer.accept(Chunk((4, 5), (-0.1,) * 2, 0, 0, Finish(FinishReason.LENGTH), experts=bytes(7)), vocab_size=262)
