"""Answers of the model, shown to people every few steps. Numbers alone do not tell when a reward is
won by nonsense.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest

import numpy as np

from midflight.observe.readable import number
from midflight.types import Batch, Group, Trajectory, Version, facts

MAX_LETTERS = 600
"""Letters shown of a prompt and of an answer: a whole answer can have a hundred thousand."""


class Completions:
    """Watches batches and steps, and shows rollouts of every `every`-th step. With 0 it tells
    none.
    """

    def __init__(
        self,
        tell: Callable[[facts.CompletionsShown], None],
        decode: Callable[[Sequence[int]], str],
        *,
        every: int,
        number: int,
    ) -> None:
        """`number` is the number of rollouts of a step that it shows. `decode` makes text of token
        ids.
        """
        self._tell = tell
        self._decode = decode
        self._every = every
        self._number = number
        self._batches: dict[Version, Batch] = {}
        """Batches by the version that the step on them makes. At most one is ahead of the step."""

    def apply(self, fact: facts.Fact) -> None:
        match fact:
            case facts.Leased(batch=batch):
                self._leased(batch)
            case facts.Stepped(version=version):
                self._stepped(version)
            case _:
                pass

    def _leased(self, batch: Batch) -> None:
        made = batch.train_version + 1
        if not self._every or made % self._every != 0:
            return
        oldest = batch.train_version - 1
        self._batches = {
            version: kept for version, kept in self._batches.items() if version >= oldest
        }
        self._batches[made] = batch

    def _stepped(self, version: Version) -> None:
        batch = self._batches.pop(version, None)
        if batch is None:
            return
        chosen = islice(_in_turn(batch), self._number)
        shown = tuple(shown_of(trajectory, self._decode) for trajectory in chosen)
        self._tell(facts.CompletionsShown(version, shown))


def shown_of(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> facts.Shown:
    """The longest row of a rollout, cut where the model began to write. A row of a role is taken
    only if the rollout's own client asked nothing.
    """
    row = max(trajectory.rows, key=lambda row: (not row.role, len(row.token_ids)))
    begin = int(np.argmax(row.generated))
    prompt = decode(row.token_ids[:begin].tolist())
    completion = decode(row.token_ids[begin:].tolist())
    return facts.Shown(
        trajectory.source, trajectory.task_id, trajectory.reward, cut(prompt), cut(completion)
    )


class LastRollout:
    """The last rollout that can be shown. It is decoded only when it is asked for."""

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
    for in_place in zip_longest(*[_with_rows(group) for group in batch.groups]):
        for trajectory in in_place:
            if trajectory is not None:
                yield trajectory


def _with_rows(group: Group) -> list[Trajectory]:
    return [trajectory for trajectory in group.trajectories if trajectory.rows]


def cut(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= MAX_LETTERS:
        return text
    half = MAX_LETTERS // 2
    return f"{text[:half]} [...] {text[-half:]}"


def in_words(completions: facts.CompletionsShown) -> str:
    """The text that a terminal shows."""
    lines = [f"version {completions.version} was trained on:"]
    for shown in completions.rollouts:
        lines.append(f"  {shown.source}, task {shown.task_id}, reward {number(shown.reward)}")
        lines.append(indented(shown.prompt, "    > "))
        lines.append(indented(shown.completion, "    < "))
    return "\n".join(lines)


def indented(text: str, mark: str) -> str:
    """The text with a mark before each line."""
    return "\n".join(mark + line for line in visible(text).splitlines() or [""])


def visible(text: str) -> str:
    """Returns the text as a terminal may print it. A model must not steer the terminal by its
    answers. Characters that cannot be printed become dots, tabs become blanks, and lines stay.
    """
    return "".join(map(_visible_sign, text))


def _visible_sign(sign: str) -> str:
    if sign.isprintable() or sign == "\n":
        return sign
    return " " if sign == "\t" else "·"


def in_a_line(sample: facts.Shown) -> str:
    """The line of a log: the end of the prompt and the beginning of the answer."""
    prompt = " ".join(visible(sample.prompt[-60:]).split())
    completion = " ".join(visible(sample.completion[:120]).split())
    return (
        f"{sample.source}, task {sample.task_id}, reward {number(sample.reward)}: {prompt} → "
        f"{completion}"
    )
