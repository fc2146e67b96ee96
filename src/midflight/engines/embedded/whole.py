"""Forward passes for models of which nothing can be kept. Each step computes whole sequences, one
at a time, as the model itself does.
"""

import inspect
import time
from typing import TypeAlias, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from midflight.engines.embedded.runner import Runner, StepBatch
from midflight.engines.embedded.sequential import SequentialRunner, WholeCache


class WholeRunner:
    """A runner with the interface of `Runner`. It is right for any model whose logits do not depend
    on later tokens. A step computes the whole of each of its sequences.
    """

    keeps_states = False
    recomputes = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forget_keys(self) -> None:
        """See `Runner`. Nothing is kept."""

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, V] of the last token of each sequence. Every sequence begins at its first
        token.
        """
        logits = list[Tensor]()
        start = 0
        for count in batch.counts.tolist():
            tokens = torch.from_numpy(batch.tokens[start : start + count]).to(self.model.device)
            logits.append(self._last(tokens))
            start += count
        return torch.stack(logits)

    def take(self, slot: int, *, start: int, end: int, at_end: bool) -> WholeCache:
        """See `KeepsSpans`. There is nothing to take."""
        del slot, start, end, at_end
        return WholeCache(None)

    def put(self, slot: int, spans: object) -> None:
        """See `KeepsSpans`. The sequence is computed again from its first token."""

    def _last(self, tokens: Tensor) -> Tensor:
        """The logits [V] after the last of the tokens [L]."""
        options: dict[str, object] = {"logits_to_keep": 1} if self._picks_logits else {}
        out = self.model(input_ids=tokens[None], use_cache=False, **options)
        return cast(Tensor, out.logits)[0, -1]

    @torch.inference_mode()
    def slowdown(self, num_tokens: int) -> float:
        """The time that a token takes as the last of `num_tokens`, divided by the time that it
        takes as the first. Each is the least of three runs.
        """
        tokens = torch.zeros(num_tokens, dtype=torch.long, device=self.model.device)
        return self._seconds(tokens) / self._seconds(tokens[:1])

    def _seconds(self, tokens: Tensor) -> float:
        runs = list[float]()
        for _ in range(3):
            started = time.perf_counter()
            self._last(tokens)[0].item()  # `item` waits for a GPU
            runs.append(time.perf_counter() - started)
        return min(runs)


AnyRunner: TypeAlias = Runner | SequentialRunner | WholeRunner
