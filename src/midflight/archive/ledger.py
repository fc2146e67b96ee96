"""The ledger of a run: the fate of every token and every group. These are sums over the store, and
they agree with the run's own books.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from midflight.archive.store_reader import GROUP_STATE, StoreReader, reading
from midflight.trajectories.database import State, decode_turn
from midflight.types import Accounts, Fate, Reason

MEANINGS: Mapping[Reason, str] = {
    Reason.STALE: "older than max_staleness when their step began",
    Reason.OVERSHOOT: "generated past a stop string, before the engine could stop",
    Reason.UNCHOSEN: "of several choices, those that the agent did not go on with",
    Reason.NOT_POLICY_SAMPLED: "sampled from another distribution than the policy's",
    Reason.TRUNCATED: "of rollouts that a limit cut short, which are not trained on",
    Reason.NO_REWARD: "of tries that failed, or that could not be scored",
    Reason.TOO_FEW: "of groups with too few scored rollouts to compare",
    Reason.ZERO_SPREAD: "of groups whose rewards are all alike, which teach nothing",
    Reason.REQUEUED: "of groups that began again because they had become too old",
    Reason.NOT_FINITE: "with a number that is not finite",
    Reason.SKIPPED: "of steps that the trainer skipped",
    Reason.SHUTDOWN: "of groups that the end of the run cut short",
    Reason.ABANDONED: "of requests that were cancelled, or failed before their answer was complete",
    Reason.DAMAGED: "of groups that began again because the disk had damaged their tokens",
}
"""The meaning of each reason, for the reader of a ledger."""

_KEY = "epoch, position, attempt"


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """The tokens of one source's rollouts that have ended, by their fate."""

    source: str
    tokens: Mapping[tuple[Fate, Reason | None], int]

    @property
    def received(self) -> int:
        return sum(self.tokens.values())


@dataclass(frozen=True, slots=True)
class Ledger:
    """The places of a run's tokens and groups."""

    accounts: Accounts
    """The accounts of groups (I1) and tokens (I3)."""
    sources: tuple[LedgerLine, ...]
    in_flight: int
    """Tokens of completed turns of rollouts that go on. They are in no account yet."""
    mistakes: tuple[str, ...]
    """The errors in the accounts. It is empty if every token is in one place."""

    @property
    def balanced(self) -> bool:
        return not self.mistakes

    @property
    def balance(self) -> str:
        """Says whether the sums agree, and if not, what is wrong."""
        if self.mistakes:
            return f"it does not add up: {'; '.join(self.mistakes)}"
        received = self.accounts.received_tokens
        return f"it balances: each of {received:,} tokens is in one place"

    @property
    def places(self) -> list[tuple[Fate, Reason | None]]:
        """Everything that became of some tokens, in the order of fates."""
        order = list(Fate)
        found = set[tuple[Fate, Reason | None]]()
        for line in self.sources:
            found.update(line.tokens)
        return sorted(found, key=lambda place: (order.index(place[0]), place[1] or ""))

    def token_rows(self) -> Iterator[tuple[str, ...]]:
        """Yields the lines of a table: a place, the tokens there of each source and of all, and
        what they are.
        """
        received = [line.received for line in self.sources]
        yield _row("received", received, "by rollouts that have ended")
        for place in self.places:
            _, reason = place
            counts = [line.tokens.get(place, 0) for line in self.sources]
            yield _row(place_name(place), counts, MEANINGS[reason] if reason else "")
        blank = [""] * len(self.sources)
        what = "completed turns of rollouts that go on"
        yield "in flight", *blank, f"{self.in_flight:,}", what

    def groups(self) -> Mapping[str, int]:
        """The number of groups by their fate; those that were dropped by the reason too."""
        accounts = self.accounts
        found = {
            "submitted": accounts.submitted,
            "trained": accounts.trained,
            "waiting": accounts.waiting,
            "leased": accounts.leased,
            "running": accounts.running,
        }
        for reason, number in accounts.dropped.items():
            found[f"dropped: {reason}"] = number
        return found


def _row(name: str, counts: Sequence[int], meaning: str) -> tuple[str, ...]:
    return name, *(f"{count:,}" for count in counts), f"{sum(counts):,}", meaning


def place_name(place: tuple[Fate, Reason | None]) -> str:
    fate, reason = place
    return fate.value if reason is None else f"{fate}: {reason}"


def ledger_of(folder: Path) -> Ledger:
    """The ledger of one moment, also while the run goes on."""
    with reading(folder) as store:
        sources = _sources(store)
        total = Counter[tuple[Fate, Reason | None]]()
        for line in sources:
            total.update(line.tokens)
        accounts = _accounts(store, total)
        turns = store.ask("SELECT turn FROM turns")
        in_flight = sum(len(store.decoded(decode_turn, blob).output_ids) for (blob,) in turns)
        return Ledger(accounts, sources, in_flight, tuple(_mistakes(store, accounts)))


def _sources(store: StoreReader) -> tuple[LedgerLine, ...]:
    found = defaultdict[str, Counter[tuple[Fate, Reason | None]]](Counter)
    of_groups = (
        f"SELECT {_KEY}, fate, reason, SUM(num_tokens) AS total FROM fates GROUP BY "
        f"{_KEY}, fate, reason"
    )
    rows = store.ask(
        f"SELECT source_of(task), f.fate, f.reason, SUM(total) FROM ({of_groups}) f JOIN groups "
        f"USING ({_KEY}) GROUP BY 1, 2, 3"
    )
    for source, fate, reason, number in rows:
        found[source][Fate(fate), Reason(reason) if reason else None] += number
    return tuple(LedgerLine(source, dict(counts)) for source, counts in sorted(found.items()))


def _accounts(store: StoreReader, total: Mapping[tuple[Fate, Reason | None], int]) -> Accounts:
    """Returns the accounts of the run. A group that will run again counts with its next try."""
    groups = Counter[str]()
    dropped = Counter[str]()
    for state, reason, number in store.ask(
        f"SELECT {GROUP_STATE}, reason, COUNT(*) FROM groups g GROUP BY 1, 2"
    ):
        groups[state] += number
        if state == State.DROPPED:
            dropped[reason] += number
    del groups[State.IN_LINE]
    by_fate = defaultdict[Fate, Counter[str]](Counter)
    for (fate, reason), number in total.items():
        by_fate[fate][reason.value if reason else ""] += number
    return Accounts(
        submitted=groups.total(),
        running=groups[State.RUNNING],
        waiting=groups[State.WAITING],
        leased=groups[State.LEASED],
        trained=groups[State.TRAINED],
        dropped=dict(dropped),
        received_tokens=sum(total.values()),
        waiting_tokens=by_fate[Fate.WAITING].total(),
        trained_tokens=by_fate[Fate.TRAINED].total(),
        masked_tokens=dict(by_fate[Fate.MASKED]),
        dropped_tokens=dict(by_fate[Fate.DROPPED]),
    )


def _mistakes(store: StoreReader, accounts: Accounts) -> list[str]:
    """Lists the counts that do not add up. A store that only facts have written has no mistakes."""
    found: list[str] = []
    ((open_, early),) = store.ask(
        "SELECT COALESCE(SUM(fate = 'waiting' AND (state IN ('trained', 'dropped') OR "
        "COALESCE(done, 0))), 0), COALESCE(SUM(fate = 'trained' AND state <> 'trained' AND NOT "
        f"COALESCE(done, 0)), 0) FROM fates JOIN groups USING ({_KEY}) LEFT JOIN leases USING "
        "(lease)"
    )
    if open_:
        found.append(f"{open_} rollouts of groups that have ended still have tokens that wait")
    if early:
        found.append(f"{early} rollouts of groups that were not trained have trained tokens")
    ((missing,),) = store.ask(
        f"SELECT COUNT(*) FROM rollouts LEFT JOIN (SELECT {_KEY}, sample, SUM(num_tokens) AS total "
        f"FROM fates GROUP BY {_KEY}, sample) USING ({_KEY}, sample) WHERE num_trainable > "
        "COALESCE(total, 0)"
    )
    if missing:
        found.append(f"{missing} rollouts have tokens in no account")
    groups = (
        accounts.running
        + accounts.waiting
        + accounts.leased
        + accounts.trained
        + sum(accounts.dropped.values())
    )
    if groups != accounts.submitted:
        found.append(f"{accounts.submitted} groups were submitted, {groups} are accounted for")
    return found
