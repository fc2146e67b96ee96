"""Models with random weights, made of sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3Config

from midflight.errors import ConfigError
from midflight.models.names import torch_dtype


def make_model(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    max_context: int,
    seed: int,
    dtype: str | torch.dtype,
    tied: bool = True,
    eos_token_id: int = 256,
    pad_token_id: int = 261,
) -> PreTrainedModel:
    """A Qwen3 with random weights that depend on the sizes and `seed` only: drawn in float32 on the
    CPU, then converted.

    The global random state is left as it was. Raises `ConfigError` if the value of an option does
    not fit. It names the option and the remedy.
    """
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "max_context": max_context,
    }
    _check_sizes(sizes, vocab_size=vocab_size, eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_context,
        tie_word_embeddings=tied,
        initializer_range=_initial_deviation(hidden_size),
        bos_token_id=None,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        use_cache=True,
    )
    return _drawn(config, seed=seed, dtype=torch_dtype(dtype)).eval()


def _drawn(config: Qwen3Config, *, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config))
    for parameter in model.parameters():
        # Not `model.to(dtype)`: that would round the rotary frequencies too, which loading keeps in
        # float32.
        parameter.data = parameter.data.to(dtype)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model


def _initial_deviation(hidden_size: int) -> float:
    """Standard deviation of the initial weights: the usual 0.02 for wide models, more for narrow
    ones, whose sums are shorter.
    """
    return max(0.02, 0.5 * hidden_size**-0.5)


def _check_sizes(
    sizes: Mapping[str, int], *, vocab_size: int, eos_token_id: int, pad_token_id: int
) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"making a model: model.{name} is {value}; it must be at least 1.")
    _check_heads(sizes["hidden_size"], sizes["num_heads"], sizes["num_kv_heads"])
    if vocab_size <= max(eos_token_id, pad_token_id):
        raise ConfigError(
            f"making a model: vocabulary of {vocab_size} tokens does not hold the end token "
            f"{eos_token_id} and the padding token {pad_token_id}; give the vocabulary size of the "
            "tokenizer."
        )


def _check_heads(hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
    if hidden_size % num_heads:
        raise ConfigError(
            f"making a model: model.num_heads {num_heads} does not divide model.hidden_size "
            f"{hidden_size}; choose a divisor."
        )
    if (hidden_size // num_heads) % 2:
        raise ConfigError(
            f"making a model: model.hidden_size {hidden_size} / model.num_heads {num_heads} is "
            "odd; rotary positions need heads of even width."
        )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"making a model: model.num_kv_heads {num_kv_heads} does not divide model.num_heads "
            f"{num_heads}; choose a divisor."
        )
