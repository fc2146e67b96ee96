"""Records as the store's blobs: msgpack with raw little-endian arrays. Never pickle."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from midflight.types import Json, Row, Task, Turn


class _StoredRow(msgspec.Struct, array_like=True, frozen=True):
    token_ids: bytes
    generated: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes
    kv_versions: bytes


class _StoredTask(msgspec.Struct, frozen=True):
    id: str
    source: str
    data: dict[str, Any]


_ROWS = msgspec.msgpack.Decoder(tuple[_StoredRow, ...])
_TURN = msgspec.msgpack.Decoder(Turn)
_TASK = msgspec.msgpack.Decoder(_StoredTask)
_encode = msgspec.msgpack.Encoder().encode


def encode_rows(rows: tuple[Row, ...]) -> bytes:
    return _encode(tuple(_pack_row(row) for row in rows))


def decode_rows(blob: bytes) -> tuple[Row, ...]:
    """Raises `msgspec.MsgspecError` or `ValueError` if the blob is not what `encode_rows` made."""
    return tuple(_unpack_row(row) for row in _ROWS.decode(blob))


def encode_turn(turn: Turn) -> bytes:
    return _encode(turn)


def decode_turn(blob: bytes) -> Turn:
    return _TURN.decode(blob)


def encode_task(task: Task) -> bytes:
    return _encode(_StoredTask(task.id, task.source, dict(task.data)))


def decode_task(blob: bytes) -> Task:
    task = _TASK.decode(blob)
    return Task(task.id, task.source, cast(dict[str, Json], task.data))


def _pack_row(row: Row) -> _StoredRow:
    return _StoredRow(
        token_ids=row.token_ids.astype("<i4").tobytes(),
        generated=row.generated.tobytes(),
        loss_mask=row.loss_mask.tobytes(),
        logprobs=row.logprobs.astype("<f4").tobytes(),
        versions=row.versions.astype("<i4").tobytes(),
        kv_versions=row.kv_versions.astype("<i4").tobytes(),
    )


def _unpack_row(row: _StoredRow) -> Row:
    return Row(
        token_ids=_array(row.token_ids, "<i4"),
        generated=_array(row.generated, "?"),
        loss_mask=_array(row.loss_mask, "?"),
        logprobs=_array(row.logprobs, "<f4"),
        versions=_array(row.versions, "<i4"),
        kv_versions=_array(row.kv_versions, "<i4"),
    )


def _array(blob: bytes, dtype: str) -> NDArray[Any]:
    return np.frombuffer(blob, dtype=dtype)
