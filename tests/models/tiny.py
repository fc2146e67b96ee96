"""A model of a few thousand parameters, small enough for any test."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from midflight.models.load import make_model

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
