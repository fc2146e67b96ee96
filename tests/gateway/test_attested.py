"""Engines that say only at the end which version made which token: what they said before is provisional (I6)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from tests.gateway.generating import Heard, generated
from tests.gateway.test_resume import ENDLESS, TOKENIZER, assert_uninterrupted, gateway, request
from tests.gateway.test_session import new_session

from midflight.errors import EngineUnavailable
from midflight.gateway.sessions.session import Session
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import Chunk, Finish, FinishReason, GenerateRequest, Segment, Turn

ABORT, LENGTH = Finish(FinishReason.ABORT), Finish(FinishReason.LENGTH)
Labels = list[tuple[int, int]]


def segments(labels: Labels) -> tuple[Segment, ...]:
    """Runs of equal (version, kv_version), one label per token."""
    ends = itertools.accumulate(len(list(run)) for _, run in itertools.groupby(labels))
    spans = itertools.pairwise((0, *ends))
    return tuple(Segment(*label, *span) for (label, _), span in zip(itertools.groupby(labels), spans, strict=True))


class TellsAtTheEnd:
    """Mangles an engine's chunks: version 5 is said of all tokens, and `truths`, one for each attempt, at the end."""

    def __init__(self, *truths: Labels) -> None:
        self._truths = iter(truths)
        self._num = 0

    def __call__(self, chunk: Chunk) -> Iterable[Chunk]:
        self._num += len(chunk.token_ids)
        said = chunk.changed(version=5, kv_version=5)
        if chunk.finish is None:
            return [said]
        num, self._num = self._num, 0
        return [said.changed(attested=segments(next(self._truths)[:num]))]


def begun(session: Session, asked: GenerateRequest) -> Heard:
    answer = Heard(asked)
    session.begin(answer)
    return answer


def turn_of(engine: ScriptedEngine, asked: GenerateRequest) -> tuple[Turn, list[int | None]]:
    """The turn that a request makes, and the session's oldest version after each chunk."""
    session = new_session()
    answer, oldest = begun(session, asked), list[int | None]()

    async def main() -> None:
        await gateway(engine).generate(answer, affinity="s", told=lambda: oldest.append(session.oldest_version))
        oldest.append(session.oldest_version)
        assert_uninterrupted(answer.whole(), engine, asked)

    run_virtual(main())
    return answer.close(), oldest


def test_what_is_attested_takes_the_place_of_what_was_said_before() -> None:
    engine = ScriptedEngine(script=ENDLESS, chunk_tokens=3)
    engine.mangle = TellsAtTheEnd([(3, 3)] * 4 + [(4, 3)] * 6)
    turn, oldest = turn_of(engine, request(10))
    assert turn.segments == (Segment(3, 3, 0, 4), Segment(4, 3, 4, 10))
    assert oldest == [5, 5, 5, 3]


@pytest.mark.parametrize("chunk_tokens", [1, 4])
def test_each_attempt_has_its_own_account(chunk_tokens: int) -> None:
    """The first attempt ends with an abort after 7 tokens, which are of 3 and 4; the second makes 13, of 4 and 6."""
    engine = ScriptedEngine(script=ENDLESS, chunk_tokens=chunk_tokens)
    engine.interrupt(7)
    engine.mangle = TellsAtTheEnd([(3, 3)] * 2 + [(4, 4)] * 5, [(4, 4)] * 3 + [(6, 4)] * 10)
    turn, oldest = turn_of(engine, request(20))
    assert turn.segments == (Segment(3, 3, 0, 2), Segment(4, 4, 2, 10), Segment(6, 4, 10, 20))
    assert oldest[0] == 5 and oldest[-1] == 3


def test_an_attempt_without_an_account_keeps_the_labels_it_had() -> None:
    """As where an engine dies: nobody is left who knows better."""
    engine = ScriptedEngine(script=ENDLESS)
    engine.interrupt(4)
    late = TellsAtTheEnd([], [(6, 6)] * 6)
    engine.mangle = late
    turn, _ = turn_of(engine, request(10))
    assert turn.segments == (Segment(5, 5, 0, 4), Segment(6, 6, 4, 10))


def test_an_abort_that_ends_the_answer_is_attested_too() -> None:
    """No budget is left, so the abort's chunk is the last."""
    engine = ScriptedEngine(script=ENDLESS)
    late = TellsAtTheEnd([(3, 3)] * 5)
    engine.mangle = lambda c: late(c.changed(finish=ABORT)) if c.finish else late(c)
    turn, _ = turn_of(engine, request(5))
    assert turn.segments == (Segment(3, 3, 0, 5),) and turn.finish == LENGTH


def test_a_stop_string_cuts_the_account_with_the_tokens() -> None:
    engine = ScriptedEngine(script=ENDLESS, chunk_tokens=6, capabilities=replace(CAPABLE, stops_on_strings=False))
    text = TOKENIZER.decode(engine.answer(request(12)))
    at = next(i for i in range(7, 9) if text.index(text[i : i + 2]) == i)
    asked = request(12, stop=(text[at : at + 2],))
    engine.mangle = TellsAtTheEnd([(3, 3)] * 8 + [(4, 4)] * 4)
    turn, _ = turn_of(engine, asked)
    assert turn.segments == tuple(s for s in (Segment(3, 3, 0, 8), Segment(4, 4, 8, at + 2)) if s.end > s.start)
    assert len(turn.output_ids) == at + 2 < 12


def test_the_oldest_version_of_a_session_follows_the_account_both_ways() -> None:
    session = new_session()
    first, second = begun(session, request()), begun(session, request())
    first.accept(Chunk((1, 2), (-1.0, -1.0), 3, 3), vocab_size=262)
    second.accept(Chunk((1,), (-1.0,), 7, 7), vocab_size=262)
    assert session.oldest_version == 3
    first.accept(Chunk((), (), 3, 3, LENGTH, attested=(Segment(8, 8, 0, 2),)), vocab_size=262)
    assert session.oldest_version == 7
    session.abandoned(second)
    session.abandoned(first)
    assert session.oldest_version == 7


NONSENSE: dict[str, Callable[[int], tuple[Segment, ...]]] = {
    "not from the first token": lambda num: (Segment(0, 0, 1, num),),
    "a gap": lambda num: (Segment(0, 0, 0, 2), Segment(1, 1, 3, num)),
    "an empty segment": lambda num: (Segment(0, 0, 0, num), Segment(1, 1, num, num)),
    "too few tokens": lambda num: (Segment(0, 0, 0, num - 1),),
    "too many tokens": lambda num: (Segment(0, 0, 0, num + 1),),
    "versions going back": lambda num: (Segment(2, 1, 0, 2), Segment(1, 1, 2, num)),
    "keys newer than weights": lambda num: (Segment(0, 1, 0, num),),
    "a negative version": lambda num: (Segment(-1, -1, 0, num),),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_an_account_that_makes_no_sense_quarantines_its_engine(what: str) -> None:
    mad, sane = ScriptedEngine("mad", script=ENDLESS, chunk_tokens=3), ScriptedEngine("sane", script=ENDLESS)
    mad.mangle = lambda c: [c.changed(attested=NONSENSE[what](20))] if c.finish else [c]
    assert_refused(mad, sane)


def test_an_account_before_the_end_is_nonsense() -> None:
    mad, sane = ScriptedEngine("mad", script=ENDLESS, chunk_tokens=3), ScriptedEngine("sane", script=ENDLESS)
    mad.mangle = lambda c: [c.changed(attested=(Segment(0, 0, 0, 3),))]
    assert_refused(mad, sane)


def test_an_account_of_versions_older_than_what_the_engine_had_attested_is_refused() -> None:
    """I2: it was restarted unnoticed, and serves old weights."""
    mad, sane = ScriptedEngine("mad", script=ENDLESS, version=4), ScriptedEngine("sane", script=ENDLESS, version=4)
    mad.mangle = lambda c: [c.changed(attested=segments([(3, 3)] + [(4, 4)] * 19))] if c.finish else [c]
    assert_refused(mad, sane, version=4)


def assert_refused(mad: ScriptedEngine, sane: ScriptedEngine, *, version: int = 0) -> None:
    async def main() -> None:
        generator = gateway(mad, sane)
        for engine in (mad, sane):
            generator.fleet.served(engine.name, version)
        chunks = await generated(generator, request(), affinity="s")
        assert_uninterrupted(chunks, sane, request())
        assert len(mad.requests) == 1 and not any(c.attested for c in chunks)
        assert [type(s.error) for s in generator.fleet.states()] == [EngineUnavailable, type(None)]

    run_virtual(main())
