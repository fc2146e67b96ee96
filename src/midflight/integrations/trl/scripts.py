"""What trl's example scripts import beside its trainers: options of a script and of its model, the
parser of a command line, and adapters of the options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from midflight.errors import ConfigError, nearest


def _said(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass
class ScriptArguments:
    """The data of a script."""

    dataset_name: str | None = _said(None, "path of the dataset")
    dataset_config: str | None = _said(None, "name of its configuration")
    dataset_train_split: str = _said("train", "split to train on")
    dataset_test_split: str = _said("test", "split to evaluate on")
    dataset_streaming: bool = _said(False, "whether it is streamed")
    ignore_bias_buffers: bool = _said(False, "without effect here")


@dataclasses.dataclass
class ModelConfig:
    """The model of a script. `lora_dropout` is 0 here, where trl's is 0.05: there is no dropout."""

    model_name_or_path: str | None = _said(None, "path of the model's folder")
    model_revision: str = _said("main", "a folder has one revision")
    dtype: str | None = _said("float32", "dtype of the weights: auto, float32 or bfloat16")
    attn_implementation: str | None = _said(None, "without effect here")
    use_peft: bool = _said(False, "train adapters instead of all weights")
    lora_r: int = _said(16, "rank of the adapters")
    lora_alpha: int = _said(32, "their output is scaled by lora_alpha / lora_r")
    lora_dropout: float = _said(0.0, "there is no dropout here")
    lora_target_modules: list[str] | None = _said(None, "layers that get one; all by default")
    lora_target_parameters: list[str] | None = _said(None, "refused: adapters are of layers")
    lora_modules_to_save: list[str] | None = _said(None, "refused: only adapters are trained")
    lora_task_type: str = _said("CAUSAL_LM", "task of the model")
    use_rslora: bool = _said(False, "refused: adapters are scaled by lora_alpha / lora_r")
    use_dora: bool = _said(False, "refused: adapters are plain LoRA")
    load_in_8bit: bool = _said(False, "refused: weights are float32 or bfloat16")
    load_in_4bit: bool = _said(False, "refused: weights are float32 or bfloat16")
    bnb_4bit_quant_type: str = _said("nf4", "as load_in_4bit")
    use_bnb_nested_quant: bool = _said(False, "as load_in_4bit")
    bnb_4bit_quant_storage: str | None = _said(None, "as load_in_4bit")


def get_peft_config(model_args: ModelConfig) -> dict[str, Any] | None:
    """The adapters for `peft_config` of a trainer, or None. The trainer refuses what it has not."""
    if not model_args.use_peft:
        return None
    return {
        "r": model_args.lora_r,
        "lora_alpha": model_args.lora_alpha,
        "target_modules": model_args.lora_target_modules,
        "task_type": model_args.lora_task_type,
        "lora_dropout": model_args.lora_dropout,
        "target_parameters": model_args.lora_target_parameters,
        "modules_to_save": model_args.lora_modules_to_save,
        "use_rslora": model_args.use_rslora,
        "use_dora": model_args.use_dora,
    }


def get_quantization_config(model_args: ModelConfig) -> None:
    """None: weights are not quantised. Raises `ConfigError` where that is asked for."""
    for name in ("load_in_8bit", "load_in_4bit"):
        if getattr(model_args, name):
            raise ConfigError(
                f"{name}=True: weights are float32 or bfloat16; use --use_peft with --dtype "
                "bfloat16, which takes the least."
            )


class TrlParser:
    """Reads dataclasses from a command line, and before it from the YAML file of `--config`."""

    def __init__(self, dataclass_types: Iterable[type] | type | None = None, **kwargs: Any) -> None:
        from transformers import HfArgumentParser  # here: only scripts with a command line need it

        types = dataclass_types or ()
        chosen = [types] if isinstance(types, type) else list(types)
        self._parser = HfArgumentParser(cast(Any, chosen), **kwargs)

    def parse_args_and_config(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """One object for each dataclass. Options of the command line override those of the file."""
        import sys

        words = list(sys.argv[1:] if args is None else args)
        if "--config" in words:
            at = words.index("--config")
            self._set_defaults(Path(words[at + 1]))
            del words[at : at + 2]
        *found, left = self._parser.parse_args_into_dataclasses(
            args=words, return_remaining_strings=True
        )
        if return_remaining_strings:
            return (*found, left)
        if left and fail_with_unknown_args:
            known = [action.dest for action in self._actions]
            first = next((word for word in left if word.startswith("--")), left[0])
            hint = nearest(first.removeprefix("--").partition("=")[0], known)
            raise ConfigError(f"unknown words on the command line: {' '.join(left)}.{hint}")
        return tuple(found)

    @property
    def _actions(self) -> list[Any]:
        return cast(Any, self._parser)._actions  # argparse has no other way to ask for them

    def _set_defaults(self, path: Path) -> None:
        import yaml

        options = cast("dict[str, Any]", yaml.safe_load(path.read_text()) or {})
        known = {action.dest: action for action in self._actions}
        for name in options:
            if name not in known:
                raise ConfigError(f"{path} has an unknown option {name!r}.{nearest(name, known)}")
            known[name].required = False
        self._parser.set_defaults(**options)
