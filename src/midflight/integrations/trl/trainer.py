"""What trl's two trainers have in common, over a run of ours. Engines, agents and rewards are
started here, so no server of vLLM is needed.
"""

import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

from midflight.errors import ConfigError
from midflight.integrations.trl.config import AsyncGRPOConfig
from midflight.integrations.trl.environments import environment_class, rows_of_environments
from midflight.integrations.trl.grpo_config import GRPOConfig
from midflight.integrations.trl.metrics import trl_metrics
from midflight.integrations.trl.reward_functions import reward_functions
from midflight.observe.learning import means
from midflight.observe.lines import CheckpointLine, EvaluationLine, StepLine
from midflight.observe.summary import Summary
from midflight.python.trainer import Trainer

Row = Mapping[str, Any]
Config = TypeVar("Config", AsyncGRPOConfig, GRPOConfig)


class TrainOutput(NamedTuple):
    """The same fields as in transformers."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrlArguments(NamedTuple):
    """The arguments that both trainers take. Their names are trl's."""

    model: Any
    reward_funcs: Any
    args: AsyncGRPOConfig | GRPOConfig
    train_dataset: Any
    processing_class: Any
    callbacks: Sequence[Any] | None
    optimizers: tuple[Any, Any]
    peft_config: Any
    tools: Sequence[Any] | None
    environment_factory: Any


class TrlTrainer:
    """Makes a run of trl's arguments, and tells it by trl's names. Raises `ConfigError` for an
    argument that has no meaning here, and names the one to use.
    """

    def __init__(
        self,
        given: TrlArguments,
        *,
        heldout: Any = None,
        shuffle: bool | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """`heldout` are rows for evaluation. `weights` are those of the reward functions."""
        _check_model(given.model)
        _check_optimizers(given.optimizers)
        model = str(given.model)
        _check_tokenizer(given.processing_class, model)
        self.args = given.args
        self.args.check()
        rows, num_rows = _rows(given.train_dataset, given.environment_factory, self.args)
        tables = self.args.tables(model=model, num_rows=num_rows)
        tables["lora"] = lora_options(given.peft_config)
        environments = _environments(given.environment_factory)
        self.callbacks: list[Any] = list(given.callbacks or [])
        self._steps: int = tables["run"]["steps"]
        self._per_epoch = self.args.per_epoch(num_rows, steps=self._steps)
        self._updates = self.args.updates_per_step
        self.state = SimpleNamespace(
            global_step=0,
            max_steps=self._steps * self._updates,
            num_train_epochs=self.args.num_train_epochs,
            epoch=0.0,
            log_history=list[dict[str, float]](),
            is_world_process_zero=True,
            is_local_process_zero=True,
        )
        self.control: Any = SimpleNamespace(
            should_training_stop=False,
            should_epoch_stop=False,
            should_save=False,
            should_evaluate=False,
            should_log=False,
        )
        self.accelerator = SimpleNamespace(
            is_main_process=True, is_local_main_process=True, num_processes=1, print=print
        )
        self._seen: list[Mapping[str, float]] = []
        self._has_rows = num_rows is not None
        self._model = model
        self._asked: dict[str, Any] = {
            "prompt": "prompt",
            "shuffle": shuffle,
            "rewards": reward_functions(given.reward_funcs, environments, weights=weights),
            "tools": [*(given.tools or []), *environments],
            "folder": self.args.output_dir or "trainer_output",
            "progress": not self.args.disable_tqdm,
        }
        self.trainer = Trainer(
            model,
            rows,
            config=tables,
            heldout=heldout,
            on_step=self._stepped,
            on_checkpoint=self._saved,
            on_evaluation=self._evaluated,
            **self._asked,
        )
        for note in self.args.notes:
            warnings.warn(note, stacklevel=3)

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
        trained = self._trained()
        if output_dir is not None and Path(output_dir).resolve() != trained.resolve():
            shutil.copytree(trained, output_dir, dirs_exist_ok=True)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"push_to_hub: nothing is sent to a hub from here; upload {self.trainer.folder}/model, "
            "or what save_model(DIR) wrote, with the hub's own client."
        )

    def end(self) -> None:
        """Does nothing: `train` has ended what it started. Scripts call it at their end."""

    @property
    def model(self) -> Any:
        """The trained model, or before there is one the model to begin with, as transformers loads
        it from its folder. It is another object each time.
        """
        from transformers import AutoModelForCausalLM

        trained = self.trainer.folder / "model"
        return AutoModelForCausalLM.from_pretrained(
            trained if trained.is_dir() else self._model, local_files_only=True
        )

    @property
    def processing_class(self) -> Any:
        """The tokenizer in the model's folder, as transformers loads it."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model, local_files_only=True)

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def remove_callback(self, callback: Any) -> None:
        self.callbacks = [
            one for one in self.callbacks if one is not callback and type(one) is not callback
        ]

    def _trained(self) -> Path:
        trained = self.trainer.folder / "model"
        if not trained.is_dir():
            raise ConfigError(f"{self.trainer.folder} has no trained model yet; train first.")
        return trained

    # --- What a run tells -------------------------------------------------------------------------

    def metrics_of(self, line: StepLine) -> Mapping[str, float]:
        """The numbers of a step by trl's names."""
        return trl_metrics(line, group_size=self.args.num_generations)

    def _stepped(self, line: StepLine) -> None:
        self.state.global_step = line.step * self._updates
        if self._has_rows:
            self.state.epoch = line.step / self._per_epoch
        self._tell("on_step_end")
        self._seen.append(self.metrics_of(line))
        if self.args.is_logged(line.step, steps=self._steps, per_epoch=self._per_epoch):
            self._log(means(self._seen), step=line.step)
            self._seen.clear()
        if self.control.should_training_stop:
            self.trainer.stop()

    def _log(self, found: Mapping[str, float], *, step: int) -> None:
        """Logs what was measured of a step of ours, or of the version that it made."""
        epoch = step / self._per_epoch if self._has_rows else 0.0
        logs = {**found, "step": step * self._updates, "epoch": epoch}
        self.state.log_history.append(logs)
        if self.args.disable_tqdm:
            self.accelerator.print({name: value for name, value in logs.items() if name != "step"})
        self._tell("on_log", logs=logs)

    def _saved(self, line: CheckpointLine) -> None:
        self._tell("on_save")

    def _evaluated(self, line: EvaluationLine) -> None:
        """Hears one source of an evaluation. Only trainers with `heldout` have any."""

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
        steps = summary.steps * self._updates
        metrics = {
            "train_runtime": summary.seconds,
            "train_steps_per_second": steps / summary.seconds if summary.seconds else 0.0,
            "train_loss": loss,
        }
        return TrainOutput(steps, loss, metrics)


# --- Arguments ------------------------------------------------------------------------------------


def checked_args(args: Any, wanted: type[Config]) -> Config:
    """The configuration. Raises `ConfigError` if it is another class, such as trl's own."""
    if not isinstance(args, wanted):
        raise ConfigError(
            f"args is {type(args).__name__}; import {wanted.__name__} from "
            "midflight.integrations.trl too."
        )
    return args


def _check_model(model: object) -> None:
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model is {type(model).__name__}; give the path of its folder. "
            "model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR) write one."
        )
    if not Path(model).is_dir():
        raise ConfigError(
            f"model is {str(model)!r}, and there is no such folder: nothing is fetched from a hub; "
            "download it and give its folder."
        )


def _check_optimizers(optimizers: tuple[Any, Any]) -> None:
    if any(part is not None for part in optimizers):
        raise ConfigError(
            "optimizers: the optimiser is AdamW in the trainer's own process; set learning_rate, "
            "lr_scheduler_type, weight_decay."
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


def _rows(data: Any, factory: Any, args: AsyncGRPOConfig | GRPOConfig) -> tuple[Any, int | None]:
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
                f"{args.title}."
            )
        rows = rows_of_environments(factory, number=args.groups_per_step)
        return rows, len(rows)
    if isinstance(data, str | Path):
        raise ConfigError(
            f"train_dataset is {str(data)!r}; load it, as trl wants a Dataset, or use "
            "midflight.Trainer(data=...)."
        )
    if isinstance(data, Mapping):
        names = ", ".join(map(str, cast("Mapping[Any, Any]", data)))
        raise ConfigError(f"train_dataset is a dict of {names:.80}: give one of its splits.")
    if hasattr(data, "__len__"):
        if len(data) and "prompt" not in data[0]:
            raise ConfigError(f"train_dataset has no column `prompt`; it has {', '.join(data[0])}.")
        return data, len(data)
    return islice(cast("Iterable[Row]", data), args.steps(None) * args.groups_per_step), None


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
)
"""The options of a `LoraConfig` that are understood. Any other that differs from its default is
refused.
"""


def lora_options(peft_config: Any) -> dict[str, Any]:
    if peft_config is None:
        return {}
    options: dict[str, Any]
    plain: dict[str, Any]
    if isinstance(peft_config, dict):
        options = cast("dict[str, Any]", peft_config)
        plain = {"bias": "none"}
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
