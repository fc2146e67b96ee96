"""Groups made by hand for the tests of the buffer."""

from __future__ import annotations

import numpy as np

from midflight.buffer.groups import Limits
from midflight.types import Finish, FinishReason, Group, GroupKey, RolloutKey, Row, Segment, StalePolicy, Trajectory, Turn


def row(*versions: int) -> Row:
    """A prompt of one token and one trainable token per given version."""
    n = len(versions) + 1
    generated = np.array([False] + [True] * (n - 1))
    labels = np.array((0, *versions), dtype=np.int32)
    return Row(np.arange(n, dtype=np.int32), generated, generated.copy(), np.full(n, -1.0, dtype=np.float32), labels, labels.copy())


def key(index: int, attempt: int = 0) -> GroupKey:
    return GroupKey(0, index, attempt)


def group(group_key: GroupKey, *rollouts: tuple[int, ...], rewards: tuple[float, ...] = ()) -> Group:
    """One trajectory of one row per tuple of versions; rewards 0, 1, 2, ... unless given."""
    scores = rewards or tuple(float(i) for i in range(len(rollouts)))
    made = tuple(
        Trajectory(RolloutKey(group_key, i), f"task-{group_key.index}", "letters", scores[i], (row(*versions),) if versions else ())
        for i, versions in enumerate(rollouts)
    )
    return Group(group_key, f"task-{group_key.index}", "letters", made)


def limits(
    b: int,
    s: int,
    policy: StalePolicy = StalePolicy.WAIT,
    *,
    n: int = 1,
    max_in_flight: int | None = None,
    buffer_groups: int | None = None,
    buffer_bytes: int = 2**40,
    min_group_size: int = 1,
    drop_zero_spread: bool = False,
) -> Limits:
    return Limits(
        groups_per_step=b,
        group_size=n,
        max_staleness=s,
        policy=policy,
        max_in_flight=max_in_flight or (s + 1) * b * n,
        buffer_groups=buffer_groups or (s + 1) * b,
        buffer_bytes=buffer_bytes,
        min_group_size=min_group_size,
        drop_zero_spread=drop_zero_spread,
    )


def turn(*output_ids: int) -> Turn:
    n = len(output_ids)
    return Turn(
        prompt_ids=(257, 1, 258),
        output_ids=output_ids,
        logprobs=tuple(-0.1 * i for i in range(n)),
        segments=(Segment(version=1, kv_version=0, start=0, end=n),),
        finish=Finish(FinishReason.STOP, matched="\n"),
    )
