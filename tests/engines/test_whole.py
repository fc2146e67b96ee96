"""The way behind all others: nothing is kept, and each step computes whole sequences. Forced on a model that has better ways, and on those that
have no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engines.contract import EngineContract
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.engines.sites import ModelSite, Site, tiny_version
from tests.engines.test_contract import running
from tests.engines.test_experts import chosen_by
from tests.engines.test_hybrids import PLAN
from tests.engines.test_resume import REQUESTS, drive, submission
from tests.engines.test_runner import reference_logprobs
from tests.engines.test_scoring import ragged, reference
from tests.models.mixtures import tiny_mixture
from tests.models.tiny import tiny_model
from tests.models.zoo import tiny

from midflight.engines.embedded import probe
from midflight.engines.embedded.probe import Manner, engine_verdict
from midflight.models.proof import Way
from midflight.types import PauseMode, Version

NO_OTHER_WAY = ("openai-gpt", "recurrent_gemma", "xlstm")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other way is taken away."""
    monkeypatch.setattr(probe, "_MANNERS", (Manner(whole=True),))
    monkeypatch.setattr(probe, "_found", {})


@pytest.mark.parametrize("name", NO_OTHER_WAY)
def test_a_model_that_no_other_way_is_right_for_is_served_so_and_the_verdict_says_how_slow_that_is(name: str) -> None:
    verdict = engine_verdict(tiny(name), max_context=64, max_batch_tokens=64)
    assert verdict.way is Way.WHOLE and verdict.is_right
    assert "times as long as at the first (measured here)" in verdict.reason


@pytest.mark.parametrize("name", NO_OTHER_WAY)
def test_its_answers_and_scores_are_those_of_plain_forwards(name: str) -> None:
    requests = [ask("a", request_id="0", max_tokens=12), *(ask("the same prompt", request_id=f"{1 + i}", seed=i) for i in range(3))]
    engine = make_engine(tiny(name), max_batch_tokens=32, max_running=3)
    plain = tiny(name)
    plain.config.use_cache = False  # with it some of these do not even compute a row
    for request, generation in zip(requests, engine.generate_all(requests), strict=True):
        difference = reference_logprobs(plain, request, generation) - torch.tensor(generation.logprobs, dtype=torch.float64)
        assert difference.abs().max() < 1e-5

    async def scores() -> Any:
        async with running(engine):
            return await engine.score(*ragged((5, 1, 17, 40)), temperature=0.7)

    np.testing.assert_allclose(asyncio.run(scores()), reference(plain, *ragged((5, 1, 17, 40)), temperature=0.7), atol=1e-5)


@pytest.mark.usefixtures("forced")
class TestForced(EngineContract):
    """Batching, weights, pauses, aborts, resumes and scores are those of any engine."""

    keeps_keys = False

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Site]:
        receiver = MemoryReceiver()
        engine = make_engine(receiver=receiver)
        assert engine._manner.whole
        async with running(engine) as engine:
            yield ModelSite(engine, receiver, tiny_version)


@pytest.mark.usefixtures("forced")
def test_i5_aborts_and_pauses_give_the_tokens_of_undisturbed_runs_alone() -> None:
    """I5."""
    model, requests = tiny("gptj"), [replace(r, sampling=r.sampling.changed(max_tokens=6)) for r in REQUESTS[1:5]]
    alone = {i: make_engine(model).generate_all([r])[0].token_ids for i, r in enumerate(requests)}
    assert drive(make_engine(model, max_running=2, max_batch_tokens=8)._scheduler, requests, PLAN) == alone


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
def test_after_an_update_every_token_attends_to_nothing_older_than_the_new_weights(mode: PauseMode) -> None:
    request, model = ask("the prompt", max_tokens=8, seed=4), tiny_model()
    scheduler = make_engine(model)._scheduler
    scheduler.submit(submission(1, request))
    tokens, labels = list[int](), list[Version]()
    for step in range(8):
        if step == 3:
            scheduler.pause(mode)
            model.load_state_dict(tiny_model(seed=1).state_dict())
            scheduler.serve(1)
            scheduler.resume()
        for _, token, _, kv_version in scheduler.step().rows():
            tokens.append(token)
            labels.append(kv_version)
    assert labels == [0] * 3 + [1] * 5
    resumed = replace(request, input_ids=(*request.input_ids, *tokens[:3]))
    assert tuple(tokens[3:]) == make_engine(tiny_model(seed=1)).generate_all([resumed])[0].token_ids


@pytest.mark.usefixtures("forced")
def test_a_step_has_no_more_tokens_than_it_may_or_one_sequence_and_the_one_that_waited_longest_goes_first() -> None:
    engine = make_engine(max_running=3, max_batch_tokens=12)
    fed: list[list[int]] = []
    runner = engine._scheduler._runner
    forward = runner.forward
    runner.forward = lambda batch: (fed.append(sorted(batch.counts.tolist())), forward(batch))[1]  # type: ignore[method-assign]
    requests = [
        ask("a" * 5, request_id="0", max_tokens=2),
        ask("b" * 7, request_id="1", max_tokens=2),
        ask("c" * 20, request_id="2", max_tokens=2),
    ]
    engine.generate_all(requests)
    # 5 and 7 tokens fill the first step. The 20 have waited longest then, and go alone; so on in turns.
    assert fed == [[5, 7], [20], [6], [8], [21]]
    assert engine.reading().num_reused == 0 and engine.reading().num_computed == 5 + 7 + 20 + 6 + 8 + 21


@pytest.mark.usefixtures("forced")
def test_the_experts_of_a_mixture_are_recorded_as_by_one_forward_over_all() -> None:
    engine = make_engine(tiny_mixture("qwen3_moe"), records_experts=True, max_batch_tokens=64)
    request = ask("the prompt", max_tokens=5, seed=2)
    generation = engine.generate_all([request])[0]
    ids = (*request.input_ids, *generation.token_ids)
    record = np.frombuffer(generation.experts, np.uint8).reshape(len(ids), -1)
    np.testing.assert_array_equal(record[:-1], chosen_by(tiny_mixture("qwen3_moe"), ids)[:-1])


@pytest.mark.usefixtures("forced")
def test_a_model_whose_logits_depend_on_later_tokens_is_refused() -> None:
    model = tiny("llama")
    forward = type(model).forward

    class LooksAhead(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
            found = forward(self, input_ids=input_ids, use_cache=False)
            found.logits = found.logits + found.logits.roll(-1, 1)
            return found

    model.__class__ = LooksAhead
    verdict = engine_verdict(model, max_context=64, max_batch_tokens=64)
    assert verdict.way is Way.REFUSED and "llama is no decoder" in verdict.reason
