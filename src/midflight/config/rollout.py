"""The options of the rollouts of a step, with their checks."""

from collections.abc import Iterator
from typing import Literal

from midflight.config.section import Count, Positive, Section
from midflight.types import PauseMode, StalePolicy


class RolloutSection(Section):
    groups_per_step: Positive = 16
    """B: groups (tasks) of a step; larger is steadier and slower."""
    group_size: Positive = 8
    """n: rollouts of one task; larger estimates the advantage better."""
    max_in_flight: Positive | None = None
    """Rollouts at once; more hide latency and make tokens older. Default: what engines hold, at
    most (S + 1) * B * n.
    """
    max_staleness: Count = 4
    """S: versions that a trained token may be old; 0 is synchronous."""
    stale_policy: StalePolicy = StalePolicy.WAIT
    """The rule for a group that would grow too old (docs/staleness.md)."""
    pause_mode: PauseMode | Literal["auto"] = "auto"
    """How engines pause for a commit (docs/pause-and-resume.md#four-modes)."""
    buffer_groups: Positive | None = None
    """Finished groups that may wait; larger absorbs more variation. Default: (S + 1) * B."""
    min_group_size: Positive | None = None
    """Fewer scored rollouts than this drop the group. Default: half of `group_size`."""
    retries: Count = 1
    """How often a rollout whose infrastructure failed is tried again."""
    show_every: Count = 0
    """Steps between completions that are shown; 0 shows none."""
    show_completions: Positive = 2
    """How many rollouts are shown then."""
    drop_zero_spread: bool = False
    """Replace groups whose rewards are all equal (DAPO's dynamic sampling)."""


def rollout_contradictions(rollout: RolloutSection, *, max_sessions: int) -> Iterator[str]:
    """`max_sessions` may be live at once."""
    r = rollout
    if r.buffer_groups is not None and r.buffer_groups < r.groups_per_step:
        yield (
            f"rollout.buffer_groups ({r.buffer_groups}) is less than the {r.groups_per_step} "
            "groups of one step, so no batch would ever be full; raise it to at least "
            "rollout.groups_per_step"
        )
    if r.max_in_flight is not None and r.max_in_flight < r.group_size:
        yield (
            f"rollout.max_in_flight ({r.max_in_flight}) is less than rollout.group_size "
            f"({r.group_size}), so no group could run whole; raise max_in_flight or lower "
            "group_size"
        )
    if r.min_group_size is not None and r.min_group_size > r.group_size:
        yield (
            f"rollout.min_group_size ({r.min_group_size}) is more than rollout.group_size "
            f"({r.group_size}), so every group would be dropped; lower it"
        )
    if r.group_size > max_sessions:
        yield (
            f"rollout.group_size ({r.group_size}) is more than gateway.max_sessions "
            f"({max_sessions}), so no group could run whole; lower it, or raise "
            "gateway.max_sessions"
        )
    if r.max_in_flight is not None and r.max_in_flight > max_sessions:
        yield (
            f"rollout.max_in_flight ({r.max_in_flight}) is more than gateway.max_sessions "
            f"({max_sessions}), beyond which rollouts are refused; lower it, or raise "
            "gateway.max_sessions"
        )
