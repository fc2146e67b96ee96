"""Finds the side of a run that the other waits for, and the option to change."""

from midflight.config.cores import CoreUse
from midflight.observe.status import Bound

BALANCED = 0.1
"""The difference of idle shares below which no change is advised."""
WAITS = 0.25
"""A trainer whose idle share is this large does not bound the run."""
FREE = 0.5
"""With this share of the slots free, more slots do not help."""


def find_bottleneck(
    *,
    engine_busy: float | None,
    trainer_busy: float | None,
    slots_used: float | None = None,
    cores: CoreUse = CoreUse(),
) -> tuple[Bound, str]:
    """Compares how much of the training phase each side was idle. The side with less idle time
    bounds the run.

    An engine computes all the time even for a single request. Beside a trainer that seldom waits,
    the share of its free slots, if known, therefore counts as its idle share. A trainer that waits
    beside an engine that computes all the time waits for that engine, however few its requests.
    """
    if engine_busy is None or trainer_busy is None:
        return Bound.UNKNOWN, ""
    trainer_idle = 1 - trainer_busy
    free = None if slots_used is None else 1 - slots_used
    engine_idle = 1 - engine_busy if free is None or trainer_idle >= WAITS else free
    if trainer_idle >= engine_idle + BALANCED:
        advice = f"the trainer is idle {trainer_idle:.0%}{_more_generation(free, cores)}"
        return Bound.GENERATION, advice
    if trainer_idle >= WAITS:
        advice = (
            "both sides wait, for agents and their tools or for each other (trainer idle "
            f"{trainer_idle:.0%}, engines {engine_idle:.0%}): a larger rollout.max_in_flight or "
            "rollout.max_staleness"
        )
        return Bound.BALANCED, advice
    if engine_idle >= trainer_idle + BALANCED:
        return Bound.TRAINER, f"the engines are idle {engine_idle:.0%}: {_more_training(cores)}"
    return Bound.BALANCED, "both sides are about equally busy"


def _more_generation(free: float | None, cores: CoreUse) -> str:
    """Advice that lets the engines generate more, or the trainer need less of it."""
    if free is not None and free >= FREE:
        return (
            f", and {free:.0%} of the engines' slots are free: a larger rollout.max_in_flight "
            "or rollout.max_staleness, quicker agents"
        )
    if not cores.are_full:
        return ": more engine.count, engine.max_running or rollout.max_in_flight"
    ways: list[str] = []
    if cores.can_lend:
        ways.append("engine.lend = true, by which the trainer's cores generate while it waits")
    if cores.can_shift:
        ways.append("fewer trainer.threads for more engine.threads")
    ways.append("shorter answers (environment.max_tokens, or what the prompt asks for)")
    ways.append("a machine with more cores")
    return (
        ", and every core computes already, so that more engines or threads would not help: "
        f"{'; '.join(ways)}"
    )


def _more_training(cores: CoreUse) -> str:
    """Advice that lets the trainer train faster. It takes from the engines only what they have."""
    if cores.are_full and cores.can_give:
        return (
            "more trainer.threads for fewer engine.threads or engine.count, or more "
            "trainer.micro_batch_tokens"
        )
    if cores.are_full:
        return "more trainer.micro_batch_tokens, or a machine with more cores for trainer.threads"
    fewer = "" if cores.has_one_engine else ", or fewer engines"
    return f"more trainer.threads or trainer.micro_batch_tokens{fewer}"
