"""A model of a few thousand parameters, small enough for any test."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from midflight.models.creation import make_model
from midflight.models.lora import add_adapters, lora_config
from midflight.models.names import assign, named_tensors

MAX_CONTEXT = 64


def tiny_model(*, seed: int = 0, dtype: str | torch.dtype = "float32", tied: bool = True) -> PreTrainedModel:
    return make_model(
        vocab_size=262,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_context=MAX_CONTEXT,
        seed=seed,
        dtype=dtype,
        tied=tied,
    )


def tiny_adapted(*, seed: int = 0, targets: tuple[str, ...] = (), dtype: str = "float32", tied: bool = True) -> PreTrainedModel:
    """The tiny model of seed 0 with adapters that change what it computes, drawn from `seed`."""
    model = tiny_model(dtype=dtype, tied=tied)
    add_adapters(model, lora_config(model, rank=4, alpha=6, targets=targets), seed=seed)
    draw = torch.Generator().manual_seed(seed)
    assign(model, {name: torch.randn(t.shape, generator=draw) * 0.1 for name, t in named_tensors(model).items()})
    return model
