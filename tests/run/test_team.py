"""One trainer, or several as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.trainer.fixtures import batch, tiny_model, trainer

from midflight.run.parts import Alarm, PartLost
from midflight.run.trainer.team import Team, together
from midflight.trainer.model.policy import Ranks
from midflight.trainer.step import StepReport
from midflight.types import PackedBatch


class Alarmed:
    """A trainer whose steps report what they are told to."""

    ranks = Ranks()

    def __init__(self, *alarms: tuple[str, ...]) -> None:
        self._alarms = iter(alarms)
        self.version = 0

    def step(self, batch: PackedBatch) -> StepReport:
        self.version += 1
        return StepReport(self.version, 0.0, 0, {}, {}, alarms=next(self._alarms))


def test_an_alarm_is_told_when_it_begins(tmp_path: Path) -> None:
    told: list[Alarm] = []
    team = Team(Alarmed(("k1 is 1",), ("k1 is 2",), (), ("k1 is 3",)), tmp_path, keep=1, tell=told.append)  # type: ignore[arg-type]
    for _ in range(4):
        team.step(batch())
    assert [alarm.text.split(". ")[0] for alarm in told] == ["the step to version 1: k1 is 1", "the step to version 4: k1 is 3"]


def test_alone_the_weights_handed_over_are_the_models_own(tmp_path: Path) -> None:
    model = tiny_model()
    team = Team(trainer(model), tmp_path, keep=1, tell=lambda _: None)
    tensors, storages = team.weights(), {p.data_ptr() for p in model.parameters()}
    assert tensors and all(isinstance(t, torch.Tensor) and t.data_ptr() in storages for t in tensors.values())
    team.end()


def test_a_broken_connection_is_another_ranks_death_and_any_other_error_is_ones_own() -> None:
    with pytest.raises(PartLost, match="another rank is gone"), together():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    with pytest.raises(RuntimeError, match="shapes") as caught, together():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not isinstance(caught.value, PartLost)
