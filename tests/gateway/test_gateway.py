from __future__ import annotations

import asyncio

import pytest
from tests.facts import Facts
from tests.gateway.offered import DEFAULTS, KEY, ScriptedGenerator, make_gateway

from midflight.errors import ContextExceeded, EngineUnavailable, RequestRejected, SessionClosed, Unauthorized, UnknownModel
from midflight.gateway.answers.answer import Answer, Event, News
from midflight.gateway.answers.readers import Ongoing
from midflight.gateway.sessions.session import Asked, CompletionCall, Messages, Text, TokenIds, request_seed
from midflight.testing.virtual_time import run_virtual
from midflight.types import FinishReason, Reason, SamplingParams, Turn
from midflight.types.facts import SessionEnded, TurnFinished, TurnKept

CHAT = Messages(({"role": "user", "content": "hi"},))


def test_an_answer_is_recorded_and_reported_once() -> None:
    async def main() -> None:
        generator, seen = ScriptedGenerator(texts=["yo<|end|>"]), Facts()
        gateway = make_gateway(generator, seen.apply, run_name="demo", run_seed=17)
        handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
        session = gateway.session_for(path_token=handle.api_key, api_key=None)
        (answer,) = await gateway.answers(gateway.prepare(session, CompletionCall((CHAT,))))
        assert (answer.text, answer.turn.output_ids) == ("yo", (121, 111, 256))
        (request,) = generator.requests
        assert request.sampling.seed == request_seed("demo", 17, KEY, occurrence=0, prompt_ids=request.input_ids)
        assert gateway.oldest_version(handle.session_id) == 0
        (row,) = gateway.close(handle.session_id).rows
        assert row.num_trainable == 3
        (turn,) = seen.of(TurnFinished)
        assert (turn.num_prompt_tokens, turn.num_output_tokens, turn.num_versions) == (5, 3, 2)
        assert turn.seconds == pytest.approx(0.03)
        assert generator.forgotten == [handle.session_id]

    run_virtual(main())


def test_i8_each_completed_turn_of_a_tracked_session_is_told_with_its_number() -> None:
    async def main() -> None:
        gateway = make_gateway(ScriptedGenerator(texts=["yo<|end|>", "ja<|end|>", "no<|end|>"]))
        told: list[TurnKept] = []
        gateway.on_turn = told.append
        turns: list[Turn] = []
        for tracked in (True, False):
            handle = gateway.open(KEY, sampling=DEFAULTS, tracked=tracked)
            session = gateway.session_for(path_token=handle.api_key, api_key=None)
            for source in (Text("a"), Text("b")) if tracked else (Text("c"),):
                (answer,) = await gateway.answers(gateway.prepare(session, CompletionCall((source,))))
                turns.append(answer.turn)
            gateway.close(handle.session_id)
        assert told == [TurnKept(KEY, 0, turns[0]), TurnKept(KEY, 1, turns[1])]

    run_virtual(main())


def test_i8_a_turn_that_never_ended_is_not_told() -> None:
    async def main() -> None:
        gateway = make_gateway(ScriptedGenerator())
        told: list[TurnKept] = []
        gateway.on_turn = told.append
        handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
        session = gateway.session_for(path_token=handle.api_key, api_key=None)
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(gateway.answers(gateway.prepare(session, CompletionCall((CHAT,)))))
            await asyncio.sleep(0.015)
            call.cancel()
        assert not told and gateway.close(handle.session_id).dropped[Reason.ABANDONED] > 0

    run_virtual(main())


def test_choices_run_together_and_each_has_its_own_seed() -> None:
    async def main() -> None:
        generator, seen = ScriptedGenerator(), Facts()
        gateway = make_gateway(generator, seen.apply)
        handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
        session = gateway.session_for(path_token=None, api_key=handle.api_key)
        started = asyncio.get_running_loop().time()
        answers = await gateway.answers(gateway.prepare(session, CompletionCall((Text("a"), Text("b")), n=2)))
        assert asyncio.get_running_loop().time() - started <= 0.09, "eight tokens each, at once"
        assert [a.index for a in answers] == [0, 1, 2, 3]
        assert len({r.sampling.seed for r in generator.requests}) == 4
        assert len({r.request_id for r in generator.requests}) == 4
        assert answers[0].prompt is answers[1].prompt is not answers[2].prompt

    run_virtual(main())


def test_a_closed_session_is_told_once_with_what_its_tree_counted() -> None:
    """The second chat repeats the first, as a second sample does: a branch."""

    async def main() -> None:
        seen = Facts()
        gateway = make_gateway(ScriptedGenerator(), seen.apply)
        handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
        session = gateway.session_for(path_token=None, api_key=handle.api_key)
        for _ in range(2):
            await gateway.answers(gateway.prepare(session, CompletionCall((CHAT,))))
        gateway.close(handle.session_id)
        gateway.close(handle.session_id)
        assert seen.of(SessionEnded) == [SessionEnded(num_turns=2, num_branches=1, num_rewritten=0, num_mismatches=0)]

    run_virtual(main())


@pytest.mark.parametrize(("count_all", "rows", "dropped"), [(False, 1, {Reason.UNCHOSEN: 4}), (True, 2, {})])
def test_a_session_may_train_on_the_choices_that_its_agent_left_behind(count_all: bool, rows: int, dropped: dict[Reason, int]) -> None:
    async def main() -> None:
        generator = ScriptedGenerator(texts=["ab<|end|>", "cde<|end|>", "f<|end|>"])
        gateway = make_gateway(generator)
        handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True, count_all_choices=count_all)
        session = gateway.session_for(path_token=None, api_key=handle.api_key)
        chosen, _ = await gateway.answers(gateway.prepare(session, CompletionCall((CHAT,), n=2)))
        more = (*CHAT.messages, {"role": "assistant", "content": chosen.text}, {"role": "user", "content": "go on"})
        await gateway.answers(gateway.prepare(session, CompletionCall((Messages(more),))))
        record = gateway.close(handle.session_id)
        assert (chosen.text, len(record.rows), record.dropped) == ("ab", rows, dropped)

    run_virtual(main())


def test_deltas_and_tail_join_to_the_text() -> None:
    async def main() -> None:
        generator = ScriptedGenerator(texts=["ab東<|end|>"])
        gateway = make_gateway(generator)
        session = gateway.session_for(path_token=None, api_key="sk-any")
        events: list[Event] = []
        ongoing = Ongoing(gateway.prepare(session, CompletionCall((CHAT,), stream=True)))
        reader = ongoing.join()
        gateway.requests.begin(ongoing, None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(gateway.run(ongoing))
            while not ongoing.ended:
                await reader.news()
                events += reader.take()
        deltas = [e for e in events if isinstance(e, News)]
        (answer,) = [e for e in events if isinstance(e, Answer)]
        assert [d.text for d in deltas] == ["a", "b", "", "", "東", ""]
        assert answer.text == "ab東" and events[-1] is answer

    run_virtual(main())


def test_closing_a_session_ends_what_runs_in_it() -> None:
    """I3: the tokens received so far are dropped(abandoned); nothing goes on in the background."""

    async def main() -> None:
        generator, seen = ScriptedGenerator(), Facts()
        gateway = make_gateway(generator, seen.apply)
        handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
        session = gateway.session_for(path_token=handle.api_key, api_key=None)
        job = gateway.prepare(session, CompletionCall((CHAT,), n=2))
        late = gateway.prepare(session, CompletionCall((CHAT,)))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_outcome(gateway.answers(job)))
            await asyncio.sleep(0.035)
            assert gateway.num_running == 2
            record = gateway.close(handle.session_id)
        assert record.dropped == {Reason.ABANDONED: 6}
        assert isinstance(running.result(), SessionClosed)
        assert (gateway.num_running, generator.running) == (0, 0)
        with pytest.raises(SessionClosed):
            await gateway.answers(late)

    run_virtual(main())


async def _outcome(work: object) -> object:
    try:
        return await work  # type: ignore[misc]
    except Exception as error:
        return error


def test_a_cancelled_caller_leaves_nothing_running() -> None:
    async def main() -> None:
        generator = ScriptedGenerator()
        gateway = make_gateway(generator)
        handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
        session = gateway.session_for(path_token=handle.api_key, api_key=None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.025):
                await gateway.answers(gateway.prepare(session, CompletionCall((CHAT,))))
        assert (gateway.num_running, generator.running) == (0, 0)
        assert gateway.close(handle.session_id).dropped == {Reason.ABANDONED: 2}

    run_virtual(main())


def test_one_failing_choice_fails_the_call_with_its_own_error() -> None:
    async def main() -> None:
        generator = ScriptedGenerator(error=EngineUnavailable("gone"), error_after=2)
        gateway = make_gateway(generator)
        session = gateway.session_for(path_token=None, api_key=None)
        with pytest.raises(EngineUnavailable, match="gone"):
            await gateway.answers(gateway.prepare(session, CompletionCall((CHAT,), n=3)))
        assert generator.running == 0

    run_virtual(main())


@pytest.mark.parametrize(
    ("asked", "sampled"),
    [
        (Asked(), True),
        (Asked(temperature=1.0, stop=("x",), seed=3, ignore_eos=True, max_tokens=4), True),
        (Asked(temperature=0.7), False),
        (Asked(temperature=0.0), False),
        (Asked(top_p=0.9), False),
        (Asked(top_k=5), False),
        (Asked(min_p=0.1), False),
        (Asked(min_tokens=2), False),
    ],
)
def test_turns_count_as_the_policys_only_at_the_sessions_own_sampling(asked: Asked, sampled: bool) -> None:
    async def main() -> None:
        gateway = make_gateway(ScriptedGenerator(texts=["abc"]))
        handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
        session = gateway.session_for(path_token=handle.api_key, api_key=None)
        (answer,) = await gateway.answers(gateway.prepare(session, CompletionCall((CHAT,), asked=asked)))
        record = gateway.close(handle.session_id)
        assert answer.turn.policy_sampled is sampled
        assert record.masked == ({} if sampled else {Reason.NOT_POLICY_SAMPLED: 3})
        assert len(record.rows) == sampled

    run_virtual(main())


def test_overshoot_reported_by_the_generator_gets_its_reason() -> None:
    """I3."""

    async def main() -> None:
        gateway = make_gateway(ScriptedGenerator(texts=["abc"], num_overshoot=2))
        handle = gateway.open(KEY, sampling=DEFAULTS, tracked=True)
        session = gateway.session_for(path_token=handle.api_key, api_key=None)
        await gateway.answers(gateway.prepare(session, CompletionCall((CHAT,))))
        assert gateway.close(handle.session_id).dropped == {Reason.OVERSHOOT: 2}

    run_virtual(main())


def test_budgets_come_from_client_session_or_dialect_and_fit_the_context() -> None:
    gateway = make_gateway(ScriptedGenerator())
    anonymous = gateway.session_for(path_token=None, api_key=None)
    own = gateway.session_for(path_token=gateway.open(KEY, sampling=SamplingParams(max_tokens=1000), tracked=True).api_key, api_key=None)

    def budget(session: object, **call: object) -> int:
        return gateway.prepare(session, CompletionCall((TokenIds((1, 2)),), **call)).answers[0].request.sampling.max_tokens  # type: ignore[arg-type]

    assert budget(anonymous) == 254
    assert budget(anonymous, default_max_tokens=16) == 16
    assert budget(own, default_max_tokens=16) == 254, "the session's default shrinks to the room"
    assert budget(own, asked=Asked(max_tokens=254)) == 254
    assert budget(own, asked=Asked(max_tokens=255)) == 254, "so does what the client asks for"
    with pytest.raises(ContextExceeded, match="maximum context length is 256 tokens"):
        gateway.prepare(own, CompletionCall((TokenIds((1,) * 256),)))
    assert gateway.prepare(own, CompletionCall((TokenIds((1,) * 255),))).answers[0].request.sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (CompletionCall((TokenIds((1, 262)),)), RequestRejected, "token id 262: send ids from 0 to 261"),
        (CompletionCall((TokenIds((-1,)),)), RequestRejected, "token id -1"),
        (CompletionCall((TokenIds(()),)), RequestRejected, "empty"),
        (CompletionCall((Text("x"),), asked=Asked(stop_token_ids=(999,))), RequestRejected, "stop_token_ids holds 999"),
        (CompletionCall((Text("x"),), asked=Asked(min_tokens=5, max_tokens=4)), RequestRejected, "min_tokens is 5"),
        (CompletionCall((Text("x"),) * 2, n=513), RequestRejected, "1 to 1024 choices"),
        (CompletionCall((Text("x"),), model="polisy"), UnknownModel, "Did you mean 'policy'"),
        (CompletionCall((Messages(({"role": "oracle", "content": "x"},)),)), RequestRejected, "unknown role"),
    ],
)
def test_a_faulty_call_is_refused_before_anything_runs(call: CompletionCall, error: type[Exception], words: str) -> None:
    generator = ScriptedGenerator()
    gateway = make_gateway(generator)
    with pytest.raises(error, match=words):
        gateway.prepare(gateway.session_for(path_token=None, api_key=None), call)
    assert generator.requests == []


def test_i8_recorded_turns_are_given_again_and_only_what_is_missing_is_generated() -> None:
    async def main() -> None:
        first = make_gateway(ScriptedGenerator(texts=["yo<|end|>", "ja<|end|>"]))
        handle = first.open(KEY, sampling=DEFAULTS, tracked=True)
        session = first.session_for(path_token=handle.api_key, api_key=None)
        turns = [(await first.answers(first.prepare(session, CompletionCall((Text(t),)))))[0].turn for t in ("a", "b")]

        generator = ScriptedGenerator(texts=["no<|end|>", "at last<|end|>"])
        second = make_gateway(generator)
        second.replay(KEY, turns)
        handle = second.open(KEY, sampling=DEFAULTS, tracked=True)
        session = second.session_for(path_token=handle.api_key, api_key=None)
        again = [(await second.answers(second.prepare(session, CompletionCall((Text(t),)))))[0] for t in ("a", "b", "c", "a")]
        assert [answer.turn for answer in again[:2]] == turns, "ids, log-probabilities, versions and finish, as they were"
        assert [answer.text for answer in again] == ["yo", "ja", "no", "at last"], "a recorded turn is given once"
        assert len(generator.requests) == 2
        record = second.close(handle.session_id)
        assert sum(row.num_trainable for row in record.rows) == sum(len(answer.turn.output_ids) for answer in again)

        handle = second.open(KEY, sampling=DEFAULTS, tracked=True)
        session = second.session_for(path_token=handle.api_key, api_key=None)
        generator.texts.append("new<|end|>")
        (answer,) = await second.answers(second.prepare(session, CompletionCall((Text("a"),))))
        assert answer.text == "new", "a retry of the rollout starts afresh"

    run_virtual(main())


def test_i8_i3_an_agent_that_begins_again_gets_its_turns_again_and_no_token_counts_twice() -> None:
    async def main() -> None:
        seen = Facts()
        generator = ScriptedGenerator(texts=["yo<|end|>", "ja<|end|>", "lost<|end|>"])
        gateway = make_gateway(generator, record=seen.apply)
        first = gateway.open(KEY, sampling=DEFAULTS, tracked=True)

        async def ask(key: str, text: str) -> Answer:
            session = gateway.session_for(path_token=key, api_key=None)
            return (await gateway.answers(gateway.prepare(session, CompletionCall((Text(text),)))))[0]

        assert not gateway.awaits(first.session_id)
        before = [await ask(first.api_key, text) for text in ("a", "b", "not asked again")]
        assert not gateway.awaits(first.session_id)
        second = gateway.reopen(first.session_id)
        assert second.session_id == first.session_id
        with pytest.raises(Unauthorized):
            gateway.session_for(path_token=first.api_key, api_key=None)
        again = [await ask(second.api_key, text) for text in ("a", "b")]
        assert [answer.turn for answer in again] == [answer.turn for answer in before[:2]] and len(generator.requests) == 3
        record = gateway.close(first.session_id)
        assert sum(row.num_trainable for row in record.rows) == sum(len(answer.turn.output_ids) for answer in again)
        assert record.dropped == {Reason.ABANDONED: len(before[2].turn.output_ids)}
        assert len(seen.of(TurnFinished)) == 3

    run_virtual(main())


def test_i8_a_recorded_turn_longer_than_is_asked_now_is_generated_anew() -> None:
    async def main() -> None:
        first = make_gateway(ScriptedGenerator(texts=["long<|end|>"]))
        handle = first.open(KEY, sampling=DEFAULTS, tracked=True)
        session = first.session_for(path_token=handle.api_key, api_key=None)
        (answer,) = await first.answers(first.prepare(session, CompletionCall((Text("a"),))))

        second = make_gateway(ScriptedGenerator(texts=["long<|end|>"]))
        second.replay(KEY, [answer.turn])
        handle = second.open(KEY, sampling=DEFAULTS, tracked=True)
        session = second.session_for(path_token=handle.api_key, api_key=None)
        (short,) = await second.answers(second.prepare(session, CompletionCall((Text("a"),), asked=Asked(max_tokens=2))))
        assert len(short.turn.output_ids) == 2 and short.turn.finish.reason is FinishReason.LENGTH

    run_virtual(main())
