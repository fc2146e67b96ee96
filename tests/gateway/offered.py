"""A gateway over a generator whose answers are known, for the tests of the half that faces agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai
from tests.facts import Facts

from midflight.gateway.answers.answer import Answer
from midflight.gateway.answers.gateway import Gateway
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.http.http import build_app
from midflight.testing.script import Script, play, scripted_tokenizer
from midflight.text import Tokenizer
from midflight.types import Chunk, Finish, FinishReason, GenerateRequest, GroupKey, PauseMode, RolloutKey, SamplingParams
from midflight.types.facts import Record, record_nothing
from midflight.wire.memory import MemoryTransport

KEY = RolloutKey(GroupKey(epoch=0, index=3, attempt=0), sample=1)
DEFAULTS = SamplingParams(max_tokens=8)


@dataclass
class ScriptedGenerator:
    """What the gateway generates with; `texts` are answered first, then the script's own. Every token is a chunk, whose version counts
    up every two tokens."""

    tokenizer: Tokenizer = field(default_factory=scripted_tokenizer)
    texts: list[str] = field(default_factory=list)
    seconds_per_token: float = 0.01
    error: Exception | None = None
    error_after: int = 0
    num_overshoot: int = 0
    running: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def generate(self, answer: Answer, *, affinity: str, may_abort: bool = False, told: Callable[[], None] = lambda: None) -> None:
        self.requests.append(answer.request)
        self.running += 1
        try:
            if self.error is not None and self.error_after == 0:
                raise self.error
            ids, logprobs, finish = self.answer(answer.request)
            answer.next_request("attempt")
            for k, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
                await asyncio.sleep(self.seconds_per_token)
                last = k == len(ids) - 1
                answer.accept(Chunk((token_id,), (logprob,), k // 2, k // 2, finish if last else None), vocab_size=2**31)
                told()
                if self.error is not None and k + 1 >= self.error_after:
                    raise self.error
                if answer.finish is not None:
                    break
            answer.num_overshoot += self.num_overshoot
        finally:
            self.running -= 1

    def forget(self, affinity: str) -> None:
        self.forgotten.append(affinity)

    def answer(self, request: GenerateRequest) -> tuple[tuple[int, ...], tuple[float, ...], Finish]:
        if not self.texts:
            script = Script() if self.error is None else Script(mean_length=None)  # no end before the error
            played = play(script, request, self.tokenizer)
            return played.token_ids, played.logprobs, played.finish
        ids = self.tokenizer.encode(self.texts.pop(0))[: request.sampling.max_tokens]
        ended = ids[-1] in self.tokenizer.eos_token_ids
        finish = Finish(FinishReason.STOP, ids[-1]) if ended else Finish(FinishReason.LENGTH)
        return ids, tuple(-0.5 * (k + 1) for k in range(len(ids))), finish


class RecordingControl:
    def __init__(self) -> None:
        self.acts: list[tuple[str, object]] = []

    async def pause(self, mode: PauseMode | None = None) -> None:
        self.acts.append(("pause", mode))

    async def resume(self) -> None:
        self.acts.append(("resume", None))

    num_active = 0
    paused = False

    def served_version(self) -> int:
        return 3

    async def abort(self, request_id: str | None) -> int:
        self.acts.append(("abort", request_id))
        return 1


@dataclass
class Offered:
    """A gateway and the ways to reach it."""

    gateway: Gateway
    generator: ScriptedGenerator
    seen: Facts
    control: RecordingControl
    http: httpx2.AsyncClient

    def sdk(self, *, base_url: str = "http://memory/v1", api_key: str = "any") -> openai.AsyncOpenAI:
        """The unmodified SDK."""
        return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=self.http, max_retries=0)


def make_gateway(generator: ScriptedGenerator, record: Record = record_nothing, **options: Any) -> Gateway:
    limits = options.pop("limits", EngineLimits(max_context=256, vocab_size=262))
    gateway = Gateway(generator, generator.tokenizer, record, model="policy", limits=limits, **options)
    gateway.address = "http://memory"
    return gateway


@asynccontextmanager
async def offered(
    generator: ScriptedGenerator | None = None, *, control_token: str | None = None, **options: Any
) -> AsyncIterator[Offered]:
    """A gateway behind its ASGI application, reached in memory."""
    generator, seen, control = generator or ScriptedGenerator(), Facts(), RecordingControl()
    ready: Callable[[], bool] = options.pop("ready", lambda: True)
    gateway = make_gateway(generator, seen.apply, **options)
    app = build_app(gateway, control, control_token=control_token, ready=ready, now=lambda: 7.0)
    async with asyncio.TaskGroup() as tasks, httpx2.AsyncClient(transport=MemoryTransport(app, tasks), base_url="http://memory") as http:
        yield Offered(gateway, generator, seen, control, http)
        await asyncio.sleep(1)  # the SDK leaves the iterators of a stream to the loop, which closes them in tasks of its own
