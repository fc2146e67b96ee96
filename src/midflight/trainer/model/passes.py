"""Forwards over the predictions of a step, of which each rank makes its share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from midflight.trainer.model.microbatch import (
    Index,
    MicroBatch,
    Predictions,
    num_oversized,
    split,
)
from midflight.trainer.model.policy import TokenModel
from midflight.trainer.model.ranks import Ranks
from midflight.trainer.model.sharding import forget_gathered, precision

Forward = tuple[MicroBatch, bool, Float[Tensor, " k"], "Float[Tensor, ' k'] | None"]
"""A micro-batch, whether it is this rank's own, its log-probabilities, and its entropies."""


class Passes:
    """Runs a reader over predictions. It is collective: all ranks call for predictions of the same
    shape, of which each has its own rows, and take as many forwards.
    """

    def __init__(
        self,
        reader: TokenModel,
        ranks: Ranks,
        *,
        budget: int,
        temperature: float,
        compute_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:
        """`budget`: tokens of a micro-batch."""
        self.reader = reader
        self._ranks = ranks
        self.budget = budget
        self._temperature = temperature
        self._device = device
        self._compute_dtype = compute_dtype

    def forwards(
        self, predictions: Predictions, chosen: Index, *, trains: bool, with_entropy: bool = False
    ) -> Iterator[Forward]:
        """This rank's micro-batches of the `chosen` predictions (ascending), each with its
        log-probabilities (a critic's values), and entropies if asked.

        Gathering layers takes all ranks. So a rank that has fewer micro-batches than another does
        some for nothing, which are marked as not its own. They are of any row that the rank has.
        """
        mine = predictions.of_rank(self._ranks.rank, chosen)
        micros = list(self._split(predictions, mine))
        own = len(micros)
        count = self._ranks.largest(own)
        if count > own:
            has = predictions.held_by(self._ranks.rank)[predictions.row]
            idle = next(self._split(predictions, np.flatnonzero(has)[:1]))
            micros += [idle] * (count - own)
        for number, micro in enumerate(micros):
            with torch.set_grad_enabled(trains), precision(self.reader, self._compute_dtype):
                logprobs, entropy = self.reader(
                    micro, temperature=self._temperature, with_entropy=with_entropy
                )
            yield micro, number < own, logprobs, entropy
        if not trains:  # a backward does it by itself
            forget_gathered(self.reader)

    def _split(self, predictions: Predictions, chosen: Index) -> Iterator[MicroBatch]:
        return split(
            predictions,
            chosen,
            budget=self.budget,
            device=self._device,
            layout=self.reader.layout,
        )

    def scores(self, predictions: Predictions, chosen: Index | None = None) -> Float[Tensor, " K"]:
        """Log-probabilities (a critic's values) of the chosen predictions, or of all, without
        gradient. They are whole on every rank, and 0 where not chosen.
        """
        found = torch.zeros(len(predictions.targets), dtype=torch.float64, device=self._device)
        everything = np.arange(len(predictions.targets)) if chosen is None else chosen
        dtype = torch.float32
        for micro, is_mine, logprobs, _ in self.forwards(predictions, everything, trains=False):
            dtype = logprobs.dtype
            if is_mine:
                found[micro.predictions] = logprobs.double()
        return self._ranks.sum(found).to(dtype)

    def num_oversized(self, predictions: Predictions) -> int:
        """Rows that exceed the budget on their own."""
        return num_oversized(predictions, budget=self.budget)
