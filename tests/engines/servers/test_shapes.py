"""Grammars and seeds at servers: what our plugins inside them are told, and what they make of it."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.models import TOKENIZER, ask
from tests.engines.reading import collect, rejection, resumed
from tests.engines.servers.fakes import Fake, FakeSglang, FakeVllm, attached

from midflight.engines.embedded.grammar import Grammars
from midflight.engines.servers.command import INSIDE
from midflight.text.byte_tokenizer import END
from midflight.types import Feature, Grammar, GrammarKind

sys.path.append(str(INSIDE))
from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask
from midflight_seed import mixed
from midflight_shape import Shapes

GRAMMARS = [
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}'),
    Grammar(GrammarKind.REGEX, "(ab|cd){2,4}é?"),
    Grammar(GrammarKind.LARK, 'start: "<" %json {"enum": [1, 22]} ">"'),
]
SIZE = 262
shapes: Any = Shapes(SimpleNamespace(backend_tokenizer=TOKENIZER.backend), SIZE)
ours = Grammars(TOKENIZER, vocab_size=SIZE)


def shape_of(grammar: Grammar, after: list[int], *, least: int = 0, barred: tuple[int, ...] = (END,)) -> Any:
    return shapes.shape(ours.for_server(grammar, after, barred=barred, least=least))


def allowed(shape: Any) -> np.ndarray:
    rows = allocate_token_bitmask(1, SIZE)
    shape.fill(rows[0], lambda matcher: fill_next_token_bitmask(matcher, rows, 0))
    return np.unpackbits(rows.numpy().view(np.uint8), bitorder="little", count=SIZE).astype(bool)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=[g.kind for g in GRAMMARS])
def test_i5_a_server_allows_at_each_token_what_our_engine_allows_wherever_the_answer_was_interrupted(grammar: Grammar) -> None:
    rng, walked, output = random.Random(3), ours.constraint(grammar, ()), list[int]()
    uninterrupted = shape_of(grammar, [])
    while not walked.ended and len(output) < 60:
        assert (allowed(uninterrupted) == walked.allowed()).all()
        assert (allowed(shape_of(grammar, output)) == walked.allowed()).all()
        output.append(rng.choice(walked.allowed().nonzero()[0].tolist()))
        walked.advance(output[-1:])
        assert uninterrupted.accept(output[-1:]) and uninterrupted.ended == walked.ended


def test_tokens_that_a_grammar_forbids_are_no_answer_to_go_on_with() -> None:
    assert not shape_of(GRAMMARS[1], []).accept(list(b"x"))
    said = json.loads(ours.for_server(GRAMMARS[1], [], barred=(), least=0))
    with pytest.raises(ValueError, match="forbids the answer so far"):
        shapes.shape(json.dumps(said | {"after": list(b"ax")}))


def test_an_answer_does_not_end_before_its_least_length_unless_nothing_else_is_left() -> None:
    assert allowed(shape_of(GRAMMARS[1], list(b"abab")))[END]
    assert not allowed(shape_of(GRAMMARS[1], list(b"abab"), least=5))[END]
    assert allowed(shape_of(GRAMMARS[1], list(b"abab"), least=5)).nonzero()[0].tolist() == sorted([*b"ac", "é".encode()[0]])
    assert allowed(shape_of(GRAMMARS[1], list("ababé".encode()), least=9)).nonzero()[0].tolist() == [END]
    # a stop id of the client, in the last bit of a word of 32
    stopping = shape_of(Grammar(GrammarKind.REGEX, "[^a]*"), [], least=1, barred=(END, 63))
    assert allowed(stopping)[62] and not allowed(stopping)[63]
    assert stopping.accept([62]) and allowed(stopping)[63]


def test_tokens_that_were_guessed_wrongly_are_taken_back_and_an_end_with_them() -> None:
    shape = shape_of(GRAMMARS[1], list(b"ab"))
    before = allowed(shape)
    assert shape.num_allowed(list(b"cda")) == 3 and shape.num_allowed(list(b"cx")) == 1
    assert shape.accept([*b"cd", END]) and shape.ended
    shape.back(3)
    assert not shape.ended and (allowed(shape) == before).all()


def test_noise_of_a_seed_is_another_at_each_place_and_the_same_at_the_same() -> None:
    numbers = {mixed(seed, position) for seed in (0, 1, 2**63 - 1) for position in range(50)}
    assert len(numbers) == 150 and mixed(7, 3) == mixed(7, 3)
    assert all(0 <= number < 2**63 for number in numbers)
    torch.Generator().manual_seed(max(numbers))


def sent(fake: Fake) -> dict[str, Any]:
    return [body for path, body in fake.calls if path == fake.generate and body.get("stream")][-1]["sampling_params"]  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [FakeSglang, FakeVllm])
def test_an_attempt_that_resumes_tells_the_server_where_in_the_grammar_it_stands(kind: type[Fake], tmp_path: Path) -> None:
    request = ask(grammar=GRAMMARS[1], max_tokens=9, min_tokens=7, seed=4)

    async def main() -> None:
        fake = kind()
        fake.has_plugin = True
        async with attached(fake, tmp_path) as (engine, _):
            assert Feature.GRAMMARS in engine.capabilities.features and engine.capabilities.honours_seed
            for so_far in (b"", b"abc"):
                await collect(engine, resumed(request, tuple(so_far)))
                asked = sent(fake)
                told = json.loads(asked["ebnf"] if kind is FakeSglang else asked["extra_args"]["midflight"])
                # An end of turn ends the answer although the request ignores it: nothing may come after it.
                assert (told["after"], told["ends"], told["barred"], told["least"]) == ([*so_far], [END], [END], 7)
                assert asked["stop_token_ids"] == [END]
                least, most = ("min_new_tokens", "max_new_tokens") if kind is FakeSglang else ("min_tokens", "max_tokens")
                assert (asked[least], asked[most]) == (0, 9 - len(so_far))
                assert asked["sampling_seed" if kind is FakeSglang else "seed"] == 4
            refused = await rejection(engine, ask(grammar=Grammar(GrammarKind.REGEX, "(a")))
            assert refused.param == "grammar"

    asyncio.run(main())


@pytest.mark.parametrize("kind", [FakeSglang, FakeVllm])
def test_a_server_without_our_plugin_is_asked_for_no_grammar(kind: type[Fake], tmp_path: Path) -> None:
    async def main() -> None:
        async with attached(kind(), tmp_path) as (engine, _):
            assert not engine.capabilities.honours_seed
            assert (await rejection(engine, ask(grammar=GRAMMARS[0]))).param == Feature.GRAMMARS

    asyncio.run(main())
