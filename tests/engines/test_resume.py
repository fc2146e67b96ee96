"""I5: the same tokens whatever the batch, the interruptions and the pauses."""

import asyncio
from dataclasses import replace
from itertools import zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.models import TOKENIZER, ask, make_engine
from tests.engines.reading import ids
from tests.models.tiny import tiny_model

from midflight.engines.embedded.grammar import Grammars
from midflight.engines.embedded.scheduler import Scheduler
from midflight.engines.embedded.table import Submission
from midflight.errors import EngineError
from midflight.text.byte_tokenizer import END
from midflight.types import Chunk, Finish, FinishReason, GenerateRequest, Grammar, GrammarKind, PauseMode

PROMPTS = ("same", "same", "same", "other", "a longer prompt than the rest", "x")
REQUESTS = [ask(p, request_id=f"{i}", seed=i, max_tokens=12, top_p=0.95 if i % 2 else 1.0) for i, p in enumerate(PROMPTS)]


GRAMMARS = Grammars(TOKENIZER, vocab_size=262)


def submission(handle: int, request: GenerateRequest) -> Submission:
    """As the engine makes it, for requests without stop strings."""
    sampling = request.sampling
    output = request.input_ids[request.num_prompt_tokens :]
    constraint = GRAMMARS.constraint(sampling.grammar, output) if sampling.grammar else None
    return Submission(handle, 0, request, () if sampling.ignore_eos else (END,), None, constraint)


def drive(scheduler: Scheduler, requests: list[GenerateRequest], plan: list[tuple[int, PauseMode | None]]) -> dict[int, tuple[int, ...]]:
    """Runs the requests through aborts (each resumed by its tokens) and pauses, in the order of the plan; returns all tokens by request."""
    return {i: ids(chunks) for i, chunks in drive_chunks(scheduler, requests, plan).items()}


def drive_chunks(scheduler: Scheduler, requests: list[GenerateRequest], plan: list[tuple[int, PauseMode | None]]) -> dict[int, list[Chunk]]:
    taken: dict[int, list[Chunk]] = {i: [] for i in range(len(requests))}
    handles: dict[int, int] = {}
    count = iter(range(1, 10_000))

    def submit(i: int) -> None:
        request = replace(requests[i], input_ids=(*requests[i].input_ids, *ids(taken[i])))
        handles[handle := next(count)] = i
        scheduler.submit(submission(handle, request))

    def absorb() -> None:
        step = scheduler.step()
        assert not step.failures
        for (handle, token, logprob, kv), top in zip_longest(step.rows(), step.tops()):
            taken[handles[handle]].append(Chunk((token,), (logprob,), step.version, kv, top_logprobs=(top,) if top else ()))
        for handle, _, finish in step.finishes:
            i = handles.pop(handle)
            if finish.reason is FinishReason.ABORT:
                submit(i)

    for i in range(len(requests)):
        submit(i)
    for victim, mode in plan:
        absorb()
        if mode is not None:
            scheduler.pause(mode)
            if scheduler.has_work():
                absorb()
            scheduler.resume()
        else:
            scheduler.abort(frozenset(h for h, i in handles.items() if i == victim))
    while scheduler.has_work():
        absorb()
    return taken


PLANS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([None, None, PauseMode.KEEP, PauseMode.RECOMPUTE, PauseMode.ABORT])), max_size=12
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_i5_any_schedule_of_aborts_and_pauses_gives_the_tokens_of_undisturbed_runs_alone(dtype: str) -> None:
    """I5: also no gap, no duplicate, and exactly the budget."""

    alone = {i: make_engine(tiny_model(dtype=dtype)).generate_all([r])[0].token_ids for i, r in enumerate(REQUESTS)}
    model = tiny_model(dtype=dtype)

    @settings(max_examples=15, deadline=None)
    @given(PLANS, st.sampled_from([2, 4, 6]), st.sampled_from([8, 64]), st.sampled_from([0, 3]))
    def check(plan: list[tuple[int, PauseMode | None]], max_running: int, max_batch_tokens: int, guesses: int) -> None:
        engine = make_engine(model, max_running=max_running, max_batch_tokens=max_batch_tokens, guesses=guesses)
        assert drive(engine._scheduler, REQUESTS, plan) == alone

    check()


def test_i5_penalties_biases_grammars_and_alternatives_survive_any_schedule() -> None:
    """I5: in float64, so that the alternatives too are those of the undisturbed run."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 9}')
    word = Grammar(GrammarKind.REGEX, "[a-f]{3,12}")
    likely = tuple((i, 4.0) for i in b"abcdefg 123")
    asked = [
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": likely},
        {"repetition_penalty": 1.7, "logit_bias": likely, "top_logprobs": 5},
        {"grammar": grammar, "top_logprobs": 3, "ignore_eos": False},
        {"grammar": word, "presence_penalty": 2.0, "min_tokens": 8},
        {"top_logprobs": 20, "top_p": 0.7},
        {},
    ]
    requests = [ask("the same prompt", request_id=f"{i}", seed=i, **{"max_tokens": 14, **a}) for i, a in enumerate(asked)]  # type: ignore[arg-type]
    model = tiny_model(dtype="float64")
    alone = [make_engine(model).generate_all([r])[0] for r in requests]
    assert len({g.token_ids for g in alone}) == 6 and alone[3].finish == Finish(FinishReason.STOP, END)

    @settings(max_examples=15, deadline=None)
    @given(PLANS, st.sampled_from([2, 6]), st.sampled_from([0, 3]))
    def check(plan: list[tuple[int, PauseMode | None]], max_running: int, guesses: int) -> None:
        found = drive_chunks(make_engine(model, max_running=max_running, guesses=guesses)._scheduler, requests, plan)
        for i, generation in enumerate(alone):
            assert ids(found[i]) == generation.token_ids
            top = [t for c in found[i] for t in c.top_logprobs]
            assert [[a for a, _ in t] for t in top] == [[a for a, _ in t] for t in generation.top_logprobs]
            assert [p for t in top for _, p in t] == pytest.approx([p for t in generation.top_logprobs for _, p in t], abs=1e-9)

    check()


def test_i5_an_answer_whose_grammar_has_ended_is_over_also_after_a_resume() -> None:
    request = ask(max_tokens=20, grammar=Grammar(GrammarKind.REGEX, "ab"))
    whole = make_engine().generate_all([request])[0]
    assert whole.token_ids == (*b"ab", END)
    again = make_engine().generate_all([replace(request, input_ids=(*request.input_ids, *whole.token_ids))])[0]
    assert again.token_ids == () and again.finish == whole.finish == Finish(FinishReason.STOP, END)


def test_i5_a_stop_string_is_found_over_the_seam_of_a_resume() -> None:
    request = ask(seed=11, max_tokens=40)
    whole = make_engine().generate_all([request])[0].token_ids
    text = bytes(t for t in whole if t < 128)
    # Two neighbouring ASCII letters of the answer make a stop string with a seam inside it.
    at = next(i for i in range(3, 38) if all(32 < t < 127 for t in whole[i : i + 2]) and text.count(bytes(whole[i : i + 2])) == 1)
    stop = bytes(whole[at : at + 2]).decode()
    stopping = ask(seed=11, max_tokens=40, stop=(stop,))
    for cut in (0, at, at + 1):
        resumed = replace(stopping, input_ids=(*request.input_ids, *whole[:cut]))
        rest = make_engine().generate_all([resumed])[0]
        assert rest.token_ids == whole[cut : at + 2] and rest.finish == Finish(FinishReason.STOP, stop)
    done = make_engine().generate_all([replace(stopping, input_ids=(*request.input_ids, *whole[: at + 2]))])[0]
    assert done.token_ids == () and done.finish == Finish(FinishReason.STOP, stop)


def test_stop_ids_end_the_answer_but_not_before_min_tokens() -> None:
    whole = make_engine().generate_all([ask(seed=2, max_tokens=20)])[0].token_ids
    stop = whole[4]
    first = whole.index(stop)
    ended = make_engine().generate_all([ask(seed=2, max_tokens=20, stop_token_ids=(7, 8, stop))])[0]
    assert ended.token_ids == whole[: first + 1] and ended.finish == Finish(FinishReason.STOP, stop)
    longer = make_engine().generate_all([ask(seed=2, max_tokens=20, min_tokens=10, stop_token_ids=(stop,))])[0]
    assert stop not in longer.token_ids[:10] and len(longer.token_ids) >= 10
    assert longer.token_ids[:first] == whole[:first]


def test_the_context_ends_an_answer_with_length() -> None:
    generation = make_engine().generate_all([ask("x" * 60, max_tokens=50)])[0]
    assert len(generation.token_ids) == 4 and generation.finish == Finish(FinishReason.LENGTH)


def test_identical_prompts_are_prefilled_once() -> None:
    engine = make_engine()
    fed: list[int] = []
    forward = engine._scheduler._runner.forward
    engine._scheduler._runner.forward = lambda batch: (fed.append(int(batch.counts.sum())), forward(batch))[1]  # type: ignore[method-assign]
    same = [ask("one and the same", request_id=f"{i}", seed=i, max_tokens=4) for i in range(8)]
    generations = engine.generate_all(same)
    assert fed[0] == 16 and sum(fed) == 16 + 7 + 8 * 3
    assert [g.token_ids for g in generations] == [make_engine().generate_all([r])[0].token_ids for r in same]


def test_generating_inline_is_refused_while_the_loop_runs() -> None:
    async def main() -> None:
        engine = make_engine()
        task = asyncio.ensure_future(engine.run())
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="inline"):
            engine.generate_all([ask()])
        task.cancel()

    asyncio.run(main())
