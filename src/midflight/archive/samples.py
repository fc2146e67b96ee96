"""Conversations and the ledger of a run as text, for terminals."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from midflight.archive.conversation import ConversationView
from midflight.archive.groups import GroupFilter, conditions
from midflight.archive.ledger import Ledger
from midflight.archive.messages import RecordedMessage
from midflight.archive.store_reader import reading
from midflight.errors import NoRun
from midflight.observe.completions import cut, indented
from midflight.observe.readable import number as as_text
from midflight.types import GroupKey, Kind, RolloutKey, Version

_MARKS = {"system": "#", "user": ">", "assistant": "<", "tool": "="}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChoice:
    """The rollouts to show. Without a choice these are the newest."""

    number: int
    kind: Kind = Kind.TRAINING
    """Rollouts that the run learns from, or those of held-out tasks."""
    versions: tuple[Version, Version] | None = None
    """The first and the last version that the steps on them made."""
    source: str = ""
    best: bool = False
    worst: bool = False
    failed: bool = False


def chosen(folder: Path, choice: SampleChoice) -> list[RolloutKey]:
    """The keys of the rollouts that are shown. Raises `NoRun` if there is none."""
    groups = GroupFilter(kind=choice.kind, versions=choice.versions, source=choice.source)
    where, values = conditions(groups)
    by_reward = choice.best or choice.worst
    if choice.failed:
        reward = "reward IS NULL"
    elif by_reward:
        reward = "reward IS NOT NULL"
    else:
        reward = "1"
    order = "epoch DESC, position DESC, attempt DESC, sample"
    if by_reward:
        order = f"{'reward DESC' if choice.best else 'reward'}, {order}"
    with reading(folder, choice.kind) as store:
        found = store.ask(
            "SELECT epoch, position, attempt, sample FROM rollouts JOIN groups g USING (epoch, "
            f"position, attempt) WHERE {where} AND {reward} ORDER BY {order} LIMIT ?",
            *values,
            choice.number,
        )
    if not found:
        raise NoRun(f"{folder} has no such rollout that has ended; ask for others, or wait.")
    return [RolloutKey(GroupKey(*key), sample, choice.kind) for *key, sample in found]


def in_words(seen: ConversationView, *, whole: bool = False) -> str:
    """Returns the messages of a rollout in order. `>` marks text that the model read, `<` text that
    it wrote. Long messages are cut unless `whole`.
    """
    lines = _head(seen)
    for at, branch in enumerate(seen.branches):
        if at:
            lines.append(f"  branch {at + 1}, from token {branch.shared} on:")
        lines += [_message(said, whole) for said in branch.messages if said.end > branch.shared]
        uses = Counter(map(str, branch.uses))
        lines.append("  tokens: " + ", ".join(f"{number} {use}" for use, number in uses.items()))
    if not seen.branches:
        lines.append("  nothing of it can be trained on, so its tokens are not kept")
    return "\n".join(lines)


def _head(seen: ConversationView) -> list[str]:
    task = seen.group.task
    rollout = seen.rollout
    head = f"{seen.key}: {task.source}, task {task.id}"
    if rollout is None:
        return [f"{head}, not ended"]
    reward = as_text(rollout.reward)
    if rollout.components:
        parts = [f"{name} {as_text(value)}" for name, value in rollout.components.items()]
        reward += f" ({', '.join(parts)})"
    lines = [f"{head}, reward {reward}; {seen.group.fate}"]
    if rollout.reward is None:
        lines.append(f"  failed: {rollout.error or 'without an error'}")
    return lines


def _message(said: RecordedMessage, whole: bool) -> str:
    mark = f"  {_MARKS.get(said.role, '?')} "
    show = str if whole else cut
    parts: list[str] = []
    if said.reasoning:
        parts.append(indented(f"(thinks) {show(said.reasoning)}", mark))
    if said.content or not (said.calls or parts):
        parts.append(indented(show(said.content), mark))
    for call in said.calls:
        parts.append(indented(f"calls {call.name} {show(call.arguments)}", mark))
    return "\n".join(parts)


def ledger_table(ledger: Ledger) -> Table:
    """A line for each place where tokens are, with a column for each source and the meaning of the
    place.
    """
    sources = [line.source for line in ledger.sources]
    blank = [""] * len(sources)
    table = Table("tokens", *sources, "all", "", box=None)
    for row in ledger.token_rows():
        table.add_row(*row)
    table.add_row("groups")
    for name, number in ledger.groups().items():
        table.add_row(name, *blank, f"{number:,}", "")
    return table
