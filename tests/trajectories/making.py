"""Trajectories made by hand for the tests of this station."""

from __future__ import annotations

import numpy as np

from midflight.types import Finish, FinishReason, Group, GroupKey, OlderKeys, RolloutKey, Row, Segment, Task, Trajectory, Turn


def row(ids: tuple[int, ...], mask: tuple[bool, ...], version: int = 0) -> Row:
    labels = np.full(len(ids), version, dtype=np.int32)
    logprobs = np.array([-0.5 * i for i in range(len(ids))], dtype=np.float32)
    return Row(np.array(ids, dtype=np.int32), np.array(mask), np.array(mask), logprobs, labels, labels.copy())


def key(index: int, attempt: int = 0) -> GroupKey:
    return GroupKey(0, index, attempt)


def task(index: int) -> Task:
    return Task(f"task-{index}", "letters", {"question": "abc", "tags": [1, None, {"x": 0.5}]})


def trajectory(group_key: GroupKey, sample: int, *, reward: float | None = 1.0, num_tokens: int = 2, version: int = 0) -> Trajectory:
    """One row: a prompt of one token, then `num_tokens` trainable ones."""
    made = row(tuple(range(num_tokens + 1)), (False, *[True] * num_tokens), version)
    return Trajectory(RolloutKey(group_key, sample), f"task-{group_key.index}", "letters", reward, (made,))


def group(group_key: GroupKey, *, size: int = 2, version: int = 0) -> Group:
    made = tuple(trajectory(group_key, i, reward=float(i), version=version) for i in range(size))
    return Group(group_key, f"task-{group_key.index}", "letters", made)


def turn(*output_ids: int) -> Turn:
    n = len(output_ids)
    return Turn(
        prompt_ids=(257, 1, 258),
        output_ids=output_ids,
        logprobs=tuple(-0.1 * i for i in range(n)),
        segments=(Segment(version=1, kv_version=0, start=0, end=n),),
        finish=Finish(FinishReason.STOP, matched="\n"),
        older_keys=(OlderKeys(0, ((0, 2), (1, 1))),),
    )
