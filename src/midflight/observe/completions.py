"""What the model writes, shown to people every few steps: numbers alone don't tell when a reward is
won by nonsense.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, zip_longest

import numpy as np

from midflight.observe.status import number
from midflight.types import Batch, Trajectory, Version, facts

MAX_LETTERS = 600
"""Of a prompt, and of what was written: whole answers can have a hundred thousand."""


class Completions:
    """Watches batches and steps, and tells rollouts of every `every`-th step; with 0 of none."""

    def __init__(
        self,
        tell: Callable[[facts.CompletionsShown], None],
        decode: Callable[[Sequence[int]], str],
        *,
        every: int,
        number: int,
    ) -> None:
        """`number` of rollouts are told. `decode` makes token ids text."""
        self._tell = tell
        self._decode = decode
        self._every = every
        self._number = number
        self._batches: dict[Version, Batch] = {}
        """By the version that the step on it makes; at most one is ahead of the step."""

    def apply(self, fact: facts.Fact) -> None:
        match fact:
            case facts.Leased(batch=batch) if (
                self._every and (batch.train_version + 1) % self._every == 0
            ):
                self._batches = {
                    version: kept
                    for version, kept in self._batches.items()
                    if version > batch.train_version - 2
                }
                self._batches[batch.train_version + 1] = batch
            case facts.Stepped(version=version) if (
                batch := self._batches.pop(version, None)
            ) is not None:
                self._tell(
                    facts.CompletionsShown(
                        version, tuple(map(self._shown, islice(_in_turn(batch), self._number)))
                    )
                )
            case _:
                pass

    def _shown(self, trajectory: Trajectory) -> facts.Shown:
        return shown_of(trajectory, self._decode)


def shown_of(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> facts.Shown:
    """Its longest row, cut where the model began to write; of a role where its own client asked
    nothing.
    """
    row = max(trajectory.rows, key=lambda row: (not row.role, len(row.token_ids)))
    begin = int(np.argmax(row.generated))
    prompt, completion = (
        decode(ids.tolist()) for ids in (row.token_ids[:begin], row.token_ids[begin:])
    )
    return facts.Shown(
        trajectory.source, trajectory.task_id, trajectory.reward, cut(prompt), cut(completion)
    )


class LastRollout:
    """The last rollout that can be shown. Only asked for it is made text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._last: Trajectory | None = None
        self._shown: facts.Shown | None = None

    def apply(self, fact: facts.Fact) -> None:
        if isinstance(fact, facts.TrajectoryKept) and fact.trajectory.rows:
            self._last = fact.trajectory
            self._shown = None

    def now(self) -> facts.Shown | None:
        if self._shown is None and self._last is not None:
            self._shown = shown_of(self._last, self._decode)
        return self._shown


def _in_turn(batch: Batch) -> Iterator[Trajectory]:
    """The first of each group, then the second of each."""
    with_rows = (
        [trajectory for trajectory in group.trajectories if trajectory.rows]
        for group in batch.groups
    )
    return (
        trajectory
        for trajectory in chain.from_iterable(zip_longest(*with_rows))
        if trajectory is not None
    )


def cut(text: str) -> str:
    """In the middle, where it is long."""
    half = MAX_LETTERS // 2
    return text if len(text) <= MAX_LETTERS else f"{text[:half]} [...] {text[-half:]}"


def in_words(completions: facts.CompletionsShown) -> str:
    """For a terminal."""
    lines = [f"version {completions.version} was trained on:"]
    for shown in completions.rollouts:
        lines += [
            f"  {shown.source}, task {shown.task_id}, reward {number(shown.reward)}",
            indented(shown.prompt, "    > "),
        ]
        lines += [indented(shown.completion, "    < ")]
    return "\n".join(lines)


def indented(text: str, mark: str) -> str:
    """Each line behind a mark."""
    return "\n".join(mark + line for line in visible(text).splitlines() or [""])


def visible(text: str) -> str:
    """For a terminal, which what a model writes must not steer: signs that cannot be printed are
    dots. Lines stay.
    """
    return "".join(
        sign if sign.isprintable() or sign == "\n" else " " if sign == "\t" else "·"
        for sign in text
    )


def in_a_line(sample: facts.Shown) -> str:
    """For a log: the end of the prompt, and how the answer begins."""
    prompt, completion = (
        " ".join(visible(text).split()) for text in (sample.prompt[-60:], sample.completion[:120])
    )
    return (
        f"{sample.source}, task {sample.task_id}, reward {number(sample.reward)}: {prompt} → "
        f"{completion}"
    )
