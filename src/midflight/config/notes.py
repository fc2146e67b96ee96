"""Notes on options that are allowed but may surprise."""

import math
from collections.abc import Iterator

from midflight.config.context import context_notes
from midflight.config.derived import batch_rollouts, engine_slots, in_flight, served_dtype
from midflight.config.loss import formula_of
from midflight.config.sections import Config
from midflight.types import StalePolicy


def notes(config: Config) -> tuple[str, ...]:
    """Returns remarks on options that are allowed but may surprise. They are shown by `--dry-run`
    and at the start of a run.
    """
    return tuple(_notes(config))


def _notes(config: Config) -> Iterator[str]:
    yield from _rollout_notes(config)
    yield from _precision_notes(config)
    yield from context_notes(config)
    if not any(source.has_heldout for source in config.environment.sources):
        yield (
            "no source holds tasks out (heldout), so nothing is evaluated, before, during or "
            "after training."
        )
    if not config.warm_start.is_made and config.model.path is None:
        yield (
            "warm_start.target_accuracy is not set and the model is made with random weights: "
            "reward may stay at 0."
        )


def _rollout_notes(config: Config) -> Iterator[str]:
    r = config.rollout
    if r.max_staleness == 0:
        yield (
            "rollout.max_staleness = 0 is the synchronous loop: exactly one batch of groups is "
            "admitted per version, nothing is prefetched, engines wait while the trainer steps, "
            "and the pause mode does not matter."
        )
    if (
        r.group_size == 1
        and config.distillation.teacher is None
        and config.objective.advantage != "gae"
    ):
        yield "rollout.group_size = 1 has nothing to compare with: every advantage is 0."
    if r.stale_policy in (StalePolicy.MASK, StalePolicy.REQUEUE):
        yield (
            f"rollout.stale_policy = {r.stale_policy.value} is biased: long answers lose credit "
            "or are drawn less often."
        )
    if r.stale_policy is StalePolicy.DROP:
        yield (
            "rollout.stale_policy = drop shortens what is trained: slow, long answers are "
            "dropped most."
        )
    if (
        config.correction.weight == "off"
        and formula_of(config.objective, config.correction).form == "decoupled"
        and r.max_staleness > 0
    ):
        yield (
            'correction.weight = "off" trains tokens of older policies as if they were fresh: '
            "nothing corrects for their age."
        )
    if in_flight(config) < batch_rollouts(r):
        yield (
            f"{in_flight(config)} rollouts run at once, less than one batch "
            f"({batch_rollouts(r)} rollouts): a step waits for several waves."
        )
    if r.max_in_flight is not None and r.max_in_flight > engine_slots(config):
        yield (
            f"{r.max_in_flight} rollouts in flight share {engine_slots(config)} engine slots: the "
            "others wait inside the engine, or use their time in tools."
        )


def _precision_notes(config: Config) -> Iterator[str]:
    if config.model.dtype == "bfloat16":
        yield (
            "model.dtype = bfloat16 keeps weights and moments in bfloat16: steps of "
            f"{config.trainer.learning_rate:g} leave weights above "
            f"{_least_unmoved(config.trainer.learning_rate):.2g} as they are. To learn, keep "
            'float32, and serve by engine.dtype = "bfloat16"; on GPUs, and CPUs with AMX, also '
            'compute by trainer.compute_dtype = "bfloat16".'
        )
    served = served_dtype(config)
    if served != config.model.dtype:
        yield (
            f"engines serve in {served} what is trained in {config.model.dtype}: "
            "log-probabilities differ by rounding, which the loss corrects for."
        )


def _least_unmoved(step: float) -> float:
    """The power of two above which adding a step changes no number of bfloat16, because half the
    distance to the next number is more than the step.

    From 2**k to 2**(k + 1) numbers lie 2**(k - 7) apart.
    """
    return 2.0 ** (math.floor(math.log2(step * 2**8)) + 1)
