"""Changes to the layers of a model. Layers with a state take packed micro-batches, and any layer
can recompute its activations or be compiled.

Layers that carry a state from token to token are recurrences and convolutions. Attention knows the
beginnings of rows; these layers do not. The paths that `transformers` takes without other people's
kernels ignore `cu_seqlens` and `seq_idx`, and neither can express that rows share a beginning. So
each such layer is given the rows one under the other, shared beginnings repeated, and padded on the
right, which changes nothing before it. Everything between these layers stays packed.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from midflight.errors import ConfigError
from midflight.trainer.model.attention import PACKED_RUNS, packed_runs

MIXERS = (
    "GatedDeltaNet",
    "DeltaAttention",
    "MambaLayer",
    "Mixer",
    "ShortConv",
    "LightningAttention",
    "RecurrentBlock",
    "RwkvBlock",
    "xLSTMBlock",
)
"""Endings of the class names of layers with a state."""


def unpack_mixers(model: PreTrainedModel) -> None:
    """Makes the layers with a state take packed micro-batches from now on. They compute everything
    else as before, and names of tensors stay.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__.endswith(MIXERS) and not issubclass(kind, _Unpacking):
            module.__class__ = _unpacking(kind)


class _Unpacking(nn.Module):
    """A mixin of a layer's class, so that copies of the model have it as well."""

    def forward(self, *given: Any, **named: Any) -> Any:
        runs = PACKED_RUNS.get()
        if runs is None:
            return super().forward(*given, **named)
        packed: Tensor = named["hidden_states"] if "hidden_states" in named else given[0]
        tables, where = runs.under_each_other
        parts = list[Tensor]()
        found = cast("Any", None)
        with packed_runs(None):
            for table in tables:
                index = torch.from_numpy(table).to(packed.device)
                given_rows = [_rows(x, index, packed) for x in given]
                named_rows = {name: _rows(x, index, packed) for name, x in named.items()}
                found = super().forward(*given_rows, **named_rows)
                states = found[0] if isinstance(found, tuple) else found
                parts.append(states.flatten(0, 1))
        own = torch.cat(parts).index_select(0, torch.from_numpy(where).to(packed.device))[None]
        return (own, *found[1:]) if isinstance(found, tuple) else own


def _rows(value: Any, index: Int[Tensor, "R L"], packed: Float[Tensor, "1 N H"]) -> Any:
    """A value for each token as the rows have it; any other value as it is."""
    if isinstance(value, Tensor) and value.shape[:2] == packed.shape[:2]:
        return value[0][index]
    return value


@cache
def _unpacking(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_Unpacking, kind), {"__module__": kind.__module__})


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, by the names that the architecture gives for them. Raises `ConfigError`
    if there are none.
    """
    names = set(cast("list[str] | None", getattr(model, "_no_split_modules", None)) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} does not say what its layers are, so it cannot be split. "
            "Set trainer.ranks = 1, trainer.activation_checkpointing = false and trainer.compile = "
            "false."
        )
    return found


def recompute_activations(model: PreTrainedModel) -> None:
    """Each layer keeps its input only and computes the rest again in the backward. Values and
    gradients stay the same to the bit.
    """
    for layer in decoder_layers(model):
        layer.forward = partial(_checkpointed, layer.forward)


def _checkpointed(forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Remembers how the micro-batch lies: the backward may come in another thread, and at a time
    when another micro-batch lies there.
    """
    runs = PACKED_RUNS.get()

    def again(*given: Any, **named: Any) -> Any:
        with packed_runs(runs):
            return forward(*given, **named)

    return checkpoint(again, *given, use_reentrant=False, **named)


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles the feed-forward part of every layer, in place: names stay. Attention is not
    compiled, because its rows have other lengths in every micro-batch.
    """
    for layer in decoder_layers(model):
        for child in layer.children():
            if not _has_attention(child):
                child.compile(dynamic=True)


def _has_attention(module: nn.Module) -> bool:
    return any(type(inner).__name__.endswith("Attention") for inner in module.modules())
