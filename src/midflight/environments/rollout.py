"""The rollout of one agent: a session, its client, an environment under a deadline, and a checked
reward.
"""

import asyncio
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from midflight.allowance import Allowance, Expired
from midflight.config.bounds import RolloutBound
from midflight.environments.agents import AgentHost, without_secrets
from midflight.environments.group_scoring import GroupScorer
from midflight.environments.processor_waits import ProcessorWaits
from midflight.environments.result_checks import (
    UNSCORED,
    UnscoredRollout,
    result_of,
    scored_roles,
    shown_metrics,
    unscored_role,
)
from midflight.environments.rollout_time import RolloutTime, unbounded
from midflight.errors import (
    AgentFailed,
    BadReward,
    Cost,
    MidflightError,
    RolloutAbandoned,
    RolloutTimeout,
    RunFailed,
)
from midflight.ports import SessionHandle, Sessions
from midflight.types import (
    Reason,
    Result,
    RolloutKey,
    Row,
    SamplingParams,
    SessionRecord,
    Task,
    Trajectory,
    Version,
)
from midflight.types.facts import Record, RolloutEnded


class FateSink(Protocol):
    """Takes the fates of tokens that no trajectory carries on (I3). It is synchronous and never
    raises.
    """

    def session_closed(
        self, key: RolloutKey, *, masked: Mapping[Reason, int], dropped: Mapping[Reason, int]
    ) -> None:
        """Takes the tokens that the gateway itself masked and dropped in a tracked session. It is
        called once for every session that was opened.
        """
        ...

    def rows_discarded(self, key: RolloutKey, rows: tuple[Row, ...], *, reason: Reason) -> None:
        """Takes the rows of a tracked session that end here: those of a cancelled rollout, or of
        one that is tried again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of the environment's part of a rollout. Its reward is None exactly if `error`
    holds the reason, or if the environment returned None.
    """

    result: Result
    error: str | None = None
    trace: str | None = None
    unscored: UnscoredRollout | None = None
    """The attempt, if it is scored together with the others of the group once they have ended. Then
    there is no result yet.
    """


GRACE_SECONDS = 5.0
"""The seconds that an agent may take to end after it was cancelled, and again after it was
cancelled a second time: it may have things to close.
"""
OWN = __file__.rpartition("/")[0]
"""The folder of this package, in which no user's agent is."""
MAX_ABANDONED = 100
"""The number of agents that may live on although they were cancelled twice. Each may hold memory,
or spin. More of them end the run.
"""


class RolloutRunner:
    """Runs rollouts, any number at once. It knows which rollouts run, and which agents refused to
    end.
    """

    def __init__(
        self,
        *,
        sessions: Sessions,
        agents: AgentHost,
        sampling: SamplingParams,
        rollout_seconds: float,
        record: Record,
        fates: FateSink,
        tracked: bool = True,
        own: bool = False,
        bound: Callable[[], RolloutBound] = unbounded,
        outage_seconds: Callable[[], float] = lambda: 0.0,
        delayed_seconds: Callable[[], float] = lambda: 0.0,
        trouble: Callable[[], str] = str,
    ) -> None:
        """`rollout_seconds` is the time that an agent may take by itself, and `bound` gives the
        last bound on a whole rollout: see `RolloutTime`. `outage_seconds` gives the seconds so far
        in which no engine took requests, including an outage that goes on. `delayed_seconds` gives
        those in which this process had no processor, if agents run here. `trouble` gives other
        possible causes of a rollout that takes too long, such as engines that take no requests. It
        is empty if there are none.

        With `tracked=False`, which is for evaluation, `fates` is not called. With `own` the agents
        are Midflight's own and end when they are cancelled.
        """
        self._sessions = sessions
        self._agents = agents
        self._sampling = sampling
        self._rollout_seconds = rollout_seconds
        self._record = record
        self._fates = fates
        self._tracked = tracked
        self._own = own
        self._bound = bound
        self._outage_seconds = outage_seconds
        self._delayed_seconds = delayed_seconds
        self._trouble = trouble
        self._judging = GroupScorer(agents, seconds=rollout_seconds)
        self._abandoned = set[asyncio.Task[Outcome]]()
        self.running: dict[str, tuple[RolloutKey, float]] = {}
        """The key and the beginning, in the loop's time, of each rollout under way, by its session.
        The earliest comes first.
        """
        self.times: dict[str, RolloutTime] = {}
        """The time of each rollout whose agent runs, by its uses, by session."""

    async def run(
        self, key: RolloutKey, task: Task, *, version: Version | None = None
    ) -> Trajectory:
        """Makes one attempt at a task. Waits for the environment. It is ended by the deadline and
        two graces, or by cancellation, which propagates.

        The session is closed whatever happens. An exception of the environment or the gateway, a
        bad reward or a missed deadline gives a trajectory without reward and with `error` (I10).
        Only an error that is priced at the whole run, such as a `ConfigError`, is raised. With
        `version`, a token of another version gives no reward either: the reward is that of one
        version, or there is none.
        """
        started = asyncio.get_running_loop().time()
        self._judging.joined(key.group)
        try:
            session = self._sessions.open(key, sampling=self._sampling, tracked=self._tracked)
        except MidflightError as error:
            self._judging.left(key.group)
            return self._finish(key, task, _failure(error), record=None, started=started)
        self.running[session.session_id] = (key, started)
        try:
            outcome = await self._outcome(task, session)
        except BaseException:
            self._judging.left(key.group)
            self._close(key, session, discard=True)
            raise
        finally:
            del self.running[session.session_id]
        record = self._close(key, session, discard=False)
        if version is not None and record.versions - {version}:
            mixed = ", ".join(map(str, sorted(record.versions)))
            why = f"asked of version {version} alone, it was answered by version {mixed}"
            outcome = Outcome(UNSCORED, outcome.error or why)
        outcome = await self._judged(key, task, outcome, record)
        if len(outcome.result.turns) > record.num_answers:
            outcome = _failure(_too_many_turns(task, outcome.result, record))
        unscored = unscored_role(outcome.result, record)
        if unscored:
            outcome = _failure(_unscored_role(task, unscored))
        return self._finish(key, task, outcome, record=record, started=started)

    async def _judged(
        self, key: RolloutKey, task: Task, outcome: Outcome, record: SessionRecord
    ) -> Outcome:
        """Waits for the others of the group if they are scored together. No session is open any
        more.
        """
        if outcome.unscored is None:
            self._judging.left(key.group)
            return outcome
        try:
            return Outcome(await self._judging.settled(key, task, outcome.unscored))
        except Exception as error:
            return _failure(error)
        except BaseException:
            if self._tracked and record.rows:
                self._fates.rows_discarded(key, record.rows, reason=Reason.SHUTDOWN)
            raise

    async def _outcome(self, task: Task, session: SessionHandle) -> Outcome:
        """Runs the agent on its own copy of the task, in no group. So the agent's changes to its
        task affect only itself, and nothing waits for ever for its end.
        """
        waits = ProcessorWaits()
        spent = self._time(session.session_id, waits)
        allowance = Allowance(self._rollout_seconds, left=spent.left)
        spent.on_change = allowance.look
        self.times[session.session_id] = spent
        try:
            with waits.counting():
                return await self._within(task, session, allowance, spent)
        finally:
            del self.times[session.session_id]
            spent.close()

    def _time(self, session_id: str, waits: ProcessorWaits) -> RolloutTime:
        return RolloutTime(
            session_id,
            own_seconds=self._rollout_seconds,
            bound=self._bound,
            watch=self._sessions.request_watch(session_id),
            host=self._agents,
            waited=waits.seconds,
            delayed=self._delayed_seconds,
            outage=self._outage_seconds,
        )

    async def _within(
        self, task: Task, session: SessionHandle, allowance: Allowance, spent: RolloutTime
    ) -> Outcome:
        if self._own:
            return await self._outcome_here(task, session, allowance, spent)
        loop = asyncio.get_running_loop()
        attempt = loop.create_task(self._attempt(task, session), name=f"agent of task {task.id}")
        ended = loop.create_future()
        attempt.add_done_callback(lambda _: ended.done() or ended.set_result(None))
        late: RolloutTimeout | None = None
        try:
            async with allowance:
                await ended
        except Expired:
            late = self._timeout_error(task, spent, _place(attempt))
        finally:
            if not attempt.done() and not await _ended(attempt):
                late = self._abandon(task, attempt)
        if late is not None:
            return _failure(late)
        if attempt.cancelled():
            return Outcome(
                UNSCORED,
                "the environment let a CancelledError of its own escape; catch it where the "
                "inner task is awaited",
            )
        return attempt.result()

    async def _outcome_here(
        self, task: Task, session: SessionHandle, allowance: Allowance, spent: RolloutTime
    ) -> Outcome:
        """Runs an agent that is trusted, and therefore needs no task of its own. Waits for its end,
        or until the allowance is spent.
        """
        try:
            async with allowance:
                return await self._attempt(task, session)
        except Expired:
            return _failure(self._timeout_error(task, spent, ""))

    async def _attempt(self, task: Task, session: SessionHandle) -> Outcome:
        try:
            found = await result_of(await self._agents.run(task, session), task=task)
            if isinstance(found, UnscoredRollout):
                return Outcome(UNSCORED, unscored=found)
            return Outcome(found)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit too: it is the agent that exits
            return _failure(error)

    def _abandon(self, task: Task, attempt: asyncio.Task[Outcome]) -> RolloutTimeout:
        self._abandoned.add(attempt)
        attempt.add_done_callback(self._abandoned.discard)
        error = RolloutAbandoned(
            f"task {task.id} of {task.source}: the agent did not end within {2 * GRACE_SECONDS:g} "
            f"s though it was cancelled twice, and was left alone{_place(attempt)}; let it end "
            "when it is cancelled, without waiting in `finally` or catching CancelledError."
        )
        if len(self._abandoned) > MAX_ABANDONED:
            raise RunFailed(f"{MAX_ABANDONED} agents refuse to end; the last is that of {error}")
        return error

    def _timeout_error(self, task: Task, spent: RolloutTime, place: str) -> RolloutTimeout:
        return RolloutTimeout(
            (
                f"task {task.id} of {task.source}: the rollout was ended{place}: "
                f"{spent.why_late()}. {self._trouble()}"
            ).strip()
        )

    def _close(self, key: RolloutKey, session: SessionHandle, *, discard: bool) -> SessionRecord:
        record = self._sessions.close(session.session_id)
        if self._tracked:
            self._fates.session_closed(key, masked=record.masked, dropped=record.dropped)
            if discard and record.rows:
                self._fates.rows_discarded(key, record.rows, reason=Reason.SHUTDOWN)
        return record

    def _finish(
        self,
        key: RolloutKey,
        task: Task,
        outcome: Outcome,
        *,
        record: SessionRecord | None,
        started: float,
    ) -> Trajectory:
        result = outcome.result
        assert result.reward is None or isinstance(result.reward, float)
        roles, rows, lost = scored_roles(result, record) if record else ({}, (), ())
        if lost and self._tracked:
            self._fates.rows_discarded(key, lost, reason=Reason.NO_REWARD)
        components = {name: value for name, value in result.components.items() if value is not None}
        trajectory = Trajectory(
            key,
            task.id,
            task.source,
            result.reward,
            rows,
            truncated=record.truncated if record else False,
            room=record.room if record else None,
            error=outcome.error,
            seconds=asyncio.get_running_loop().time() - started,
            components=components,
            metrics=shown_metrics(result),
            turn_rewards=tuple(result.turns),
            fields=result.fields,
            roles=roles,
        )
        num_masked = sum(record.masked.values()) if record else 0
        ended = RolloutEnded(
            key=key,
            source=task.source,
            reward=trajectory.reward,
            num_tokens=trajectory.num_trainable + num_masked,
            num_versions=num_versions(trajectory.rows),
            seconds=trajectory.seconds,
            error=outcome.error,
            trace=outcome.trace,
            num_turns=record.num_turns if record else 0,
            truncated=trajectory.truncated,
            started=started,
            times=record.times if record else (),
            components=trajectory.components,
            metrics=trajectory.metrics,
        )
        self._record(ended)
        return trajectory


MAX_TRACE = 20_000
"""The number of characters of a traceback that are kept. The end is kept, where the error is. A
traceback of a library's retries can be many times longer.
"""


def _too_many_turns(task: Task, result: Result, record: SessionRecord) -> BadReward:
    return BadReward(
        f"scoring task {task.id} of {task.source}: turns has {len(result.turns)} rewards for "
        f"{record.num_answers} answers of the model; give one for each answer, in their order, or "
        "fewer."
    )


def _unscored_role(task: Task, name: str) -> BadReward:
    return BadReward(
        f"scoring task {task.id} of {task.source}: the role {name!r} asked the model, and has no "
        f'reward of its own; return Result(..., roles={{"{name}": ...}}), with None where it '
        "cannot be scored."
    )


def num_versions(rows: tuple[Row, ...]) -> int:
    """Returns the number of versions that sampled the generated tokens of these rows."""
    versions = set[int]()
    for row in rows:
        versions.update(row.versions[row.generated].tolist())
    return len(versions)


async def _ended(attempt: asyncio.Task[Outcome]) -> bool:
    """Cancels an attempt, and again after a grace. Waits for its end, for two graces at most.
    Returns whether it has ended.
    """
    for _ in range(2):
        attempt.cancel()
        await asyncio.wait([attempt], timeout=GRACE_SECONDS)
        if attempt.done():
            return True
    return False


def _place(attempt: asyncio.Task[Outcome]) -> str:
    """The place at which the environment's own function waits, if it runs in this process."""
    awaited = getattr(attempt.get_coro(), "cr_await", None)
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None and not frame.f_code.co_filename.startswith(OWN):
            return f" at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
        awaited = getattr(awaited, "cr_await", None)
    return ""


def _failure(error: BaseException) -> Outcome:
    """The outcome of a rollout that an error ended. An error that is priced at the run is raised
    again.
    """
    if isinstance(error, MidflightError) and error.cost is Cost.RUN:
        raise error
    if isinstance(error, AgentFailed):
        trace = without_secrets(error.trace or "") or None
        return Outcome(UNSCORED, without_secrets(str(error)), trace)
    trace = without_secrets("".join(traceback.format_exception(error)))
    text = without_secrets(f"{type(error).__name__}: {error}")
    return Outcome(UNSCORED, text, trace[-MAX_TRACE:])
