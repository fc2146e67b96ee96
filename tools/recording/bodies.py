"""The answers of the gateway to what real clients sent (tests/corpus), with a scripted engine in the model's place."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

from tests.corpus.recorded import Recorded, read
from tests.corpus.replayed import replayed

from recording import Found

ID = re.compile(r"[0-9a-f]{12,}")
TIME = re.compile(r'("created(?:_at)?": ?)[\d.]+')
OFFERED = re.compile(r'"name": ?"([\w-]+)"')


def answers() -> Found:
    """Each answer with its status and its headers, by client, route and what the body uses."""
    bodies = list(read())
    texts = replayed(bodies, reply)
    return {name: in_lines(masked(text)) for name, text in zip(_names(bodies), texts, strict=True)}


def reply(prompt: str) -> str:
    """Words that no other prompt gets, and a call of the first tool that is offered."""
    told = f"The sum of this prompt is {zlib.crc32(prompt.encode()):x}."
    offered = OFFERED.search(prompt)
    if offered is None:
        return told
    return f'{told}\n<tool_call>\n{{"name": "{offered[1]}", "arguments": {{"input": "a"}}}}\n</tool_call>'


def masked(answer: str) -> str:
    """The answer without times, and each id as its number in the answer, so that what referred to one still does."""
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f"<id {numbers.setdefault(match[0], len(numbers) + 1)}>"

    return ID.sub(number, TIME.sub(r"\1<time>", answer))


def in_lines(answer: str) -> str:
    """The answer with each field of its JSON on a line, so that a difference is short."""
    return answer.replace(',"', ',\n"')


def _names(bodies: list[Recorded]) -> Iterator[str]:
    """A client that sent two bodies of one kind gets a number behind the second."""
    seen: dict[str, int] = {}
    for one in bodies:
        name = f"{one.client} {one.path} {one.features}"
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name} ({seen[name]})"
