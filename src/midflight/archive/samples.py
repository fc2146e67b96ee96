"""Conversations and the ledger of a run as text, for terminals."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from midflight.archive.conversation import ConversationSeen
from midflight.archive.groups import GroupFilter, conditions
from midflight.archive.ledger import MEANINGS, Ledger
from midflight.archive.messages import MessageSaid
from midflight.archive.stored import reading
from midflight.errors import NoRun
from midflight.observe.completions import cut, indented
from midflight.observe.readable import number as as_text
from midflight.types import Fate, GroupKey, Kind, RolloutKey, Version

_MARKS = {"system": "#", "user": ">", "assistant": "<", "tool": "="}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChoice:
    """Which rollouts are shown; without a choice the newest."""

    number: int
    kind: Kind = Kind.TRAINING
    """Of those that the run learns from, or of held-out tasks."""
    versions: tuple[Version, Version] | None = None
    """Of groups that steps trained on, by the first and the last version that these made."""
    source: str = ""
    best: bool = False
    worst: bool = False
    failed: bool = False


def chosen(folder: Path, choice: SampleChoice) -> list[RolloutKey]:
    """`NoRun` where there is none."""
    where, values = conditions(
        GroupFilter(kind=choice.kind, versions=choice.versions, source=choice.source)
    )
    scored = choice.best or choice.worst
    reward = "reward IS NULL" if choice.failed else "reward IS NOT NULL" if scored else "1"
    by = ["reward DESC" if choice.best else "reward"] if scored else []
    order = ", ".join([*by, "epoch DESC", "position DESC", "attempt DESC", "sample"])
    with reading(folder, choice.kind) as store:
        found = store.ask(
            "SELECT epoch, position, attempt, sample FROM rollouts JOIN groups g USING (epoch, "
            f"position, attempt) WHERE {where} AND {reward} ORDER BY {order} LIMIT ?",
            *(*values, choice.number),
        )
    if not found:
        raise NoRun(f"{folder} has no such rollout that has ended; ask for others, or wait.")
    return [RolloutKey(GroupKey(*key), sample, choice.kind) for *key, sample in found]


def in_words(seen: ConversationSeen, *, whole: bool = False) -> str:
    """Messages in order, `>` what was said to the model, `<` what it said; long ones are cut unless
    `whole`.
    """
    task = seen.group.task
    rollout = seen.rollout
    head = f"{seen.key}: {task.source}, task {task.id}"
    if rollout is None:
        lines = [f"{head}, not ended"]
    else:
        made_of = ", ".join(
            f"{name} {as_text(value)}" for name, value in rollout.components.items()
        )
        lines = [
            (
                f"{head}, reward {as_text(rollout.reward)}{f' ({made_of})' if made_of else ''}; "
                f"{seen.group.fate}"
            )
        ]
        lines += [f"  failed: {rollout.error or 'without an error'}"] * (rollout.reward is None)
    for at, branch in enumerate(seen.branches):
        if at:
            lines.append(f"  branch {at + 1}, from token {branch.shared} on:")
        lines += [_message(said, whole) for said in branch.messages if said.end > branch.shared]
        uses = Counter(map(str, branch.uses))
        lines.append("  tokens: " + ", ".join(f"{number} {use}" for use, number in uses.items()))
    return "\n".join(
        [
            *lines,
            *(
                []
                if seen.branches
                else ["  nothing of it can be trained on, so its tokens are not kept"]
            ),
        ]
    )


def _message(said: MessageSaid, whole: bool) -> str:
    mark = f"  {_MARKS.get(said.role, '?')} "
    show = str if whole else cut
    parts = [indented(f"(thinks) {show(said.reasoning)}", mark)] if said.reasoning else []
    parts += (
        [indented(show(said.content), mark)] if said.content or not (said.calls or parts) else []
    )
    return "\n".join(
        [
            *parts,
            *(indented(f"calls {call.name} {show(call.arguments)}", mark) for call in said.calls),
        ]
    )


def ledger_table(ledger: Ledger) -> Table:
    """A line for each place where tokens are, a column for each source, and what the place
    means.
    """
    table = Table("tokens", *(line.source for line in ledger.sources), "all", "", box=None)
    places = sorted(
        {place for line in ledger.sources for place in line.tokens},
        key=lambda place: (list(Fate).index(place[0]), place[1] or ""),
    )
    received = [line.received for line in ledger.sources]
    table.add_row(
        "generated", *(f"{n:,}" for n in (*received, sum(received))), "by rollouts that have ended"
    )
    for fate, reason in places:
        numbers = [line.tokens.get((fate, reason), 0) for line in ledger.sources]
        name = f"  {fate}" + (f": {reason}" if reason else "")
        table.add_row(
            name, *(f"{n:,}" for n in (*numbers, sum(numbers))), MEANINGS[reason] if reason else ""
        )
    table.add_row(
        "in flight",
        *[""] * len(received),
        f"{ledger.in_flight:,}",
        "completed turns of rollouts that go on",
    )
    accounts = ledger.accounts
    groups = {
        "trained": accounts.trained,
        "waiting": accounts.waiting,
        "leased": accounts.leased,
        "running": accounts.running,
    }
    table.add_row("groups", *[""] * len(received), f"{accounts.submitted:,}", "")
    for name, number in {
        **groups,
        **{f"dropped: {reason}": n for reason, n in accounts.dropped.items()},
    }.items():
        table.add_row(f"  {name}", *[""] * len(received), f"{number:,}", "")
    return table
