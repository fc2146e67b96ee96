"""The options of the trainer and of the warm start before it, with their checks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from midflight.config.section import Above0, Count, Fraction, NonNegative, Positive, Rate, Section


class TrainerSection(Section):
    learning_rate: Rate = 3e-4
    """AdamW's peak step size; larger learns faster, until skills are lost. Default with
    `model.path`: by the model's size, ten times that with `[lora]`.
    """
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to zero over the run."""
    warmup_steps: Count = 5
    """Steps of linear warm-up."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled decay."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW's decay of the mean of squared gradients."""
    max_grad_norm: Above0 = 1.0
    """Gradients of larger L2 norm are scaled down to it."""
    micro_batch_tokens: Positive = 2048
    """Tokens of one forward and backward; larger takes memory, and is faster on GPUs alone. Default
    with `model.path`: 4096 on GPUs, else 512 to 2048.
    """
    updates_per_step: Positive = 1
    """Mini-batch updates of a step."""
    epochs_per_step: Annotated[int, Field(ge=1, le=1000)] = 1
    """How often a step trains on its batch (GRPO's µ, PPO's epochs)."""
    on_alarm: Literal["warn", "skip", "stop"] = "warn"
    """The trainer does this if the policy is far from the one that sampled."""
    ranks: Positive = 1
    """Processes over which model and step are sharded; on GPUs one for each."""
    compute_dtype: Literal["auto", "bfloat16"] = "auto"
    """Precision of forward and backward; `auto` is the weights'. bfloat16 is slower on CPUs without
    AMX.
    """
    activation_checkpointing: bool = False
    """Compute activations again for the backward: less memory, a third more time."""
    compile: bool = False
    """Compile feed-forward layers: slower to start, no faster on CPUs, unmeasured on GPUs."""
    deterministic: bool = False
    """Steps on a GPU give the same bits again, as on CPUs; slower."""
    threads: Positive = 1
    """CPU threads of one trainer process."""
    device: str = "cpu"
    """`cpu`, `cuda` (a GPU for each rank), or such as `cuda:1`."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; 0 saves at the end only."""
    keep_checkpoints: Positive = 2
    """Checkpoints kept."""


class WarmStartSection(Section):
    """Supervised fine-tuning comes before reinforcement learning if `data` or `target_accuracy` is
    set.
    """

    data: Path | None = None
    """JSON lines of conversations (docs/data.md#a-warm-start-on-conversations). None learns the
    `answer` of tasks.
    """
    target_accuracy: Fraction | None = None
    """Stop once held-out exact match reaches this, on the first source or an eighth of `data`."""
    learning_rate: Rate = 2e-3
    """Peak step size. Default with `model.path`: ten times the trainer's for whole weights, at most
    0.002.
    """
    max_steps: Positive = 2000
    """Gives up, and goes on, after so many steps."""
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
