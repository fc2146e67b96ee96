"""`midflight ledger --prove`: every digest of a run, computed again from its store and journal."""

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from midflight.archive.holder import holder_of
from midflight.archive.prove import formulas
from midflight.archive.prove.batches import BatchMember, Rules, batch_digest, groups_of
from midflight.archive.prove.links import Chain, check_groups, check_rollouts, read_chain
from midflight.archive.prove.record import MALFORMED, Key, StoreRecord, opened
from midflight.archive.runs import open_run
from midflight.archive.store_reader import StoreFiles, oldest_copy_read, stores_of
from midflight.errors import NoRun, StoreCorrupt
from midflight.observe.history import JournalHistory, read_journal
from midflight.observe.lines import StepLine

POLICIES = ("wait", "drop", "mask")
MAX_BOUND = 17
"""Bounds on age that are tried for a step that does not fit that of the configuration."""
LEAST_DIGITS = 16
"""The fewest digits of a digest that may be given: fewer are easily had by chance."""


@dataclass(slots=True)
class RunProof:
    """The result of a proof."""

    mistakes: list[str] = field(default_factory=list[str])
    """One sentence for each thing that does not fit, the first one first."""
    notes: list[str] = field(default_factory=list[str])
    """One sentence for each thing that could not be proven; it says why."""
    num_rollouts: int = 0
    num_older: int = 0
    """Rollouts of an older Midflight, without digests."""
    num_removed: int = 0
    """Rollouts whose tokens `run.keep_trajectories` removed."""
    num_steps: int = 0
    digest: str = ""
    """The digest of the last step, as the journal has it."""

    @property
    def holds(self) -> bool:
        return not self.mistakes


def prove(folder: Path, *, digest: str | None = None) -> RunProof:
    """Computes the digests of a run again. `digest` is one that is held outside of the run: then
    the run must have it, and its first `LEAST_DIGITS` digits suffice. Raises `NoRun` if there is
    nothing to prove.
    """
    wanted = _hexadecimal(digest)
    open_run(folder)
    config = _config(folder)
    proof = RunProof()
    history = read_journal(folder / "metrics.jsonl")
    every = history.steps
    lines = [line for line in every if line.digests]
    with ExitStack() as open_stores:
        stores = [open_stores.enter_context(opened(*files)) for files in _stores(folder)]
        if not any(store.has_chain for store in stores):
            raise NoRun(
                f"{folder} has no digests: an older Midflight made the run; runs that begin now "
                "have them."
            )
        chains = [Chain() for _ in stores]
        for store, chain in zip(stores, chains, strict=True):
            for found in (read_chain, check_rollouts, check_groups):
                proof.mistakes += _readable(store.path.name, found(store, chain))
            proof.num_rollouts += len(chain.rollouts) - len(store.removed)
            proof.num_older += len(chain.older_rollouts)
            proof.num_removed += len(store.removed)
        groups = [_by_version(store) for store in stores]
        proof.mistakes += _check_numbers(every)
        proof.mistakes += _without_digests(folder, every, chains, groups)
        holder = holder_of(folder)
        if holder is not None and holder.lives:  # a step may have ended since the journal was read
            newest = every[-1].version if every else 0
            groups = [_until(newest, found) for found in groups]
        newest = _newest_stored(folder, groups)
        wrong = check_steps(lines, stores, chains, groups, _rules(config), newest)
        proof.mistakes += _readable("the steps", wrong)
    proof.num_steps = sum(newest is None or line.version <= newest for line in lines)
    if proof.num_steps < len(lines):
        proof.notes.append(
            f"{len(lines) - proof.num_steps:,} steps are newer than the copy of the store that is "
            "here: what they were made of is not proven."
        )
    proof.digest = lines[-1].digests.chain if lines and lines[-1].digests else ""
    proof.mistakes += check_ends(folder, history, lines, wanted)
    if proof.num_older:
        proof.notes.append(
            f"{proof.num_older:,} rollouts ended before this run kept digests, and are not proven."
        )
    if proof.num_removed:
        proof.notes.append(
            f"the tokens of {proof.num_removed:,} rollouts were removed (run.keep_trajectories); "
            "their digests are in the chain, and are not computed again."
        )
        if not _may_remove(config):
            proof.notes.append(
                'Its configuration has run.keep_trajectories = "all" now: an earlier start removed '
                "them, or somebody did."
            )
    if not lines:
        proof.notes.append(
            "No step has digests: none was made yet, or a trainer that makes none trained the run."
        )
    return proof


def _hexadecimal(digest: str | None) -> str:
    """The digits of a digest; an empty text if none was given."""
    if digest is None:
        return ""
    digits = digest.strip().lower()
    if len(digits) < LEAST_DIGITS or not set(digits) <= set("0123456789abcdef"):
        raise NoRun(
            f"{digest!r} is no digest: give at least {LEAST_DIGITS} of the hexadecimal digits that "
            "a run printed at its end."
        )
    return digits


def _stores(folder: Path) -> list[StoreFiles]:
    stores = stores_of(folder)
    if not stores:
        raise NoRun(f"{folder} has no store: give the folder of a run that has begun to train.")
    return stores


def _readable(name: str, found: Iterator[str]) -> Iterator[str]:
    """Yields what is found wrong. It is wrong too if it cannot be read."""
    try:
        yield from found
    except StoreCorrupt as error:
        yield str(error)
    except MALFORMED as error:
        yield f"{name}: a column has a value of another kind ({error!r})"


def _check_numbers(lines: Sequence[StepLine]) -> Iterator[str]:
    """Yields a sentence for each step that does not have the number after that of the one before."""
    for before, line in pairwise(lines):
        if line.step != before.step + 1:
            yield f"step {line.step} follows step {before.step} in the journal"


def _without_digests(
    folder: Path,
    lines: Sequence[StepLine],
    chains: Sequence[Chain],
    groups: Sequence[dict[int, list[Key]]],
) -> Iterator[str]:
    """Takes the groups of steps that have no digests out of `groups`, and yields a sentence for each
    such step that must have some. Steps of an older Midflight have none, and of a trainer that is
    not ours, which has no checkpoints either.
    """
    older = {key for chain in chains for key in chain.older_groups}
    makes_digests = any(folder.glob("checkpoints/version-*"))
    has_begun = False
    for line in lines:
        if line.digests:
            has_begun = True
            continue
        keys = [key for found in groups for key in found.pop(line.version, [])]
        if has_begun or (makes_digests and not older.issuperset(keys)):
            yield f"step {line.step} (version {line.version}) has no digests: they were taken out"


def _newest_stored(folder: Path, groups: Sequence[Mapping[int, list[Key]]]) -> int | None:
    """The version of the newest step that the stores have, if copies are read, which are older than
    the journal. None if the stores themselves are read.
    """
    copy = oldest_copy_read(folder)
    if copy is None:
        return None
    return min(max((copy.version, *found)) for found in groups)


def check_steps(
    lines: Sequence[StepLine],
    stores: Sequence[StoreRecord],
    chains: Sequence[Chain],
    groups: Sequence[dict[int, list[Key]]],
    rules: Rules,
    newest: int | None = None,
) -> Iterator[str]:
    """Yields a sentence for each step that does not continue the one before, or was not made of
    the groups that the store gives it. `groups` are those of each store by the version that they
    made. The stores have no steps after that of the version `newest`.
    """
    head = formulas.START
    weights = ""
    for line in lines:
        assert line.digests is not None
        said = {name: getattr(line.digests, name) for name in line.digests.__struct_fields__}
        measured = line.trainer or {}
        loss = (measured.get("loss"), measured.get("grad_norm"))
        if _step_digest(head, line.version, said, loss) != line.digests.chain:
            yield (
                f"step {line.step} (version {line.version}) does not continue the step before it: "
                "its line of the journal was changed, or one before it is missing"
            )
        head = _bytes_of(line.digests.chain)
        if weights and line.digests.weights_before not in ("", weights):
            yield f"step {line.step} began with other weights than the step before it made"
        weights = line.digests.weights_after
        is_stored = newest is None or line.version <= newest
        if is_stored:
            yield from _wrong_seals(line, chains)
        if is_stored and not line.digests.skipped:
            yield from _wrong_batch(line, stores, groups, rules)
        for found in groups:
            found.pop(line.version, None)
    for found in groups:
        for version, keys in sorted(found.items()):
            yield (
                f"{len(keys)} groups were trained in the step that made version {version}, of "
                "which the journal has no line"
            )


def _step_digest(head: bytes, version: int, said: Mapping[str, Any], loss: Sequence[Any]) -> str:
    """The digest of a step; an empty text if what the line says is no digest at all."""
    try:
        return formulas.step(head, version, said, loss).hex()
    except (ValueError, OverflowError):
        return ""


def _bytes_of(digest: str) -> bytes:
    try:
        return bytes.fromhex(digest)
    except ValueError:
        return formulas.START


def _wrong_seals(line: StepLine, chains: Sequence[Chain]) -> Iterator[str]:
    """Yields a sentence if a store is not the one that gave the batch of a step."""
    assert line.digests is not None
    for (number, head), chain in zip(line.digests.seals, chains, strict=False):
        known = chain.heads[number - 1] if 0 < number <= len(chain.heads) else b""
        if known.hex() != head:
            yield (
                f"step {line.step}: the store had another past when it gave the batch; links up "
                f"to {number} were changed together"
            )


def _wrong_batch(
    line: StepLine,
    stores: Sequence[StoreRecord],
    groups: Sequence[Mapping[int, list[Key]]],
    rules: Rules,
) -> Iterator[str]:
    """Yields a sentence if a step was made of other rows than those of its groups."""
    assert line.digests is not None
    keys = [by_version.get(line.version, []) for by_version in groups]
    for store, own in zip(stores, keys, strict=True):
        if not store.removed_groups.isdisjoint(own):
            return
    try:
        taken = _taken(line, stores, keys, rules)
    except MALFORMED as error:
        yield f"step {line.step}: the rows of its groups cannot be read ({error})"
        return
    if taken is not None:
        for store, found in zip(stores, taken, strict=True):
            for group in found:
                for member in group:
                    yield from _wrong_count(store, member, group)
    else:
        names = ["-".join(map(str, key)) for own in keys for key in sorted(own)]
        yield (
            f"step {line.step} (version {line.version}) was not made of the groups that the store "
            f"gives it ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}): one was "
            "trained in another step, twice or never, or a row differs"
        )


def _taken(
    line: StepLine,
    stores: Sequence[StoreRecord],
    keys: Sequence[Sequence[Key]],
    rules: Rules,
) -> list[list[list[BatchMember]]] | None:
    """The groups of each store as the step trained on them, or None if they do not have the step's
    digest. The run may have gone on with another bound on age since: then the digest says which
    bound there was.
    """
    assert line.digests is not None
    others = [Rules(bound, policy) for policy in POLICIES for bound in range(MAX_BOUND)]
    for tried in (rules, *others):
        taken = [
            list(groups_of(store, own, line.version, tried))
            for store, own in zip(stores, keys, strict=True)
        ]
        every = [group for found in taken for group in found]
        if batch_digest(every, line.version).hex() == line.digests.batch:
            return taken
    return None


def _wrong_count(
    store: StoreRecord, member: BatchMember, group: Sequence[BatchMember]
) -> Iterator[str]:
    """Yields a sentence if more or fewer tokens of a rollout count as trained than were."""
    parts = [one for one in group if one.rollout is member.rollout]
    if len(parts) > 1 or any(row["role"].size and str(row["role"]) for row in member.rows):
        return
    counted = store.fates(member.rollout).get(("trained", ""), 0)
    if counted != member.num_trainable and not _has_roles(member):
        yield (
            f"rollout {member.rollout.name}: {member.num_trainable} of its tokens were trained, "
            f"and the accounts say {counted}"
        )


def _has_roles(member: BatchMember) -> bool:
    scored = member.rollout.columns["scored"]
    return len(scored) > 4 and bool(scored[4])


def _by_version(store: StoreRecord) -> dict[int, list[Key]]:
    found: defaultdict[int, list[Key]] = defaultdict(list)
    for group in store.groups.values():
        if group.made is not None:
            found[group.made].append(group.key)
    return dict(found)


def _until(newest: int, found: dict[int, list[Key]]) -> dict[int, list[Key]]:
    """Those of versions up to the newest."""
    return {version: keys for version, keys in found.items() if version <= newest}


def _config(folder: Path) -> Mapping[str, Any]:
    """The configuration of the run as it was written."""
    path = folder / "config.toml"
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise NoRun(
            f"{path} cannot be read ({error}); a run writes it at its start: restore it from a copy."
        ) from error


def _rules(config: Mapping[str, Any]) -> Rules:
    """The bound on age of the run's configuration."""
    rollout = cast("Mapping[str, Any]", config.get("rollout") or {})
    return Rules(rollout.get("max_staleness", 4), rollout.get("stale_policy", "wait"))


def _may_remove(config: Mapping[str, Any]) -> bool:
    """True if the run removes tokens that it does not need any more."""
    run = cast("Mapping[str, Any]", config.get("run") or {})
    return run.get("keep_trajectories", "all") != "all"


def check_ends(
    folder: Path, history: JournalHistory, lines: Sequence[StepLine], digest: str
) -> Iterator[str]:
    """Yields a sentence for each place that keeps another digest than the journal's last one."""
    chains = {line.digests.chain: line for line in lines if line.digests is not None}
    last = lines[-1].digests.chain if lines and lines[-1].digests else ""
    for name, kept in _kept_digests(folder):
        if kept not in chains:
            yield f"{name} has the digest {kept[:16]}..., which is of no step of the journal"
        elif name == "summary.json" and kept != last:
            yield f"{name} has the digest of step {chains[kept].step}, which is not the last one"
    for line in history.checkpoints:
        if line.digest and line.digest not in chains:
            yield (
                f"the journal's line of the checkpoint of version {line.version} has the digest "
                f"{line.digest[:16]}..., which is of no step of the journal"
            )
    if digest and not any(chain.startswith(digest) for chain in chains):
        yield (
            f"the digest that was given ({digest[:16]}...) is of no step of this run: it is "
            "another run, or all of its chain was written anew"
        )


def _kept_digests(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields the places that keep a digest of the steps, with that digest."""
    places = [("summary.json", "digest"), ("model/config.json", "midflight_steps_digest")]
    for state in sorted(folder.glob("checkpoints/version-*/state.json")):
        places.append((str(state.relative_to(folder)), "chain"))
    for name, key in places:
        try:
            found = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        if found.get(key):
            yield name, found[key]
