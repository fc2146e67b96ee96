"""Rollouts of a run as a program looks at them: what was said, and what it was worth."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from midflight.errors import ConfigError
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.store import Store
from midflight.types import Row, Task, Version


@dataclass(frozen=True, slots=True)
class Said:
    """A stretch of a conversation, as the model read it or wrote it, with the marks of its template."""

    generated: bool
    text: str


@dataclass(frozen=True, slots=True)
class RolloutSeen:
    """One attempt at a task that has ended."""

    task: Task
    sample: int
    """Which of its group, from 0."""
    reward: float | None
    """None where it could not be scored; `error` says why."""
    components: Mapping[str, float]
    metrics: Mapping[str, float]
    error: str | None
    truncated: bool
    seconds: float
    num_tokens: int
    """That the model wrote."""
    versions: tuple[Version, ...]
    """That wrote them."""
    state: str
    """Of its group: running, waiting, leased, trained or dropped."""
    trained_by: Version | None
    """The version that the step on it made, once a checkpoint has that."""
    conversations: tuple[tuple[Said, ...], ...]
    """One; several where the agent's conversation branched; none where nothing of it can be trained on."""

    @property
    def conversation(self) -> tuple[Said, ...]:
        """The longest."""
        return max(self.conversations, key=len, default=())


def rollouts_of(folder: Path) -> Iterator[RolloutSeen]:
    """Those of the run in a folder, in the order of its tasks. Reads only, also while the run goes on."""
    path = folder / "store.sqlite"
    if not path.exists():
        raise ConfigError(f"{folder} has no rollouts yet; train first.")
    tokenizer = Tokenizer.load(folder / "start")
    with closing(Store(path, run=None)) as store:
        for of, task, state, version in store.ended():
            versions = {int(v) for row in of.rows for v in np.unique(row.versions[row.generated])}
            yield RolloutSeen(
                task=task,
                sample=of.key.sample,
                reward=of.reward,
                components=getattr(of, "components", {}),
                metrics=getattr(of, "metrics", {}),
                error=of.error,
                truncated=of.truncated,
                seconds=of.seconds,
                num_tokens=sum(int(row.generated.sum()) for row in of.rows),
                versions=tuple(sorted(versions)),
                state=state.value,
                trained_by=version,
                conversations=tuple(_said(row, tokenizer) for row in of.rows),
            )


def _said(row: Row, tokenizer: Tokenizer) -> tuple[Said, ...]:
    """The row cut where the model begins and ends to write."""
    edges = [0, *(np.flatnonzero(np.diff(row.generated)) + 1).tolist(), len(row.token_ids)]
    spans = [(begin, end) for begin, end in itertools.pairwise(edges) if begin < end]
    return tuple(Said(bool(row.generated[begin]), tokenizer.decode(row.token_ids[begin:end].tolist())) for begin, end in spans)
