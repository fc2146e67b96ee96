"""Conditions of a run that people should look at, as `Alarmed` facts for terminal, journal and
Prometheus.

The comment `#:` before an alarm says when it is raised; docs/metrics.md is made of these.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable

from midflight.observe.failures import Failures, most_common, own_frames, shortened
from midflight.observe.learning_alarms import LearningAlarms, LearningOptions
from midflight.observe.readable import number
from midflight.observe.status import is_incomplete
from midflight.types import Kind, Reason, facts

REPEAT_SECONDS = 600.0
"""Seconds before an alarm is repeated: a cause that comes and goes must not fill a log."""
WINDOW = 64
MIN_FAILED = 8
FAILED_SHARE = 0.1
"""A tenth of the last 64 tries of rollouts, and at least 8, must have failed: one bad answer of a
tool is no alarm.
"""
EQUAL_STEPS = 3
"""Steps' worth of rollouts without a difference between their rewards: one batch of hard tasks is
no alarm.
"""
OFF_POLICY_STEPS = 8
"""Steps in a row whose readings are out of their bounds. A run that learns quickly is out of that
of `rho/k1` for six steps, with an effective sample size above 0.9.
"""

WHY_DROPPED = {
    Reason.NO_REWARD: (
        "none of its rollouts had both a reward and an answer of the model; mend the environment "
        "or what it depends on"
    ),
    Reason.TOO_FEW: (
        "too few of its rollouts could be scored; mend the environment, or lower "
        "rollout.min_group_size"
    ),
    Reason.STALE: (
        "its tokens had grown too old; raise rollout.max_staleness, or let rollouts be shorter"
    ),
    Reason.NOT_FINITE: (
        "the loss on it was not finite; look at the rewards and at trainer.learning_rate"
    ),
    Reason.SKIPPED: "its step was not made; look at the trainer's readings in the journal",
}
"""The remedy for each reason for which training loses a group. Groups without a difference are left
out on purpose, and requeued ones come again.
"""

USE_THE_CLIENT = (
    "The agent must use the client that it is given. One that brings a client of its own makes it "
    "with the base_url and api_key of that one: AsyncOpenAI(base_url=client.base_url, "
    "api_key=client.api_key)."
)
"""The advice if an agent asks another model than ours."""

UNMASK = (
    'Let the agent leave the field out, or set gateway.sampling = "run", which puts the run\'s own '
    "sampling in its place. A form that answers must match (response_format, tool_choice, "
    "tools.strict) can be left out only by the agent; what begins with `sampling.` is the "
    "session's own, as environment.top_p sets it."
)
"""The advice if an agent's requests sample from another distribution than the policy's."""

TOO_FAR = (
    "What it trains on is not what its policy would say: lower rollout.max_staleness or "
    "trainer.learning_rate, and look at mismatch/mean, which is of engine and trainer alone. "
    "trainer.on_alarm says what becomes of such a step."
)
"""The advice if readings of the trainer are out of their bounds."""

_log = logging.getLogger(__name__)


class Alarms:
    """Watches facts and records `Alarmed`. The whole traceback of each first failure goes to this
    process's log.
    """

    def __init__(
        self,
        record: Callable[[facts.Alarmed], None],
        *,
        log: str = "the log",
        step_rollouts: int | None = None,
        learning: LearningOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log` names the place of this process's log. `step_rollouts` counts the rollouts of one
        step; it is None if training needs no differing rewards. `learning` is given by a run that
        trains.
        """
        self._record = record
        self._log = log
        self._clock = clock
        self._equal_after = None if step_rollouts is None else EQUAL_STEPS * step_rollouts
        self._said: dict[str, float] = {}
        self._failures = Failures()
        self._recent: deque[str | None] = deque(maxlen=WINDOW)  # the class of each try that failed
        self._reward: float | None = None
        self._num_equal = 0
        self._num_off_policy = 0
        self._lost: set[str] = set()
        self._teaching = None if learning is None else LearningAlarms(self._say, learning)

    def apply(self, fact: facts.Fact) -> None:
        if self._teaching is not None:
            self._teaching.apply(fact)
        match fact:
            case facts.RolloutEnded(reward=None):
                self._failed(fact)
            case facts.RolloutEnded():
                self._scored(fact)
            case facts.SessionEnded() if fact.masked and not fact.num_trainable:
                self._all_masked(fact)
            case facts.Evaluated() if is_incomplete(fact.num_tasks, fact.num_failed):
                self._evaluated(fact)
            case facts.GroupClosed(reason=reason) if reason in WHY_DROPPED:
                self._dropped(fact)
            case facts.Stepped():
                self._stepped(fact)
            case facts.Quarantined(engine=engine, error=error):
                text = f"{engine} gets no more requests: {shortened(error)}"
                #: `engine_lost`, `engine_back`: An engine serves no requests, and serves them again.
                if self._say("engine_lost", text, about=engine):
                    self._lost.add(engine)
            case facts.Rejoined(engine=engine, version=version) if engine in self._lost:
                self._lost.discard(engine)
                text = f"{engine} gets requests again, at version {version}"
                self._record(facts.Alarmed("engine_back", text))
            case _:
                pass

    def _stepped(self, step: facts.Stepped) -> None:
        """Raises one alarm for one cause: for the first steps that is their size."""
        is_too_large = self._teaching is not None and self._teaching.stepped(step)
        self._num_off_policy = self._num_off_policy + 1 if step.alarms else 0
        if self._num_off_policy >= OFF_POLICY_STEPS and not is_too_large:
            readings = "; ".join(step.alarms)
            #: Eight steps in a row a reading is [out of its bounds](#alarms).
            self._say(
                "off_policy",
                f"the step to version {step.version}, the last of {self._num_off_policy} in a row: "
                f"{readings}. {TOO_FAR}",
            )

    def _say(self, name: str, text: str, *, about: str = "") -> bool:
        """Raises an alarm, unless the same was raised a short while ago. Returns whether it did."""
        now = self._clock()
        if now - self._said.get(name + about, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return False
        self._said[name + about] = now
        self._record(facts.Alarmed(name, text))
        return True

    def _dropped(self, closed: facts.GroupClosed) -> None:
        at = f"task {closed.key.index} of epoch {closed.key.epoch}"
        why = WHY_DROPPED[closed.reason]
        #: A group is lost to training (the first for each reason).
        self._say(
            "group_dropped",
            f"a group was dropped ({at}, {closed.num_tokens} tokens): {why}.",
            about=closed.reason.value,
        )

    def _all_masked(self, session: facts.SessionEnded) -> None:
        fields = ", ".join(session.masked_by) or "a record that its engine left out"
        masked = sum(session.masked.values())
        #: All tokens of a session are masked, because of which fields of requests.
        self._say(
            "all_masked",
            f"all {masked} tokens of a session are masked ({', '.join(session.masked)}), because "
            f"of {fields}: nothing of it is trained. {UNMASK}",
            about=fields,
        )

    # --- Rollouts ---

    def _failed(self, rollout: facts.RolloutEnded) -> None:
        name = self._failures.add(rollout.error)
        if self._failures.counts[name] == 1:
            self._first(name, rollout)
        if rollout.key.kind is not Kind.TRAINING:
            return
        self._recent.append(name)
        counts = Counter(failed for failed in self._recent if failed is not None)
        if counts.total() >= max(MIN_FAILED, FAILED_SHARE * len(self._recent)):
            seen = (
                f"{counts.total()} of the last {len(self._recent)} rollouts got no reward: "
                f"{most_common(counts)}"
            )
            #: A tenth of the last 64 tries, and 8 at least, got no reward.
            self._say(
                "failures",
                f"{seen}. They are in no mean and no gradient; mend the environment, or what "
                "it depends on.",
            )

    def _first(self, name: str, rollout: facts.RolloutEnded) -> None:
        """Raises the alarm on the first failure of a class, of which there are not many."""
        error = shortened(rollout.error or "a reward of None")
        lines = [f"a rollout of {rollout.source} got no reward, the first by {error}"]
        if rollout.trace is not None:
            _log.warning(
                "the first %s of a rollout (%s of %s):\n%s",
                name,
                rollout.key,
                rollout.source,
                rollout.trace,
            )
            lines += [f"  {place}" for place in own_frames(rollout.trace)]
            lines += [f"  the whole traceback: {self._log}"]
        #: A rollout got no reward, the first by this class of error.
        self._record(facts.Alarmed("failure", "\n".join(lines)))

    def _scored(self, rollout: facts.RolloutEnded) -> None:
        if rollout.num_turns == 0:
            #: A rollout was scored without an answer of the model. Eight such groups in a row end the
            #: run.
            self._say(
                "no_model_call",
                f"a rollout of {rollout.source} was scored {number(rollout.reward)} without an "
                f"answer of the model, so there is nothing to train on. {USE_THE_CLIENT}",
            )
        if rollout.key.kind is not Kind.TRAINING:
            return
        self._recent.append(None)
        self._num_equal = self._num_equal + 1 if rollout.reward == self._reward else 1
        self._reward = rollout.reward
        if self._num_equal == self._equal_after:
            #: Three steps' worth of rollouts have one reward (not with a teacher).
            self._say(
                "rewards_equal",
                f"the last {self._num_equal} rollouts ({EQUAL_STEPS} steps) all got reward "
                f"{number(self._reward)}: without a difference there is nothing to learn. Are the "
                "tasks too easy or too hard, or does the reward not look at the answer?",
            )

    def _evaluated(self, score: facts.Evaluated) -> None:
        total = score.num_tasks + score.num_failed
        error = shortened(score.error or "a reward of None")
        #: An evaluation is `incomplete`.
        self._say(
            "evaluation_incomplete",
            f"the held-out score of {score.source} at version {score.version} is "
            f"{number(score.mean_reward)} over {score.num_tasks} of {total} tasks; "
            f"{score.num_failed} failed ({error}). Do not "
            "compare it with other scores.",
            about=score.source,
        )
