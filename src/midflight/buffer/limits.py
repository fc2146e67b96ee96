"""The numbers the buffer works with."""

from __future__ import annotations

from dataclasses import dataclass

from midflight.types import StalePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Depth (`max_in_flight`, rollouts), bound on age (`max_staleness`, versions) and size (`buffer_groups`) are three knobs.

    A batch must fit into the buffer and a group into the depth, or nothing is ever trained: `config.checks` refuses such numbers.
    """

    groups_per_step: int
    group_size: int
    max_staleness: int
    policy: StalePolicy
    max_in_flight: int
    buffer_groups: int
    min_group_size: int
    requeues: int
    drop_zero_spread: bool
