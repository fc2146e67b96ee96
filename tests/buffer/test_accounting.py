"""I1, I2 and I3 under any order of events: a state machine drives the buffer and keeps its own books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from midflight.buffer import Closed, GroupBuffer, Wait
from midflight.types import Batch, GroupKey, Reason, StalePolicy

from .making import group, key, limits


class Books(RuleBasedStateMachine):
    """Two rollouts per group. Each token is generated at the served or the trainer's version, in any interleaving."""

    policy: StalePolicy
    s: int

    def __init__(self) -> None:
        super().__init__()
        self.rules = limits(2, self.s, self.policy, n=2)
        self.closed: list[Closed] = []
        self.buffer = GroupBuffer(self.rules, closed=self.closed.append)
        self.running: dict[GroupKey, tuple[list[int], list[int]]] = {}
        self.leases: list[Batch] = []
        self.version = 0  # that begins the trainer's next step
        self.served = 0
        self.drawn = 0
        self.generated: dict[GroupKey, int] = {}
        self.trained: Counter[GroupKey] = Counter()
        self.lost = 0  # closed by the test itself

    def _draw(self) -> GroupKey:
        self.drawn += 1
        return key(self.drawn - 1)

    def _oldest(self) -> dict[GroupKey, int | None]:
        return {k: min((*a, *b), default=None) for k, (a, b) in self.running.items()}

    @rule()
    def admit(self) -> None:
        started = self.buffer.admit(self._draw)
        if not isinstance(started, Wait):
            self.running[started] = ([], [])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 3), newest=st.booleans())
    def generate(self, data: st.DataObject, count: int, newest: bool) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.running)))
        rollout = self.running[chosen][data.draw(st.integers(0, 1))]
        version = self.version if newest else self.served
        rollout.extend([max(version, max(rollout, default=0))] * count)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), overshoot=st.integers(0, 2))
    def finish(self, data: st.DataObject, overshoot: int) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.running)))
        first, second = (tuple(rollout) for rollout in self.running.pop(chosen))
        self.generated[chosen] = len(first) + len(second)
        self.lost += overshoot
        self.buffer.end_rollout(chosen)
        self.buffer.put(group(chosen, first, second), dropped={Reason.OVERSHOOT: overshoot})

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sampled_from(sorted(self.running)))
        tokens = sum(map(len, self.running.pop(chosen)))
        self.lost += tokens
        self.buffer.drop(chosen, Reason.NO_REWARD, num_tokens=tokens)

    @rule()
    def take(self) -> None:
        """Sometimes ahead of the step in progress, as a prefetching trainer does."""
        if len(self.leases) > 1:
            return
        batch = self.buffer.lease(self.version + len(self.leases), self._oldest())
        if isinstance(batch, Wait):
            return
        self.leases.append(batch)
        for row in (r for g in batch.groups for t in g.trajectories for r in t.rows):
            assert row.versions[row.loss_mask].min() >= batch.train_version - self.s, "I2"

    @precondition(lambda self: self.leases)
    @rule()
    def done(self) -> None:
        batch = self.leases.pop(0)
        self.buffer.done(batch.lease)
        self.version += 1
        for made in batch.groups:
            assert made.key not in self.trained, "I8: trained twice"
            self.trained[made.key] = made.num_trainable

    @precondition(lambda self: self.leases)
    @rule()
    def trainer_dies(self) -> None:
        while self.leases:
            self.buffer.take_back(self.leases.pop().lease)

    @precondition(lambda self: self.served < self.version)
    @rule()
    def commit(self) -> None:
        self.served += 1
        self.buffer.serve(self.served)

    @invariant()
    def i1_every_group_is_somewhere(self) -> None:
        ledger = self.buffer.ledger
        assert ledger.submitted == self.drawn + sum(1 for c in self.closed if c.successor) - self._in_line()
        assert set(ledger.running) == set(self.running)
        assert ledger.num_leased == 2 * len(self.leases)
        assert ledger.trained == len(self.trained)
        assert ledger.dropped == Counter(c.reason for c in self.closed)

    def _in_line(self) -> int:
        """Requeued attempts that have not started again."""
        started = set(self.running) | set(self.generated) | {c.key for c in self.closed}
        return sum(1 for c in self.closed if c.successor and c.successor not in started)

    @invariant()
    def i3_every_token_has_one_fate(self) -> None:
        ledger = self.buffer.ledger
        assert ledger.tokens_received == sum(self.generated.values()) + self.lost
        assert ledger.tokens_trained == self.trained.total()

    @invariant()
    def under_wait_nothing_is_dropped_for_its_age_or_shortened(self) -> None:
        if self.policy is StalePolicy.WAIT:
            assert {c.reason for c in self.closed} <= {Reason.NO_REWARD, Reason.TOO_FEW}
            assert all(self.generated[k] == tokens for k, tokens in self.trained.items())


@pytest.mark.parametrize("policy", list(StalePolicy))
@pytest.mark.parametrize("s", [0, 1, 4])
def test_i1_i2_i3_hold_after_every_transition(policy: StalePolicy, s: int) -> None:
    machine: Callable[[], Any] = type("Machine", (Books,), {"policy": policy, "s": s})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
        ),
    )
