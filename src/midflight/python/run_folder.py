"""A program's view of a run's folder, while the run goes on and afterwards: lines of the journal
and rollouts of the store.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from midflight.archive.journal import Tail
from midflight.archive.store_reader import files_of
from midflight.errors import ConfigError
from midflight.observe.lines import Line, decode_line
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.store import Store
from midflight.types import Json, Row, Task, Version
from midflight.types.rollouts import spans


class JournalLines:
    """Reads each line of a journal once. After a crash of a part the file is written anew; lines
    that were read before are not read again.
    """

    def __init__(self, path: Path, *, read: frozenset[int] = frozenset()) -> None:
        """`read` are hashes of lines that are left out."""
        self._tail = Tail(path)
        self.read = set(read)

    def new(self) -> list[Line]:
        unread = [line for line in self._tail.new()[1] if hash(line) not in self.read]
        self.read.update(map(hash, unread))
        return [decode_line(line) for line in unread]


@dataclass(frozen=True, slots=True)
class ConversationPassage:
    """A part of a conversation, as the model read it or wrote it, with the marks of its
    template.
    """

    generated: bool
    text: str


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One attempt at a task that has ended."""

    task: Task
    sample: int
    """Its number within its group, from 0."""
    reward: float | None
    """None if it could not be scored; `error` holds the reason."""
    components: Mapping[str, float]
    metrics: Mapping[str, float]
    fields: Mapping[str, Json]
    error: str | None
    truncated: bool
    seconds: float
    num_tokens: int
    """Tokens that the model wrote."""
    versions: tuple[Version, ...]
    """The versions that wrote them."""
    state: str
    """The state of its group: running, waiting, leased, trained or dropped."""
    trained_by: Version | None
    """The version that a step on it made, once a checkpoint holds that version."""
    conversations: tuple[tuple[ConversationPassage, ...], ...]
    """One conversation, or several if the agent's conversation branched. There is none if nothing
    can be trained on.
    """

    @property
    def conversation(self) -> tuple[ConversationPassage, ...]:
        """The longest conversation."""
        return max(self.conversations, key=len, default=())


def rollouts_of(folder: Path) -> Iterator[RolloutRecord]:
    """The rollouts of the run in a folder, in the order of its gateways and then of its tasks. It
    only reads, also while the run goes on.
    """
    files = files_of(folder)
    if not files[0].exists():
        raise ConfigError(f"{folder} has no rollouts yet; train first.")
    tokenizer = Tokenizer.load(folder / "start")
    for one in files:
        yield from _seen(one, tokenizer)


def _seen(path: Path, tokenizer: Tokenizer) -> Iterator[RolloutRecord]:
    with closing(Store(path, run=None)) as store:
        for rollout, task, state, version in store.ended():
            versions: set[int] = set()
            for row in rollout.rows:
                versions.update(int(v) for v in np.unique(row.versions[row.generated]))
            yield RolloutRecord(
                task=task,
                sample=rollout.key.sample,
                reward=rollout.reward,
                components=rollout.components,
                metrics=rollout.metrics,
                fields=rollout.fields,
                error=rollout.error,
                truncated=rollout.truncated,
                seconds=rollout.seconds,
                num_tokens=sum(int(row.generated.sum()) for row in rollout.rows),
                versions=tuple(sorted(versions)),
                state=state.value,
                trained_by=version,
                conversations=tuple(_passages(row, tokenizer) for row in rollout.rows),
            )


def _passages(row: Row, tokenizer: Tokenizer) -> tuple[ConversationPassage, ...]:
    """The row cut where the model begins and ends to write."""
    return tuple(
        ConversationPassage(wrote, tokenizer.decode(row.token_ids[begin:end].tolist()))
        for begin, end, wrote in spans(row.generated)
    )
