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
from midflight.models.names import named_tensors
from midflight.trainer.objective import Objective
from midflight.trainer.optimizer import named_parameters
from midflight.trainer.ranks import Ranks
from midflight.trainer.step import Skip, StepReport
from midflight.types import PackedBatch

from .fixtures import batch, tiny_model, trainer

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
