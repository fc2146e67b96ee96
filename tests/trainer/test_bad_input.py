"""T9, T10: what is wrong with a batch, a model or an update is said in one sentence or counted; it never becomes a wrong gradient. On any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.models import tiny
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from transformers import PreTrainedModel

from midflight.config.loss import CorrectionSection, ObjectiveSection
from midflight.errors import RunFailed
from midflight.models.names import named_tensors
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.objective import Objective
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.report import Skip, StepReport
from midflight.types import PackedBatch, Reason

from .fixtures import batch, tiny_model, trainer, weights

ODD = 261
"""A token that is nowhere but where a test puts it."""


def rows_of(data: PackedBatch) -> np.ndarray:
    """Of each token."""
    return np.repeat(np.arange(len(data.row_rollout)), np.diff(data.row_offsets))


def only_rows(data: PackedBatch, *rows: int) -> PackedBatch:
    return replace(data, loss_mask=data.loss_mask & np.isin(rows_of(data), rows))


def with_odd_token(data: PackedBatch, *, row: int | None) -> PackedBatch:
    data.token_ids[data.token_ids == ODD] = 0
    if row is not None:
        data.token_ids[data.row_offsets[row]] = ODD
    return data


def without_a_number() -> PreTrainedModel:
    """What it says of a row is not a number if the odd token is in it."""
    model = tiny.tiny_model(dtype=torch.float64, tied=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[ODD] = torch.nan
    return model


# --- Said at once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, 262, 10**6])
def test_a_token_that_the_vocabulary_has_not_got_is_named_with_its_size(token: int) -> None:
    data, model = batch(), tiny_model()
    data.token_ids[7] = token
    before = weights(model)
    with pytest.raises(RunFailed, match=rf"holds token {token}, and the model's vocabulary ends at 261"):
        trainer(model).step(data)
    assert torch.equal(weights(model), before)


def test_a_row_longer_than_the_context_of_the_model_is_named() -> None:
    with pytest.raises(RunFailed, match=r"a row of \d+ tokens, and the model's context is 64"):
        trainer(tiny_model()).step(batch(longest=90))
    stretched = tiny_model()
    stretched.config.rope_parameters = {**(stretched.config.rope_parameters or {}), "rope_type": "yarn", "factor": 2.0}
    assert trainer(stretched).step(batch(longest=90)).skipped is None


def test_an_alarm_may_end_the_run_with_the_weights_as_they_were() -> None:
    model = tiny_model()
    before = weights(model)
    with pytest.raises(RunFailed, match=r"step to version 1: mean rho is .*trainer.on_alarm"):
        trainer(model, on_alarm="stop").step(replace(batch(), logprobs=batch().logprobs - 9))
    assert torch.equal(weights(model), before)


# --- Counted, and the weights as they were ---------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [np.nan, np.inf, -np.inf])
def test_rewards_that_are_not_finite_are_counted_and_the_rest_is_trained_on(reward: float) -> None:
    data = batch()
    data.rewards[5] = reward
    report = trainer(tiny_model()).step(data)
    assert report.skipped is None and np.isfinite(report.loss) and np.isfinite(report.metrics["reward/mean"])
    assert report.masked == {Reason.NO_REWARD: int(data.loss_mask[data.row_rollout[rows_of(data)] == 5].sum())}
    data.rewards[:] = reward
    assert trainer(tiny_model()).step(data).skipped is Skip.NO_TOKENS


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("kind", ["decoupled_ppo", "gspo", "clip_cov", "kl_cov"])
def test_weights_that_are_all_zero_move_nothing_also_when_they_are_normalised(kind: str, updates: int) -> None:
    model = tiny_model()
    before = weights(model)
    nowhere = {"weight": "mis", "low": 1e8, "high": 1e9, "self_normalised": True}
    loss = Objective.of(ObjectiveSection.model_validate({"kind": kind}), CorrectionSection.model_validate(nowhere))
    report = trainer(model, loss, updates_per_step=updates).step(batch())
    assert (report.loss, report.metrics["grad_norm"], report.metrics["rho/ess"]) == (0, 0, 0)
    assert torch.equal(weights(model), before)


def test_a_group_alone_is_one_update_however_many_were_asked_for() -> None:
    data = batch(num_groups=1)
    one, several = tiny_model(), tiny_model()
    expected, report = trainer(one).step(data), trainer(several, updates_per_step=4).step(data)
    assert report.loss == pytest.approx(expected.loss, rel=1e-9) and report.metrics["step/updates_skipped"] == 0
    assert torch.allclose(weights(several), weights(one), atol=1e-9)


def test_an_alarm_may_hold_one_update_back_and_let_the_others_be_made() -> None:
    data, model = batch(seed=1), tiny_model()
    far = data.rollout_group[data.row_rollout[rows_of(data)]] == 1
    data.logprobs[far] -= 9
    ours = trainer(model, on_alarm="skip", updates_per_step=2)
    before = weights(model)
    report = ours.step(data)
    assert report.skipped is None and report.metrics["step/updates_skipped"] == 1 and ours.num_skipped == 0
    assert not torch.equal(weights(model), before)
    held = ours.step(replace(batch(version=1), logprobs=batch().logprobs - 9))
    assert (held.skipped, held.num_tokens, ours.num_skipped) == (Skip.ALARM, 0, 1)


def test_rows_over_the_budget_are_counted_and_trained_on_as_all_others() -> None:
    whole, split = tiny_model(), tiny_model()
    trainer(whole).step(batch())
    report = trainer(split, micro_batch_tokens=3).step(batch())
    assert report.metrics["rows/oversized"] == len(batch().row_rollout)
    assert torch.allclose(weights(split), weights(whole), atol=1e-9)


# --- On two ranks as on one ------------------------------------------------------------------------------------------

Case = tuple[Callable[[], PreTrainedModel], dict[str, Any], Iterator[PackedBatch]]


def cases() -> dict[str, Case]:
    """A model, options, and batches of versions 0, 1, ..."""
    sound = [batch(seed=8 + v, version=v) for v in range(4)]  # none of these alarms
    alike = [replace(data, rewards=np.ones_like(data.rewards)) for data in sound]
    far = replace(sound[1], logprobs=sound[1].logprobs - 9)
    broken = [with_odd_token(batch(seed=v, version=v), row=4 if v == 1 else None) for v in range(4)]
    calm: dict[str, Any] = {"learning_rate": 1e-4, "weight_decay": 100.0}
    beyond = Objective.of(ObjectiveSection(kind="gspo", kl_coefficient=0.1), CorrectionSection(self_normalised=True, m2po=0.2))
    return {
        "no advantage in the first update": (tiny_model, {**calm, "updates_per_step": 2}, iter(alike)),
        "an alarm holds a step back": (tiny_model, {**calm, "on_alarm": "skip"}, iter([sound[0], far, *sound[2:]])),
        "one rank's loss is not a number": (without_a_number, {**calm, "updates_per_step": 2}, iter(broken)),
        "nothing to train in between": (tiny_model, {"objective": beyond}, iter([sound[0], only_rows(sound[1]), sound[2]])),
        "a rank without a row": (tiny_model, {"objective": beyond, "updates_per_step": 4}, iter([only_rows(sound[0], 3), only_rows(sound[1], 5)])),
    }  # fmt: skip


def outcome(case: Case, ranks: Ranks) -> tuple[torch.Tensor, list[StepReport], bool]:
    """The weights at the end, whole, what was reported, and whether every moment of AdamW belongs to a weight that a checkpoint will find."""
    make, options, batches = case
    model = make()
    ours = trainer(model, ranks=ranks, micro_batch_tokens=60, **options)
    reports, found = [], True
    for data in batches:
        reports.append(ours.step(data))
        found &= set(ours.optimizer.state) <= {parameter for _, parameter in named_parameters(model)}
    whole = (t.full_tensor() if isinstance(t, DTensor) else t for t in named_tensors(model).values())
    return torch.cat([t.detach().nan_to_num().flatten() for t in whole]), reports, found


def one_rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.save({name: outcome(case, Ranks.joined()) for name, case in cases().items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[torch.Tensor, list[StepReport], bool]]]:
    folder = tmp_path_factory.mktemp("ranks")
    start_processes(one_rank, args=(2, str(folder)), nprocs=2, start_method="fork")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", list(cases()))
def test_two_ranks_skip_and_go_on_as_one_does(name: str, of_two: list[dict[str, tuple[torch.Tensor, list[StepReport], bool]]]) -> None:
    expected, reports, _ = outcome(cases()[name], Ranks())
    for found, theirs, moments_are_found in (result[name] for result in of_two):
        assert float((found - expected).norm() / expected.norm()) < 1e-6  # AdamW lifts rounding of tiny gradients
        assert [(r.skipped, r.num_tokens) for r in theirs] == [(r.skipped, r.num_tokens) for r in reports]
        assert [r.loss for r in theirs] == pytest.approx([r.loss for r in reports], rel=1e-6, nan_ok=True)
        assert moments_are_found


def test_the_cases_are_what_they_say() -> None:
    skipped = {name: [report.skipped for report in outcome(case, Ranks())[1]] for name, case in cases().items()}
    assert skipped["an alarm holds a step back"] == [None, Skip.ALARM, None, None]
    assert skipped["nothing to train in between"] == [None, Skip.NO_TOKENS, None]
    _, reports, _ = outcome(cases()["one rank's loss is not a number"], Ranks())
    assert [report.metrics["step/updates_skipped"] for report in reports] == [0, 1, 0, 0]
