"""What can go wrong, at what price, and whose fault it is.

An error is priced by what it costs (a request, a rollout, a step, the run) and blamed at the
boundary where it is found. Messages name the deed and the value, and end with the remedy.
`wire.edge.fault_of` turns an error into HTTP.
"""

import difflib
import errno
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import ClassVar, cast


class Cost(StrEnum):
    REQUEST = "request"
    ROLLOUT = "rollout"
    STEP = "step"
    RUN = "run"


class Blame(StrEnum):
    REQUEST = "request"
    AGENT = "agent"
    ENVIRONMENT = "environment"
    ENGINE = "engine"
    CONFIG = "config"
    INFRASTRUCTURE = "infrastructure"


class MidflightError(Exception):
    """Base of all errors meant for users. Subclasses fix price, blame and HTTP face."""

    cost: ClassVar[Cost] = Cost.RUN
    blame: ClassVar[Blame] = Blame.INFRASTRUCTURE
    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False


# --- Blamed on a request: the server and the run go on --------------------------------------------


class RequestRejected(MidflightError):
    """The request can never succeed as it is. `param` names the offending field, in the client's
    words.
    """

    cost = Cost.REQUEST
    blame = Blame.REQUEST
    status = 400
    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextExceeded(RequestRejected):
    code = "context_length_exceeded"


class UnknownModel(RequestRejected):
    status = 404
    code = "model_not_found"


class UnknownResponse(RequestRejected):
    """A response, an item or a conversation that the session does not keep."""

    status = 404
    code = "not_found"


class UnknownSession(RequestRejected):
    status = 404
    code = "session_not_found"


class Unauthorized(RequestRejected):
    status = 401
    code = "invalid_api_key"


class Overloaded(MidflightError):
    """Admission is closed for now; retry after the named time."""

    cost = Cost.REQUEST
    status = 429
    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class IdempotencyConflict(RequestRejected):
    """An idempotency key that stands for another request already."""

    status = 409
    code = "idempotency_conflict"


class SessionClosed(RequestRejected):
    status = 410
    code = "session_closed"


class UnknownLease(RequestRejected):
    """A lease that was never given, or has ended."""

    status = 409
    code = "unknown_lease"


class OutOfTurn(RequestRejected):
    """A batch was asked for a version whose turn has passed."""

    status = 409
    code = "out_of_turn"


class NothingToClaim(RequestRejected):
    """Claims were asked of a run whose rollouts are not claimed."""

    status = 404
    code = "nothing_to_claim"


class EngineRefused(RequestRejected):
    """An engine that wants to join and could not serve the run, or is none."""

    status = 422
    code = "engine_refused"


class MemberConflict(RequestRejected):
    """What is asked of an engine's membership does not go with what it is now."""

    status = 409
    code = "member_conflict"


class SentAway(MemberConflict):
    """An engine that left this run wants to join it again."""

    code = "engine_sent_away"


class UnknownEngine(RequestRejected):
    status = 404
    code = "engine_not_found"


class RewardFixed(RequestRejected):
    """Another reward was given before: a reward is given once, and again only as the same."""

    status = 409
    code = "reward_fixed"


class BatchCorrupt(RequestRejected):
    """Bytes that are not a packed batch, or one whose parts contradict each other."""

    code = "batch_corrupt"


# --- Blamed on an engine --------------------------------------------------------------------------


class EngineError(MidflightError):
    cost = Cost.REQUEST
    blame = Blame.ENGINE
    status = 503
    code = "engine_error"


class EngineUnavailable(EngineError):
    """The engine died, was cut off or answers nonsense. Its requests are resumed elsewhere from
    their tokens.
    """

    code = "engine_unavailable"
    retryable = True


class PauseIgnored(EngineError):
    """An engine said it was paused and kept producing tokens."""

    code = "pause_ignored"


class NotSupported(EngineError):
    """The engine lacks the capability that was asked for."""

    status = 400
    code = "not_supported"


class WeightsCorrupt(EngineError):
    """Bytes of a version do not match its manifest: it is not served (I7)."""

    code = "weights_corrupt"


class SlotBusy(MidflightError):
    """Every slot holds a version that may still be fetched. Unblocked by its release, at the end of
    a handover.
    """

    cost = Cost.STEP
    status = 409
    code = "slot_busy"
    retryable = True


class NoEngine(EngineError):
    """No engine takes the request, and none is known to come."""

    code = "no_engine"
    retryable = True


class RequestTimeout(EngineError):
    """An engine took the request, and the answer stood still for too long."""

    status = 504
    code = "request_timeout"


# --- Blamed on an environment: costs a rollout, never a reward (I10) ------------------------------


class EnvironmentFailed(MidflightError):
    cost = Cost.ROLLOUT
    blame = Blame.ENVIRONMENT


class UntrackedUnavailable(EnvironmentFailed):
    """A judge or simulated user, asked by `client.untracked()`, gave no answer: without it nothing
    can be scored.
    """


class AgentFailed(EnvironmentFailed):
    """An agent failed where its exception could not come from: another process, or a thread. The
    message begins with the exception's class; `trace` is its traceback."""

    def __init__(self, message: str, *, trace: str | None = None) -> None:
        super().__init__(message)
        self.trace = trace


class SandboxLost(EnvironmentFailed):
    """There is no sandbox, or none any more, through no fault of the program that was to run in
    it.
    """

    blame = Blame.INFRASTRUCTURE


class AgentLost(EnvironmentFailed):
    """The process of an agent ended through no fault of the agent's, which begins again
    elsewhere.
    """


class BadReward(EnvironmentFailed):
    """A reward that is not a finite number or `None`."""


class TaskFieldMissing(EnvironmentFailed):
    """A task lacks a field that its environment reads."""


class TooManyProcesses(EnvironmentFailed):
    """An agent started more processes than a rollout may."""


class RolloutTimeout(EnvironmentFailed):
    """The agent of a rollout took too long by itself, or the whole rollout did, and it was
    ended.
    """


class RolloutAbandoned(RolloutTimeout):
    """The agent of a rollout that was ended lives on: it did not end when it was cancelled."""


# --- Blamed on the configuration or the data: ends the run before it starts -----------------------


class ConfigError(MidflightError):
    blame = Blame.CONFIG
    status = 400
    code = "invalid_config"


class SandboxUnavailable(ConfigError):
    """Nothing here can isolate a program, or what could is down, before a run begins."""


class ModelNotFound(ConfigError):
    """No model at the given place, or not one that can be loaded."""


class CheckpointCorrupt(ConfigError):
    """A checkpoint is incomplete or its hashes do not match."""


class StoreCorrupt(ConfigError):
    """A store's file is damaged, or was written by another schema or another run."""


class NoRun(ConfigError):
    """A folder that was given as a run, and is none."""

    code = "no_run"


class RunGone(ConfigError):
    """The folder of a run was deleted or moved while it was looked at."""

    status = 410
    code = "run_gone"


class StoreNewer(StoreCorrupt):
    """A store that a later version of Midflight wrote."""

    code = "store_newer"


# --- Costs a step ---------------------------------------------------------------------------------


class StepSkipped(MidflightError):
    """Loss or gradient was not finite; the step is skipped and counted."""

    cost = Cost.STEP


class RunFailed(MidflightError):
    """Ends the run: the first error of a budget that is spent, or a part that could not be
    restarted.
    """


class StoreFailed(MidflightError):
    """The store could not write: disk full, no permission, or slower than what is recorded."""

    code = "store_failed"


class Stopping(MidflightError):
    """The run is ending, and with it a wait that would not have ended otherwise."""

    cost = Cost.REQUEST
    status = 503
    code = "stopping"


class DiskFull(MidflightError):
    """There was no room where something had to be written."""

    code = "disk_full"


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_ROOM_TEXTS = tuple(f"(os error {number})" for number in sorted(_NO_ROOM))
"""Libraries that write by themselves say it so."""


def disk_full(error: BaseException) -> DiskFull | None:
    """What it means where it says that a disk is full, itself or by its causes; none where it does
    not.
    """
    seen: BaseException | None = error
    while seen is not None:
        if (isinstance(seen, OSError) and seen.errno in _NO_ROOM) or any(
            text in str(seen) for text in _NO_ROOM_TEXTS
        ):
            where = f" {seen.filename}" if isinstance(seen, OSError) and seen.filename else ""
            why = seen.strerror if isinstance(seen, OSError) and seen.strerror else str(seen)
            return DiskFull(f"Writing{where}: {why}; free some space and go on with --resume.")
        seen = seen.__cause__ or seen.__context__
    return None


def first_error(error: BaseException) -> BaseException:
    """The first leaf of a tree of exception groups: the error that ended a task group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def every_error(error: BaseException) -> Iterator[BaseException]:
    """All leaves of such a tree."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("tuple[BaseException, ...]", error.exceptions):
            yield from every_error(inner)
    else:
        yield error


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: ` Did you mean 'x'?`, or the known words if none is near."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(options)}."
