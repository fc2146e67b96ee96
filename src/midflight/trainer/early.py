"""A step that starts before its batch is whole: what can be done with single groups while others
are still generated.

The batch decides. When it is there, all that a group's part depends on is compared, number by
number; if one group that was begun is not in it, or is there with other numbers, everything begun
is thrown away. So it does not matter who foresaw the batch, and nothing is trained twice or lost: a
lease is of whole batches, and what was begun dies with the process.

| what is done early | where |
|---|---|
| the gradient, as sums whose denominators are put in at the end | each token's loss needs its group alone: one update a step, advantages within groups, no part of the loss that looks beyond a token |
| log-probabilities under the weights that begin the step | the step begins with a forward over its batch, which `updates_per_step` or a part of the loss asks for |
| those of the reference | there is one |
| nothing | several ranks, which take whole batches together; a teacher, who scores whole batches |

Else the step waits: for deviations over the batch (`reinforce_pp`, components, a critic) and for
what looks at whole rollouts. A critic judges and learns by whole batches always.
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
from midflight.trainer.model.policy import Passes
from midflight.trainer.objective import Objective
from midflight.trainer.step import LossTokens, StepRecord

OVER_THE_BATCH: frozenset[Advantage] = frozenset({"reinforce_pp", "gae"})
"""Advantages that are not known before all groups are."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What can be done early."""

    gradient: bool
    scores: bool
    reference: bool

    @classmethod
    def of(cls, objective: Objective, scoring: Scoring, *, updates: int, ranks: int) -> Ahead:
        """`updates` of a step, by so many `ranks`."""
        if ranks > 1 or scoring.teacher_weight:
            return cls(False, False, False)
        scores = objective.needs_scores(updates_per_step=updates)
        within = scoring.advantage not in OVER_THE_BATCH and scoring.component_weights is None
        return cls(within and not scores and updates == 1, scores, objective.kl_coefficient > 0)

    @property
    def any(self) -> bool:
        return self.gradient or self.scores or self.reference


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some groups, and what was done for them."""

    tokens: LossTokens
    record: StepRecord
    """Readings, where the gradient was taken."""
    loss: float
    """With denominators of 1."""
    proximal: Tensor | None
    reference: Tensor | None
    """[K] of its tokens, as in `Update`."""


@dataclass(frozen=True, slots=True, eq=False)
class EarlyWork:
    """What was done for tokens of a batch, which are `where` in it."""

    parts: tuple[tuple[Part, Index, Index], ...] = ()
    """Each with its tokens, and where these are in the batch."""
    gradient: bool = False
    """Whether theirs is in the model."""

    @property
    def where(self) -> Index:
        return np.concatenate([np.zeros(0, np.int64), *(there for _, _, there in self.parts)])

    @property
    def loss(self) -> float:
        return sum(part.loss for part, _, _ in self.parts)

    def left(self, chosen: Index) -> Index:
        """Those whose gradient is not in the model yet."""
        return np.setdiff1d(chosen, self.where, assume_unique=True) if self.gradient else chosen

    def note(self, record: StepRecord) -> None:
        for part, own, there in self.parts:
            record.readings[:, there] = part.record.readings[:, own]
            record.num_micro_batches += part.record.num_micro_batches
        record.num_early = len(self.where)

    def scores(self, passes: Passes, tokens: LossTokens, which: str) -> Tensor:
        """Those of all tokens: what was done early, `proximal` or `reference`, and now the rest."""
        done = [
            (values[own], there)
            for part, own, there in self.parts
            if (values := getattr(part, which)) is not None
        ]
        if not done:
            return passes.scores(tokens.predictions)
        rest = np.setdiff1d(np.arange(tokens.num_tokens), self.where, assume_unique=True)
        found = passes.scores(tokens.predictions, rest).to(done[0][0].dtype)
        for values, there in done:
            found[there] = values
        return found


def found_in(tokens: LossTokens, parts: Sequence[Part], ahead: Ahead) -> EarlyWork:
    """The parts as they lie in a batch; nothing where one of their groups is not in it just as it
    was. `tokens`: of the batch.
    """
    there = defaultdict[bytes, list[Index]](list)
    found = list[tuple[Part, Index, Index]]()
    for mark, at in _groups(tokens, with_advantage=ahead.gradient) if parts else ():
        there[mark].append(at)
    for part in parts:
        pairs = [
            (at, there[mark].pop() if there[mark] else None)
            for mark, at in _groups(part.tokens, with_advantage=ahead.gradient)
        ]
        places = [place for _, place in pairs if place is not None]
        if len(places) < len(pairs):
            return EarlyWork()
        found.append((part, np.concatenate([at for at, _ in pairs]), np.concatenate(places)))
    return EarlyWork(tuple(found), ahead.gradient and bool(found))


def _groups(tokens: LossTokens, *, with_advantage: bool) -> Iterator[tuple[bytes, Index]]:
    """Each group that has tokens: a hash of all that its part of a step depends on, and where its
    tokens are.
    """
    predictions = tokens.predictions
    row = tokens.predictions.row
    columns = [
        column.cpu().numpy() for column in (tokens.behaviour, tokens.age, tokens.has_older_keys)
    ]
    if with_advantage:
        columns.append(tokens.advantage.cpu().numpy())
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
