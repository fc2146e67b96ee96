"""The numbers the buffer works with, checked together."""

from __future__ import annotations

from dataclasses import dataclass

from midflight.config.sections import RolloutSection
from midflight.errors import ConfigError
from midflight.types import StalePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Depth (`max_in_flight`, rollouts), bound on age (`max_staleness`, versions) and size (`buffer_groups`) are three knobs."""

    groups_per_step: int
    group_size: int
    max_staleness: int
    policy: StalePolicy
    max_in_flight: int
    buffer_groups: int
    min_group_size: int
    requeues: int
    drop_zero_spread: bool

    def __post_init__(self) -> None:
        if self.buffer_groups < self.groups_per_step:
            raise ConfigError(
                f"rollout.buffer_groups = {self.buffer_groups} cannot hold one batch of {self.groups_per_step} groups: "
                f"the trainer would wait for ever; set it to {self.groups_per_step} or more, or leave it out."
            )
        if self.max_in_flight < self.group_size:
            raise ConfigError(
                f"rollout.max_in_flight = {self.max_in_flight} rollouts cannot hold one group of {self.group_size}: "
                f"none would ever start; set it to {self.group_size} or more, or leave it out."
            )
        if self.min_group_size > self.group_size:
            raise ConfigError(
                f"rollout.min_group_size = {self.min_group_size} is more than the {self.group_size} rollouts of a group: "
                "every group would be dropped; lower it, or leave it out."
            )

    @classmethod
    def of(cls, section: RolloutSection) -> Limits:
        """The section's numbers with the defaults of DECISIONS 30 where it has none."""
        depth = (section.max_staleness + 1) * section.groups_per_step
        return cls(
            groups_per_step=section.groups_per_step,
            group_size=section.group_size,
            max_staleness=section.max_staleness,
            policy=section.stale_policy,
            max_in_flight=section.max_in_flight or depth * section.group_size,
            buffer_groups=section.buffer_groups or depth,
            min_group_size=section.min_group_size or (section.group_size + 1) // 2,
            requeues=section.requeues,
            drop_zero_spread=section.drop_zero_spread,
        )
