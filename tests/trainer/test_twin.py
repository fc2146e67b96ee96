"""The trainer against `examples/one_file_grpo.py` (I2): the same rollouts give the same losses and weights."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from midflight.trainer.step import Schedule
from midflight.types import PackedBatch

from .fixtures import tiny_model, trainer, weights

TASKS = [("a", "b"), ("b", "c"), ("cd", "dc"), ("d", "a")]


@pytest.fixture(scope="module")
def twin() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"
    spec = importlib.util.spec_from_file_location("one_file_grpo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def packed(rollouts: list[Any], *, version: int, samples: int) -> PackedBatch:
    lengths = [len(r.prompt) + len(r.answer) for r in rollouts]
    num_tokens = sum(lengths)
    return PackedBatch(
        lease=version,
        train_version=version,
        token_ids=np.concatenate([r.prompt + r.answer for r in rollouts]).astype(np.int32),
        loss_mask=np.concatenate([[False] * len(r.prompt) + [True] * len(r.answer) for r in rollouts]),
        logprobs=np.concatenate([[0.0] * len(r.prompt) + r.logprobs for r in rollouts]).astype(np.float32),
        versions=np.full(num_tokens, version, np.int32),
        kv_versions=np.full(num_tokens, version, np.int32),
        row_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        row_rollout=np.arange(len(rollouts), dtype=np.int32),
        rewards=np.array([r.reward for r in rollouts], np.float32),
        rollout_group=np.repeat(np.arange(len(rollouts) // samples), samples).astype(np.int32),
        truncated=np.array([r.answer[-1] != 256 for r in rollouts]),
    )


def test_i2_three_steps_on_the_twins_rollouts_give_its_losses_and_weights(twin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # A model that knows nothing never matches an answer; a reward that varies among its answers exercises the same arithmetic.
    monkeypatch.setattr(twin, "exact_match", lambda rollout, answer: float(rollout.answer[0] % 3 == 0))
    model, ours_model = tiny_model(), tiny_model()
    steps = twin.run(
        model, TASKS, steps=3, groups=3, samples=4, max_tokens=5, temperature=0.9, learning_rate=1e-2, warmup_steps=2, max_grad_norm=0.5
    )
    ours = trainer(
        ours_model, schedule=Schedule(warmup_steps=2), learning_rate=1e-2, max_grad_norm=0.5, temperature=0.9, micro_batch_tokens=50
    )
    for version, step in enumerate(steps):
        assert len({r.reward for r in step.rollouts}) == 2
        report = ours.step(packed(step.rollouts, version=version, samples=4))
        assert report.loss == pytest.approx(step.loss, abs=1e-9)
        assert report.metrics["rho/mean"] == pytest.approx(1.0, abs=1e-6)
    assert float((weights(tiny_model()) - weights(model)).abs().max()) > 1e-3
    assert float((weights(ours_model) - weights(model)).abs().max()) < 1e-9


def test_an_answer_does_not_depend_on_what_is_sampled_beside_it(twin: ModuleType) -> None:
    model, prompt = tiny_model(), twin.chat("abc")
    together = twin.sample_group(model, prompt, [5, 6, 7], max_tokens=6, temperature=1.0)
    alone = [twin.sample_group(model, prompt, [seed], max_tokens=6, temperature=1.0)[0] for seed in (5, 6, 7)]
    assert [r.answer for r in together] == [r.answer for r in alone]
    assert len({tuple(r.answer) for r in together}) == 3


def test_the_noise_is_that_of_splitmix64_written_with_plain_integers(twin: ModuleType) -> None:
    all_bits, gamma = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & all_bits
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & all_bits
        return z ^ (z >> 31)

    seed, position, token = 2**63 + 12345, 17, 201
    key = mix((mix(seed) + (position + 1) * gamma) & all_bits)
    bits = mix((key + (token + 1) * gamma) & all_bits)
    uniform = ((bits >> 11) + 0.5) * 2.0**-53
    assert twin.gumbel(seed, position)[token] == pytest.approx(-np.log(-np.log(uniform)), rel=1e-15)


def test_sampling_follows_the_policy(twin: ModuleType) -> None:
    # Gumbel-max over 262 candidates of equal probability: each is drawn about equally often, here by halves of the vocabulary.
    draws = [int(twin.gumbel(seed, 3).argmax()) < 131 for seed in range(2000)]
    assert 0.46 < np.mean(draws) < 0.54


def test_a_reward_needs_the_whole_answer_and_nothing_else(twin: ModuleType) -> None:
    def reward(ids: list[int]) -> float:
        return twin.exact_match(twin.Rollout([1], ids, [0.0] * len(ids)), "ab")

    assert [reward([97, 98, 256]), reward([97, 98]), reward([97, 98, 99, 256]), reward([97, 256])] == [1.0, 1.0, 0.0, 0.0]


def test_the_twin_reads_a_model_folder(twin: ModuleType, tmp_path: Path) -> None:
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path)
    loaded = twin.load(str(tmp_path), dtype=torch.float64)
    assert loaded.dtype == torch.float64
    assert torch.equal(weights(loaded).float(), weights(model))
