"""The multiplexed wire between a gateway and an engine: one WebSocket per client, one message per
decode step.

Frames are msgpack. What is per token travels as one raw little-endian array of rows. Rows to score
and their scores travel over HTTP: msgpack there, raw little-endian float32 back.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from midflight.engines.streams import StepOutput, TokenRow, Top
from midflight.errors import (
    EngineError,
    EngineUnavailable,
    MidflightError,
    Overloaded,
    RequestRejected,
)
from midflight.types import (
    Capabilities,
    Chunk,
    Finish,
    Float32,
    GenerateRequest,
    Int32,
    Segment,
    Version,
)

PREFIX: Final = "/engine/v1"
"""Of the routes between rollout process and engine."""
STREAM_PATH: Final = PREFIX + "/stream"
END_OF_INTS: Final = 2**31
"""Of versions and token ids: each has 32 bits in a row."""
_ROW: Final = struct.Struct("<iifi")
"""One token on the wire: the handle of its request, its id, its log-probability, the version of its
oldest key.
"""
_ROW_DTYPE: Final = np.dtype(
    [("handle", "<i4"), ("token_id", "<i4"), ("logprob", "<f4"), ("kv_version", "<i4")]
)


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


class StepFrame(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """What one step did for this client. Times are CLOCK_MONOTONIC seconds of the engine's machine;
    it is sent as the step ends.
    """

    version: Version
    rows: bytes
    """One `_ROW` for each token; a request that got several has them in this order."""
    finishes: tuple[tuple[int, Finish], ...]
    started: float
    ended: float
    num_running: int
    top_ids: bytes = b""
    """int32, as many for each token, -1 where a request asked for fewer than another; absent where
    nobody asks
    """
    top_logprobs: bytes = b""
    """float32, one for each of `top_ids`"""
    kept: bytes = b""
    """What truncation kept for each token, end to end; absent where nobody asks"""
    kept_lengths: bytes = b""
    """int32, of each token's part of `kept`; -1 where its request did not ask"""
    attested: tuple[tuple[int, tuple[Segment, ...]], ...] = ()
    """Of requests among `finishes`: `Chunk.attested`, where the engine has it"""
    experts: tuple[tuple[int, bytes], ...] = ()
    """`Chunk.experts`, likewise"""


class Rejected(msgspec.Struct, tag="rejected", frozen=True, omit_defaults=True):
    """A request ended in an error, named by its code: refused, or lost (`engine_unavailable`).
    Others go on.
    """

    handle: int
    code: str
    message: str
    param: str | None
    retry_after_seconds: int | None = None
    """Of an engine that is full for now."""


ClientFrame = Submit | Abort
EngineFrame = Hello | StepFrame | Rejected

encode = msgspec.msgpack.Encoder().encode
decode_client_frames = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
"""A message of a client holds all that it had to say at that moment. Each frame is read by
itself.
"""
decode_engine_frame = msgspec.msgpack.Decoder(EngineFrame).decode
_decode_client_frame = msgspec.msgpack.Decoder(ClientFrame).decode


class _OfRequest(msgspec.Struct, frozen=True):
    """What every frame of a client has."""

    handle: int


_decode_handle = msgspec.msgpack.Decoder(_OfRequest).decode


def pack_client_frame(frame: ClientFrame) -> msgspec.Raw:
    """`RequestRejected` where it holds a number that the wire cannot carry."""
    try:
        return msgspec.Raw(encode(frame))
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestRejected(
            f"sending a request to an engine: {error}. Send smaller numbers."
        ) from error


def client_frame(raw: msgspec.Raw) -> ClientFrame | Rejected:
    """A frame of a client, or the answer to one that cannot be read. `msgspec.DecodeError` where
    not even its number can.
    """
    try:
        return _decode_client_frame(raw)
    except msgspec.DecodeError as error:
        handle = _decode_handle(raw).handle
        return Rejected(
            handle,
            RequestRejected.code,
            f"reading a request: {error}. Run gateway and engine of one version.",
            None,
        )


def pack_step(step: StepOutput, numbers: dict[int, int]) -> StepFrame:
    """`numbers` gives the client's number of each of the engine's handles."""
    rows = np.empty(len(step.handles), dtype=_ROW_DTYPE)
    rows["handle"] = list(map(numbers.__getitem__, step.handles.tolist()))
    rows["token_id"], rows["logprob"], rows["kv_version"] = (
        step.token_ids,
        step.logprobs,
        step.kv_versions,
    )
    return StepFrame(
        version=step.version,
        rows=rows.tobytes(),
        finishes=tuple([(numbers[h], finish) for h, _, finish in step.finishes])
        if step.finishes
        else (),
        started=step.started,
        ended=step.ended,
        num_running=step.num_running,
        top_ids=step.top_ids.astype("<i4").tobytes() if step.top_ids.size else b"",
        top_logprobs=step.top_logprobs.astype("<f4").tobytes() if step.top_ids.size else b"",
        kept=b"".join(filter(None, step.kept)),
        kept_lengths=_lengths(step.kept),
        experts=tuple([(numbers[h], experts) for h, experts in step.experts])
        if step.experts
        else (),
    )


def pack_chunks(
    chunks: Sequence[tuple[int, Chunk]], *, started: float, ended: float, num_running: int
) -> StepFrame:
    """Chunks of one version, each with its client's number. A number may occur several times; its
    chunks are in order.
    """
    rows = [
        (h, i, p, c.kv_version)
        for h, c in chunks
        for i, p in zip(c.token_ids, c.logprobs, strict=True)
    ]
    width = max((len(top) for _, c in chunks for top in c.top_logprobs), default=0)
    tops = (
        [
            _widened(top, width)
            for _, c in chunks
            for top in c.top_logprobs or ((),) * len(c.token_ids)
        ]
        if width
        else []
    )
    has_kept = any(c.kept for _, c in chunks)
    return StepFrame(
        version=chunks[0][1].version,
        rows=np.array(rows, dtype=_ROW_DTYPE).tobytes(),
        finishes=tuple((h, c.finish) for h, c in chunks if c.finish is not None),
        started=started,
        ended=ended,
        num_running=num_running,
        top_ids=np.fromiter((i for top in tops for i, _ in top), dtype="<i4").tobytes(),
        top_logprobs=np.fromiter((p for top in tops for _, p in top), dtype="<f4").tobytes(),
        attested=tuple((h, c.attested) for h, c in chunks if c.attested),
        kept=b"".join(left for _, c in chunks for left in c.kept),
        kept_lengths=_lengths(
            [left for _, c in chunks for left in c.kept or [None] * len(c.token_ids)]
        )
        if has_kept
        else b"",
        experts=tuple((h, c.experts) for h, c in chunks if c.experts),
    )


def can_carry(chunk: Chunk) -> bool:
    """Whether a chunk fits the columns: their lengths agree, and what should be an int32 is one."""
    num = len(chunk.token_ids)
    aligned = (
        len(chunk.logprobs) == num
        and len(chunk.kept) in (0, num)
        and (not chunk.top_logprobs or (len(chunk.top_logprobs) == num and all(chunk.top_logprobs)))
    )
    ints = (
        chunk.version,
        chunk.kv_version,
        *chunk.token_ids,
        *(i for top in chunk.top_logprobs for i, _ in top),
    )
    spans = (i for s in chunk.attested for i in (s.version, s.kv_version, s.start, s.end))
    return aligned and all(0 <= i < END_OF_INTS for i in (*ints, *spans))


def step_rows(frame: StepFrame) -> list[TokenRow]:
    """(handle, token, log-probability, version of its oldest key) of each token."""
    return list(_ROW.iter_unpack(frame.rows))


def step_tops(frame: StepFrame) -> list[Top]:
    """The alternatives of each token; empty where nobody asks."""
    if not frame.top_ids:
        return []
    ids = np.frombuffer(frame.top_ids, dtype="<i4").tolist()
    logprobs = np.frombuffer(frame.top_logprobs, dtype="<f4").tolist()
    pairs = list(zip(ids, logprobs, strict=True))
    width = len(pairs) * _ROW.size // len(frame.rows)
    return [
        tuple(pair for pair in pairs[at : at + width] if pair[0] >= 0) or None
        for at in range(0, len(pairs), width)
    ]


def step_kept(frame: StepFrame) -> list[bytes | None]:
    """What truncation kept for each token; empty where nobody asks."""
    lengths = _int32(frame.kept_lengths)
    ends = np.cumsum(lengths.clip(min=0)).tolist()
    return [
        None if length < 0 else frame.kept[end - length : end]
        for length, end in zip(lengths.tolist(), ends, strict=True)
    ]


def _lengths(kept: Sequence[bytes | None]) -> bytes:
    return np.fromiter((-1 if left is None else len(left) for left in kept), dtype="<i4").tobytes()


def _widened(top: tuple[tuple[int, float], ...], width: int) -> tuple[tuple[int, float], ...]:
    return top + ((-1, 0.0),) * (width - len(top))


def error_from(
    code: str, message: str, param: str | None, retry_after_seconds: int | None = None
) -> MidflightError:
    """The error that the other side raised, by its code."""
    kind = next((k for k in _kinds(MidflightError) if k.code == code), EngineError)
    if issubclass(kind, Overloaded) and retry_after_seconds is not None:
        return kind(message, retry_after_seconds=retry_after_seconds)
    return kind(message, param=param) if issubclass(kind, RequestRejected) else kind(message)


def _kinds(kind: type[MidflightError]) -> Iterator[type[MidflightError]]:
    """Breadth first: where subclasses inherit a code, the class that defines it comes first."""
    level = [kind]
    while level:
        yield from level
        level = [below for above in level for below in above.__subclasses__()]


class Rows(msgspec.Struct, frozen=True):
    """Row r has the tokens [row_offsets[r], row_offsets[r + 1])."""

    token_ids: bytes
    """int32"""
    row_offsets: bytes
    """int32, one more than there are rows"""
    temperature: float


_decode_rows = msgspec.msgpack.Decoder(Rows).decode


def encode_rows(token_ids: Int32, row_offsets: Int32, *, temperature: float) -> bytes:
    return encode(
        Rows(token_ids.astype("<i4").tobytes(), row_offsets.astype("<i4").tobytes(), temperature)
    )


def decode_rows(data: bytes) -> tuple[Int32, Int32, float]:
    """The inverse; `RequestRejected` for other bytes. What the numbers say is not looked at."""
    try:
        rows = _decode_rows(data)
        return _int32(rows.token_ids), _int32(rows.row_offsets), rows.temperature
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestRejected(
            f"reading rows to score: {error}. Send the bytes of `encode_rows` whole."
        ) from error


def encode_scores(scores: Float32) -> bytes:
    return scores.astype("<f4").tobytes()


def decode_scores(data: bytes, *, num_tokens: int) -> Float32:
    """The inverse; `EngineUnavailable` where there is not one for each token."""
    if len(data) != 4 * num_tokens:
        raise EngineUnavailable(
            f"reading an engine's scores: {len(data)} bytes for {num_tokens} tokens. Check that "
            "the URL is an engine's."
        )
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


def _int32(column: bytes) -> Int32:
    return np.frombuffer(column, dtype="<i4").astype(np.int32)
