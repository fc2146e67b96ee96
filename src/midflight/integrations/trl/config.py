"""The options of trl 1.16's `AsyncGRPOConfig`, and their counterparts here."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar

from midflight.errors import ConfigError
from midflight.integrations.trl.arguments import (
    AS_THERE,
    TrainingArguments,
    dtype_of_model,
    idle,
    mapped,
    refused,
)
from midflight.models.sizes import sizes_of

MANY_TURNS = 1000
"""The limit of turns if trl sets none. The context ends a conversation before."""
ROLLOUT_SECONDS = 3600.0
"""The seconds that an agent and its reward functions may take by themselves. trl has no limit; here
one that hangs would hold up a step for ever.
"""
NO_EVALUATION = (
    "trl's own trainer has no evaluation; use GRPOTrainer, or midflight.Trainer with heldout and "
    "evaluation.eval_every"
)


@dataclasses.dataclass(init=False, repr=False)
class SamplingArguments(TrainingArguments):
    """The options of sampling that trl's two configurations of GRPO have in common."""

    learning_rate: float = mapped(1e-6, "`trainer.learning_rate`")
    gradient_checkpointing: bool | None = mapped(
        True, "`trainer.activation_checkpointing`, on a GPU"
    )
    bf16: bool | None = mapped(None, "`trainer.compute_dtype`, unset bfloat16 on a GPU")
    model_init_kwargs: dict[str, Any] | str | None = mapped(None, "`model.dtype`")
    trust_remote_code: bool = refused(False, "a model's own code is not run; leave it out")
    router_aux_loss_coef: float | None = refused(
        None, "the load balance of a mixture is not a term of the loss here; leave it out"
    )
    num_generations: int = mapped(8, "`rollout.group_size`")
    temperature: float = mapped(1.0, "`environment.temperature`")
    top_p: float = mapped(1.0, "`environment.top_p`")
    top_k: int = mapped(0, "`environment.top_k`")
    min_p: float | None = mapped(None, "`environment.min_p`")
    repetition_penalty: float = refused(
        1.0,
        "it is not the policy that is sampled then; ask for it in an environment of your own, "
        "whose turns are then masked",
    )
    chat_template_kwargs: dict[str, Any] | str | None = mapped(
        None, "`environment.template_options`"
    )
    max_tool_calling_iterations: int | None = mapped(None, "`environment.max_turns`, one more")
    epsilon: float = mapped(0.2, "`objective.clip_low`")
    epsilon_high: float | None = mapped(None, "`objective.clip_high`")
    log_completions: bool = mapped(False, "`rollout.show_every` = `logging_steps`")
    num_completions_to_print: int | None = mapped(None, "`rollout.show_completions`")

    def environment_options(
        self, model: str, *, max_tokens: int | None, context: int | None = None
    ) -> dict[str, Any]:
        """Options of `[environment]`. An answer of unlimited length ends where the context does,
        which is the model's own unless it is given.
        """
        context = context or sizes_of(Path(model)).max_context or (max_tokens or 0) + 1
        turns = self.max_tool_calling_iterations
        template: Any = self.chat_template_kwargs
        return {
            "max_tokens": min(max_tokens or context - 1, context - 1),
            "temperature": float(self.temperature),
            "top_p": float(self.top_p),
            "top_k": self.top_k or None,
            "min_p": float(self.min_p or 0.0),
            "rollout_seconds": ROLLOUT_SECONDS,
            "max_turns": MANY_TURNS if turns is None else turns + 1,
            "template_options": dict(template or {}),
        }

    def shown_completions(self, number: int) -> dict[str, Any]:
        """Options of `[rollout]` that show `number` completions of a step, if that is asked for."""
        if not self.log_completions:
            return {}
        return {
            "show_every": max(1, int(self.logging_steps)),
            "show_completions": self.num_completions_to_print or number,
        }


@dataclasses.dataclass(init=False, repr=False)
class AsyncGRPOConfig(SamplingArguments):
    """Options by the names of trl 1.16. Raises `ConfigError` for an option that has no meaning
    here, and names the one to use.
    """

    dtype: str = mapped("float32", "`model.dtype`")
    logging_steps: float = mapped(1, AS_THERE)
    lr_scheduler_type: str = mapped("constant", "`trainer.schedule`: constant, linear or cosine")
    ignore_data_skip: bool = refused(
        True, "the place in the data is kept in the run's store; leave it out"
    )
    max_completion_length: int = mapped(2048, "`environment.max_tokens`")
    fork_threshold_tokens: int = idle(1024, "each conversation is a tree of tokens")
    vllm_server_base_url: str = mapped(
        "http://localhost:8000", '`engine.kind` = "vllm" with `engine.urls`, if it is set'
    )
    vllm_server_timeout: float = mapped(240.0, "`engine.start_seconds`")
    request_timeout: float = mapped(600, "`gateway.request_seconds`")
    weight_sync_timeout: float = mapped(1800, "`weights.stage_seconds`")
    token_budget: int | None = mapped(
        None, "`trainer.micro_batch_tokens`; longer samples go alone, none is dropped"
    )
    max_inflight_tasks: int = mapped(-1, "`rollout.max_in_flight`")
    max_staleness: int = mapped(4, "`rollout.max_staleness`")
    queue_maxsize: int = mapped(1024, "`rollout.buffer_groups`")
    weight_sync_steps: int = mapped(1, "`weights.every`, at most `max_staleness` + 1")
    heartbeat_stale_after_s: float = mapped(300.0, "`run.stall_seconds`")
    eval_strategy: str = refused("no", NO_EVALUATION)
    eval_on_start: bool = refused(False, NO_EVALUATION)
    do_eval: bool = refused(False, NO_EVALUATION)
    eval_steps: float | None = idle(None)

    title: ClassVar[str] = "AsyncGRPOConfig"

    def problems(self) -> list[str]:
        found = super().problems()
        if self.dtype not in ("auto", "float32", "bfloat16"):
            found.append(f"dtype={self.dtype!r}: weights are float32 or bfloat16")
        if self.samples_per_step % self.num_generations:
            found.append(
                "per_device_train_batch_size * gradient_accumulation_steps is "
                f"{self.samples_per_step}, and a step takes whole groups of "
                f"num_generations={self.num_generations}; make it a multiple of that"
            )
        return found

    # --- What it comes to -------------------------------------------------------------------------

    @property
    def samples_per_step(self) -> int:
        """Samples of a step, as for one process. More ranks share each step."""
        return int(self.per_device_train_batch_size * self.gradient_accumulation_steps)

    @property
    def groups_per_step(self) -> int:
        return self.samples_per_step // self.num_generations

    @property
    def updates_per_step(self) -> int:
        """Steps of trl's in one of ours."""
        return 1

    def steps(self, num_rows: int | None) -> int:
        """The number of steps: `max_steps`, else so many that every epoch trains on every row."""
        if self.max_steps > 0:
            return int(self.max_steps)
        if num_rows is None:
            raise ConfigError(
                f"the length of the data is not known: set max_steps in {self.title}."
            )
        return max(1, math.ceil(num_rows * self.num_train_epochs / self.groups_per_step))

    def per_epoch(self, num_rows: int | None, *, steps: int) -> int:
        """The steps of an epoch, or all if the number of rows is not known."""
        return steps if num_rows is None else max(1, math.ceil(num_rows / self.groups_per_step))

    def tables(self, *, model: str, num_rows: int | None) -> dict[str, dict[str, Any]]:
        """Returns the configuration, by section. If trl's default belongs to machinery that is not
        here, an option that was not given keeps our default.
        """
        steps = self.steps(num_rows)
        clip_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        name = self.run_name or Path(self.output_dir or model).name
        stall = float(self.heartbeat_stale_after_s)
        options: Any = self.model_init_kwargs
        dtype = dtype_of_model(options, self.dtype, model)
        trainer = self.trainer_options(
            steps=steps, per_epoch=self.per_epoch(num_rows, steps=steps), dtype=dtype
        )
        if (self.token_budget or 0) > 0:
            trainer["micro_batch_tokens"] = self.token_budget
        return {
            "run": {"name": name, "steps": steps, "seed": self.seed, "stall_seconds": stall},
            "model": {"dtype": dtype},
            "engine": self.engine_here() | self._server(),
            "gateway": {"request_seconds": float(self.request_timeout)},
            "environment": self.environment_options(model, max_tokens=self.max_completion_length),
            "rollout": self._rollout(),
            "trainer": trainer,
            "objective": {"kind": "ppo", "clip_low": self.epsilon, "clip_high": clip_high},
            "weights": self._weights(),
            "observe": self.observe_options(),
        }

    def _weights(self) -> dict[str, Any]:
        options: dict[str, Any] = {"every": self.weight_sync_steps}
        if "weight_sync_timeout" in self.given:
            options["stage_seconds"] = float(self.weight_sync_timeout)
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
        return options | self.shown_completions(self.samples_per_step)

    def _server(self) -> dict[str, Any]:
        """Options of a server of vLLM, if one is named. trl needs one; here an engine of our own
        takes its place.
        """
        if "vllm_server_base_url" not in self.given | self.named:
            return {}
        return {
            "kind": "vllm",
            "urls": [str(self.vllm_server_base_url).rstrip("/")],
            "start_seconds": float(self.vllm_server_timeout),
        }
