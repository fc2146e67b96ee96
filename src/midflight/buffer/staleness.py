"""The formulas of the bound on age, which `Books` applies.

The rest of this text proves two things: no token is trained older than S versions (I2), and the
trainer never waits for ever under `wait`.

Words. A step that begins at version v makes v + 1; the groups it trains on are taken once, B of
them. v_served is the oldest version that a routable engine serves, so a token sampled now carries
at least v_served, and v_served never exceeds v. A group with a trainable token of version o must be
in the batch of a step v <= o + S. Two rules hold that deadline.

Admission (`credit`). A group may start only if, with it,

    submitted - released <= (v_served + S + 1) B

where `released` counts dropped groups. As every step before w, the next one without a batch, took B
groups, this is

    running + waiting <= (v_served + S + 1 - w) B,

which is the form used here: it needs no history, so it also holds after a restart at another
version.

Taking (`overfull`). The step at v takes a batch only if for every k = 0..S, with u = v + k - S, the
groups left behind (finished or still running) whose oldest token is <= u number at most k B. They
must be trained by step u + S = v + k, and exactly k batches remain until then.

Proof of the bound. Let L(u, v) be the groups left behind by the step at v whose oldest token, now
or later, is <= u. Claim: L(u, v) <= (u + S - v) B for all u <= v.
  * While v_served <= u, admission bounds *all* groups left behind, with and without a token: after
    the step at v took its batch, running + waiting <= (v_served + S + 1 - (v + 1)) B <= (u + S - v)
    B.
  * Once v_served > u, no group can join L(u, .) any more: a new token is younger than u. Its groups
    are known by their tokens, and the rule with k = u + S - v is the claim itself.
With v = u + S the claim reads: no group with a token <= u is left after step u + S. So every group
is taken in time.

Proof that it goes on. Suppose the step at v finds no batch although every running group has ended
(each has a deadline) and the engines have caught up: v_served = v, or v_served >= v - (e - 1) where
every e-th version is published. Admission allows (v_served + S + 1 - v) B >= (S + 2 - e) B groups,
a batch at least because e - 1 <= S, and buffer and slots hold one, so B groups come to be finished;
one that is dropped gives its credit back and is replaced. By the claim for step v - 1 at most (u +
S - v + 1) B of them are <= u; a batch of the oldest B leaves at most (u + S - v) B = k B. So the
batch is taken.

A trainer that goes on from its checkpoint of version c as r > c skipped numbers, not steps: the
weights of r are those of c. Ages are counted along the steps, so every earlier version moves up by
r - c (`Lineage`), in groups that wait and in those that run. The c + k that was lost becomes r + k,
which is made again of groups that waited for the first one too. Moving all up alike changes no
difference between versions, so the claim for the step at c holds for r as well: the steps that are
made again have enough batches, in time, for all groups that had finished. A token may then be
trained by weights that are younger, at most S steps behind those that sampled it on the lost way;
it counts as of age 0. While such groups wait, admission counts them as open, so no group is
generated beyond those that are due. Only a group that runs across the restart may come in excess:
it was admitted for a later step, and its tokens from now on are of r. Engines that outlive the
trainer serve a version v < r until r is handed over. It counts as v + r - c, along the steps, and
admission by v_served = v grants less than that, so the bound holds meanwhile; r is the first that
the trainer publishes, so it does not last.

Several rollout processes share the groups of each step. Each of R keeps both rules for itself, with
B / R in place of B, over groups that no other has. It counts its own running and waiting groups,
and uses the v_served that it was told, late and never early. So the claim holds in each with B / R,
and a step that takes B / R groups of each takes all in time, whatever the others do. It goes on
because each has its part as shown, later at most by the news of versions, or by its restart: from
its store, which still has the leased groups.

The proof needs two things from outside: tokens are known here before v_served rises past their
version, and steps are taken in the order of their versions. If that fails (a token overtaken by its
engine's attestation), more groups can be due than batches are left. `surplus` names the last of
them to finish, so that earlier ones are kept. They are closed, and never trained too old.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from midflight.types import Group, Int32, Row, Trajectory, Version


@dataclass(frozen=True, slots=True)
class Lineage:
    """Numbers versions anew, so that their difference counts steps after a trainer has gone on from
    a checkpoint under a number that was not the next one. Each fork has that number, and the
    distance by which all versions before it move up.
    """

    forks: tuple[tuple[Version, int], ...] = ()

    def forked(self, checkpoint: Version, version: Version) -> Lineage:
        """The weights of `checkpoint` go on as `version`, a number above all that there were."""
        up = version - int(self.renumbered(np.array([checkpoint], np.int32))[0])
        return Lineage((*self.forks, (version, up))) if up else self

    def renumbered(self, versions: Int32) -> Int32:
        """The versions as if no number had been skipped: a later version minus these counts the
        steps between.
        """
        moved = versions.copy()
        for first, up in self.forks:
            moved[versions < first] += up
        return moved

    def between(self, version: Version) -> tuple[Version, Version]:
        """The least and the most that the oldest token of a group can be, renumbered, if `version`
        is its smallest number.
        """
        firsts = [first for first, _ in self.forks if first > version]
        own, *later = self.renumbered(np.array([version, *firsts], np.int32)).tolist()
        return min([own, *later]), own

    def group(self, group: Group) -> Group:
        """The group with the versions of its tokens renumbered."""
        if not self.forks:
            return group
        trajectories: list[Trajectory] = []
        for trajectory in group.trajectories:
            rows = tuple(self._row(row) for row in trajectory.rows)
            trajectories.append(replace(trajectory, rows=rows))
        return replace(group, trajectories=tuple(trajectories))

    def _row(self, row: Row) -> Row:
        return replace(
            row,
            versions=self.renumbered(row.versions),
            kv_versions=self.renumbered(row.kv_versions),
        )


def credit(
    *,
    open_groups: int,
    next_version: Version,
    served_version: Version,
    max_staleness: int,
    groups_per_step: int,
) -> int:
    """The number of groups that may still start. It is not positive if none may. `open_groups` are
    running or waiting, not yet in a batch.

    `next_version` is w: the version of the next step that has no batch yet. At S = 0 this is B once
    per version, and nothing while a step's new version is not yet served: nothing is prefetched. A
    served version is beyond w only after a trainer restarted at an older version. It gives no more
    credit than w would.
    """
    steps = min(served_version, next_version) + max_staleness + 1 - next_version
    return steps * groups_per_step - open_groups


def overfull(
    left_behind: Iterable[Version],
    train_version: Version,
    *,
    max_staleness: int,
    groups_per_step: int,
) -> Version | None:
    """The smallest u = v + k - S for which more than k B of the groups left behind are <= u. `None`
    if the batch may be taken.

    `left_behind` holds the oldest token version of every group, finished or running, that has a
    token and is not in the batch.
    """
    ordered = sorted(left_behind)
    if not ordered:
        return None
    for k in range(max(0, _first(ordered[0], train_version, max_staleness)), max_staleness + 1):
        bound = train_version + k - max_staleness
        if bisect_right(ordered, bound) > k * groups_per_step:
            return bound
    return None


def _first(oldest: Version, train_version: Version, max_staleness: int) -> int:
    """The first k whose v + k - S is as new as the oldest token. Below it there is nothing to count,
    however large S is.
    """
    return oldest - train_version + max_staleness


def surplus(
    finished: Iterable[tuple[Version, int]],
    train_version: Version,
    *,
    max_staleness: int,
    groups_per_step: int,
) -> frozenset[int]:
    """The finished groups that no batch can take in time: none while the proof's assumptions hold.

    `finished` holds the oldest version of each and its place in the order of finishing, and these
    places are returned. For k = -1..S at most (k + 1) B of them may be <= v + k - S, the batches of
    steps v..v + k. With k = -1 it is the rule that over-age groups cannot be trained at all.
    """
    left = sorted(finished, key=lambda one: one[1])
    shed = set[int]()
    if not left:
        return frozenset()
    first = _first(min(oldest for oldest, _ in left), train_version, max_staleness)
    for k in range(max(-1, first), max_staleness + 1):
        bound = train_version + k - max_staleness
        due = [order for oldest, order in left if oldest <= bound and order not in shed]
        shed.update(due[(k + 1) * groups_per_step :])
    return frozenset(shed)


def ages(trajectories: Iterable[Trajectory], train_version: Version) -> Mapping[int, int]:
    """Trainable tokens by age: the version that begins the step minus the version that sampled
    them. Tokens whose version was lost with a trainer have age 0.
    """
    sampled = [np.zeros(0, np.int32)]
    for trajectory in trajectories:
        for row in trajectory.rows:
            sampled.append(row.versions[row.loss_mask].clip(max=train_version))
    versions, counts = np.unique(np.concatenate(sampled), return_counts=True)
    numbers = zip(versions.tolist(), counts.tolist(), strict=True)
    return {train_version - version: number for version, number in numbers}
