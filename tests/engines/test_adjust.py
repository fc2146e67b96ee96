"""Penalties, biases and masks, by hand."""

import math

import numpy as np
import pytest
import torch
from tests.engines.models import MAX_CONTEXT, TOKENIZER, ask
from tests.engines.test_sampler import batch, distribution

from midflight.engines.embedded.grammar import Grammars
from midflight.engines.embedded.sampler import Biases, Masks, Penalties, SamplingBatch, biased, masked, penalised, sample
from midflight.engines.embedded.table import SlotTable, Submission
from midflight.types import GenerateRequest, Grammar, GrammarKind, SamplingParams


def penalties(*, repetition: float = 1.0, frequency: float = 0.0, presence: float = 0.0) -> Penalties:
    """Of row 1 of two: prompt (0), output (1, 1, 2), and a stale 3 behind them."""
    one = np.ones(1, dtype=np.int64)
    values = (np.array([repetition]), np.array([frequency]), np.array([presence]))
    return Penalties(one, np.array([[0, 1, 1, 2, 3]]), one, 4 * one, *values)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # Positive logits are halved, negative doubled; id 3 is neither in prompt nor in output.
        (penalties(repetition=2.0), [1.0, -2.0, 0.25, 0.0]),
        # Id 1 occurs twice in the output, id 2 once, id 0 in the prompt only.
        (penalties(frequency=0.5), [2.0, -2.0, 0.0, 0.0]),
        (penalties(presence=0.25), [2.0, -1.25, 0.25, 0.0]),
        # Repetition first: -1 becomes -2, then -2 - 2 * 0.5 - 0.25; 0.5 becomes 0.25, then 0.25 - 0.5 - 0.25.
        (penalties(repetition=2.0, frequency=0.5, presence=0.25), [1.0, -3.25, -0.5, 0.0]),
        (penalties(frequency=-0.5), [2.0, 0.0, 1.0, 0.0]),
    ],
)
def test_penalties_are_those_of_the_formula_and_leave_other_rows_alone(asked: Penalties, expected: list[float]) -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 0.0]], dtype=torch.float64).expand(2, -1)
    assert penalised(logits, asked).tolist() == [[2.0, -1.0, 0.5, 0.0], pytest.approx(expected, abs=1e-12)]


def test_a_bias_is_added_and_one_named_twice_is_added_twice() -> None:
    logits = torch.zeros(2, 3, dtype=torch.float64)
    asked = Biases(np.array([1, 1, 1]), np.array([0, 2, 2]), np.array([1.5, -2.0, -3.0]))
    assert biased(logits, asked).tolist() == [[0.0, 0.0, 0.0], [1.5, 0.0, -5.0]]


def test_a_mask_forbids_in_its_rows_only() -> None:
    logits = torch.zeros(2, 3)
    asked = Masks(np.array([1]), np.array([[True, False, True]]))
    assert masked(logits, asked).tolist() == [[0.0, 0.0, 0.0], [0.0, -math.inf, 0.0]]


def test_a_mask_keeps_what_it_allows_where_nothing_else_would_be_left() -> None:
    asked = Masks(np.array([0, 1]), np.array([[True, True, False], [False, True, False]]))
    fewer, empty = asked.without(np.array([[1, -1], [1, 2]]))
    assert fewer.allowed.tolist() == [[True, False, False], [False, True, False]] and empty.tolist() == [False, True]


def asking(settings: SamplingBatch, **more: object) -> SamplingBatch:
    return SamplingBatch(**{name: getattr(settings, name) for name in SamplingBatch.__dataclass_fields__} | more)  # type: ignore[arg-type]


def everywhere(num_rows: int, token_id: int, value: float) -> Biases:
    return Biases(np.arange(num_rows), np.full(num_rows, token_id), np.full(num_rows, value))


def test_biases_come_before_temperature_and_before_truncation() -> None:
    # Logits 0, 0 and a bias of log 2 at temperature 1/2: the odds are 2^2 to 1.
    cold = asking(batch(200, temperature=0.5), biases=everywhere(200, 0, math.log(2)))
    assert distribution([0.5, 0.5], cold) == pytest.approx({0: 0.8, 1: 0.2}, abs=1e-9)
    # 0.1 * 8 = 0.8 of 1.7: the least likely is now the likeliest, which is all that top-p keeps.
    cut = asking(batch(50, top_p=0.4), biases=everywhere(50, 3, math.log(8)))
    assert distribution([0.4, 0.3, 0.2, 0.1], cut) == {3: 1.0}


def test_a_bias_of_100_decides() -> None:
    never = asking(batch(400), biases=everywhere(400, 0, -100.0))
    assert set(distribution([0.97, 0.01, 0.01, 0.01], never)) == {1, 2, 3}
    always = asking(batch(400), biases=everywhere(400, 3, 100.0))
    assert distribution([0.97, 0.01, 0.01, 0.01], always) == {3: pytest.approx(1.0)}


def test_a_masked_distribution_is_renormalised() -> None:
    masks = Masks(np.arange(200), np.tile([True, False, True, False], (200, 1)))
    assert distribution([0.4, 0.3, 0.2, 0.1], asking(batch(200), masks=masks)) == pytest.approx({0: 4 / 6, 2: 2 / 6}, abs=1e-9)


def test_the_likeliest_are_of_the_distribution_sampled_and_as_many_as_are_asked_for_and_possible() -> None:
    logits = torch.tensor([0.4, 0.2, 0.2, 0.2], dtype=torch.float64).log().expand(4, -1)
    settings = batch(4)
    settings.top_k[2], settings.temperature[3] = 2, 0.0
    sampled = sample(logits, asking(settings, num_top=np.array([0, 3, 3, 3])))
    # Row 1: equal ones by id. Row 2: top-k leaves 0.4 and 0.2 of 0.6. Row 3 is greedy: of temperature 1.
    assert sampled.top_ids.tolist() == [[-1, -1, -1], [0, 1, 2], [0, 1, -1], [0, 1, 2]]
    assert np.exp(sampled.top_logprobs[1]) == pytest.approx([0.4, 0.2, 0.2])
    assert np.exp(sampled.top_logprobs[2, :2]) == pytest.approx([2 / 3, 1 / 3])
    assert (sampled.token_ids[3], math.exp(sampled.logprobs[3])) == (0, pytest.approx(0.4))
    assert np.exp(sampled.top_logprobs[3]) == pytest.approx([0.4, 0.2, 0.2])
    assert sample(logits, settings).top_ids.shape == (4, 0)


def test_equal_ones_at_the_border_of_the_likeliest_are_reported_by_id() -> None:
    sampled = sample(torch.zeros(2, 60, dtype=torch.float64), asking(batch(2), num_top=np.array([2, 20])))
    assert sampled.top_ids[0].tolist() == [0, 1] + [-1] * 18 and sampled.top_ids[1].tolist() == list(range(20))
    few = sample(torch.zeros(1, 3), asking(batch(1), num_top=np.array([20])))
    assert few.top_ids.tolist() == [[0, 1, 2]] and few.top_logprobs[0] == pytest.approx([math.log(1 / 3)] * 3)


def table_of(*requests: GenerateRequest) -> SlotTable:
    table = SlotTable(max_running=4, max_context=MAX_CONTEXT)
    grammars = Grammars(TOKENIZER, vocab_size=262)
    for handle, request in enumerate(requests):
        grammar = request.sampling.grammar
        constraint = None if grammar is None else grammars.constraint(grammar, request.input_ids[request.num_prompt_tokens :])
        table.admit(Submission(handle, 0, request, (256,), None, constraint))
    return table


def test_i5_a_resumed_request_counts_what_it_brings_as_output() -> None:
    """I5: the tokens before the interruption are penalised as if they had been made here."""
    params = SamplingParams(frequency_penalty=0.5)
    resumed = table_of(ask(), GenerateRequest("r", (5, 6, 7, 7), 2, params))
    going_on = table_of(ask(), GenerateRequest("r", (5, 6), 2, params))
    for token_id in (7, 7):
        going_on.append(np.array([1]), going_on.length[[1]], np.array([token_id]))
    for table in (resumed, going_on):
        asked = table.sampling(np.array([0, 1]), table.length[[0, 1]]).penalties
        assert asked is not None
        logits = penalised(torch.zeros(2, 9, dtype=torch.float64), asked)
        assert logits.tolist() == [[0.0] * 9, [0, 0, 0, 0, 0, 0, 0, -1.0, 0]]


def test_a_step_whose_rows_ask_for_nothing_special_does_nothing_special() -> None:
    table = table_of(ask(), ask(presence_penalty=1.0, logit_bias=((3, 1.0),), top_logprobs=2))
    plain, special = table.sampling(np.array([0]), table.length[[0]]), table.sampling(np.array([0, 1]), table.length[[0, 1]])
    assert (plain.penalties, plain.biases, plain.masks, plain.num_top) == (None, None, None, None)
    assert special.penalties is not None and special.penalties.rows.tolist() == [1]
    assert special.biases is not None and special.biases.rows.tolist() == [1]
    assert special.num_top is not None and special.num_top.tolist() == [0, 2]


def test_a_complete_grammar_wins_over_min_tokens() -> None:
    table = table_of(ask(min_tokens=5, grammar=Grammar(GrammarKind.REGEX, "ab?")))
    slots = np.array([0])

    def next_ids() -> set[int]:
        logits = torch.zeros(1, 262, dtype=torch.float64)
        allowed = Masks(np.array([0]), table.constraint(0).allowed()[None])
        sampled = sample(logits, asking(table.sampling(slots, table.length[slots], allowed), num_top=np.array([20])))
        return set(sampled.top_ids[0].tolist()) - {-1}

    found = [next_ids()]
    for token_id in b"ab":
        table.constraint(0).advance((token_id,))
        table.append(slots, table.length[slots], np.array([token_id]))
        found.append(next_ids())
    # After "a" the end is allowed but too early; after "ab" it is all there is.
    assert found == [{ord("a")}, {ord("b")}, {256}]
