"""Prompts far too long are refused before they hold up the event loop: a tokenizer keeps the interpreter to itself while it works."""

from __future__ import annotations

import asyncio

from midflight.errors import ContextExceeded
from midflight.gateway.answers.sampling import Limits
from midflight.gateway.sessions.call import Messages, Source, Text
from midflight.text import Tokenizer

LONG_BODY = 2**17
"""Bytes of a request from which its prompts are looked at first; shorter ones tokenise in some milliseconds."""

_PIECE = 2**14
"""Letters tokenised at a time, a few milliseconds each: between two, the event loop has its turn."""

_MARGIN = 2
"""How many times the context a prompt may have here. A session's own tokens may be other ones than those of its text."""


async def check_lengths(tokenizer: Tokenizer, sources: tuple[Source, ...], limits: Limits, *, num_bytes: int, param: str) -> None:
    """Waits for a thread to have counted, piece by piece, the tokens of the prompts of a long request; ended by that.

    `ContextExceeded` where a prompt cannot fit. What passes is some contexts long at most.
    """
    if num_bytes >= LONG_BODY:
        for source in sources:
            await asyncio.to_thread(_check, tokenizer, source, limits, param)


def _check(tokenizer: Tokenizer, source: Source, limits: Limits, param: str) -> None:
    match source:
        case Messages():
            _check_count(len(source.messages), limits, param)
            tools = [tool.as_json() for tool in source.tools] or None
            text = tokenizer.render(source.messages, tools=tools, add_generation_prompt=True, options=source.options)
        case Text(text):
            pass
        case _:
            return
    count = 0
    for start in range(0, len(text), _PIECE):
        count += len(tokenizer.encode(text[start : start + _PIECE]))
        _check_count(count, limits, param)


def _check_count(count: int, limits: Limits, param: str) -> None:
    """`count`: tokens at least. A message is one token or more."""
    if count > _MARGIN * limits.max_context:
        raise ContextExceeded(
            f"This model's maximum context length is {limits.max_context} tokens, but the {param} has more than "
            f"{_MARGIN * limits.max_context} tokens. Shorten the {param}.",
            param=param,
        )
