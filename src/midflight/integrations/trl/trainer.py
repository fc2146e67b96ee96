"""The `AsyncGRPOTrainer` of trl 1.16 over a run of ours. Engines, agents and rewards are started
here, so no server of vLLM is needed.
"""

import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from midflight.errors import ConfigError
from midflight.integrations.trl.config import AsyncGRPOConfig
from midflight.integrations.trl.environments import environment_class, rows_of_environments
from midflight.integrations.trl.metrics import trl_metrics
from midflight.observe.learning import means
from midflight.observe.lines import CheckpointLine, StepLine
from midflight.observe.summary import Summary
from midflight.python.trainer import Trainer

Row = Mapping[str, Any]


class TrainOutput(NamedTuple):
    """The same fields as in transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class AsyncGRPOTrainer:
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
        _check_model(model)
        _check_swapped(
            optimizers=optimizers, rollout_worker=rollout_worker, weight_transfer=weight_transfer
        )
        _check_tokenizer(processing_class, model)
        self.args = args or AsyncGRPOConfig(f"{Path(model).name}-AsyncGRPO")
        if not isinstance(self.args, AsyncGRPOConfig):  # pyright: ignore[reportUnnecessaryIsInstance] (a user's)
            raise ConfigError(
                f"args is {type(args).__name__}; import AsyncGRPOConfig from "
                "midflight.integrations.trl too."
            )
        rows, num_rows = _rows(train_dataset, environment_factory, self.args)
        tables = self.args.tables(model=model, num_rows=num_rows)
        tables["lora"] = _lora(peft_config)
        steps = tables["run"]["steps"]
        self.callbacks: list[Any] = list(callbacks or [])
        self.state = SimpleNamespace(
            global_step=0, max_steps=steps, epoch=0.0, log_history=[], is_world_process_zero=True
        )
        self.control: Any = SimpleNamespace(
            should_training_stop=False, should_save=False, should_evaluate=False, should_log=False
        )
        self._seen: list[Mapping[str, float]] = []
        self._num_rows = num_rows
        self.trainer = self._trainer(
            model, rows, reward_funcs, tools or [], _environments(environment_factory), tables
        )
        for note in self.args.notes:
            warnings.warn(note, stacklevel=2)

    def _trainer(
        self,
        model: str,
        rows: Any,
        rewards: Any,
        tools: Sequence[Any],
        environments: Sequence[type],
        tables: dict[str, dict[str, Any]],
    ) -> Trainer:
        return Trainer(
            model,
            rows,
            prompt="prompt",
            rewards=_rewards(rewards, environments),
            tools=[*tools, *environments],
            folder=self.args.output_dir or "trainer_output",
            config=tables,
            progress=not self.args.disable_tqdm,
            on_step=self._stepped,
            on_checkpoint=self._saved,
        )

    # --- trl's methods ----------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: bool | str | None = None, *, overwrite: bool = False
    ) -> TrainOutput:
        """Trains to the end. A run that the folder holds is kept: `resume_from_checkpoint=True`
        goes on with it, `overwrite=True` replaces it.
        """
        resume = resume_from_checkpoint
        if resume is None:
            resume = self.args.resume_from_checkpoint
        if isinstance(resume, str):
            raise ConfigError(
                f"resume_from_checkpoint is {resume!r}: a run goes on from its newest checkpoint; "
                "give True, or go back to an older one first by `midflight rollback`."
            )
        self._tell("on_train_begin")
        try:
            summary = self.trainer.train(resume=bool(resume), overwrite=overwrite)
        finally:
            self._tell("on_train_end")
        return self._output(summary)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copies the trained model's folder. It is there already, as `model` in
        `args.output_dir`.
        """
        trained = self.trainer.folder / "model"
        if not trained.is_dir():
            raise ConfigError(f"{self.trainer.folder} has no trained model yet; train first.")
        if output_dir is not None and Path(output_dir).resolve() != trained.resolve():
            shutil.copytree(trained, output_dir, dirs_exist_ok=True)

    def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        raise ConfigError(
            "trl's asynchronous trainer has no evaluation; use midflight.Trainer with heldout, and "
            "its evaluate()."
        )

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def remove_callback(self, callback: Any) -> None:
        self.callbacks = [
            one for one in self.callbacks if one is not callback and type(one) is not callback
        ]

    # --- What a run tells -------------------------------------------------------------------------

    def _stepped(self, line: StepLine) -> None:
        self.state.global_step = line.step
        if self._num_rows:
            self.state.epoch = line.step * self.args.groups_per_step / self._num_rows
        self._tell("on_step_end")
        self._seen.append(trl_metrics(line, group_size=self.args.num_generations))
        is_due = line.step % max(1, int(self.args.logging_steps)) == 0
        if is_due or line.step == self.state.max_steps:
            logs = {**means(self._seen), "step": line.step, "epoch": self.state.epoch}
            self._seen.clear()
            self.state.log_history.append(logs)
            self._tell("on_log", logs=logs)
        if self.control.should_training_stop:
            self.trainer.stop()

    def _saved(self, line: CheckpointLine) -> None:
        self._tell("on_save")

    def _tell(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            hear = getattr(callback, event, None)
            if not callable(hear):
                continue
            found = hear(self.args, self.state, self.control, **more)
            if found is not None:
                self.control = found

    def _output(self, summary: Summary) -> TrainOutput:
        losses = [logs["loss"] for logs in self.state.log_history if "loss" in logs]
        loss = sum(losses) / len(losses) if losses else 0.0
        metrics = {
            "train_runtime": summary.seconds,
            "train_steps_per_second": summary.steps / summary.seconds if summary.seconds else 0.0,
        }
        return TrainOutput(summary.steps, loss, metrics)


# --- Arguments ------------------------------------------------------------------------------------


def _check_model(model: object) -> None:
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model is {type(model).__name__}; give the path of a model folder, as trl's "
            "asynchronous trainer takes a text."
        )
    if not Path(model).is_dir():
        raise ConfigError(
            f"model is {str(model)!r}, and there is no such folder: nothing is fetched from a hub; "
            "download it and give its folder."
        )


def _check_swapped(
    *, optimizers: tuple[Any, Any], rollout_worker: Any, weight_transfer: Any
) -> None:
    if any(part is not None for part in optimizers):
        raise ConfigError(
            "optimizers: the optimiser is AdamW in the trainer's own process; set learning_rate, "
            "lr_scheduler_type, weight_decay."
        )
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


def _check_tokenizer(processing_class: Any, model: str) -> None:
    """Raises `ConfigError` for a tokenizer that is not the folder's own, which is the one that is
    used.
    """
    if processing_class is None:
        return
    name = getattr(processing_class, "name_or_path", None)
    path = Path(str(name))
    is_own = name is not None and path.exists() and path.resolve() == Path(model).resolve()
    if not is_own:
        raise ConfigError(
            f"processing_class is of {name!r}: a model is used with the tokenizer in its folder; "
            f"save yours into {model} and leave it out."
        )


def _rows(data: Any, factory: Any, args: AsyncGRPOConfig) -> tuple[Any, int | None]:
    """The rows, and how many there are, if that is known."""
    if data is None:
        if factory is None:
            raise ConfigError(
                "train_dataset is missing; give rows with a column `prompt`, or an "
                "environment_factory whose reset returns the prompt."
            )
        if args.max_steps <= 0:
            raise ConfigError(
                "without a train_dataset max_steps must say how long to train; set it in "
                "AsyncGRPOConfig."
            )
        rows = rows_of_environments(factory, number=args.groups_per_step)
        return rows, len(rows)
    if isinstance(data, str | Path):
        raise ConfigError(
            f"train_dataset is {str(data)!r}; load it, as trl wants a Dataset, or use "
            "midflight.Trainer(data=...)."
        )
    if hasattr(data, "__len__"):
        if len(data) and "prompt" not in data[0]:
            raise ConfigError(f"train_dataset has no column `prompt`; it has {', '.join(data[0])}.")
        return data, len(data)
    return islice(cast("Iterable[Row]", data), args.steps(None) * args.groups_per_step), None


def _rewards(given: Any, environments: Sequence[type]) -> list[Callable[..., Any]]:
    functions: list[Any] = []
    if isinstance(given, list | tuple):
        functions = list(cast("Sequence[Any]", given))
    elif given is not None:
        functions = [given]
    for function in functions:
        if not callable(function):
            raise ConfigError(
                f"reward_funcs has {function!r:.80}, expected a function; a reward model is one "
                "that you call in a function."
            )
    if not functions and not any(hasattr(environment, "reward") for environment in environments):
        raise ConfigError(
            "nothing gives a reward: pass reward_funcs, or an environment_factory whose "
            "environment has `get_reward`."
        )
    return functions


def _environments(factory: Any) -> list[type]:
    if factory is None:
        return []
    if isinstance(factory, Mapping):
        return [
            environment_class(one, name=name)
            for name, one in cast("Mapping[str, Any]", factory).items()
        ]
    return [environment_class(factory)]


LORA = (
    "peft_type",
    "task_type",
    "r",
    "lora_alpha",
    "target_modules",
    "base_model_name_or_path",
    "inference_mode",
    "bias",
    "lora_bias",
)
"""The options of a `LoraConfig` that are understood. Any other that differs from its default is
refused.
"""


def _lora(peft_config: Any) -> dict[str, Any]:
    if peft_config is None:
        return {}
    options: dict[str, Any]
    plain: dict[str, Any]
    if isinstance(peft_config, dict):
        options = cast("dict[str, Any]", peft_config)
        plain = {}
    else:
        options = dict(vars(peft_config))
        plain = vars(type(peft_config)())
    odd = [
        name
        for name, value in options.items()
        if name not in LORA and value != plain.get(name) and value
    ]
    if odd:
        raise ConfigError(
            f"peft_config has {', '.join(odd)}: adapters are plain LoRA of r, lora_alpha and "
            "target_modules; leave the others out."
        )
    targets = options.get("target_modules") or ()
    names: list[str] = []
    if isinstance(targets, str):
        if targets != "all-linear":
            names = [targets]
    else:
        names = sorted(targets)
    return {
        "rank": options.get("r", 8),
        "alpha": float(options.get("lora_alpha") or 8),
        "targets": names,
    }
