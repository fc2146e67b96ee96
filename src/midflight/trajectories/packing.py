"""A batch of groups as flat arrays. Its bytes are safetensors with a versioned header, never
pickle.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from midflight.errors import BatchCorrupt
from midflight.types import Batch, Int32, PackedBatch, Row, Trajectory, UInt8
from midflight.types.rollouts import Seal

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
"""Optional, and as long as `_TOKENS`."""
_ROOM: Mapping[str, type[np.generic]] = {"room": np.int32}
"""Optional, and as long as `_ROLLOUTS`."""
_TURNS: Mapping[str, type[np.generic]] = {"turns": np.int32}
"""Optional, and as long as `_TOKENS`."""
_TABLES: Mapping[str, type[np.generic]] = {"turn_rewards": np.float32, "components": np.float32}
"""Flat tables with a line for each rollout; each is optional."""
_KEPT: Mapping[str, type[np.generic]] = {"kept_lengths": np.int32}
"""Optional, and as long as `_TOKENS`. `kept` is there with it, and has as many bytes as it says."""
_EXPERTS: Mapping[str, type[np.generic]] = {"experts": np.uint8}
"""[N, B], optional, and as long as `_TOKENS`."""
_OPTIONAL = {**_TEACHER, **_ROOM, **_TURNS, **_TABLES, **_EXPERTS, **_KEPT, "kept": np.uint8}
NO_ANSWER = 2**31 - 1
"""The room of a rollout without an answer."""


def pack(batch: Batch) -> PackedBatch:
    """Groups, their rollouts and the rollouts' rows, in the order of the batch; see `PackedBatch`
    for the shapes. If rollouts have roles, each role of a group is a group here, with a rollout for
    each that took part.

    A rollout without rows keeps its place among the rewards: it counts in its group's baseline. A
    version above the batch's is one that a trainer left behind when it went back to its checkpoint:
    its tokens count as of age 0.
    """
    rollouts: list[Trajectory] = []
    group_of_rollout: list[int] = []
    rows: list[Row] = []
    rollout_of_row: list[int] = []
    groups = [compared for group in batch.groups for compared in group.by_role().values()]
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            rollout_of_row += [len(rollouts)] * len(trajectory.rows)
            rows += trajectory.rows
            group_of_rollout.append(number)
            rollouts.append(trajectory)
    kept, kept_lengths = _kept(rows)
    newest = batch.train_version
    lengths = [len(row.token_ids) for row in rows]
    return PackedBatch(
        lease=batch.lease,
        train_version=batch.train_version,
        token_ids=_flat([row.token_ids for row in rows], np.int32),
        loss_mask=_flat([row.loss_mask for row in rows], np.bool_),
        logprobs=_flat([row.logprobs for row in rows], np.float32),
        versions=_flat([row.versions for row in rows], np.int32).clip(max=newest),
        kv_versions=_flat([row.kv_versions for row in rows], np.int32).clip(max=newest),
        row_offsets=np.array(list(accumulate(lengths, initial=0)), np.int32),
        row_rollout=np.array(rollout_of_row, np.int32),
        rewards=np.array([t.reward for t in rollouts], np.float32),
        rollout_group=np.array(group_of_rollout, np.int32),
        truncated=np.array([t.truncated for t in rollouts], np.bool_),
        kept=kept,
        kept_lengths=kept_lengths,
        experts=_joined_experts([row.experts for row in rows], lengths),
        room=np.array(list(map(_room, rollouts)), np.int32),
        **_turn_rewards(rollouts, rows),
        **_components(rollouts),
    )


def _room(trajectory: Trajectory) -> int:
    return NO_ANSWER if trajectory.room is None else trajectory.room


def _or_zeros(row: Row, found: Int32 | None) -> Int32:
    """The entry of each token of the row, or zeros if the row has no entries."""
    return np.zeros(len(row.token_ids), np.int32) if found is None else found


def _flat(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """The parts as one array; it is empty if there are none."""
    return np.concatenate([np.zeros(0, dtype), *(part.astype(dtype, copy=False) for part in parts)])


def _turn_rewards(rollouts: Sequence[Trajectory], rows: Sequence[Row]) -> dict[str, Any]:
    """The rewards of answers, and for each token the answer that it belongs to. Empty if no rollout
    has such rewards.
    """
    width = max((len(t.turn_rewards) for t in rollouts), default=0)
    if not width:
        return {}
    rewards = np.zeros((len(rollouts), width), np.float32)
    for line, trajectory in zip(rewards, rollouts, strict=True):
        line[: len(trajectory.turn_rewards)] = trajectory.turn_rewards
    turns = [_or_zeros(row, row.turns) for row in rows]
    return {"turn_rewards": rewards.ravel(), "turns": _flat(turns, np.int32)}


def _components(rollouts: Sequence[Trajectory]) -> dict[str, Any]:
    """The components of rewards, with a column for each name. Empty if no rollout has any."""
    known: set[str] = set()
    for trajectory in rollouts:
        known.update(trajectory.components)
    names = sorted(known)
    if not names:
        return {}
    table = np.array([_line(t, names) for t in rollouts], np.float32)
    return {"components": table.ravel(), "component_names": tuple(names)}


def _line(trajectory: Trajectory, names: Sequence[str]) -> list[float]:
    """A rollout's components in the order of the names. NaN if the rollout does not have one."""
    return [trajectory.components.get(name, np.nan) for name in names]


def _kept(rows: Sequence[Row]) -> tuple[UInt8, Int32] | tuple[None, None]:
    if all(row.kept is None for row in rows):
        return None, None
    kept = [row.kept for row in rows if row.kept is not None]
    lengths = [_or_zeros(row, row.kept_lengths) for row in rows]
    return np.concatenate(kept), np.concatenate(lengths)


def _joined_experts(records: Sequence[UInt8 | None], lengths: Sequence[int]) -> UInt8 | None:
    """The records of parts with so many tokens each. It holds 255 where there is no record.

    Records of another width than the widest are those of another engine, which do not fit: they
    count as missing.
    """
    width = max((record.shape[1] for record in records if record is not None), default=0)
    if not width:
        return None
    parts: list[UInt8] = []
    for record, length in zip(records, lengths, strict=True):
        if record is None or record.shape[1] != width:
            record = np.full((length, width), 255, np.uint8)
        parts.append(record)
    return np.concatenate(parts)


# --- One batch of several -------------------------------------------------------------------------


def merged(lease: int, parts: Sequence[PackedBatch]) -> PackedBatch:
    """One batch of several of the same step. It equals the result of `pack` for all their groups,
    in the order of the parts. Arrays that only some parts have are filled in for the others as
    `pack` does.
    """
    num_groups = [int(part.rollout_group.max(initial=-1)) + 1 for part in parts]
    groups_before = list(accumulate(num_groups, initial=0))
    rollouts_before = list(accumulate((len(part.rewards) for part in parts), initial=0))
    tokens_before = list(accumulate((len(part.token_ids) for part in parts), initial=0))
    offsets = [np.zeros(1, np.int32)]
    rollout_of_row: list[Int32] = []
    group_of_rollout: list[Int32] = []
    for number, part in enumerate(parts):
        offsets.append(part.row_offsets[1:] + tokens_before[number])
        rollout_of_row.append(part.row_rollout + rollouts_before[number])
        group_of_rollout.append(part.rollout_group + groups_before[number])
    whole: dict[str, NDArray[Any]] = {}
    for name in (*_TOKENS, "rewards", "truncated"):
        whole[name] = np.concatenate([getattr(part, name) for part in parts])
    return PackedBatch(
        lease=lease,
        train_version=parts[0].train_version,
        **whole,
        row_offsets=np.concatenate(offsets),
        row_rollout=np.concatenate(rollout_of_row),
        rollout_group=np.concatenate(group_of_rollout),
        **_merged_records(parts),
        **_merged_turn_rewards(parts),
        **_merged_components(parts),
        seals=tuple(seal for part in parts for seal in part.seals),
    )


def _merged_records(parts: Sequence[PackedBatch]) -> dict[str, Any]:
    """The arrays that a batch may have for each token or rollout."""
    made: dict[str, Any] = {}
    for name, nothing in (
        ("teacher_logprobs", np.float32(0)),
        ("room", np.int32(NO_ANSWER)),
        ("turns", np.int32(0)),
        ("kept_lengths", np.int32(0)),
    ):
        arrays = [getattr(part, name) for part in parts]
        if all(array is None for array in arrays):
            continue
        for number, part in enumerate(parts):
            if arrays[number] is None:
                beside = part.rewards if name == "room" else part.token_ids
                arrays[number] = np.full(len(beside), nothing)
        made[name] = np.concatenate(arrays)
    if "kept_lengths" in made:
        made["kept"] = np.concatenate([part.kept for part in parts if part.kept is not None])
    lengths = [len(part.token_ids) for part in parts]
    experts = _joined_experts([part.experts for part in parts], lengths)
    if experts is not None:
        made["experts"] = experts
    return made


def _merged_turn_rewards(parts: Sequence[PackedBatch]) -> dict[str, Any]:
    """A column for as many answers as any rollout had."""
    tables = [
        None if part.turn_rewards is None else part.turn_rewards.reshape(len(part.rewards), -1)
        for part in parts
    ]
    width = max((table.shape[1] for table in tables if table is not None), default=0)
    if not width:
        return {}
    padded: list[NDArray[np.float32]] = []
    for part, table in zip(parts, tables, strict=True):
        into = np.zeros((len(part.rewards), width), np.float32)
        if table is not None:
            into[:, : table.shape[1]] = table
        padded.append(into)
    return {"turn_rewards": np.concatenate(padded).ravel()}


def _merged_components(parts: Sequence[PackedBatch]) -> dict[str, Any]:
    """A column for each name that any part has."""
    names = sorted({name for part in parts for name in part.component_names})
    if not names:
        return {}
    place = {name: number for number, name in enumerate(names)}
    filled: list[NDArray[np.float32]] = []
    for part in parts:
        into = np.full((len(part.rewards), len(names)), np.nan, np.float32)
        if part.components is not None:
            own = [place[name] for name in part.component_names]
            into[:, own] = part.components.reshape(len(part.rewards), -1)
        filled.append(into)
    return {"components": np.concatenate(filled).ravel(), "component_names": tuple(names)}


# --- As bytes -------------------------------------------------------------------------------------


def to_bytes(packed: PackedBatch) -> bytes:
    """A safetensors file whose metadata names the format, the lease and the version it trains
    at.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype in {**_ARRAYS, **_OPTIONAL}.items():
        array = getattr(packed, name)
        if name in _ARRAYS or array is not None:
            arrays[name] = np.ascontiguousarray(array, dtype=dtype)
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "lease": str(packed.lease),
        "train_version": str(packed.train_version),
    }
    if packed.components is not None:
        header["component_names"] = json.dumps(packed.component_names)
    if packed.seals:
        header["seals"] = json.dumps([(seal.number, seal.head.hex()) for seal in packed.seals])
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
        seals=_seals(header),
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
    """True if the teacher gives every token to train on a finite log-probability. Also true if
    there is no teacher.
    """
    if packed.teacher_logprobs is None:
        return True
    return bool(np.isfinite(packed.teacher_logprobs[packed.loss_mask]).all())


def _header(data: bytes) -> Mapping[str, str]:
    """The metadata of a file that `load` has found well-formed: 8 bytes of length, then JSON."""
    length = int.from_bytes(data[:8], "little")
    head = cast(dict[str, dict[str, str]], json.loads(data[8 : 8 + length]))
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


def _seals(header: Mapping[str, str]) -> tuple[Seal, ...]:
    try:
        found = msgspec.json.decode(header.get("seals", "[]"), type=tuple[tuple[int, str], ...])
        return tuple(Seal(number, bytes.fromhex(head)) for number, head in found)
    except ValueError as error:
        raise BatchCorrupt(
            f"Reading a packed batch: seals is no list of seals ({error})."
        ) from None


def _check_tables(packed: PackedBatch) -> None:
    """Each table has a line for each rollout, and all its lines are equally long."""
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
