"""A batch of groups as flat arrays, and these as bytes: safetensors with a versioned header, no
pickle.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from midflight.errors import BatchCorrupt
from midflight.types import Batch, Int32, PackedBatch, Row, Trajectory, UInt8

FORMAT = "midflight.packed_batch"
FORMAT_VERSION = "1"

_TOKENS: Mapping[str, type[np.generic]] = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "versions": np.int32,
    "kv_versions": np.int32,
}
_ROWS: Mapping[str, type[np.generic]] = {"row_offsets": np.int32, "row_rollout": np.int32}
_ROLLOUTS: Mapping[str, type[np.generic]] = {
    "rewards": np.float32,
    "rollout_group": np.int32,
    "truncated": np.bool_,
}
_ARRAYS = {**_TOKENS, **_ROWS, **_ROLLOUTS}
_TEACHER: Mapping[str, type[np.generic]] = {"teacher_logprobs": np.float32}
"""As long as `_TOKENS`, and there or not."""
_ROOM: Mapping[str, type[np.generic]] = {"room": np.int32}
"""As long as `_ROLLOUTS`, and there or not."""
_TURNS: Mapping[str, type[np.generic]] = {"turns": np.int32}
"""As long as `_TOKENS`, and there or not."""
_TABLES: Mapping[str, type[np.generic]] = {"turn_rewards": np.float32, "components": np.float32}
"""Flat tables with a line for each rollout, each there or not."""
_KEPT: Mapping[str, type[np.generic]] = {"kept_lengths": np.int32}
"""As long as `_TOKENS`, and there or not, as `kept` is, which has as many bytes as they say."""
_EXPERTS: Mapping[str, type[np.generic]] = {"experts": np.uint8}
"""[N, B], as long as `_TOKENS`, and there or not."""
_OPTIONAL = {**_TEACHER, **_ROOM, **_TURNS, **_TABLES, **_EXPERTS, **_KEPT, "kept": np.uint8}
NO_ANSWER = 2**31 - 1
"""The room of a rollout without an answer."""


def pack(batch: Batch) -> PackedBatch:
    """Groups, their rollouts and the rollouts' rows, in the order of the batch; see `PackedBatch`
    for the shapes. Where rollouts have roles, each role of a group is a group here, with a rollout
    for each that took part.

    A rollout without rows keeps its place among the rewards: it counts in its group's baseline. A
    version above the batch's is of a way that a trainer left when it went back to its checkpoint:
    its tokens count as of age 0.
    """
    groups = [compared for group in batch.groups for compared in group.by_role().values()]
    rollouts = [(number, t) for number, group in enumerate(groups) for t in group.trajectories]
    rows = [(number, row) for number, (_, t) in enumerate(rollouts) for row in t.rows]
    kept, kept_lengths = _kept([row for _, row in rows])
    return PackedBatch(
        lease=batch.lease,
        train_version=batch.train_version,
        token_ids=_flat(rows, lambda row: row.token_ids, np.int32),
        loss_mask=_flat(rows, lambda row: row.loss_mask, np.bool_),
        logprobs=_flat(rows, lambda row: row.logprobs, np.float32),
        versions=_flat(rows, lambda row: row.versions, np.int32).clip(max=batch.train_version),
        kv_versions=_flat(rows, lambda row: row.kv_versions, np.int32).clip(
            max=batch.train_version
        ),
        row_offsets=np.array(
            list(accumulate((len(row.token_ids) for _, row in rows), initial=0)), dtype=np.int32
        ),
        row_rollout=np.array([number for number, _ in rows], dtype=np.int32),
        rewards=np.array([t.reward for _, t in rollouts], dtype=np.float32),
        rollout_group=np.array([number for number, _ in rollouts], dtype=np.int32),
        truncated=np.array([t.truncated for _, t in rollouts], dtype=np.bool_),
        kept=kept,
        kept_lengths=kept_lengths,
        experts=_experts([row for _, row in rows]),
        room=np.array(
            [NO_ANSWER if t.room is None else t.room for _, t in rollouts], dtype=np.int32
        ),
        **_tables([t for _, t in rollouts], [row for _, row in rows]),
    )


def _tables(rollouts: Sequence[Trajectory], rows: Sequence[Row]) -> dict[str, Any]:
    """What their answers earned, and what their rewards are made of; nothing where no rollout says
    that.
    """
    width = max((len(t.turn_rewards) for t in rollouts), default=0)
    names = sorted({name for t in rollouts for name in t.components})
    said: dict[str, Any] = {}
    if width:
        said["turn_rewards"] = np.array(
            [(*t.turn_rewards, *[0.0] * (width - len(t.turn_rewards))) for t in rollouts],
            np.float32,
        ).ravel()
        said["turns"] = np.concatenate(
            [
                np.zeros(0, np.int32),
                *(
                    np.zeros(len(row.token_ids), np.int32) if row.turns is None else row.turns
                    for row in rows
                ),
            ]
        ).astype(np.int32)
    if names:
        said["components"] = np.array(
            [[t.components.get(name, np.nan) for name in names] for t in rollouts], np.float32
        ).ravel()
        said["component_names"] = tuple(names)
    return said


def _flat(
    rows: list[tuple[int, Row]], part: Callable[[Row], NDArray[Any]], dtype: type[np.generic]
) -> NDArray[Any]:
    return np.concatenate(
        [np.zeros(0, dtype), *(part(row).astype(dtype, copy=False) for _, row in rows)]
    )


def _kept(rows: list[Row]) -> tuple[UInt8, Int32] | tuple[None, None]:
    if all(row.kept is None for row in rows):
        return None, None
    lengths = [
        np.zeros(len(row.token_ids), np.int32) if row.kept_lengths is None else row.kept_lengths
        for row in rows
    ]
    return np.concatenate([row.kept for row in rows if row.kept is not None]), np.concatenate(
        lengths
    )


def _experts(rows: list[Row]) -> UInt8 | None:
    """Rows of another width than the widest are of another engine's record, which does not fit:
    they count as without one.
    """
    width = max((row.experts.shape[1] for row in rows if row.experts is not None), default=0)
    if not width:
        return None
    fits = (
        row.experts if row.experts is not None and row.experts.shape[1] == width else None
        for row in rows
    )
    unknown = (np.full((len(row.token_ids), width), 255, np.uint8) for row in rows)
    return np.concatenate(
        [there if has is None else has for has, there in zip(fits, unknown, strict=True)]
    )


def merged(lease: int, parts: Sequence[PackedBatch]) -> PackedBatch:
    """One batch of several of the same step: what `pack` makes of all their groups, in the order of
    the parts. What only some have is filled in for the others as `pack` does."""
    groups, rollouts, tokens = (
        list(accumulate(numbers, initial=0)) for numbers in zip(*map(_numbers, parts), strict=True)
    )
    whole = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (*_TOKENS, "rewards", "truncated")
    }
    return PackedBatch(
        lease=lease,
        train_version=parts[0].train_version,
        **whole,
        row_offsets=np.concatenate(
            [
                np.zeros(1, np.int32),
                *(p.row_offsets[1:] + at for p, at in zip(parts, tokens, strict=False)),
            ]
        ),
        row_rollout=np.concatenate(
            [p.row_rollout + at for p, at in zip(parts, rollouts, strict=False)]
        ),
        rollout_group=np.concatenate(
            [p.rollout_group + at for p, at in zip(parts, groups, strict=False)]
        ),
        **_merged_records(parts),
        **_merged_tables(parts),
    )


def _numbers(batch: PackedBatch) -> tuple[int, int, int]:
    """Groups, rollouts and tokens."""
    return int(batch.rollout_group.max(initial=-1)) + 1, len(batch.rewards), len(batch.token_ids)


def _merged_records(parts: Sequence[PackedBatch]) -> dict[str, Any]:
    """What each token or rollout may have."""
    made: dict[str, Any] = {}
    for name, nothing in (
        ("teacher_logprobs", np.float32(0)),
        ("room", np.int32(NO_ANSWER)),
        ("turns", np.int32(0)),
        ("kept_lengths", np.int32(0)),
    ):
        if any(getattr(part, name) is not None for part in parts):
            sizes = (len(part.rewards if name == "room" else part.token_ids) for part in parts)
            there = (getattr(part, name) for part in parts)
            made[name] = np.concatenate(
                [
                    np.full(n, nothing) if has is None else has
                    for has, n in zip(there, sizes, strict=True)
                ]
            )
    if "kept_lengths" in made:
        made["kept"] = np.concatenate([part.kept for part in parts if part.kept is not None])
    records = [part.experts for part in parts if part.experts is not None]
    if width := max((record.shape[1] for record in records), default=0):
        fits = (
            part.experts if part.experts is not None and part.experts.shape[1] == width else None
            for part in parts
        )
        unknown = (np.full((len(part.token_ids), width), 255, np.uint8) for part in parts)
        made["experts"] = np.concatenate(
            [there if has is None else has for has, there in zip(fits, unknown, strict=True)]
        )
    return made


def _merged_tables(parts: Sequence[PackedBatch]) -> dict[str, Any]:
    """What rewards are made of: a column for each name, and for as many answers as any rollout
    had.
    """
    made: dict[str, Any] = {}
    tables = [
        None if part.turn_rewards is None else part.turn_rewards.reshape(len(part.rewards), -1)
        for part in parts
    ]
    if width := max((table.shape[1] for table in tables if table is not None), default=0):
        padded = [np.zeros((len(part.rewards), width), np.float32) for part in parts]
        for into, table in zip(padded, tables, strict=True):
            if table is not None:
                into[:, : table.shape[1]] = table
        made["turn_rewards"] = np.concatenate(padded).ravel()
    if names := sorted({name for part in parts for name in part.component_names}):
        columns = [np.full((len(part.rewards), len(names)), np.nan, np.float32) for part in parts]
        for into, part in zip(columns, parts, strict=True):
            if part.components is not None:
                into[:, [names.index(name) for name in part.component_names]] = (
                    part.components.reshape(len(part.rewards), -1)
                )
        made.update(components=np.concatenate(columns).ravel(), component_names=tuple(names))
    return made


def to_bytes(packed: PackedBatch) -> bytes:
    """A safetensors file whose metadata names the format, the lease and the version it trains
    at.
    """
    parts = {
        **_ARRAYS,
        **{name: dtype for name, dtype in _OPTIONAL.items() if getattr(packed, name) is not None},
    }
    arrays = {
        name: np.ascontiguousarray(getattr(packed, name), dtype=dtype)
        for name, dtype in parts.items()
    }
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "lease": str(packed.lease),
        "train_version": str(packed.train_version),
    }
    if packed.components is not None:
        header["component_names"] = json.dumps(packed.component_names)
    return save(arrays, metadata=header)


def from_bytes(data: bytes) -> PackedBatch:
    """The inverse of `to_bytes`. Refuses, with `BatchCorrupt`, bytes that are not one batch whose
    parts agree.
    """
    try:
        arrays = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise BatchCorrupt(
            f"Reading a packed batch of {len(data)} bytes: {error}. Send the bytes of `to_bytes` "
            "whole."
        ) from error
    header = _header(data)
    _check_arrays(arrays)
    names = _component_names(header)
    packed = PackedBatch(
        lease=_number(header, "lease"),
        train_version=_number(header, "train_version"),
        component_names=names,
        **arrays,
    )
    _check_tables(packed)
    _check_offsets(packed)
    _check_numbering(packed)
    _require(
        not (packed.versions[packed.loss_mask] > packed.train_version).any(),
        "a token is younger than train_version",
    )
    _require(teacher_is_finite(packed), "a log-probability of the teacher is not finite")
    return packed


def teacher_is_finite(packed: PackedBatch) -> bool:
    """Whether the teacher, if there is one, gives every token to train on a finite
    log-probability.
    """
    return packed.teacher_logprobs is None or bool(
        np.isfinite(packed.teacher_logprobs[packed.loss_mask]).all()
    )


def _header(data: bytes) -> Mapping[str, str]:
    """The metadata of a file that `load` has found well-formed: 8 bytes of length, then JSON."""
    head = cast(
        dict[str, dict[str, str]], json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    )
    header = head.get("__metadata__", {})
    _require(
        header.get("format") == FORMAT, f"format is {header.get('format')!r}, expected {FORMAT!r}"
    )
    found = header.get("format_version")
    _require(
        found == FORMAT_VERSION,
        (
            f"format_version is {found!r}, this Midflight reads {FORMAT_VERSION!r}: use the same "
            "version on both sides"
        ),
    )
    return header


def _number(header: Mapping[str, str], name: str) -> int:
    value = header.get(name, "")
    _require(value.isdecimal(), f"{name} is {value!r}, expected a whole number")
    return int(value)


def _component_names(header: Mapping[str, str]) -> tuple[str, ...]:
    try:
        names = json.loads(header.get("component_names", "[]"))
    except ValueError:
        names = None
    _require(
        isinstance(names, list) and all(isinstance(name, str) for name in names),
        "component_names is no list of names",
    )
    return tuple(cast("list[str]", names))


def _check_tables(packed: PackedBatch) -> None:
    """Each has a line for each rollout, all as long."""
    num = len(packed.rewards)
    names = packed.component_names
    _require(
        (packed.turns is None) == (packed.turn_rewards is None),
        "turns and turn_rewards come together or not at all",
    )
    if packed.turn_rewards is not None and packed.turns is not None:
        _require(
            num > 0 and len(packed.turn_rewards) % num == 0,
            f"{len(packed.turn_rewards)} turn_rewards for {num} rollouts",
        )
        _require(bool(np.isfinite(packed.turn_rewards).all()), "the reward of a turn is not finite")
        _require(bool((packed.turns >= 0).all()), "a turn is below 0")
    found = 0 if packed.components is None else len(packed.components)
    _require(
        found == num * len(names), f"{found} components for {num} rollouts and {len(names)} names"
    )
    _require(
        packed.components is None or not np.isinf(packed.components).any(),
        "a component is not finite",
    )


def _check_arrays(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Every array is there, flat, of its type, and as long as those beside it."""
    _require(
        arrays.keys() - _OPTIONAL.keys() == _ARRAYS.keys(),
        f"arrays are {sorted(arrays)}, expected {sorted(_ARRAYS)}",
    )
    for name, found in arrays.items():
        dtype = {**_ARRAYS, **_OPTIONAL}[name]
        flat = name not in _EXPERTS
        _require(
            found.ndim == 2 - flat and found.dtype == dtype,
            (
                f"{name} is {found.dtype}{list(found.shape)}, expected "
                f"{'flat' if flat else 'two dimensions of'} {np.dtype(dtype)}"
            ),
        )
    for beside in ({**_TOKENS, **_TEACHER, **_TURNS, **_EXPERTS, **_KEPT}, {**_ROLLOUTS, **_ROOM}):
        lengths = {name: len(arrays[name]) for name in beside if name in arrays}
        _require(len(set(lengths.values())) == 1, f"lengths disagree: {lengths}")
    size = len(arrays.get("kept", ()))
    said = arrays.get("kept_lengths", np.zeros(0, np.int32))
    _require(
        not (said < 0).any() and int(said.sum()) == size,
        f"kept_lengths say {int(said.sum())} bytes, kept has {size}",
    )


def _check_offsets(packed: PackedBatch) -> None:
    offsets = packed.row_offsets
    _require(
        len(offsets) == len(packed.row_rollout) + 1,
        f"{len(offsets)} row_offsets for {len(packed.row_rollout)} rows, expected one more",
    )
    _require(
        int(offsets[0]) == 0 and int(offsets[-1]) == len(packed.token_ids),
        f"row_offsets do not span the {len(packed.token_ids)} tokens",
    )
    _require(bool((np.diff(offsets) > 0).all()), "row_offsets do not increase")


def _check_numbering(packed: PackedBatch) -> None:
    rollouts = packed.row_rollout
    groups = packed.rollout_group
    _require(
        not len(rollouts) or (rollouts.min() >= 0 and rollouts.max() < len(packed.rewards)),
        f"row_rollout is outside {len(packed.rewards)}",
    )
    steps = np.diff(groups, prepend=-1)
    _require(
        not len(groups) or (int(steps[0]) == 1 and bool(np.isin(steps, (0, 1)).all())),
        "rollout_group is not numbered 0, 0, .., 1, ..",
    )
    _require(bool(np.isfinite(packed.rewards).all()), "a reward is not finite")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BatchCorrupt(f"Reading a packed batch: {otherwise}.")
