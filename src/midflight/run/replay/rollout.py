"""`midflight replay RUN --rollout ID`: the agent of a recorded rollout runs again. It gets the answers
that were recorded, as long as it asks what it asked then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from midflight.archive.store_reader import reading
from midflight.config.load import past_config
from midflight.config.sections import Config
from midflight.environments.agent_program import AgentProgram
from midflight.environments.agents import SharedClients
from midflight.environments.claimed import Claimed
from midflight.errors import ConfigError, NoRun, RequestRejected
from midflight.gateway.http.http import build_app
from midflight.run.replay.weights import kept_of
from midflight.run.rollout.rollouts import TokenFates
from midflight.run.rollout.serving import Agents, Serving
from midflight.text.tokenizer import Tokenizer
from midflight.types import (
    Attestation,
    Capabilities,
    Chunk,
    EngineHealth,
    Feature,
    GenerateRequest,
    LogprobKind,
    PauseMode,
    RolloutKey,
    Row,
    Segment,
    Task,
    Trajectory,
    Turn,
    WeightManifest,
)
from midflight.types.digests import read_conditions
from midflight.types.facts import record_nothing
from midflight.types.rollouts import TurnRecord
from midflight.wire.in_process import ask
from midflight.wire.memory import MemoryTransport


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A rollout of the store, with its answers in the order of its requests."""

    key: RolloutKey
    task: Task
    reward: float | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class ReplayedRollout:
    """What came of an agent that ran again."""

    recorded: RecordedRollout
    made: Trajectory
    num_given: int
    """Recorded answers that the agent asked for again."""
    other_prompt: str
    """What it asked that was not recorded, or an empty text."""

    @property
    def holds(self) -> bool:
        same = self.made.reward == self.recorded.reward
        return same and self.num_given == len(self.recorded.turns) and not self.other_prompt


class RecordedEngine:
    """An engine without a model. It is asked only for what was not recorded, and refuses it."""

    name = "recorded"

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self.capabilities = Capabilities(
            pause_modes=frozenset(PauseMode),
            logprob_kind=LogprobKind.SAMPLED,
            honours_seed=True,
            versions_per_token=True,
            stops_on_strings=True,
            aborts_single_requests=True,
            stages_weights=True,
            max_context=config.model.max_context,
            vocab_size=tokenizer.vocab_size,
            max_running=1,
            features=frozenset(Feature),
        )
        self._tokenizer = tokenizer
        self.asked = ""
        """The end of the first prompt that was not recorded."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.asked = self.asked or self._tokenizer.decode(request.input_ids)[-200:]
        raise RequestRejected(
            "this prompt was not recorded: the agent asks something else than it did in the run."
        )
        yield  # makes this an async generator

    async def abort(self, request_id: str | None) -> None:
        """Nothing runs here."""

    async def pause(self, mode: PauseMode) -> None:
        """Nothing runs here."""

    async def resume(self) -> None:
        """Nothing runs here."""

    async def stage(self, manifest: WeightManifest) -> None:
        """It has no weights."""

    async def commit(self, version: int) -> Attestation:
        return Attestation(version, "")

    async def health(self) -> EngineHealth:
        return EngineHealth(0, paused=False, num_tokens=0, num_running=0, num_waiting=0)


def recorded_rollout(folder: Path, key: RolloutKey) -> RecordedRollout:
    """Raises `NoRun` if the run has no such rollout, or none with the record of its answers."""
    place = (key.group.epoch, key.group.index, key.group.attempt, key.sample)
    with reading(folder) as store:
        found = store.ask(
            "SELECT task, reward, rows FROM rollouts JOIN groups USING (epoch, position, attempt) "
            "WHERE (epoch, position, attempt, sample) = (?, ?, ?, ?)",
            *place,
        )
        if not found:
            raise NoRun(
                f"{folder} has no rollout {'-'.join(map(str, place))} that has ended; "
                f"`midflight samples {folder}` names those that it has."
            )
        ((task, reward, rows),) = found
        made = store.rows(rows)
        known = store.task(task)
    turns = _turns(made)
    if not turns:
        raise NoRun(
            f"rollout {'-'.join(map(str, place))} of {folder} has no record of its answers: none of "
            "them could be trained on, or an older Midflight made the run."
        )
    return RecordedRollout(key, known, reward, turns)


def _turns(rows: Sequence[Row]) -> tuple[Turn, ...]:
    """The answers of all rows, each once, in the order of their requests."""
    found: dict[bytes, tuple[int, Turn]] = {}
    for row in rows:
        for record in row.records:
            if record.digest not in found and record.end > record.first:
                number = 0 if row.turns is None else int(row.turns[record.first])
                found[record.digest] = (number, _turn(row, record))
    return tuple(turn for _, turn in sorted(found.values(), key=lambda pair: pair[0]))


def _turn(row: Row, record: TurnRecord) -> Turn:
    place = slice(record.first, record.end)
    conditions = read_conditions(record.conditions)
    return Turn(
        tuple(row.token_ids[: record.first].tolist()),
        tuple(row.token_ids[place].tolist()),
        tuple(row.logprobs[place].tolist()),
        tuple(_segments(row, record)),
        conditions.finish,
        conditions.policy_sampled,
        kept=kept_of(row, record),
        role=row.role,
        older_keys=conditions.older_keys,
    )


def _segments(row: Row, record: TurnRecord) -> list[Segment]:
    versions = row.versions[record.first : record.end]
    keys = row.kv_versions[record.first : record.end]
    changes = (np.diff(versions) != 0) | (np.diff(keys) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(versions)]
    return [
        Segment(int(versions[start]), int(keys[start]), start, end)
        for start, end in itertools.pairwise(bounds)
    ]


def replay_rollout(folder: Path, key: RolloutKey) -> ReplayedRollout:
    """Runs the agent of a rollout again, with the run's environment as it is now."""
    config = past_config(folder / "config.toml")
    recorded = recorded_rollout(folder, key)
    return asyncio.run(_replayed(config, Tokenizer.load(folder / "start"), recorded))


async def _replayed(
    config: Config, tokenizer: Tokenizer, recorded: RecordedRollout
) -> ReplayedRollout:
    engine = RecordedEngine(config, tokenizer)
    serving = Serving(
        config, tokenizer, [engine], record=record_nothing, version=0, anonymous=False
    )
    program = AgentProgram(config.environment)
    if isinstance(program.environment, Claimed):
        raise ConfigError(
            "agents outside of the run claim its rollouts, so that this command cannot run them."
        )
    serving.gateway.address = "http://replay"
    app = build_app(serving.gateway, serving.control)
    serving.gateway.replay(recorded.key, recorded.turns)
    given: list[Turn] = []
    serving.gateway.on_turn = lambda kept: given.append(kept.turn)
    async with asyncio.TaskGroup() as requests:
        clients = partial(
            SharedClients,
            transport=MemoryTransport(app, requests),
            untracked=config.environment.untracked,
            public_url=config.gateway.public_url,
        )
        async with program.host(partial(ask, app), clients) as host:
            runner = Agents(config, serving, host, record_nothing).runner(
                serving.gateway, TokenFates(), tracked=True
            )
            made = await runner.run(recorded.key, recorded.task)
    return ReplayedRollout(recorded, made, len(given), engine.asked)
