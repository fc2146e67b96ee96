"""What a real server must keep over interruptions besides its tokens: grammars, the least length of an answer, seeds."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Iterable

import numpy as np
import pytest
import torch
from tests.engines.asking import Contract
from tests.engines.models import TOKENIZER, ask
from tests.engines.reading import ids, logprobs
from tests.engines.sites import ModelSite, Site, output_logits
from tests.gateway.generating import Heard

from midflight.engines.embedded.grammar import Grammars
from midflight.gateway.answers.generation import Generator
from midflight.gateway.fleet.fleet import Fleet
from midflight.text.byte_tokenizer import END
from midflight.text.formats import MessageFormat, Tool
from midflight.types import Chunk, FinishReason, GenerateRequest, Grammar, GrammarKind, PauseMode

_CITY = {"properties": {"city": {"enum": ["Oslo", "Reykjavik"]}}, "required": ["city"], "additionalProperties": False}
WEATHER = Tool("weather", parameters={"type": "object", **_CITY})
FORMAT = MessageFormat(TOKENIZER, tools="hermes")
PATTERN = "(ab|cd){20,40}"
LEAST = 30
LATEST = 100
"""The longest answer has not more tokens than these when it is interrupted, however slow the others are: it must go on again."""
_RECORD = {
    "name": {"enum": ["red", "green", "turquoise"]},
    "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 6},
}
RECORD = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": _RECORD,
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
ENDING = ((END, 100.0),)


def requests() -> dict[str, GenerateRequest]:
    call = FORMAT.calls_grammar([WEATHER], parallel=False, prompt_text="hello")
    regex = Grammar(GrammarKind.REGEX, PATTERN)
    shapes: dict[str, dict[str, object]] = {
        "schema": {"grammar": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(RECORD))},
        "regex": {"grammar": regex},
        "call": {"grammar": call},
        "least": {"min_tokens": LEAST, "logit_bias": ENDING, "ignore_eos": False},
        "least of a form": {"grammar": Grammar(GrammarKind.REGEX, "(ab|cd)*"), "min_tokens": LEAST, "logit_bias": ENDING},
        "min-p": {"min_p": 0.004, "top_k": 200, "max_tokens": 150},  # goes on when the others are interrupted again
        "a long prompt": {"max_tokens": 40},
    }
    prompts = {"a long prompt": "The quick brown fox. " * 8}
    return {
        name: ask(prompts.get(name, "hello"), request_id=f"{i:032}", seed=i + 3, **{"max_tokens": 100, **shape})
        for i, (name, shape) in enumerate(shapes.items())
    }


def text_of(chunks: list[Chunk]) -> str:
    return bytes(i for i in ids(chunks) if i != END).decode()


def check(name: str, chunks: list[Chunk]) -> None:
    """That the answer is of its form. A regex or schema may be cut by the budget, which these are too short for."""
    if name == "schema":
        record = json.loads(text_of(chunks))
        assert record["name"] in ("red", "green", "turquoise") and all(size <= 999 for size in record["sizes"])
    elif name == "regex":
        assert re.fullmatch(PATTERN, text_of(chunks))
    elif name == "call":
        (call,) = FORMAT.parse(text_of(chunks), "hello", calls=True, tools=[WEATHER]).tool_calls
        assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Oslo", "Reykjavik")
    elif name == "least":
        assert len(ids(chunks)) == LEAST + 1
    elif name == "least of a form":
        assert re.fullmatch("(ab|cd){15}", text_of(chunks)) and len(ids(chunks)) == LEAST + 1
    if name not in ("min-p", "a long prompt"):
        assert chunks[-1].finish is not None and chunks[-1].finish.reason is FinishReason.STOP
        assert ids(chunks)[-1] == END


def masked_logprobs(site: ModelSite, request: GenerateRequest, output: tuple[int, ...]) -> list[float]:
    """Of the distribution that was sampled: what the grammar forbids has no part in it."""
    assert request.sampling.grammar is not None
    constraint, rows = Grammars(TOKENIZER, vocab_size=262).constraint(request.sampling.grammar, ()), list[np.ndarray]()
    for token in output:
        rows.append(constraint.allowed())
        constraint.advance([token])
    logits = output_logits(site.models(0), request, output).masked_fill(~torch.from_numpy(np.stack(rows)), float("-inf"))
    return logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()


class ShapedContract(Contract):
    @pytest.mark.parametrize("how", ["abort", "pause"])
    def test_i5_answers_of_a_form_or_with_a_seed_are_the_same_however_often_they_are_interrupted(self, how: str) -> None:
        async def test(site: Site) -> None:
            fleet, asked = Fleet(), requests()
            fleet.attach(site.engine)
            generator = Generator(fleet, request_seconds=60)
            whole = await answers(generator, asked, list(asked))
            for name, chunks in whole.items():
                check(name, chunks)
                assert ids(chunks) == await site.seeded(asked[name]), name
            again = await answers(generator, asked, list(asked), interrupted=site, how=how)
            for name, chunks in again.items():
                assert ids(chunks) == ids(whole[name]), name
                assert logprobs(chunks) == pytest.approx(logprobs(whole[name]), abs=1e-4), name
            assert isinstance(site, ModelSite)
            for name in ("schema", "regex", "call"):
                expected = masked_logprobs(site, asked[name], ids(again[name]))
                assert logprobs(again[name]) == pytest.approx(expected, abs=1e-4), name

        self.on(test)


async def answers(
    generator: Generator, asked: dict[str, GenerateRequest], names: list[str], *, interrupted: Site | None = None, how: str = ""
) -> dict[str, list[Chunk]]:
    """All at once. Where they are `interrupted`, each has gone on twice from some of its tokens."""
    heard = {name: Waiting(asked[name]) for name in names}
    longest = max(heard.values(), key=lambda answer: answer.request.sampling.max_tokens)
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(generator.generate(heard[name], affinity=name))
        for num in (3, 12) if interrupted is not None else ():
            assert interrupted is not None
            await first_of(all_have(heard.values(), num), longest.has(LATEST))
            kept = {name: ids(answer.chunks) for name, answer in heard.items()}
            if how == "pause":
                await interrupted.engine.pause(PauseMode.ABORT)
                await interrupted.engine.resume()
            else:
                await interrupted.engine.abort(None)
            for name, answer in heard.items():
                assert ids(answer.chunks)[: len(kept[name])] == kept[name]
    if interrupted is not None:
        assert max(answer.num_resumes for answer in heard.values()) == 2
    return {name: answer.whole() for name, answer in heard.items()}


async def all_have(answers: Iterable[Waiting], num: int) -> None:
    for answer in answers:
        await answer.has(num)


async def first_of(*waits: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class Waiting(Heard):
    """Says when it has so many tokens, or has ended."""

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__(request, tokenizer=TOKENIZER)
        self._more = asyncio.Event()

    def accept(self, chunk: Chunk, *, vocab_size: int) -> None:
        super().accept(chunk, vocab_size=vocab_size)
        self._more.set()

    async def has(self, num: int) -> None:
        while len(self.output_ids) < num and self.finish is None:
            self._more.clear()
            await self._more.wait()
