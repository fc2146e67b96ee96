"""What every dialect offers the HTTP shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from midflight.gateway.answers.plan import Job
from midflight.gateway.dialects.faults import Fault, fault_of
from midflight.gateway.sessions.call import Answer, CompletionCall, Event
from midflight.text import Tokenizer
from midflight.types import Json


@dataclass(frozen=True, slots=True)
class Reply:
    """What answers of a request are written with."""

    job: Job
    model: str
    created: int
    """Unix seconds."""
    tokenizer: Tokenizer


class Exchange(Protocol):
    """One request, parsed: the call it means, and how its answer is written."""

    @property
    def call(self) -> CompletionCall: ...

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        """The body of an answer that does not stream."""
        ...

    def opening(self, reply: Reply) -> Iterable[Json]:
        """Frames of a stream before the first event."""
        ...

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        """Frames for one event of a stream."""
        ...

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        """Frames after the last answer, before `[DONE]` where the dialect has it."""
        ...


def told_alone(exchange: Exchange, fault: Fault) -> Json:
    """The error is the frame."""
    return fault.body


@dataclass(frozen=True, slots=True)
class Dialect:
    """A wire format as a route: where it is, how a body is read, and how its errors and its stream look."""

    path: str
    exchange: Callable[[bytes], Exchange]
    """Parses a body; raises `RequestRejected`."""
    fault: Callable[[BaseException], Fault] = fault_of
    """An error as this dialect's clients read it."""
    broken: Callable[[Exchange, Fault], Json] = told_alone
    """The last frame of a stream that fails after it began."""
    named_events: bool = False
    """Frames are preceded by an `event:` line with their `type`, and no `[DONE]` ends the stream."""
