"""TRL's asynchronous GRPO: `AsyncGRPOConfig` and `AsyncGRPOTrainer` with the arguments of trl 1.16.
docs/from-trl.md gives the option for each.
"""

from midflight.integrations.trl.config import AsyncGRPOConfig
from midflight.integrations.trl.trainer import AsyncGRPOTrainer

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer"]
