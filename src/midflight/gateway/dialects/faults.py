"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}` with the status of `errors`."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from midflight.errors import Blame, MidflightError, Overloaded, RequestRejected
from midflight.types import Json

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
"""What a retryable refusal advises; clients back off from there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One error on the wire."""

    status: int
    body: Json
    headers: tuple[tuple[bytes, bytes], ...] = ()


def fault_of(error: BaseException) -> Fault:
    """An error that is not ours says nothing of its inside: its text is for the log."""
    if not isinstance(error, MidflightError):
        return Fault(500, _body("the gateway failed on this request; its log has the traceback.", "internal_error", None, "internal_error"))
    param = error.param if isinstance(error, RequestRejected) else None
    return Fault(error.status, _body(str(error), _kind(error), param, error.code), retry_headers(error))


def retry_headers(error: BaseException) -> tuple[tuple[bytes, bytes], ...]:
    """When to try again, and that it is no use where SDKs would: they retry a conflict, which stays one."""
    if isinstance(error, Overloaded):
        return ((b"retry-after", b"%d" % error.retry_after_seconds),)
    if isinstance(error, MidflightError) and error.retryable:
        return ((b"retry-after", b"%d" % RETRY_AFTER_SECONDS),)
    if isinstance(error, MidflightError) and error.status == 409:
        return ((b"x-should-retry", b"false"),)
    return ()


def plain_fault(status: int, message: str, code: str) -> Fault:
    """For what never reached a handler: an unknown path, a wrong method, a body too large."""
    return Fault(status, _body(message, "invalid_request_error", None, code))


def _kind(error: MidflightError) -> str:
    if error.status == 429:
        return "rate_limit_error"
    if error.blame is Blame.REQUEST or error.status < 500:
        return "invalid_request_error"
    return "internal_error" if error.status == 500 else "service_unavailable"


def _body(message: str, kind: str, param: str | None, code: str) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def log_unexpected(error: BaseException) -> None:
    """A traceback for what is not ours; ours say all in their message."""
    if not isinstance(error, MidflightError):
        log.error("a request failed", exc_info=error)
