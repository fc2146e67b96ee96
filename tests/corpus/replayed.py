"""Recorded bodies, answered by a gateway in this process over a scripted engine of which everything may be asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
from tests.corpus.recorded import Recorded
from tests.gateway.site import Site

from midflight.gateway.answers.plan import EngineLimits
from midflight.testing.script import Replies
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Feature

ALL = frozenset(Feature)
MAX_CONTEXT = 2_000_000
"""A token is a byte here, and prompts of coding agents have some ten thousand."""


@asynccontextmanager
async def able_gateway(rule: Callable[[str], str]) -> AsyncGenerator[httpx2.AsyncClient]:
    """A client of a gateway whose engine replies by `rule` to the prompt's text."""
    able = replace(CAPABLE, max_context=MAX_CONTEXT, features=ALL)
    engine = ScriptedEngine(script=Replies(rule), capabilities=able, step_seconds=0.0, chunk_tokens=8)
    site = Site([engine])
    site.gateway.limits = EngineLimits(MAX_CONTEXT, 262, features=ALL)
    site.gateway._planner._limits = site.gateway.limits
    async with site.http() as http:
        yield http


def replayed(bodies: Sequence[Recorded], rule: Callable[[str], str]) -> list[str]:
    """The text of each answer, below its status and headers, as HTTP writes them."""

    async def main() -> list[str]:
        async with able_gateway(rule) as http:
            return [_as_text(await http.post(one.path, json=one.body)) for one in bodies]

    return run_virtual(main())


def _as_text(answer: httpx2.Response) -> str:
    headers = "".join(f"{name}: {value}\n" for name, value in sorted(answer.headers.items()))
    return f"{answer.status_code}\n{headers}\n{answer.text}"
