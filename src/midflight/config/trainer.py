"""The options of the trainer and of the warm start before it, with their checks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from midflight.config.section import Above0, Count, Fraction, NonNegative, Positive, Rate, Section


class TrainerSection(Section):
    learning_rate: Rate = 3e-4
    """Peak step size of AdamW; larger learns faster, until the model forgets its skills. Default
    with `model.path`: 0.0003 up to 3 million parameters, 2e-05 at 135 million, 1e-06 from 7
    billion; ten times that with `[lora]`.
    """
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from its peak to zero over the run."""
    warmup_steps: Count = 5
    """Steps of linear warm-up."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled decay."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the mean of squared gradients."""
    max_grad_norm: Above0 = 1.0
    """Gradients of larger L2 norm are scaled down to it."""
    micro_batch_tokens: Positive = 2048
    """Tokens of one forward and backward; larger takes more memory, and is faster on GPUs alone.
    Default with `model.path`: 4096 on GPUs; on CPUs 512 to 2048, by memory.
    """
    updates_per_step: Positive = 1
    """Mini-batch updates in a step; above 1 the proximal policy is computed at the step's start."""
    epochs_per_step: Annotated[int, Field(ge=1, le=1000)] = 1
    """How often a step trains on its batch (µ of GRPO, PPO's epochs)."""
    on_alarm: Literal["warn", "skip", "stop"] = "warn"
    """Some readings say that training is off its distribution. They warn, skip the step, or stop
    the run.
    """
    ranks: Positive = 1
    """Trainer processes that share each step, with the model sharded over them; on a GPU machine
    one for each GPU.
    """
    compute_dtype: Literal["auto", "bfloat16"] = "auto"
    """Precision of the forward and backward; `auto` is that of the weights. bfloat16 beside float32
    weights is faster on GPUs and slower on CPUs without AMX.
    """
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward and compute the rest again: less memory, about
    a third more time.
    """
    compile: bool = False
    """Compile the layers' feed-forward parts: slower to start, no faster on CPUs, not measured on
    GPUs.
    """
    deterministic: bool = False
    """Compute a step on a GPU so that the same step gives the same bits again, as on a CPU: slower.
    For runs whose steps somebody replays.
    """
    threads: Positive = 1
    """CPU threads of one trainer process."""
    device: str = "cpu"
    """The device of the trainer: `cpu`, `cuda` (a GPU for each rank), or such as `cuda:1`."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: Positive = 2
    """Checkpoints kept."""


class WarmStartSection(Section):
    """Supervised fine-tuning before reinforcement learning, on the answers of the sources' tasks or
    on conversations. It stops on accuracy, not on steps. There is none without `target_accuracy`
    and `data`.
    """

    data: Path | None = None
    """Conversations to learn from, as JSON lines with `messages` (OpenAI's) and optional `tools`:
    every message of the assistant. None learns the `answer` of the sources' tasks.
    """
    target_accuracy: Fraction | None = None
    """Stop once held-out exact match reaches this: of held-out tasks of the first source, or of an
    eighth of the conversations. Without it `data` is learnt for `max_steps`.
    """
    learning_rate: Rate = 2e-3
    """Peak step size. Default with `model.path`: ten times `trainer.learning_rate`'s for whole
    weights, at most 0.002.
    """
    max_steps: Positive = 2000
    """Gives up (and goes on) after this many steps."""
    examples_per_step: Positive = 64
    """Answers that one step learns from."""
    evaluate_every: Positive = 25
    """Steps between looks at the accuracy."""

    @property
    def is_made(self) -> bool:
        return self.target_accuracy is not None or self.data is not None


def trainer_contradictions(
    trainer: TrainerSection, *, groups_per_step: int, dtype: str
) -> Iterator[str]:
    """`dtype` is the precision of the weights."""
    if trainer.updates_per_step > groups_per_step:
        yield (
            f"trainer.updates_per_step ({trainer.updates_per_step}) is more than "
            f"rollout.groups_per_step ({groups_per_step}), and an update has a group at least; "
            "lower it"
        )
    if trainer.compute_dtype == "bfloat16" and dtype == "float64":
        yield (
            'trainer.compute_dtype = "bfloat16" with model.dtype = "float64" would keep what it '
            'cannot use; set model.dtype = "float32"'
        )
    if trainer.compute_dtype == "bfloat16" and dtype == "bfloat16":
        yield (
            'trainer.compute_dtype = "bfloat16" is for full-precision weights, and model.dtype '
            'is "bfloat16"; set model.dtype = "float32" and engine.dtype = "bfloat16"'
        )
