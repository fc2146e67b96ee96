"""Alarms about the material of training: groups whose rewards are all alike, answers that are cut
short, and first steps that go too far.

Each names the number, why it matters, and which option to change in which direction.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from midflight.observe.readable import number, percent
from midflight.types import Group, Kind, Reason, facts

STEPS = 2
"""The number of steps whose groups the alarm on groups looks back on."""
MIN_GROUPS = 16
"""It looks back on at least this many groups."""
ALIKE_SHARE = 0.75
"""It is raised if the rewards of this share of those groups are alike. The rewards of a group of 8
are alike more often than that if the model is right less than once in 28 times.
"""
LEARNED = 0.1
"""If the mean reward has risen by this much since the first groups, the run learns from its tasks:
that many of them are all right by now is what it was made for, and no alarm.
"""
ROLLOUTS = 64
"""The number of rollouts that the alarm on answers cut short looks back on."""
MIN_ROLLOUTS = 32
"""It says nothing before this many have ended."""
CUT_SHARE = 0.25
"""It is raised if this share of them were cut short."""
FIRST_VERSIONS = 10
"""The number of versions that the alarm on the size of steps watches. Later steps have other
reasons to go far.
"""
FAR = 0.25
"""Nats between the policy that sampled and the one that trains, within `rollout.max_staleness`
steps. From 0.1 on a step is off its policy; runs that learn quickly get there in their first ten
steps, and with steps fifteen times too large a model is at 0.8 after three."""

LATER = " trainer.on_alarm says what becomes of such a step."


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """The options of the run that these alarms mention."""

    group_size: int
    groups_per_step: int
    max_tokens: int
    max_context: int
    learning_rate: float | None
    """None if another program trains."""
    usual_rate: float
    """The learning rate that is usual for a model of this size."""
    draws_by_pass_rate: bool = False
    draws_others: bool = False
    """True if `rollout.drop_zero_spread` replaces groups whose rewards are alike."""
    compares: bool = True
    """True if the rewards of a group are compared, so that a group whose rewards are alike teaches
    nothing.
    """
    masks_truncated: bool = False


class LearningAlarms:
    """Watches facts. `say` takes the name of an alarm and its text, and does not repeat the same
    alarm for a while.
    """

    def __init__(self, say: Callable[[str, str], object], options: LearningOptions) -> None:
        self._say = say
        self._options = options
        self._groups: deque[tuple[float, ...]] = deque(
            maxlen=max(MIN_GROUPS, STEPS * options.groups_per_step)
        )
        self._num_alike = 0
        """The number of these groups whose rewards are alike."""
        self._rollouts: deque[facts.RolloutEnded] = deque(maxlen=ROLLOUTS)
        self._num_cut = 0
        """The number of these rollouts that were cut short."""
        self._distance: float | None = None
        self._first_mean: float | None = None

    def apply(self, fact: facts.Fact) -> None:
        match fact:
            case facts.GroupFinished(group=group):
                self._group(_rewards(group))
            case facts.GroupClosed(reason=Reason.ZERO_SPREAD, alike=alike):
                if alike is not None:
                    reward = float(alike == "passed")
                    self._group((reward,) * self._options.group_size)
            case facts.RolloutEnded() if fact.key.kind is Kind.TRAINING and fact.reward is not None:
                self._rollout(fact)
            case _:
                pass

    # --- Groups that are alike --------------------------------------------------------------------

    def _group(self, rewards: tuple[float, ...]) -> None:
        if len(rewards) < 2 or not self._options.compares:
            return
        if len(self._groups) == self._groups.maxlen:
            self._num_alike -= _are_alike(self._groups[0])
        self._groups.append(rewards)
        self._num_alike += _are_alike(rewards)
        if len(self._groups) != self._groups.maxlen:
            return
        if self._first_mean is None:
            self._first_mean = self._mean()
        if self._num_alike < ALIKE_SHARE * len(self._groups):
            return
        if self._mean() < self._first_mean + LEARNED:
            #: Three quarters of the last 16 groups (two steps' worth if more) had one reward. Not with a
            #: critic or a teacher, nor once the mean reward has risen by 0.1.
            self._say("groups_alike", self._alike())

    def _mean(self) -> float:
        rewards = list(chain.from_iterable(self._groups))
        return sum(rewards) / len(rewards)

    def _alike(self) -> str:
        total = len(self._groups)
        alike = [group[0] for group in self._groups if _are_alike(group)]
        rewards = list(chain.from_iterable(self._groups))
        middle = (min(rewards) + max(rewards)) / 2
        num_low = sum(reward < middle for reward in alike)
        if self._options.draws_others:
            spent = "others were drawn in their place"
        else:
            spent = "they leave the weights as they are"
        seen = (
            f"{len(alike)} of the last {total} groups ({percent(len(alike) / total)}) had one "
            f"reward for all their answers, {number(sum(alike) / len(alike))} in the mean: such a "
            f"group has nothing to compare, so that what it cost is lost; {spent}."
        )
        if min(rewards) == max(rewards):
            return (
                f"{seen} No reward differs from another: are the tasks too easy or too hard, "
                "or does the reward not look at the answer?"
            )
        if 2 * num_low >= len(alike):
            return f"{seen} Most are too hard: {self._for_hard()}."
        return f"{seen} Most are too easy: {self._draw('take harder tasks')}."

    def _for_hard(self) -> str:
        size = self._options.group_size
        larger = (
            f"raise rollout.group_size ({size}, {2 * size} would be next), so that a rare "
            "right answer is seen beside wrong ones"
        )
        ways = self._draw("take easier tasks, or a reward that is worth something on the way")
        return f"{ways}; or {larger}"

    def _draw(self, first: str) -> str:
        """The ways to change which groups are trained on: `first`, and the options that are not set
        already.
        """
        options = self._options
        ways = [first]
        if not options.draws_by_pass_rate:
            ways.append(
                'set curriculum.priority = "learnability", which draws the tasks that it can learn '
                "more often"
            )
        if not options.draws_others:
            ways.append(
                "set rollout.drop_zero_spread = true, which fills steps with groups that differ, "
                "for more generation"
            )
        return "; or ".join(ways)

    # --- Answers that are cut short ---------------------------------------------------------------

    def _rollout(self, rollout: facts.RolloutEnded) -> None:
        if len(self._rollouts) == self._rollouts.maxlen:
            self._num_cut -= self._rollouts[0].truncated
        self._rollouts.append(rollout)
        self._num_cut += rollout.truncated
        total = len(self._rollouts)
        if total >= MIN_ROLLOUTS and self._num_cut >= CUT_SHARE * total:
            #: A quarter of the last 64 rollouts (32 at least) were cut short.
            self._say("answers_cut", self._cut())

    def _cut(self) -> str:
        options = self._options
        total = len(self._rollouts)
        cut = [rollout for rollout in self._rollouts if rollout.truncated]
        ended = [rollout.num_tokens for rollout in self._rollouts if not rollout.truncated]
        if ended:
            long = f"; those that ended by themselves had at most {max(ended)} tokens"
        else:
            long = "; none ended by itself"
        masked = ""
        if not options.masks_truncated:
            masked = ", and objective.mask_truncated = true keeps them out of the loss"
        return (
            f"{len(cut)} of the last {total} rollouts ({percent(len(cut) / total)}) were cut "
            f"short{long}. What is cut off is rewarded as it stands, often before the answer came, "
            f"and the model does not learn to end. {self._longer(cut)}; shorter answers may be "
            f"asked for in the prompt{masked}."
        )

    def _longer(self, cut: list[facts.RolloutEnded]) -> str:
        """Names the limit to raise. One answer that ended below `max_tokens` met the context, or a
        limit of the agent's own.
        """
        options = self._options
        by_context = [
            rollout
            for rollout in cut
            if rollout.num_turns == 1 and rollout.num_tokens < options.max_tokens
        ]
        if 2 * len(by_context) > len(cut):
            return (
                "Most of them had fewer tokens than environment.max_tokens "
                f"({options.max_tokens}): raise model.max_context ({options.max_context}), or the "
                "limit that the agent itself asks for"
            )
        wanted = 2 * options.max_tokens
        room = ""
        if 2 * wanted > options.max_context:
            room = f", with model.max_context ({options.max_context})"
        return f"Raise environment.max_tokens ({options.max_tokens}, {wanted} would be next){room}"

    # --- Steps that go too far --------------------------------------------------------------------

    def stepped(self, step: facts.Stepped) -> bool:
        """Raises the alarm if one of the first steps went so far that its size is to blame. Returns
        whether it did.
        """
        rate = self._options.learning_rate
        distance = max(abs(step.metrics.get("rho/k1", 0.0)), step.metrics.get("rho/k3", 0.0))
        before = self._distance
        self._distance = distance
        if rate is None or step.version > FIRST_VERSIONS or distance <= FAR:
            return False
        #: One of the first ten steps moved more than 0.25 nats (`rho/k1`, `rho/k3`).
        self._say("step_size", self._far(step, rate, distance, before))
        return True

    def _far(self, step: facts.Stepped, rate: float, distance: float, before: float | None) -> str:
        usual = self._options.usual_rate
        grown = "" if before is None else f", after {number(before)} at the step before"
        compared = f"; a model of this size learns at about {usual:g}" if usual < rate else ""
        return (
            f"the step to version {step.version}: its policy is {number(distance)} nats from the "
            f"one that sampled its batch (train/rho/k1, k3){grown}, and more than {FAR:g} is far. "
            "So soon that comes of steps which are too large: the model forgets what it could, "
            "and what it sampled before teaches it little. Lower trainer.learning_rate "
            f"({rate:g}{compared}): begin again with --overwrite --set "
            f"trainer.learning_rate={lower_rate(rate, usual):g}. A smaller rollout.max_staleness "
            f"helps too.{LATER}"
        )


def lower_rate(rate: float, usual: float) -> float:
    """The usual rate, or a third of `rate` if the usual one is not lower. It has one digit."""
    wanted = usual if usual < rate else rate / 3
    exponent = math.floor(math.log10(wanted))
    return float(f"{round(wanted / 10**exponent)}e{exponent}")


def _are_alike(rewards: tuple[float, ...]) -> bool:
    return min(rewards) == max(rewards)


def _rewards(group: Group) -> tuple[float, ...]:
    return tuple(
        trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None
    )
