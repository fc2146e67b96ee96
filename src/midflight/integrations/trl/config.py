"""The options of trl 1.16's `AsyncGRPOConfig`, and their counterparts here. Names and defaults are
those of trl and of `transformers.TrainingArguments`; neither is imported.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midflight.config.devices import num_present
from midflight.config.observe import TRACKERS
from midflight.errors import ConfigError, nearest
from midflight.models.sizes import read_config, sizes_of

OWN: Mapping[str, Any] = {
    "model_init_kwargs": None,
    "dtype": "float32",
    "trust_remote_code": False,
    "router_aux_loss_coef": None,
    "learning_rate": 1e-6,
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
    "ignore_data_skip": True,
    "num_generations": 8,
    "max_completion_length": 2048,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "chat_template_kwargs": None,
    "max_tool_calling_iterations": None,
    "fork_threshold_tokens": 1024,
    "vllm_server_base_url": "http://localhost:8000",
    "vllm_server_timeout": 240.0,
    "request_timeout": 600,
    "weight_sync_timeout": 1800,
    "epsilon": 0.2,
    "epsilon_high": None,
    "token_budget": None,
    "max_inflight_tasks": -1,
    "max_staleness": 4,
    "queue_maxsize": 1024,
    "weight_sync_steps": 1,
    "heartbeat_stale_after_s": 300.0,
    "log_completions": False,
    "num_completions_to_print": None,
}
"""Options that trl's class adds to `TrainingArguments`, or to which it gives other defaults."""

GENERAL: Mapping[str, Any] = {
    "output_dir": None,
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "warmup_steps": 0,
    "optim": "adamw_torch_fused",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "bf16": None,
    "fp16": False,
    "gradient_checkpointing": True,
    "torch_compile": False,
    "disable_tqdm": None,
    "report_to": "none",
    "project": None,
    "run_name": None,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": None,
    "seed": 42,
    "data_seed": None,
    "use_cpu": False,
    "resume_from_checkpoint": None,
}
"""The options of `TrainingArguments` that mean something here, with their defaults, except for
`adam_beta2`, which is 0.999 there.
"""

HARMLESS = frozenset(
    [
        "average_tokens_across_devices",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "tf32",
        "use_cache",
        "torch_compile_backend",
        "torch_compile_mode",
        "torch_empty_cache_steps",
        "auto_find_batch_size",
        "logging_strategy",
        "logging_first_step",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "include_num_input_tokens_seen",
        "log_level",
        "log_level_replica",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "eval_steps",
        "eval_delay",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "include_for_metrics",
        "batch_eval_metrics",
        "save_on_each_node",
        "enable_jit_checkpoint",
        "hub_token",
        "hub_private_repo",
        "hub_model_id",
        "hub_strategy",
        "hub_always_push",
        "hub_revision",
        "greater_is_better",
        "full_determinism",
        "accelerator_config",
        "restore_callback_states_from_checkpoint",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "remove_unused_columns",
        "label_names",
        "length_column_name",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
        "skip_memory_metrics",
        "do_train",
        "local_rank",
    ]
)
"""Options that say how another machinery works. They are accepted, and do nothing here."""

REFUSED: Mapping[str, tuple[Any, str]] = {
    "repetition_penalty": (
        1.0,
        (
            "it is not the policy that is sampled then; ask for it in an environment of your own, "
            "whose turns are then masked"
        ),
    ),
    "trust_remote_code": (
        False,
        "a model's own code is not run; a known architecture proves itself when it is loaded",
    ),
    "router_aux_loss_coef": (
        None,
        "the load balance of a mixture is not a term of the loss here; leave it out",
    ),
    "ignore_data_skip": (True, "the place in the data is kept in the run's store"),
    "lr_scheduler_kwargs": (
        None,
        "schedules have no further options; choose lr_scheduler_type and warmup_steps",
    ),
    "optim_args": (None, "the optimiser is AdamW, set by learning_rate and weight_decay"),
    "optim_target_modules": (None, "all weights are trained, or with peft_config the adapters"),
    "label_smoothing_factor": (0.0, "there are no labels"),
    "bf16_full_eval": (False, "evaluations run on the engines; set dtype"),
    "fp16_full_eval": (False, "evaluations run on the engines; set dtype"),
    "fp16": (False, "float16 needs loss scaling; use bf16=True"),
    "use_liger_kernel": (False, "there are no such kernels here"),
    "liger_kernel_config": (None, "there are no such kernels here"),
    "neftune_noise_alpha": (
        None,
        "noise would make the trained policy another one than the sampled",
    ),
    "eval_strategy": (
        "no",
        (
            "trl's own trainer has no evaluation; use midflight.Trainer with heldout, and "
            "evaluation.eval_every"
        ),
    ),
    "eval_on_start": (False, "as eval_strategy"),
    "do_eval": (False, "as eval_strategy"),
    "do_predict": (False, "as eval_strategy"),
    "load_best_model_at_end": (
        False,
        "there is no evaluation to choose by; the last version is exported, and checkpoints stay",
    ),
    "metric_for_best_model": (None, "as load_best_model_at_end"),
    "save_only_model": (
        False,
        "a checkpoint must be able to go on; the model alone is in the folder `model`",
    ),
    "push_to_hub": (False, "upload the folder `model` of output_dir yourself"),
    "parallelism_config": (None, "set trainer.ranks in the configuration of midflight.Trainer"),
    "fsdp": (None, "set trainer.ranks, which shards the model"),
    "fsdp_config": (None, "as fsdp"),
    "deepspeed": (None, "as fsdp"),
    "debug": ("", "use midflight train CONFIG --debug"),
    "train_sampling_strategy": ("random", "the order is seeded; midflight.Trainer has shuffle"),
}
"""Options without a meaning here: the value that has no effect, and the option to use instead."""

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
KNOWN = {*OWN, *GENERAL, *HARMLESS, *REFUSED}
MANY_TURNS = 1000
"""The limit of turns if trl sets none. The context ends a conversation before."""
ROLLOUT_SECONDS = 3600.0
"""The seconds that an agent and its reward functions may take by themselves. trl has no limit; here
one that hangs would hold up a step for ever.
"""


class AsyncGRPOConfig:
    """Options by the names of trl 1.16. Raises `ConfigError` for an option that has no meaning
    here, and names the one to use.
    """

    def __init__(self, output_dir: str | Path | None = None, **options: Any) -> None:
        for name in options:
            if name not in KNOWN:
                raise ConfigError(f"AsyncGRPOConfig has no option {name!r}.{nearest(name, KNOWN)}")
        self.given = frozenset(options)
        """The names of the options that were given."""
        for name, default in {**GENERAL, **OWN}.items():
            setattr(self, name, options.get(name, default))
        for name in (HARMLESS | REFUSED.keys()) & options.keys():
            setattr(self, name, options[name])
        self.output_dir = None if output_dir is None else str(output_dir)
        self._check()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __repr__(self) -> str:
        names = ("output_dir", *sorted(self.given))
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"AsyncGRPOConfig({options})"

    @property
    def notes(self) -> list[str]:
        """A note on the options that were accepted and have no effect, if there are any."""
        idle = [
            name
            for name in sorted(self.given & HARMLESS)
            if getattr(self, name) not in (None, False)
        ]
        if not idle:
            return []
        return [f"{', '.join(idle)}: accepted, and without effect here"]

    def _check(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r}: {_remedy(name)}"
            for name in sorted(self.given & REFUSED.keys())
            if getattr(self, name) not in (REFUSED[name][0], None)
        ]
        if self.lr_scheduler_type not in SCHEDULES:
            problems.append(
                f"lr_scheduler_type={self.lr_scheduler_type!r}: schedules are "
                f"{', '.join(SCHEDULES)}"
            )
        if self.optim not in ("adamw_torch", "adamw_torch_fused"):
            problems.append(f"optim={self.optim!r}: the optimiser is AdamW (adamw_torch)")
        fixed = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8}
        problems += [
            f"{name}={getattr(self, name)!r}: it is {fixed[name]:g} here; leave it out"
            for name in fixed
            if getattr(self, name) != fixed[name]
        ]
        if self.dtype not in ("auto", "float32", "bfloat16"):
            problems.append(f"dtype={self.dtype!r}: weights are float32 or bfloat16")
        if self.samples_per_step % self.num_generations:
            problems.append(
                "per_device_train_batch_size * gradient_accumulation_steps is "
                f"{self.samples_per_step}, and a step takes whole groups of "
                f"num_generations={self.num_generations}; make it a multiple of that"
            )
        strategies = ("no", "steps", "epoch")
        if isinstance(self.save_strategy, str) and self.save_strategy not in strategies:
            problems.append(
                f"save_strategy={self.save_strategy!r}: checkpoints are written every save_steps "
                "steps, or not (no)"
            )
        if problems:
            raise ConfigError("AsyncGRPOConfig: " + "\n".join(problems))

    # --- What it comes to -------------------------------------------------------------------------

    @property
    def samples_per_step(self) -> int:
        """Samples of a step, as for one process. More ranks share each step."""
        return int(self.per_device_train_batch_size * self.gradient_accumulation_steps)

    @property
    def groups_per_step(self) -> int:
        return self.samples_per_step // self.num_generations

    @property
    def trackers(self) -> list[str]:
        """The trackers that `report_to` asks for. With "all" they are those that are installed.
        They get numbers under our names.
        """
        wanted = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or [])
        if "all" in wanted:
            return [name for name, package in TRACKERS.items() if _is_installed(package)]
        return [str(name) for name in wanted if name != "none"]

    def steps(self, num_rows: int | None) -> int:
        """The number of steps: `max_steps`, else so many that every epoch trains on every row."""
        if self.max_steps > 0:
            return int(self.max_steps)
        if num_rows is None:
            raise ConfigError(
                "the length of the data is not known: set max_steps in AsyncGRPOConfig."
            )
        return max(1, math.ceil(num_rows * self.num_train_epochs / self.groups_per_step))

    def tables(self, *, model: str, num_rows: int | None) -> dict[str, dict[str, Any]]:
        """Returns the configuration, by section. If trl's default belongs to machinery that is not
        here, an option that was not given keeps our default.
        """
        steps = self.steps(num_rows)
        device = "cpu" if self.use_cpu or not Path("/dev/nvidiactl").exists() else "cuda"
        clip_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        name = self.run_name or Path(self.output_dir or model).name
        stall = float(self.heartbeat_stale_after_s)
        return {
            "run": {"name": name, "steps": steps, "seed": self.seed, "stall_seconds": stall},
            "model": {"dtype": self._dtype(model)},
            "engine": self._engine(device),
            "gateway": {"request_seconds": float(self.request_timeout)},
            "environment": self._environment(model),
            "rollout": self._rollout(),
            "trainer": {"device": device, **self._trainer(model, steps, num_rows)},
            "objective": {"kind": "ppo", "clip_low": self.epsilon, "clip_high": clip_high},
            "weights": self._weights(),
            "observe": self._observe(),
        }

    def _engine(self, device: str) -> dict[str, Any]:
        options: dict[str, Any] = {"device": device}
        if device == "cuda" and num_present(os.environ) == 1:
            options["share_devices"] = True
        return options | self._server()

    def _weights(self) -> dict[str, Any]:
        options: dict[str, Any] = {"every": self.weight_sync_steps}
        if "weight_sync_timeout" in self.given:
            options["stage_seconds"] = float(self.weight_sync_timeout)
        return options

    def _observe(self) -> dict[str, Any]:
        options: dict[str, Any] = {"trackers": self.trackers}
        if "project" in self.given and self.project:
            options["project"] = self.project
        return options

    def _environment(self, model: str) -> dict[str, Any]:
        context = sizes_of(Path(model)).max_context or self.max_completion_length + 1
        turns = self.max_tool_calling_iterations
        return {
            "max_tokens": min(self.max_completion_length, context - 1),
            "temperature": float(self.temperature),
            "top_p": float(self.top_p),
            "top_k": self.top_k or None,
            "min_p": float(self.min_p or 0.0),
            "rollout_seconds": ROLLOUT_SECONDS,
            "max_turns": MANY_TURNS if turns is None else turns + 1,
            "template_options": dict(self.chat_template_kwargs or {}),
        }

    def _trainer(self, model: str, steps: int, num_rows: int | None) -> dict[str, Any]:
        def of_steps(value: float) -> int:
            """A share of all steps, or their number."""
            return max(1, round(value * steps)) if 0 < value < 1 else int(value)

        per_epoch = steps
        if num_rows is not None:
            per_epoch = max(1, math.ceil(num_rows / self.groups_per_step))
        checkpoints = {"no": 0, "epoch": per_epoch}
        recomputes = "gradient_checkpointing" in self.given and bool(self.gradient_checkpointing)
        computes_half = self.bf16 and self._dtype(model) == "float32"
        options: dict[str, Any] = {
            "learning_rate": float(self.learning_rate),
            "schedule": SCHEDULES[self.lr_scheduler_type],
            "warmup_steps": of_steps(self.warmup_steps),
            "weight_decay": float(self.weight_decay),
            "max_grad_norm": float(self.max_grad_norm),
            "activation_checkpointing": recomputes,
            "compute_dtype": "bfloat16" if computes_half else "auto",
            "compile": bool(self.torch_compile),
            "checkpoint_every": checkpoints.get(self.save_strategy, of_steps(self.save_steps)),
        }
        if (self.token_budget or 0) > 0:
            options["micro_batch_tokens"] = self.token_budget
        if self.save_total_limit:
            options["keep_checkpoints"] = self.save_total_limit
        return options

    def _rollout(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "groups_per_step": self.groups_per_step,
            "group_size": self.num_generations,
            "max_staleness": self.max_staleness,
        }
        if self.max_inflight_tasks > 0:
            options["max_in_flight"] = self.max_inflight_tasks
        if "queue_maxsize" in self.given:
            num_groups = self.queue_maxsize // self.num_generations
            options["buffer_groups"] = max(self.groups_per_step, num_groups)
        if self.log_completions:
            options["show_every"] = max(1, int(self.logging_steps))
            options["show_completions"] = self.num_completions_to_print or self.samples_per_step
        return options

    def _dtype(self, model: str) -> str:
        """The type of the weights. "auto" is that of the folder."""
        wanted = dict(self.model_init_kwargs or {})
        older_name = wanted.pop("torch_dtype", self.dtype)
        dtype = str(wanted.pop("dtype", older_name)).removeprefix("torch.")
        if wanted:
            raise ConfigError(
                f"model_init_kwargs has {', '.join(wanted)}: a model is loaded as its folder says; "
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

    def _server(self) -> dict[str, Any]:
        """Options of a server of vLLM, if one is named. trl needs one; here an engine of our own
        takes its place.
        """
        if "vllm_server_base_url" not in self.given:
            return {}
        return {
            "kind": "vllm",
            "urls": [str(self.vllm_server_base_url).rstrip("/")],
            "start_seconds": float(self.vllm_server_timeout),
        }


def _is_installed(package: str) -> bool:
    """True if the package can be imported. A folder without Python files is not a package."""
    found = find_spec(package)
    return found is not None and found.origin is not None


def _remedy(name: str) -> str:
    _, remedy = REFUSED[name]
    return _remedy(remedy.removeprefix("as ")) if remedy.startswith("as ") else remedy
