"""Forward passes for models whose sequences cannot share one: each sequence alone, over a cache that the model makes for itself."""

import copy
import inspect
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from midflight.engines.embedded.runner import Ints, StepBatch
from midflight.errors import NotSupported

_CACHES = ("past_key_values", "cache_params", "state")
"""What architectures call the cache that they take and give."""


class LoneRunner:
    """As `Runner`, and right for any architecture that `transformers` generates with; a step takes a pass for each sequence."""

    keeps_states = True
    """A cache is copied whole, at the length at which it was kept."""
    together = ()
    """As `Runner.together`."""

    def __init__(self, model: PreTrainedModel, *, serial: bool) -> None:
        self.model = model.eval()
        self._serial = serial
        """Whether a sequence goes on by one token at a time, because the model goes on wrongly by several."""
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        known = [name for name in _CACHES if name in self._takes]
        if not known:
            raise NotSupported(f"running the model: {type(model).__name__} keeps nothing of a sequence that it could be continued from")
        self._name = known[0]
        self._caches: dict[int, Any] = {}
        self._kept: dict[int, Any] = {}

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Logits [R, V] of the wanted sequences' last tokens; what the model keeps of all tokens is stored."""
        logits, start = list[Tensor](), 0
        for slot, first, count, wanted in zip(*(x.tolist() for x in (batch.slots, batch.starts, batch.counts, batch.wanted)), strict=True):
            tokens = torch.from_numpy(batch.tokens[start : start + count]).to(self.model.device)
            last = self._extend(slot, tokens, first=first)
            logits += [last] if wanted else []
            start += count
        return torch.stack(logits) if logits else torch.empty(0, 0)

    def copy(self, sources: Ints, targets: Ints, *, length: int) -> None:
        """Gives each target what was kept of the source beside it, and keeps it for the target too. `length` is where it was kept."""
        kept = [self._kept[source] for source in sources.tolist()]
        for target, cache in zip(targets.tolist(), kept, strict=True):
            self._kept[target], self._caches[target] = cache, copy.deepcopy(cache)

    def keep(self, slot: int) -> None:
        """Keeps the slot's cache as it is, for `copy`."""
        self._kept[slot] = copy.deepcopy(self._caches[slot])

    def forget(self, slot: int | None) -> None:
        """Drops what was kept of a slot; of all: `None`."""
        if slot is None:
            self._kept.clear()
        else:
            self._kept.pop(slot, None)

    def _extend(self, slot: int, tokens: Tensor, *, first: int) -> Tensor:
        """Runs tokens [L] that stand at `first` and after; gives the logits [V] of the last."""
        parts = tokens.split(1) if self._serial and first else (tokens,)
        cache = self._caches.pop(slot, None) if first else None
        logits = tokens.new_empty(0)
        for part in parts:
            options: dict[str, object] = {"logits_to_keep": 1} if "logits_to_keep" in self._takes else {}
            out = self.model(input_ids=part[None], use_cache=True, **{self._name: cache}, **options)
            cache, logits = out[self._name], cast(Tensor, out.logits)[0, -1]
        self._caches[slot] = cache
        return logits
