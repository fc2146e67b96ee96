"""Stand-ins for the gateway, the client and the observer: they answer after a virtual latency and remember what happened."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from midflight.environments.agents import LocalAgents
from midflight.environments.rollout import RolloutRunner
from midflight.errors import Overloaded
from midflight.gateway.sessions.request_clock import RequestClock
from midflight.types import Reason, RolloutKey, Row, SamplingParams, SessionRecord, Task
from midflight.types.facts import Evaluated, Fact, RolloutEnded


def row(num_prompt: int = 2, versions: tuple[int, ...] = (3, 3, 4)) -> Row:
    generated = np.array([False] * num_prompt + [True] * len(versions))
    length = len(generated)
    all_versions = np.array([0] * num_prompt + list(versions), dtype=np.int32)
    return Row(
        token_ids=np.arange(length, dtype=np.int32),
        generated=generated,
        loss_mask=generated.copy(),
        logprobs=np.zeros(length, dtype=np.float32),
        versions=all_versions,
        kv_versions=all_versions,
    )


@dataclass
class FakeSession:
    session_id: str
    key: RolloutKey
    tracked: bool
    base_url: str = "http://gateway/s/1/v1"
    api_key: str = "secret"


@dataclass
class FakeSessions:
    """Opens at most `max_open` at once; every closed session has one row of five tokens, three of them generated."""

    max_open: int = 10**9
    open_now: dict[str, FakeSession] = field(default_factory=dict)
    most_open: int = 0
    opened: list[FakeSession] = field(default_factory=list)
    closed: Counter[str] = field(default_factory=Counter)
    clocks: defaultdict[str, RequestClock] = field(default_factory=lambda: defaultdict(RequestClock))

    def request_watch(self, session_id: str) -> RequestClock:
        return self.clocks[session_id]

    def open(self, key: RolloutKey, *, sampling: SamplingParams, tracked: bool) -> FakeSession:
        if len(self.open_now) >= self.max_open:
            raise Overloaded("too many sessions; try again later")
        session = FakeSession(f"s{len(self.opened)}", key, tracked)
        self.opened.append(session)
        self.open_now[session.session_id] = session
        self.most_open = max(self.most_open, len(self.open_now))
        return session

    def close(self, session_id: str) -> SessionRecord:
        self.closed[session_id] += 1
        self.open_now.pop(session_id, None)
        return SessionRecord(
            session_id,
            rows=(row(),),
            num_turns=1,
            num_branches=1,
            truncated=True,
            masked={Reason.NOT_POLICY_SAMPLED: 2},
            dropped={Reason.OVERSHOOT: 1},
            num_answers=1,
        )

    def oldest_version(self, session_id: str) -> int | None:
        return 3


@dataclass
class FakeFates:
    masked: Counter[Reason] = field(default_factory=Counter)
    dropped: Counter[Reason] = field(default_factory=Counter)
    discarded: Counter[Reason] = field(default_factory=Counter)
    """Trainable tokens of discarded rows."""

    def session_closed(self, key, *, masked, dropped) -> None:
        self.masked.update(masked)
        self.dropped.update(dropped)

    def rows_discarded(self, key, rows, *, reason) -> None:
        self.discarded[reason] += sum(r.num_trainable for r in rows)


@dataclass
class FakeObserver:
    rollouts: list[RolloutEnded] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)

    def apply(self, fact: Fact) -> None:
        match fact:
            case RolloutEnded():
                self.rollouts.append(fact)
            case Evaluated():
                self.evaluations.append(fact)
            case _:
                raise AssertionError(fact)


class FakeClient:
    """Answers every chat with `reply` after `seconds`."""

    def __init__(self, reply: str | None = "olleh", seconds: float = 1.0) -> None:
        self._reply, self._seconds = reply, seconds
        self.requests: list[dict] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **request):
        self.requests.append(request)
        await asyncio.sleep(self._seconds)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=self._reply))])


@dataclass
class Rig:
    """A runner of rollouts with all its fakes."""

    environment: object
    client: FakeClient = field(default_factory=FakeClient)
    sessions: FakeSessions = field(default_factory=FakeSessions)
    fates: FakeFates = field(default_factory=FakeFates)
    observer: FakeObserver = field(default_factory=FakeObserver)

    def agents(self) -> LocalAgents:
        return LocalAgents(self.environment, client_for=lambda session: self.client, plain_client_for=lambda session: self.client)

    def runner(self, *, agents=None, **options) -> RolloutRunner:
        return RolloutRunner(
            sessions=self.sessions,
            agents=agents or self.agents(),
            sampling=SamplingParams(),
            record=self.observer.apply,
            fates=self.fates,
            **{"rollout_seconds": 60.0, **options},
        )


def task(number: int = 17, *, source: str = "spell", **data) -> Task:
    return Task(str(number), source, data or {"question": "Spell hello backward", "answer": "olleh"})
