"""The books in a simulated ring: engines that lag, a long tail of durations, a trainer. Time is a heap of events.

This is the proof in `buffer/staleness.py` put to the test: the bound holds, nothing is dropped, and the ring never stops.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest

from midflight.buffer.books import Wait
from midflight.buffer.groups import Limits
from midflight.types import GroupKey, Reason, StalePolicy

from .keeping import Keeper
from .making import group, limits


class Ring:
    """Two engines that commit one after the other, a trainer, and groups of `n` rollouts. Runs until `steps` are made."""

    def __init__(self, rules: Limits, seed: int, *, lost: float = 0.0, prefetch: bool = False) -> None:
        self.rules = rules
        self.random = random.Random(seed)
        self.lost = lost
        self.prefetch = prefetch
        self.keeper = Keeper(rules)
        self.books, self.closed = self.keeper.books, self.keeper.closed
        self.engines = [0, 0]
        self.version = 0
        self.asked = 0
        self.oldest: dict[GroupKey, int | None] = {}
        self.records: dict[GroupKey, list[tuple[int, ...]]] = {}
        self.max_age = 0
        self.generated = Counter[GroupKey]()
        self.trained = Counter[GroupKey]()
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._free = 0.0  # when the trainer has made the steps it took

    def run(self, steps: int) -> None:
        self._admit()
        self._ask()
        while self.version < steps:
            assert self._events, f"the ring stands still at version {self.version}"
            self.now, _, event = heapq.heappop(self._events)
            event()
            self._admit()
            self._ask()

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def _admit(self) -> None:
        while not isinstance(started := self.keeper.admit(), Wait):
            self._start(started)

    def _start(self, started: GroupKey) -> None:
        self.oldest[started] = None
        self.records[started] = []
        for _ in range(self.rules.group_size):
            engine = self.random.randrange(2)
            first = self.random.choice([0.0, 0.1, 1.0])  # in a queue, without a token
            length = min(self.random.paretovariate(0.9) * 0.2, 40.0)  # a long tail, and a deadline
            self._after(first, lambda e=engine, n=length: self._first_token(started, e, n))

    def _first_token(self, started: GroupKey, engine: int, seconds: float) -> None:
        version = self.engines[engine]
        known = self.oldest[started]
        self.oldest[started] = version if known is None else min(known, version)
        self._after(seconds, lambda: self._end_rollout(started, version, engine))

    def _end_rollout(self, ended: GroupKey, first: int, engine: int) -> None:
        self.keeper.free(ended)
        record = (first, *range(first, self.engines[engine] + 1))
        self.records[ended].append(record)
        self.generated[ended] += len(record)
        if len(self.records[ended]) < self.rules.group_size:
            return
        del self.oldest[ended]
        if self.random.random() < self.lost:
            self.keeper.lose(ended, *self.records[ended])
        else:
            self.keeper.put(group(ended, *self.records[ended]))

    def _ask(self) -> None:
        ahead = 1 if self.prefetch else 0
        if self.asked > self.version + ahead:
            return
        batch = self.keeper.take(self.asked, self.oldest)
        if isinstance(batch, Wait):
            return
        self.asked += 1
        for made in batch.groups:
            assert made.oldest_version is not None
            self.max_age = max(self.max_age, batch.train_version - made.oldest_version)
            self.trained[made.key] += made.num_trainable
        self._step(batch.lease)

    def _step(self, lease: int) -> None:
        """Steps follow each other; a prefetched batch begins when the one before it is done."""
        self._free = max(self.now, self._free) + self.random.uniform(0.1, 0.6)
        self._after(self._free - self.now, lambda: self._done(lease))

    def _done(self, lease: int) -> None:
        self.keeper.done(lease)
        self.version += 1
        made = self.version
        lag = self.random.uniform(0.0, 2.0)
        for engine in range(2):
            self._after(lag * (engine + 1), lambda e=engine: self._commit(e, made))

    def _commit(self, engine: int, version: int) -> None:
        self.engines[engine] = max(self.engines[engine], version)
        self.keeper.serve(min(self.engines))


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("s", [0, 1, 4, 8])
def test_i2_under_wait_the_bound_is_reached_never_passed_and_nothing_is_dropped(s: int, b: int) -> None:
    for seed in range(3):
        ring = Ring(limits(b, s, n=2), seed)
        ring.run(steps=150)
        assert ring.max_age <= s
        assert not ring.closed
        assert all(ring.generated[k] == tokens for k, tokens in ring.trained.items()), "what is trained is as long as what was generated"
    if s:
        assert ring.max_age == s, "the tail is long enough to reach the bound, so the test can fail"


@pytest.mark.parametrize("s", [1, 4])
def test_i2_holds_when_the_trainer_takes_its_next_batch_during_a_step(s: int) -> None:
    ring = Ring(limits(2, s, n=2), seed=7, prefetch=True)
    ring.run(steps=200)
    assert ring.max_age <= s and not ring.closed


@pytest.mark.parametrize("s", [0, 4])
def test_groups_that_are_lost_give_their_credit_back_so_the_ring_goes_on(s: int) -> None:
    ring = Ring(limits(4, s, n=2, buffer_groups=4), seed=3, lost=0.5)
    ring.run(steps=100)
    books = ring.books
    assert books.trained == 400
    assert books.dropped[Reason.NO_REWARD] > 100
    assert ring.max_age <= s


@pytest.mark.parametrize("policy", [StalePolicy.DROP, StalePolicy.MASK, StalePolicy.REQUEUE])
@pytest.mark.parametrize("s", [0, 1, 4])
def test_i2_holds_under_every_policy_that_takes_in_the_order_of_age(policy: StalePolicy, s: int) -> None:
    ring = Ring(limits(2, s, policy, n=2), seed=5)
    ring.run(steps=150)
    assert ring.max_age <= s
    assert ring.books.trained == 300


def test_drop_shortens_what_is_trained_and_wait_does_not() -> None:
    """The bias that makes `wait` the default, measured: mean tokens of trained groups over mean tokens of generated ones."""
    ratios = {policy: _length_ratio(policy) for policy in (StalePolicy.WAIT, StalePolicy.DROP)}
    assert ratios[StalePolicy.WAIT] > 0.98
    assert ratios[StalePolicy.DROP] < 0.93


def _length_ratio(policy: StalePolicy) -> float:
    ring = Ring(limits(4, 1, policy, n=2), seed=11)
    ring.run(steps=200)
    trained = ring.trained.total() / len(ring.trained)
    return trained / (ring.generated.total() / len(ring.generated))
