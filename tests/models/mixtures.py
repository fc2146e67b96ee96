"""Mixtures of experts of some thousand parameters, with random weights; heads are as wide as vLLM needs on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3MoeConfig,
)

_SIZES = {"vocab_size": 262, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
          "max_position_embeddings": 256, "eos_token_id": 256, "pad_token_id": 261, "bos_token_id": None}  # fmt: skip
NUM_EXPERTS, NUM_CHOSEN = 8, 2


def config_of(kind: str) -> PreTrainedConfig:
    if kind == "mixtral":
        return MixtralConfig(
            **_SIZES, intermediate_size=32, num_local_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOSEN, sliding_window=None
        )
    return Qwen3MoeConfig(
        **_SIZES, head_dim=32, intermediate_size=64, moe_intermediate_size=32, num_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOSEN
    )


def tiny_mixture(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """`qwen3_moe` or `mixtral`. Routers and what layers add are larger than at a usual beginning, so that choices differ and matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(kind))
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.5 if "gate.weight" in name else 0.125)
    return model.to(dtype).eval()


def tiny_seeing(folder: Path, *, kind: str) -> Path:
    """Writes the folder of a multimodal model, of whose parts only the text tower is trained here. `transformers` loads that tower of a
    Qwen3.5 by itself, and a Gemma-3 whole."""
    text = _SIZES | {
        "head_dim": 32, "intermediate_size": 64, "full_attention_interval": 2,
        "linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    seeing = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "qwen3_5":
            model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=seeing))
        else:
            eyes = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
            model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=seeing | eyes))
    model.save_pretrained(folder)
    return folder
