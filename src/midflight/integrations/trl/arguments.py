"""The options that all configurations of trl have: those of `transformers.TrainingArguments`, with
their defaults, and what each is here. Neither library is imported.

Each field says one of three things: what it is mapped to, why it is without effect, or what to use
in its place where it is refused. docs/from-trl.md has them as a table.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from midflight.config.devices import num_present
from midflight.config.observe import TRACKERS
from midflight.errors import ConfigError, nearest
from midflight.models.sizes import read_config

MAPPED = "mapped"
IDLE = "idle"
REFUSED = "refused"
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
NO_CLIPPING = 1e9
"""The norm to which gradients are scaled down if nothing asks for that."""
SHARDING = "set trainer.ranks of midflight.Trainer, which shards the model"
HARMLESS_OF_MODEL = frozenset(["attn_implementation", "use_cache", "low_cpu_mem_usage"])
"""Arguments of a model's loading that change how it is computed, not what."""
SAMPLES = "`rollout.groups_per_step`, with `num_generations`"
AS_THERE = "as in trl"


class Meaning(str):
    """What a field is here, as a piece of Markdown. A command line shows it as help."""

    __slots__ = ("kind",)
    kind: str

    def __new__(cls, text: str, kind: str) -> Meaning:
        made = super().__new__(cls, text)
        made.kind = kind
        return made


def mapped(default: Any, here: str) -> Any:
    """A field with a counterpart. `here` is a piece of Markdown that names it."""
    return _field(default, MAPPED, here)


def idle(default: Any, why: str = "") -> Any:
    """A field that says how another machinery works. It is accepted, and does nothing."""
    return _field(default, IDLE, why)


def refused(default: Any, remedy: str) -> Any:
    """A field of which only the default has a meaning here."""
    return _field(default, REFUSED, remedy)


def _field(default: Any, kind: str, here: str) -> Any:
    metadata = {"help": Meaning(here, kind)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list[Any](default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def meaning_of(field: dataclasses.Field[Any]) -> Meaning:
    return field.metadata["help"]


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def of_steps(value: float, steps: int) -> int:
    """A number of steps, which may be given as a share of all of them."""
    return max(1, round(value * steps)) if 0 < value < 1 else int(value)


@dataclasses.dataclass(init=False, repr=False)
class TrainingArguments:
    """Options by the names of `transformers.TrainingArguments`. They may be set afterwards too;
    `check` is called again before a run.
    """

    output_dir: str | None = mapped(None, "`run.folder`")
    per_device_train_batch_size: int = mapped(8, SAMPLES)
    num_train_epochs: float = mapped(3.0, "`run.steps`")
    max_steps: int = mapped(-1, "`run.steps`")
    learning_rate: float = mapped(5e-5, "`trainer.learning_rate`")
    lr_scheduler_type: str = mapped("linear", "`trainer.schedule`: constant, linear or cosine")
    lr_scheduler_kwargs: dict[str, Any] | str | None = refused(
        None, "schedules have no further options; choose lr_scheduler_type and warmup_steps"
    )
    warmup_steps: float = mapped(0, "`trainer.warmup_steps`")
    optim: str = mapped("adamw_torch_fused", "AdamW; another one is refused")
    optim_args: str | None = refused(None, "set learning_rate, weight_decay and adam_beta2")
    weight_decay: float = mapped(0.0, "`trainer.weight_decay`")
    adam_beta1: float = refused(0.9, "it is 0.9 here")
    adam_beta2: float = mapped(0.999, "`trainer.adam_beta2`")
    adam_epsilon: float = refused(1e-8, "it is 1e-08 here")
    optim_target_modules: str | None = refused(
        None, "all weights are trained, or with peft_config the adapters"
    )
    gradient_accumulation_steps: int = mapped(1, SAMPLES)
    average_tokens_across_devices: bool = idle(True, "denominators are of the whole batch")
    max_grad_norm: float = mapped(1.0, "`trainer.max_grad_norm`")
    label_smoothing_factor: float = refused(0.0, "there are no labels; leave it out")
    bf16: bool | None = mapped(False, "`trainer.compute_dtype`, unset bfloat16 on a GPU")
    fp16: bool = refused(False, "float16 needs loss scaling; use bf16=True")
    bf16_full_eval: bool = refused(False, "evaluations run on the engines; set dtype")
    fp16_full_eval: bool = refused(False, "evaluations run on the engines; set dtype")
    tf32: bool | None = idle(None)
    activation_checkpointing: bool | None = idle(None)
    activation_checkpointing_kwargs: dict[str, Any] | str | None = idle(None)
    gradient_checkpointing: bool | None = mapped(
        None, "`trainer.activation_checkpointing`, on a GPU"
    )
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = idle(None)
    torch_compile: bool = mapped(False, "`trainer.compile`")
    torch_compile_backend: str | None = idle(None)
    torch_compile_mode: str | None = idle(None)
    use_liger_kernel: bool = refused(False, "there are no such kernels here; leave it out")
    liger_kernel_config: dict[str, Any] | None = refused(
        None, "there are no such kernels here; leave it out"
    )
    use_cache: bool = idle(False)
    neftune_noise_alpha: float | None = refused(
        None, "noise would make the trained policy another one than the sampled; leave it out"
    )
    torch_empty_cache_steps: int | None = idle(None)
    auto_find_batch_size: bool = idle(False, "`trainer.micro_batch_tokens` bounds the memory")
    logging_strategy: str = mapped("steps", AS_THERE)
    logging_steps: float = mapped(500, AS_THERE)
    logging_first_step: bool = mapped(False, AS_THERE)
    log_on_each_node: bool = idle(True)
    logging_nan_inf_filter: bool = idle(True)
    include_num_input_tokens_seen: str = idle("no", "`summary.json` has the tokens")
    log_level: str = idle("passive")
    log_level_replica: str = idle("warning")
    disable_tqdm: bool | None = mapped(None, AS_THERE)
    report_to: str | None = mapped(
        "none", "`observe.trackers`, which get [our names](metrics.md#names-for-dashboards)"
    )
    run_name: str | None = mapped(None, "`run.name`")
    project: str = mapped("huggingface", "`observe.project`")
    trackio_space_id: str | None = idle(None, "runs are not sent to a hub")
    trackio_bucket_id: str | None = idle(None, "runs are not sent to a hub")
    trackio_static_space_id: str | None = idle(None, "runs are not sent to a hub")
    eval_strategy: str = mapped("no", "`evaluation.eval_every`")
    eval_steps: float | None = mapped(None, "`evaluation.eval_every`")
    eval_delay: float = idle(0)
    per_device_eval_batch_size: int = idle(8, "engines take all at once")
    prediction_loss_only: bool = idle(False)
    eval_on_start: bool = mapped(False, "always so")
    eval_do_concat_batches: bool = idle(True)
    eval_use_gather_object: bool = idle(False)
    eval_accumulation_steps: int | None = idle(None)
    include_for_metrics: list[str] = idle([])
    batch_eval_metrics: bool = idle(False)
    save_only_model: bool = refused(
        False, "a checkpoint must be able to go on; the model alone is in the folder `model`"
    )
    save_strategy: str = mapped("steps", "as in trl; best is refused")
    save_steps: float = mapped(500, "`trainer.checkpoint_every`")
    save_on_each_node: bool = idle(False)
    save_total_limit: int | None = mapped(None, "`trainer.keep_checkpoints`")
    enable_jit_checkpoint: bool = idle(False)
    push_to_hub: bool = refused(False, "upload the folder `model` of output_dir yourself")
    hub_token: str | None = idle(None)
    hub_private_repo: bool | None = idle(None)
    hub_model_id: str | None = idle(None)
    hub_strategy: str = idle("every_save")
    hub_always_push: bool = idle(False)
    hub_revision: str | None = idle(None)
    load_best_model_at_end: bool = refused(
        False,
        "the last version is exported; `midflight rollback` goes back to an earlier checkpoint",
    )
    metric_for_best_model: str | None = refused(
        None,
        "no version is chosen by a metric; `state.log_history` has the metrics of all versions",
    )
    greater_is_better: bool | None = idle(None)
    ignore_data_skip: bool = refused(
        False, "the place in the data is kept in the run's store; leave it out"
    )
    restore_callback_states_from_checkpoint: bool = idle(False)
    full_determinism: bool = mapped(False, "`trainer.deterministic`")
    seed: int = mapped(42, "`run.seed`")
    data_seed: int | None = idle(None, "`seed` draws the order of the rows")
    use_cpu: bool = mapped(False, '`trainer.device` and `engine.device` = "cpu"')
    accelerator_config: dict[str, Any] | str | None = idle(None)
    parallelism_config: Any = refused(None, SHARDING)
    dataloader_drop_last: bool = idle(False)
    dataloader_num_workers: int = idle(0)
    dataloader_pin_memory: bool = idle(True)
    dataloader_persistent_workers: bool = idle(False)
    dataloader_prefetch_factor: int | None = idle(None)
    dataloader_multiprocessing_context: str | None = idle(None)
    dataloader_in_order: bool = idle(True)
    remove_unused_columns: bool = idle(True, "reward functions get the columns that they name")
    label_names: list[str] | None = idle(None)
    train_sampling_strategy: str = refused("random", "set shuffle_dataset")
    length_column_name: str = idle("length")
    ddp_find_unused_parameters: bool | None = idle(None)
    ddp_bucket_cap_mb: int | None = idle(None)
    ddp_broadcast_buffers: bool | None = idle(None)
    ddp_static_graph: bool | None = idle(None)
    ddp_backend: str | None = idle(None)
    ddp_timeout: int = idle(1800)
    fsdp: str | None = refused(None, SHARDING)
    fsdp_config: dict[str, Any] | str | None = refused(None, SHARDING)
    deepspeed: dict[str, Any] | str | None = refused(None, SHARDING)
    debug: str = refused("", "use midflight train CONFIG --debug")
    skip_memory_metrics: bool = idle(True)
    do_train: bool = idle(False, "`train()` trains")
    do_eval: bool = idle(False, "`eval_strategy` and `evaluate()` evaluate")
    do_predict: bool = refused(False, "ask the trained model by `midflight engine`")
    resume_from_checkpoint: str | None = mapped(None, "as in `train(resume_from_checkpoint=True)`")
    local_rank: int = idle(-1)

    title: ClassVar[str] = "TrainingArguments"

    def __init__(self, output_dir: str | Path | None = None, **options: Any) -> None:
        """Raises `ConfigError` for an option that is not known, or has no meaning here."""
        known = {field.name: field for field in dataclasses.fields(self)}
        for name in options:
            if name not in known:
                raise ConfigError(f"{self.title} has no option {name!r}.{nearest(name, known)}")
        self.output_dir = None if output_dir is None else str(output_dir)
        for name, field in known.items():
            if name != "output_dir":
                setattr(self, name, _read(name, options.get(name, default_of(field))))
        self.named = frozenset(options)
        """The options that were named, also with their defaults."""
        self.check()

    def __repr__(self) -> str:
        names = ["output_dir", *sorted(self.given - {"output_dir"})]
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.title}({options})"

    @property
    def given(self) -> frozenset[str]:
        """The names of the options that differ from their defaults."""
        return frozenset(
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != default_of(field)
        )

    @property
    def notes(self) -> list[str]:
        """A note on the options that were set and have no effect, if there are any."""
        kinds = {field.name: meaning_of(field).kind for field in dataclasses.fields(self)}
        without = [name for name in sorted(self.given) if kinds[name] == IDLE]
        if not without:
            return []
        return [f"{', '.join(without)}: accepted, and without effect here"]

    def check(self) -> None:
        """Raises `ConfigError` with every option that has no meaning here, each with its remedy."""
        problems = self.problems()
        if problems:
            raise ConfigError(f"{self.title}: " + "\n".join(problems))

    def problems(self) -> list[str]:
        """One sentence for each value that cannot be had."""
        found = [
            f"{field.name}={getattr(self, field.name)!r}: {meaning_of(field)}"
            for field in dataclasses.fields(self)
            if meaning_of(field).kind == REFUSED
            and getattr(self, field.name) not in (default_of(field), None)
        ]
        if self.lr_scheduler_type not in SCHEDULES:
            found.append(
                f"lr_scheduler_type={self.lr_scheduler_type!r}: schedules are "
                f"{', '.join(SCHEDULES)}"
            )
        if self.optim not in ("adamw_torch", "adamw_torch_fused"):
            found.append(f"optim={self.optim!r}: the optimiser is AdamW (adamw_torch)")
        strategies = ("no", "steps", "epoch")
        for name in ("save_strategy", "logging_strategy", "eval_strategy"):
            value = getattr(self, name)
            if value not in strategies:
                found.append(f"{name}={value!r}: it is one of {', '.join(strategies)}")
        return found

    # --- What it comes to -------------------------------------------------------------------------

    @property
    def device(self) -> str:
        return "cpu" if self.use_cpu or not Path("/dev/nvidiactl").exists() else "cuda"

    @property
    def in_half(self) -> bool:
        """Whether bfloat16 is computed in. Where nothing is said, it is so on GPUs."""
        return self.device != "cpu" if self.bf16 is None else self.bf16

    @property
    def trackers(self) -> list[str]:
        """The trackers that `report_to` asks for. With "all" they are those that are installed.
        They get numbers under our names.
        """
        given: Any = self.report_to
        wanted = [given] if isinstance(given, str) else list(given or [])
        if "all" in wanted:
            return [name for name, package in TRACKERS.items() if _is_installed(package)]
        return [str(name) for name in wanted if name != "none"]

    def engine_here(self) -> dict[str, Any]:
        """Options of the engine that is started here. A single GPU is shared with the trainer."""
        options: dict[str, Any] = {"device": self.device}
        if self.device == "cuda" and num_present(os.environ) == 1:
            options["share_devices"] = True
        return options

    def observe_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"trackers": self.trackers}
        if "project" in self.given and self.project:
            options["project"] = self.project
        return options

    def trainer_options(self, *, steps: int, per_epoch: int, dtype: str) -> dict[str, Any]:
        """Options of the section `[trainer]`. `per_epoch` are the steps of an epoch, and `dtype`
        is that of the weights.
        """
        checkpoints = {"no": 0, "epoch": per_epoch}
        options: dict[str, Any] = {
            "device": self.device,
            "learning_rate": float(self.learning_rate),
            "schedule": SCHEDULES[self.lr_scheduler_type],
            "warmup_steps": of_steps(self.warmup_steps, steps),
            "weight_decay": float(self.weight_decay),
            "adam_beta2": float(self.adam_beta2),
            "max_grad_norm": float(self.max_grad_norm or NO_CLIPPING),
            "compute_dtype": "bfloat16" if self.in_half and dtype == "float32" else "auto",
            "activation_checkpointing": bool(self.gradient_checkpointing) and self.device != "cpu",
            "compile": bool(self.torch_compile),
            "deterministic": self.full_determinism,
            "checkpoint_every": checkpoints.get(
                self.save_strategy, of_steps(self.save_steps, steps)
            ),
        }
        if self.save_total_limit:
            options["keep_checkpoints"] = self.save_total_limit
        return options

    def is_logged(self, step: int, *, steps: int, per_epoch: int) -> bool:
        """True if the logs of this step, or their means since the last ones, are due."""
        if self.logging_strategy == "no":
            return False
        if step == steps or (step == 1 and self.logging_first_step):
            return True
        every = per_epoch
        if self.logging_strategy == "steps":
            every = max(1, of_steps(self.logging_steps, steps))
        return step % every == 0


def dtype_of_model(options: Mapping[str, Any] | None, default: str, model: str) -> str:
    """The type of the weights, by trl's `model_init_kwargs`. "auto" is that of the folder. Raises
    `ConfigError` for arguments that would load another model.
    """
    wanted = dict(options or {})
    older_name = wanted.pop("torch_dtype", default)
    dtype = str(wanted.pop("dtype", older_name) or "auto").removeprefix("torch.")
    if wanted.get("revision") in (None, "main"):
        wanted.pop("revision", None)
    odd = [
        name
        for name, value in wanted.items()
        if name not in HARMLESS_OF_MODEL and value not in (None, False)
    ]
    if odd:
        raise ConfigError(
            f"model_init_kwargs has {', '.join(odd)}: a model is loaded as its folder says; "
            "only dtype may be chosen."
        )
    if dtype == "auto":
        config = read_config(Path(model))
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"the model's dtype is {dtype!r}: weights are float32 or bfloat16; set dtype."
        )
    return dtype


def _read(name: str, value: Any) -> Any:
    """The value of the option. A dict may be JSON, as on a command line."""
    is_dict = name.endswith(("_kwargs", "_config")) and isinstance(value, str)
    if is_dict and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name} is no JSON ({error}): {value!r:.200}.") from error
    return value


def _is_installed(package: str) -> bool:
    """True if the package can be imported. A folder without Python files is not a package."""
    found = find_spec(package)
    return found is not None and found.origin is not None
