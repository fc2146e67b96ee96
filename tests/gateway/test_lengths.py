"""One request, however large, leaves the event loop to the others."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.gateway.offered import DEFAULTS, KEY, ScriptedGenerator, offered

from midflight.gateway.dialects.fields import MAX_KEYS, MAX_VALUES
from midflight.testing.script import scripted_tokenizer
from midflight.testing.virtual_time import run_virtual
from midflight.text import Tokenizer

LONG = "a" * 1_000_000


class Counting(Tokenizer):
    """Remembers how many letters it was given."""

    def __init__(self) -> None:
        known = scripted_tokenizer()
        super().__init__(known.backend, template=known.template, eos_token_ids=known.eos_token_ids)
        self.num_letters = 0

    def encode(self, text: str) -> tuple[int, ...]:
        self.num_letters += len(text)
        return super().encode(text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"model": "policy", "prompt": [LONG, "b"]}),
        ("/v1/responses", {"model": "policy", "input": LONG}),
        ("/v1/messages", {"model": "policy", "max_tokens": 3, "messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages/count_tokens", {"model": "policy", "messages": [{"role": "user", "content": LONG}]}),
        ("/v1beta/models/policy:generateContent", {"contents": [{"parts": [{"text": LONG}]}]}),
        ("/v1beta/models/policy:countTokens", {"contents": [{"parts": [{"text": LONG}]}]}),
        ("/generate", {"text": LONG}),
    ],
)
def test_a_prompt_far_too_long_is_refused_after_a_look_at_its_beginning(path: str, body: dict[str, object]) -> None:
    async def main() -> None:
        tokenizer = Counting()
        async with offered(ScriptedGenerator(tokenizer=tokenizer)) as it:
            tokenizer.num_letters = 0
            answer = await it.http.post(path, json=body)
            assert (answer.status_code, "maximum context length is 256 tokens" in answer.text) == (400, True)
            assert tokenizer.num_letters <= 2**14 + 10

    run_virtual(main())


def test_more_messages_than_the_context_has_tokens_are_not_even_written() -> None:
    async def main() -> None:
        tokenizer = Counting()
        async with offered(ScriptedGenerator(tokenizer=tokenizer)) as it:
            messages = [{"role": "user", "content": "x"}] * 10_000
            assert (await it.http.post("/v1/chat/completions", json={"model": "policy", "messages": messages})).status_code == 400
            assert tokenizer.num_letters == 0

    run_virtual(main())


def test_a_long_body_whose_prompt_is_short_is_answered() -> None:
    async def main() -> None:
        async with offered() as it:
            body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "metadata": {"note": LONG}}
            assert (await it.http.post("/v1/chat/completions", json=body)).status_code == 200

    run_virtual(main())


def test_long_calls_with_one_key_are_one_generation_even_side_by_side() -> None:
    async def main() -> None:
        async with offered() as it:
            handle = it.gateway.open(KEY, sampling=DEFAULTS, tracked=True)
            body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}], "metadata": {"note": LONG}})
            url, key = f"{handle.base_url}/chat/completions", {"idempotency-key": "k"}
            told = await asyncio.gather(*(it.http.post(url, content=body, headers=key) for _ in range(5)))
            assert len({answer.text for answer in told}) == 1
            assert (len(it.generator.requests), it.gateway.close(handle.session_id).num_turns) == (1, 1)

    run_virtual(main())


def test_a_body_of_more_values_or_keys_than_are_read_at_once_is_refused_unread() -> None:
    async def main() -> None:
        async with offered() as it:
            ids = json.dumps({"model": "policy", "prompt": [1] * (MAX_VALUES + 1)})
            answer = await it.http.post("/v1/completions", content=ids)
            assert (answer.status_code, f"send {MAX_VALUES} at most" in answer.text) == (400, True)
            keys = {"model": "policy", "prompt": "hi", **{f"k{i}": i for i in range(MAX_KEYS)}}
            for separators in ((", ", ": "), (",", " :")):
                answer = await it.http.post("/v1/completions", content=json.dumps(keys, separators=separators))
                assert (answer.status_code, f"send {MAX_KEYS} at most" in answer.text) == (400, True)
            prose = json.dumps({"model": "policy", "prompt": "hi", "max_tokens": 2, "metadata": {"note": "at 12:30:45: " * MAX_KEYS}})
            assert (await it.http.post("/v1/completions", content=prose)).status_code == 200
            text = json.dumps({"model": "policy", "prompt": "hi", "max_tokens": 2, "metadata": {"note": "," * 100_000 + "x" * MAX_VALUES}})
            assert (await it.http.post("/v1/completions", content=text)).status_code == 200

    run_virtual(main())
