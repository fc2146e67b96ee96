"""One rollout as a conversation and as training data: its messages, the branches of its token tree,
and all that is known about each token.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from midflight.archive.credit import Credit, credit_of
from midflight.archive.groups import GroupFilter, GroupView, RolloutBrief, page_of
from midflight.archive.messages import MessageReader, RecordedMessage, as_chat
from midflight.archive.store_reader import StoreReader, reading
from midflight.config import Config
from midflight.config.load import past_config
from midflight.errors import MidflightError, NoRun
from midflight.trajectories.database import (
    State,
    decode_scored,
    decode_turn,
    whole_turns,
)
from midflight.types import Bool, Fate, Float32, Int32, Json, Kind, Reason, RolloutKey, Row, Turn

ENTROPY_WINDOW = 16
"""Number of tokens over which -log p is averaged. Engines tell the probability of the sampled token
and not the entropy, and the mean of -log p is an estimate of that.
"""


class TokenUse(StrEnum):
    """A token was used in one of these ways. A token that the model wrote and that is not trained has a `Reason`
    in place of these.
    """

    READ = "read"
    """The model did not write it."""
    TRAINED = "trained"
    IN_STEP = "in a step"
    WAITING = "waiting"
    RUNNING = "running"
    HELD_OUT = "held out"
    """It belongs to an evaluation and is never trained on."""
    ELSEWHERE = "trained in another branch"
    """It is context here."""


@dataclass(frozen=True, slots=True, eq=False)
class BranchView:
    """One way through the token tree, from its root to a leaf. Arrays and lists have one entry for
    each token.
    """

    pieces: tuple[str, ...]
    row: Row
    uses: tuple[str, ...]
    """`TokenUse`, or the `Reason` for which the token is not trained."""
    ages: Int32
    """Versions between the one that sampled the token and the one that begins its step, or the
    newest one that there is. It is -1 if the token was read.
    """
    advantages: Float32
    """NaN if it is not known, or if the token is not to be trained."""
    entropies: Float32
    """An estimate, in nats: see `ENTROPY_WINDOW`. NaN if the token was read."""
    messages: tuple[RecordedMessage, ...]
    shared: int
    """Tokens at its beginning that an earlier branch has too."""


@dataclass(frozen=True, slots=True)
class ConversationView:
    """A rollout, with the group in which it was compared."""

    group: GroupView
    rollout: RolloutBrief | None
    """None while the rollout goes on."""
    key: RolloutKey
    branches: tuple[BranchView, ...]
    """It is empty if nothing of the rollout can be trained on: such tokens are not kept."""
    fields: Mapping[str, Json]
    turn_rewards: tuple[float, ...]
    credit: str
    """A remark on the advantages."""

    @property
    def longest(self) -> BranchView | None:
        return max(self.branches, key=lambda branch: len(branch.pieces), default=None)

    def chat(self) -> list[dict[str, Json]]:
        """The messages of the longest branch, as chat APIs take them."""
        return as_chat(self.longest.messages) if self.longest else []


def conversation_of(
    folder: Path, key: RolloutKey, *, with_advantages: bool = True
) -> ConversationView:
    """Raises `NoRun` if the run has no such rollout. Without advantages torch is not imported."""
    held_out = key.kind is Kind.EVALUATION
    page = page_of(folder, GroupFilter(kind=key.kind, key=key.group), number=1)
    if not page.groups:
        command = f"midflight samples {folder}{' --evaluation' if held_out else ''}"
        raise NoRun(f"{folder} has no rollout {key}; `{command}` names those that it has.")
    group = page.groups[0]
    config = config_of(folder)
    rollout = next((brief for brief in group.rollouts if brief.key == key), None)
    with reading(folder, key.kind) as store:
        rows, fields, turn_rewards = (
            _rows(store, key) if rollout else (_running(store, key), {}, ())
        )
        credit = Credit("")
        if with_advantages and not held_out:
            credit = credit_of(store, key.group, group.version, config)
        ((newest,),) = store.ask(
            "SELECT COALESCE(MAX(value), 0) FROM numbers WHERE name = 'version'"
        )
    if held_out:
        begun = key.group.epoch
    elif group.version is None:
        begun = newest
    else:
        begun = group.version - 1
    reader = reader_of(folder, config)
    branches = tuple(_branches(rows, group, rollout, credit, begun, reader, key))
    return ConversationView(group, rollout, key, branches, fields, turn_rewards, credit.note)


@lru_cache(maxsize=8)
def _reader(folder: Path, tools: str, reasoning: str) -> MessageReader:
    return MessageReader.of_run(folder, tools=tools, reasoning=reasoning)


def reader_of(folder: Path, config: Config | None = None) -> MessageReader:
    """A reader that reads the run's conversations as its gateway does."""
    gateway = (config or config_of(folder)).gateway
    return _reader(folder, gateway.tool_format, gateway.reasoning_format)


def config_of(folder: Path) -> Config:
    """The configuration of the run; the defaults if it cannot be read."""
    try:
        return past_config(folder / "config.toml")
    except MidflightError:
        return Config()


def _rows(
    store: StoreReader, key: RolloutKey
) -> tuple[tuple[Row, ...], Mapping[str, Json], tuple[float, ...]]:
    ((rows, blob),) = store.ask(
        "SELECT rows, scored FROM rollouts WHERE (epoch, position, attempt, sample) = (?, ?, ?, ?)",
        *_columns(key),
    )
    scored = store.decoded(decode_scored, blob)
    return store.rows(rows), scored.fields, scored.turn_rewards


def _columns(key: RolloutKey) -> tuple[int, int, int, int]:
    return key.group.epoch, key.group.index, key.group.attempt, key.sample


def _running(store: StoreReader, key: RolloutKey) -> tuple[Row, ...]:
    """Reads the rows of a rollout that goes on: its last turn, with the earlier ones that this turn
    continues.
    """
    blobs = store.ask(
        "SELECT number, turn FROM turns WHERE (epoch, position, attempt, sample) = (?, ?, ?, ?) ORDER "
        "BY number",
        *_columns(key),
    )
    stored = [(number, store.decoded(decode_turn, blob)) for number, blob in blobs]
    turns = store.decoded(whole_turns, stored)
    if not turns:
        return ()
    ids = _token_ids(turns[-1])
    number = len(ids)
    row = Row(
        token_ids=ids,
        generated=np.zeros(number, np.bool_),
        loss_mask=np.zeros(number, np.bool_),
        logprobs=np.zeros(number, np.float32),
        versions=np.zeros(number, np.int32),
        kv_versions=np.zeros(number, np.int32),
        turns=np.zeros(number, np.int32),
    )
    for at, turn in enumerate(turns):
        _write(row, turn, at)
    return (row,)


def _token_ids(turn: Turn) -> Int32:
    return np.array((*turn.prompt_ids, *turn.output_ids), np.int32)


def _write(row: Row, turn: Turn, number: int) -> None:
    """Marks the tokens of a turn in the row, if the row continues that turn."""
    begin = len(turn.prompt_ids)
    whole = _token_ids(turn)
    if row.turns is None or not np.array_equal(row.token_ids[: len(whole)], whole):
        return
    span = slice(begin, len(whole))
    row.generated[span] = True
    row.loss_mask[span] = True
    row.logprobs[span] = turn.logprobs
    row.turns[span] = number
    for segment in turn.segments:
        row.versions[begin + segment.start : begin + segment.end] = segment.version
        row.kv_versions[begin + segment.start : begin + segment.end] = segment.kv_version


# --- What is known of each token ------------------------------------------------------------------


def _branches(
    rows: Sequence[Row],
    group: GroupView,
    rollout: RolloutBrief | None,
    credit: Credit,
    begun: int,
    reader: MessageReader,
    key: RolloutKey,
) -> Iterator[BranchView]:
    floor = _floor(rows, _num_stale(rollout))
    outcome = _outcome(group, rollout)
    untrained = _why_masked(rollout)
    for at, row in enumerate(rows):
        pieces = reader.pieces(row.token_ids)
        shared = max((_common(row, other) for other in rows[:at]), default=0)
        elsewhere = _trained_elsewhere(row, rows)
        yield BranchView(
            pieces=pieces,
            row=row,
            uses=tuple(_uses(row, elsewhere, floor, outcome, untrained)),
            ages=np.where(row.generated, np.maximum(begun - row.versions, 0), -1).astype(np.int32),
            advantages=_advantages(row, credit, key),
            entropies=_entropies(row),
            messages=reader.messages(row.token_ids, row.generated, pieces),
            shared=shared,
        )


def _num_stale(rollout: RolloutBrief | None) -> int:
    if rollout is None:
        return 0
    return sum(number for (_, why), number in rollout.tokens.items() if why is Reason.STALE)


def _why_masked(rollout: RolloutBrief | None) -> str:
    """The reason for which tokens are masked, besides their age, if there is only one."""
    if rollout is None:
        return "masked"
    reasons = [
        why
        for fate, why in rollout.tokens
        if fate is Fate.MASKED and why is not None and why is not Reason.STALE
    ]
    return reasons[0].value if len(reasons) == 1 else "masked"


def _outcome(group: GroupView, rollout: RolloutBrief | None) -> str:
    """Names the use of those tokens that could be trained on, or the reason why there is none."""
    if rollout is None:
        return TokenUse.RUNNING
    if rollout.reward is None:
        return Reason.NO_REWARD
    match group.state:
        case State.TRAINED:
            return TokenUse.TRAINED
        case State.LEASED:
            return TokenUse.TRAINED if group.final else TokenUse.IN_STEP
        case State.DROPPED:
            return str(group.reason)
        case State.EVALUATED:
            return TokenUse.HELD_OUT
        case _:
            return TokenUse.WAITING


def _uses(row: Row, elsewhere: Bool, floor: int, outcome: str, untrained: str) -> Iterator[str]:
    columns = (
        row.generated.tolist(),
        row.loss_mask.tolist(),
        elsewhere.tolist(),
        row.versions.tolist(),
    )
    for generated, trainable, other, version in zip(*columns, strict=True):
        if not generated:
            yield TokenUse.READ
        elif trainable:
            yield Reason.STALE if version < floor else outcome
        else:
            yield TokenUse.ELSEWHERE if other else untrained


def _floor(rows: Sequence[Row], num_stale: int) -> int:
    """The version below which tokens were too old. `num_stale` tokens have a version below it."""
    if not num_stale:
        return -1
    versions = np.sort(np.concatenate([row.versions[row.loss_mask] for row in rows]))
    return int(versions[min(num_stale, len(versions)) - 1]) + 1


def _common(row: Row, other: Row) -> int:
    """Returns the number of tokens at the beginning that are the same."""
    number = min(len(row.token_ids), len(other.token_ids))
    differs = np.flatnonzero(row.token_ids[:number] != other.token_ids[:number])
    return int(differs[0]) if len(differs) else number


def _trained_elsewhere(row: Row, rows: Sequence[Row]) -> Bool:
    found = np.zeros(len(row.token_ids), np.bool_)
    for other in rows:
        if other is not row:
            number = _common(row, other)
            found[:number] |= other.loss_mask[:number]
    return found


def _advantages(row: Row, credit: Credit, key: RolloutKey) -> Float32:
    found = np.full(len(row.token_ids), np.nan, np.float32)
    answers = credit.answers.get((key, row.role))
    if answers is not None:
        turns = np.zeros(len(found), np.int32) if row.turns is None else row.turns
        found[row.loss_mask] = answers[np.minimum(turns, len(answers) - 1)][row.loss_mask]
    return found


def _entropies(row: Row) -> Float32:
    """The mean of -log p over the window around each token, over the tokens that the model
    wrote.
    """
    wrote = row.generated.astype(np.float64)
    sums = _windowed(-row.logprobs * wrote)
    counts = _windowed(wrote)
    return np.where(row.generated, sums / np.maximum(counts, 1), np.nan).astype(np.float32)


def _windowed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum over the window around each value."""
    if len(values) < ENTROPY_WINDOW:
        return np.full(len(values), values.sum())
    return np.convolve(values, np.ones(ENTROPY_WINDOW), "same")[: len(values)]


# --- To take along --------------------------------------------------------------------------------


def as_json(seen: ConversationView) -> dict[str, Json]:
    """All that is known about a rollout."""
    rollout = seen.rollout
    return {
        "rollout": str(seen.key),
        "task": seen.group.task.id,
        "source": seen.group.task.source,
        "reward": rollout.reward if rollout else None,
        "error": rollout.error if rollout else None,
        "components": dict(rollout.components) if rollout else {},
        "fate": seen.group.fate,
        "messages": list[Json](seen.chat()),
        "branches": [_tokens(branch) for branch in seen.branches],
    }


def _tokens(branch: BranchView) -> dict[str, Json]:
    row = branch.row
    versions: list[Json] = []
    logprobs: list[Json] = []
    advantages: list[Json] = []
    columns = (
        row.generated.tolist(),
        row.versions.tolist(),
        row.logprobs.tolist(),
        branch.advantages.tolist(),
    )
    for generated, version, logprob, advantage in zip(*columns, strict=True):
        versions.append(version if generated else None)
        logprobs.append(round(logprob, 5) if generated else None)
        advantages.append(None if math.isnan(advantage) else round(advantage, 5))
    return {
        "token_ids": row.token_ids.tolist(),
        "text": list(branch.pieces),
        "version": versions,
        "logprob": logprobs,
        "advantage": advantages,
        "use": list(branch.uses),
    }


def as_curl(seen: ConversationView, *, until: int | None = None) -> str:
    """A command that asks a server for the message before which the conversation is cut. Without
    `until` that is the last message that the model wrote.
    """
    branch = seen.longest
    if branch is None:
        return ""
    if until is None:
        written = _written(branch)
        until = written[-1] if written else len(branch.messages)
    body = msgspec.json.encode({"model": "midflight", "messages": seen.chat()[:until]}).decode()
    return (
        "curl -s http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d "
        f"{shlex.quote(body)}"
    )


def as_shell(seen: ConversationView, folder: Path) -> str:
    """Commands that serve the weights of the run, and ask again for each message that the model
    wrote.
    """
    model = folder / ("model" if (folder / "model").is_dir() else "start")
    commands = [
        f"midflight serve --model {shlex.quote(str(model))} --name midflight --port 8000 &",
        "until curl -sf http://127.0.0.1:8000/health > /dev/null; do sleep 1; done",
    ]
    if seen.longest is not None:
        commands += [as_curl(seen, until=at) for at in _written(seen.longest)]
    commands.append("kill $!")
    return "\n".join(commands)


def _written(branch: BranchView) -> list[int]:
    """The places of the messages that the model wrote."""
    return [at for at, said in enumerate(branch.messages) if said.written]
