"""The proof of a store: its chain, its rollouts and groups, and the fates of their tokens."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midflight.archive.prove import formulas
from midflight.archive.prove.record import (
    MALFORMED,
    Key,
    Link,
    StoredGroup,
    StoredRollout,
    StoreRecord,
)
from midflight.errors import StoreCorrupt
from midflight.types import Reason

WAITING = "waiting"
OPEN = ("running", "in_line")
ENDED = ("waiting", "leased", "trained", "dropped")
"""The states of groups that are in the chain."""
ROLLOUT = "rollout"
OLDER = "older"
ADMITTED = "admitted"
STEP_EVENTS = ("leased", "taken_back", "went_back", "interrupted")


@dataclass(slots=True)
class Chain:
    """The links and heads that the chain of a store gives."""

    heads: list[bytes] = field(default_factory=list[bytes])
    """The head after each link."""
    rollouts: dict[tuple[Key, int], Link] = field(default_factory=dict[tuple[Key, int], Link])
    """The last link of each rollout."""
    groups: dict[Key, list[Link]] = field(default_factory=dict[Key, list[Link]])
    """The links of each group: when it was kept for a step, and when it was dropped."""
    older_rollouts: set[tuple[Key, int]] = field(default_factory=set[tuple[Key, int]])
    older_groups: set[Key] = field(default_factory=set[Key])
    """Those that had ended before the run kept digests."""
    steps: list[Link] = field(default_factory=list[Link])
    """Leases, going back and interruptions."""


def read_chain(store: StoreRecord, chain: Chain) -> Iterator[str]:
    """Reads the links into `chain`, and yields a sentence for each that does not continue the one
    before.
    """
    head = formulas.START
    for place, link in enumerate(store.links(), start=1):
        if link.number != place:
            yield (
                f"link {place} of the chain of {store.path.name} is missing: rollouts were taken "
                "out of the books"
            )
            return
        head = _head_after(head, link)
        if head != link.head or not _is_of_its_event(store, link):
            yield f"link {place} of the chain of {store.path.name} was changed ({_what(link)})"
            head = _bytes_of(link.head)
        chain.heads.append(head)
        if link.event == OLDER:
            yield from _read_older(store, chain, link)
        elif link.event in STEP_EVENTS:
            chain.steps.append(link)
        elif link.event == ADMITTED:
            continue  # `midflight replay --decisions` reads it
        elif link.sample is None:
            chain.groups.setdefault(link.key, []).append(link)
        else:
            chain.rollouts[link.key, link.sample] = link


def _bytes_of(value: object) -> bytes:
    """The head that a link has; that of no chain if somebody wrote something else there."""
    return value if isinstance(value, bytes) else formulas.START


def _head_after(head: bytes, link: Link) -> bytes:
    """The head after a link; that before it if what the link says is no digest at all."""
    try:
        return formulas.link(head, link.digest)
    except MALFORMED:
        return head


def _is_of_its_event(store: StoreRecord, link: Link) -> bool:
    """False if a link does not have the columns of its event. Those of a group are compared with
    its task later.
    """
    if link.event == OLDER:
        return True
    if link.event == ADMITTED:
        digest = formulas.admission(link.key, link.detail or b"")
        return digest == link.digest and link.sample is None
    if link.event not in STEP_EVENTS:
        return (link.event == ROLLOUT) == (link.sample is not None)
    first, second, unused = link.key
    try:
        groups = [tuple(key) for key in store.decoded("its groups", link.detail or b"")]
        digest = formulas.step_event(link.event, first, second, groups)
    except (StoreCorrupt, *MALFORMED):
        return False
    return digest == link.digest and unused == 0 and link.sample is None


def _read_older(store: StoreRecord, chain: Chain, link: Link) -> Iterator[str]:
    """Reads the list of what had ended before the chain began."""
    if formulas.older(link.detail or b"") != link.digest:
        yield f"the list of what is older than the chain of {store.path.name} was changed"
        return
    rollouts, groups = store.decoded("the list of older rollouts", link.detail or b"")
    chain.older_rollouts = {((e, p, a), sample) for e, p, a, sample in rollouts}
    chain.older_groups = {(e, p, a) for e, p, a in groups}


def _what(link: Link) -> str:
    name = "-".join(map(str, link.key))
    if link.event in STEP_EVENTS:
        return f"{link.event} {link.key[0]}, {link.key[1]}"
    return f"group {name}" if link.sample is None else f"rollout {name}-{link.sample}"


def check_groups(store: StoreRecord, chain: Chain) -> Iterator[str]:
    """Yields a sentence for each group that is not as the chain says."""
    for group in store.groups.values():
        links = chain.groups.get(group.key, [])
        link = links[-1] if links else None
        if link is None and group.key in chain.older_groups:
            continue
        if group.state not in (*OPEN, *ENDED):
            yield f"group {group.name} has the state {group.state!r}, which no group has"
            continue
        if group.state != "dropped" and group.reason is not None:
            yield f"group {group.name} is {group.state}, and has a reason ({group.reason})"
            continue
        if group.state in OPEN:
            if link is not None:
                yield f"group {group.name} has ended by the chain, and is open in the store"
            continue
        if group.made is None and group.version is not None:
            yield f"group {group.name} is {group.state}, and has a step ({group.version})"
            continue
        if link is None:
            yield f"group {group.name} has ended and is in no link of the chain: it was added"
            continue
        end = group.reason if group.state == "dropped" else WAITING
        if formulas.group(group.key, group.task, end or "") != link.digest:
            yield _wrong_group(group, link)
            continue
        for one in links:
            if formulas.group(group.key, group.task, one.event) != one.digest:
                yield (
                    f"link {one.number} of the chain of {store.path.name} says {one.event!r} of "
                    f"group {group.name}, and its digest is of something else"
                )
    yield from _check_forks(store, chain)
    yield from _check_leases(store, chain)
    for key in chain.groups.keys() - store.groups.keys():
        yield f"group {'-'.join(map(str, key))} is lost: the chain has it, the store has not"


def _check_forks(store: StoreRecord, chain: Chain) -> Iterator[str]:
    """Yields a sentence if the trainer went on under other numbers than the store says. The chain
    does not have those from before it began.
    """
    told = [link.key[:2] for link in chain.steps if link.event == "went_back"]
    expected = [(checkpoint, version) for checkpoint, version in told if checkpoint != version]
    found = list(store.forks)
    if chain.older_rollouts or chain.older_groups:
        found = found[max(0, len(found) - len(expected)) :]
    if found != expected:
        yield f"the trainer went back to {expected} by the chain, and to {found} by the store"


def _check_leases(store: StoreRecord, chain: Chain) -> Iterator[str]:
    """Yields a sentence for each step that stands, and was given other groups than the store says.
    A group that was dropped in its step is not looked for.
    """
    standing: dict[int, Link] = {}
    for link in chain.steps:
        number, version, _ = link.key
        if link.event == "leased":
            standing[version + 1] = link
        elif link.event == "taken_back":
            standing.pop(version + 1, None)
        elif link.event == "went_back":
            standing = {made: lease for made, lease in standing.items() if made <= number}
    given = {link.key[:2] for link in chain.steps if link.event == "leased"}
    for lease in store.leases:
        if lease not in given and not chain.older_groups:
            yield f"lease {lease[0]} at version {lease[1]} is in no link of the chain"
    by_version: dict[int, list[Key]] = {}
    for group in store.groups.values():
        if group.made is not None:
            by_version.setdefault(group.made, []).append(group.key)
    for made, keys in by_version.items():
        lease = standing.get(made)
        if lease is None and chain.older_groups.issuperset(keys):
            continue
        if lease is None:
            yield f"the step that made version {made} was given no groups by the chain"
        elif formulas.step_event("leased", lease.key[0], lease.key[1], keys) != lease.digest:
            yield f"the step that made version {made} was given other groups than the store says"


def _wrong_group(group: StoredGroup, link: Link) -> str:
    for end in (WAITING, *Reason):
        if formulas.group(group.key, group.task, end) == link.digest:
            said = "kept for a step" if end == WAITING else f"dropped ({end})"
            state = f"dropped ({group.reason})" if group.state == "dropped" else group.state
            return f"group {group.name} was {said}, and the store says {state}"
    return f"the task of group {group.name} was changed"


def check_rollouts(store: StoreRecord, chain: Chain) -> Iterator[str]:
    """Yields a sentence for each rollout that is not as the chain says, and for each whose tokens
    are not all in one place.
    """
    left = set(chain.rollouts)
    for rollout in store.rollouts():
        link = chain.rollouts.get((rollout.key, rollout.sample))
        left.discard((rollout.key, rollout.sample))
        group = store.groups.get(rollout.key)
        if group is None:
            yield f"rollout {rollout.name} has no group: the group was taken out"
            continue
        if link is None and (rollout.key, rollout.sample) in chain.older_rollouts:
            continue
        if link is None:
            yield f"rollout {rollout.name} is in no link of the chain: it was added"
            continue
        if rollout.unread:
            yield f"rollout {rollout.name}: {rollout.unread}"
        elif not rollout.removed:
            yield from _readable(rollout, _check_rollout(store, rollout, group, link))
    for key, sample in sorted(left):
        name = "-".join(map(str, (*key, sample)))
        yield f"rollout {name} is lost: the chain has it, the store has not"
    for name in store.orphaned_fates():
        yield f"rollout {name} has tokens in the accounts, and is not in the store"


def _readable(rollout: StoredRollout, found: Iterator[str]) -> Iterator[str]:
    """Yields what is found wrong in a rollout. It is wrong too if a column has no such value."""
    try:
        yield from found
    except StoreCorrupt as error:
        yield f"rollout {rollout.name}: {error}"
    except MALFORMED as error:
        yield f"rollout {rollout.name}: a column has a value of another kind ({error!r})"


def _check_rollout(
    store: StoreRecord, rollout: StoredRollout, group: StoredGroup, link: Link
) -> Iterator[str]:
    rows: list[bytes] = []
    for number, row in enumerate(rollout.rows):
        wrong = _wrong_turn(row.arrays, row.records)
        if wrong is not None:
            yield f"rollout {rollout.name}, row {number}: {wrong}"
            return
        turns = [record[4] for record in row.records]
        rows.append(formulas.row(row.arrays, row.role, turns))
    task = store.decoded(f"the task of {group.name}", group.task)
    counts = store.decoded(f"the counts of {rollout.name}", link.detail or b"\x92\x80\x80")
    key = (*rollout.key, rollout.sample)
    if formulas.rollout(key, task, rollout.columns, counts, rows) != link.digest:
        yield (
            f"rollout {rollout.name} is not what was scored: its reward or what it is made of, a "
            "mask or another column was changed"
        )
        return
    if rollout.columns["num_trainable"] != rollout.num_trainable:
        yield f"rollout {rollout.name}: num_trainable is not the number of its trainable tokens"
        return
    yield from _wrong_fates(store.fates(rollout), rollout, group, counts)


def _wrong_turn(arrays: Mapping[str, bytes], records: Sequence[Any]) -> str | None:
    """A sentence on the first answer of a row that does not have its digest."""
    before = formulas.START
    end = 0
    for number, record in enumerate(records):
        digest = formulas.turn(arrays, record, before)
        if record[0] != end or digest != record[4]:
            return (
                f"answer {number} has not the digest that the gateway gave it: a token, a "
                "log-probability, a version or its sampling was changed"
            )
        before = record[4]
        end = record[2]
    if records and end * 4 != len(arrays["token_ids"]):
        return "it has other tokens than its answers"
    return None


def _wrong_fates(
    fates: Mapping[tuple[str, str], int],
    rollout: StoredRollout,
    group: StoredGroup,
    counts: Sequence[Mapping[str, int]],
) -> Iterator[str]:
    """Yields a sentence if the accounts of a rollout are not what became of it."""
    found = Counter(dict(fates))
    for fate, numbers in zip(("masked", "dropped"), counts, strict=True):
        for reason, number in numbers.items():
            found[fate, reason] -= number
    trainable = rollout.num_trainable
    stale = found.pop(("masked", "stale"), 0) + found.pop(("dropped", "stale"), 0)
    if rollout.columns["reward"] is None:
        place = ("dropped", "no_reward")
    elif group.state == "trained":
        place = ("trained", "")
    elif group.state == "dropped":
        place = ("dropped", group.reason or "")
    else:
        place = ("waiting", "")
    if place == ("dropped", "stale"):
        found[place] += stale
        stale = 0
    found[place] -= trainable - stale
    if stale < 0 or any(found.values()):
        yield (
            f"rollout {rollout.name}: its tokens are in other accounts than its group, which is "
            f"{group.state}"
        )
