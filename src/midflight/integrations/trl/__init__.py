"""TRL's trainers by their own names, over a run of ours: `GRPOTrainer` and `AsyncGRPOTrainer`, with
the arguments of trl 1.16. docs/from-trl.md gives the option for each.
"""

from midflight.integrations.trl.async_trainer import AsyncGRPOTrainer
from midflight.integrations.trl.config import AsyncGRPOConfig
from midflight.integrations.trl.grpo_config import GRPOConfig
from midflight.integrations.trl.grpo_trainer import GRPOTrainer
from midflight.integrations.trl.mixture import DatasetConfig, DatasetMixtureConfig, get_dataset
from midflight.integrations.trl.scripts import (
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

__all__ = [
    "AsyncGRPOConfig",
    "AsyncGRPOTrainer",
    "DatasetConfig",
    "DatasetMixtureConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
    "get_peft_config",
    "get_quantization_config",
]
