"""All errors that are meant for users, with their cost and their blame.

The cost of an error is a request, a rollout, a step or the run. The boundary where an error is
found sets the blame. Messages name the action and the value, and end with the remedy.
`wire.edge.fault_of` turns an error into HTTP.
"""

import difflib
import errno
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, cast


class Cost(StrEnum):
    """The cost of an error."""

    REQUEST = "request"
    ROLLOUT = "rollout"
    STEP = "step"
    RUN = "run"


class Blame(StrEnum):
    """The part that is at fault."""

    REQUEST = "request"
    AGENT = "agent"
    ENVIRONMENT = "environment"
    ENGINE = "engine"
    CONFIG = "config"
    INFRASTRUCTURE = "infrastructure"


class MidflightError(Exception):
    """The base of all errors that are meant for users. Subclasses set the cost, the blame and the
    HTTP status and code.
    """

    cost: ClassVar[Cost] = Cost.RUN
    blame: ClassVar[Blame] = Blame.INFRASTRUCTURE
    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False


# --- Blamed on a request: the server and the run go on --------------------------------------------


class RequestRejected(MidflightError):
    """The request can never succeed as it is. `param` is the client's name of the field at fault."""

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
    """The session does not keep this response, item or conversation."""

    status = 404
    code = "not_found"


class NotOffered(RequestRejected):
    """A method of an SDK that has no meaning here."""

    status = 404
    code = "not_offered"


class UnknownSession(RequestRejected):
    status = 404
    code = "session_not_found"


class Unauthorized(RequestRejected):
    status = 401
    code = "invalid_api_key"


class Overloaded(MidflightError):
    """Admission is closed for now. The client may retry after `retry_after_seconds`."""

    cost = Cost.REQUEST
    status = 429
    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class IdempotencyConflict(RequestRejected):
    """The idempotency key already belongs to another request."""

    status = 409
    code = "idempotency_conflict"


class SessionClosed(RequestRejected):
    status = 410
    code = "session_closed"


class UnknownLease(RequestRejected):
    """The lease was never given, or has ended."""

    status = 409
    code = "unknown_lease"


class OutOfTurn(RequestRejected):
    """A trainer's call came out of turn, such as for a batch of a version that has passed."""

    status = 409
    code = "out_of_turn"


class NothingToClaim(RequestRejected):
    """A worker wanted to claim a rollout, but the run's rollouts are not claimed."""

    status = 404
    code = "nothing_to_claim"


class EngineRefused(RequestRejected):
    """The engine wants to join but cannot serve the run, or it is no engine."""

    status = 422
    code = "engine_refused"


class MemberConflict(RequestRejected):
    """The request for an engine's membership does not fit its present state."""

    status = 409
    code = "member_conflict"


class SentAway(MemberConflict):
    """The engine left this run and wants to join it again."""

    code = "engine_sent_away"


class UnknownEngine(RequestRejected):
    status = 404
    code = "engine_not_found"


class RewardFixed(RequestRejected):
    """Another reward was given before. A reward is given once; only the same reward may be given
    again.
    """

    status = 409
    code = "reward_fixed"


class BatchCorrupt(RequestRejected):
    """The bytes are no packed batch, or the parts of the batch contradict each other."""

    code = "batch_corrupt"


# --- Blamed on an engine --------------------------------------------------------------------------


class EngineError(MidflightError):
    cost = Cost.REQUEST
    blame = Blame.ENGINE
    status = 503
    code = "engine_error"


class EngineUnavailable(EngineError):
    """The engine died, is unreachable or sent a senseless answer. Its requests are resumed
    elsewhere from their tokens.
    """

    code = "engine_unavailable"
    retryable = True


class PauseIgnored(EngineError):
    """The engine reported a pause but kept producing tokens."""

    code = "pause_ignored"


class NotSupported(EngineError):
    """The engine lacks the capability that was asked for."""

    status = 400
    code = "not_supported"


class WeightsCorrupt(EngineError):
    """The bytes of a version do not match its manifest, so it is not served (I7)."""

    code = "weights_corrupt"


class SlotBusy(MidflightError):
    """Every slot holds a version that may still be fetched. A slot is released at the end of a
    handover.
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
    """An engine took the request, but the answer made no progress for too long."""

    status = 504
    code = "request_timeout"


# --- Blamed on an environment: costs a rollout, never a reward (I10) ------------------------------


class EnvironmentFailed(MidflightError):
    cost = Cost.ROLLOUT
    blame = Blame.ENVIRONMENT


class UntrackedUnavailable(EnvironmentFailed):
    """A judge or simulated user that was asked by `client.untracked()` gave no answer. Without the
    answer nothing can be scored.
    """


class AgentFailed(EnvironmentFailed):
    """An agent failed in another process or in a thread, from where its exception cannot be raised
    here. The message begins with the exception's class; `trace` is its traceback.
    """

    def __init__(self, message: str, *, trace: str | None = None) -> None:
        super().__init__(message)
        self.trace = trace


class SandboxLost(EnvironmentFailed):
    """The sandbox could not be made or was lost, through no fault of the program in it."""

    blame = Blame.INFRASTRUCTURE


class AgentLost(EnvironmentFailed):
    """The process of an agent ended through no fault of the agent's. The agent starts over
    elsewhere.
    """


class BadReward(EnvironmentFailed):
    """The reward is neither a finite number nor `None`."""


class TaskFieldMissing(EnvironmentFailed):
    """The task lacks a field that its environment reads."""


class TooManyProcesses(EnvironmentFailed):
    """The agent started more processes than a rollout may have."""


class RolloutTimeout(EnvironmentFailed):
    """The rollout was ended because its agent, or the whole rollout, took too long."""


class RolloutAbandoned(RolloutTimeout):
    """The rollout was ended, but its agent still runs, because it ignored its cancellation."""


# --- Blamed on the configuration or the data: ends the run before it starts -----------------------


class ConfigError(MidflightError):
    blame = Blame.CONFIG
    status = 400
    code = "invalid_config"


class SandboxUnavailable(ConfigError):
    """Before a run begins, no sandbox is installed here, or the sandbox service is down."""


class ModelNotFound(ConfigError):
    """There is no model at the given place, or it cannot be loaded."""


class CheckpointCorrupt(ConfigError):
    """The checkpoint is incomplete, or its hashes do not match."""


class StoreCorrupt(ConfigError):
    """The store's file is damaged, or was written by another schema or another run."""


class TokensRemoved(StoreCorrupt):
    """The tokens of a rollout were removed by `run.keep_trajectories`."""

    code = "tokens_removed"


class NoRun(ConfigError):
    """The folder is not that of a run."""

    code = "no_run"


class RunGone(ConfigError):
    """The folder of a run was deleted or moved while it was read."""

    status = 410
    code = "run_gone"


class StoreNewer(StoreCorrupt):
    """A later version of Midflight wrote the store."""

    code = "store_newer"


# --- Costs a step ---------------------------------------------------------------------------------


class StepSkipped(MidflightError):
    """The loss or the gradient was not finite. The step is skipped and counted."""

    cost = Cost.STEP


class RunFailed(MidflightError):
    """The run ends, because a budget of failures is spent or a part could not be restarted. The
    cause is the first error.
    """


class StoreFailed(MidflightError):
    """The store could not write: the disk is full, permission is missing, or it is slower than the
    records come.
    """

    code = "store_failed"


class Stopping(MidflightError):
    """The run is ending. So a wait ends that would not have ended otherwise."""

    cost = Cost.REQUEST
    status = 503
    code = "stopping"


class DiskFull(MidflightError):
    """A file could not be written because the disk is full."""

    code = "disk_full"


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_ROOM_TEXTS = tuple(f"(os error {number})" for number in sorted(_NO_ROOM))
"""Texts of the same errors in libraries that write files themselves."""


def disk_full(error: BaseException) -> DiskFull | None:
    """The error as `DiskFull`, if it or one of its causes says that a disk is full; else `None`."""
    seen: BaseException | None = error
    while seen is not None:
        if _says_full(seen):
            where = f" {seen.filename}" if isinstance(seen, OSError) and seen.filename else ""
            why = seen.strerror if isinstance(seen, OSError) and seen.strerror else str(seen)
            return DiskFull(f"Writing{where}: {why}; free some space and go on with --resume.")
        seen = seen.__cause__ or seen.__context__
    return None


def _says_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return True
    return any(text in str(error) for text in _NO_ROOM_TEXTS)


@contextmanager
def naming_file(path: Path) -> Generator[None]:
    """Names the file in errors of the disk: that of a write says nothing of it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def first_error(error: BaseException) -> BaseException:
    """The first leaf of a tree of exception groups. This is the error that ended a task group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def every_error(error: BaseException) -> Iterator[BaseException]:
    """All leaves of a tree of exception groups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("tuple[BaseException, ...]", error.exceptions):
            yield from every_error(inner)
    else:
        yield error


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: ` Did you mean 'x'?`, or the known words if none is near."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(options)}."
