"""I1, I2, I3 and I8 under any order of facts: a state machine keeps books of its own, and folds the store after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from midflight.buffer.books import Books, Wait
from midflight.trajectories.store import Store
from midflight.types import Batch, GroupKey, Reason, RolloutKey, StalePolicy, Version
from midflight.types.facts import Checkpointed, Interrupted, TurnKept, WentBack

from .keeping import Keeper
from .making import group, limits, turn


def accounts(books: Books) -> dict[str, object]:
    """All that a crash must leave as it is. Slots, and which version engines serve, are said anew by those who live."""
    mine = books.__dict__
    return {
        "groups": (books.submitted, books.trained, +books.dropped),
        "tokens": (books.tokens, books.tokens_waiting),
        "line": mine["_line"],
        "running": set(books.running),
        "kept": mine["_kept"],
        "bytes": mine["_bytes"],
        "lineage": mine["_lineage"],
        "waiting": {key: (f.oldest, f.order, f.num_tokens) for key, f in mine["_waiting"].items()},
        "leases": {n: (lease.batch.train_version, [g.key for g in lease.batch.groups if g.key in lease.shares], lease.shares)
                   for n, lease in mine["_leases"].items()},
        "learnt": mine["_learnt"],
        "numbers": [mine[name] for name in ("_next", "_highest", "_num_leases", "_num_finished")],
    }  # fmt: skip


class Run(RuleBasedStateMachine):
    """Two rollouts per group. Each token is generated at the served or the trainer's version, in any interleaving."""

    policy: StalePolicy
    s: int

    def __init__(self) -> None:
        super().__init__()
        self.rules = limits(2, self.s, self.policy, n=2)
        self.folder = TemporaryDirectory()
        self.store = Store(Path(self.folder.name) / "store", run="tests")
        self.keeper = Keeper(self.rules, also=self.store.apply)
        self.running: dict[GroupKey, tuple[list[int], list[int]]] = {}
        self.leases: list[Batch] = []
        self.version = 0  # that begins the trainer's next step
        self.saved = 0  # the newest checkpoint
        self.served = 0
        self.generated: dict[GroupKey, int] = {}
        self.trained: dict[GroupKey, tuple[Version, int]] = {}  # by the version made
        self.lost = 0  # closed by the test itself

    @property
    def books(self) -> Books:
        return self.keeper.books

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    def _oldest(self) -> dict[GroupKey, int | None]:
        return {k: min((*a, *b), default=None) for k, (a, b) in self.running.items()}

    @rule()
    def admit(self) -> None:
        started = self.keeper.admit()
        if not isinstance(started, Wait):
            self.running[started] = ([], [])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 3), newest=st.booleans())
    def generate(self, data: st.DataObject, count: int, newest: bool) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.running)))
        number = data.draw(st.integers(0, 1))
        rollout = self.running[chosen][number]
        version = self.version if newest else self.served
        rollout.extend([max(version, max(rollout, default=0))] * count)
        self.keeper.record(TurnKept(RolloutKey(chosen, number), 0, turn()))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), overshoot=st.integers(0, 2))
    def finish(self, data: st.DataObject, overshoot: int) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.running)))
        first, second = (tuple(rollout) for rollout in self.running.pop(chosen))
        self.generated[chosen] = len(first) + len(second)
        self.lost += overshoot
        self.keeper.free(chosen)
        self.keeper.put(group(chosen, first, second), dropped={Reason.OVERSHOOT: overshoot})

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.running)))
        first, second = (tuple(rollout) for rollout in self.running.pop(chosen))
        self.lost += len(first) + len(second)
        self.keeper.lose(chosen, first, second)

    @rule()
    def take(self) -> None:
        """Sometimes ahead of the step in progress, as a prefetching trainer does."""
        if len(self.leases) > 1:
            return
        batch = self.keeper.take(self.version + len(self.leases), self._oldest())
        if isinstance(batch, Wait):
            return
        self.leases.append(batch)
        for row in (r for g in batch.groups for t in g.trajectories for r in t.rows):
            assert row.versions[row.loss_mask].min() >= batch.train_version - self.s, "I2"

    @precondition(lambda self: self.leases)
    @rule(skipped=st.booleans())
    def done(self, skipped: bool) -> None:
        batch = self.leases.pop(0)
        self.version += 1
        if skipped:
            self.keeper.skip(batch.lease, self.version)
            return
        self.keeper.done(batch.lease, self.version)
        for made in batch.groups:
            assert made.key not in self.trained, "I8: trained twice"
            self.trained[made.key] = self.version, made.num_trainable

    @precondition(lambda self: self.leases)
    @rule()
    def take_back(self) -> None:
        while self.leases:
            self.keeper.take_back(self.leases.pop().lease)

    @precondition(lambda self: self.saved < self.version)
    @rule()
    def save(self) -> None:
        self.saved = self.version
        self.keeper.record(Checkpointed(self.version))

    @rule()
    def go_back(self) -> None:
        """The trainer goes on from its checkpoint, and all that it learnt after it waits again."""
        groups = self.store.groups_after(self.saved)
        assert {g.key for g in groups} == self.books.learnt_after(self.saved)
        self.version = self.books.resumed_as(self.saved)
        self.keeper.record(WentBack(self.saved, self.version, groups))
        self.trained = {key: (made, tokens) for key, (made, tokens) in self.trained.items() if key not in {g.key for g in groups}}
        self.leases.clear()

    @precondition(lambda self: self.served < self.version)
    @rule()
    def commit(self) -> None:
        self.served += 1
        self.keeper.serve(self.served)

    @invariant()
    def i1_every_group_is_somewhere(self) -> None:
        books = self.books
        started = {*self.running, *self.generated, *(c.key for c in self.keeper.closed)}
        in_line = sum(1 for c in self.keeper.closed if c.successor and c.successor not in started)
        assert books.submitted == self.keeper.drawn + sum(1 for c in self.keeper.closed if c.successor) - in_line
        assert set(books.running) == set(self.running)
        assert books.num_leased == 2 * len(self.leases)
        assert books.trained == len(self.trained)
        assert books.dropped == Counter(c.reason for c in self.keeper.closed)

    @invariant()
    def i3_every_token_has_one_fate(self) -> None:
        tokens = self.books.tokens
        assert tokens.received == sum(self.generated.values()) + self.lost
        assert tokens.trained == sum(number for _, number in self.trained.values())

    @invariant()
    def under_wait_nothing_is_dropped_for_its_age_or_shortened(self) -> None:
        """But after a trainer went back, when more groups may be due than steps are left."""
        if self.policy is StalePolicy.WAIT:
            assert {c.reason for c in self.keeper.closed} <= {Reason.NO_REWARD, Reason.TOO_FEW, Reason.SKIPPED, Reason.REQUEUED}
            assert all(self.generated[k] == tokens for k, (_, tokens) in self.trained.items())

    @invariant()
    def i8_the_books_folded_from_the_store_are_the_live_books(self) -> None:
        folded = Books(self.rules)
        for fact in self.store.facts():
            folded.apply(fact)
        assert accounts(folded) == accounts(self.books)


@pytest.mark.parametrize("policy", list(StalePolicy))
@pytest.mark.parametrize("s", [0, 1, 4])
def test_i1_i2_i3_i8_hold_after_every_fact(policy: StalePolicy, s: int) -> None:
    machine: Callable[[], Any] = type("Machine", (Run,), {"policy": policy, "s": s})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
        ),
    )


def test_i8_a_process_that_died_finds_its_books_and_starts_what_ran_again() -> None:
    """Nothing else of a run is put in line by a crash, and slots are all free."""
    with TemporaryDirectory() as folder:
        store = Store(Path(folder) / "store", run="tests")
        keeper = Keeper(limits(2, 1, n=2), also=store.apply)
        first, *others = keeper.admit_all()
        keeper.keep(group(first, (0, 0)))
        found = Books(limits(2, 1, n=2))
        for fact in (*store.facts(), Interrupted()):
            found.apply(fact)
        assert found.in_line == first and found.num_running == found.num_running_rollouts == found.submitted == 0
        assert found.tokens_waiting == 2 and len(others) == 3
        store.close()
