"""The material that a run learns from: how long rollouts are and how much of them is trained, how
many were cut short, and how far the rewards of a group differ.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from midflight.observe.status import LearningStatus
from midflight.types import Kind, Reason, facts

MAX_BINS = 16


class Histogram(msgspec.Struct, frozen=True):
    """`counts[i]` values lie from `edges[i]` up to `edges[i + 1]`, the last edge included."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


def histogram(values: Sequence[float]) -> Histogram:
    """Counts values, of which there is at least one, in bins of equal width from the smallest to
    the largest. There are `MAX_BINS` bins, or fewer if whole numbers do not need as many.

    If all values are alike there is one bin, half to each side of them.
    """
    low = min(values)
    high = max(values)
    if low == high:
        return Histogram((low - 0.5, high + 0.5), (len(values),))
    bins = MAX_BINS
    if all(float(value).is_integer() for value in values):
        bins = min(MAX_BINS, int(high - low) + 1)
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    edges = tuple(low + (high - low) * i / bins for i in range(bins + 1))
    return Histogram(edges, tuple(counts))


LEARNED_FROM = (
    facts.RolloutEnded,
    facts.GroupFinished,
    facts.GroupClosed,
    facts.Leased,
    facts.TaskDrawn,
)
"""The facts that `Learning` counts. An engine's steps, hundreds a second, are not among them."""


class Learning:
    """Keeps the last `window` training rollouts with a reward, and as many of their groups, or all
    of them.
    """

    def __init__(self, window: int | None = None) -> None:
        self._rollouts: deque[facts.RolloutEnded] = deque(maxlen=window)
        self._trained: deque[int] = deque(maxlen=window)
        self._spreads: deque[float] = deque(maxlen=window)
        self._refilled: deque[str] = deque(maxlen=window)
        self._drawn: deque[facts.TaskDrawn] = deque(maxlen=window)

    def apply(self, fact: facts.Fact) -> None:
        match fact:
            case facts.RolloutEnded() if fact.key.kind is Kind.TRAINING and fact.reward is not None:
                self._rollouts.append(fact)
            case facts.GroupFinished(group=group) if len(group.trajectories) > 1:
                rewards = [t.reward for t in group.trajectories if t.reward is not None]
                self._spreads.append(deviation(rewards))
            case facts.GroupClosed(reason=Reason.ZERO_SPREAD, alike=alike):
                # Such a group never waited for a step, so that it was not in a `GroupFinished`.
                self._spreads.append(0.0)
                if alike is not None:
                    #: `curriculum/refilled/<which>`: Groups replaced because all passed or all failed.
                    #: Healthy: few.
                    self._refilled.append(f"refilled/{alike}")
            case facts.TaskDrawn():
                self._drawn.append(fact)
            case facts.Leased(batch=batch):
                for group in batch.groups:
                    self._trained.extend(t.num_trainable for t in group.trajectories if t.rows)
            case _:
                pass

    def histograms(self) -> dict[str, Histogram]:
        """The histograms of the rewards and of the tokens of rollouts: generated, of rollouts that
        were cut short, and trained. One without values is left out.
        """
        lengths = [rollout.num_tokens for rollout in self._rollouts]
        cut = [rollout.num_tokens for rollout in self._rollouts if rollout.truncated]
        rewards = [rollout.reward for rollout in self._rollouts if rollout.reward is not None]
        found = {
            "reward": rewards,
            "generated_length": lengths,
            "truncated_length": cut,
            "trained_length": list(self._trained),
        }
        return {name: histogram(values) for name, values in found.items() if values}

    def status(self) -> LearningStatus:
        return LearningStatus(
            generated_length=_mean([rollout.num_tokens for rollout in self._rollouts]),
            trained_length=_mean(self._trained),
            truncated_share=_mean([rollout.truncated for rollout in self._rollouts]),
            lengths=_lengths(self._rollouts),
            reward_spread=_mean(self._spreads),
            zero_spread_share=_mean([spread == 0 for spread in self._spreads]),
            turns_mean=_mean([rollout.num_turns for rollout in self._rollouts]),
            components=means(rollout.components for rollout in self._rollouts),
            metrics=means(rollout.metrics for rollout in self._rollouts),
            curriculum=self._curriculum(),
        )

    def _curriculum(self) -> dict[str, float]:
        """Returns the numbers of the curriculum. `pool/...` and `pass_rate` are those of the last
        task that was drawn.
        """
        counts = Counter(self._refilled)
        #: `curriculum/drawn/<pool>`, `curriculum/pool/<pool>`: Tasks begun from a pool (unseen, hard,
        #: learnable, easy), and tasks in it. Healthy: begins unseen and learnable ones; easy grows.
        counts.update(f"drawn/{drawn.pool}" for drawn in self._drawn)
        found = {name: float(number) for name, number in sorted(counts.items())}
        if self._drawn:
            last = self._drawn[-1]
            for pool, size in last.sizes.items():
                found[f"pool/{pool}"] = float(size)
            if last.pass_rate is not None:
                #: `curriculum/pass_rate`: Passes among the rollouts that pass rates look back on
                #: (share). Healthy: near 0.5 where tasks are drawn by learnability.
                found["pass_rate"] = last.pass_rate
        return found


def deviation(numbers: Sequence[float]) -> float:
    """The standard deviation, over n - 1, of at least two numbers. It is exactly 0 if they are all
    alike.
    """
    if min(numbers) == max(numbers):
        return 0.0
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))


def _lengths(rollouts: Sequence[facts.RolloutEnded]) -> dict[str, float]:
    every = [rollout.num_tokens for rollout in rollouts]
    ended = [rollout.num_tokens for rollout in rollouts if not rollout.truncated]
    found: dict[str, float] = {}
    if every:
        found["min"] = float(min(every))
        found["max"] = float(max(every))
    if ended:
        found["terminated_mean"] = sum(ended) / len(ended)
        found["terminated_min"] = float(min(ended))
        found["terminated_max"] = float(max(ended))
    return found


def means(said: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name's values, over those that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for each in said:
        for name, value in each.items():
            values[name].append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
