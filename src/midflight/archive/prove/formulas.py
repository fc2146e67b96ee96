"""The formulas of the digests. `types.digests` has them too: the two are written apart on purpose,
so that a mistake in one is found by the other.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

START = b""
ROW = ("token_ids", "generated", "loss_mask", "logprobs", "versions", "kv_versions", "turns")
RECORDS = ("kept", "kept_lengths", "experts")


def digest_of(parts: Sequence[bytes]) -> bytes:
    """BLAKE2b with 32 bytes over parts, each after its length in 8 bytes."""
    hashed = blake2b(digest_size=32)
    for part in parts:
        hashed.update(struct.pack("<Q", len(part)) + part)
    return hashed.digest()


def integers(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)


def optional_integer(value: int | None) -> bytes:
    return integers(value) if value is not None else b""


def floats(values: Sequence[float | None]) -> bytes:
    """Each with a byte before it that says whether it is there."""
    written = bytearray()
    for value in values:
        written += b"\0" if value is None else struct.pack("<Bd", 1, value + 0.0)
    return bytes(written)


def named_floats(values: Mapping[str, float]) -> bytes:
    pairs = sorted(values.items())
    return digest_of([digest_of([name.encode(), floats([value])]) for name, value in pairs])


def named_counts(values: Mapping[str, int]) -> bytes:
    pairs = sorted(values.items())
    return digest_of([digest_of([name.encode(), integers(value)]) for name, value in pairs])


def turn(row: Mapping[str, bytes], record: Sequence[Any], before: bytes) -> bytes:
    """The digest of one answer of a row. `record` is as the store has it: start, first, end,
    conditions, digest.
    """
    start, first, end, conditions, _ = record
    ids = row["token_ids"]
    return digest_of(
        [
            b"turn",
            before,
            ids[4 * start : 4 * first],
            ids[4 * first : 4 * end],
            row["logprobs"][4 * first : 4 * end],
            row["versions"][4 * first : 4 * end],
            row["kv_versions"][4 * first : 4 * end],
            conditions,
        ]
    )


def row(columns: Mapping[str, bytes], role: str, turns: Sequence[bytes]) -> bytes:
    arrays = [columns[name] for name in (*ROW, *RECORDS)]
    return digest_of([role.encode(), *arrays, *turns])


def rollout(
    key: Sequence[int],
    task: Mapping[str, Any],
    found: Mapping[str, Any],
    counts: Sequence[Mapping[str, int]],
    rows: Sequence[bytes],
) -> bytes:
    """`found` are the columns of a rollout, `counts` its tokens that are in no row."""
    components, metrics, turn_rewards, fields, *further = found["scored"]
    roles = further[0] if further else {}
    told = [
        digest_of(
            [
                name.encode(),
                floats([role.get("reward")]),
                integers(bool(role.get("truncated"))),
                optional_integer(role.get("room")),
            ]
        )
        for name, role in sorted(roles.items())
    ]
    return digest_of(
        [
            b"rollout",
            integers(*key),
            task["id"].encode(),
            task["source"].encode(),
            floats([found["reward"]]),
            integers(found["truncated"]),
            optional_integer(found["room"]),
            named_floats(components),
            named_floats(metrics),
            floats(turn_rewards),
            msgspec.msgpack.encode(fields),
            digest_of(told),
            named_counts(counts[0]),
            named_counts(counts[1]),
            *rows,
        ]
    )


def group(key: Sequence[int], task: bytes, end: str) -> bytes:
    return digest_of([b"group", integers(*key), task, end.encode()])


def admission(key: Sequence[int], by: bytes) -> bytes:
    return digest_of([b"admitted", integers(*key), by])


def step_event(event: str, first: int, second: int, keys: Sequence[tuple[int, ...]]) -> bytes:
    written = [integers(*key) for key in sorted(keys)]
    return digest_of([event.encode(), integers(first, second), *written])


def older(keys: bytes) -> bytes:
    return digest_of([b"older", keys])


def link(head: bytes, digest: bytes) -> bytes:
    return digest_of([b"seal", head, digest])


def _finite(value: float | None) -> float | None:
    """A journal has no other numbers: JSON writes `null` for them."""
    return value if value is not None and math.isfinite(value) else None


def step(before: bytes, version: int, said: Mapping[str, Any], loss: Sequence[Any]) -> bytes:
    """The digest of a step's line. `loss` holds the loss and the norm of the gradient."""
    seals = [digest_of([integers(number), bytes.fromhex(head)]) for number, head in said["seals"]]
    known = [_finite(value) for value in loss]
    return digest_of(
        [
            b"step",
            before,
            integers(version),
            bytes.fromhex(said["batch"]),
            *seals,
            said["weights_before"].encode(),
            said["weights_after"].encode(),
            integers(said["skipped"]),
            floats(known),
        ]
    )
