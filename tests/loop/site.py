"""A ring on virtual time of which everything is written down, and what must hold of it at its end."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from tests.facts import Facts

from midflight.buffer.books import Books
from midflight.config.sections import Config, EnvironmentSection, GatewaySection, RolloutSection, RunSection, TrainerSection
from midflight.environments.agent_program import Environment
from midflight.environments.tasks import PostedTasks, Source
from midflight.errors import MidflightError
from midflight.gateway.answers.answer import Answer
from midflight.gateway.http.control import Control
from midflight.gateway.sessions.session import AnswerInProgress, CompletionCall, Messages, Session, request_seed
from midflight.ports import SessionHandle
from midflight.run.rollout.serving import Serving
from midflight.testing.ring import SimulatedTrainer, SlowSteps, SmallRing, open_ring
from midflight.testing.script import Script, scripted_tokenizer
from midflight.testing.scripted import ScriptedEngine
from midflight.testing.virtual_time import VirtualTimeLoop
from midflight.types import Batch, GenerateRequest, GroupKey, Reason, RolloutKey, SamplingParams, Task, Turn, Version
from midflight.types.facts import Fact, Record, RequestFailed, RolloutEnded, TurnKept, record_nothing

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TOKENIZER = scripted_tokenizer()
MAX_TOKENS = 12


def config(*, steps: int = 6, staleness: int = 1, groups: int = 2, size: int = 2, every: int = 0, **rollout: object) -> Config:
    return Config(
        run=RunSection(name="loop", seed=11, steps=steps),
        gateway=GatewaySection(request_seconds=60),
        environment=EnvironmentSection(max_tokens=MAX_TOKENS, rollout_seconds=20),
        rollout=RolloutSection(groups_per_step=groups, group_size=size, max_staleness=staleness, **rollout),  # type: ignore[arg-type]
        trainer=TrainerSection(checkpoint_every=every),
    )


def source(num_tasks: int = 64) -> Source:
    return Source("numbers", 1.0, tuple(Task(f"t{i}", "numbers", {"question": f"n{i}"}) for i in range(num_tasks)))


def fast_engines(number: int, *, by_version: bool = False, **options: object) -> list[ScriptedEngine]:
    script = Script(mean_length=8, by_version=by_version)
    return [ScriptedEngine(f"e{i}", script=script, tokenizer=TOKENIZER, **options) for i in range(number)]  # type: ignore[arg-type]


class Agents:
    """An environment of one to three turns, with a long tail of thinking between them. Its reward is never 0."""

    def __init__(
        self, seed: int, *, failing: float = 0.0, hanging: float = 0.0, clinging: float = 0.0, blocking: float = 0.0, longest: float = 15.0
    ) -> None:
        """Shares of the turns after which an agent raises, hangs, hangs and refuses to be cancelled, or blocks the loop for a while."""
        self._random = random.Random(seed)
        self._failing, self._hanging, self._longest = failing, hanging, longest
        self._clinging, self._blocking = clinging, blocking
        self.rewards = Counter[float]()
        self.num_failed = self.num_hung = self.num_clung = self.num_blocked = 0
        self.released = asyncio.Event()
        """Ends those that refuse to be cancelled, after the run."""

    async def __call__(self, task: Task, client: AsyncOpenAI) -> float | None:
        messages: list[dict[str, str]] = [{"role": "user", "content": str(task.data["question"])}]
        for _ in range(self._random.choice((1, 1, 2, 3))):
            await asyncio.sleep(min(self._longest, 0.02 * self._random.paretovariate(0.7)))
            answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
            messages.append({"role": "user", "content": "more"})
            await self._trouble()
        reward = round(0.25 + self._random.random(), 3)
        self.rewards[float(np.float32(reward))] += 1
        return reward

    async def _trouble(self) -> None:
        if self._random.random() < self._failing:
            self.num_failed += 1
            raise RuntimeError("the sandbox is gone")
        if self._random.random() < self._hanging:
            self.num_hung += 1
            await asyncio.get_running_loop().create_future()
        if self._clinging and self._random.random() < self._clinging:
            self.num_clung += 1
            await self._cling()
        if self._blocking and self._random.random() < self._blocking:
            self.num_blocked += 1
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualTimeLoop)
            loop.block(self._random.uniform(1, 5))

    async def _cling(self) -> None:
        """By a `finally` that waits, or by swallowing every cancellation."""
        if self._random.random() < 0.5:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                with suppress(asyncio.CancelledError):
                    await self.released.wait()
                await self.released.wait()
        while not self.released.is_set():
            with suppress(BaseException):
                await self.released.wait()
        raise RuntimeError("it was over long ago")


class Site:
    """One run, or one life of it. `check` holds what happened against the invariants."""

    def __init__(
        self,
        made: Config,
        folder: Path,
        *,
        engines: Sequence[ScriptedEngine] | None = None,
        agents: Environment | None = None,
        num_tasks: int = 64,
        sdk: bool = True,
    ) -> None:
        """`sdk`: agents use the unmodified client and HTTP in memory; without it they call the gateway, which is ten times as fast."""
        self._sdk = sdk
        self.config, self.folder = made, folder
        self.engines = list(engines or fast_engines(1))
        self.agents = agents or Agents(0)
        self.sources = [source(num_tasks)]
        self.posted: PostedTasks | None = None
        self.seen = Facts()
        self.on_fact: Record = record_nothing
        self.trainer = SimulatedTrainer()
        self.received = Counter[RolloutKey]()
        """Tokens that the gateway has received from engines, those past a stop string too."""
        self.turns: defaultdict[RolloutKey, list[Turn]] = defaultdict(list)
        """Of the last try of each rollout."""
        self.taken: list[Batch] = []
        self.ring: SmallRing | None = None

    # --- Running -----------------------------------------------------------------------------------------------------

    async def run(self, *beside: Coroutine[object, object, None], step_seconds: float = 0.3) -> None:
        """A whole run."""
        async with self.opened() as ring:
            await ring.train(self.trainer, self.trainer, *beside, service=SlowSteps(ring.system, seconds=lambda: step_seconds))
            if isinstance(self.agents, Agents):
                self.agents.released.set()
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def opened(self, *, version: Version = 0, checkpoint: Version | None = None) -> AsyncGenerator[SmallRing]:
        opened = open_ring(
            self.config,
            self.engines,
            tokenizer=TOKENIZER,
            sources=self.sources,
            posted=self.posted,
            environment=self.agents,
            folder=self.folder,
            record=self._record,
            version=version,
            checkpoint=checkpoint,
            client_for=None if self._sdk else direct_client,
        )
        with pytest.MonkeyPatch.context() as patch:
            self._listen(patch)
            async with opened as self.ring:
                self._follow(self.ring)
                yield self.ring

    def _record(self, fact: Fact) -> None:
        self.seen.append(fact)
        self.on_fact(fact)

    def _listen(self, patch: pytest.MonkeyPatch) -> None:
        begin, accept, replay = Session.begin, Answer.accept, Answer.replay
        keys: WeakKeyDictionary[AnswerInProgress, RolloutKey] = WeakKeyDictionary()

        def beginning(session: Session, answer: AnswerInProgress) -> None:
            if session.tracked and session.key is not None:
                keys[answer] = session.key
            begin(session, answer)

        def counted(answer: Answer, grow: Callable[[], None]) -> None:
            before = len(answer.output_ids) + answer.num_overshoot
            grow()
            if answer in keys:
                self.received[keys[answer]] += len(answer.output_ids) + answer.num_overshoot - before

        patch.setattr(Session, "begin", beginning)
        patch.setattr(Answer, "accept", lambda answer, chunk, **more: counted(answer, lambda: accept(answer, chunk, **more)))
        patch.setattr(Answer, "replay", lambda answer, turn: counted(answer, lambda: replay(answer, turn)))

    def _follow(self, ring: SmallRing) -> None:
        take, told = ring.system.queue.take, ring.serving.gateway.on_turn
        assert told is not None

        async def taking(train_version: Version) -> Batch:
            batch = await take(train_version)
            self.taken.append(batch)
            return batch

        def hearing(kept: TurnKept) -> None:
            told(kept)
            self.turns[kept.key] = [*self.turns[kept.key][: kept.number], kept.turn]

        ring.system.queue.take = taking  # type: ignore[method-assign]
        ring.serving.gateway.on_turn = hearing

    # --- What must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.check_groups()
        self.check_ages()
        self.check_fates()
        self.check_answers()
        self.check_batches()

    def check_groups(self) -> None:
        """I1."""
        books = self.books
        assert books.submitted == books.num_running + books.num_waiting + books.num_leased + books.trained + books.dropped.total()
        assert self.trainer.num_steps == self.config.run.steps
        assert books.trained == self.config.run.steps * self.config.rollout.groups_per_step

    def check_ages(self) -> None:
        """I2; and waiting drops and masks nothing for its age."""
        for batch in self.trainer.batches:
            ages = batch.train_version - batch.versions[batch.loss_mask]
            assert ages.min() >= 0 and ages.max() <= self.config.rollout.max_staleness
        assert not self.books.tokens.masked and not self.books.tokens.dropped[Reason.STALE] and not self.books.dropped[Reason.STALE]

    def check_fates(self) -> None:
        """I3: a rollout whose group has ended left as many fates as the gateway received tokens for it; others are in flight."""
        stored = self.stored_fates()
        running = set(self.books.running)
        for key, num_tokens in self.received.items():
            if key.group not in running:
                assert stored[key] == num_tokens, f"{key}: {num_tokens} tokens received, {stored[key]} fates stored"
            else:
                assert stored[key] in (0, num_tokens), f"{key} is half stored"
        assert set(stored) <= set(self.received)
        assert self.books.tokens.received == stored.total()

    def check_answers(self) -> None:
        """I5, I6: every token of every turn is the one that its label's version gives after those before it."""
        script = self.engines[0].script
        for key, turns in self.turns.items():
            for turn in turns:
                check_turn(script, key, turn, self.config)

    def check_batches(self) -> None:
        """I4, I10: a trained rollout has all its tokens, as sampled, and the reward that its agent gave."""
        assert isinstance(self.agents, Agents)
        for batch in self.taken:
            for trajectory in (t for group in batch.groups for t in group.trajectories):
                turns = self.turns[trajectory.key]
                trained = [i for row in trajectory.rows for i in row.token_ids[row.loss_mask].tolist()]
                assert trained == [i for turn in turns for i in turn.output_ids]
                assert trajectory.reward is not None and float(np.float32(trajectory.reward)) in self.agents.rewards
        for finished in self.seen.of(RolloutEnded):
            assert finished.reward != 0 and (finished.reward is None) == (finished.error is not None)

    # --- Reading -----------------------------------------------------------------------------------------------------

    @property
    def books(self) -> Books:
        assert self.ring is not None
        return self.ring.system.books

    @property
    def control(self) -> Control:
        assert self.ring is not None
        return self.ring.serving.control

    @property
    def failed_requests(self) -> list[RequestFailed]:
        return self.seen.of(RequestFailed)

    @property
    def num_spanning(self) -> int:
        """Rollouts whose tokens are of several versions."""
        return sum(finished.num_versions > 1 for finished in self.seen.of(RolloutEnded))

    def stored_fates(self) -> Counter[RolloutKey]:
        """Tokens with a fate, by rollout."""
        with sqlite3.connect(self.folder / "store.sqlite") as file:
            found = file.execute("SELECT epoch, position, attempt, sample, SUM(num_tokens) FROM fates GROUP BY 1, 2, 3, 4").fetchall()
        return Counter({RolloutKey(GroupKey(*place), sample): total for *place, sample, total in found})


class DirectClient:
    """As much of `openai.AsyncOpenAI` as `Agents` use, without HTTP."""

    def __init__(self, serving: Serving, session: SessionHandle, *, role: str = "") -> None:
        self._serving, self._session = serving, session
        self._gateway, self._api_key = serving.gateway, f"{session.api_key}~{role}" if role else session.api_key
        self.chat = self.completions = self

    def role(self, name: str) -> DirectClient:
        return DirectClient(self._serving, self._session, role=name)

    async def create(self, *, model: str, messages: list[dict[str, str]]) -> object:
        session = self._gateway.session_for(path_token=None, api_key=self._api_key)
        job = self._gateway.prepare(session, CompletionCall((Messages(tuple(dict(m) for m in messages)),), model=model))
        try:
            (answer,) = await self._gateway.answers(job)
        except MidflightError as error:
            self._gateway.failed(session, error)
            raise
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=answer.text))])


def direct_client(serving: Serving, session: SessionHandle) -> AsyncOpenAI:
    return DirectClient(serving, session)  # type: ignore[return-value]


def check_turn(script: Script, key: RolloutKey, turn: Turn, made: Config) -> None:
    """Plays the turn again. With a script that ignores versions this is the uninterrupted answer."""
    assert len(turn.output_ids) == len(turn.logprobs) > 0
    assert [(s.start, s.end) for s in turn.segments] == list(
        zip([0, *(s.end for s in turn.segments)], [s.end for s in turn.segments], strict=False)
    )
    assert turn.segments[-1].end == len(turn.output_ids)
    assert all(s.kv_version <= s.version for s in turn.segments)
    if not turn.num_resumes or made.weights.commit == "barrier":  # elsewhere an answer may go on under the version before
        versions = [s.version for s in turn.segments]
        assert versions == sorted(versions)
    seed = request_seed(made.run.name, made.run.seed, key, occurrence=0, prompt_ids=turn.prompt_ids)
    state = script.start(GenerateRequest("", turn.prompt_ids, len(turn.prompt_ids), SamplingParams(seed=seed)))
    for segment in turn.segments:
        for place in range(segment.start, segment.end):
            token = script.choose(state, segment.version, may_end=True)
            assert token == (turn.output_ids[place], turn.logprobs[place]), f"{key}: token {place} is not of version {segment.version}"
            state = script.extend(state, token[0])
    assert script.end_id not in turn.output_ids[:-1]
    assert turn.output_ids[-1] == script.end_id or len(turn.output_ids) == MAX_TOKENS
