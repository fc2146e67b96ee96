"""Model folders: any decoder-only architecture that `transformers` knows, read from local
safetensors only.

If a model also reads images or sound, only its text tower is trained, and its other parts stay as
they are.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from midflight.errors import ModelNotFound
from midflight.models.adapters import FOLDER, adapter_of
from midflight.models.lora import (
    base_tensors,
    is_adapted,
    load_adapters,
    merged_tensors,
    save_adapters,
)
from midflight.models.names import torch_dtype
from midflight.models.proof import described
from midflight.models.sizes import read_config
from midflight.models.text_tower import other_parts


def save_model(model: PreTrainedModel, folder: Path, *, merged: bool = False) -> None:
    """Writes config.json, generation_config.json and model.safetensors into `folder`, which is
    created.

    Adapters go into a folder in it, beside their base; with `merged` they go into the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not is_adapted(model):
        model.save_pretrained(folder)
    elif merged:
        model.save_pretrained(folder, state_dict=merged_tensors(model))
    else:
        model.save_pretrained(folder, state_dict=base_tensors(model))
        save_adapters(model, folder / FOLDER)


def load_model(
    folder: Path, *, dtype: str | torch.dtype, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The model of a Hugging Face folder, in evaluation mode, with the adapters that `save_model`
    put there, if any.

    It reads local safetensors only: nothing is fetched, unpickled or run. Raises `ModelNotFound` if
    the folder cannot be loaded. It names the folder, its fault, and the remedy.
    """
    folder = Path(folder)
    check_folder(folder)
    try:
        loaded = auto_class(_config_of(folder)).from_pretrained(
            str(folder),
            dtype=torch_dtype(dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        raise ModelNotFound(
            f"loading the model in {str(folder)!r}: {_first_line(error)}; export or download the "
            "model again."
        ) from error
    except Exception as error:  # the code of any architecture may raise anything
        raise ModelNotFound(
            f"loading the model in {str(folder)!r}: transformers {version('transformers')} raises "
            f"{described(error)}; correct its config.json, or export or download the model again."
        ) from error
    # The stubs know only the plain return type; with output_loading_info it is a pair.
    model, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    _check_complete(folder, info)
    device = torch.device(device)
    prepare(device)
    nn.Module.to(model, device=device)
    return _ready(model, folder)


def _ready(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapters of its folder, in evaluation mode. Only the text tower is
    trained.
    """
    others = other_parts(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(others))
    adapter = adapter_of(folder)
    if adapter is not None:
        load_adapters(model, adapter)
    return model.eval()


def prepare(device: torch.device) -> None:
    """Prepares torch for models on this device."""
    if device.type == "cuda":
        # cuDNN's attention makes a plan for each new shape, and almost every step has a new one.
        torch.backends.cuda.enable_cudnn_sdp(False)


def load_frame(folder: Path, *, dtype: str | torch.dtype) -> PreTrainedModel:
    """The model of a folder as `load_model` gives it, without its weights: parameters are on the
    meta device, and take no memory. Another process that has loaded the folder gives their numbers
    and those of the buffers.

    Raises `ModelNotFound` if there is no such model.
    """
    with _weights_on_meta():
        model = _unloaded(folder, torch_dtype(dtype))
    return _ready(model, folder)


@contextmanager
def _weights_on_meta() -> Generator[None]:
    """Puts the parameters of the modules that are made inside the block on the meta device. Buffers
    get their numbers, because those that no file has are computed when a module is made.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # one that is tied has been moved
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def outline(folder: Path) -> PreTrainedModel:
    """The model of a folder without its numbers, which takes no memory. Raises `ModelNotFound` if
    there is no such model.
    """
    with torch.device("meta"):
        return _unloaded(folder, torch.float32)


def _unloaded(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder as its configuration makes it."""
    check_folder(folder)
    config = _config_of(folder)
    try:
        model: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype)
    except Exception as error:  # an architecture fails as it likes to
        raise ModelNotFound(
            f"making the model in {str(folder)!r}: transformers {version('transformers')} raises "
            f"{described(error)}; correct its config.json, or install a version of transformers "
            "that makes it."
        ) from error
    return model


def _config_of(folder: Path) -> Any:
    return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def auto_class(config: Any) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """The class that loads all of a folder: a text tower alone would be written in other names than
    the folder's, and without its other parts.
    """
    is_whole = (config.architectures or [""])[0].endswith("ForConditionalGeneration")
    if is_whole and config.get_text_config() is not config:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def check_folder(folder: Path) -> None:
    """Raises `ModelNotFound` unless the folder has safetensors and the configuration of a decoder
    that this `transformers` takes.
    """
    read_config(folder)
    try:
        config = _config_of(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(
            f"loading the model in {str(folder)!r}: config.json names no architecture this "
            f"transformers knows ({_first_line(error)}); use a decoder-only model that "
            "transformers supports without remote code."
        ) from error
    except Exception as error:  # such as values that the architecture does not allow
        raise ModelNotFound(
            f"loading the model in {str(folder)!r}: transformers {version('transformers')} does "
            f"not take its config.json ({described(error)}); correct it, or install a version of "
            "transformers that takes it."
        ) from error
    if config.is_encoder_decoder:
        raise ModelNotFound(
            f"loading the model in {str(folder)!r}: {config.model_type} has an encoder; use a "
            "decoder-only model."
        )
    if not (
        (folder / "model.safetensors").is_file()
        or (folder / "model.safetensors.index.json").is_file()
    ):
        raise ModelNotFound(
            f"loading the model in {str(folder)!r}: no model.safetensors; convert the weights to "
            "safetensors (pickle is never read)."
        )


def _check_complete(folder: Path, info: dict[str, Any]) -> None:
    """Raises `ModelNotFound` if tensors are missing. They would be left random, and such a model
    must not be served.
    """
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelNotFound(
            f"loading the model in {str(folder)!r}: {len(missing)} tensors are missing, the first "
            f"{missing[0]!r}; export or download the model again."
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".;:")
