"""A step that starts before its batch is whole: it works on single groups while others are still
generated.

The batch decides. When it is there, all numbers on which a group's part depends are compared with
it. If one group that was begun is not in it, or is there with other numbers, all early work is
thrown away. So a wrong guess of the next batch costs only time. Nothing is trained twice or lost:
leases are of whole batches, and early work ends with the process.

| early work | condition |
|---|---|
| the gradient, as sums whose denominators are put in at the end | each token's loss needs its group alone: one update a step, advantages within groups, no part of the loss that looks beyond a token |
| log-probabilities under the weights that begin the step | the step begins with a forward over its batch, which `updates_per_step` or a part of the loss asks for |
| log-probabilities under the reference | there is one |
| nothing | several ranks, which take whole batches together; a teacher, which scores whole batches |

In all other cases the step waits: for deviations over the batch (`reinforce_pp`, components, a
critic), and for the parts of a loss that look at whole rollouts. A critic always judges and learns
by whole batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from torch import Tensor

from midflight.config.formulas import Advantage
from midflight.trainer.credit import Scoring
from midflight.trainer.model.microbatch import Index
from midflight.trainer.model.passes import Passes
from midflight.trainer.objective import Objective
from midflight.trainer.report import StepRecord
from midflight.trainer.tokens import LossTokens

OVER_THE_BATCH: frozenset[Advantage] = frozenset({"reinforce_pp", "gae"})
"""Advantages that are not known before all groups are."""


@dataclass(frozen=True, slots=True)
class EarlyOptions:
    """The kinds of work that can be done early."""

    gradient: bool
    scores: bool
    reference: bool

    @classmethod
    def of(
        cls, objective: Objective, scoring: Scoring, *, updates: int, ranks: int
    ) -> EarlyOptions:
        """Returns the kinds of early work for steps of so many `updates`, by so many `ranks`."""
        if ranks > 1 or scoring.teacher_weight:
            return cls(False, False, False)
        scores = objective.needs_scores(updates_per_step=updates)
        within = scoring.advantage not in OVER_THE_BATCH and scoring.component_weights is None
        return cls(within and not scores and updates == 1, scores, objective.kl_coefficient > 0)

    @property
    def any(self) -> bool:
        return self.gradient or self.scores or self.reference


@dataclass(frozen=True, slots=True, eq=False)
class EarlyPart:
    """Some groups, and the early work for them."""

    tokens: LossTokens
    record: StepRecord
    """Readings, if the gradient was taken."""
    loss: float
    """The sum with denominators of 1."""
    proximal: Tensor | None
    reference: Tensor | None
    """Both [K], for the part's tokens, as in `Update`."""


@dataclass(frozen=True, slots=True, eq=False)
class EarlyWork:
    """The early work for some tokens of a batch."""

    parts: tuple[tuple[EarlyPart, Index, Index], ...] = ()
    """Each part with the indices of its tokens, and their places in the batch."""
    gradient: bool = False
    """True if the gradient of these tokens is in the model."""

    @property
    def where(self) -> Index:
        """The places of the tokens in the batch, part after part."""
        found = [there for _, _, there in self.parts]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    @property
    def loss(self) -> float:
        return sum(part.loss for part, _, _ in self.parts)

    def left(self, chosen: Index) -> Index:
        """The chosen tokens whose gradient is not in the model yet."""
        if not self.gradient:
            return chosen
        return np.setdiff1d(chosen, self.where, assume_unique=True)

    def note(self, record: StepRecord) -> None:
        """Copies the readings into the record of the step."""
        for part, own, there in self.parts:
            record.readings[:, there] = part.record.readings[:, own]
            record.num_micro_batches += part.record.num_micro_batches
        record.num_early = len(self.where)

    def scores(self, passes: Passes, tokens: LossTokens, which: str) -> Tensor:
        """Log-probabilities of all tokens, `proximal` or `reference`: those that were made early,
        and now the rest.
        """
        done = list[tuple[Tensor, Index]]()
        for part, own, there in self.parts:
            values: Tensor | None = getattr(part, which)
            if values is not None:
                done.append((values[own], there))
        if not done:
            return passes.scores(tokens.predictions)
        rest = np.setdiff1d(np.arange(tokens.num_tokens), self.where, assume_unique=True)
        found = passes.scores(tokens.predictions, rest).to(done[0][0].dtype)
        for values, there in done:
            found[there] = values
        return found


def match_early_work(
    tokens: LossTokens, parts: Sequence[EarlyPart], ahead: EarlyOptions
) -> EarlyWork:
    """The parts as they lie in a batch; nothing if one of their groups is not in it exactly as it
    was. `tokens` are those of the batch.
    """
    if not parts:
        return EarlyWork()
    there = defaultdict[bytes, list[Index]](list)
    for mark, at in _groups(tokens, with_advantage=ahead.gradient):
        there[mark].append(at)
    found = list[tuple[EarlyPart, Index, Index]]()
    for part in parts:
        own = list[Index]()
        places = list[Index]()
        for mark, at in _groups(part.tokens, with_advantage=ahead.gradient):
            if not there[mark]:
                return EarlyWork()
            own.append(at)
            places.append(there[mark].pop())
        found.append((part, np.concatenate(own), np.concatenate(places)))
    return EarlyWork(tuple(found), ahead.gradient)


def _groups(tokens: LossTokens, *, with_advantage: bool) -> Iterator[tuple[bytes, Index]]:
    """The groups that have tokens: for each a hash of all that its part of a step depends on, and
    the places of its tokens.
    """
    predictions = tokens.predictions
    row = tokens.predictions.row
    compared = [tokens.behaviour, tokens.age, tokens.has_older_keys]
    if with_advantage:
        compared.append(tokens.advantage)
    columns = [column.cpu().numpy() for column in compared]
    rollout = tokens.rollout.cpu().numpy()
    for group in np.unique(tokens.group):
        at = np.flatnonzero(tokens.group == group)
        rows = np.unique(row[at])
        mark = blake2b(digest_size=16)
        for values in (
            predictions.inputs[at] - predictions.offsets[row[at]],
            row[at] - rows[0],
            rollout[at] - rollout[at].min(),
        ):
            mark.update(values.astype(np.int64).tobytes())
        for values in (predictions.targets, *columns):
            mark.update(np.ascontiguousarray(values[at]).tobytes())
        for number in rows:
            span = slice(predictions.offsets[number], predictions.offsets[number + 1])
            mark.update(predictions.input_ids[span].tobytes() + b"|")
            mark.update(b"" if predictions.experts is None else predictions.experts[span].tobytes())
        if predictions.kept is not None:
            kept = predictions.kept.at(at)
            mark.update(kept.ids.tobytes() + kept.offsets.tobytes())
        yield mark.digest(), at
