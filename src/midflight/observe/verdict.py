"""Who holds the ring back: generation or training, by how much, and which knob to turn."""

from __future__ import annotations

from midflight.observe.status import Bound

BALANCED = 0.1
"""Idle shares that differ by less than this call for no change."""


def judge(*, engine_busy: float | None, trainer_busy: float | None) -> tuple[Bound, str]:
    """Compares how much of the training phase each side was idle. The side with less idle time bounds the run."""
    if engine_busy is None or trainer_busy is None:
        return Bound.UNKNOWN, ""
    engine_idle, trainer_idle = 1 - engine_busy, 1 - trainer_busy
    if abs(engine_idle - trainer_idle) < BALANCED:
        return Bound.BALANCED, "both sides are about equally busy"
    if trainer_idle > engine_idle:
        return Bound.GENERATION, f"the trainer is idle {trainer_idle:.0%}: more engine.count, engine.max_running or rollout.max_in_flight"
    return Bound.TRAINER, f"the engines are idle {engine_idle:.0%}: more trainer.threads or trainer.micro_batch_tokens, or fewer engines"
