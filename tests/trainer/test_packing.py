"""T2: no cross-talk, and a gradient that does not depend on packing or splitting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from midflight.config.loss import ObjectiveSection
from midflight.errors import ConfigError
from midflight.trainer.model import attention
from midflight.trainer.model.microbatch import Predictions, predictions_of, split
from midflight.trainer.model.policy import Policy
from midflight.trainer.objective import Objective

from .fixtures import batch, tiny_model, trainer, weights, with_rows_in_order

CPU = torch.device("cpu")


def all_predictions(seed: int = 0) -> Predictions:
    data = batch(seed=seed)
    return predictions_of(data.token_ids, data.row_offsets, mask=data.loss_mask)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_log_probabilities_equal_those_of_each_row_alone(temperature: float) -> None:
    data, model = batch(), tiny_model()
    expected: list[float] = []
    for begin, end in zip(data.row_offsets, data.row_offsets[1:], strict=False):
        ids = torch.from_numpy(data.token_ids[begin:end].astype(np.int64))
        table = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
        expected += [float(table[t - 1, ids[t]].detach()) for t in range(1, len(ids)) if data.loss_mask[begin + t]]
    policy = Policy(model)
    predictions = all_predictions()
    found = torch.zeros(len(predictions.targets), dtype=torch.float64)
    for micro in split(predictions, np.arange(len(found)), budget=60, device=CPU):
        found[micro.predictions] = policy(micro, temperature=temperature)[0].detach()
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-12)


def test_micro_batches_keep_the_budget_without_padding_and_hold_every_prediction_once() -> None:
    predictions = all_predictions()
    parts = list(split(predictions, np.arange(len(predictions.targets)), budget=40, device=CPU))
    assert len(parts) > 3
    assert all(p.input_ids.shape[1] <= 40 and p.runs.num_tokens == p.input_ids.shape[1] for p in parts)
    assert sorted(torch.cat([p.predictions for p in parts]).tolist()) == list(range(len(predictions.targets)))
    # Nothing follows a row's last prediction, so the inputs end there.
    needed = sum(int(predictions.inputs[predictions.row == r].max() - predictions.offsets[r]) + 1 for r in np.unique(predictions.row))
    assert sum(p.input_ids.shape[1] for p in parts) == needed


def test_a_row_longer_than_the_budget_goes_alone_and_is_counted() -> None:
    data = batch()
    report = trainer(tiny_model(), micro_batch_tokens=10).step(data)
    assert report.metrics["rows/oversized"] == float((np.diff(data.row_offsets) - 1 > 10).sum())
    assert report.metrics["rows/oversized"] > 3


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_the_gradient_is_independent_of_packing_and_split(reduction: str) -> None:
    data = batch()
    reordered = with_rows_in_order(data, list(reversed(range(len(data.row_rollout)))))
    objective = Objective.of(ObjectiveSection(reduction=reduction), constant_length=16)  # type: ignore[arg-type]
    start = weights(tiny_model())
    moves: list[torch.Tensor] = []
    reports = []
    for source, budget in ((data, 4096), (data, 40), (data, 1), (reordered, 70)):
        model = tiny_model()
        # A gradient below the clip and a first step without moments would show its sign only; SGD shows the gradient itself.
        ours = trainer(model, objective, micro_batch_tokens=budget, max_grad_norm=1e9)
        ours.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # type: ignore[assignment]
        reports.append(ours.step(source))
        moves.append(weights(model) - start)
    assert float(moves[0].norm()) > 1e-6
    for move, report in zip(moves[1:], reports[1:], strict=True):
        assert float((move - moves[0]).norm() / moves[0].norm()) < 1e-12
        assert report.loss == pytest.approx(reports[0].loss, rel=1e-12)
        assert report.metrics["rho/chi2_sequence"] == pytest.approx(reports[0].metrics["rho/chi2_sequence"], rel=1e-10)


def test_a_sliding_window_is_honoured() -> None:
    ids = torch.arange(20)[None]
    model = tiny_model()
    model.config.layer_types = ["sliding_attention"] * 2
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 5
        layer.self_attn.layer_type = "sliding_attention"
    model.model.has_sliding_layers = True
    model.config.sliding_window = 5
    model.config._attn_implementation = "eager"
    expected = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1).detach()
    policy = Policy(model)
    predictions = predictions_of(ids[0].numpy().astype(np.int32), np.array([0, 20], np.int32), mask=np.arange(20) > 0)
    (micro,) = split(predictions, np.arange(19), budget=64, device=CPU)
    assert policy(micro, temperature=1.0)[0].detach().numpy() == pytest.approx(expected.numpy(), abs=1e-6)


def test_what_the_attention_does_not_compute_is_refused() -> None:
    x = torch.randn(1, 2, 3, 4)
    with attention.packed_runs(attention.Runs.of_one(3)):
        with pytest.raises(ConfigError, match="a mask of its own"):
            attention.ragged_attention(nn.Module(), x, x, x, torch.zeros(1, 1, 3, 3))
        with pytest.raises(ConfigError, match="position_bias"):
            attention.ragged_attention(nn.Module(), x, x, x, None, position_bias=torch.zeros(3, 3))


@pytest.mark.parametrize("window", [None, 5])
def test_one_kernel_for_all_rows_is_told_where_they_begin(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention needs a GPU: a stand-in with its signature attends row by row, as its documentation says."""

    def stand_in(q, k, v, begins, key_begins, longest, longest_key, *, softmax_scale, causal, window_size):
        assert causal and begins.dtype == key_begins.dtype == torch.int32
        assert (longest, longest_key) == (int(begins.diff().max()), int(key_begins.diff().max()))
        rows = []
        for number in range(len(begins) - 1):
            own, seen = (slice(int(x[number]), int(x[number + 1])) for x in (begins, key_begins))
            late = (seen.stop - seen.start) - (own.stop - own.start)  # causal from the lower right
            distance = late + torch.arange(own.stop - own.start)[:, None] - torch.arange(seen.stop - seen.start)
            allowed = (distance >= 0) & ((window_size[0] < 0) | (distance <= window_size[0]))
            parts = (x[span].transpose(0, 1) for x, span in ((q, own), (k, seen), (v, seen)))
            out = nn.functional.scaled_dot_product_attention(*parts, attn_mask=allowed, scale=softmax_scale, enable_gqa=True)
            rows.append(out.transpose(0, 1))
        return torch.cat(rows)

    torch.manual_seed(0)
    # A prompt of 3 tokens that two rows of 4 share, and a row of 8 by itself.
    keys = torch.tensor([*range(3), *range(3), *range(3, 7), *range(3), *range(7, 11), *range(11, 19)])
    runs = attention.Runs(counts=(1, 2, 1), lengths=(3, 4, 8), contexts=(0, 3, 0), keys=keys)
    query, key, value = (torch.randn(1, heads, 19, 4) for heads in (4, 2, 2))
    with attention.packed_runs(runs):
        expected, _ = attention.ragged_attention(nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window)
    monkeypatch.setattr(attention, "flash_varlen", stand_in)
    found = attention._flash(query, key, value, runs, scaling=0.3, sliding_window=window, softcap=None)
    assert torch.allclose(found, expected, atol=1e-6)
