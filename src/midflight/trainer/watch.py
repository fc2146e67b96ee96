"""The values of each token of a step, for a person who looks at the step afterwards."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from midflight.trainer.model.microbatch import Index, shift
from midflight.trainer.report import StepRecord
from midflight.trainer.tokens import LossTokens
from midflight.types import PackedBatch


class StepWatch:
    """Keeps the readings of a step, and the derivative of its loss by the log-probability of each
    token. That derivative witnesses which tokens had a gradient: it is 0 for all others.
    """

    tokens: LossTokens
    record: StepRecord

    def __init__(self) -> None:
        self.witness: Float[Tensor, " K"] = torch.zeros(0, dtype=torch.float64)
        """The derivative for each token of the loss, summed over the updates of the step."""

    def begin(self, tokens: LossTokens) -> None:
        self.tokens = tokens
        self.witness = torch.zeros(tokens.num_tokens, dtype=torch.float64)

    def forward(self, at: Int[Tensor, " k"], policy: Float[Tensor, " k"]) -> None:
        """Takes the log-probabilities of the tokens `at` before their backward."""
        if policy.requires_grad:
            policy.register_hook(partial(self._derived, at.cpu()))

    def end(self, tokens: LossTokens, record: StepRecord) -> None:
        self.tokens = tokens
        self.record = record

    def places(self, batch: PackedBatch) -> Index:
        """The place of each token of the loss in the batch's arrays."""
        places = shift(np.arange(len(batch.token_ids)), batch.row_offsets)
        return places[self.tokens.predictions.inputs]

    def _derived(self, at: Int[Tensor, " k"], gradient: Float[Tensor, " k"]) -> None:
        self.witness[at] += gradient.detach().double().cpu()
