"""The contract of one generation: its tokens, their log-probabilities, its end, and what is refused."""

from __future__ import annotations

import asyncio
import math

import pytest
from tests.engines.asking import Contract, asked_for_letters
from tests.engines.contract_seeds import BAD_GRAMMAR
from tests.engines.models import ask
from tests.engines.reading import LENGTH, collect, ids, live_labels, logprobs, needs, rejection, resumed
from tests.engines.sites import Site

from midflight.errors import ContextExceeded, RequestRejected
from midflight.text.byte_tokenizer import END
from midflight.types import Feature, Finish, FinishReason, GenerateRequest

LOGPROB_TOLERANCE = 1e-5
"""Of float32: what two implementations differ by is ten times less."""
GREEDY = {"temperature": 0.0}


class GenerationContract(Contract):
    def test_a_generation_ends_with_the_only_finish_and_has_the_tokens_of_its_weights(self) -> None:
        async def test(site: Site) -> None:
            request = ask(max_tokens=20, **GREEDY)
            chunks = await collect(site.engine, request)
            assert [c.finish for c in chunks[:-1]] == [None] * (len(chunks) - 1)
            assert chunks[-1].finish == LENGTH
            assert len(ids(chunks)) == len(logprobs(chunks)) == 20
            assert all(site.chosen(0, request, ids(chunks)))
            assert set(live_labels(chunks)) == {(0, 0)}

        self.on(test)

    @pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5}, {"temperature": 1.7}, {"temperature": 0.8, "top_k": 5}])
    def test_log_probabilities_are_those_of_the_weights(self, sampling: dict[str, object]) -> None:
        async def test(site: Site) -> None:
            request = ask("The quick brown fox", max_tokens=30, **sampling)
            chunks = await collect(site.engine, request)
            expected = site.logprobs(0, request, ids(chunks))
            assert logprobs(chunks) == pytest.approx(expected, abs=LOGPROB_TOLERANCE, rel=0)

        self.on(test)

    def test_the_likeliest_tokens_come_with_each_token_of_the_requests_that_ask(self) -> None:
        async def test(site: Site) -> None:
            needs(site.engine, Feature.TOP_LOGPROBS)
            async with asyncio.TaskGroup() as tasks:
                asked = {n: tasks.create_task(collect(site.engine, ask(request_id=f"{n}", seed=n, top_logprobs=n))) for n in (0, 1, 4)}
            for num, task in asked.items():
                for chunk in task.result():
                    assert len(chunk.top_logprobs) == (len(chunk.token_ids) if num else 0)
                    for token_id, logprob, likeliest in zip(chunk.token_ids, chunk.logprobs, chunk.top_logprobs, strict=False):
                        assert len(likeliest) == num == len(dict(likeliest))
                        assert [p for _, p in likeliest] == sorted((p for _, p in likeliest), reverse=True)
                        assert dict(likeliest).get(token_id, logprob) == pytest.approx(logprob, abs=1e-6)
                        assert token_id in dict(likeliest) or logprob <= likeliest[-1][1]
            greedy = ask(top_logprobs=4, **GREEDY)
            chunks = await collect(site.engine, greedy)
            tops = [top for chunk in chunks for top in chunk.top_logprobs]
            assert [(len(top), *top[0]) for top in tops] == [(4, *of) for of in zip(ids(chunks), logprobs(chunks), strict=True)]
            assert logprobs(chunks) == pytest.approx(site.logprobs(0, greedy, ids(chunks)), abs=LOGPROB_TOLERANCE, rel=0)

        self.on(test)

    def test_a_bias_of_100_chooses_a_token_and_of_minus_100_forbids_it(self) -> None:
        async def test(site: Site) -> None:
            needs(site.engine, Feature.LOGIT_BIAS)
            assert ids(await collect(site.engine, ask(logit_bias=((77, 100.0),)))) == (77,) * 8
            only = tuple((i, -100.0) for i in range(262) if i != 78)
            assert ids(await collect(site.engine, ask(logit_bias=only))) == (78,) * 8

        self.on(test)

    def test_penalties_weigh_what_was_said_already(self) -> None:
        """Where a bias makes four tokens likely, large penalties let each come once, and none beyond."""
        four = tuple((i, 60.0) for i in (70, 71, 72, 73))

        async def test(site: Site) -> None:
            needs(site.engine, Feature.PENALTIES)
            needs(site.engine, Feature.LOGIT_BIAS)
            said = ids(
                await collect(
                    site.engine, ask("H", temperature=0.01, max_tokens=4, logit_bias=four, presence_penalty=2.0, frequency_penalty=2.0)
                )
            )
            assert sorted(said) == [70, 71, 72, 73]
            again = ids(await collect(site.engine, ask("H", temperature=0.01, max_tokens=4, logit_bias=four, presence_penalty=-2.0)))
            assert len(set(again)) == 1

        self.on(test)

    def test_a_stop_id_ends_the_answer_and_is_its_last_token(self) -> None:
        async def test(site: Site) -> None:
            whole = ids(await collect(site.engine, ask(max_tokens=20, **GREEDY)))
            stop = whole[5]
            chunks = await collect(site.engine, ask(max_tokens=20, stop_token_ids=(stop,), **GREEDY))
            assert ids(chunks) == whole[: whole.index(stop) + 1]
            assert chunks[-1].finish == Finish(FinishReason.STOP, stop)
            assert len(logprobs(chunks)) == len(ids(chunks))

        self.on(test)

    def test_a_stop_string_ends_the_answer(self) -> None:
        """Where the engine matches strings; it may say a token or so more, which the gateway cuts."""

        async def test(site: Site) -> None:
            if not site.engine.capabilities.stops_on_strings:
                pytest.skip("the engine matches no strings")
            text = bytes(ids(await collect(site.engine, asked_for_letters(site.engine, max_tokens=20, **GREEDY))))
            stop = text[4:6]
            request = asked_for_letters(site.engine, max_tokens=20, stop=("no such text", stop.decode()), **GREEDY)
            chunks = await collect(site.engine, request)
            assert bytes(ids(chunks)) == text[: text.index(stop) + 2]
            assert chunks[-1].finish == Finish(FinishReason.STOP, stop.decode())

        self.on(test)

    def test_no_end_comes_before_min_tokens_also_in_a_resumed_answer(self) -> None:
        async def test(site: Site) -> None:
            first = ids(await collect(site.engine, ask(max_tokens=1, **GREEDY)))[0]
            request = ask(max_tokens=12, min_tokens=6, stop_token_ids=(first,), **GREEDY)
            whole = await collect(site.engine, request)
            assert 6 <= len(ids(whole)) <= 12
            rest = await collect(site.engine, resumed(request, ids(whole)[:3]))
            assert (ids(whole)[:3] + ids(rest), rest[-1].finish) == (ids(whole), whole[-1].finish)

        self.on(test)

    def test_the_end_of_turn_ends_an_answer_unless_it_is_ignored(self) -> None:
        ending = {"logit_bias": ((END, 100.0),)}

        async def test(site: Site) -> None:
            needs(site.engine, Feature.LOGIT_BIAS)
            chunks = await collect(site.engine, ask(ignore_eos=False, **ending))
            assert (ids(chunks), chunks[-1].finish) == ((END,), Finish(FinishReason.STOP, END))
            chunks = await collect(site.engine, ask(ignore_eos=True, **ending))
            assert (ids(chunks), chunks[-1].finish) == ((END,) * 8, LENGTH)

        self.on(test)

    def test_a_resumed_greedy_answer_is_that_of_an_uninterrupted_one(self) -> None:
        async def test(site: Site) -> None:
            request = ask(max_tokens=20, **GREEDY)
            whole = ids(await collect(site.engine, request))
            for cut in (1, 7, 19):
                rest = await collect(site.engine, resumed(request, whole[:cut]))
                assert (ids(rest), rest[-1].finish) == (whole[cut:], LENGTH)

        self.on(test)

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
        }

        async def test(site: Site) -> None:
            most = site.engine.capabilities.max_context
            grammars = {"grammar": [ask(grammar=BAD_GRAMMAR)]} if Feature.GRAMMARS in site.engine.capabilities.features else {}
            for param, requests in (bad | grammars).items():
                for request in requests:
                    with pytest.raises(RequestRejected) as caught:
                        await collect(site.engine, request)
                    assert caught.value.param == param
            with pytest.raises(ContextExceeded, match=f"{most}.*at most {most - 1}"):
                await collect(site.engine, ask("x" * most))
            assert len(ids(await collect(site.engine, ask()))) == 8

        self.on(test)

    def test_what_an_engine_cannot_do_is_refused_and_not_ignored(self) -> None:
        shaped = {
            Feature.GRAMMARS: ask(grammar=BAD_GRAMMAR),
            Feature.PENALTIES: ask(presence_penalty=1.0),
            Feature.LOGIT_BIAS: ask(logit_bias=((1, 1.0),)),
            Feature.TOP_LOGPROBS: ask(top_logprobs=1),
        }

        async def test(site: Site) -> None:
            for feature in shaped.keys() - site.engine.capabilities.features:
                await rejection(site.engine, shaped[feature])

        self.on(test)

    def test_an_answer_ends_with_the_context_where_it_is_not_refused(self) -> None:
        async def test(site: Site) -> None:
            most = site.engine.capabilities.max_context
            try:
                chunks = await collect(site.engine, ask("x" * (most - 5), max_tokens=50))
            except ContextExceeded as refused:
                assert f"{most}" in str(refused)
            else:
                assert (len(ids(chunks)), chunks[-1].finish) == (5, LENGTH)
                request = ask("x" * (most - 5), max_tokens=50)
                for num in (4, 5):  # an interruption may come when it is full, and before that was said
                    end = await collect(site.engine, resumed(request, ids(chunks)[:num]))
                    assert (len(ids(end)), end[-1].finish) == (5 - num, LENGTH)

        self.on(test)
