"""The multiplexed wire between a gateway and an engine: one WebSocket per client, one message per decode step.

Frames are msgpack. What is per token travels as raw little-endian arrays of one entry per request of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from midflight.engines.output import StepOutput, TokenRow
from midflight.errors import EngineError, MidflightError, RequestRejected
from midflight.types import Capabilities, Finish, GenerateRequest, Version

STREAM_PATH: Final = "/engine/v1/stream"


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """From the client, which numbers its requests."""

    handle: int
    request: GenerateRequest


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """From the client: it wants no more of this request."""

    handle: int


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The engine's first message."""

    name: str
    capabilities: Capabilities


class Step(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """What one step did for this client. Times are CLOCK_MONOTONIC seconds of the engine's machine."""

    version: Version
    handles: bytes
    """int32"""
    token_ids: bytes
    """int32"""
    logprobs: bytes
    """float32"""
    kv_versions: bytes
    """int32"""
    finishes: tuple[tuple[int, Finish], ...]
    started: float
    ended: float
    num_running: int
    top_ids: bytes = b""
    """int32, as many for each token, -1 where a request asked for fewer than another; absent where nobody asks"""
    top_logprobs: bytes = b""
    """float32, one for each of `top_ids`"""


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """The engine refused a request; others go on."""

    handle: int
    code: str
    message: str
    param: str | None


ClientFrame = Submit | Abort
EngineFrame = Hello | Step | Rejected

encode = msgspec.msgpack.Encoder().encode
_client_decoder = msgspec.msgpack.Decoder(list[ClientFrame])
_engine_decoder = msgspec.msgpack.Decoder(EngineFrame)


def decode_client_frames(data: bytes) -> list[ClientFrame]:
    """A message of a client holds all that it had to say at that moment."""
    return _client_decoder.decode(data)


def decode_engine_frame(data: bytes) -> EngineFrame:
    return _engine_decoder.decode(data)


def pack_step(step: StepOutput, numbers: dict[int, int]) -> Step:
    """`numbers` gives the client's number of each of the engine's handles."""
    return Step(
        version=step.version,
        handles=np.array([numbers[h] for h in step.handles.tolist()], dtype="<i4").tobytes(),
        token_ids=step.token_ids.astype("<i4").tobytes(),
        logprobs=step.logprobs.astype("<f4").tobytes(),
        kv_versions=step.kv_versions.astype("<i4").tobytes(),
        finishes=tuple((numbers[h], finish) for h, _, finish in step.finishes),
        started=step.started,
        ended=step.ended,
        num_running=step.num_running,
        top_ids=step.top_ids.astype("<i4").tobytes(),
        top_logprobs=step.top_logprobs.astype("<f4").tobytes(),
    )


def step_rows(frame: Step) -> list[TokenRow]:
    """(handle, token, log-probability, version of its oldest key, alternatives) of each request, without arrays between."""
    handles, tokens, kv = (_ints(column) for column in (frame.handles, frame.token_ids, frame.kv_versions))
    logprobs = _floats(frame.logprobs)
    if not frame.top_ids:
        return [(h, t, p, k, None) for h, t, p, k in zip(handles, tokens, logprobs, kv, strict=True)]
    pairs = list(zip(_ints(frame.top_ids), _floats(frame.top_logprobs), strict=True))
    width = len(pairs) // len(handles)
    tops = [tuple(pair for pair in pairs[at : at + width] if pair[0] >= 0) or None for at in range(0, len(pairs), width)]
    return list(zip(handles, tokens, logprobs, kv, tops, strict=True))


def _ints(column: bytes) -> list[int]:
    return np.frombuffer(column, dtype="<i4").tolist()


def _floats(column: bytes) -> list[float]:
    return np.frombuffer(column, dtype="<f4").tolist()


def error_from(code: str, message: str, param: str | None) -> MidflightError:
    """The error that the other side raised, by its code."""
    kind = next((k for k in _kinds(MidflightError) if k.code == code), EngineError)
    return kind(message, param=param) if issubclass(kind, RequestRejected) else kind(message)


def _kinds(kind: type[MidflightError]) -> Iterator[type[MidflightError]]:
    """Breadth first: where subclasses inherit a code, the class that defines it comes first."""
    level = [kind]
    while level:
        yield from level
        level = [below for above in level for below in above.__subclasses__()]
