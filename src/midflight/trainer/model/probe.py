"""Finds the layout in which the trainer's results equal the model's, before a run costs anything.

Four rows, two of which begin alike, go through `Policy` as in a step, and each through the model
alone. Log-probabilities and the gradient of a step must agree. The first layout in which they do is
the one to train with.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from midflight.errors import ConfigError
from midflight.models.proof import (
    TOLERANCE,
    Proof,
    Row,
    Way,
    attention_of,
    described,
    eagerly,
    looks_ahead,
    own_logprobs,
    prove_small,
    rows_to_try,
)
from midflight.trainer.model.microbatch import Index, Layout, Predictions, split
from midflight.trainer.model.policy import Policy
from midflight.trainer.model.ranks import Ranks

PART = "trainer"
TEMPERATURE = 0.7
"""Not 1, so that a temperature in the wrong place shows."""
_REMEDY = "Choose an architecture from docs/models.md."


def prove(model: PreTrainedModel, *, max_context: int | None = None) -> Proof:
    """Proves how the trainer computes this model; `Proof.layout` names the layout. A copy is tried,
    so the model stays as it is. This takes seconds.

    For a large model a small copy of its configuration is tried, and the result is kept.
    `max_context` is the longest row of the run.
    """
    return prove_small(PART, model, prove_itself, max_context=max_context)


def proven_layout(
    model: PreTrainedModel, *, max_context: int | None = None
) -> tuple[Layout, Proof]:
    """The layout to train the model with. Raises `ConfigError` if there is none in which its
    numbers are right.
    """
    found = prove(model, max_context=max_context)
    if not found.is_right:
        raise ConfigError(f"training {type(model).__name__}: {found.reason}")
    return Layout(found.layout), found


def shared_layout(layout: Layout | None) -> Layout:
    """The layout that the first rank has proven. The others have none, and no weights to prove one
    with.
    """
    layouts = list(Layout)
    number = -1 if layout is None else layouts.index(layout)
    return layouts[Ranks.joined().largest(number)]


def prove_itself(model: PreTrainedModel, max_context: int | None = None) -> Proof:
    """The proof for this model as it is, on its own device, whatever its size. It must be in float32.
    Its gradients are changed.
    """
    rows = rows_to_try(model, max_context=max_context)
    own = attention_of(model)
    with eagerly(model):
        ahead = looks_ahead(model, rows[0])
    if ahead is not None:
        return Proof(PART, Way.REFUSED, reason=ahead)
    trial = _RowsTried(rows)
    try:
        expected = trial.of_the_model(model)
    except ConfigError:
        raise
    except Exception as error:  # an architecture may raise anything
        reason = (
            f"the backward of {type(model).__name__}'s own forward raises "
            f"{described(error)}. {_REMEDY}"
        )
        return Proof(PART, Way.REFUSED, reason=reason)
    closest = (inf, inf)
    failed: list[str] = []
    for layout in Layout:
        model.set_attn_implementation(own)
        try:
            errors = trial.of_the_trainer(model, layout).errors(expected)
        except Exception as error:  # an architecture may raise anything where a layout does not fit
            failed.append(f"{layout}: {described(error)}")
            continue
        if max(errors) <= TOLERANCE:
            way = Way.PACKED if layout is Layout.PACKED else Way.FALLBACK
            return Proof(PART, way, *errors, reason="; ".join(failed), layout=layout)
        closest = min(closest, errors, key=max)
        nats, gradient = errors
        failed.append(
            f"{layout}: off by {nats:.2g} nats, its gradient by {gradient:.2g} of its size"
        )
    reason = f"its numbers are not the model's own ({'; '.join(failed)}). {_REMEDY}"
    return Proof(PART, Way.REFUSED, *closest, reason=reason)


@dataclass(frozen=True, slots=True)
class _Numbers:
    logprobs: Tensor
    """[K]"""
    gradients: dict[str, Tensor]

    def errors(self, expected: _Numbers) -> tuple[float, float]:
        """The worst error of a log-probability in nats, and the worst relative error of a tensor's
        gradient.

        A gradient is compared with its own size plus a hundredth of the whole gradient's: in a
        tensor that gets next to nothing, differences are rounding.
        """
        whole = sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
        worst = 0.0
        for name, own in expected.gradients.items():
            distance = float((self.gradients[name] - own).norm())
            worst = max(worst, distance / (float(own.norm()) + 0.01 * whole))
        nats = float((self.logprobs - expected.logprobs).abs().max())
        return (nats, worst) if isfinite(nats + worst) else (inf, inf)


class _RowsTried:
    """Rows, the predictions on them that are trained, and the weight of each in the loss."""

    def __init__(self, rows: list[Row]) -> None:
        draw = np.random.default_rng(1)
        trained = [draw.random(len(row) - 1) < 0.7 for row in rows]
        trained[2][-3:] = False  # tokens after a row's last prediction must not matter
        self.rows = rows
        self.offsets = np.cumsum([0, *(len(row) - 1 for row in rows)])
        chosen = np.flatnonzero(np.concatenate(trained))
        targets = np.concatenate([row[1:] for row in rows])[chosen]
        self.predictions = Predictions(
            np.concatenate([row[:-1] for row in rows]), self.offsets, chosen, targets
        )
        self.weights = torch.from_numpy(draw.normal(size=len(chosen)) / len(chosen)).float()

    def of_the_model(self, model: PreTrainedModel) -> _Numbers:
        """The numbers that the model computes by itself, row by row."""
        found = torch.zeros(len(self.weights))
        p = self.predictions
        model.zero_grad()
        with eagerly(model):
            for number, row in enumerate(self.rows):
                mine = np.flatnonzero(p.row == number)
                if not len(mine):
                    continue
                logprobs = own_logprobs(model, row[:-1], row[1:], temperature=TEMPERATURE)
                scores = logprobs[p.inputs[mine] - self.offsets[number]]
                self._backward(scores, mine)
                found[mine] = scores.detach().cpu()
        return _Numbers(found, _gradients(model))

    def of_the_trainer(self, model: PreTrainedModel, layout: Layout) -> _Numbers:
        """The numbers of a step, in as few micro-batches as the layout makes."""
        found = torch.zeros(len(self.weights))
        everything = np.arange(len(self.weights))
        model.zero_grad()
        policy = Policy(model, layout)
        device = next(model.parameters()).device
        for micro in split(
            self.predictions, everything, budget=2**20, device=device, layout=layout
        ):
            scores, _ = policy(micro, temperature=TEMPERATURE)
            mine = micro.predictions.cpu().numpy()
            self._backward(scores, mine)
            found[mine] = scores.detach().cpu()
        return _Numbers(found, _gradients(model))

    def _backward(self, scores: Tensor, which: Index) -> None:
        torch.autograd.backward((self.weights[which].to(scores.device) * scores).sum())


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradient of each parameter by name; zeros if there is none."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            found[name] = gradient.clone().float().cpu()
    return found
