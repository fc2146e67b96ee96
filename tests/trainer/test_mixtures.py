"""Mixtures of experts in the trainer: exact when packed, and sending tokens where the engine sent them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engines.models import ask, make_engine
from tests.models.mixtures import tiny_mixture
from transformers import PreTrainedModel

from midflight.engines.embedded.engine import EmbeddedEngine
from midflight.models.routing import routers_of
from midflight.trainer.model.microbatch import Layout, Predictions, predictions_of, split
from midflight.trainer.model.policy import Policy
from midflight.types import PackedBatch

from .fixtures import batch, trainer

CPU = torch.device("cpu")


def scores(policy: Policy, predictions: Predictions) -> torch.Tensor:
    found = torch.zeros(len(predictions.targets))
    with torch.no_grad():
        for micro in split(predictions, np.arange(len(found)), budget=60, device=CPU, layout=policy.layout):
            found[micro.predictions] = policy(micro, temperature=0.7)[0]
    return found


def rows_alone(model: PreTrainedModel, data: PackedBatch) -> torch.Tensor:
    """The same by the model's own forward of each row. [K]"""
    found: list[torch.Tensor] = []
    for begin, end in zip(data.row_offsets, data.row_offsets[1:], strict=False):
        ids = torch.from_numpy(data.token_ids[begin:end].astype(np.int64))
        table = (model(ids[None], use_cache=False).logits[0] / 0.7).log_softmax(-1)
        found += [table[t - 1, ids[t]] for t in range(1, len(ids)) if data.loss_mask[begin + t]]
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_packed_rows_of_a_mixture_have_the_log_probabilities_and_gradients_of_each_row_alone(kind: str) -> None:
    data, plain = batch(), tiny_mixture(kind)
    expected = rows_alone(plain, data)
    weighing = torch.linspace(-1, 1, len(expected))
    (expected * weighing).sum().backward()
    policy = Policy(tiny_mixture(kind))
    predictions = predictions_of(data.token_ids, data.row_offsets, mask=data.loss_mask)
    for micro in split(predictions, np.arange(len(expected)), budget=60, device=CPU):
        found, _ = policy(micro, temperature=0.7)
        assert (found - expected[micro.predictions]).abs().max() < 1e-4
        (found * weighing[micro.predictions]).sum().backward()
    for (name, ours), theirs in zip(policy.model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= 1e-4 * theirs.grad.norm() + 1e-7, name


def with_record(data: PackedBatch, model: PreTrainedModel, *, beyond: int) -> PackedBatch:
    """With the experts that the model chooses for each row, each `beyond` places further; of a row's last token none."""
    routers = routers_of(model)
    assert routers is not None
    record = np.full((len(data.token_ids), routers.num_bytes), 255, np.uint8)
    for begin, end in zip(data.row_offsets, data.row_offsets[1:], strict=False):
        with torch.no_grad(), routers.recording() as chosen:
            model(torch.from_numpy(data.token_ids[begin:end].astype(np.int64))[None], use_cache=False)
        record[begin : end - 1] = (routers.packed(chosen)[:-1] + beyond) % 8
    return replace(data, experts=record)


@pytest.mark.parametrize("layout", [Layout.PACKED, Layout.PADDED])
def test_a_recorded_choice_is_repeated_and_another_is_taken_as_it_was_recorded(layout: Layout) -> None:
    data = batch()
    own = scores(Policy(tiny_mixture("qwen3_moe")), predictions_of(data.token_ids, data.row_offsets, mask=data.loss_mask))
    for beyond, most in ((0, 1e-5), (1, 9.0)):
        given = with_record(data, tiny_mixture("qwen3_moe"), beyond=beyond)
        predictions = predictions_of(given.token_ids, given.row_offsets, mask=given.loss_mask, experts=given.experts)
        difference = (scores(Policy(tiny_mixture("qwen3_moe"), layout, replays=True), predictions) - own).abs().max()
        assert difference < most if beyond == 0 else difference > 0.1
        assert torch.equal(scores(Policy(tiny_mixture("qwen3_moe")), predictions), own), "without replay a record changes nothing"


def test_activations_that_are_computed_again_go_to_the_same_experts() -> None:
    data = with_record(batch(), tiny_mixture("qwen3_moe"), beyond=1)
    moved = []
    for again in (False, True):
        model = tiny_mixture("qwen3_moe")
        report = trainer(model, routing_replay=True, activation_checkpointing=again, micro_batch_tokens=60).step(data)
        assert report.metrics["experts/recorded_share"] == 1.0
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*moved)


def sampled_in_half_precision() -> PackedBatch:
    """Answers of an engine in bfloat16 under float32 weights that were rounded for it, as rows with the experts that it chose."""
    engine: EmbeddedEngine = make_engine(tiny_mixture("qwen3_moe", dtype=torch.bfloat16), records_experts=True, max_running=16)
    requests = [ask(f"{n} and a prompt", request_id=str(n), max_tokens=24, seed=n) for n in range(16)]
    answers = engine.generate_all(requests)
    ids = [(*request.input_ids, *answer.token_ids) for request, answer in zip(requests, answers, strict=True)]
    prompts = [len(request.input_ids) for request in requests]
    offsets = np.cumsum([0, *map(len, ids)]).astype(np.int32)
    number = len(ids)
    return PackedBatch(
        lease=1,
        train_version=0,
        token_ids=np.concatenate(ids).astype(np.int32),
        loss_mask=np.concatenate([np.arange(len(row)) >= prompt for row, prompt in zip(ids, prompts, strict=True)]),
        logprobs=np.concatenate([(*[0.0] * p, *answer.logprobs) for p, answer in zip(prompts, answers, strict=True)]).astype(np.float32),
        versions=np.zeros(offsets[-1], np.int32),
        kv_versions=np.zeros(offsets[-1], np.int32),
        row_offsets=offsets,
        row_rollout=np.arange(number, dtype=np.int32),
        rewards=np.arange(number, dtype=np.float32) % 2,
        rollout_group=np.arange(number, dtype=np.int32) // 4,
        truncated=np.zeros(number, np.bool_),
        experts=np.concatenate([np.frombuffer(a.experts, np.uint8).reshape(len(row), -1) for a, row in zip(answers, ids, strict=True)]),
    )


def test_with_replay_engine_and_trainer_differ_by_rounding_and_without_it_by_experts() -> None:
    data, found = sampled_in_half_precision(), list[float]()
    for replays in (True, False):
        ours = trainer(tiny_mixture("qwen3_moe", dtype=torch.bfloat16).float(), routing_replay=replays, learning_rate=0.0)
        found.append(ours.step(data).metrics["mismatch/k3"])
    assert found[0] < 0.3 * found[1], found
