"""Making, saving, loading and exporting models: any decoder-only architecture that `transformers`
knows, from local safetensors only; the text tower of one that also reads images or sound is
trained, its other parts stay what they are; and low-rank adapters of a frozen base (Hu et al.
2021), by PEFT: adding, saving, loading and merging them.

`named_tensors` of a model with adapters are its adapters: they are trained, kept in checkpoints,
and handed over. The base is the same everywhere and stays what it is.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
)

from midflight.errors import ConfigError, ModelNotFound, WeightsCorrupt, nearest
from midflight.models.names import assign, named_tensors, torch_dtype
from midflight.models.permissions import open_to_others
from midflight.models.proof import described
from midflight.models.sizes import (
    FOLDER,
    WEIGHTS,
    Adapter,
    adapted_layers,
    adapter_name,
    adapter_of,
    base_name,
    factor_names,
    read_config,
)

if TYPE_CHECKING:
    from peft import LoraConfig


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

    The global random state is left as it was. `ConfigError` names the option whose value does not
    fit and how to mend it.
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


def save_model(model: PreTrainedModel, folder: Path, *, merged: bool = False) -> None:
    """Writes config.json, generation_config.json and model.safetensors into `folder`, which is
    created.

    Adapters go into a folder in it, beside their base; `merged`, into the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not is_adapted(model):
        model.save_pretrained(folder)
        return
    model.save_pretrained(
        folder, state_dict=merged_tensors(model) if merged else base_tensors(model)
    )
    if not merged:
        save_adapters(model, folder / FOLDER)


def load_model(
    folder: Path, *, dtype: str | torch.dtype, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The model of a Hugging Face folder, in evaluation mode, with the adapters that `save_model`
    put there, if any.

    Reads local safetensors only: nothing is fetched, unpickled or run.

    `ModelNotFound` names the folder, what is wrong with it, and the remedy.
    """
    folder = Path(folder)
    check_folder(folder)
    try:
        # The stubs know only the plain return type; with output_loading_info it is a pair.
        model, info = cast(
            tuple[PreTrainedModel, dict[str, Any]],
            auto_class(
                AutoConfig.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False
                )
            ).from_pretrained(
                str(folder),
                dtype=torch_dtype(dtype),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            ),
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
    _check_complete(folder, info)
    nn.Module.to(model, device=torch.device(device))
    others = other_parts(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(others))
    if (adapter := adapter_of(folder)) is not None:
        load_adapters(model, adapter)
    return model.eval()


def auto_class(config: Any) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """What loads all of a folder: a text tower alone would be written in other names than the
    folder's, and without its other parts.
    """
    whole = (config.architectures or [""])[0].endswith("ForConditionalGeneration")
    return (
        AutoModelForImageTextToText
        if whole and config.get_text_config() is not config
        else AutoModelForCausalLM
    )


def other_parts(model: PreTrainedModel) -> tuple[str, ...]:
    """The beginnings of the names of what stands beside the text tower and the output layer: towers
    for images, projectors.
    """
    decoder = model.get_decoder()
    output = model.get_output_embeddings()
    if model.config.get_text_config() is model.config or decoder is None:
        return ()
    text = {
        id(module) for part in (decoder, output) if part is not None for module in part.modules()
    }
    around = [
        name
        for name, module in model.named_modules()
        if not text.isdisjoint(map(id, module.modules()))
    ]
    return tuple(
        f"{name}."
        for name, _ in model.named_modules()
        if name not in around and name.rpartition(".")[0] in around
    )


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


def check_folder(folder: Path) -> None:
    read_config(folder)
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFound(
            f"loading the model in {str(folder)!r}: config.json names no architecture this "
            f"transformers knows ({_first_line(error)}); use a decoder-only model that "
            "transformers supports without remote code."
        ) from error
    except Exception as error:
        # such as values that the architecture's configuration does not allow
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
    if not any(
        (folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")
    ):
        raise ModelNotFound(
            f"loading the model in {str(folder)!r}: no model.safetensors; convert the weights to "
            "safetensors (pickle is never read)."
        )


def _check_complete(folder: Path, info: dict[str, Any]) -> None:
    """Missing tensors would be left random: such a model must not be served."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelNotFound(
            f"loading the model in {str(folder)!r}: {len(missing)} tensors are missing, the first "
            f"{missing[0]!r}; export or download the model again."
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".;:")


_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")
_WEIGHT_NAMES = ("config.json", "generation_config.json")


def export_model(
    model: PreTrainedModel, tokenizer_folder: Path, dest: Path, *, merged: bool = False
) -> None:
    """Writes weights, configuration and the tokenizer's files to `dest`: complete or not at all.
    For adapters see `save_model`.

    The folder is built beside `dest` and renamed into place; an earlier export there is replaced. A
    crash leaves the earlier export or none, never a part. `ConfigError` when `dest` holds something
    that is not a model folder.
    """
    _check(tokenizer_folder, dest)
    dest.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    try:
        _copy_tokenizer(tokenizer_folder, building)
        save_model(model, building, merged=merged)
        open_to_others(building)
        _replace(building, dest)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _check(tokenizer_folder: Path, dest: Path) -> None:
    if not (tokenizer_folder / "tokenizer_config.json").is_file():
        raise ModelNotFound(
            f"exporting to {str(dest)!r}: {str(tokenizer_folder)!r} has no tokenizer_config.json; "
            "give the tokenizer's folder."
        )
    if (
        dest.exists()
        and not (dest / "config.json").is_file()
        and not (dest.is_dir() and not any(dest.iterdir()))
    ):
        raise ConfigError(
            f"exporting to {str(dest)!r}: it exists and is no model folder; move it away or choose "
            "another place."
        )


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Everything that belongs to the tokenizer: all files of its folder but weights and the model's
    configuration.
    """
    for path in source.iterdir():
        if (
            path.is_file()
            and path.name not in _WEIGHT_NAMES
            and not path.name.endswith(_WEIGHT_SUFFIXES)
        ):
            shutil.copyfile(path, target / path.name)


def _replace(building: Path, dest: Path) -> None:
    """A full folder cannot be renamed over in one call, so the old one steps aside for a moment."""
    if not dest.exists():
        building.rename(dest)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{dest.name}.old.", dir=dest.parent))
    try:
        dest.rename(old / dest.name)
        try:
            building.rename(dest)
        except OSError:
            (old / dest.name).rename(dest)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


# --- Low-rank adapters, by PEFT -------------------------------------------------------------------


_NAME = "default"
"""PEFT's name of the only adapter of each layer."""


def lora_config(
    model: PreTrainedModel, *, rank: int, alpha: float, targets: Sequence[str] = ()
) -> LoraConfig:
    """Checked against the model. No targets are all of its linear layers but the output layer.

    No dropout: the log-probabilities trained on must be those sampled. `ConfigError` names a layer
    that the model has not got.
    """
    if is_adapted(model):
        raise ConfigError(
            "lora.rank is set, and the model has adapters already, which are trained without it; "
            "remove [lora]."
        )
    linear = _linear_layers(model)
    if unknown := [name for name in targets if name not in linear]:
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
        parameter.grad = None  # of a warm start: the base has no use for them any more
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
    tensors = dict(base)
    layers = adapted_layers(list(adapters))
    if unknown := sorted(
        adapters.keys() - {name for layer in layers for name in factor_names(layer)}
    ):
        raise WeightsCorrupt(
            f"merging adapters: tensor {unknown[0]!r} is of no linear layer; give plain adapters "
            "of linear layers."
        )
    for layer in layers:
        a, b = (adapters[name] for name in factor_names(layer))
        name = f"{layer}.weight"
        if name not in base:
            raise WeightsCorrupt(
                f"merging adapters: the base has no tensor {name!r}; give the base that they were "
                "trained on."
            )
        exact = torch.promote_types(base[name].dtype, torch.float32)
        tensors[name] = (base[name].to(exact) + scale * (b.to(exact) @ a.to(exact))).to(
            base[name].dtype
        )
    return tensors


def save_adapters(model: PreTrainedModel, folder: Path) -> None:
    """As PEFT does it, so that `PeftModel.from_pretrained` and inference servers load the
    folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _config_of(model).save_pretrained(str(folder))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in named_tensors(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    open_to_others(folder)


def load_adapters(model: PreTrainedModel, adapter: Adapter) -> None:
    """Adds the adapters of a folder to the model of its base. `ModelNotFound` when they do not
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
    """PEFT says that alpha is an integer, computes with any number, and keeps what it was given in
    its file.
    """
    return int(alpha) if alpha == int(alpha) else alpha  # pyright: ignore[reportReturnType]


def _config_of(model: PreTrainedModel) -> LoraConfig:
    return model.peft_config[_NAME]  # pyright: ignore


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """The last words of the names of the text tower's linear layers, sorted; without the output
    layer, which may be the embedding.
    """
    output = model.get_output_embeddings()
    others = other_parts(model)
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not output
    }
    return sorted({name.rpartition(".")[2] for name in linear if not name.startswith(others)})
