"""Chosen rollouts of a run as a data set: JSON lines that `datasets` loads, with conversations as
chat messages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from midflight.archive.conversation import reader_of
from midflight.archive.messages import MessageReader, RecordedMessage, as_chat
from midflight.archive.store_reader import StoreReader, reading
from midflight.errors import ConfigError, StoreCorrupt
from midflight.trajectories.database import decode_scored
from midflight.types import GroupKey, Json, Kind, RolloutKey, Row, Task, Version


class ExportFormat(StrEnum):
    """A line of the file holds one of these. `sft`: a conversation. `dpo`: a pair, the best and the worst
    answer to a task. `jsonl`: all that is known about a rollout, token by token.
    """

    SFT = "sft"
    DPO = "dpo"
    JSONL = "jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportChoice:
    """The rollouts to export. Without a choice these are all that have a reward."""

    kind: Kind = Kind.TRAINING
    """Rollouts that the run learns from, or those of held-out tasks. The latter are for reading and
    scoring: a task that is trained on is not held out any more.
    """
    min_reward: float | None = None
    versions: tuple[Version, Version] | None = None
    """The first and the last version that a step on them made. With it only rollouts that were
    trained on are exported.
    """
    sources: tuple[str, ...] = ()
    min_margin: float = 0.0
    """The least difference between the reward of the better of a pair and that of the other."""


@dataclass(frozen=True, slots=True, eq=False)
class _ExportedRollout:
    """A rollout as it is exported."""

    key: RolloutKey
    task: Task
    reward: float
    version: Version | None
    rows: tuple[Row, ...]
    components: dict[str, float]
    messages: tuple[RecordedMessage, ...]
    """The messages of its longest branch."""


class ExportedFile(NamedTuple):
    num_lines: int
    unread: tuple[str, ...]
    """A sentence on each rollout that was chosen and whose tokens cannot be read."""


def write_export(folder: Path, out: Path, form: ExportFormat, choice: ExportChoice) -> ExportedFile:
    """Writes the file whole or not at all. Rollouts whose tokens cannot be read are left out.
    Raises `ConfigError` if nothing was chosen.
    """
    lines = 0
    unread: list[str] = []
    building = out.with_name(f".{out.name}.new")
    try:
        with reading(folder, choice.kind) as store, building.open("wb") as file:
            for line in _lines(store, reader_of(folder), form, choice, unread):
                file.write(msgspec.json.encode(line) + b"\n")
                lines += 1
        if not lines and unread:
            raise StoreCorrupt(unread[0])
        if not lines:
            raise ConfigError(
                f"exporting {folder}: none of its rollouts is chosen; ask for less (min reward, "
                "steps, sources)."
            )
        building.replace(out)
    finally:
        building.unlink(missing_ok=True)
    return ExportedFile(lines, tuple(unread))


def _lines(
    store: StoreReader,
    reader: MessageReader,
    form: ExportFormat,
    choice: ExportChoice,
    unread: list[str],
) -> Iterator[dict[str, Any]]:
    kept = _kept(store, reader, choice, unread)
    if form is ExportFormat.DPO:
        for _, group in groupby(kept, key=lambda one: one.key.group):
            of = list(group)
            for role in sorted({one.rows[0].role for one in of}):
                yield from _pair([one for one in of if one.rows[0].role == role], choice)
        return
    for one in kept:
        if choice.min_reward is None or one.reward >= choice.min_reward:
            line: dict[str, Any] = {"messages": as_chat(one.messages)}
            line.update(_said(one))
            if form is ExportFormat.JSONL:
                line["rows"] = [_row(row) for row in one.rows]
            yield line


def _kept(
    store: StoreReader, reader: MessageReader, choice: ExportChoice, unread: list[str]
) -> Iterator[_ExportedRollout]:
    """The chosen rollouts in the order of the run's tasks, one group after the other. One at a time
    is in memory. `unread` gets a sentence on each that cannot be read.
    """
    where = ["reward IS NOT NULL"]
    values = list[int]()
    if choice.versions is not None and choice.kind is Kind.EVALUATION:
        where.append("epoch BETWEEN ? AND ?")
        values += choice.versions
    elif choice.versions is not None:
        where.append("(version BETWEEN ? AND ? OR done AND train_version + 1 BETWEEN ? AND ?)")
        values += choice.versions
        values += choice.versions
    for epoch, position, attempt, sample, task, reward, version, made, rows, scored in store.each(
        "SELECT epoch, position, attempt, sample, task, reward, version, train_version, rows, "
        "scored FROM groups JOIN rollouts USING (epoch, position, attempt) LEFT JOIN leases USING "
        f"(lease) WHERE {' AND '.join(where)} ORDER BY epoch, position, attempt, sample",
        *values,
    ):
        asked = store.task(task)
        if choice.sources and asked.source not in choice.sources:
            continue
        try:
            decoded = store.rows(rows)
        except StoreCorrupt as error:
            unread.append(str(error))
            continue
        key = RolloutKey(GroupKey(epoch, position, attempt), sample, choice.kind)
        if made is not None:
            version = made + 1
        elif choice.kind is Kind.EVALUATION:
            version = epoch
        of = store.decoded(decode_scored, scored)
        for role in sorted({row.role for row in decoded}):
            rows_of = tuple(row for row in decoded if row.role == role)
            longest = max(rows_of, key=lambda row: len(row.token_ids))
            pieces = reader.pieces(longest.token_ids)
            said = reader.messages(longest.token_ids, longest.generated, pieces)
            earned: float = reward
            components: dict[str, float] = dict(of.components)
            if role:
                earned = of.roles[role].reward or 0.0
                components = {}
            yield _ExportedRollout(key, asked, earned, version, rows_of, components, said)


def _said(one: _ExportedRollout) -> dict[str, Json]:
    said: dict[str, Json] = {
        "rollout": str(one.key),
        "task": one.task.id,
        "source": one.task.source,
        "reward": one.reward,
    }
    if one.rows[0].role:
        said["role"] = one.rows[0].role
    said["components"] = dict[str, Json](one.components)
    said["version"] = one.version
    return said


def _pair(group: Sequence[_ExportedRollout], choice: ExportChoice) -> Iterator[dict[str, Any]]:
    """The best and the worst answer of a group, if they answer the same and one is better."""
    best = max(group, key=lambda one: one.reward)
    worst = min(group, key=lambda one: one.reward)
    margin = best.reward - worst.reward
    if margin <= 0 or margin < choice.min_margin:
        return
    if choice.min_reward is not None and best.reward < choice.min_reward:
        return
    prompt, chosen = _answer(best)
    asked, rejected = _answer(worst)
    if prompt != asked or chosen == rejected:
        return
    yield {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "task": best.task.id,
        "source": best.task.source,
        "chosen_reward": best.reward,
        "rejected_reward": worst.reward,
        "version": best.version,
    }


def _answer(one: _ExportedRollout) -> tuple[list[dict[str, Json]], list[dict[str, Json]]]:
    """The messages of the prompt, and those from the first that the model wrote."""
    first = next(
        (at for at, message in enumerate(one.messages) if message.written), len(one.messages)
    )
    chat = as_chat(one.messages)
    return chat[:first], chat[first:]


def _row(row: Row) -> dict[str, list[Any]]:
    names = ("token_ids", "generated", "loss_mask", "logprobs", "versions")
    return {name: getattr(row, name).tolist() for name in names}
