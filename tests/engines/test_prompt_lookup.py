"""Tokens that are guessed ahead: what stands is what would have been sampled, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engines.models import ask, make_engine
from tests.engines.test_resume import drive_chunks, ids
from tests.models.tiny import tiny_model
from tests.models.zoo import tiny

from midflight.engines.embedded.engine import EmbeddedEngine, Generated
from midflight.engines.embedded.prompt_lookup import guess
from midflight.types import PauseMode

TURNS = "ab ab ab ab ab ab ab "
REQUESTS = [
    ask(TURNS, request_id="greedy", temperature=0.0, max_tokens=30),
    ask(TURNS, request_id="nearly", temperature=0.05, seed=3, max_tokens=30, top_logprobs=3),
    ask(TURNS, request_id="warm", seed=4, max_tokens=30, top_p=0.3),
    ask(TURNS, request_id="penalised", temperature=0.05, seed=5, frequency_penalty=0.3, max_tokens=24),
    ask(TURNS, request_id="stopping", temperature=0.0, max_tokens=30, stop_token_ids=(97, 98, 99), min_tokens=9),
    ask(TURNS, request_id="word", temperature=0.05, seed=6, stop=("zz",), max_tokens=12),
]


def test_a_guess_is_what_followed_the_last_tokens_when_they_stood_there_before() -> None:
    assert guess(np.array([1, 2, 3, 4, 5, 9, 1, 2, 3]), most=2).tolist() == [4, 5]
    assert guess(np.array([1, 2, 3, 4, 8, 2, 3, 7, 1, 2, 3]), most=3).tolist() == [4, 8, 2], "three tokens say more than two"
    assert guess(np.array([6, 2, 3, 4, 8, 2, 3, 7, 1, 2, 3]), most=1).tolist() == [7], "the last place says more than the first"
    assert guess(np.array([5, 5, 5, 5]), most=4).tolist() == [5] * 4, "round and round"
    assert guess(np.array([5, 7, 9, 5, 7, 9, 5]), most=5).tolist() == [7, 9, 5, 7, 9]
    assert guess(np.array([1, 2, 3]), most=4).tolist() == guess(np.array([1]), most=4).tolist() == []


def passes(engine: EmbeddedEngine) -> list[int]:
    """One entry for each forward pass from now on: its sequences."""
    found: list[int] = []
    forward = engine._scheduler._runner.forward
    engine._scheduler._runner.forward = lambda batch: (found.append(len(batch.slots)), forward(batch))[1]  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def one_by_one() -> tuple[list[Generated], int]:
    engine = make_engine(tiny_model(dtype="float64"))
    made = passes(engine)
    return engine.generate_all(REQUESTS), sum(made)


def test_answers_are_those_of_one_token_a_step_in_fewer_steps(one_by_one: tuple[list[Generated], int]) -> None:
    engine = make_engine(tiny_model(dtype="float64"), guesses=5)
    made = passes(engine)
    for found, expected in zip(engine.generate_all(REQUESTS), one_by_one[0], strict=True):
        assert (found.token_ids, found.finish) == (expected.token_ids, expected.finish)
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
        assert [[i for i, _ in top] for top in found.top_logprobs] == [[i for i, _ in top] for top in expected.top_logprobs]
    assert sum(made) < 0.9 * one_by_one[1]


def test_a_request_alone_takes_a_fraction_of_the_steps() -> None:
    request = ask("ab" * 10, temperature=0.0, max_tokens=40)
    slow, fast = make_engine(), make_engine(guesses=7)
    steps, fewer = passes(slow), passes(fast)
    assert fast.generate_all([request])[0].token_ids == slow.generate_all([request])[0].token_ids
    assert len(steps) == 40 and len(fewer) <= 20
    assert fast._scheduler._prefixes.num_bytes == slow._scheduler._prefixes.num_bytes, "what is kept for others ends where the answer does"


def test_i5_guesses_survive_aborts_and_pauses(one_by_one: tuple[list[Generated], int]) -> None:
    alone = one_by_one[0]
    requests = [request for request in REQUESTS if not request.sampling.stop and not request.sampling.stop_token_ids]
    plan: list[tuple[int, PauseMode | None]] = [(0, None), (1, PauseMode.KEEP), (2, None), (0, PauseMode.RECOMPUTE), (3, PauseMode.ABORT)]
    found = drive_chunks(make_engine(tiny_model(dtype="float64"), guesses=5)._scheduler, requests, plan)
    assert [ids(found[i]) for i in range(len(requests))] == [alone[REQUESTS.index(request)].token_ids for request in requests]


def test_a_sequence_that_cannot_go_back_is_not_guessed() -> None:
    assert make_engine(tiny("mamba"), guesses=5)._scheduler._guesses == 0
