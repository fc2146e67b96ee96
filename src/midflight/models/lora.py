"""Low-rank adapters of a frozen base (Hu et al. 2021), by PEFT: adding, saving, loading and merging
them.

`named_tensors` of a model with adapters are its adapters: they are trained, kept in checkpoints,
and handed over. The base is the same everywhere and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from midflight.errors import ConfigError, ModelNotFound, WeightsCorrupt, nearest
from midflight.models.adapters import (
    WEIGHTS,
    Adapter,
    adapted_layers,
    adapter_name,
    base_name,
    factor_names,
)
from midflight.models.names import assign, named_tensors
from midflight.models.permissions import open_to_others
from midflight.models.text_tower import other_parts

if TYPE_CHECKING:
    from peft import LoraConfig

_NAME = "default"
"""PEFT's name of the only adapter of each layer."""


def check_new(has_adapters: bool) -> None:
    """Raises `ConfigError` if the model has adapters, to which no others are added."""
    if has_adapters:
        raise ConfigError(
            "lora.rank is set, and the model has adapters already, which are trained without it; "
            "remove [lora]."
        )


def lora_config(
    model: PreTrainedModel, *, rank: int, alpha: float, targets: Sequence[str] = ()
) -> LoraConfig:
    """PEFT's configuration of the adapters, checked against the model. Without targets it adapts
    all linear layers but the output layer.

    There is no dropout: the log-probabilities that are trained must be those that were sampled.
    Raises `ConfigError` if the model lacks a layer. It names the layer.
    """
    check_new(is_adapted(model))
    linear = _linear_layers(model)
    unknown = [name for name in targets if name not in linear]
    if unknown:
        raise ConfigError(
            f"lora.targets names {unknown[0]!r}, and the model has no linear layer of this "
            f"name.{nearest(unknown[0], linear)} It has: {', '.join(linear)}."
        )
    if not linear:
        raise ConfigError(
            f"adding adapters: {type(model).__name__} has no linear layers to adapt; remove [lora] "
            "to train all weights."
        )
    return _peft_config(model, rank, alpha, targets or linear)


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Adds adapters that change nothing yet, since B is 0, and freezes the base. A depends on sizes
    and `seed` only.

    The global random state is left as it was.
    """
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, _NAME)
    for parameter in model.parameters():
        parameter.grad = None  # left by a warm start: the base has no use for it any more
    model.eval()


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors but those of adapters, by the names they have in files without adapters."""
    return {
        base_name(name): tensor
        for name, tensor in model.state_dict().items()
        if adapter_name(name) is None
    }


def merged_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the model without adapters that computes the same."""
    config = _config_of(model)
    return merged(base_tensors(model), named_tensors(model), scale=config.lora_alpha / config.r)


@torch.no_grad()
def merged(
    base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], *, scale: float
) -> dict[str, Tensor]:
    """W + scale B A for each adapted layer, in at least float32, rounded to the dtype of W; other
    tensors as they are. Names are those of files.
    """
    layers = adapted_layers(list(adapters))
    known = set[str]()
    for layer in layers:
        known.update(factor_names(layer))
    unknown = sorted(adapters.keys() - known)
    if unknown:
        raise WeightsCorrupt(
            f"merging adapters: tensor {unknown[0]!r} is of no linear layer; give plain adapters "
            "of linear layers."
        )
    tensors = dict(base)
    for layer in layers:
        a, b = (adapters[name] for name in factor_names(layer))
        name = f"{layer}.weight"
        if name not in base:
            raise WeightsCorrupt(
                f"merging adapters: the base has no tensor {name!r}; give the base that they were "
                "trained on."
            )
        weight = base[name]
        exact = torch.promote_types(weight.dtype, torch.float32)
        added = scale * (b.to(exact) @ a.to(exact))
        tensors[name] = (weight.to(exact) + added).to(weight.dtype)
    return tensors


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Saves adapters as PEFT does, so that `PeftModel.from_pretrained` and inference servers load
    the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _config_of(model).save_pretrained(str(folder))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in named_tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    open_to_others(folder)


def load_adapters(model: PreTrainedModel, adapter: Adapter) -> None:
    """Adds the adapters of a folder to the model of its base. Raises `ModelNotFound` if they do not
    fit.
    """
    config = _peft_config(model, adapter.rank, adapter.alpha, adapter.targets)
    try:
        add_adapters(model, config, seed=0)
        assign(model, load_file(adapter.weights))
    except (OSError, ValueError, SafetensorError, WeightsCorrupt) as error:
        raise ModelNotFound(f"loading the adapters in {str(adapter.folder)!r}: {error}") from error


def _peft_config(
    model: PreTrainedModel, rank: int, alpha: float, targets: Sequence[str]
) -> LoraConfig:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            f"low-rank adapters need PEFT ({error}): pip install 'midflight[lora]'"
        ) from error
    others = "|".join(re.escape(part) for part in other_parts(model))
    return LoraConfig(
        r=rank,
        lora_alpha=_whole(alpha),
        target_modules=list(targets),
        exclude_modules=f"({others}).*" if others else None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _whole(alpha: float) -> int:
    """Alpha, as an integer if it is one. PEFT declares alpha an integer, computes with any number,
    and keeps the number that it got in its file.
    """
    return int(alpha) if alpha == int(alpha) else alpha  # pyright: ignore[reportReturnType]


def _config_of(model: PreTrainedModel) -> LoraConfig:
    return model.peft_config[_NAME]  # pyright: ignore


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """The last words of the names of the text tower's linear layers, sorted. The output layer is
    left out, because it may be the embedding.
    """
    output = model.get_output_embeddings()
    others = other_parts(model)
    found = set[str]()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module is output or name.startswith(others):
            continue
        found.add(name.rpartition(".")[2])
    return sorted(found)
