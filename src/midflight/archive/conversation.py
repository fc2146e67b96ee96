"""One rollout as it was said and as it is trained: its messages, the branches of its token tree,
and all that is known of each token.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from midflight.archive.credit import Credit, credit_of
from midflight.archive.groups import GroupFilter, GroupSeen, RolloutBrief, page_of
from midflight.archive.messages import MessageReader, MessageSaid, as_chat
from midflight.archive.stored import StoreReading, reading
from midflight.config import Config, load_config
from midflight.errors import MidflightError, NoRun
from midflight.trajectories.database import State, decode_rows, decode_scored, decode_turn
from midflight.types import Bool, Fate, Float32, Int32, Json, Kind, Reason, RolloutKey, Row, Turn

ENTROPY_WINDOW = 16
"""Tokens over which -log p is averaged. Engines say the probability of what was sampled and not the
entropy; its mean is an estimate of that.
"""


class TokenUse(StrEnum):
    """What became of a token. Those of `Reason` are for tokens that the model wrote and that are
    not trained.
    """

    READ = "read"
    """The model did not write it."""
    TRAINED = "trained"
    IN_STEP = "in a step"
    WAITING = "waiting"
    RUNNING = "running"
    HELD_OUT = "held out"
    """Of an evaluation: never trained on."""
    ELSEWHERE = "trained in another branch"
    """It is context here."""


@dataclass(frozen=True, slots=True, eq=False)
class BranchSeen:
    """One way through the token tree, from its root to a leaf. Arrays and lists have one entry for
    each token.
    """

    pieces: tuple[str, ...]
    row: Row
    uses: tuple[str, ...]
    """`TokenUse`, or the `Reason` for which the token is not trained."""
    ages: Int32
    """Versions between the one that sampled the token and the one that begins its step, or the
    newest there is; -1 where it was read.
    """
    advantages: Float32
    """NaN where it is not known, or the token is not to be trained."""
    entropies: Float32
    """An estimate, in nats: see `ENTROPY_WINDOW`. NaN where the token was read."""
    messages: tuple[MessageSaid, ...]
    shared: int
    """Tokens at its beginning that an earlier branch has too."""


@dataclass(frozen=True, slots=True)
class ConversationSeen:
    """A rollout, with the group that it was compared in."""

    group: GroupSeen
    rollout: RolloutBrief | None
    """None where it goes on."""
    key: RolloutKey
    branches: tuple[BranchSeen, ...]
    """None where nothing of it can be trained on: such tokens are not kept."""
    fields: Mapping[str, Json]
    turn_rewards: tuple[float, ...]
    credit: str
    """What is to be said of the advantages."""

    @property
    def longest(self) -> BranchSeen | None:
        return max(self.branches, key=lambda branch: len(branch.pieces), default=None)

    def chat(self) -> list[dict[str, Json]]:
        """Of the longest branch, as chat APIs take it."""
        return as_chat(self.longest.messages) if self.longest else []


def conversation_of(
    folder: Path, key: RolloutKey, *, with_advantages: bool = True
) -> ConversationSeen:
    """`NoRun` where the run has no such rollout. Without advantages torch is not imported."""
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
        credit = (
            credit_of(store, key.group, group.version, config)
            if with_advantages and not held_out
            else Credit("")
        )
        newest = store.ask("SELECT COALESCE(MAX(value), 0) FROM numbers WHERE name = 'version'")[0][
            0
        ]
    begun = key.group.epoch if held_out else newest if group.version is None else group.version - 1
    branches = tuple(_branches(rows, group, rollout, credit, begun, reader_of(folder, config), key))
    return ConversationSeen(group, rollout, key, branches, fields, turn_rewards, credit.note)


@lru_cache(maxsize=8)
def _reader(folder: Path, tools: str, reasoning: str) -> MessageReader:
    return MessageReader.of_run(folder, tools=tools, reasoning=reasoning)


def reader_of(folder: Path, config: Config | None = None) -> MessageReader:
    """That reads the run's conversations as its gateway does."""
    gateway = (config or config_of(folder)).gateway
    return _reader(folder, gateway.tool_format, gateway.reasoning_format)


def config_of(folder: Path) -> Config:
    """The run's own; the defaults where it cannot be read."""
    try:
        return load_config(folder / "config.toml")
    except MidflightError:
        return Config()


def _rows(
    store: StoreReading, key: RolloutKey
) -> tuple[tuple[Row, ...], Mapping[str, Json], tuple[float, ...]]:
    ((rows, blob),) = store.ask(
        "SELECT rows, scored FROM rollouts WHERE (epoch, position, attempt, sample) = (?, ?, ?, ?)",
        *_columns(key),
    )
    scored = store.decoded(decode_scored, blob)
    return store.decoded(decode_rows, rows), scored.fields, scored.turn_rewards


def _columns(key: RolloutKey) -> tuple[int, int, int, int]:
    return key.group.epoch, key.group.index, key.group.attempt, key.sample


def _running(store: StoreReading, key: RolloutKey) -> tuple[Row, ...]:
    """What a rollout that goes on has said so far: its last turn, with the earlier ones that it
    goes on from.
    """
    blobs = store.ask(
        (
            "SELECT turn FROM turns WHERE (epoch, position, attempt, sample) = (?, ?, ?, ?) ORDER "
            "BY number"
        ),
        *_columns(key),
    )
    turns = [store.decoded(decode_turn, blob) for (blob,) in blobs]
    if not turns:
        return ()
    ids = np.array((*turns[-1].prompt_ids, *turns[-1].output_ids), np.int32)
    number = len(ids)
    row = Row(
        *(
            ids,
            np.zeros(number, np.bool_),
            np.zeros(number, np.bool_),
            np.zeros(number, np.float32),
        ),
        *(np.zeros(number, np.int32), np.zeros(number, np.int32), np.zeros(number, np.int32)),
    )
    for at, turn in enumerate(turns):
        _write(row, turn, at)
    return (row,)


def _write(row: Row, turn: Turn, number: int) -> None:
    begin = len(turn.prompt_ids)
    whole = np.array((*turn.prompt_ids, *turn.output_ids), np.int32)
    if row.turns is None or not np.array_equal(row.token_ids[: len(whole)], whole):
        return
    span = slice(begin, len(whole))
    row.generated[span] = row.loss_mask[span] = True
    row.logprobs[span] = turn.logprobs
    row.turns[span] = number
    for segment in turn.segments:
        row.versions[begin + segment.start : begin + segment.end] = segment.version
        row.kv_versions[begin + segment.start : begin + segment.end] = segment.kv_version


# --- What is known of each token ------------------------------------------------------------------


def _branches(
    rows: Sequence[Row],
    group: GroupSeen,
    rollout: RolloutBrief | None,
    credit: Credit,
    begun: int,
    reader: MessageReader,
    key: RolloutKey,
) -> Iterator[BranchSeen]:
    floor = _floor(
        rows,
        0
        if rollout is None
        else sum(n for (_, why), n in rollout.tokens.items() if why is Reason.STALE),
    )
    outcome = _outcome(group, rollout)
    masked = [
        why
        for (fate, why) in (rollout.tokens if rollout else ())
        if fate is Fate.MASKED and why not in (None, Reason.STALE)
    ]
    for at, row in enumerate(rows):
        pieces = reader.pieces(row.token_ids)
        untrained = masked[0].value if len(masked) == 1 and masked[0] else "masked"
        shared = max((_common(row, other) for other in rows[:at]), default=0)
        elsewhere = _trained_elsewhere(row, rows)
        yield BranchSeen(
            pieces=pieces,
            row=row,
            uses=tuple(_uses(row, elsewhere, floor, outcome, untrained)),
            ages=np.where(row.generated, np.maximum(begun - row.versions, 0), -1).astype(np.int32),
            advantages=_advantages(row, credit, key),
            entropies=_entropies(row),
            messages=reader.messages(row.token_ids, row.generated, pieces),
            shared=shared,
        )


def _outcome(group: GroupSeen, rollout: RolloutBrief | None) -> str:
    """Of the tokens that could be trained on."""
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
    """The version below which tokens were too old: that many have one below it."""
    if not num_stale:
        return -1
    versions = np.sort(np.concatenate([row.versions[row.loss_mask] for row in rows]))
    return int(versions[min(num_stale, len(versions)) - 1]) + 1


def _common(row: Row, other: Row) -> int:
    """Tokens at the beginning that are the same."""
    number = min(len(row.token_ids), len(other.token_ids))
    differs = np.flatnonzero(row.token_ids[:number] != other.token_ids[:number])
    return int(differs[0]) if len(differs) else number


def _trained_elsewhere(row: Row, rows: Sequence[Row]) -> Bool:
    found = np.zeros(len(row.token_ids), np.bool_)
    for other in rows:
        if other is not row and (number := _common(row, other)):
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
    """Mean of -log p over the window around each token, of tokens that the model wrote."""
    wrote = row.generated.astype(np.float64)
    window = np.ones(ENTROPY_WINDOW)
    sums, counts = (
        np.convolve(values, window, "same")[: len(wrote)]
        if len(wrote) >= ENTROPY_WINDOW
        else np.full(len(wrote), values.sum())
        for values in (-row.logprobs * wrote, wrote)
    )
    return np.where(row.generated, sums / np.maximum(counts, 1), np.nan).astype(np.float32)


# --- To take along --------------------------------------------------------------------------------


def as_json(seen: ConversationSeen) -> dict[str, Json]:
    """All that is known of it."""
    return {
        "rollout": str(seen.key),
        "task": seen.group.task.id,
        "source": seen.group.task.source,
        "reward": seen.rollout.reward if seen.rollout else None,
        "error": seen.rollout.error if seen.rollout else None,
        "components": dict(seen.rollout.components) if seen.rollout else {},
        "fate": seen.group.fate,
        "messages": list[Json](seen.chat()),
        "branches": [_tokens(branch) for branch in seen.branches],
    }


def _tokens(branch: BranchSeen) -> dict[str, Json]:
    row = branch.row
    known = ~np.isnan(branch.advantages)
    return {
        "token_ids": row.token_ids.tolist(),
        "text": list(branch.pieces),
        "version": [
            v if g else None
            for v, g in zip(row.versions.tolist(), row.generated.tolist(), strict=True)
        ],
        "logprob": [
            round(p, 5) if g else None
            for p, g in zip(row.logprobs.tolist(), row.generated.tolist(), strict=True)
        ],
        "advantage": [
            round(a, 5) if k else None
            for a, k in zip(branch.advantages.tolist(), known.tolist(), strict=True)
        ],
        "use": list(branch.uses),
    }


def as_curl(
    seen: ConversationSeen, *, until: int | None = None, url: str = "http://127.0.0.1:8000"
) -> str:
    """Asks a server for the message before which the conversation is cut; without `until` the last
    one that the model wrote.
    """
    branch = seen.longest
    if branch is None:
        return ""
    wrote = [at for at, said in enumerate(branch.messages) if said.written]
    cut = (wrote[-1] if wrote else len(branch.messages)) if until is None else until
    body = msgspec.json.encode({"model": "midflight", "messages": seen.chat()[:cut]}).decode()
    return (
        f"curl -s {url}/v1/chat/completions -H 'content-type: application/json' -d "
        f"{shlex.quote(body)}"
    )


def as_shell(seen: ConversationSeen, folder: Path) -> str:
    """Serves the weights of the run, and asks again for each message that the model wrote."""
    model = folder / ("model" if (folder / "model").is_dir() else "start")
    wrote = [
        at for at, said in enumerate(seen.longest.messages if seen.longest else ()) if said.written
    ]
    asks = [as_curl(seen, until=at) for at in wrote]
    serve = f"midflight serve --model {shlex.quote(str(model))} --name midflight --port 8000 &"
    wait = "until curl -sf http://127.0.0.1:8000/health > /dev/null; do sleep 1; done"
    return "\n".join([serve, wait, *asks, "kill $!"])
