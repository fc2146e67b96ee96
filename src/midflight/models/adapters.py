"""Low-rank adapters as files, in PEFT's own format, and the names of their tensors. Torch-free.

A model folder with `adapter/adapter_config.json` and `adapter/adapter_model.safetensors` in it is
that model with these adapters.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midflight.errors import ModelNotFound

FOLDER = "adapter"
"""The folder of the adapters in a model folder. They are not beside the base's weights, where
`transformers` would load them unasked.
"""
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_IN_MEMORY = re.compile(r"(.*)\.(lora_[AB])\.default\.weight")
_IN_FILES = re.compile(re.escape(_PREFIX) + r"(.*)\.lora_A\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank adapters. A target has A [rank, in] and B [out, rank] beside its W, and computes W x
    + scale B A x.
    """

    folder: Path
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The last words of the adapted layers' names."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


class _AdapterConfig(msgspec.Struct, frozen=True):
    """The fields that we compute by, and the fields that would make it another kind of adapters,
    which is refused.
    """

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    bias: str = "none"
    use_dora: bool = False
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: tuple[str, ...] | None = None

    def is_plain(self) -> bool:
        if self.use_dora or self.use_rslora or self.fan_in_fan_out:
            return False
        if self.rank_pattern or self.alpha_pattern or self.modules_to_save:
            return False
        return self.peft_type == "LORA" and self.bias == "none" and self.r > 0


def adapter_of(model: Path) -> Adapter | None:
    """The adapters of a model folder. `None` if it has none. Raises `ModelNotFound` if engines
    cannot serve adapters of their kind.
    """
    folder = model / FOLDER
    if not (folder / CONFIG).is_file():
        return None
    remedy = (
        "give adapters as PEFT's LoraConfig writes them, with one rank, one alpha and a list "
        "of targets"
    )
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_AdapterConfig)
    except (msgspec.DecodeError, OSError) as error:
        raise ModelNotFound(f"reading {folder / CONFIG}: {error}; {remedy}.") from error
    if not config.is_plain():
        raise ModelNotFound(
            f"reading {folder / CONFIG}: these are not plain low-rank adapters; {remedy}."
        )
    return Adapter(folder, config.r, config.lora_alpha, config.target_modules)


def served_weights(model: Path) -> tuple[Path, ...]:
    """The files whose tensors are given to engines with each version: the adapters' if there are
    any, else the model's.
    """
    adapter = adapter_of(model)
    if adapter is not None:
        return (adapter.weights,)
    return tuple(sorted(model.glob("*.safetensors")))


def adapter_name(name: str) -> str | None:
    """PEFT's name, in files and on the wire, of a tensor in memory. `None` for tensors
    of the base.
    """
    found = _IN_MEMORY.fullmatch(name)
    return None if found is None else f"{_PREFIX}{found[1]}.{found[2]}.weight"


def base_name(name: str) -> str:
    """The name in files of a tensor of the base. In memory an adapted tensor lies one
    level deeper.
    """
    return name.replace(".base_layer.", ".")


def adapted_layers(names: list[str]) -> list[str]:
    """The layers that tensors of these names adapt, in their order."""
    matches = (_IN_FILES.fullmatch(name) for name in names)
    return [found[1] for found in matches if found is not None]


def factor_names(layer: str) -> tuple[str, str]:
    """The names of A and B of a layer, in files."""
    return f"{_PREFIX}{layer}.lora_A.weight", f"{_PREFIX}{layer}.lora_B.weight"
