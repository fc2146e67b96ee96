"""The batch of a step, made again from the groups that the store says it was made of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midflight.archive.prove.formulas import digest_of, integers
from midflight.archive.prove.record import Key, StoredRollout, StoreRecord

NO_ROOM = 2**31 - 1
"""The room of a rollout without an answer."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The run's bound on age, as its configuration has it."""

    max_staleness: int
    stale_policy: str


@dataclass(frozen=True, slots=True)
class BatchMember:
    """A rollout, or one role of it, in a batch."""

    rollout: StoredRollout
    reward: float | None
    truncated: bool
    room: int | None
    rows: tuple[dict[str, NDArray[Any]], ...]
    components: Mapping[str, float]
    turn_rewards: Sequence[float]

    @property
    def num_trainable(self) -> int:
        return sum(int(row["loss_mask"].sum()) for row in self.rows)


_KINDS = {
    "token_ids": "<i4",
    "generated": "?",
    "loss_mask": "?",
    "logprobs": "<f4",
    "versions": "<i4",
    "kv_versions": "<i4",
    "turns": "<i4",
    "kept": "u1",
    "kept_lengths": "<i4",
    "experts": "u1",
}


def groups_of(
    store: StoreRecord, keys: Sequence[Key], made: int, rules: Rules
) -> Iterator[list[BatchMember]]:
    """Yields the groups of the step that made a version, each as the step trained on it."""
    floor = made - 1 - rules.max_staleness
    forks = [fork for fork in store.forks if fork[1] <= made - 1]
    for key in sorted(keys):
        # one without a reward is not compared, and none of it is trained on
        rollouts = [one for one in store.rollouts(key) if one.columns["reward"] is not None]
        parts = [_arrays(rollout, forks) for rollout in rollouts]
        oldest = [_oldest(rows) for rows in parts]
        if min((version for version in oldest if version is not None), default=floor) < floor:
            for number, rows in enumerate(parts):
                parts[number] = _trimmed(rows, oldest[number], floor, rules.stale_policy)
        yield from _by_role(rollouts, parts)


def _arrays(
    rollout: StoredRollout, forks: Sequence[tuple[int, int]]
) -> tuple[dict[str, NDArray[Any]], ...]:
    found: list[dict[str, NDArray[Any]]] = []
    for row in rollout.rows:
        arrays = {name: np.frombuffer(row.arrays[name], kind) for name, kind in _KINDS.items()}
        arrays["versions"] = _renumbered(arrays["versions"], forks)
        arrays["kv_versions"] = _renumbered(arrays["kv_versions"], forks)
        arrays["role"] = np.array(row.role)
        found.append(arrays)
    return tuple(found)


def _renumbered(versions: NDArray[Any], forks: Sequence[tuple[int, int]]) -> NDArray[Any]:
    """Versions as if no number had been skipped where a trainer went on under another number."""
    moves: list[tuple[int, int]] = []
    for checkpoint, version in forks:
        before = _moved(np.array([checkpoint], np.int32), moves)
        up = version - int(before[0])
        if up:
            moves.append((version, up))
    return _moved(versions, moves)


def _moved(versions: NDArray[Any], moves: Sequence[tuple[int, int]]) -> NDArray[Any]:
    result = versions.copy()
    for first, up in moves:
        result = np.where(versions < first, result + up, result)
    return result.astype("<i4")


def _oldest(rows: Sequence[Mapping[str, NDArray[Any]]]) -> int | None:
    found = [row["versions"][row["loss_mask"]] for row in rows]
    every = np.concatenate([np.zeros(0, np.int32), *found])
    return int(every.min()) if every.size else None


def _trimmed(
    rows: tuple[dict[str, NDArray[Any]], ...], oldest: int | None, floor: int, policy: str
) -> tuple[dict[str, NDArray[Any]], ...]:
    """The rows without the tokens that are too old."""
    if policy == "drop":
        return () if oldest is not None and oldest < floor else rows
    if policy != "mask":
        return rows
    left: list[dict[str, NDArray[Any]]] = []
    for row in rows:
        mask = row["loss_mask"] & (row["versions"] >= floor)
        if mask.any():
            left.append({**row, "loss_mask": mask})
    return tuple(left)


def _by_role(
    rollouts: Sequence[StoredRollout], parts: Sequence[tuple[dict[str, NDArray[Any]], ...]]
) -> Iterator[list[BatchMember]]:
    """Yields the group, or one group for each role if its rollouts have roles."""
    members = [_member(rollout, rows) for rollout, rows in zip(rollouts, parts, strict=True)]
    roles = [_roles(rollout) for rollout in rollouts]
    names = sorted({name for own in roles for name in own})
    if not names:
        yield members
        return
    for name in dict.fromkeys(("", *names)):  # the session's own role may be among the names
        taking_part: list[BatchMember] = []
        for member, own in zip(members, roles, strict=True):
            if name in own or (not own and not name):
                taking_part.append(_of_role(member, name, own))
        if taking_part:
            yield taking_part


def _roles(rollout: StoredRollout) -> Mapping[str, Any]:
    scored = rollout.columns["scored"]
    return scored[4] if len(scored) > 4 else {}


def _member(rollout: StoredRollout, rows: tuple[dict[str, NDArray[Any]], ...]) -> BatchMember:
    columns = rollout.columns
    return BatchMember(
        rollout,
        columns["reward"],
        bool(columns["truncated"]),
        columns["room"],
        rows,
        columns["scored"][0],
        columns["scored"][2],
    )


def _of_role(member: BatchMember, name: str, roles: Mapping[str, Any]) -> BatchMember:
    rows = tuple(row for row in member.rows if str(row["role"]) == name)
    if not name:
        return replace(member, rows=rows)
    role = roles[name]
    return replace(
        member,
        rows=rows,
        reward=role.get("reward"),
        truncated=bool(role.get("truncated")),
        room=role.get("room"),
        components={},
        turn_rewards=(),
    )


def batch_digest(groups: Sequence[Sequence[BatchMember]], made: int) -> bytes:
    """The digest of the batch of these groups, as the trainer that made a version had it."""
    members = [member for group in groups for member in group]
    rows = [row for member in members for row in member.rows]
    lengths = [len(row["token_ids"]) for row in rows]
    components = sorted({name for member in members for name in member.components})
    parts = [
        b"batch",
        integers(made - 1),
        _joined(rows, "token_ids"),
        _joined(rows, "loss_mask"),
        _joined(rows, "logprobs"),
        _clipped(rows, "versions", made - 1),
        _clipped(rows, "kv_versions", made - 1),
        np.cumsum([0, *lengths]).astype("<i4").tobytes(),
        _numbers([place for place, member in enumerate(members) for _ in member.rows]),
        np.array([member.reward for member in members], "<f4").tobytes(),
        _numbers([place for place, group in enumerate(groups) for _ in group]),
        np.array([member.truncated for member in members], "?").tobytes(),
        _numbers([_room(member) for member in members]),
        *_turn_rewards(members, rows),
        _components(members, components),
        *_kept(rows),
        _experts(rows),
        *(name.encode() for name in components),
    ]
    return digest_of(parts)


def _room(member: BatchMember) -> int:
    return NO_ROOM if member.room is None else member.room


def _joined(rows: Sequence[Mapping[str, NDArray[Any]]], name: str) -> bytes:
    return b"".join(row[name].tobytes() for row in rows)


def _clipped(rows: Sequence[Mapping[str, NDArray[Any]]], name: str, newest: int) -> bytes:
    return b"".join(np.minimum(row[name], newest).astype("<i4").tobytes() for row in rows)


def _numbers(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def _turn_rewards(
    members: Sequence[BatchMember], rows: Sequence[Mapping[str, NDArray[Any]]]
) -> tuple[bytes, bytes]:
    """The number of the answer of each token, and the rewards of answers."""
    width = max((len(member.turn_rewards) for member in members), default=0)
    if not width:
        return b"", b""
    table = np.zeros((len(members), width), "<f4")
    for line, member in zip(table, members, strict=True):
        line[: len(member.turn_rewards)] = member.turn_rewards
    turns = [_or_zeros(row, "turns") for row in rows]
    return b"".join(turns), table.tobytes()


def _or_zeros(row: Mapping[str, NDArray[Any]], name: str) -> bytes:
    """An entry for each token, zeros where the row has none."""
    if row[name].size:
        return row[name].tobytes()
    return bytes(4 * len(row["token_ids"]))


def _components(members: Sequence[BatchMember], names: Sequence[str]) -> bytes:
    if not names:
        return b""
    table: list[list[float]] = []
    for member in members:
        table.append([member.components.get(name, np.nan) for name in names])
    return np.array(table, "<f4").tobytes()


def _kept(rows: Sequence[Mapping[str, NDArray[Any]]]) -> tuple[bytes, bytes]:
    if not any(row["kept_lengths"].size for row in rows):
        return b"", b""
    return _joined(rows, "kept"), b"".join(_or_zeros(row, "kept_lengths") for row in rows)


def _experts(rows: Sequence[Mapping[str, NDArray[Any]]]) -> bytes:
    """The records of experts, each as wide as the widest; 255 where there is none."""
    widths = [row["experts"].size // max(1, len(row["token_ids"])) for row in rows]
    width = max(widths, default=0)
    if not width:
        return b""
    parts: list[bytes] = []
    for row, own in zip(rows, widths, strict=True):
        missing = b"\xff" * (width * len(row["token_ids"]))
        parts.append(row["experts"].tobytes() if own == width else missing)
    return b"".join(parts)
