"""What every engine port must do, run against the embedded engine in process and over a loopback server.

A subclass gives `attached`: a context in which an engine decodes, with the receiver it stages from.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.models.tiny import MAX_CONTEXT, tiny_model

from midflight.errors import ContextExceeded, EngineError, RequestRejected, WeightsCorrupt
from midflight.ports import Engine
from midflight.types import Chunk, Feature, Finish, FinishReason, GenerateRequest, Grammar, GrammarKind, PauseMode

ABORTED = Finish(FinishReason.ABORT)
LONG = {"max_tokens": 50}
BAD_GRAMMAR = Grammar(GrammarKind.REGEX, "(a")


def needs(engine: Engine, feature: Feature) -> None:
    if feature not in engine.capabilities.features:
        pytest.skip(f"the engine has no {feature}")


async def collect(engine: Engine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


async def until_tokens(chunks: AsyncGenerator[Chunk], num: int) -> list[Chunk]:
    taken: list[Chunk] = []
    while sum(len(c.token_ids) for c in taken) < num:
        taken.append(await anext(chunks))
    return taken


def ids(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(t for c in chunks for t in c.token_ids)


def resumed(request: GenerateRequest, tokens: tuple[int, ...]) -> GenerateRequest:
    return replace(request, input_ids=(*request.input_ids[: request.num_prompt_tokens], *tokens))


async def rejection(engine: Engine, request: GenerateRequest) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        await collect(engine, request)
    return caught.value


class EngineContract:
    def attached(self) -> AbstractAsyncContextManager[tuple[Engine, MemoryReceiver]]:
        raise NotImplementedError

    def test_a_generation_ends_with_the_only_finish_and_has_the_tokens_of_an_inline_run(self) -> None:
        request = ask(seed=5)
        expected = make_engine().generate_all([request])[0]

        async def main() -> None:
            async with self.attached() as (engine, _):
                chunks = await collect(engine, request)
                assert [c.finish for c in chunks[:-1]] == [None] * (len(chunks) - 1)
                assert chunks[-1].finish == expected.finish == Finish(FinishReason.LENGTH)
                assert ids(chunks) == expected.token_ids
                assert [p for c in chunks for p in c.logprobs] == pytest.approx(expected.logprobs, abs=1e-5)
                assert {(c.version, c.kv_version) for c in chunks} == {(0, 0)}

        asyncio.run(main())

    def test_bad_requests_are_refused_by_name_and_the_engine_goes_on(self) -> None:
        bad = {
            "input_ids": [GenerateRequest("r", (1, 262), 2, ask().sampling), GenerateRequest("r", (), 0, ask().sampling)],
            "num_prompt_tokens": [GenerateRequest("r", (1, 2), 3, ask().sampling)],
            "temperature": [ask(temperature=-1.0), ask(temperature=math.nan), ask(temperature=math.inf)],
            "top_p": [ask(top_p=0.0), ask(top_p=1.5), ask(top_p=math.nan)],
            "top_k": [ask(top_k=0)],
            "min_p": [ask(min_p=-0.1), ask(min_p=2.0)],
            "max_tokens": [ask(max_tokens=0)],
            "min_tokens": [ask(max_tokens=2, min_tokens=3)],
            "stop_token_ids": [ask(stop_token_ids=(999,))],
            "frequency_penalty": [ask(frequency_penalty=2.1), ask(frequency_penalty=math.nan)],
            "presence_penalty": [ask(presence_penalty=-2.1)],
            "repetition_penalty": [ask(repetition_penalty=0.0), ask(repetition_penalty=-1.0), ask(repetition_penalty=math.inf)],
            "logit_bias": [
                ask(logit_bias=((262, 1.0),)),
                ask(logit_bias=((-1, 1.0),)),
                ask(logit_bias=((1, 100.5),)),
                ask(logit_bias=((1, math.nan),)),
                ask(logit_bias=tuple((i % 262, 1.0) for i in range(301))),
            ],
            "top_logprobs": [ask(top_logprobs=21), ask(top_logprobs=-1)],
            "grammar": [ask(grammar=BAD_GRAMMAR)],
        }

        async def main() -> None:
            async with self.attached() as (engine, _):
                for param, requests in bad.items():
                    for request in requests:
                        with pytest.raises(RequestRejected) as caught:
                            await collect(engine, request)
                        assert caught.value.param == param
                with pytest.raises(ContextExceeded, match=f"{MAX_CONTEXT}.*at most {MAX_CONTEXT - 1}"):
                    await collect(engine, ask("x" * MAX_CONTEXT))
                assert len(ids(await collect(engine, ask()))) == 8

        asyncio.run(main())

    def test_the_likeliest_tokens_come_with_each_token_of_the_requests_that_ask(self) -> None:
        async def main() -> None:
            async with self.attached() as (engine, _), asyncio.TaskGroup() as tasks:
                needs(engine, Feature.TOP_LOGPROBS)
                asked = {num: tasks.create_task(collect(engine, ask(request_id=f"{num}", seed=num, top_logprobs=num))) for num in (0, 1, 4)}
                for num, task in asked.items():
                    for chunk in await task:
                        assert len(chunk.top_logprobs) == (len(chunk.token_ids) if num else 0)
                        for token_id, logprob, likeliest in zip(chunk.token_ids, chunk.logprobs, chunk.top_logprobs, strict=False):
                            assert len(likeliest) == num == len(dict(likeliest))
                            assert [p for _, p in likeliest] == sorted((p for _, p in likeliest), reverse=True)
                            assert dict(likeliest).get(token_id, logprob) == pytest.approx(logprob, abs=1e-6)
                            assert token_id in dict(likeliest) or logprob <= likeliest[-1][1]
                for chunk in await collect(engine, ask(temperature=0.0, top_logprobs=4)):
                    assert chunk.top_logprobs == tuple(((i, 0.0),) for i in chunk.token_ids)

        asyncio.run(main())

    def test_a_bias_of_100_chooses_a_token_and_of_minus_100_forbids_it(self) -> None:
        async def main() -> None:
            async with self.attached() as (engine, _):
                needs(engine, Feature.LOGIT_BIAS)
                assert ids(await collect(engine, ask(logit_bias=((77, 100.0),)))) == (77,) * 8
                only = tuple((i, -100.0) for i in range(262) if i != 78)
                assert ids(await collect(engine, ask(logit_bias=only))) == (78,) * 8

        asyncio.run(main())

    def test_penalties_weigh_what_was_said_already(self) -> None:
        """Where a bias makes four tokens likely, a large presence penalty lets each come once, and none beyond."""
        four = tuple((i, 60.0) for i in (70, 71, 72, 73))

        async def main() -> None:
            async with self.attached() as (engine, _):
                needs(engine, Feature.PENALTIES)
                needs(engine, Feature.LOGIT_BIAS)
                said = ids(await collect(engine, ask("H", temperature=0.01, max_tokens=4, logit_bias=four, presence_penalty=2.0)))
                assert sorted(said) == [70, 71, 72, 73]
                again = ids(await collect(engine, ask("H", temperature=0.01, max_tokens=4, logit_bias=four, presence_penalty=-2.0)))
                assert len(set(again)) == 1

        asyncio.run(main())

    def test_a_grammar_shapes_one_answer_and_a_bad_one_ends_no_other(self) -> None:
        expected = make_engine().generate_all([ask(seed=6, **LONG)])[0]

        async def main() -> None:
            async with self.attached() as (engine, _), asyncio.TaskGroup() as tasks:
                needs(engine, Feature.GRAMMARS)
                other = tasks.create_task(collect(engine, ask(request_id="other", seed=6, **LONG)))
                refused = [tasks.create_task(rejection(engine, ask(request_id=f"{i}", grammar=BAD_GRAMMAR))) for i in range(3)]
                shaped = await collect(engine, ask(grammar=Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["red", "green"]}'), **LONG))
                assert bytes(ids(shaped)[:-1]).strip() in (b'"red"', b'"green"')
                assert shaped[-1].finish == Finish(FinishReason.STOP, 256)
                assert [(await r).param for r in refused] == ["grammar"] * 3
                assert ids(await other) == expected.token_ids

        asyncio.run(main())

    def test_abort_ends_one_request_and_leaves_the_other(self) -> None:
        async def main() -> None:
            async with self.attached() as (engine, _), asyncio.TaskGroup() as tasks:
                other = tasks.create_task(collect(engine, ask(request_id="p10", seed=2, **LONG)))
                chunks = engine.generate(ask(request_id="p1", **LONG))
                got = await until_tokens(chunks, 3)
                await engine.abort("p1")
                await engine.abort("unknown")
                got += [c async for c in chunks]
                assert got[-1].finish == ABORTED and 3 <= len(ids(got)) < 50
                assert len(ids(await other)) == 50

        asyncio.run(main())

    def test_closing_the_iterator_aborts(self) -> None:
        async def main() -> None:
            async with self.attached() as (engine, _):
                chunks = engine.generate(ask(**LONG))
                await until_tokens(chunks, 2)
                await chunks.aclose()
                await engine.pause(PauseMode.DRAIN)
                assert (await engine.health()).num_tokens < 50

        asyncio.run(main())

    @pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
    def test_a_freezing_pause_gives_no_token_and_resume_continues_as_if_nothing_was(self, mode: PauseMode) -> None:
        request = ask(seed=9, **LONG)
        expected = make_engine().generate_all([request])[0]

        async def main() -> None:
            async with self.attached() as (engine, _):
                chunks = engine.generate(request)
                got = await until_tokens(chunks, 3)
                await engine.pause(mode)
                await engine.pause(mode)
                first = await engine.health()
                late = asyncio.ensure_future(collect(engine, ask("late", request_id="late")))
                await asyncio.sleep(0.05)
                second = await engine.health()
                assert first.paused and second.num_tokens == first.num_tokens < 50 and not late.done()
                await engine.resume()
                await engine.resume()
                got += [c async for c in chunks]
                assert ids(got) == expected.token_ids
                assert len(ids(await late)) == 8

        asyncio.run(main())

    def test_an_aborting_pause_ends_running_and_waiting_and_holds_new_ones(self) -> None:
        async def main() -> None:
            async with self.attached() as (engine, _), asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(collect(engine, ask(request_id=f"{i}", seed=i, **LONG))) for i in range(12)]
                chunks = engine.generate(ask(request_id="watched", **LONG))
                await until_tokens(chunks, 1)
                await engine.pause(PauseMode.ABORT)
                finished = [await r for r in running]
                assert any(f[-1].finish == ABORTED for f in finished)
                assert all(f[-1].finish is not None for f in finished)
                late = tasks.create_task(collect(engine, ask("late", request_id="late")))
                await engine.pause(PauseMode.ABORT)
                await asyncio.sleep(0.02)
                assert not late.done()
                await engine.resume()
                assert (await late)[-1].finish == Finish(FinishReason.LENGTH)

        asyncio.run(main())

    def test_drain_lets_all_finish_and_holds_new_ones(self) -> None:
        async def main() -> None:
            async with self.attached() as (engine, _), asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(collect(engine, ask(request_id=f"{i}", seed=i, max_tokens=20))) for i in range(12)]
                chunks = engine.generate(ask(request_id="watched", **LONG))
                got = await until_tokens(chunks, 1)
                await engine.pause(PauseMode.DRAIN)
                late = tasks.create_task(collect(engine, ask("late", request_id="late")))
                got += [c async for c in chunks]
                assert len(ids(got)) == 50 and [len(ids(await r)) for r in running] == [20] * 12
                await asyncio.sleep(0.02)
                assert not late.done() and (await engine.health()).num_running == 0
                await engine.resume()
                await late

        asyncio.run(main())

    def test_aborting_while_frozen_ends_the_frozen(self) -> None:
        async def main() -> None:
            async with self.attached() as (engine, _):
                chunks = engine.generate(ask(**LONG))
                got = await until_tokens(chunks, 2)
                await engine.pause(PauseMode.KEEP)
                await engine.pause(PauseMode.ABORT)
                got += [c async for c in chunks]
                assert got[-1].finish == ABORTED
                assert (await engine.health()).num_running == 0

        asyncio.run(main())

    def test_i6_versions_change_in_mid_generation_at_the_commit(self) -> None:
        """I6: tokens before the commit are of 0, after it of 1; in `keep` the keys stay old, with `recompute` they do not."""

        async def main() -> None:
            for mode, kv_after in ((PauseMode.KEEP, 0), (PauseMode.RECOMPUTE, 1)):
                async with self.attached() as (engine, receiver):
                    manifest = receiver.publish(1, tiny_model(seed=1))
                    chunks = engine.generate(ask(**LONG))
                    got = await until_tokens(chunks, 3)
                    await engine.stage(manifest)
                    await engine.pause(mode)
                    attestation = await engine.commit(1)
                    assert (attestation.version, attestation.fingerprint) == (1, manifest.fingerprint)
                    await engine.resume()
                    got += [c async for c in chunks]
                    labels = [(c.version, c.kv_version) for c in got for _ in c.token_ids]
                    assert labels == sorted(labels) and set(labels) == {(0, 0), (1, kv_after)}
                    assert len(labels) == len(ids(got)) == 50
                    assert await engine.commit(1) == attestation

        asyncio.run(main())

    def test_i7_a_version_that_is_corrupt_or_not_staged_is_not_served(self) -> None:
        """I7: what fails leaves the weights as they were."""
        expected = make_engine().generate_all([ask()])[0]

        async def main() -> None:
            async with self.attached() as (engine, receiver):
                manifest = receiver.publish(1, tiny_model(seed=1))
                with pytest.raises(EngineError, match="version 1: nothing is staged"):
                    await engine.commit(1)
                receiver.published[1]["model.norm.weight"][0:4] = b"\0\0\0\1"
                with pytest.raises(WeightsCorrupt, match="hash"):
                    await engine.stage(manifest)
                with pytest.raises(EngineError, match="nothing is staged"):
                    await engine.commit(1)
                assert ids(await collect(engine, ask())) == expected.token_ids
                assert (await engine.health()).version == 0

        asyncio.run(main())

    def test_i5_a_resumed_request_goes_on_as_if_never_aborted(self) -> None:
        """I5, also across a stop string that begins before the abort and ends after it."""
        request = ask(seed=3, max_tokens=30)
        expected = make_engine().generate_all([request])[0]

        async def main() -> None:
            async with self.attached() as (engine, _):
                for cut in (0, 1, 7, 29):
                    rest = await collect(engine, resumed(request, expected.token_ids[:cut]))
                    assert ids(rest) == expected.token_ids[cut:]
                whole = await collect(engine, resumed(request, expected.token_ids))
                assert ids(whole) == () and whole[-1].finish == Finish(FinishReason.LENGTH)

        asyncio.run(main())
