"""Models whose layers keep states: the same tokens whatever the batch, the interruptions and the pauses, and the port's contract."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.contract import EngineContract
from tests.engines.models import MemoryReceiver, ask, make_engine
from tests.engines.sites import ModelSite, Site
from tests.engines.test_contract import running
from tests.engines.test_resume import PLANS, REQUESTS, drive, drive_chunks, submission
from tests.engines.test_runner import reference_logprobs
from tests.models.zoo import SIX_HYBRIDS, tiny
from transformers import PreTrainedModel

from midflight.engines.embedded.probe import step_batch
from midflight.engines.embedded.runner import Runner
from midflight.models.proof import TOLERANCE
from midflight.types import PauseMode, Version

nightly = pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") != "explore", reason="takes half a minute: `make nightly` runs it")


@pytest.mark.parametrize("name", [*SIX_HYBRIDS, "jamba"])
def test_hybrids_agree_with_their_plain_forward_whatever_the_batch(name: str) -> None:
    requests = [
        ask("a", request_id="0", max_tokens=9),
        *(ask("the same prompt", request_id=f"{1 + i}", seed=i, max_tokens=4) for i in range(3)),
    ]
    requests += [ask("xyz" * (1 + 6 * i), request_id=f"{4 + i}", seed=i, max_tokens=3 + i, temperature=0.7) for i in range(3)]
    generations = make_engine(tiny(name), max_batch_tokens=8, max_running=4).generate_all(requests)
    plain = tiny(name)
    for request, generation in zip(requests, generations, strict=True):
        difference = reference_logprobs(plain, request, generation) - torch.tensor(generation.logprobs, dtype=torch.float64)
        assert difference.abs().max() < TOLERANCE  # the layers compute a whole row otherwise than a token, and round otherwise


PLAN = [(1, None), (0, PauseMode.KEEP), (2, None), (0, PauseMode.RECOMPUTE), (3, None), (0, None), (0, PauseMode.ABORT), (1, None)]


@pytest.mark.parametrize("name", ["falcon_h1", "gptj"])
def test_i5_aborts_and_pauses_give_the_tokens_of_undisturbed_runs_alone(name: str) -> None:
    """I5, also for a model whose sequences go alone."""
    model, requests = tiny(name), [replace(r, sampling=r.sampling.changed(max_tokens=6)) for r in REQUESTS[1:5]]
    alone = {i: make_engine(model).generate_all([r])[0].token_ids for i, r in enumerate(requests)}
    assert drive(make_engine(model, max_running=2, max_batch_tokens=8)._scheduler, requests, PLAN) == alone


@nightly
@pytest.mark.parametrize("name", [*SIX_HYBRIDS, "jamba", "gptj"])
def test_i5_any_schedule_of_aborts_and_pauses_gives_the_tokens_of_undisturbed_runs_alone(name: str) -> None:
    """I5."""
    model = tiny(name)
    alone = {i: make_engine(model).generate_all([r])[0].token_ids for i, r in enumerate(REQUESTS)}

    @settings(max_examples=5, deadline=None)
    @given(PLANS, st.sampled_from([2, 6]), st.sampled_from([8, 64]))
    def check(plan: list[tuple[int, PauseMode | None]], max_running: int, max_batch_tokens: int) -> None:
        engine = make_engine(model, max_running=max_running, max_batch_tokens=max_batch_tokens)
        assert drive(engine._scheduler, REQUESTS, plan) == alone

    check()


@cache
def hybrid_version(version: Version) -> PreTrainedModel:
    return tiny("falcon_h1", seed=version)


@nightly
class TestHybrid(EngineContract):
    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Site]:
        receiver = MemoryReceiver()
        async with running(make_engine(tiny("falcon_h1"), receiver=receiver)) as engine:
            yield ModelSite(engine, receiver, hybrid_version)


def test_a_shared_prompt_is_run_once_and_its_state_copied_at_its_own_length() -> None:
    engine = make_engine(tiny("lfm2"))
    fed: list[list[int]] = []
    forward = engine._scheduler._runner.forward
    engine._scheduler._runner.forward = lambda batch: (fed.append(batch.counts.tolist()), forward(batch))[1]  # type: ignore[method-assign]
    same = [ask("one and the same", request_id=f"{i}", seed=i, max_tokens=3) for i in range(4)]
    generations = engine.generate_all(same)
    # 15 of the 16 tokens once; the last by each of the four; then two more tokens each.
    assert fed == [[15], [1] * 4, [1] * 4, [1] * 4]
    # A request that comes when the first has long gone on takes the state that was kept, not the state of now.
    later = engine.generate_all([ask("one and the same", request_id="4", seed=2, max_tokens=3)])
    assert fed[4:] == [[1]] * 3 and later[0].token_ids == generations[2].token_ids


def test_a_slot_that_is_used_again_begins_without_a_state() -> None:
    model = tiny("qwen3_5-text")
    row = np.arange(5, 25)
    runner = Runner(model, max_running=2, max_context=64)
    fresh = runner.forward(step_batch([(0, 0, row[:9])]))
    runner.forward(step_batch([(0, 9, row[9:])]))
    again = runner.forward(step_batch([(0, 0, row[:9])]))
    assert torch.equal(again, fresh)


def test_new_weights_go_on_over_the_states_of_the_old_under_keep_and_anew_under_recompute() -> None:
    request = ask("the prompt", max_tokens=10, seed=4)

    def run(mode: PauseMode) -> tuple[list[Version], tuple[int, ...]]:
        model = tiny("granitemoehybrid")
        scheduler = make_engine(model)._scheduler
        scheduler.submit(submission(1, request))
        tokens, labels = list[int](), list[Version]()
        for step in range(11):
            if step == 4:
                scheduler.pause(mode)
                model.load_state_dict(tiny("granitemoehybrid", seed=1).state_dict())
                scheduler.serve(1)
                scheduler.resume()
            for _, token, _, kv_version in scheduler.step().rows():
                tokens.append(token)
                labels.append(kv_version)
        return labels, tuple(tokens)

    kept, kept_tokens = run(PauseMode.KEEP)
    anew, anew_tokens = run(PauseMode.RECOMPUTE)
    # The prompt takes two steps, so that three tokens are out before the update.
    assert kept == [0] * 10 and anew == [0] * 3 + [1] * 7
    assert kept_tokens[:3] == anew_tokens[:3]
    resumed = make_engine(tiny("granitemoehybrid", seed=1)).generate_all(
        [replace(request, input_ids=(*request.input_ids, *anew_tokens[:3]))]
    )[0]
    assert anew_tokens[3:] == resumed.token_ids


def test_i5_an_aborted_hybrid_goes_on_where_it_was() -> None:
    model = tiny("nemotron_h")
    whole = make_engine(model).generate_all(REQUESTS[:3])
    chunks = drive_chunks(make_engine(model)._scheduler, REQUESTS[:3], [(1, None)] * 5 + [(2, None), (0, PauseMode.ABORT)])
    for i, generation in enumerate(whole):
        assert tuple(token for chunk in chunks[i] for token in chunk.token_ids) == generation.token_ids
        logprobs = [logprob for chunk in chunks[i] for logprob in chunk.logprobs]
        assert logprobs == pytest.approx(generation.logprobs, abs=1e-4)
