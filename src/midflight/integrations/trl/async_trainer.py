"""The `AsyncGRPOTrainer` of trl 1.16 over a run of ours."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from midflight.errors import ConfigError
from midflight.integrations.trl.config import AsyncGRPOConfig
from midflight.integrations.trl.trainer import TrlArguments, TrlTrainer, checked_args


class AsyncGRPOTrainer(TrlTrainer):
    """Takes trl's arguments; docs/from-trl.md gives the counterpart of each. Raises `ConfigError`
    for an argument that has no meaning here, and names the one to use.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Callable[..., Any] | list[Callable[..., Any]] | None = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Any = None,
        rollout_worker: Any = None,
        weight_transfer: Any = None,
    ) -> None:
        _check_swapped(rollout_worker=rollout_worker, weight_transfer=weight_transfer)
        chosen = args or AsyncGRPOConfig(f"{Path(str(model)).name}-AsyncGRPO")
        super().__init__(
            TrlArguments(
                model,
                reward_funcs,
                checked_args(chosen, AsyncGRPOConfig),
                train_dataset,
                processing_class,
                callbacks,
                optimizers,
                peft_config,
                tools,
                environment_factory,
            )
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        raise ConfigError(
            "trl's asynchronous trainer has no evaluation; use GRPOTrainer with eval_dataset, or "
            "midflight.Trainer with heldout, and its evaluate()."
        )


def _check_swapped(*, rollout_worker: Any, weight_transfer: Any) -> None:
    if rollout_worker is not None:
        raise ConfigError(
            "rollout_worker: agents of your own are an environment (docs/environments.md), or "
            "workers that claim (docs/sessions.md)."
        )
    if weight_transfer is not None:
        raise ConfigError(
            "weight_transfer: versions travel by weights.transport in the configuration of "
            "midflight.Trainer (docs/weight-sync.md)."
        )
