"""Low-rank adapters of a frozen base (Hu et al. 2021), by PEFT: adding, saving, loading and merging them.

`named_tensors` of a model with adapters are its adapters: they are trained, kept in checkpoints, and handed over. The base is
the same everywhere and stays what it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from midflight.errors import ConfigError, ModelNotFound, WeightsCorrupt, nearest
from midflight.models.adapter import WEIGHTS, Adapter, adapted_layers, adapter_name, base_name, factor_names
from midflight.models.names import assign, named_tensors

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

_NAME = "default"
"""PEFT's name of the only adapter of each layer."""


def lora_config(model: PreTrainedModel, *, rank: int, alpha: float, targets: Sequence[str] = ()) -> LoraConfig:
    """Checked against the model. No targets are all of its linear layers but the output layer.

    No dropout: the log-probabilities trained on must be those sampled. `ConfigError` names a layer that the model has not got.
    """
    if is_adapted(model):
        raise ConfigError("lora.rank is set, and the model has adapters already, which are trained without it; remove [lora].")
    linear = _linear_layers(model)
    if unknown := [name for name in targets if name not in linear]:
        raise ConfigError(
            f"lora.targets names {unknown[0]!r}, and the model has no linear layer of this name.{nearest(unknown[0], linear)} "
            f"It has: {', '.join(linear)}."
        )
    if not linear:
        raise ConfigError(f"adding adapters: {type(model).__name__} has no linear layers to adapt; remove [lora] to train all weights.")
    return _peft_config(rank, alpha, targets or linear)


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Adds adapters that change nothing yet, since B is 0, and freezes the base. A depends on sizes and `seed` only.

    The global random state is left as it was.
    """
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, _NAME)
    for parameter in model.parameters():
        parameter.grad = None  # of a warm start: the base has no use for them any more
    model.eval()


def is_adapted(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors but those of adapters, by the names they have in files without adapters."""
    return {base_name(name): tensor for name, tensor in model.state_dict().items() if adapter_name(name) is None}


def merged_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the model without adapters that computes the same."""
    config = _config_of(model)
    return merged(base_tensors(model), named_tensors(model), scale=config.lora_alpha / config.r)


@torch.no_grad()
def merged(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], *, scale: float) -> dict[str, Tensor]:
    """W + scale B A for each adapted layer, in at least float32, rounded to the dtype of W; other tensors as they are. Names are those of files."""
    tensors, layers = dict(base), adapted_layers(list(adapters))
    if unknown := sorted(adapters.keys() - {name for layer in layers for name in factor_names(layer)}):
        raise WeightsCorrupt(f"merging adapters: tensor {unknown[0]!r} is of no linear layer; give plain adapters of linear layers.")
    for layer in layers:
        a, b = (adapters[name] for name in factor_names(layer))
        name = f"{layer}.weight"
        if name not in base:
            raise WeightsCorrupt(f"merging adapters: the base has no tensor {name!r}; give the base that they were trained on.")
        exact = torch.promote_types(base[name].dtype, torch.float32)
        tensors[name] = (base[name].to(exact) + scale * (b.to(exact) @ a.to(exact))).to(base[name].dtype)
    return tensors


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """As PEFT does it, so that `PeftModel.from_pretrained` and inference servers load the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _config_of(model).save_pretrained(str(folder))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in named_tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load_adapters(model: PreTrainedModel, adapter: Adapter) -> None:
    """Adds the adapters of a folder to the model of its base. `ModelNotFound` when they do not fit."""
    config = _peft_config(adapter.rank, adapter.alpha, adapter.targets)
    try:
        add_adapters(model, config, seed=0)
        assign(model, load_file(adapter.weights))
    except (OSError, ValueError, SafetensorError, WeightsCorrupt) as error:
        raise ModelNotFound(f"loading the adapters in {str(adapter.folder)!r}: {error}") from error


def _peft_config(rank: int, alpha: float, targets: Sequence[str]) -> LoraConfig:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(f"low-rank adapters need PEFT ({error}): pip install 'midflight[lora]'") from error
    return LoraConfig(r=rank, lora_alpha=_whole(alpha), target_modules=list(targets), lora_dropout=0.0, bias="none", task_type="CAUSAL_LM")


def _whole(alpha: float) -> int:
    """PEFT says that alpha is an integer, computes with any number, and keeps what it was given in its file."""
    return int(alpha) if alpha == int(alpha) else alpha  # pyright: ignore[reportReturnType]


def _config_of(model: PreTrainedModel) -> LoraConfig:
    return model.peft_config[_NAME]  # pyright: ignore


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """The last words of the names of linear layers, sorted; without the output layer, which may be the embedding."""
    output = model.get_output_embeddings()
    return sorted(
        {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not output}
    )
