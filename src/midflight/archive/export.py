"""Chosen rollouts of a run as a data set: JSON lines that `datasets` loads, with conversations as
chat messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from midflight.archive.conversation import reader_of
from midflight.archive.messages import MessageReader, MessageSaid, as_chat
from midflight.archive.stored import StoreReading, reading
from midflight.errors import ConfigError
from midflight.trajectories.database import decode_rows, decode_scored
from midflight.types import GroupKey, Json, Kind, RolloutKey, Row, Task, Version


class ExportFormat(StrEnum):
    """`sft`: a conversation a line. `dpo`: a pair a line, the best and the worst answer to a task.
    `jsonl`: all that is known of a rollout, token by token.
    """

    SFT = "sft"
    DPO = "dpo"
    JSONL = "jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportChoice:
    """Which rollouts; without a choice all that have a reward."""

    kind: Kind = Kind.TRAINING
    """Of those that the run learns from. Those of held-out tasks are for reading and scoring: who
    trains on them has none held out any more.
    """
    min_reward: float | None = None
    versions: tuple[Version, Version] | None = None
    """The first and the last that a step on them made; then only those that were trained on."""
    sources: tuple[str, ...] = ()
    min_margin: float = 0.0
    """By which the better of a pair must be better."""


@dataclass(frozen=True, slots=True, eq=False)
class _Exported:
    """A rollout as it is exported."""

    key: RolloutKey
    task: Task
    reward: float
    version: Version | None
    rows: tuple[Row, ...]
    components: dict[str, float]
    messages: tuple[MessageSaid, ...]
    """Of its longest branch."""


def write_export(folder: Path, out: Path, form: ExportFormat, choice: ExportChoice) -> int:
    """Writes the file whole or not at all; says how many lines. `ConfigError` where nothing was
    chosen.
    """
    lines = 0
    building = out.with_name(f".{out.name}.new")
    try:
        with reading(folder, choice.kind) as store, building.open("wb") as file:
            for line in _lines(store, reader_of(folder), form, choice):
                file.write(msgspec.json.encode(line) + b"\n")
                lines += 1
        if not lines:
            raise ConfigError(
                f"exporting {folder}: none of its rollouts is chosen; ask for less (min reward, "
                "steps, sources)."
            )
        building.replace(out)
    finally:
        building.unlink(missing_ok=True)
    return lines


def _lines(
    store: StoreReading, reader: MessageReader, form: ExportFormat, choice: ExportChoice
) -> Iterator[dict[str, Any]]:
    kept = _kept(store, reader, choice)
    if form is ExportFormat.DPO:
        for _, group in groupby(kept, key=lambda one: one.key.group):
            of = list(group)
            for role in sorted({one.rows[0].role for one in of}):
                yield from _pair([one for one in of if one.rows[0].role == role], choice)
        return
    for one in kept:
        if choice.min_reward is None or one.reward >= choice.min_reward:
            rows = {"rows": list(map(_row, one.rows))} if form is ExportFormat.JSONL else {}
            yield {"messages": as_chat(one.messages), **_said(one), **rows}


def _kept(store: StoreReading, reader: MessageReader, choice: ExportChoice) -> Iterator[_Exported]:
    """In the order of the run's tasks, one group after the other. One at a time is in memory."""
    where = ["reward IS NOT NULL"]
    values = list[int]()
    if choice.versions is not None and choice.kind is Kind.EVALUATION:
        where.append("epoch BETWEEN ? AND ?")
        values += choice.versions
    elif choice.versions is not None:
        where.append("(version BETWEEN ? AND ? OR done AND train_version + 1 BETWEEN ? AND ?)")
        values += [*choice.versions, *choice.versions]
    for epoch, position, attempt, sample, task, reward, version, made, rows, scored in store.each(
        "SELECT epoch, position, attempt, sample, task, reward, version, train_version, rows, "
        "scored FROM groups JOIN rollouts USING (epoch, position, attempt) LEFT JOIN leases USING "
        f"(lease) WHERE {' AND '.join(where)} ORDER BY epoch, position, attempt, sample",
        *values,
    ):
        asked = store.task(task)
        decoded = store.decoded(decode_rows, rows)
        if choice.sources and asked.source not in choice.sources:
            continue
        key = RolloutKey(GroupKey(epoch, position, attempt), sample, choice.kind)
        version = epoch if choice.kind is Kind.EVALUATION else version
        of = store.decoded(decode_scored, scored)
        for role in sorted({row.role for row in decoded}):
            rows_of = tuple(row for row in decoded if row.role == role)
            longest = max(rows_of, key=lambda row: len(row.token_ids))
            said = reader.messages(
                longest.token_ids, longest.generated, reader.pieces(longest.token_ids)
            )
            earned, components = (
                (of.roles[role].reward or 0.0, {}) if role else (reward, dict(of.components))
            )
            yield _Exported(
                key, asked, earned, version if made is None else made + 1, rows_of, components, said
            )


def _said(one: _Exported) -> dict[str, Json]:
    return {
        "rollout": str(one.key),
        "task": one.task.id,
        "source": one.task.source,
        "reward": one.reward,
        **({"role": one.rows[0].role} if one.rows[0].role else {}),
        "components": dict[str, Json](one.components),
        "version": one.version,
    }


def _pair(group: Sequence[_Exported], choice: ExportChoice) -> Iterator[dict[str, Any]]:
    """The best and the worst, where they answer the same and one is better."""
    best = max(group, key=lambda one: one.reward)
    worst = min(group, key=lambda one: one.reward)
    margin = best.reward - worst.reward
    prompt, chosen = _answer(best)
    asked, rejected = _answer(worst)
    good = choice.min_reward is None or best.reward >= choice.min_reward
    if (
        good
        and margin > 0
        and margin >= choice.min_margin
        and prompt == asked
        and chosen != rejected
    ):
        said = {
            "task": best.task.id,
            "source": best.task.source,
            "chosen_reward": best.reward,
            "rejected_reward": worst.reward,
        }
        yield {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": rejected,
            **said,
            "version": best.version,
        }


def _answer(one: _Exported) -> tuple[list[dict[str, Json]], list[dict[str, Json]]]:
    """What was asked, and from the first message that the model wrote on."""
    first = next(
        (at for at, message in enumerate(one.messages) if message.written), len(one.messages)
    )
    chat = as_chat(one.messages)
    return chat[:first], chat[first:]


def _row(row: Row) -> dict[str, list[Any]]:
    names = ("token_ids", "generated", "loss_mask", "logprobs", "versions")
    return {name: getattr(row, name).tolist() for name in names}
