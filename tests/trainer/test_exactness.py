"""T1, T2: the gradient of a step is the same however its rows are packed, split, recomputed or weighed in parts."""

from __future__ import annotations

from shutil import which
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from midflight.config.loss import CorrectionSection, ObjectiveSection
from midflight.models.names import named_tensors
from midflight.trainer.model.scores import token_scores
from midflight.trainer.objective import Objective
from midflight.types import PackedBatch

from .fixtures import batch, tiny_model, trainer, weights, with_rows_in_order

LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "self-normalised sequence weights": ({}, {"weight": "tis_sequence", "self_normalised": True, "age_decay": 0.9}),
    "sequence MIS, every mask": (
        {"reduction": "sequence_mean"},
        {"weight": "mis_sequence", "low": 1e-6, "high": 1e6, "geometric_low": 0.9, "geometric_high": 1.2, "veto_low": 1e-3, "k3_max": 0.5, "m2po": 0.2, "opsm": 0.01},
    ),
    "gspo": ({"kind": "gspo"}, {"weight": "icepop"}),
    "gmpo": ({"kind": "gmpo"}, {"weight": "mis"}),
    "topr": ({"kind": "topr"}, {}),
    "clip_cov": ({"kind": "clip_cov", "share": 0.1}, {}),
    "kl_cov": ({"kind": "kl_cov", "share": 0.1}, {}),
    "sapo, reference and entropy": ({"kind": "sapo", "kl_coefficient": 0.1, "kl": "unbiased", "entropy_coefficient": 0.01}, {}),
    "interpolated": ({"proximal": "interpolated"}, {}),
    "ipo, product mask and a pull to the behaviour policy": (
        {"kind": "ipo", "delta": 0.003, "advantage": "maxrl", "behaviour_coefficient": 0.01, "kl_coefficient": 0.1, "kl": "abs_k1"},
        {"product_low": 0.1, "product_high": 30.0},
    ),
    "clip_cov in a band": ({"kind": "clip_cov", "share": 0.1, "cov_low": 0.05, "cov_high": 0.6}, {}),
}  # fmt: skip


def objective(name: str) -> Objective:
    first, second = LOSSES[name]
    return Objective.of(ObjectiveSection.model_validate(first), CorrectionSection.model_validate(second), constant_length=16)


def aged() -> PackedBatch:
    data = batch(version=2)
    data.versions[:] = np.arange(len(data.versions)) % 3
    return data


def move(data: PackedBatch, loss: Objective, **options: Any) -> tuple[torch.Tensor, float, dict[str, float]]:
    """How one step of plain gradient descent changes the weights: the sum of its updates' gradients."""
    model = tiny_model()
    start = weights(model)
    ours = trainer(model, loss, max_grad_norm=1e9, version=2, reference=tiny_model(seed=1), **options)
    ours.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[assignment]
    report = ours.step(data)
    return weights(model) - start, report.loss, dict(report.metrics)


@pytest.mark.timeout(1800)  # a C++ compiler beside other work
@pytest.mark.skipif(which("g++") is None, reason="PyTorch compiles for CPUs by a C++ compiler")
def test_compiled_layers_keep_their_names_and_move_the_same_way() -> None:
    data, loss = aged(), objective("default")
    model = tiny_model()
    names = list(named_tensors(model))
    trainer(model, loss, compile=True)
    assert list(named_tensors(model)) == names
    plain, _, _ = move(data, loss)
    found, _, _ = move(data, loss, compile=True)
    assert float((found - plain).norm() / plain.norm()) < 1e-10


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_does_not_depend_on_packing_split_or_recomputation(name: str) -> None:
    data, loss = aged(), objective(name)
    reordered = with_rows_in_order(data, list(reversed(range(len(data.row_rollout)))))
    whole, value, metrics = move(data, loss, updates_per_step=2)
    assert float(whole.norm()) > 1e-6
    for source, options in (
        (data, {"micro_batch_tokens": 40}),
        (data, {"activation_checkpointing": True}),
        (reordered, {"micro_batch_tokens": 70}),
    ):
        found, other, read = move(source, loss, updates_per_step=2, **options)
        assert float((found - whole).norm() / whole.norm()) < 1e-12
        assert other == pytest.approx(value, rel=1e-12)
        assert read["rho/ess"] == pytest.approx(metrics["rho/ess"], rel=1e-10)
        assert {k: v for k, v in read.items() if k.startswith("masked/")} == {k: v for k, v in metrics.items() if k.startswith("masked/")}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_of_a_large_vocabulary_in_chunks_have_the_values_and_gradients_of_the_whole(temperature: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, 3, 3, 7, 1, 2])
    by_logprob, by_entropy = torch.randn(2, 7, dtype=torch.float64)

    table = (torch.nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    plain = (table.gather(-1, targets[:, None]).squeeze(-1), -(table.exp() * table).sum(-1))
    expected = torch.autograd.grad(plain[0] @ by_logprob + plain[1] @ by_entropy, [hidden, weight, bias])
    for chunk in (10**6, 22, 1):
        found = token_scores(hidden, weight, bias, targets, temperature=temperature, with_entropy=True, chunk=chunk)
        assert found[1] is not None
        gradients = torch.autograd.grad(found[0] @ by_logprob + found[1] @ by_entropy, [hidden, weight, bias])
        for ours, theirs in zip((*found, *gradients), (*plain, *expected), strict=True):
            assert ours is not None and torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
        assert torch.autograd.gradcheck(
            lambda h, w, c=chunk: token_scores(h, w, bias, targets, temperature=temperature, with_entropy=True, chunk=c), (hidden, weight)
        )


class Largest(TorchDispatchMode):
    """Notes the most elements that any tensor has which is made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))])
        return found


def test_no_tensor_grows_with_predictions_times_vocabulary() -> None:
    """T3 at 150 000 entries: the logits of 600 predictions would be 90 million numbers; forward and backward make a hundredth of them at once."""
    vocabulary, width, count, chunk = 150_000, 4, 600, 10**6
    hidden = torch.randn(count, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    with Largest() as largest:
        scores, entropy = token_scores(hidden, weight, None, torch.arange(count), temperature=1.0, with_entropy=True, chunk=chunk)
        assert entropy is not None
        (scores.sum() + entropy.sum()).backward()
    assert largest.elements <= max(chunk, vocabulary * width) < vocabulary * count / 80


def test_bfloat16_forwards_leave_full_precision_weights_that_take_small_steps() -> None:
    model = tiny_model(torch.float32)
    ours = trainer(model, compute_dtype=torch.bfloat16, learning_rate=1e-6)
    before = weights(model)
    report = ours.step(batch())
    assert report.skipped is None and model.dtype == torch.float32
    moved = (weights(model) - before).abs()
    assert 0 < float(moved.max()) < 1e-5  # a step that bfloat16 weights would round away
    exact = trainer(tiny_model(torch.float32)).step(batch())
    assert report.loss == pytest.approx(exact.loss, abs=0.02) and report.loss != exact.loss
