"""The six knobs of asynchrony, where B = groups_per_step, n = group_size, S = max_staleness."""

from dataclasses import dataclass

from midflight.config.derived import (
    batch_rollouts,
    buffer_groups,
    engine_slots,
    in_flight,
    worst_staleness,
)
from midflight.config.rollout import RolloutSection
from midflight.config.sections import Config
from midflight.types import Version


@dataclass(frozen=True, slots=True)
class Knob:
    """One of the six, with the number in force, the thing that it bounds, and whether it is the
    first bound that the run meets.
    """

    name: str
    value: str
    effect: str
    binds: bool = False


def knobs(config: Config) -> tuple[Knob, ...]:
    """The six knobs of asynchrony. Those that bound the rollouts at work are compared: the tightest
    one binds, and in a tie both do.
    """
    r = config.rollout
    slots = engine_slots(config)
    running = in_flight(config)
    admitted = (r.max_staleness + 1) * batch_rollouts(r)
    waiting = buffer_groups(r)
    tightest = min(running, admitted)
    every = config.evaluation.eval_every
    batches = waiting / r.groups_per_step
    return (
        Knob(
            "rollout.max_in_flight",
            str(running),
            f"rollouts at once; {min(running, slots)} decode together",
            binds=running == tightest,
        ),
        Knob(
            "rollout.max_staleness",
            str(r.max_staleness),
            (
                f"at most {admitted // r.group_size} groups ({admitted} rollouts) submitted and "
                "not yet trained"
            ),
            binds=admitted == tightest,
        ),
        Knob("rollout.stale_policy", r.stale_policy.value, worst_staleness(r).price),
        Knob(
            "rollout.pause_mode", str(r.pause_mode), "how engines pause for the commit of a version"
        ),
        # A buffer of (S + 1) * B groups holds all that admission lets in; only a smaller one can
        # stop generation.
        Knob(
            "rollout.buffer_groups",
            str(waiting),
            f"finished groups that may wait: {batches:g} batches",
            binds=waiting * r.group_size < admitted,
        ),
        Knob(
            "evaluation.eval_every",
            str(every),
            f"an evaluation every {every} steps" if every else "evaluations before and after only",
        ),
    )


def admission_limit(rollout: RolloutSection, served: Version) -> int:
    """Groups that may have been submitted and not released while engines serve `served`: (v_served
    + S + 1) * B.

    `released` counts from the start of the run, as `served` does.
    """
    return (served + rollout.max_staleness + 1) * rollout.groups_per_step
