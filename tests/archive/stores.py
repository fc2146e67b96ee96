"""A run's folder with conversations made by hand, in the byte tokenizer's letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from midflight.text.byte_tokenizer import write_byte_tokenizer
from midflight.text.tokenizer import Tokenizer
from midflight.trajectories.store import Store
from midflight.types import Batch, Group, GroupKey, Reason, RolloutKey, Row, Task, Trajectory
from midflight.types.facts import Admitted, Checkpointed, Fact, GroupClosed, GroupFinished, Leased, Stepped, TrajectoryKept

SAYS = "<|user|>{asked}<|end|><|assistant|>"


class Recorded(Store):
    """`with` it, a run is recorded; afterwards its folder is what is looked at."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "store.sqlite", run="tests")
        write_byte_tokenizer(folder / "start")
        self.tokenizer = Tokenizer.load(folder / "start")
        self._order = 0

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def row(self, *parts: tuple[str, bool], version: int = 0, untrained: Sequence[int] = ()) -> Row:
        """Texts and whether the model wrote them; of the numbers `untrained` the tokens are context. The i-th token has log-probability -i / 10."""
        encoded = [self.tokenizer.encode(text) for text, _ in parts]
        ids = np.array([i for part in encoded for i in part], np.int32)
        wrote = np.array([wrote for part, (_, wrote) in zip(encoded, parts, strict=True) for _ in part])
        trains = np.array([w and at not in untrained for at, (part, (_, w)) in enumerate(zip(encoded, parts, strict=True)) for _ in part])
        turns = np.array([sum(w for _, w in parts[:at]) for at, part in enumerate(encoded) for _ in part], np.int32)
        versions = np.full(len(ids), version, np.int32)
        return Row(ids, wrote, trains, np.arange(len(ids), dtype=np.float32) / -10, versions, versions.copy(), turns=turns)

    def begin(self, index: int) -> Task:
        """A group is admitted, and none of its rollouts ends."""
        task = Task(f"task-{index}", "letters", {"question": f"question {index}"})
        self.apply(Admitted(GroupKey(0, index), task))
        return task

    def group(
        self,
        index: int,
        rewards: Sequence[float | None],
        *,
        said: str = "answer {sample}",
        source: str = "letters",
        epoch: int = 0,
        error: str | None = None,
        rows: Mapping[int, tuple[Row, ...]] | None = None,
    ) -> Group:
        """Whole, from its admission to its waiting. A reward of None is a failure."""
        key, asked = GroupKey(epoch, index), f"question {index}"
        task = Task(f"task-{index}", source, {"question": asked})
        self.apply(Admitted(key, task))
        kept: list[Trajectory] = []
        for sample, reward in enumerate(rewards):
            row = self.row((SAYS.format(asked=asked), False), (said.format(sample=sample) + "<|end|>", True))
            made = (rows or {}).get(sample, (row,))
            failed = error if reward is None else None
            kept.append(
                Trajectory(RolloutKey(key, sample), task.id, source, reward, made, error=failed, components={"right": reward or 0.0})
            )
            self.apply(TrajectoryKept(kept[-1], {}, {}))
        self._order += 1
        group = Group.of(key, task, kept)
        self.apply(GroupFinished(group, self._order))
        return group

    def train(self, *groups: Group, version: int, lasting: bool = True) -> None:
        """A step that makes `version`; without `lasting` no checkpoint has it."""
        facts: list[Fact] = [
            Leased(Batch(version, version - 1, groups), {}, {}, {}),
            Stepped(version, version, started=0.0, ended=1.0, num_tokens=0, metrics={}),
        ]
        for fact in [*facts, *([Checkpointed(version)] if lasting else [])]:
            self.apply(fact)

    def drop(self, group: Group, reason: Reason) -> None:
        self.apply(GroupClosed(group.key, reason, group.num_trainable))
