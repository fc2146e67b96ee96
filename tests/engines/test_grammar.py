"""Answers of a given form, for the byte vocabulary and for one with merges."""

import asyncio
import json
import random
import re

import pytest
import tokenizers
from tests.engines.models import TOKENIZER, ask, make_engine
from tests.engines.reading import collect, ids
from tests.engines.test_contract import attached, running, served
from tokenizers import decoders, models, pre_tokenizers, trainers

from midflight.engines.embedded.grammar import Grammars
from midflight.errors import RequestRejected
from midflight.text.byte_tokenizer import END, TOOL, byte_letters_to_bytes, byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.types import Finish, FinishReason, Grammar, GrammarKind

COMPACT = {"x-guidance": {"whitespace_flexible": False}}


def schema(content: dict[str, object]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(COMPACT | content))


def merging_tokenizer() -> Tokenizer:
    """A trained byte-level BPE, so that one token may span what a grammar keeps apart."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(['{"name": "red", "size": 12}', '{"name": "green", "size": 7}', "[true, false, null]"] * 5, trainer)
    backend.add_special_tokens(["<|end|>", "<|eot|>"])
    ends = {backend.token_to_id("<|end|>"), backend.token_to_id("<|eot|>")}
    return Tokenizer(backend, template=None, eos_token_ids=frozenset(ends))


def walk(tokenizer: Tokenizer, grammar: Grammar, *, seed: int) -> str:
    """A random answer that the grammar allows, drawn token by token until its end."""
    rng = random.Random(seed)
    constraint = Grammars(tokenizer, vocab_size=400).constraint(grammar, ())
    output: list[int] = []
    while not constraint.ended:
        output.append(rng.choice(constraint.allowed().nonzero()[0].tolist()))
        constraint.advance(output[-1:])
    assert output[-1] in tokenizer.eos_token_ids
    return tokenizer.decode(output[:-1])


@pytest.mark.parametrize("tokenizer", [TOKENIZER, merging_tokenizer()], ids=["bytes", "merges"])
def test_every_walk_through_a_grammar_gives_an_answer_of_its_form(tokenizer: Tokenizer) -> None:
    record = schema(
        {
            "type": "object",
            "properties": {"name": {"enum": ["red", "green"]}, "size": {"type": "integer", "minimum": 5, "maximum": 12}},
            "required": ["name", "size"],
            "additionalProperties": False,
        }
    )
    for seed in range(20):
        answer = json.loads(walk(tokenizer, record, seed=seed))
        assert set(answer) == {"name", "size"} and answer["name"] in ("red", "green") and 5 <= answer["size"] <= 12
        assert re.fullmatch(r"(ab|cd){1,4}é", walk(tokenizer, Grammar(GrammarKind.REGEX, r"(ab|cd){1,4}é"), seed=seed))
        lark = Grammar(GrammarKind.LARK, 'start: "<" %json {"enum": [1, 22]} ">"')
        assert walk(tokenizer, lark, seed=seed) in ("<1>", "<22>")


def test_ids_that_only_the_model_has_are_never_allowed_and_all_ends_are() -> None:
    tokenizer = merging_tokenizer()
    constraint = Grammars(tokenizer, vocab_size=400).constraint(Grammar(GrammarKind.REGEX, r"(?s:.)*"), ())
    allowed = set(constraint.allowed().nonzero()[0].tolist())
    assert max(allowed) < tokenizer.vocab_size and tokenizer.eos_token_ids <= allowed


def test_blanks_in_json_are_bounded() -> None:
    constraint = Grammars(TOKENIZER, vocab_size=262).constraint(Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), b"{" + b"\n" * 40)
    assert not constraint.allowed()[ord("\n")] and constraint.allowed()[ord('"')]


@pytest.mark.parametrize(
    ("content", "is_valid"),
    [
        ({"enum": ["red", "green", 7]}, lambda v: v in ("red", "green", 7)),
        ({"type": "integer", "minimum": -3, "maximum": 120}, lambda v: isinstance(v, int) and -3 <= v <= 120),
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
            lambda v: 2 <= len(v) <= 3 and set(v) <= {True, False},
        ),
        ({"type": "string", "pattern": "^[a-c]{2,4}$"}, lambda v: re.fullmatch("[a-c]{2,4}", v)),
    ],
)
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_model_that_knows_nothing_answers_in_json_and_stops(content: dict[str, object], is_valid: object, ignore_eos: bool) -> None:
    requests = [ask(request_id=f"{i}", seed=i, max_tokens=50, ignore_eos=ignore_eos, grammar=schema(content)) for i in range(6)]
    for generation in make_engine().generate_all([*requests, ask(seed=9)])[:-1]:
        assert generation.finish == Finish(FinishReason.STOP, END)
        assert is_valid(json.loads(TOKENIZER.decode(generation.token_ids[:-1])))  # type: ignore[operator]


def test_a_tool_call_may_begin_with_a_special_token() -> None:
    grammar = Grammar(GrammarKind.LARK, 'start: <|tool|> %json {"type": "integer", "minimum": 0, "maximum": 9}')
    generation = make_engine().generate_all([ask(max_tokens=20, grammar=grammar)])[0]
    assert generation.token_ids[0] == TOOL and generation.token_ids[-1] == END


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar(GrammarKind.REGEX, "(a"), "unclosed group"),
        (Grammar(GrammarKind.REGEX, "(?=a)b"), "look-around"),
        (Grammar(GrammarKind.LARK, "start: missing"), "missing"),
        (Grammar(GrammarKind.LARK, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[1"), "not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[" * 20_000), "not JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "7"), "Send a JSON object"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "colour"}'), "colour"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "minLength": 3, "maxLength": 2}'), "nsatisfiable"),
        (Grammar(GrammarKind.REGEX, "a" * 65_537), "65537 characters. Send at most 65536"),
    ],
)
def test_a_bad_grammar_is_refused_and_the_requests_that_run_go_on(grammar: Grammar, says: str) -> None:
    expected = make_engine().generate_all([ask(max_tokens=40)])[0]

    async def main() -> None:
        async with running(make_engine()) as engine, asyncio.TaskGroup() as tasks:
            other = tasks.create_task(collect(engine, ask(max_tokens=40)))
            with pytest.raises(RequestRejected, match=says) as caught:
                await collect(engine, ask(grammar=grammar))
            assert caught.value.param == "grammar" and len(str(caught.value)) < 500
            assert ids(await other) == expected.token_ids

    asyncio.run(main())


def test_tokens_so_far_that_the_grammar_forbids_are_refused() -> None:
    with pytest.raises(RequestRejected, match="grammar"):
        Grammars(TOKENIZER, vocab_size=262).constraint(Grammar(GrammarKind.REGEX, "ab"), b"b")


def test_an_answer_that_cannot_go_on_ends_with_an_error_alone() -> None:
    """A vocabulary without the bytes of é: after the a there is no token left."""
    ascii_letters = {letter: byte for letter, byte in byte_letters_to_bytes().items() if byte < 128}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ascii_letters, merges=[]))
    backend.pre_tokenizer, backend.decoder = byte_tokenizer().pre_tokenizer, byte_tokenizer().decoder
    tokenizer = Tokenizer(backend, template=None, eos_token_ids=frozenset({10}))
    expected = make_engine().generate_all([ask(max_tokens=20, seed=4)])[0]

    async def main() -> None:
        engine = make_engine()
        engine._grammars = Grammars(tokenizer, vocab_size=262)
        async with served(engine) as url, attached(url) as remote, asyncio.TaskGroup() as tasks:
            for client in (engine, remote):
                other = tasks.create_task(collect(client, ask(max_tokens=20, seed=4)))
                chunks = client.generate(ask(grammar=Grammar(GrammarKind.REGEX, "aé")))
                assert (await anext(chunks)).token_ids == (ord("a"),)
                with pytest.raises(RequestRejected, match="constraining the answer"):
                    await anext(chunks)
                assert ids(await other) == expected.token_ids
            assert (await engine.health()).num_running == 0 and not engine._live

    asyncio.run(main())


def test_a_model_without_an_end_of_text_says_so() -> None:
    endless = Tokenizer(byte_tokenizer(), template=None, eos_token_ids=frozenset())
    with pytest.raises(RequestRejected, match="names no end of text"):
        Grammars(endless, vocab_size=262).constraint(Grammar(GrammarKind.REGEX, "a"), ())


def test_a_grammar_is_compiled_once_and_its_answers_are_apart() -> None:
    grammars, grammar = Grammars(TOKENIZER, vocab_size=262), Grammar(GrammarKind.REGEX, "ab")
    first, second = grammars.constraint(grammar, ()), grammars.constraint(grammar, ())
    first.advance(b"a")
    assert [c.allowed().nonzero()[0].tolist() for c in (first, second)] == [[ord("b")], [ord("a")]]
    assert len(grammars._compiled) == 1
    for i in range(70):
        grammars.constraint(Grammar(GrammarKind.REGEX, f"a{i}"), ())
    assert len(grammars._compiled) == 64


def test_an_abort_while_the_grammar_is_compiled_ends_the_request() -> None:
    async def main() -> None:
        async with running(make_engine()) as engine, asyncio.TaskGroup() as tasks:
            await engine._one_compilation.acquire()
            waiting = [tasks.create_task(collect(engine, ask(request_id=i, grammar=Grammar(GrammarKind.REGEX, "ab")))) for i in "xy"]
            await asyncio.sleep(0)
            await engine.abort("x")
            engine._one_compilation.release()
            aborted, other = [await w for w in waiting]
            assert ids(aborted) == () and aborted[-1].finish == Finish(FinishReason.ABORT)
            assert ids(other) == (*b"ab", END) and not engine._live

    asyncio.run(main())


def test_a_client_that_leaves_while_its_grammar_is_compiled_leaves_nothing_behind() -> None:
    async def main() -> None:
        engine = make_engine()
        async with served(engine) as url:
            await engine._one_compilation.acquire()
            async with attached(url) as remote, asyncio.TaskGroup() as tasks:
                word = Grammar(GrammarKind.REGEX, "ab")
                leaving = [tasks.create_task(collect(remote, ask(request_id=i, grammar=word))) for i in "xy"]
                before = tasks.create_task(collect(remote, ask(max_tokens=20)))
                assert len(ids(await before)) == 20, "what has no grammar does not wait for what has one"
                assert sorted(engine._compiling.values()) == ["x", "y"]
                leaving[0].cancel()
                assert len(ids(await collect(remote, ask()))) == 8
                assert list(engine._compiling.values()) == ["y"]
                leaving[1].cancel()
            engine._one_compilation.release()
            assert ids(await collect(engine, ask(grammar=word))) == (*b"ab", END)
            assert not engine._compiling and not engine._live

    asyncio.run(main())
