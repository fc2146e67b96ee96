"""What there is to learn from: how long rollouts are and what of them is trained, how many were cut
short, how far rewards of a group differ.
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
    """At least one value, in bins of one width from the smallest to the largest: as many as there
    are whole numbers between, at most `MAX_BINS`.

    Where all are alike there is one bin, half to each side of them.
    """
    low = min(values)
    high = max(values)
    if low == high:
        return Histogram((low - 0.5, high + 0.5), (len(values),))
    bins = (
        min(MAX_BINS, int(high - low) + 1)
        if all(float(value).is_integer() for value in values)
        else MAX_BINS
    )
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    return Histogram(tuple(low + (high - low) * i / bins for i in range(bins + 1)), tuple(counts))


LEARNED_FROM = (
    facts.RolloutEnded,
    facts.GroupFinished,
    facts.GroupClosed,
    facts.Leased,
    facts.TaskDrawn,
)
"""The facts that say something of this. An engine's steps, hundreds a second, do not."""


class Learning:
    """Of the training rollouts with a reward, and of their groups: the last `window` of each, or
    all.
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
                self._spreads.append(
                    deviation([t.reward for t in group.trajectories if t.reward is not None])
                )
            # it never waited for a step
            case facts.GroupClosed(reason=Reason.ZERO_SPREAD, alike=alike):
                self._spreads.append(0.0)
                self._refilled.extend([] if alike is None else [f"refilled/{alike}"])
            case facts.TaskDrawn():
                self._drawn.append(fact)
            case facts.Leased(batch=batch):
                self._trained.extend(
                    t.num_trainable for group in batch.groups for t in group.trajectories if t.rows
                )
            case _:
                pass

    def histograms(self) -> dict[str, Histogram]:
        """Rewards, and tokens of rollouts: generated, those of rollouts cut short, trained. What
        there was none of is left out.
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
            components=_means(rollout.components for rollout in self._rollouts),
            metrics=_means(rollout.metrics for rollout in self._rollouts),
            curriculum=self._curriculum(),
        )

    def _curriculum(self) -> dict[str, float]:
        """`refilled/...`: groups whose rewards were all alike, and `drawn/...`: tasks begun, both
        counts; `pool/...` and `pass_rate` of the last.
        """
        found = Counter([*self._refilled, *(f"drawn/{drawn.pool}" for drawn in self._drawn)])
        last = self._drawn[-1] if self._drawn else None
        sizes = (
            {}
            if last is None
            else {f"pool/{pool}": float(size) for pool, size in last.sizes.items()}
        )
        rate = {} if last is None or last.pass_rate is None else {"pass_rate": last.pass_rate}
        return {name: float(number) for name, number in sorted(found.items())} | sizes | rate


def deviation(numbers: Sequence[float]) -> float:
    """The standard deviation, over n - 1, of at least two numbers; exactly 0 where they are all
    alike.
    """
    if min(numbers) == max(numbers):
        return 0.0
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))


def _lengths(rollouts: Iterable[facts.RolloutEnded]) -> dict[str, float]:
    tokens = [(rollout.num_tokens, rollout.truncated) for rollout in rollouts]
    every = [length for length, _ in tokens]
    ended = [length for length, truncated in tokens if not truncated]
    found = {"min": float(min(every)), "max": float(max(every))} if every else {}
    if ended:
        found |= {
            "terminated_mean": sum(ended) / len(ended),
            "terminated_min": float(min(ended)),
            "terminated_max": float(max(ended)),
        }
    return found


def _means(said: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each name, over those that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for each in said:
        for name, value in each.items():
            values[name].append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
