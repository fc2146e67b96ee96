"""I5: the same tokens whatever the batch, the interruptions and the pauses."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.models import ask, make_engine, tiny_model

from midflight.engines.embedded.scheduler import Scheduler
from midflight.engines.embedded.table import Submission
from midflight.errors import EngineError
from midflight.types import Finish, FinishReason, GenerateRequest, PauseMode

PROMPTS = ("same", "same", "same", "other", "a longer prompt than the rest", "x")
REQUESTS = [ask(p, request_id=f"{i}", seed=i, max_tokens=12, top_p=0.95 if i % 2 else 1.0) for i, p in enumerate(PROMPTS)]


def drive(scheduler: Scheduler, requests: list[GenerateRequest], plan: list[tuple[int, PauseMode | None]]) -> dict[int, tuple[int, ...]]:
    """Runs the requests through aborts (each resumed by its tokens) and pauses, in the order of the plan; returns all tokens by request."""
    tokens: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    handles: dict[int, int] = {}
    count = iter(range(1, 10_000))

    def submit(i: int) -> None:
        request = replace(requests[i], input_ids=(*requests[i].input_ids, *tokens[i]))
        handles[handle := next(count)] = i
        scheduler.submit(Submission(handle, 0, request, (), None))

    def absorb() -> None:
        step = scheduler.step()
        for handle, token in zip(step.handles.tolist(), step.token_ids.tolist(), strict=True):
            tokens[handles[handle]].append(token)
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
    return {i: tuple(t) for i, t in tokens.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_i5_any_schedule_of_aborts_and_pauses_gives_the_tokens_of_undisturbed_runs_alone(dtype: str) -> None:
    """I5: also no gap, no duplicate, and exactly the budget."""

    alone = {i: make_engine(tiny_model(dtype=dtype)).generate_all([r])[0].token_ids for i, r in enumerate(REQUESTS)}
    model = tiny_model(dtype=dtype)

    @settings(max_examples=15, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(0, 5), st.sampled_from([None, None, PauseMode.KEEP, PauseMode.RECOMPUTE, PauseMode.ABORT])), max_size=12
        ),
        st.sampled_from([2, 4, 6]),
        st.sampled_from([8, 64]),
    )
    def check(plan: list[tuple[int, PauseMode | None]], max_running: int, max_batch_tokens: int) -> None:
        engine = make_engine(model, max_running=max_running, max_batch_tokens=max_batch_tokens)
        assert drive(engine._scheduler, REQUESTS, plan) == alone

    check()


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
