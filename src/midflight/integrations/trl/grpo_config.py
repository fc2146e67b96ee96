"""The options of trl 1.16's `GRPOConfig`, and their counterparts here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from midflight.errors import ConfigError
from midflight.integrations.trl.arguments import (
    AS_THERE,
    dtype_of_model,
    idle,
    mapped,
    of_steps,
    refused,
)
from midflight.integrations.trl.config import SamplingArguments
from midflight.integrations.trl.losses import (
    correction_options,
    loss_problems,
    objective_options,
)

GENERATION = {
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
}
"""What `generation_kwargs` may have: the option that each overrides."""
NO_EFFECT = {"do_sample": True, "num_beams": 1, "n": 1, "use_cache": True}
"""What it may have besides, with the only value that is taken."""
EVALUATION = "samples"
"""The name of the suite that answers each held-out task several times."""


@dataclasses.dataclass(init=False, repr=False)
class GRPOConfig(SamplingArguments):
    """Options by the names of trl 1.16. Raises `ConfigError` for an option that has no meaning
    here, and names the one to use. `max_staleness` is no option of trl's.
    """

    logging_steps: float = mapped(10, AS_THERE)
    remove_unused_columns: bool = idle(False, "reward functions get the columns that they name")
    disable_dropout: bool = idle(False, "there is no dropout")
    cast_lm_head_to_fp32: bool = idle(False, "log-probabilities are always float32")
    num_generations_eval: int | None = mapped(None, "`samples` of `evaluation.suites`")
    max_completion_length: int | None = mapped(512, "`environment.max_tokens`")
    ds3_gather_for_generation: bool = idle(True)
    shuffle_dataset: bool = mapped(True, "`shuffle` of `[[environment.sources]]`")
    pad_to_multiple_of: int | str | None = idle("auto", "rows are packed without padding")
    generation_batch_size: int | None = mapped(
        None, "`rollout.groups_per_step` and `trainer.updates_per_step`"
    )
    steps_per_generation: int | None = mapped(
        None, "`rollout.groups_per_step` and `trainer.updates_per_step`"
    )
    generation_kwargs: dict[str, Any] | str | None = mapped(None, "as the options of these names")
    cache_implementation: str | None = idle(None, "engines keep keys and values by themselves")
    use_vllm: bool = mapped(False, '`engine.kind` = "vllm"; else the embedded engine')
    vllm_mode: str = mapped(
        "colocate", "server: `engine.urls`; colocate: vLLM is started beside the trainer"
    )
    vllm_model_impl: str = mapped("vllm", "`engine.arguments`, with colocate")
    vllm_enable_sleep_mode: bool = idle(False, "engines generate while the trainer trains")
    vllm_structured_outputs_regex: str | None = refused(
        None,
        "a grammar shapes what is sampled; ask for it in an environment of your own, whose turns "
        "are then masked",
    )
    vllm_server_base_url: str | None = mapped(None, "`engine.urls`, with server")
    vllm_server_host: str = mapped("0.0.0.0", "`engine.urls`, with server")
    vllm_server_port: int = mapped(8000, "`engine.urls`, with server")
    vllm_server_timeout: float = mapped(240.0, "`engine.start_seconds`, with server")
    vllm_group_port: int = idle(51216, "`weights.transport` chooses its ports")
    vllm_gpu_memory_utilization: float = mapped(0.3, "`engine.arguments`, with colocate")
    vllm_max_model_length: int | None = mapped(None, "`model.max_context`")
    vllm_tensor_parallel_size: int = mapped(1, "`engine.servers`, with colocate")
    beta: float = mapped(0.0, "`objective.kl_coefficient`")
    num_iterations: int = mapped(1, "`trainer.epochs_per_step`")
    delta: float | None = mapped(None, "`objective.dual_clip`")
    sapo_temperature_neg: float = mapped(1.05, "`objective.tau_negative`")
    sapo_temperature_pos: float = mapped(1.0, "`objective.tau_positive`")
    vespo_k_pos: float = idle(2.0, "as `loss_type` vespo, which is refused")
    vespo_lambda_pos: float = idle(3.0, "as `loss_type` vespo, which is refused")
    vespo_k_neg: float = idle(3.0, "as `loss_type` vespo, which is refused")
    vespo_lambda_neg: float = idle(2.0, "as `loss_type` vespo, which is refused")
    importance_sampling_level: str = mapped("token", 'sequence: `objective.kind` = "gspo"')
    reward_weights: list[float] | None = mapped(None, "`weight` of `[[environment.rewards]]`")
    multi_objective_aggregation: str = mapped(
        "sum_then_normalize", 'normalize_then_sum: `objective.normalise` = "component"'
    )
    scale_rewards: str = mapped(
        "group",
        "`objective.advantage`: group is grpo, none dr_grpo, batch reinforce_pp",
    )
    loss_type: str = mapped("dapo", "`objective.kind` and `objective.reduction`")
    mask_truncated_completions: bool = mapped(False, "`objective.mask_truncated`")
    sync_ref_model: bool = refused(
        False,
        "the reference is the model that the run begins with; begin a new run with the folder "
        "`model` of this one",
    )
    ref_model_mixup_alpha: float = idle(0.6, "as `sync_ref_model`, which is refused")
    ref_model_sync_steps: int = idle(512, "as `sync_ref_model`, which is refused")
    top_entropy_quantile: float = refused(
        1.0,
        'tokens are not chosen by their entropy; `objective.kind` = "clip_cov" or "kl_cov" of '
        "midflight.Trainer choose by covariance",
    )
    entropy_coef: float = mapped(0.0, "`objective.entropy_coefficient`")
    use_adaptive_entropy: bool = refused(
        False, "the coefficient stays as it is; set entropy_coef, or a larger epsilon_high"
    )
    entropy_coef_min: float = idle(0.0, "as `use_adaptive_entropy`, which is refused")
    entropy_coef_max: float = idle(1.0, "as `use_adaptive_entropy`, which is refused")
    entropy_coef_delta: float = idle(0.005, "as `use_adaptive_entropy`, which is refused")
    entropy_target: float = idle(0.2, "as `use_adaptive_entropy`, which is refused")
    vllm_importance_sampling_correction: bool = mapped(
        True, "with `use_vllm` `correction.weight`; false is off"
    )
    vllm_importance_sampling_mode: str = mapped(
        "sequence_mask",
        "`correction.weight`: mis_sequence; token_mask is mis, token_truncate tis, "
        "sequence_truncate tis_sequence",
    )
    vllm_importance_sampling_clip_max: float | None = mapped(
        3.0, "`correction.cap` or `correction.high`"
    )
    vllm_importance_sampling_clip_min: float | None = mapped(None, "`correction.low`, with a mask")
    off_policy_mask_threshold: float | None = mapped(None, "`correction.opsm`")
    use_bias_correction_kl: bool = mapped(True, "`objective.kl`: unbiased, else k3")
    log_multimodal: bool = idle(True)
    log_unique_prompts: bool = idle(False)
    log_completions_hub_repo: str | None = refused(
        None, "the run's store keeps them; `midflight samples` shows completions"
    )
    use_transformers_continuous_batching: bool = idle(False, "engines always batch continuously")
    transformers_continuous_batching_config: dict[str, Any] | str | None = idle(
        None, "`engine.max_running` bounds what is decoded together"
    )
    use_transformers_paged: bool = idle(False, "as `use_transformers_continuous_batching`")
    vllm_importance_sampling_cap: float | None = mapped(
        None, "`correction.cap` or `correction.high`"
    )
    auto_find_batch_size: bool = refused(
        False, "trl refuses it too; lower trainer.micro_batch_tokens"
    )
    max_staleness: int = mapped(0, "`rollout.max_staleness`")

    title: ClassVar[str] = "GRPOConfig"
    beyond_trl: ClassVar[frozenset[str]] = frozenset(["max_staleness"])
    """Options that trl's class has not."""

    def problems(self) -> list[str]:
        return [*super().problems(), *self._shape_problems(), *loss_problems(self)]

    def _shape_problems(self) -> Iterator[str]:
        """What is wrong with the sizes of a step and with what is sampled."""
        if self.num_generations < 2:
            yield (
                f"num_generations={self.num_generations}: rewards are compared within a group; set "
                "it to at least 2"
            )
            return
        if None not in (self.generation_batch_size, self.steps_per_generation):
            yield (
                f"generation_batch_size={self.generation_batch_size} and steps_per_generation="
                f"{self.steps_per_generation}: each follows from the other; remove one"
            )
            return
        if self.samples_per_generation % self.num_generations:
            yield (
                f"a generation batch has {self.samples_per_generation} samples, and takes whole "
                f"groups of num_generations={self.num_generations}; make "
                "per_device_train_batch_size * gradient_accumulation_steps (or "
                "generation_batch_size) a multiple of it"
            )
        larger, smaller = sorted(
            (self.samples_per_generation, self.samples_per_update), reverse=True
        )
        if larger % smaller:
            yield (
                f"generation_batch_size={self.samples_per_generation} and the "
                f"{self.samples_per_update} samples of an optimizer step: one must be a multiple "
                "of the other; change gradient_accumulation_steps"
            )
        elif self.updates_per_generation > self.groups_per_step:
            yield (
                f"a generation batch of {self.groups_per_step} groups for "
                f"{self.updates_per_generation} optimizer steps: an update has a whole group at "
                "least; lower steps_per_generation or num_generations"
            )
        options: Any = self.generation_kwargs
        for name, value in dict(options or {}).items():
            if name not in GENERATION and value not in (None, NO_EFFECT.get(name)):
                yield (
                    f"generation_kwargs has {name}={value!r}: it may have "
                    f"{', '.join(GENERATION)}; ask for others in an environment of your own"
                )
            elif name == "repetition_penalty" and value != 1.0:
                yield (
                    f"generation_kwargs has {name}={value!r}: it is not the policy that is sampled "
                    "then; leave it out"
                )
        if self.vllm_mode not in ("server", "colocate"):
            yield f"vllm_mode={self.vllm_mode!r}: it is server or colocate"
        if self.num_iterations < 1:
            yield f"num_iterations={self.num_iterations}: a batch is trained at least once; set 1"
        if self.max_staleness < 0:
            yield f"max_staleness={self.max_staleness}: it is 0 or more versions"

    # --- The shape of a step ----------------------------------------------------------------------

    @property
    def samples_per_update(self) -> int:
        """Samples of one of trl's optimizer steps, as for one process."""
        return int(self.per_device_train_batch_size * self.gradient_accumulation_steps)

    @property
    def samples_per_generation(self) -> int:
        if self.generation_batch_size is not None:
            return int(self.generation_batch_size)
        if self.steps_per_generation is not None:
            return int(self.per_device_train_batch_size * self.steps_per_generation)
        return self.samples_per_update

    @property
    def updates_per_generation(self) -> int:
        """Parts in which what was generated is trained, without the iterations."""
        return max(1, self.samples_per_generation // self.samples_per_update)

    @property
    def samples_per_step(self) -> int:
        """Samples of one of our steps: what is generated at once, or what one update needs."""
        return max(self.samples_per_generation, self.samples_per_update)

    @property
    def groups_per_step(self) -> int:
        return self.samples_per_step // self.num_generations

    @property
    def updates_per_step(self) -> int:
        """Steps of trl's in one of ours: `state.global_step` and `max_steps` count these."""
        return self.updates_per_generation * int(self.num_iterations)

    def _steps(self, updates: float) -> int:
        """Our steps for so many of trl's."""
        return max(1, math.ceil(updates / self.updates_per_step))

    def steps(self, num_rows: int | None) -> int:
        """The number of steps, as trl counts: an epoch drops what does not fill a batch."""
        if self.max_steps > 0:
            return self._steps(self.max_steps)
        if num_rows is None:
            raise ConfigError(
                f"the length of the data is not known: set max_steps in {self.title}."
            )
        return max(1, math.ceil(self.per_epoch(num_rows, steps=1) * self.num_train_epochs))

    def per_epoch(self, num_rows: int | None, *, steps: int) -> int:
        """The steps of an epoch, or all if the number of rows is not known."""
        return steps if num_rows is None else max(1, num_rows // self.groups_per_step)

    # --- What it comes to -------------------------------------------------------------------------

    def sampled(self, name: str) -> Any:
        """An option of sampling, which `generation_kwargs` may override."""
        options: Any = self.generation_kwargs
        given = dict(options or {})
        overriding = [
            given[key]
            for key, option in GENERATION.items()
            if option == name and given.get(key) is not None
        ]
        return overriding[0] if overriding else getattr(self, name)

    def tables(self, *, model: str, num_rows: int | None) -> dict[str, dict[str, Any]]:
        """Returns the configuration, by section."""
        steps = self.steps(num_rows)
        options: Any = self.model_init_kwargs
        dtype = dtype_of_model(options, "float32", model)
        per_epoch = self.per_epoch(num_rows, steps=steps)
        environment = self._environment(model)
        return {
            "run": {
                "name": self.run_name or Path(self.output_dir or model).name,
                "steps": steps,
                "seed": self.seed,
            },
            "model": self._model(dtype),
            "engine": self.engine_here() | self._engine(),
            "environment": environment,
            "rollout": {
                "groups_per_step": self.groups_per_step,
                "group_size": self.num_generations,
                "max_staleness": self.max_staleness,
                **self.shown_completions(self.samples_per_step),
            },
            "trainer": self._trainer(steps, per_epoch, dtype),
            "objective": objective_options(self),
            "correction": correction_options(self),
            "evaluation": self._evaluation(steps, per_epoch),
            "observe": self.observe_options(),
        }

    def _model(self, dtype: str) -> dict[str, Any]:
        options: dict[str, Any] = {"dtype": dtype}
        if self.use_vllm and self.vllm_max_model_length:
            options["max_context"] = self.vllm_max_model_length
        return options

    def _environment(self, model: str) -> dict[str, Any]:
        options = self.environment_options(
            model,
            max_tokens=self.sampled("max_completion_length"),
            context=self.vllm_max_model_length if self.use_vllm else None,
        )
        return options | {
            "temperature": float(self.sampled("temperature")),
            "top_p": float(self.sampled("top_p")),
            "top_k": self.sampled("top_k") or None,
            "min_p": float(self.sampled("min_p") or 0.0),
        }

    def _trainer(self, steps: int, per_epoch: int, dtype: str) -> dict[str, Any]:
        """Options of `[trainer]`. Numbers of steps are given in trl's, and are ours here."""
        options = self.trainer_options(steps=steps, per_epoch=per_epoch, dtype=dtype)
        for name, value in {
            "warmup_steps": self.warmup_steps,
            "checkpoint_every": self.save_steps if self.save_strategy == "steps" else 0,
        }.items():
            if value >= 1:
                options[name] = self._steps(value)
        return options | {
            "updates_per_step": self.updates_per_generation,
            "epochs_per_step": int(self.num_iterations),
        }

    def _evaluation(self, steps: int, per_epoch: int) -> dict[str, Any]:
        if self.eval_strategy == "no":
            return {}
        every = per_epoch
        if self.eval_strategy == "steps":
            given = self.eval_steps if self.eval_steps is not None else self.logging_steps
            every = of_steps(given, steps) if given < 1 else self._steps(given)
        options: dict[str, Any] = {"eval_every": every}
        samples = self.num_generations_eval or self.num_generations
        if samples > 1:
            options["suites"] = [{"name": EVALUATION, "samples": samples}]
        return options

    def _engine(self) -> dict[str, Any]:
        """Options of vLLM, if it is asked for."""
        if not self.use_vllm:
            return {}
        if self.vllm_mode == "server":
            host = "127.0.0.1" if self.vllm_server_host == "0.0.0.0" else self.vllm_server_host
            url = self.vllm_server_base_url or f"http://{host}:{self.vllm_server_port}"
            return {
                "kind": "vllm",
                "urls": [str(url).rstrip("/")],
                "start_seconds": float(self.vllm_server_timeout),
            }
        arguments: list[str] = []
        if self.device != "cpu":
            arguments.append(f"--gpu-memory-utilization={self.vllm_gpu_memory_utilization:g}")
        if self.vllm_model_impl != "vllm":
            arguments.append(f"--model-impl={self.vllm_model_impl}")
        options: dict[str, Any] = {"kind": "vllm", "arguments": arguments}
        if self.vllm_tensor_parallel_size > 1:
            options["servers"] = [{"tensor_parallel": self.vllm_tensor_parallel_size}]
        return options

    def is_logged(self, step: int, *, steps: int, per_epoch: int) -> bool:
        """True if the logs of one of our steps are due: where one of trl's in it would log."""
        if self.logging_strategy != "steps" or step == steps or self.logging_steps < 1:
            return super().is_logged(step, steps=steps, per_epoch=per_epoch)
        if step == 1 and self.logging_first_step:
            return True
        return step % self._steps(self.logging_steps) == 0
