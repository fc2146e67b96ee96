"""The multiplexed wire between a gateway and an engine: one WebSocket per client, one message per
decode step.

Frames are msgpack. Data per token travels as one raw little-endian array of rows. Rows to score and
their scores travel over HTTP, as msgpack one way and as raw little-endian float32 back.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    KeyRuns,
    Segment,
    Version,
)
from midflight.types.token_ids import SharedIds, unpacked

PREFIX: Final = "/engine/v1"
"""The beginning of the routes between rollout process and engine."""
STREAM_PATH: Final = PREFIX + "/stream"
END_OF_INTS: Final = 2**31
"""The end of versions and token ids, each of which has 32 bits in a row."""
_ROW: Final = struct.Struct("<iifi")
"""One token on the wire: the handle of its request, its id, its log-probability, the version of its
oldest key.
"""
_ROW_DTYPE: Final = np.dtype(
    [("handle", "<i4"), ("token_id", "<i4"), ("logprob", "<f4"), ("kv_version", "<i4")]
)


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """The client sends a request. It numbers its requests."""

    handle: int
    request: GenerateRequest


class _SubmitPacked(msgspec.Struct, tag="submit_packed", frozen=True):
    """A request whose ids are shared with others. They travel as little-endian int32."""

    handle: int
    input_ids: bytes
    request: GenerateRequest
    """The request without its ids."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """The client wants no more of this request."""

    handle: int


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The engine's first message."""

    name: str
    capabilities: Capabilities


class StepFrame(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """The tokens and ends of one step for this client. Times are CLOCK_MONOTONIC seconds of the
    engine's machine. The frame is sent as the step ends.
    """

    version: Version
    rows: bytes
    """One `_ROW` for each token. The tokens of one request are in their order."""
    finishes: tuple[tuple[int, Finish], ...]
    started: float
    ended: float
    num_running: int
    top_ids: bytes = b""
    """int32, equally many for each token, filled up with -1 if a request asked for fewer than
    another. Absent if no request asks.
    """
    top_logprobs: bytes = b""
    """float32, one for each of `top_ids`."""
    kept: bytes = b""
    """The ids that truncation kept for each token, end to end. Absent if no request asks."""
    kept_lengths: bytes = b""
    """int32, the length of each token's part of `kept`, or -1 where its request did not ask."""
    attested: tuple[tuple[int, tuple[Segment, ...]], ...] = ()
    """`Chunk.attested` of requests among `finishes`, if the engine has it."""
    experts: tuple[tuple[int, bytes], ...] = ()
    """`Chunk.experts` of requests among `finishes`, if the engine has it."""
    key_runs: tuple[tuple[int, KeyRuns], ...] = ()
    """`Chunk.key_runs` of requests whose first token here it belongs to, if the engine has it."""


class Rejected(msgspec.Struct, tag="rejected", frozen=True, omit_defaults=True):
    """A request ended in an error, which the code names: it was refused, or lost
    (`engine_unavailable`). Other requests go on.
    """

    handle: int
    code: str
    message: str
    param: str | None
    retry_after_seconds: int | None = None
    """Present where the engine is full for now."""


ClientFrame = Submit | Abort
EngineFrame = Hello | StepFrame | Rejected

encode = msgspec.msgpack.Encoder().encode
decode_client_frames = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
"""A message of a client holds all frames that waited at that moment. Each frame is read by itself."""
decode_engine_frame = msgspec.msgpack.Decoder(EngineFrame).decode
_decode_client_frame = msgspec.msgpack.Decoder(ClientFrame | _SubmitPacked).decode


class _RequestFrame(msgspec.Struct, frozen=True):
    """The field that every frame of a client has."""

    handle: int


_decode_handle = msgspec.msgpack.Decoder(_RequestFrame).decode


def pack_client_frame(frame: ClientFrame) -> msgspec.Raw:
    """Raises `RequestRejected` if it holds a number that the wire cannot carry."""
    sent: ClientFrame | _SubmitPacked = frame
    if isinstance(frame, Submit) and isinstance(frame.request.input_ids, SharedIds):
        sent = _SubmitPacked(
            frame.handle, frame.request.input_ids.packed, replace(frame.request, input_ids=())
        )
    try:
        return msgspec.Raw(encode(sent))
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestRejected(
            f"sending a request to an engine: {error}. Send smaller numbers."
        ) from error


def client_frame(raw: msgspec.Raw) -> ClientFrame | Rejected:
    """A frame of a client, or the answer to a frame that cannot be read. Raises
    `msgspec.DecodeError` if not even its number can be read.
    """
    try:
        frame = _decode_client_frame(raw)
        if isinstance(frame, _SubmitPacked):
            request = replace(frame.request, input_ids=unpacked(frame.input_ids))
            return Submit(frame.handle, request)
        return frame
    except (msgspec.DecodeError, struct.error) as error:
        handle = _decode_handle(raw).handle
        return Rejected(
            handle,
            RequestRejected.code,
            f"reading a request: {error}. Run gateway and engine of one version.",
            None,
        )


def pack_step(step: StepOutput, numbers: dict[int, int]) -> StepFrame:
    """The frame of a step. `numbers` gives the client's number of each of the engine's handles."""
    rows = np.empty(len(step.handles), dtype=_ROW_DTYPE)
    rows["handle"] = [numbers[handle] for handle in step.handles.tolist()]
    rows["token_id"] = step.token_ids
    rows["logprob"] = step.logprobs
    rows["kv_version"] = step.kv_versions
    top_ids = b""
    top_logprobs = b""
    if step.top_ids.size:
        top_ids = step.top_ids.astype("<i4").tobytes()
        top_logprobs = step.top_logprobs.astype("<f4").tobytes()
    return StepFrame(
        version=step.version,
        rows=rows.tobytes(),
        finishes=tuple([(numbers[handle], finish) for handle, _, finish in step.finishes]),
        started=step.started,
        ended=step.ended,
        num_running=step.num_running,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        kept=b"".join(filter(None, step.kept)),
        kept_lengths=_lengths(step.kept),
        experts=tuple([(numbers[handle], experts) for handle, experts in step.experts]),
        key_runs=tuple([(numbers[handle], runs) for handle, runs in step.key_runs]),
    )


def pack_chunks(
    chunks: Sequence[tuple[int, Chunk]], *, started: float, ended: float, num_running: int
) -> StepFrame:
    """The frame of chunks of one version, each with its client's number. A number may occur several
    times. Its chunks are in order.
    """
    rows: list[tuple[int, int, float, Version]] = []
    for number, chunk in chunks:
        for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            rows.append((number, token_id, logprob, chunk.kv_version))
    top_ids, top_logprobs = _packed_tops([chunk for _, chunk in chunks])
    kept, kept_lengths = _packed_kept([chunk for _, chunk in chunks])
    return StepFrame(
        version=chunks[0][1].version,
        rows=np.array(rows, dtype=_ROW_DTYPE).tobytes(),
        finishes=tuple([(n, chunk.finish) for n, chunk in chunks if chunk.finish is not None]),
        started=started,
        ended=ended,
        num_running=num_running,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        attested=tuple([(n, chunk.attested) for n, chunk in chunks if chunk.attested]),
        kept=kept,
        kept_lengths=kept_lengths,
        experts=tuple([(n, chunk.experts) for n, chunk in chunks if chunk.experts]),
        key_runs=tuple([(n, chunk.key_runs) for n, chunk in chunks if chunk.key_runs]),
    )


def _packed_tops(chunks: Sequence[Chunk]) -> tuple[bytes, bytes]:
    """`StepFrame.top_ids` and `StepFrame.top_logprobs` of the tokens of some chunks."""
    width = 0
    for chunk in chunks:
        for top in chunk.top_logprobs:
            width = max(width, len(top))
    if not width:
        return b"", b""
    ids: list[int] = []
    logprobs: list[float] = []
    for chunk in chunks:
        for top in chunk.top_logprobs or ((),) * len(chunk.token_ids):
            for token_id, logprob in top:
                ids.append(token_id)
                logprobs.append(logprob)
            missing = width - len(top)
            ids += [-1] * missing
            logprobs += [0.0] * missing
    return np.array(ids, dtype="<i4").tobytes(), np.array(logprobs, dtype="<f4").tobytes()


def _packed_kept(chunks: Sequence[Chunk]) -> tuple[bytes, bytes]:
    """`StepFrame.kept` and `StepFrame.kept_lengths` of the tokens of some chunks."""
    if not any(chunk.kept for chunk in chunks):
        return b"", b""
    kept: list[bytes | None] = []
    for chunk in chunks:
        kept += chunk.kept or [None] * len(chunk.token_ids)
    return b"".join(filter(None, kept)), _lengths(kept)


def can_carry(chunk: Chunk) -> bool:
    """True if a chunk fits the columns: their lengths agree, and all numbers for int32 columns fit
    int32.
    """
    num = len(chunk.token_ids)
    if len(chunk.logprobs) != num or len(chunk.kept) not in (0, num):
        return False
    tops = chunk.top_logprobs
    if tops and (len(tops) != num or not all(tops)):
        return False
    ints = [chunk.version, chunk.kv_version]
    ints += chunk.token_ids
    for top in tops:
        ints += [token_id for token_id, _ in top]
    for span in chunk.attested:
        ints += (span.version, span.kv_version, span.start, span.end)
    return all(0 <= value < END_OF_INTS for value in ints)


def step_rows(frame: StepFrame) -> list[TokenRow]:
    """(handle, token, log-probability, version of its oldest key) of each token."""
    return list(_ROW.iter_unpack(frame.rows))


def step_tops(frame: StepFrame) -> list[Top]:
    """The alternatives of each token. Empty if no request asks."""
    if not frame.top_ids:
        return []
    ids = np.frombuffer(frame.top_ids, dtype="<i4").tolist()
    logprobs = np.frombuffer(frame.top_logprobs, dtype="<f4").tolist()
    pairs = list(zip(ids, logprobs, strict=True))
    width = len(pairs) * _ROW.size // len(frame.rows)
    found: list[Top] = []
    for start in range(0, len(pairs), width):
        known = tuple([pair for pair in pairs[start : start + width] if pair[0] >= 0])
        found.append(known or None)
    return found


def step_kept(frame: StepFrame) -> list[bytes | None]:
    """The ids that truncation kept for each token. Empty if no request asks."""
    found: list[bytes | None] = []
    start = 0
    for length in _int32(frame.kept_lengths).tolist():
        if length < 0:
            found.append(None)
            continue
        end = start + length
        found.append(frame.kept[start:end])
        start = end
    return found


def _lengths(kept: Sequence[bytes | None]) -> bytes:
    return np.array(list(map(_length, kept)), dtype="<i4").tobytes()


def _length(left: bytes | None) -> int:
    return -1 if left is None else len(left)


def error_from(
    code: str, message: str, param: str | None, retry_after_seconds: int | None = None
) -> MidflightError:
    """The error that the other side raised, by its code."""
    kind = next((k for k in _kinds(MidflightError) if k.code == code), EngineError)
    if issubclass(kind, Overloaded) and retry_after_seconds is not None:
        return kind(message, retry_after_seconds=retry_after_seconds)
    if issubclass(kind, RequestRejected):
        return kind(message, param=param)
    return kind(message)


def _kinds(kind: type[MidflightError]) -> Iterator[type[MidflightError]]:
    """The class and all its subclasses, breadth first. If subclasses inherit a code, the class that
    defines it comes first.
    """
    level = [kind]
    while level:
        yield from level
        below: list[type[MidflightError]] = []
        for above in level:
            below += above.__subclasses__()
        level = below


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
    """The inverse of `encode_rows`. Raises `RequestRejected` for other bytes. It does not check the
    numbers.
    """
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
    """The inverse of `encode_scores`. Raises `EngineUnavailable` unless there is one score for each
    token.
    """
    if len(data) != 4 * num_tokens:
        raise EngineUnavailable(
            f"reading an engine's scores: {len(data)} bytes for {num_tokens} tokens. Check that "
            "the URL is an engine's."
        )
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


def _int32(column: bytes) -> Int32:
    return np.frombuffer(column, dtype="<i4").astype(np.int32)
