"""Where every group and every token is. Counts only: it holds no trajectory and decides nothing.

I1: submitted = running + waiting + leased + trained + dropped(by reason), after every transition.
I3: received = waiting + trained + masked(by reason) + dropped(by reason), for the tokens of rollouts that have ended. Tokens of
running rollouts are in flight and known to the gateway; leased ones wait until their step is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from midflight.errors import UnknownLease
from midflight.types import GroupKey, Reason, Version


class Ledger:
    """Groups move admit -> running -> waiting -> leased -> trained, and from any of the first three to dropped."""

    def __init__(self) -> None:
        self.submitted = 0
        self.trained = 0
        self.dropped = Counter[Reason]()
        self.tokens_received = 0
        self.tokens_trained = 0
        self.tokens_masked = Counter[Reason]()
        self.tokens_dropped = Counter[Reason]()
        self._running: dict[GroupKey, int] = {}  # rollouts that have not ended
        self._waiting: dict[GroupKey, int] = {}  # trainable tokens
        self._leased: dict[int, dict[GroupKey, int]] = {}
        self._provisional: dict[GroupKey, tuple[Version, int]] = {}  # trained, in no checkpoint yet: version made, tokens

    # --- What is where ---

    @property
    def running(self) -> tuple[GroupKey, ...]:
        """In the order of admission."""
        return tuple(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_running_rollouts(self) -> int:
        return sum(self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_leased(self) -> int:
        return sum(map(len, self._leased.values()))

    @property
    def released(self) -> int:
        """Groups that gave their credit back (S7)."""
        return self.dropped.total()

    @property
    def tokens_waiting(self) -> int:
        """Trainable tokens of waiting and leased groups."""
        return sum(self._waiting.values()) + sum(sum(groups.values()) for groups in self._leased.values())

    # --- Transitions ---

    def admit(self, key: GroupKey, num_rollouts: int) -> None:
        assert not self._is_open(key), f"{key} is admitted already"
        self.submitted += 1
        self._running[key] = num_rollouts
        self._check()

    def restore(self, key: GroupKey, num_tokens: int) -> None:
        """A group that finished before this ledger began: submitted and waiting at once."""
        assert not self._is_open(key), f"{key} is known already"
        self.submitted += 1
        self.tokens_received += num_tokens
        self._waiting[key] = num_tokens
        self._check()

    def end_rollout(self, key: GroupKey) -> None:
        """One rollout of a running group has ended; its slot is free. The group goes on running."""
        assert self._running[key] > 0, f"{key} has no rollout left to end"
        self._running[key] -= 1

    def finish(self, key: GroupKey, num_tokens: int, *, masked: Mapping[Reason, int], dropped: Mapping[Reason, int]) -> None:
        """Running -> waiting, with its trainable tokens and the fates already decided of its others."""
        del self._running[key]
        self._waiting[key] = num_tokens
        self.tokens_received += num_tokens + sum(masked.values()) + sum(dropped.values())
        self.tokens_masked.update(masked)
        self.tokens_dropped.update(dropped)
        self._check()

    def drop(self, key: GroupKey, reason: Reason, num_tokens: int = 0) -> int:
        """Running or waiting -> dropped. A running group's tokens are named here; a waiting one's are known. Returns their number."""
        if key in self._running:
            del self._running[key]
            self.tokens_received += num_tokens
        else:
            num_tokens = self._waiting.pop(key)
        self.dropped[reason] += 1
        self.tokens_dropped[reason] += num_tokens
        self._check()
        return num_tokens

    def trim(self, key: GroupKey, reason: Reason, *, num_masked: int, num_dropped: int) -> None:
        """A waiting group goes on waiting without some of its tokens."""
        assert self._waiting[key] >= num_masked + num_dropped, f"{key} has fewer tokens than leave it"
        self._waiting[key] -= num_masked + num_dropped
        self.tokens_masked[reason] += num_masked
        self.tokens_dropped[reason] += num_dropped
        self._check()

    def lease(self, lease: int, keys: Iterable[GroupKey]) -> None:
        """Waiting -> leased."""
        assert lease not in self._leased, f"lease {lease} is taken"
        self._leased[lease] = {key: self._waiting.pop(key) for key in keys}
        self._check()

    def restore_lease(self, lease: int, groups: Mapping[GroupKey, int]) -> None:
        """A lease given before this ledger began, whose trainer lives."""
        assert lease not in self._leased, f"lease {lease} is taken"
        self.submitted += len(groups)
        self.tokens_received += sum(groups.values())
        self._leased[lease] = dict(groups)
        self._check()

    def train(self, lease: int, version: Version) -> None:
        """Leased -> trained, by the step that made `version`; provisional until a checkpoint of it is settled."""
        groups = self._end(lease)
        self._provisional.update({key: (version, tokens) for key, tokens in groups.items()})
        self.trained += len(groups)
        self.tokens_trained += sum(groups.values())
        self._check()

    def take_back(self, lease: int) -> None:
        """Leased -> waiting: the trainer died before its checkpoint."""
        self._waiting.update(self._end(lease))
        self._check()

    def discard(self, lease: int, reason: Reason) -> Mapping[GroupKey, int]:
        """Leased -> dropped: the step was skipped. Returns the tokens of each group."""
        groups = self._end(lease)
        self.dropped[reason] += len(groups)
        self.tokens_dropped[reason] += sum(groups.values())
        self._check()
        return groups

    def settle(self, version: Version) -> None:
        """A checkpoint of `version` exists: what was trained up to it is final."""
        self._provisional = {key: made for key, made in self._provisional.items() if made[0] > version}

    def untrain(self, key: GroupKey, num_tokens: int) -> None:
        """Trained -> waiting: the weights that had learnt from it died before a checkpoint had them (DECISIONS 13).

        `num_tokens` are those of the group as it finished; tokens that a policy had trimmed are counted as received again.
        """
        _, num_trained = self._provisional.pop(key)
        self.trained -= 1
        self.tokens_trained -= num_trained
        self.tokens_received += num_tokens - num_trained
        self._waiting[key] = num_tokens
        self._check()

    def _end(self, lease: int) -> dict[GroupKey, int]:
        if lease not in self._leased:
            raise UnknownLease(f"Lease {lease} is not open (open: {sorted(self._leased)}); take a batch again.")
        return self._leased.pop(lease)

    def _is_open(self, key: GroupKey) -> bool:
        return key in self._running or key in self._waiting or any(key in groups for groups in self._leased.values())

    def _check(self) -> None:
        groups = self.num_running + self.num_waiting + self.num_leased + self.trained + self.released
        assert self.submitted == groups, f"I1: {self.submitted} groups submitted, {groups} accounted for"
        tokens = self.tokens_waiting + self.tokens_trained + self.tokens_masked.total() + self.tokens_dropped.total()
        assert self.tokens_received == tokens, f"I3: {self.tokens_received} tokens received, {tokens} accounted for"
