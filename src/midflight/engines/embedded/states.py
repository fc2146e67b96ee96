"""Recurrent and convolution states, with one row per running sequence, for the layers that keep
such a state in place of keys and values.

`transformers` runs these layers over whole sequences. The tokens of an engine step follow one after
the other. Inside it such a layer is run once for each cohort of sequences that have equally many
tokens. It runs over a cache that holds the rows of these sequences alone.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, LinearAttentionLayer

Ints = NDArray[np.int64]
Kind = Literal["conv", "recurrent"]
Key = tuple[int, Kind, int]
"""The layer's number among the layers with states, the kind of the state, and its number in the
layer.
"""
_WRAPPED = "_midflight_layer"
RUNNING: Final[ContextVar[States | None]] = ContextVar("midflight_states", default=None)
"""The states of the engine whose step this thread runs."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """Sequences [b] that have L tokens each, the tokens [start, end) of the step."""

    slots: Tensor | slice
    num: int
    start: int
    end: int
    fresh: bool
    """True if the sequences begin here, so that they have no state yet."""


def cohorts(slots: Ints, starts: Ints, counts: Ints, device: torch.device) -> list[Cohort]:
    """The cohorts of a step's sequences, in their order. Slots that are a range are read and
    written in place.
    """
    kinds = np.stack([counts, starts == 0])
    edges = np.flatnonzero((np.diff(kinds) != 0).any(0)) + 1
    bounds = [0, *edges.tolist(), len(counts)]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    made: list[Cohort] = []
    for first, last in itertools.pairwise(bounds):
        part = slots[first:last]
        where: Tensor | slice
        if (np.diff(part) == 1).all():
            where = slice(int(part[0]), int(part[-1]) + 1)
        else:
            where = torch.from_numpy(part).to(device)
        cohort = Cohort(
            slots=where,
            num=last - first,
            start=int(offsets[first]),
            end=int(offsets[last]),
            fresh=bool(starts[first] == 0),
        )
        made.append(cohort)
    return made


class States:
    """A tensor [slots, ...] per state, made when a layer first leaves one. Rows of slots that begin
    anew are never read.
    """

    def __init__(self, *, max_slots: int) -> None:
        self._max_slots = max_slots
        self._slots = 0
        self._rows: dict[Key, Tensor] = {}
        self.cohorts: list[Cohort] = []
        """The cohorts of the step that runs."""
        self.serial = False
        """True if sequences go on by one token at a time, because the layers go on wrongly by
        several.
        """

    def reserve(self, *, slots: int) -> None:
        if slots <= self._slots:
            return
        self._slots = min(self._max_slots, max(slots, 2 * self._slots))
        for key, old in self._rows.items():
            self._rows[key] = old.new_zeros(self._slots, *old.shape[1:])
            self._rows[key][: len(old)] = old

    # --- Out of the rows, and back ----------------------------------------------------------------

    def take(self, slot: int) -> Mapping[Key, Tensor]:
        """Copies the slot's states as they are now."""
        return {key: rows[slot].clone() for key, rows in self._rows.items()}

    def put(self, slot: int, states: Mapping[Key, Tensor]) -> None:
        for key, state in states.items():
            self._rows[key][slot] = state

    # --- A layer inside a step --------------------------------------------------------------------

    def run(self, layer: StatefulLayer, given: dict[str, Any]) -> object:
        """Returns the output of the layer for all tokens [1, N, ...] of the step,
        cohort by cohort.
        """
        outputs: list[Any] = []
        for cohort in self.cohorts:
            view = self._view(layer, cohort)
            length = (cohort.end - cohort.start) // cohort.num
            width = 1 if self.serial and not cohort.fresh else length
            pieces: list[Any] = []
            for first in range(0, length, width):
                columns = slice(first, first + width)
                arguments = {
                    name: part(name, value, cohort, columns) for name, value in given.items()
                }
                layers: list[Any] = [view] * (layer.index + 1)
                arguments[layer.cache_name] = Cache(layers=layers)
                pieces.append(layer.inner(**arguments))
            self._store(layer, cohort, view)
            outputs.append(_joined(pieces, lambda piece: piece))
        return _joined(outputs, lambda out: out.reshape(1, -1, *out.shape[2:]))

    def _view(self, layer: StatefulLayer, cohort: Cohort) -> LinearAttentionLayer:
        """A cache with the rows of the cohort's sequences."""
        view = LinearAttentionLayer(number_of_states=layer.num_states)
        if cohort.fresh:
            return view
        for number, kind, state in self._keys(layer):
            rows = self._rows[number, kind, state][cohort.slots]
            if kind == "conv":
                view.conv_states[state] = rows
                view.conv_kernel_size[state] = rows.shape[-1]
                view.is_conv_states_initialized[state] = True
            else:
                view.recurrent_states[state] = rows
                view.is_recurrent_states_initialized[state] = True
            view.has_previous_state[state] = True
            view.dtype = rows.dtype
            view.device = rows.device
        return view

    def _store(self, layer: StatefulLayer, cohort: Cohort, view: LinearAttentionLayer) -> None:
        kinds: list[tuple[Kind, dict[int, Tensor | None]]] = [
            ("conv", view.conv_states),
            ("recurrent", view.recurrent_states),
        ]
        for kind, states in kinds:
            for state, new in states.items():
                if new is None:
                    continue
                key = (layer.number, kind, state)
                if key not in self._rows:
                    self._rows[key] = new.new_zeros(self._slots, *new.shape[1:])
                rows = self._rows[key]
                if isinstance(cohort.slots, slice):
                    own = rows[cohort.slots]
                    if own.data_ptr() == new.data_ptr():
                        continue  # it was changed in place
                rows[cohort.slots] = new

    def _keys(self, layer: StatefulLayer) -> list[Key]:
        return [key for key in self._rows if key[0] == layer.number]


@dataclass(slots=True, eq=False)
class StatefulLayer:
    """A module that keeps a state, and how it is called."""

    inner: Callable[..., object]
    parameters: inspect.Signature
    cache_name: str
    """The parameter that takes the cache."""
    number: int
    """Its number among the model's modules with states."""
    index: int
    """Its place in the cache."""
    num_states: int

    def __call__(self, *args: object, **options: object) -> object:
        """Stands in place of the module's `forward`."""
        states = RUNNING.get()
        if states is None:
            return self.inner(*args, **options)
        bound = self.parameters.bind(*args, **options)
        given = dict(bound.arguments)
        for name, parameter in self.parameters.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                given |= given.pop(name, {})
        return states.run(self, given)


def part(name: str, value: object, cohort: Cohort, columns: slice) -> object:
    """An argument, cut down to some of a cohort's tokens: a tensor over the step's tokens [1, N,
    ...] becomes [b, l, ...].
    """
    if name == "attention_mask":
        return None  # there is no padding
    if isinstance(value, tuple):
        return tuple(part("", each, cohort, columns) for each in cast("tuple[object, ...]", value))
    if not isinstance(value, Tensor) or value.dim() <= 1:
        return value
    if value.shape[0] != 1 or value.shape[1] < cohort.end:
        return value
    own = value[:, cohort.start : cohort.end]
    return own.reshape(cohort.num, -1, *value.shape[2:])[:, columns]


def _joined(outputs: list[Any], shape: Callable[[Tensor], Tensor]) -> Any:
    """The outputs of a layer one after the other, along the tokens. If the layer gives more than
    one output, the others are those of its last run.
    """
    firsts: list[Tensor] = []
    for out in outputs:
        first = out[0] if isinstance(out, tuple) else out
        firsts.append(shape(first))
    whole = firsts[0] if len(firsts) == 1 else torch.cat(firsts, dim=1)
    last = outputs[-1]
    if isinstance(last, tuple):
        return (whole, *last[1:])
    return whole


@torch.inference_mode()
def stateful(model: PreTrainedModel) -> bool:
    """True if any module keeps a state. From now on such modules are run cohort by cohort inside
    engine steps.
    """
    found = _found(model)
    for number, (module, (name, cache)) in enumerate(found.items()):
        if hasattr(module, _WRAPPED):
            continue
        index = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
        num_states = cast("LinearAttentionLayer", cache.layers[index]).number_of_states
        layer = StatefulLayer(
            module.forward, inspect.signature(module.forward), name, number, index, num_states
        )
        setattr(module, _WRAPPED, layer)
        module.forward = layer
        if tuple(getattr(module, "time_step_limit", None) or _ANY_STEP) != _ANY_STEP:
            cast("nn.Linear", module.in_proj).register_forward_hook(partial(_limit_steps, module))
    return bool(found)


_ANY_STEP: Final = (0.0, torch.inf)


def _limit_steps(module: Any, _: nn.Module, __: object, projected: Tensor) -> Tensor:
    """Limits the time steps of a layer of Mamba 2 for a single token. `transformers` limits them
    over whole sequences only.

    The last of the projections [b, L, ...] are d, one for each head, and the time step is
    softplus(d + bias). Limiting d where it comes from limits it in both.
    """
    if projected.shape[1] != 1:
        return projected
    bounds = torch.tensor(module.time_step_limit, dtype=torch.float64)
    # The softplus of `low` and of `high` are the bounds.
    low, high = (bounds + (-torch.expm1(-bounds)).log()).tolist()
    limited = projected.clone()
    steps = limited[..., -module.num_heads :]
    bias = module.dt_bias
    steps.copy_((steps + bias).clamp(low, high) - bias)
    return limited


def _found(model: PreTrainedModel) -> dict[nn.Module, tuple[str, Cache]]:
    """The innermost modules during whose run a state comes into the cache, each with the parameter
    that takes the cache.
    """
    before: dict[nn.Module, set[tuple[int, int]]] = {}
    found: dict[nn.Module, tuple[str, Cache]] = {}

    def enter(module: nn.Module, args: tuple[object, ...], options: dict[str, object]) -> None:
        given = _cache(module, args, options)
        if given is not None:
            before[module] = _states_in(given[1])

    def leave(
        module: nn.Module, args: tuple[object, ...], options: dict[str, object], output: object
    ) -> None:
        given = _cache(module, args, options)
        if given is None or _states_in(given[1]) == before.get(module, set()):
            return
        if not any(inner in found for inner in module.modules()):
            found[module] = given

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=True)
    return found


def _cache(
    module: nn.Module, args: tuple[object, ...], options: dict[str, object]
) -> tuple[str, Cache] | None:
    """The cache that a module was called with, and the parameter that took it."""
    forward: Any = getattr(module, _WRAPPED, None)
    signature = forward.parameters if forward is not None else inspect.signature(module.forward)
    for name, value in signature.bind(*args, **options).arguments.items():
        if isinstance(value, Cache):
            return name, value
    return None


def _states_in(cache: Cache) -> set[tuple[int, int]]:
    """The states that the cache has: (number of the layer, number of the state in it)."""
    found = set[tuple[int, int]]()
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        for kind in (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized):
            found.update((number, state) for state, made in kind.items() if made)
    return found
