"""Forwards over the predictions of a step, micro-batch by micro-batch, each rank its share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from midflight.trainer.model.microbatch import Index, MicroBatch, Predictions, num_oversized, share_of, split
from midflight.trainer.model.parallel import forget_gathered, precision
from midflight.trainer.model.policy import Reader
from midflight.trainer.model.ranks import Ranks

Forward = tuple[MicroBatch, bool, Float[Tensor, " k"], "Float[Tensor, ' k'] | None"]


class Passes:
    """Runs a reader over predictions. Collective: all ranks call with the same predictions, and take as many forwards."""

    def __init__(
        self, reader: Reader, ranks: Ranks, *, budget: int, temperature: float, compute_dtype: torch.dtype | None, device: torch.device
    ) -> None:
        """`budget`: tokens of a micro-batch."""
        self.reader = reader
        self._ranks, self._budget, self._temperature, self._device = ranks, budget, temperature, device
        self._compute_dtype = compute_dtype

    def forwards(self, predictions: Predictions, chosen: Index, *, trains: bool, with_entropy: bool = False) -> Iterator[Forward]:
        """This rank's micro-batches of the `chosen` predictions (ascending): each with its log-probabilities (of a critic values), and entropies if asked.

        Gathering layers takes all ranks, so one that has fewer micro-batches than another does some for nothing, marked as not its own.
        """
        mine = share_of(predictions, chosen, rank=self._ranks.rank, size=self._ranks.size)
        micros = list(split(predictions, mine, budget=self._budget, device=self._device))
        own, count = len(micros), self._ranks.largest(len(micros))
        if count > own:
            idle = next(split(predictions, chosen[:1], budget=self._budget, device=self._device))
            micros += [idle] * (count - own)
        for number, micro in enumerate(micros):
            with torch.set_grad_enabled(trains), precision(self.reader, self._compute_dtype):
                logprobs, entropy = self.reader(micro, temperature=self._temperature, with_entropy=with_entropy)
            yield micro, number < own, logprobs, entropy
        if not trains:  # a backward does it by itself
            forget_gathered(self.reader)

    def scores(self, predictions: Predictions, chosen: Index | None = None) -> Float[Tensor, " K"]:
        """Log-probabilities (of a critic values) of the chosen predictions, or of all, without gradient; whole on every rank, 0 where not chosen."""
        found = torch.zeros(len(predictions.targets), dtype=torch.float64, device=self._device)
        everything = np.arange(len(predictions.targets)) if chosen is None else chosen
        dtype = torch.float32
        for micro, is_mine, logprobs, _ in self.forwards(predictions, everything, trains=False):
            dtype = logprobs.dtype
            if is_mine:
                found[micro.predictions] = logprobs.double()
        return self._ranks.sum(found).to(dtype)

    def num_oversized(self, predictions: Predictions) -> int:
        return num_oversized(predictions, budget=self._budget)
