"""Rows to score and their scores as bytes: msgpack there, raw little-endian float32 back."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from midflight.errors import EngineUnavailable, RequestRejected
from midflight.types import Float32, Int32

SCORE_PATH: Final = "/score"


class Rows(msgspec.Struct, frozen=True):
    """Row r has the tokens [row_offsets[r], row_offsets[r + 1])."""

    token_ids: bytes
    """int32"""
    row_offsets: bytes
    """int32, one more than there are rows"""
    temperature: float


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Rows).decode


def encode_rows(token_ids: Int32, row_offsets: Int32, *, temperature: float) -> bytes:
    return _encode(Rows(token_ids.astype("<i4").tobytes(), row_offsets.astype("<i4").tobytes(), temperature))


def decode_rows(data: bytes) -> tuple[Int32, Int32, float]:
    """The inverse; `RequestRejected` for other bytes. What the numbers say is not looked at."""
    try:
        rows = _decode(data)
        return _ints(rows.token_ids), _ints(rows.row_offsets), rows.temperature
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestRejected(f"reading rows to score: {error}. Send the bytes of `encode_rows` whole.") from error


def encode_scores(scores: Float32) -> bytes:
    return scores.astype("<f4").tobytes()


def decode_scores(data: bytes, *, num_tokens: int) -> Float32:
    """The inverse; `EngineUnavailable` where there is not one for each token."""
    if len(data) != 4 * num_tokens:
        raise EngineUnavailable(
            f"reading an engine's scores: {len(data)} bytes for {num_tokens} tokens. Check that the URL is an engine's."
        )
    return np.frombuffer(data, dtype="<f4").astype(np.float32)


def _ints(column: bytes) -> Int32:
    return np.frombuffer(column, dtype="<i4").astype(np.int32)
