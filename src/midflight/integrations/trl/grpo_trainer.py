"""The `GRPOTrainer` of trl 1.16 over a run of ours."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from midflight.errors import ConfigError
from midflight.integrations.trl.grpo_config import EVALUATION, GRPOConfig
from midflight.integrations.trl.metrics import grpo_metrics
from midflight.integrations.trl.trainer import TrlArguments, TrlTrainer, checked_args
from midflight.observe.lines import EvaluationLine, StepLine
from midflight.python.trainer import Trainer


class GRPOTrainer(TrlTrainer):
    """Takes trl's arguments; docs/from-trl.md gives the counterpart of each. Raises `ConfigError`
    for an argument that has no meaning here, and names the one to use.
    """

    def __init__(
        self,
        model: str,
        reward_funcs: Callable[..., Any] | list[Callable[..., Any]] | None = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        _check_swapped(
            reward_processing_classes=reward_processing_classes,
            quantization_config=quantization_config,
            rollout_func=rollout_func,
        )
        chosen = checked_args(args or GRPOConfig(f"{Path(str(model)).name}-GRPO"), GRPOConfig)
        if isinstance(eval_dataset, Mapping):
            names = ", ".join(cast("Mapping[str, Any]", eval_dataset))
            raise ConfigError(
                f"eval_dataset is a dict of {names}: give one Dataset; several are sources with "
                "heldout of their own in the configuration of midflight.Trainer."
            )
        is_evaluated = chosen.eval_strategy != "no"
        if is_evaluated and eval_dataset is None:
            raise ConfigError(
                f"eval_strategy={chosen.eval_strategy!r} without an eval_dataset: give the rows to "
                "evaluate on."
            )
        self.eval_dataset = eval_dataset
        self.train_dataset = train_dataset
        super().__init__(
            TrlArguments(
                model,
                reward_funcs,
                chosen,
                train_dataset,
                processing_class,
                callbacks,
                optimizers,
                peft_config,
                tools,
                environment_factory,
            ),
            heldout=eval_dataset if is_evaluated else None,
            shuffle=chosen.shuffle_dataset,
            weights=chosen.reward_weights,
        )

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> Mapping[str, float]:
        """Returns the mean reward of the trained model on these rows, or on `eval_dataset` of the
        trainer, one answer to each; before there is a trained model, of the one to begin with.
        """
        del ignore_keys
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if rows is None or not len(rows):
            raise ConfigError("evaluate() has no rows: give them to it, or to the trainer.")
        held = list(rows)
        tables = self.args.tables(model=self._model, num_rows=len(held))
        tables["evaluation"] = {}
        trainer = Trainer(
            self._model, [_not_asked(held[0])], config=tables, heldout=held, **self._asked
        )
        found = [score for score in trainer.evaluate().values() if score is not None]
        if not found:
            return {}
        scores = {f"{metric_key_prefix}_reward": sum(found) / len(found)}
        self._log(scores, step=self.state.global_step // self._updates)
        return scores

    def metrics_of(self, line: StepLine) -> Mapping[str, float]:
        return grpo_metrics(line)

    def _evaluated(self, line: EvaluationLine) -> None:
        """Logs the suite of several answers to each row, or where there is none the usual one."""
        is_suite = line.source.startswith(f"{EVALUATION}/")
        has_suite = bool(self.trainer.config.evaluation.suites)
        if is_suite != has_suite or line.mean_reward is None:
            return
        scores = {"eval_reward": line.mean_reward}
        self._log(scores, step=line.version)
        self._tell("on_evaluate", metrics=scores)


def _not_asked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row to train on, of a trainer that only evaluates. Its prompt is none of those held out."""
    text = "(not asked)"
    prompt = text if isinstance(row["prompt"], str) else [{"role": "user", "content": text}]
    return {**row, "prompt": prompt}


def _check_swapped(
    *, reward_processing_classes: Any, quantization_config: Any, rollout_func: Any
) -> None:
    tokenizers: Any = reward_processing_classes
    if isinstance(tokenizers, list | tuple):
        tokenizers = [one for one in cast("Sequence[Any]", tokenizers) if one is not None]
    if tokenizers:
        raise ConfigError(
            "reward_processing_classes: a reward model is one that you call in a function; load "
            "its tokenizer there."
        )
    if quantization_config is not None:
        raise ConfigError(
            "quantization_config: weights are float32 or bfloat16; with peft_config and "
            "model_init_kwargs={'dtype': 'bfloat16'} a model takes the least."
        )
    if rollout_func is not None:
        raise ConfigError(
            "rollout_func: agents of your own are an environment_factory with tools, or a function "
            "`(task, client) -> reward` as `environment` of midflight.Trainer "
            "(docs/environments.md)."
        )
