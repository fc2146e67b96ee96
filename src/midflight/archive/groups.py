"""The groups of a run, a page at a time: the task, the reward of each rollout, and the fate of the
group. All of this is SQL on the store.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path

from midflight.archive.search import WordIndex
from midflight.archive.store_reader import GROUP_STATE, StoreReader, reading
from midflight.errors import NoRun
from midflight.observe.failures import failure_class
from midflight.observe.history import read_journal
from midflight.trajectories.database import TASK_BEGINS, State, Value, decode_scored
from midflight.types import Fate, GroupKey, Kind, Reason, RolloutKey, Task, Version

PASSED = 1.0
"""The reward from which on a rollout counts as passed."""
_KEY = "epoch, position, attempt"
_TOLD = "FROM beside.said JOIN beside.told ON number = said.rowid WHERE said MATCH ?"


class GroupOrder(StrEnum):
    """The order of groups. If two are equal, the newest comes first."""

    NEWEST = "newest"
    OLDEST = "oldest"
    WORST = "worst"
    """Lowest mean reward first; groups without any reward last."""
    BEST = "best"
    SPREAD = "spread"
    """Largest difference of rewards within the group first."""
    LONGEST = "longest"
    FAILED = "failed"
    """Most rollouts without a reward first."""


_MEASURES: Mapping[GroupOrder, Sequence[tuple[str, str]]] = {
    GroupOrder.WORST: [("AVG(reward) IS NULL", ""), ("AVG(reward)", "")],
    GroupOrder.BEST: [("AVG(reward)", "DESC")],
    GroupOrder.SPREAD: [("MAX(reward) - MIN(reward)", "DESC")],
    GroupOrder.LONGEST: [("AVG(num_trainable)", "DESC")],
    GroupOrder.FAILED: [("COUNT(*) - COUNT(reward)", "DESC")],
}
"""The measures of a group's rollouts that an order compares, each with its direction."""


UNDER_WAY = (State.RUNNING, State.IN_LINE)
"""The states of groups that have not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """The groups that are asked for. A field that is empty lets all groups through."""

    kind: Kind = Kind.TRAINING
    """The groups that the run learns from, or the held-out tasks of its evaluations."""
    version: Version | None = None
    """The version that the step on them made."""
    versions: tuple[Version, Version] | None = None
    """The first and the last of several versions."""
    source: str = ""
    task: str = ""
    """The id of its task."""
    fate: str = ""
    """A state of groups (`trained`, `waiting`, `dropped`, ...), or the reason for which some were
    dropped.
    """
    failure: str = ""
    """The class of an error of one of its rollouts."""
    words: str = ""
    """Words that one of its rollouts holds, in any order. Words in quotes stand together."""
    only_ended: bool = False
    """Leave out the groups that are run, or are to be run again."""
    key: GroupKey | None = None


@dataclass(frozen=True, slots=True)
class RolloutBrief:
    """One rollout of a group that has ended, without its tokens."""

    key: RolloutKey
    reward: float | None
    error: str | None
    """The reason why there is no reward."""
    failure: str | None
    """The class of that error."""
    truncated: bool
    seconds: float
    num_trainable: int
    components: Mapping[str, float]
    metrics: Mapping[str, float]
    tokens: Mapping[tuple[Fate, Reason | None], int]
    found: bool = False
    """True if it holds the words of the search."""


@dataclass(frozen=True, slots=True)
class EpochScore:
    """The results of a task in one epoch, over all its groups of that epoch."""

    epoch: int
    scored: int
    passed: int
    mean: float | None

    @property
    def rate(self) -> float | None:
        return self.passed / self.scored if self.scored else None


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group and its fate."""

    key: GroupKey
    task: Task
    state: State
    reason: Reason | None
    """The reason why it was dropped."""
    version: Version | None
    """The version that the step on it made, or is meant to make."""
    final: bool
    """True if a checkpoint has that step."""
    rollouts: tuple[RolloutBrief, ...]
    epochs: tuple[EpochScore, ...] = field(default=())

    @property
    def rewards(self) -> Sequence[float]:
        return [rollout.reward for rollout in self.rollouts if rollout.reward is not None]

    @property
    def mean(self) -> float | None:
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def spread(self) -> float | None:
        """Largest reward minus smallest; 0 teaches nothing."""
        return max(self.rewards) - min(self.rewards) if self.rewards else None

    @property
    def fate(self) -> str:
        """The group's state in words: trained, dropped, or still under way."""
        match self.state:
            case State.TRAINED:
                return f"trained, made version {self.version}"
            case State.LEASED if self.final:
                return f"in the step that makes version {self.version}, which no checkpoint has yet"
            case State.LEASED:
                return f"in the step that makes version {self.version}"
            case State.DROPPED:
                return f"dropped: {self.reason}"
            case State.WAITING:
                return "waits for a step"
            case State.RUNNING:
                return f"running, {len(self.rollouts)} ended"
            case State.IN_LINE:
                return "to be run again"
            case State.EVALUATED:
                return f"held out, answered by version {self.key.epoch}"


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Some of the groups that a filter lets through; `total` is the number of all of them."""

    groups: tuple[GroupView, ...]
    total: int
    sources: tuple[str, ...]
    failures: Mapping[str, int]
    """Rollouts without a reward by the class of their error, in the whole run."""
    fates: Mapping[str, int]
    """Groups by state, and dropped ones by reason too, in the whole run."""


def page_of(
    folder: Path,
    wanted: GroupFilter,
    *,
    order: GroupOrder = GroupOrder.NEWEST,
    first: int = 0,
    number: int = 25,
    words: WordIndex | None = None,
) -> GroupPage:
    """The groups from `first` to `first + number` among those that are wanted. `words` is the index
    in which words are looked up.
    """
    with reading(folder, wanted.kind) as store:
        if words is not None and wanted.words:
            store.beside(words.path)
        where, values = conditions(wanted)
        ((total,),) = store.ask(f"SELECT COUNT(*) FROM groups g WHERE {where}", *values)
        groups = _groups(store, where, values, order, first, number)
        scores: Mapping[bytes, tuple[EpochScore, ...]] = {}
        found = frozenset[RolloutKey]()
        if groups:
            scores = _epochs(store, [columns[1] for columns in groups])
        if groups and wanted.words:
            found = _found(store, wanted.words, groups)
        seen = tuple(_seen(store, columns, scores, found) for columns in groups)
        return GroupPage(seen, total, _sources(store), _failures(store), _fates(store))


Columns = tuple[
    tuple[int, int, int], bytes, str, str | None, "int | None", "int | None", "int | None"
]
"""Key, task, state, reason and version of a group; then the version that begins the step of its
lease, and whether that step was made.
"""


def conditions(wanted: GroupFilter) -> tuple[str, list[Value]]:
    """The SQL that chooses these groups among groups `g`, and its values."""
    parts: list[str] = []
    values: list[Value] = []
    versions = wanted.versions
    if not versions and wanted.version is not None:
        versions = (wanted.version, wanted.version)
    if versions and wanted.kind is Kind.EVALUATION:
        parts.append("g.epoch BETWEEN ? AND ?")
        values += versions
    elif versions:
        leased = "g.lease IN (SELECT lease FROM leases WHERE train_version + 1 BETWEEN ? AND ?)"
        parts.append(f"(g.version BETWEEN ? AND ? OR {leased})")
        values += versions
        values += versions
    if wanted.source:
        parts.append("source_of(g.task) = ?")
        values.append(wanted.source)
    if wanted.task:
        parts.append("task_of(g.task) = ?")
        values.append(wanted.task)
    if wanted.fate:
        parts.append(f"({GROUP_STATE} = ? OR g.state = 'dropped' AND g.reason = ?)")
        values += [wanted.fate, wanted.fate]
    if wanted.failure:
        parts.append(_having("r.reward IS NULL AND failure_of(r.error) = ?"))
        values.append(wanted.failure)
    if wanted.words:
        parts.append(f"({_KEY}) IN (SELECT {_KEY} {_TOLD})")
        values.append(WordIndex.query(wanted.words))
    if wanted.only_ended:
        parts.append("g.state NOT IN (?, ?)")
        values += UNDER_WAY
    if wanted.key is not None:
        parts.append(f"({_KEY}) = (?, ?, ?)")
        values += _values(wanted.key)
    return " AND ".join(parts) or "1", values


def _having(rollout: str) -> str:
    return f"({_KEY}) IN (SELECT {_KEY} FROM rollouts r WHERE {rollout})"


def _values(key: GroupKey) -> tuple[int, int, int]:
    return key.epoch, key.index, key.attempt


def versions_of(
    folder: Path, first: int, last: int, kind: Kind = Kind.TRAINING
) -> tuple[Version, Version]:
    """The first and the last version that these steps made, or that evaluations after them
    examined.

    The numbers of versions continue above those that were lost in a crash; the numbers of steps do
    not.
    """
    past = read_journal(folder / "metrics.jsonl")
    lines = past.evaluations if kind is Kind.EVALUATION else past.steps
    made = [line.version for line in lines if first <= line.step <= last]
    if not made:
        what = "made no evaluation after a step" if kind is Kind.EVALUATION else "made no step"
        raise NoRun(
            f"{folder} has {what} from {first} to {last}; `midflight runs` says how many it has "
            "made."
        )
    return min(made), max(made)


def _groups(
    store: StoreReader,
    where: str,
    values: Sequence[Value],
    order: GroupOrder,
    first: int,
    number: int,
) -> list[Columns]:
    by = _sorted_by(order)
    keys = store.ask(
        f"SELECT {_KEY} FROM groups g WHERE {where} ORDER BY {by} LIMIT ? OFFSET ?",
        *values,
        number,
        first,
    )
    found: list[Columns] = []
    for key in keys:
        (row,) = store.ask(
            "SELECT task, state, reason, version, train_version, done FROM groups g LEFT JOIN "
            "leases USING (lease) WHERE (g.epoch, g.position, g.attempt) = (?, ?, ?)",
            *key,
        )
        task, state, reason, version, train_version, done = row
        epoch, position, attempt = key
        of = (epoch, position, attempt)
        found.append((of, task, state, reason, version, train_version, done))
    return found


def _sorted_by(order: GroupOrder) -> str:
    """The columns of groups `g` that SQL sorts by."""
    newest = "g.epoch DESC, g.position DESC, g.attempt DESC"
    if order is GroupOrder.NEWEST:
        return newest
    if order not in _MEASURES:
        return "g.epoch, g.position, g.attempt"
    of = "FROM rollouts r WHERE (r.epoch, r.position, r.attempt) = (g.epoch, g.position, g.attempt)"
    measures = [f"(SELECT {measure} {of}) {way}" for measure, way in _MEASURES[order]]
    measures.append(newest)
    return ", ".join(measures)


def _seen(
    store: StoreReader,
    columns: Columns,
    scores: Mapping[bytes, tuple[EpochScore, ...]],
    found: frozenset[RolloutKey],
) -> GroupView:
    key, blob, state, reason, version, train_version, done = columns
    of = GroupKey(*key)
    return GroupView(
        key=of,
        task=store.task(blob),
        state=State(state),
        reason=Reason(reason) if reason else None,
        version=version if train_version is None else train_version + 1,
        final=bool(done),
        rollouts=briefs(store, of, found),
        epochs=scores.get(blob, ()),
    )


def briefs(
    store: StoreReader, key: GroupKey, found: frozenset[RolloutKey] = frozenset()
) -> tuple[RolloutBrief, ...]:
    """The rollouts of one group that have ended, in the order of their samples."""
    of = f"WHERE ({_KEY}) = (?, ?, ?)"
    tokens = defaultdict[int, dict[tuple[Fate, Reason | None], int]](dict)
    for sample, fate, reason, number in store.ask(
        f"SELECT sample, fate, reason, num_tokens FROM fates {of}", *_values(key)
    ):
        tokens[sample][Fate(fate), Reason(reason) if reason else None] = number
    made: list[RolloutBrief] = []
    columns = "sample, reward, error, truncated, seconds, num_trainable, scored"
    for sample, reward, error, truncated, seconds, num, blob in store.ask(
        f"SELECT {columns} FROM rollouts {of} ORDER BY sample", *_values(key)
    ):
        scored = store.decoded(decode_scored, blob)
        rollout = RolloutKey(key, sample, store.kind)
        failure = failure_class(error) if reward is None else None
        brief = RolloutBrief(
            key=rollout,
            reward=reward,
            error=error,
            failure=failure,
            truncated=bool(truncated),
            seconds=seconds,
            num_trainable=num,
            components=scored.components,
            metrics=scored.metrics,
            tokens=tokens[sample],
            found=rollout in found,
        )
        made.append(brief)
    return tuple(made)


def _found(store: StoreReader, words: str, groups: Sequence[Columns]) -> frozenset[RolloutKey]:
    """The rollouts of these groups that hold the words."""
    marks = ", ".join(["(?, ?, ?)"] * len(groups))
    keys = list(chain.from_iterable(columns[0] for columns in groups))
    rows = store.ask(
        f"SELECT {_KEY}, sample {_TOLD} AND ({_KEY}) IN (VALUES {marks})",
        WordIndex.query(words),
        *keys,
    )
    return frozenset(RolloutKey(GroupKey(*key), sample, store.kind) for *key, sample in rows)


def _epochs(store: StoreReader, tasks: Sequence[bytes]) -> Mapping[bytes, tuple[EpochScore, ...]]:
    """Returns the results of each task, one for each epoch in which it was drawn."""
    distinct = set(tasks)
    marks = ", ".join("?" * len(distinct))
    begins = f"substr(task, 1, {TASK_BEGINS})"
    begin_marks = ", ".join([begins.replace("task", "?")] * len(distinct))
    scores = defaultdict[bytes, list[EpochScore]](list)
    for task, epoch, scored, good, mean in store.ask(
        "SELECT task, epoch, COUNT(reward), COALESCE(SUM(reward >= ?), 0), AVG(reward) FROM "
        f"groups JOIN rollouts USING ({_KEY}) WHERE {begins} IN ({begin_marks}) AND task IN ({marks}) "
        "GROUP BY task, epoch ORDER BY epoch",
        PASSED,
        *distinct,
        *distinct,
    ):
        scores[task].append(EpochScore(epoch, scored, good, mean))
    return {task: tuple(found) for task, found in scores.items()}


def _sources(store: StoreReader) -> tuple[str, ...]:
    rows = store.ask("SELECT 1 FROM sqlite_master WHERE name = 'sources'")
    if rows:
        rows = store.ask("SELECT DISTINCT name FROM sources")
    else:
        rows = store.ask("SELECT DISTINCT source_of(task) FROM groups")
    return tuple(sorted(source for (source,) in rows))


def _failures(store: StoreReader) -> Mapping[str, int]:
    counts = Counter[str]()
    for error, number in store.ask(
        "SELECT error, COUNT(*) FROM rollouts WHERE reward IS NULL GROUP BY error"
    ):
        counts[failure_class(error)] += number
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))


def _fates(store: StoreReader) -> Mapping[str, int]:
    counts = Counter[str]()
    for state, reason, number in store.ask(
        "SELECT state, reason, COUNT(*) FROM groups GROUP BY state, reason"
    ):
        counts[state] += number
        if reason:
            counts[reason] = number
    for (made,) in store.ask(
        "SELECT COUNT(*) FROM groups WHERE lease IN (SELECT lease FROM leases WHERE done)"
    ):
        counts[State.LEASED] -= made  # as in `GROUP_STATE`
        counts[State.TRAINED] += made
    return {name: counts[name] for name in sorted(counts) if counts[name]}
