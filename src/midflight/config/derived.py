"""What follows from the six knobs: pure functions of a section, where B = groups_per_step, n = group_size, S = max_staleness."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from midflight.config.sections import Config, EngineSection, LoraSection, RolloutSection
from midflight.types import StalePolicy, Version


def batch_rollouts(rollout: RolloutSection) -> int:
    """B * n: rollouts one step trains on."""
    return rollout.groups_per_step * rollout.group_size


def in_flight(rollout: RolloutSection) -> int:
    """Rollouts running at once: `max_in_flight`, else (S + 1) * B * n, which is all that admission can let in."""
    return rollout.max_in_flight or (rollout.max_staleness + 1) * batch_rollouts(rollout)


def buffer_groups(rollout: RolloutSection) -> int:
    """Finished groups that may wait: `buffer_groups`, else (S + 1) * B, where the buffer never is the limit."""
    return rollout.buffer_groups or (rollout.max_staleness + 1) * rollout.groups_per_step


def min_group_size(rollout: RolloutSection) -> int:
    """Scored rollouts a group needs: `min_group_size`, else ceil(n / 2)."""
    return rollout.min_group_size or math.ceil(rollout.group_size / 2)


def admission_limit(rollout: RolloutSection, served: Version) -> int:
    """Groups that may have been submitted and not released while engines serve `served`: (v_served + S + 1) * B.

    `released` counts from the start of the run, as `served` does.
    """
    return (served + rollout.max_staleness + 1) * rollout.groups_per_step


def num_engines(engine: EngineSection) -> int:
    """Engines of the run: the servers attached, else the processes started."""
    return len(engine.urls) or engine.count


def engine_slots(engine: EngineSection) -> int:
    """Requests decoded together by all engines."""
    return num_engines(engine) * engine.max_running


def served_dtype(config: Config) -> str:
    """Precision of the weights in engines, and on their way there."""
    return config.model.dtype if config.engine.dtype == "auto" else config.engine.dtype


def lora_alpha(lora: LoraSection) -> float:
    """By which, over the rank, the output of adapters is scaled: `alpha`, else 2 * rank."""
    return lora.alpha or 2 * (lora.rank or 0)


def engine_python(engine: EngineSection) -> Path:
    """Interpreter of the server's environment: `python`, else where `make engines` puts it. Not resolved: a link leads to another."""
    return engine.python or Path(f".venv-{engine.kind}/bin/python")


@dataclass(frozen=True, slots=True)
class Staleness:
    """The largest age a trained token can have, in versions, and what the policy pays for the bound (I2)."""

    worst: int
    price: str


_PRICES = {
    StalePolicy.WAIT: "steps wait for stragglers, at most until the deadline of a rollout; nothing is dropped",
    StalePolicy.DROP: "older trajectories leave the gradient; their rewards stay in the baseline",
    StalePolicy.MASK: "older tokens get weight 0 and stay as context",
    StalePolicy.REQUEUE: "older groups are closed and their task is tried again, then dropped",
}


def worst_staleness(rollout: RolloutSection) -> Staleness:
    """The bound is S under every policy; the policies differ in the price. At S = 0 there is nothing to pay for."""
    price = "none: each batch is sampled under the version it trains" if rollout.max_staleness == 0 else _PRICES[rollout.stale_policy]
    return Staleness(rollout.max_staleness, price)


@dataclass(frozen=True, slots=True)
class Knob:
    """One of the six, with the number in force, what it bounds, and whether it is the first bound the run meets."""

    name: str
    value: str
    effect: str
    binds: bool = False


def knobs(config: Config) -> tuple[Knob, ...]:
    """The six knobs of asynchrony. Those that bound the rollouts at work are compared; the tightest binds, ties both."""
    r, slots = config.rollout, engine_slots(config.engine)
    running, admitted, waiting = in_flight(r), (r.max_staleness + 1) * batch_rollouts(r), buffer_groups(r)
    tightest = min(running, admitted)
    every = config.evaluation.eval_every
    return (
        Knob(
            "rollout.max_in_flight", str(running), f"rollouts running at once; {min(running, slots)} decode together", running == tightest
        ),
        Knob(
            "rollout.max_staleness",
            str(r.max_staleness),
            f"at most {admitted // r.group_size} groups ({admitted} rollouts) submitted and not yet trained",
            admitted == tightest,
        ),
        Knob("rollout.stale_policy", r.stale_policy.value, worst_staleness(r).price),
        Knob("rollout.pause_mode", str(r.pause_mode), "how engines pause for the commit of a version"),
        # A buffer of (S + 1) * B groups holds all that admission lets in; only a smaller one can stop generation.
        Knob(
            "rollout.buffer_groups",
            str(waiting),
            f"finished groups that may wait: {waiting / r.groups_per_step:g} batches",
            waiting * r.group_size < admitted,
        ),
        Knob("evaluation.eval_every", str(every), f"an evaluation every {every} steps" if every else "evaluations before and after only"),
    )
