"""One answer: its tokens become text once."""

from __future__ import annotations

import pytest
from tests.gateway.offered import ScriptedGenerator, offered

from midflight.testing.virtual_time import run_virtual
from midflight.text import Tokenizer
from midflight.text.detokenizer import IncrementalDetokenizer

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
