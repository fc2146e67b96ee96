"""The scripted engine keeps the engine port, and its faults come when they are ordered."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from midflight.errors import ContextExceeded, EngineError, EngineUnavailable, NotSupported, RequestRejected, WeightsCorrupt
from midflight.testing.script import Replies, Script, likeliest, scripted_tokenizer
from midflight.testing.scripted import CAPABLE, ScriptedEngine
from midflight.testing.virtual_time import run_virtual
from midflight.types import (
    Attestation,
    Chunk,
    Feature,
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    PauseMode,
    SamplingParams,
    WeightManifest,
)

PROMPT = tuple(b"say something")
ENDLESS = Script(mean_length=None)


def request(max_tokens: int = 20, *, request_id: str = "r", **sampling: object) -> GenerateRequest:
    return GenerateRequest(request_id, PROMPT, len(PROMPT), SamplingParams(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version, f"hash-{version}", "file", "nowhere", ())


async def collect(engine: ScriptedEngine, asked: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


def ids(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(i for chunk in chunks for i in chunk.token_ids)


async def after(seconds: float, call: object) -> None:
    await asyncio.sleep(seconds)
    result = call()  # type: ignore[operator]
    if asyncio.iscoroutine(result):
        await result


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_the_answer_is_known_beforehand_whatever_the_chunks(chunk_tokens: int) -> None:
    engine = ScriptedEngine(chunk_tokens=chunk_tokens)
    for seed in range(20):
        chunks = run_virtual(collect(engine, request(seed=seed)))
        assert ids(chunks) == engine.answer(request(seed=seed))
        assert [c.finish for c in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_answers_depend_on_seed_and_on_every_token_before() -> None:
    engine = ScriptedEngine(script=ENDLESS)
    answer = engine.answer(request(seed=1))
    assert answer != engine.answer(request(seed=2))
    resumed = replace(request(seed=1), input_ids=PROMPT + answer[:5])
    assert engine.answer(resumed) == answer[5:]
    assert engine.answer(replace(resumed, input_ids=PROMPT + answer[1:6])) != answer[5:]


def test_answers_end_by_the_end_token_by_stop_ids_and_by_stop_strings_at_the_first_completion() -> None:
    engine = ScriptedEngine(script=ENDLESS)
    whole = engine.answer(request(200))
    text = scripted_tokenizer().decode(whole)
    stop = text[7:9]
    first = text.index(stop) + len(stop)
    (*_, last) = chunks = run_virtual(collect(engine, request(200, stop=(stop,))))
    assert (ids(chunks), last.finish.matched) == (whole[:first], stop)
    by_id = run_virtual(collect(engine, request(200, stop_token_ids=(whole[3],))))
    assert ids(by_id) == whole[: whole.index(whole[3]) + 1]
    ended = ScriptedEngine(script=Script(mean_length=2))
    assert ended.answer(request(50))[-1] == 256
    assert len(ended.answer(request(50, min_tokens=9))) > 9


def test_a_token_takes_its_step_also_inside_a_larger_chunk() -> None:
    async def main() -> tuple[int, float]:
        engine = ScriptedEngine(script=ENDLESS, step_seconds=0.5, chunk_tokens=8)
        async with asyncio.TaskGroup() as group:
            group.create_task(collect(engine, request(20)))
            await asyncio.sleep(1.6)
            halfway = (await engine.health()).num_tokens
        return halfway, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (3, 10.0)


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
def test_keep_and_recompute_freeze_and_go_on_under_the_new_version(mode: PauseMode) -> None:
    async def main() -> tuple[list[Chunk], int, int]:
        engine = ScriptedEngine(script=ENDLESS, chunk_tokens=5)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(engine, request(20)))
            await asyncio.sleep(0.075)
            await engine.pause(mode)
            first = (await engine.health()).num_tokens
            await asyncio.sleep(10)
            second = (await engine.health()).num_tokens
            await engine.stage(manifest(1))
            assert await engine.commit(1) == Attestation(1, "hash-1")
            await engine.resume()
        assert ids(task.result()) == engine.answer(request(20))
        return task.result(), first, second

    chunks, first, second = run_virtual(main())
    assert (first, second) == (7, 7)
    assert [(c.version, len(c.token_ids)) for c in chunks] == [(0, 5), (0, 2), (1, 5), (1, 5), (1, 3)]
    assert {c.kv_version for c in chunks[2:]} == {0 if mode is PauseMode.KEEP else 1}


def test_an_abort_pause_returns_partial_answers_and_keeps_new_requests_waiting() -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=ENDLESS)
        async with asyncio.TaskGroup() as group:
            old = group.create_task(collect(engine, request(20)))
            await asyncio.sleep(0.035)
            await engine.pause(PauseMode.ABORT)
            new = group.create_task(collect(engine, request(20)))
            await asyncio.sleep(5)
            assert old.done()
            assert not new.done()
            assert (await engine.health()).num_waiting == 1
            await engine.resume()
        assert old.result()[-1].finish.reason is FinishReason.ABORT
        assert ids(old.result()) == engine.answer(request(20))[:3]
        assert ids(new.result()) == engine.answer(request(20))

    run_virtual(main())


def test_a_drain_returns_when_all_have_finished() -> None:
    async def main() -> float:
        engine = ScriptedEngine(script=ENDLESS, step_seconds=0.1)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(engine, request(20)))
            await asyncio.sleep(0.5)
            await engine.pause(PauseMode.DRAIN)
            assert len(ids(task.result())) == 20
            return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(2.0)


def test_orders_come_true_once_each() -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=ENDLESS)
        engine.interrupt(0)
        engine.interrupt(4)
        assert [(len(c.token_ids), c.finish.reason) for c in await collect(engine, request())] == [(0, FinishReason.ABORT)]
        cut = await collect(engine, request())
        assert (len(ids(cut)), cut[-1].finish.reason) == (4, FinishReason.ABORT)
        engine.interrupt(2, "die")
        with pytest.raises(EngineUnavailable, match="dead"):
            await collect(engine, request())
        with pytest.raises(EngineUnavailable):
            await engine.health()
        engine.revive()
        engine.fail_next("stage", WeightsCorrupt("as ordered"))
        with pytest.raises(WeightsCorrupt):
            await engine.stage(manifest(1))
        await engine.stage(manifest(1))
        with pytest.raises(EngineError, match="version 1 is staged"):
            await engine.commit(2)
        engine.corrupt_next_commit()
        assert await engine.commit(1) == Attestation(1, "corrupt")
        assert await engine.commit(1) == Attestation(1, "corrupt"), "nothing else is staged"
        await engine.stage(manifest(1))
        assert await engine.commit(1) == Attestation(1, manifest(1).fingerprint), "a rejoin brings the published weights"
        engine.hang_next("commit")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await engine.commit(1)
        assert ids(await collect(engine, request())) == engine.answer(request())

    run_virtual(main())


def test_a_stalled_engine_has_work_and_makes_no_token() -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=ENDLESS)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect(engine, request()))
            await asyncio.sleep(0.055)
            engine.stall()
            readings = [await engine.health(), await asyncio.sleep(9), await engine.health()]
            assert readings[0] == readings[2]
            assert readings[0].num_running == 1
            engine.unstall()
        assert ids(task.result()) == engine.answer(request())

    run_virtual(main())


def test_a_missing_capability_is_refused_by_name() -> None:
    async def main() -> None:
        engine = ScriptedEngine(
            capabilities=replace(
                CAPABLE, pause_modes=frozenset({PauseMode.ABORT}), aborts_single_requests=False, stages_weights=False, max_context=20
            )
        )
        with pytest.raises(NotSupported, match="it can abort"):
            await engine.pause(PauseMode.KEEP)
        with pytest.raises(NotSupported, match="abort all"):
            await engine.abort("r")
        with pytest.raises(NotSupported, match="cannot stage"):
            await engine.stage(manifest(1))
        with pytest.raises(ContextExceeded):
            await collect(engine, request(20))
        with pytest.raises(RequestRejected, match="vocabulary"):
            await collect(engine, GenerateRequest("r", (999,), 1, SamplingParams()))
        unseeded = ScriptedEngine(script=ENDLESS, capabilities=replace(CAPABLE, honours_seed=False))
        assert ids(await collect(unseeded, request())) != ids(await collect(unseeded, request()))

    run_virtual(main())


def test_more_requests_than_slots_wait_their_turn_and_closing_one_frees_its_slot() -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=ENDLESS, capabilities=replace(CAPABLE, max_running=2))
        first = engine.generate(request(1000, request_id="first"))
        await anext(first)
        async with asyncio.TaskGroup() as group:
            for i in range(4):
                group.create_task(collect(engine, request(10, request_id=str(i))))
            await asyncio.sleep(0)
            await first.aclose()  # type: ignore[attr-defined]
        assert engine.max_concurrent == 2
        assert (await engine.health()).num_running == 0
        assert [r.request_id for r in engine.requests] == ["first", "0", "1", "2", "3"]

    run_virtual(main())


def test_an_abort_of_one_request_ends_that_one_only() -> None:
    async def main() -> None:
        engine = ScriptedEngine(script=ENDLESS)
        async with asyncio.TaskGroup() as group:
            one = group.create_task(collect(engine, request(10, request_id="a1")))
            other = group.create_task(collect(engine, request(10, request_id="a10")))
            await after(0.025, lambda: engine.abort("a1"))
        assert one.result()[-1].finish.reason is FinishReason.ABORT
        assert len(ids(other.result())) == 10

    run_virtual(main())


def test_alternatives_are_made_up_once_and_for_all_and_sum_to_no_more_than_one() -> None:
    # The chosen one has 1/4; of the other 3/4 the next bytes have a half, a quarter and an eighth: 3/8, 3/16, 3/32.
    found = likeliest(7, math.log(0.25), 4)
    assert [(i, pytest.approx(math.exp(p))) for i, p in found] == [(8, 3 / 8), (7, 1 / 4), (9, 3 / 16), (10, 3 / 32)]
    assert likeliest(7, 0.0, 2)[0] == (7, 0.0)
    assert [i for i, _ in likeliest(256, math.log(0.9), 3)] == [256, 1, 2]


@pytest.mark.parametrize("chunk_tokens", [1, 3])
def test_alternatives_come_with_each_token_for_those_who_ask(chunk_tokens: int) -> None:
    engine = ScriptedEngine(script=ENDLESS, chunk_tokens=chunk_tokens)
    whole = engine.whole_answer(request())
    chunks = run_virtual(collect(engine, request(top_logprobs=3)))
    expected = [likeliest(i, p, 3) for i, p in zip(whole.token_ids, whole.logprobs, strict=True)]
    assert [top for c in chunks for top in c.top_logprobs] == expected
    assert [len(c.top_logprobs) for c in chunks] == [len(c.token_ids) for c in chunks]
    assert all(c.top_logprobs == () for c in run_virtual(collect(engine, request())))


@pytest.mark.parametrize(
    ("feature", "asked"),
    [
        (Feature.PENALTIES, {"frequency_penalty": 0.5}),
        (Feature.LOGIT_BIAS, {"logit_bias": ((1, 2.0),)}),
        (Feature.GRAMMARS, {"grammar": Grammar(GrammarKind.REGEX, "a")}),
    ],
)
def test_what_a_script_cannot_obey_is_refused_unless_a_test_says_otherwise(feature: Feature, asked: dict[str, object]) -> None:
    with pytest.raises(RequestRejected, match=f"has no {feature}"):
        run_virtual(collect(ScriptedEngine(), request(**asked)))
    recording = ScriptedEngine(capabilities=replace(CAPABLE, features=frozenset(Feature)))
    assert ids(run_virtual(collect(recording, request(**asked)))) == recording.answer(request())
    assert recording.requests[-1] == request(**asked)


CALL = '<tool_call>{"name": "add"}</tool_call>'


def asking(prompt: str, max_tokens: int = 60, **sampling: object) -> GenerateRequest:
    prompt_ids = scripted_tokenizer().encode(prompt)
    return GenerateRequest("r", prompt_ids, len(prompt_ids), SamplingParams(max_tokens=max_tokens, **sampling))  # type: ignore[arg-type]


def said(engine: ScriptedEngine, asked: GenerateRequest) -> str:
    return scripted_tokenizer().decode(ids(run_virtual(collect(engine, asked))))


def test_replies_are_said_by_rule_to_their_end() -> None:
    engine = ScriptedEngine(script=Replies({"add": CALL, "<|tool|>": "It is 4.", "": "What?"}), chunk_tokens=7)
    assert said(engine, asking("<|user|>add 2 and 2<|end|><|assistant|>")) == CALL + "<|end|>"
    assert said(engine, asking(f"<|user|>add 2 and 2<|assistant|>{CALL}<|tool|>4<|assistant|>")) == "It is 4.<|end|>"
    assert said(engine, asking("hello", max_tokens=3)) == "Wha"
    assert said(ScriptedEngine(script=Replies(str.upper)), asking("loud", min_tokens=6)) == "LOUD  <|end|>"
    with pytest.raises(RequestRejected, match=r"no reply is written.*hello"):
        said(ScriptedEngine(script=Replies({"add": CALL})), asking("hello"))


def test_i5_a_reply_goes_on_where_it_was_and_a_changed_token_shows_in_its_logprobs() -> None:
    engine = ScriptedEngine(script=Replies({"add": CALL}))
    # The output repeats the key: only the prompt decides what is replied.
    request = asking("add", seed=3)
    whole = engine.whole_answer(request)
    for cut in (1, 20, len(CALL)):
        rest = engine.whole_answer(replace(request, input_ids=request.input_ids + whole.token_ids[:cut]))
        assert (rest.token_ids, rest.logprobs) == (whole.token_ids[cut:], whole.logprobs[cut:])
    changed = engine.whole_answer(replace(request, input_ids=request.input_ids + whole.token_ids[1:2]))
    assert changed.logprobs != whole.logprobs[1:]
