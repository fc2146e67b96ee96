import math
from dataclasses import fields

import numpy as np
import pytest
import torch

from midflight.engines.embedded import sampler
from midflight.engines.embedded.sampler import Biases, Masks, Penalties, SamplingBatch, gumbel_noise, sample

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & MASK
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def noise(seed: int, position: int, token_id: int) -> float:
    key = mix((mix(seed) + (position + 1) * GAMMA) & MASK)
    bits = mix((key + (token_id + 1) * GAMMA) & MASK)
    return -math.log(-math.log(((bits >> 11) + 0.5) * 2.0**-53))


def batch(
    rows: int = 1, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0, suppressed: int = -1
) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(rows, temperature),
        top_p=np.full(rows, top_p),
        top_k=np.full(rows, top_k),
        min_p=np.full(rows, min_p),
        seeds=np.arange(rows),
        positions=np.zeros(rows, dtype=np.int64),
        suppressed=np.full((rows, 1), suppressed),
    )


def distribution(probabilities: list[float], settings: SamplingBatch) -> dict[int, float]:
    """Every token that many seeds sample, with its recorded probability."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().expand(len(settings.seeds), -1)
    sampled = sample(logits, settings)
    return {int(t): math.exp(p) for t, p in zip(sampled.token_ids, sampled.logprobs, strict=True)}


def test_i5_the_noise_is_splitmix64_written_out_in_integers() -> None:
    """I5: noise is a function of seed, position and id alone; seeds use all 64 bits."""
    seeds, positions = [0, 1, 2**63 + 12345, 2**64 - 1], [0, 3, 40_000, 7]
    found = gumbel_noise(np.array(seeds, dtype=np.uint64).astype(np.int64), np.array(positions), vocab_size=50, device=torch.device("cpu"))
    expected = [[noise(s, p, j) for j in range(50)] for s, p in zip(seeds, positions, strict=True)]
    assert np.allclose(found.numpy(), expected, rtol=0, atol=1e-12)


def test_i5_rows_that_are_drawn_apart_get_the_tokens_that_they_get_together(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    together = sample(logits, batch(7, suppressed=3))
    monkeypatch.setattr(sampler, "_AT_ONCE", 101)  # two rows
    apart = sample(logits, batch(7, suppressed=3))
    assert (apart.token_ids.tolist(), apart.logprobs.tolist()) == (together.token_ids.tolist(), together.logprobs.tolist())


def test_frequencies_are_the_probabilities_and_logprobs_are_theirs() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, -1)
    sampled = sample(logits, batch(20_000))
    assert np.bincount(sampled.token_ids) / 20_000 == pytest.approx([0.5, 0.3, 0.2], abs=0.015)
    assert np.exp(sampled.logprobs) == pytest.approx(np.array([0.5, 0.3, 0.2])[sampled.token_ids], abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (batch(400, top_k=2), {0: 4 / 7, 1: 3 / 7}),
        (batch(400, top_p=0.5), {0: 4 / 7, 1: 3 / 7}),
        (batch(400, top_p=0.4), {0: 1.0}),
        (batch(400, min_p=0.5), {0: 4 / 9, 1: 3 / 9, 2: 2 / 9}),
        # Top-k leaves 4/9, 3/9, 2/9; of these 0.7 of the mass needs the first two.
        (batch(400, top_k=3, top_p=0.7), {0: 4 / 7, 1: 3 / 7}),
        # Temperature 1/2 squares: 16, 9, 4, 1 of 30; a fifth of the largest is 3.2.
        (batch(400, temperature=0.5, min_p=0.2), {0: 16 / 29, 1: 9 / 29, 2: 4 / 29}),
        (batch(400, suppressed=0), {1: 3 / 6, 2: 2 / 6, 3: 1 / 6}),
        # Greedy: of temperature 1, and not truncated.
        (batch(4, temperature=0.0, top_k=2), {0: 0.4}),
        (batch(4, temperature=0.0, suppressed=0), {1: 3 / 6}),
    ],
)
def test_the_recorded_probability_is_of_the_truncated_renormalised_distribution(
    settings: SamplingBatch, expected: dict[int, float]
) -> None:
    assert distribution([0.4, 0.3, 0.2, 0.1], settings) == pytest.approx(expected, abs=1e-9)


def test_equal_logits_at_the_border_of_top_k_keep_the_lower_id() -> None:
    assert set(distribution([0.25, 0.25, 0.25, 0.25], batch(200, top_k=2))) == {0, 1}


def test_truncated_and_plain_rows_of_one_batch_do_not_disturb_each_other() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    mixed = batch(3)
    mixed.top_p[1], mixed.temperature[2] = 0.5, 0.0
    all_rows = sample(logits, mixed)
    columns = [f.name for f in fields(SamplingBatch) if getattr(mixed, f.name) is not None]
    for row in range(3):
        alone = sample(logits[row : row + 1], SamplingBatch(**{f: getattr(mixed, f)[row : row + 1] for f in columns}))
        assert (alone.token_ids[0], alone.logprobs[0]) == (all_rows.token_ids[row], all_rows.logprobs[row])


def test_rows_that_are_sampled_a_few_at_a_time_have_what_all_at_once_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows ask for: penalties, biases, grammars, likeliest ids of several numbers, records of what truncation left."""
    draw = np.random.default_rng(0)
    logits = torch.from_numpy(draw.normal(size=(7, 50)) * 3)
    tokens = draw.integers(0, 50, (2, 9))
    allowed = np.zeros((1, 50), dtype=np.bool_)
    allowed[0, :5] = True
    batch = SamplingBatch(
        temperature=np.array([1.0, 0.0, 0.7, 1.0, 1.0, 2.0, 1.0]),
        top_p=np.array([1.0, 1.0, 0.8, 1.0, 0.5, 1.0, 1.0]),
        top_k=np.array([0, 0, 0, 4, 0, 0, 0]),
        min_p=np.zeros(7),
        seeds=np.arange(7),
        positions=np.arange(7) + 3,
        suppressed=None,
        penalties=Penalties(
            np.array([1, 4]), tokens, np.array([4, 4]), np.array([9, 8]), np.full(2, 1.3), np.full(2, 0.2), np.full(2, 0.1)
        ),
        biases=Biases(np.array([0, 6]), np.array([3, 4]), np.array([50.0, 50.0])),
        masks=Masks(np.array([5]), allowed),
        num_top=np.array([0, 3, 0, 5, 0, 0, 1]),
        wants_kept=np.array([False, False, True, True, True, False, False]),
    )
    whole = sample(logits, batch)
    assert whole.token_ids[0] == 3 and whole.token_ids[6] == 4 and whole.token_ids[5] < 5
    for at_once in (1, 100, 150):
        monkeypatch.setattr(sampler, "_AT_ONCE", at_once)
        parts = sample(logits, batch)
        assert parts.token_ids.tolist() == whole.token_ids.tolist()
        assert np.allclose(parts.logprobs, whole.logprobs, rtol=0, atol=1e-12)
        assert parts.top_ids.tolist() == whole.top_ids.tolist()
        assert np.allclose(parts.top_logprobs, whole.top_logprobs, rtol=0, atol=1e-12)
        assert parts.kept == whole.kept


def test_the_few_ids_that_are_looked_at_closely_have_the_winner_among_them() -> None:
    """Against the noise of all ids, for peaked and for flat rows."""
    draw = np.random.default_rng(1)
    for spread in (0.0, 1.0, 10.0, 100.0):
        logits = torch.from_numpy(draw.normal(size=(200, 300)) * spread)
        seeds, positions = np.arange(200), np.arange(200) * 7
        log_p = logits.log_softmax(-1)
        noise = gumbel_noise(seeds, positions, vocab_size=300, device=torch.device("cpu"))
        ones = np.ones(200)
        batch = SamplingBatch(ones, ones, np.zeros(200, np.int64), np.zeros(200), seeds, positions, None)
        assert sample(logits, batch).token_ids.tolist() == (log_p + noise).argmax(-1).tolist()
