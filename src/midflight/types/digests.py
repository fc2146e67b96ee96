"""Digests of what a run sampled, scored and trained on. They are chained, so that none can be
changed alone (`midflight ledger --prove`).

A digest is BLAKE2b with 32 bytes, over parts that are each preceded by their length. Numbers are
little-endian: counts as 64-bit integers, rewards as float64, arrays as they lie in memory.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from midflight.types.generation import Finish, OlderKeys, SamplingParams, Segment, Turn
from midflight.types.names import Reason, Version
from midflight.types.rollouts import GroupKey, PackedBatch, Row, Seal, Trajectory

DIGEST_BYTES = 32
NOTHING = b""
"""The digest before the first one of a chain."""


def fold(*parts: bytes) -> bytes:
    """The digest of these parts in this order."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def whole(*numbers: int) -> bytes:
    """Whole numbers as the digests take them."""
    return struct.pack(f"<{len(numbers)}q", *numbers)


def real(*numbers: float | None) -> bytes:
    """Floating-point numbers as the digests take them, each with a byte that says whether it is
    there.
    """
    return b"".join([_real(number) for number in numbers])


def _real(number: float | None) -> bytes:
    if number is None:
        return b"\0"
    return b"\1" + struct.pack("<d", number + 0.0)  # a store gives 0.0 back for -0.0


def table(values: Mapping[str, float]) -> bytes:
    """Named numbers, in the order of their names."""
    return fold(*(fold(name.encode(), real(values[name])) for name in sorted(values)))


# --- What was sampled -----------------------------------------------------------------------------

_encode = msgspec.msgpack.Encoder().encode


class Conditions(msgspec.Struct, frozen=True, array_like=True):
    """How an answer was sampled."""

    sampling: SamplingParams | None
    finish: Finish
    policy_sampled: bool
    older_keys: tuple[OlderKeys, ...] = ()
    """As in `Turn`. It is not written if it is empty, as in runs of before."""


_conditions = msgspec.msgpack.Decoder(Conditions)


def conditions(turn: Turn, sampling: SamplingParams | None) -> bytes:
    """How an answer was sampled, as msgpack of `Conditions`."""
    known = (sampling, turn.finish, turn.policy_sampled)
    return _encode((*known, turn.older_keys) if turn.older_keys else known)


def read_conditions(written: bytes) -> Conditions:
    """The conditions that `conditions` wrote."""
    return _conditions.decode(written)


def labels(segments: Iterable[Segment]) -> tuple[bytes, bytes]:
    """The version and the version of the oldest key of each output token, as int32."""
    versions = b""
    kv_versions = b""
    for segment in segments:
        length = segment.end - segment.start
        versions += struct.pack("<i", segment.version) * length
        kv_versions += struct.pack("<i", segment.kv_version) * length
    return versions, kv_versions


def turn_digest(
    before: bytes,
    *,
    tail: bytes,
    output: bytes,
    logprobs: bytes,
    segments: Iterable[Segment],
    conditions: bytes,
) -> bytes:
    """The digest of an answer. `before` is that of the answer that its prompt continues, `tail`
    holds the ids of the prompt beyond that one, `output` those of the answer (int32), and
    `logprobs` are float32.
    """
    return fold(b"turn", before, tail, output, logprobs, *labels(segments), conditions)


# --- What was scored ------------------------------------------------------------------------------


def rollout_digest(
    trajectory: Trajectory, masked: Mapping[Reason, int], dropped: Mapping[Reason, int]
) -> bytes:
    """The digest of a rollout that has ended: its rows, all that its reward is made of, and the
    tokens that are in no row.
    """
    key = trajectory.key
    roles = (
        fold(name.encode(), real(role.reward), whole(role.truncated), _optional(role.room))
        for name, role in sorted(trajectory.roles.items())
    )
    return fold(
        b"rollout",
        whole(key.group.epoch, key.group.index, key.group.attempt, key.sample),
        trajectory.task_id.encode(),
        trajectory.source.encode(),
        real(trajectory.reward),
        whole(trajectory.truncated),
        _optional(trajectory.room),
        table(trajectory.components),
        table(trajectory.metrics),
        real(*trajectory.turn_rewards),
        _encode(dict(trajectory.fields)),
        fold(*roles),
        _counts(masked),
        _counts(dropped),
        *(_row(row) for row in trajectory.rows),
    )


def group_digest(key: GroupKey, task: bytes, end: str) -> bytes:
    """The digest of the end of a group. `task` is its task as the store has it, and `end` says what
    became of it.
    """
    return fold(b"group", whole(key.epoch, key.index, key.attempt), task, end.encode())


def admission_digest(key: GroupKey, by: bytes) -> bytes:
    """The digest of the start of a group. `by` is its `AdmissionState` as the store has it."""
    return fold(b"admitted", whole(key.epoch, key.index, key.attempt), by)


def step_event_digest(event: str, first: int, second: int, groups: Iterable[GroupKey]) -> bytes:
    """The digest of an event of the steps, in the order of their groups' keys: a lease (its number,
    the version that the step begins at), its return, going back (checkpoint, new version), or an
    interruption of all running groups (no numbers).
    """
    keys = [whole(key.epoch, key.index, key.attempt) for key in sorted(groups)]
    return fold(event.encode(), whole(first, second), *keys)


def older_digest(keys: bytes) -> bytes:
    """The digest of the first link in a store whose run began without digests. `keys` lists the
    rollouts and groups that had ended by then.
    """
    return fold(b"older", keys)


def seal_after(before: Seal, digest: bytes) -> Seal:
    """The chain with one more link."""
    return Seal(before.number + 1, fold(b"seal", before.head, digest))


def _row(row: Row) -> bytes:
    return fold(
        row.role.encode(),
        *(_array(getattr(row, name), dtype) for name, dtype in ROW_ARRAYS),
        *(record.digest for record in row.records),
    )


def _optional(number: int | None) -> bytes:
    return b"" if number is None else whole(number)


def _counts(counts: Mapping[Reason, int]) -> bytes:
    return fold(*(fold(name.encode(), whole(counts[name])) for name in sorted(counts)))


def _array(array: NDArray[Any] | None, dtype: str) -> bytes:
    """Empty where there is no array."""
    if array is None:
        return b""
    return np.ascontiguousarray(array, dtype=dtype).tobytes()


ROW_ARRAYS = (
    ("token_ids", "<i4"),
    ("generated", "?"),
    ("loss_mask", "?"),
    ("logprobs", "<f4"),
    ("versions", "<i4"),
    ("kv_versions", "<i4"),
    ("turns", "<i4"),
    ("kept", "u1"),
    ("kept_lengths", "<i4"),
    ("experts", "u1"),
)
"""The arrays of a row in a digest, with their types."""


# --- What was trained -----------------------------------------------------------------------------

BATCH_ARRAYS = (
    ("token_ids", "<i4"),
    ("loss_mask", "?"),
    ("logprobs", "<f4"),
    ("versions", "<i4"),
    ("kv_versions", "<i4"),
    ("row_offsets", "<i4"),
    ("row_rollout", "<i4"),
    ("rewards", "<f4"),
    ("rollout_group", "<i4"),
    ("truncated", "?"),
    ("room", "<i4"),
    ("turns", "<i4"),
    ("turn_rewards", "<f4"),
    ("components", "<f4"),
    ("kept", "u1"),
    ("kept_lengths", "<i4"),
    ("experts", "u1"),
)
"""The arrays of a batch in a digest, with their types. The teacher's log-probabilities are not
among them, because no store has them.
"""


def batch_digest(batch: PackedBatch) -> bytes:
    """The digest of a batch as the trainer has it in its memory."""
    return fold(
        b"batch",
        whole(batch.train_version),
        *(_array(getattr(batch, name), dtype) for name, dtype in BATCH_ARRAYS),
        *(name.encode() for name in batch.component_names),
    )


class StepDigests(msgspec.Struct, frozen=True):
    """The digests of a step, in hexadecimal."""

    batch: str
    """The digest of the batch that was trained on."""
    seals: tuple[tuple[int, str], ...]
    """The number and the head of the chain of each store that gave a part of the batch."""
    weights_before: str
    weights_after: str
    """The fingerprints of the weights before and after the step, as they are served. Empty for a
    version that is not handed over.
    """
    skipped: bool
    chain: str
    """The digest of this step and of all steps before it."""


class StepChain:
    """The chain of a trainer's steps."""

    def __init__(self, head: str = "", weights: str = "") -> None:
        """`head` and `weights` are those of the checkpoint that the trainer goes on from."""
        self.head = head
        self.weights = weights
        """The fingerprint of the newest version."""

    def begin(self, weights: str) -> None:
        """Takes the fingerprint of the version that the trainer begins with."""
        self.weights = weights

    def stepped(
        self,
        version: Version,
        batch: PackedBatch,
        *,
        weights: str,
        skipped: bool,
        metrics: Mapping[str, float],
    ) -> StepDigests:
        """Adds a step that made `version`, and returns its digests."""
        made = StepDigests(
            batch=batch_digest(batch).hex(),
            seals=tuple((seal.number, seal.head.hex()) for seal in batch.seals),
            weights_before=self.weights,
            weights_after=weights,
            skipped=skipped,
            chain="",
        )
        chain = step_digest(self.head, version, made, metrics)
        self.head = chain.hex()
        self.weights = weights
        return msgspec.structs.replace(made, chain=self.head)


def step_digest(
    before: str, version: Version, step: StepDigests, metrics: Mapping[str, float | None]
) -> bytes:
    """The digest of a step after the one with the digest `before`. Its loss and the norm of its
    gradient are in it where they are finite.
    """
    return fold(
        b"step",
        bytes.fromhex(before),
        whole(version),
        bytes.fromhex(step.batch),
        *_seals(step.seals),
        step.weights_before.encode(),
        step.weights_after.encode(),
        whole(step.skipped),
        real(_finite(metrics.get("loss")), _finite(metrics.get("grad_norm"))),
    )


def _seals(seals: Sequence[tuple[int, str]]) -> list[bytes]:
    return [fold(whole(number), bytes.fromhex(head)) for number, head in seals]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
