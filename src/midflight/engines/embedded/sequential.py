"""Forward passes for models whose sequences cannot share one. Each sequence goes alone, over a
cache that the model makes for itself.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from midflight.engines.embedded.runner import StepBatch
from midflight.errors import NotSupported
from midflight.models.caches import cache_name


class SequentialRunner:
    """A runner with the interface of `Runner`. It is right for any architecture that `transformers`
    generates with. A step takes a pass for each sequence.
    """

    keeps_states = True
    """A sequence can only go on where its cache was taken."""
    recomputes = False

    def __init__(self, model: PreTrainedModel, *, serial: bool) -> None:
        self.model = model.eval()
        self._serial = serial
        """True if a sequence goes on by one token at a time, because the model goes on wrongly by
        several.
        """
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        name = cache_name(model)
        if name is None:
            raise NotSupported(
                f"running the model: {type(model).__name__} keeps nothing of a sequence that it "
                "could be continued from"
            )
        self._name = name
        self._caches: dict[int, Any] = {}

    def forget_keys(self) -> None:
        """Drops the caches of all slots."""
        self._caches.clear()

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Tensor:
        """Returns the logits [R, V] of the wanted tokens, each the last of its sequence. Stores the
        model's cache of all tokens.
        """
        logits = list[Tensor]()
        start = 0
        for slot, first, count in zip(
            batch.slots.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=True
        ):
            end = start + count
            tokens = torch.from_numpy(batch.tokens[start:end]).to(self.model.device)
            last = self._extend(slot, tokens, first=first)
            if batch.wanted[end - 1]:
                logits.append(last)
            start = end
        return torch.stack(logits) if logits else torch.empty(0, 0)

    def take(self, slot: int, *, start: int, end: int, at_end: bool) -> "WholeCache":
        """See `KeepsSpans`. The model's cache belongs to all tokens together, so that a sequence
        can go on behind the last of them only.
        """
        del start, end
        if not at_end:
            return WholeCache(None)
        return WholeCache(copy.deepcopy(self._caches[slot]))

    def put(self, slot: int, spans: Sequence[tuple["WholeCache", int]]) -> None:
        """See `KeepsSpans`."""
        self._caches[slot] = copy.deepcopy(spans[-1][0].cache)

    def _extend(self, slot: int, tokens: Tensor, *, first: int) -> Tensor:
        """Runs tokens [L], the first of which is at position `first`. Returns the logits [V] of the
        last.
        """
        parts = tokens.split(1) if self._serial and first else (tokens,)
        cache = self._caches.pop(slot, None) if first else None
        logits = tokens.new_empty(0)
        options: dict[str, object] = {}
        if "logits_to_keep" in self._takes:
            options["logits_to_keep"] = 1
        for part in parts:
            options[self._name] = cache
            out = self.model(input_ids=part[None], use_cache=True, **options)
            cache = out[self._name]
            logits = cast(Tensor, out.logits)[0, -1]
        self._caches[slot] = cache
        return logits


@dataclass(frozen=True, slots=True, eq=False)
class WholeCache:
    """Implements `SpanState`. `cache` is `None` if nothing was taken."""

    cache: Any

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.cache)

    @property
    def has_state(self) -> bool:
        return self.cache is not None

    def cut(self, start: int, end: int) -> "WholeCache":
        """A cut that begins after the first token counts as the end, and is this cache itself. A
        beginning has nothing.
        """
        return self if start else WholeCache(None)


def _num_bytes(held: Any) -> int:
    """The bytes of all tensors in an object of any class."""
    if isinstance(held, Tensor):
        return held.nbytes
    if isinstance(held, dict):
        return sum(_num_bytes(value) for value in cast("dict[object, object]", held).values())
    if isinstance(held, list | tuple):
        return sum(_num_bytes(value) for value in cast("list[object]", held))
    if type(held).__module__.startswith("transformers"):
        return _num_bytes(vars(held))
    return 0
