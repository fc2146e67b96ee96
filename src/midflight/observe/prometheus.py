"""The metrics of `GET /metrics`: an observer that takes facts and writes the text format."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from midflight.observe.failures import Failures
from midflight.observe.status import LearningStatus
from midflight.types import Accounts, Fate, Kind, facts

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)

LEARNING = (
    ("generated_length", "midflight_generated_length", "Mean output tokens of a recent rollout."),
    (
        "trained_length",
        "midflight_trained_length",
        "Mean tokens that a recent rollout was trained on.",
    ),
    ("truncated_share", "midflight_truncated_share", "Recent rollouts that a limit cut short."),
    (
        "reward_spread",
        "midflight_reward_spread",
        "Mean standard deviation of the rewards within a recent group.",
    ),
    ("turns_mean", "midflight_turns_mean", "Mean answers of the model in a recent rollout."),
    (
        "zero_spread_share",
        "midflight_zero_spread_share",
        "Recent groups whose rewards are all alike.",
    ),
)


class Buckets:
    """A histogram that one thread fills at every request: the library's locks would cost more than
    the counting.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._numbers = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._numbers[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        return sum(self._numbers)

    def metric(self) -> Metric:
        upto = [floatToGoString(bound) for bound in self._bounds]
        upto.append(floatToGoString(math.inf))
        buckets = list(zip(upto, accumulate(self._numbers), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


def _with_each(family: GaugeMetricFamily, means: Mapping[str, float]) -> Metric:
    """The family with a value for each name."""
    for label, value in means.items():
        family.add_metric([label], value)
    return family


class Metrics:
    """The metrics of one gateway. They have a registry of their own, so that two gateways in one
    process (or test) don't share counters.
    """

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self._engine_tokens = Counter(
            "midflight_engine_tokens", "Output tokens of an engine.", ["engine"], registry=r
        )
        self._running = Gauge(
            "midflight_engine_running", "Requests decoding together.", ["engine"], registry=r
        )
        self._step_seconds = Histogram(
            "midflight_engine_step_seconds",
            "Length of one decode step.",
            ["engine"],
            buckets=SECONDS,
            registry=r,
        )
        self._sessions = Counter("midflight_sessions_closed", "Sessions that ended.", registry=r)
        self._branches = Counter(
            "midflight_branches",
            "Turns that did not go on from the newest end of their session.",
            registry=r,
        )
        self._rewritten = Counter(
            "midflight_rewritten_histories",
            "Chats whose recorded history came back changed: their prefix is prefilled again.",
            registry=r,
        )
        self._mismatches = Counter(
            "midflight_retokenisation_mismatches",
            "Prompts that would have other ids if tokenised anew.",
            registry=r,
        )
        self._masked_by = Counter(
            "midflight_masked_tokens",
            "Tokens not sampled from the policy, by the field of the request.",
            ["field"],
            registry=r,
        )
        self._replaced = Counter(
            "midflight_replaced_fields",
            "Requests in which the run's own sampling replaced a field.",
            ["field"],
            registry=r,
        )
        self._steps: dict[str, tuple[Counter, Gauge, Histogram]] = {}
        self.accounts: Callable[[], Accounts] | None = None
        self.learning: Callable[[], LearningStatus] = LearningStatus
        self.requests: Callable[[], Mapping[str, int]] = dict
        """Requests under way, by engine: those that it decodes, and those that wait inside it."""
        self.in_flight: Callable[[], Mapping[str, tuple[int, str]]] = dict
        """Returns the number of rollouts that may run at once, by kind, and the option that sets
        it.
        """
        self.engines: Callable[[], Mapping[str, int]] = dict
        """Returns the number of engines that are serving, joining, in quarantine or leaving."""
        self.memory: Callable[[], Mapping[tuple[str, str], int]] = dict
        """Resident bytes of the run's processes, by kind and pid."""
        r.register(self)
        self._prompt_tokens = 0
        self._output_tokens = Buckets(
            "midflight_turn_output_tokens", "Output tokens of one answer.", TOKENS
        )
        self._turn_seconds = Buckets("midflight_turn_seconds", "Time one answer took.", SECONDS)
        self._resumes = Counter(
            "midflight_resumes", "Generations that were interrupted and resumed.", registry=r
        )
        self._spanning = Counter(
            "midflight_turns_spanning_versions",
            "Answers whose tokens come from several versions.",
            registry=r,
        )
        self._failed = Counter(
            "midflight_failed_requests",
            "Requests that ended in an error at the agent's edge.",
            ["status"],
            registry=r,
        )
        self._rollouts = Counter(
            "midflight_rollouts",
            "Training rollouts that ended, by source and whether they were scored.",
            ["source", "scored"],
            registry=r,
        )
        self._alarms = Counter("midflight_alarms", "Alarms, by name.", ["name"], registry=r)
        self._reward = Gauge(
            "midflight_reward_sum",
            "Sum of the rewards of training rollouts, by source; divide by the scored ones.",
            ["source"],
            registry=r,
        )
        self._dropped = Counter(
            "midflight_dropped_groups", "Groups dropped, by reason.", ["reason"], registry=r
        )
        self._waited = Counter(
            "midflight_waited_seconds",
            "Idle time, by who waited for whom.",
            ["who", "for_whom"],
            registry=r,
        )
        self._count_training()

    def _count_training(self) -> None:
        r = self.registry
        self._failures = Failures()
        self._sources = dict[str, tuple[Histogram, Counter, Gauge]]()
        self._failed_rollouts = Counter(
            "midflight_failed_rollouts",
            "Rollouts without a reward, by class of error.",
            ["error"],
            registry=r,
        )
        self._ignored = Counter(
            "midflight_ignored_fields",
            "Requests with a field that has no effect.",
            ["path", "field"],
            registry=r,
        )
        self._refilled = Counter(
            "midflight_refilled_groups",
            "Groups replaced because all passed or all failed.",
            ["alike"],
            registry=r,
        )
        self._drawn = Counter(
            "midflight_drawn_tasks", "Tasks that a curriculum chose, by pool.", ["pool"], registry=r
        )
        self._pools = Gauge(
            "midflight_pool_tasks", "Tasks in a pool of the curriculum.", ["pool"], registry=r
        )
        self._trained = Counter(
            "midflight_trained_tokens",
            "Tokens in the loss; steps lost in a crash count too.",
            registry=r,
        )
        self._age = Counter(
            "midflight_trained_tokens_by_age",
            "Tokens in the loss, by age in versions.",
            ["age"],
            registry=r,
        )
        self._version = Gauge(
            "midflight_version", "Newest version made by the trainer.", registry=r
        )
        self._served = Gauge(
            "midflight_engine_version", "Version an engine serves.", ["engine"], registry=r
        )
        self._pause = Histogram(
            "midflight_commit_pause_seconds",
            "Pause of an engine for a commit.",
            buckets=SECONDS,
            registry=r,
        )
        self._staging = Histogram(
            "midflight_stage_seconds",
            "Time to bring a version into an engine.",
            buckets=SECONDS,
            registry=r,
        )
        self._handovers = Counter(
            "midflight_handovers", "Versions that an engine took.", ["engine"], registry=r
        )
        self._quarantines = Counter(
            "midflight_quarantines",
            "Times that an engine was put in quarantine.",
            ["engine"],
            registry=r,
        )
        self._joined = Counter(
            "midflight_engines_joined",
            "Engines that came while the run went on, moved ones too.",
            registry=r,
        )
        self._left = Counter(
            "midflight_engines_left", "Engines that left, moved or were given up.", registry=r
        )
        self._trainer_steps = Histogram(
            "midflight_step_seconds",
            "Length of one step of the trainer.",
            buckets=SECONDS,
            registry=r,
        )
        self._skipped = Counter(
            "midflight_skipped_steps", "Steps that left the weights as they were.", registry=r
        )
        self._checkpointed = Gauge(
            "midflight_checkpoint_version", "Version of the newest checkpoint.", registry=r
        )
        self._heldout = Gauge(
            "midflight_heldout_reward",
            "Mean reward on held-out tasks, last evaluation.",
            ["source"],
            registry=r,
        )
        self._unscored = Gauge(
            "midflight_heldout_failed",
            "Held-out tasks without a score, last evaluation.",
            ["source"],
            registry=r,
        )
        self._rollout_seconds = Histogram(
            "midflight_rollout_seconds",
            "Time one training rollout took.",
            ["source"],
            buckets=SECONDS,
            registry=r,
        )
        self._quarantined = Gauge(
            "midflight_engine_quarantined",
            "1 while an engine is in quarantine.",
            ["engine"],
            registry=r,
        )

    def _forget(self, engine: str) -> None:
        """Removes the gauges of an engine's present state, because it is no longer a member. The
        counters of its past work stay.
        """
        for gauge in (self._quarantined, self._served, self._running):
            with suppress(KeyError):
                gauge.remove(engine)
        self._steps.pop(engine, None)

    def _of_engine(self, engine: str) -> tuple[Counter, Gauge, Histogram]:
        """The metrics of an engine's steps. They are kept, because looking up their labels costs
        more than counting.
        """
        found = self._steps.get(engine)
        if found is None:
            found = (
                self._engine_tokens.labels(engine),
                self._running.labels(engine),
                self._step_seconds.labels(engine),
            )
            self._steps[engine] = found
        return found

    def _of_source(self, source: str) -> tuple[Histogram, Counter, Gauge]:
        """The metrics of a source's scored rollouts, kept for the same reason."""
        found = self._sources.get(source)
        if found is None:
            found = (
                self._rollout_seconds.labels(source),
                self._rollouts.labels(source, "yes"),
                self._reward.labels(source),
            )
            self._sources[source] = found
        return found

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics that are read at each scrape: the material of recent steps, and the
        accounts over all starts of the run.
        """
        yield from self._now()
        yield from self._answers()
        yield from self._recent(self.learning())
        if self.accounts is not None:
            yield from self._accounts(self.accounts())

    def _recent(self, learning: LearningStatus) -> Iterable[Metric]:
        for field, name, text in LEARNING:
            value = getattr(learning, field)
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        components = GaugeMetricFamily(
            "midflight_reward_component",
            "Mean of a component of the reward in recent rollouts.",
            labels=["name"],
        )
        yield _with_each(components, learning.components)
        measured = GaugeMetricFamily(
            "midflight_environment_metric",
            "Mean of what environments measured in recent rollouts.",
            labels=["name"],
        )
        yield _with_each(measured, learning.metrics)

    def _accounts(self, accounts: Accounts) -> Iterable[Metric]:
        groups = GaugeMetricFamily(
            "midflight_groups", "Groups of the run, by state.", labels=["state"]
        )
        for state in ("running", "waiting", "leased", "trained"):
            groups.add_metric([state], getattr(accounts, state))
        groups.add_metric(["dropped"], sum(accounts.dropped.values()))
        tokens = GaugeMetricFamily(
            "midflight_tokens",
            "Tokens of rollouts that have ended, by fate and reason.",
            labels=["fate", "reason"],
        )
        tokens.add_metric([Fate.WAITING.value, ""], accounts.waiting_tokens)
        tokens.add_metric([Fate.TRAINED.value, ""], accounts.trained_tokens)
        for reason, number in accounts.masked_tokens.items():
            tokens.add_metric([Fate.MASKED.value, reason], number)
        for reason, number in accounts.dropped_tokens.items():
            tokens.add_metric([Fate.DROPPED.value, reason], number)
        yield groups
        yield tokens

    def _now(self) -> Iterable[Metric]:
        requests = GaugeMetricFamily(
            "midflight_engine_requests",
            "Requests that an engine has, decoding or waiting.",
            labels=["engine"],
        )
        for engine, number in self.requests().items():
            requests.add_metric([engine], number)
        most = GaugeMetricFamily(
            "midflight_max_in_flight",
            "Rollouts that may run at once, by kind and limiting reason: set, slots, keys or staleness.",
            labels=["kind", "reason"],
        )
        for kind, (number, reason) in self.in_flight().items():
            most.add_metric([kind, reason], number)
        engines = GaugeMetricFamily(
            "midflight_engines", "Engines of the run, by state.", labels=["state"]
        )
        for state, number in self.engines().items():
            engines.add_metric([state], number)
        memory = GaugeMetricFamily(
            "midflight_process_bytes",
            "Resident memory of a process of the run.",
            labels=["process", "pid"],
        )
        for (kind, pid), size in self.memory().items():
            memory.add_metric([kind, pid], size)
        return [requests, most, engines, memory]

    def _answers(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "midflight_turns", "Answers given to agents.", self._turn_seconds.count
        )
        yield CounterMetricFamily(
            "midflight_prompt_tokens", "Prompt tokens of those answers.", self._prompt_tokens
        )
        yield self._output_tokens.metric()
        yield self._turn_seconds.metric()

    def text(self) -> bytes:
        """The body of `/metrics`."""
        return generate_latest(self.registry)

    def apply(self, fact: facts.Fact) -> None:
        match fact:
            case facts.EngineStepped():
                tokens, running, seconds = self._of_engine(fact.engine)
                tokens.inc(fact.num_tokens)
                running.set(fact.num_running)
                seconds.observe(fact.ended - fact.started)
            case facts.TurnFinished():
                self._turn(fact)
            case facts.SessionEnded():
                self._session(fact)
            case facts.RequestFailed() | facts.FieldsIgnored():
                self._asked(fact)
            case facts.RolloutEnded():
                self._rollout(fact)
            case facts.Alarmed(name=name):
                self._alarms.labels(name).inc()
            case facts.GroupClosed() | facts.TaskDrawn():
                self._tasks(fact)
            case facts.Waited(who=who, for_whom=for_whom, seconds=seconds):
                self._waited.labels(who, for_whom).inc(max(0.0, seconds))
            case facts.Resumed():
                self._resumed(fact)
            case facts.Leased() | facts.Stepped():
                self._trained_on(fact)
            case facts.WeightsCommitted() | facts.Quarantined() | facts.Rejoined():
                self._serves(fact)
            case facts.EngineJoined(engine=engine):
                self._joined.inc()
                self._quarantined.labels(engine).set(1)
            case facts.EngineLeft(engine=engine):
                self._left.inc()
                self._forget(engine)
            case facts.Checkpointed(version=version):
                self._checkpointed.set(version)
            case facts.Evaluated(source=source):
                reward = float("nan") if fact.mean_reward is None else fact.mean_reward
                self._heldout.labels(source).set(reward)
                self._unscored.labels(source).set(fact.num_failed)
            case _:
                pass

    def _tasks(self, fact: facts.GroupClosed | facts.TaskDrawn) -> None:
        match fact:
            case facts.GroupClosed(reason=reason, alike=alike):
                self._dropped.labels(reason.value).inc()
                if alike is not None:
                    self._refilled.labels(alike).inc()
            case facts.TaskDrawn(pool=pool, sizes=sizes):
                self._drawn.labels(pool).inc()
                for name, size in sizes.items():
                    self._pools.labels(name).set(size)

    def _turn(self, turn: facts.TurnFinished) -> None:
        self._prompt_tokens += turn.num_prompt_tokens
        self._output_tokens.observe(turn.num_output_tokens)
        self._turn_seconds.observe(turn.seconds)
        if turn.num_resumes:
            self._resumes.inc(turn.num_resumes)
        if turn.num_versions > 1:
            self._spanning.inc()

    def _asked(self, fact: facts.RequestFailed | facts.FieldsIgnored) -> None:
        match fact:
            case facts.RequestFailed(status=status):
                self._failed.labels(str(status)).inc()
            case facts.FieldsIgnored(path=path, fields=fields):
                for field in fields:
                    self._ignored.labels(path, field).inc()

    def _rollout(self, rollout: facts.RolloutEnded) -> None:
        """Counts a rollout of training, and the failures of evaluations too."""
        if rollout.reward is None:
            self._failed_rollouts.labels(self._failures.add(rollout.error)).inc()
        if rollout.key.kind is not Kind.TRAINING:
            return
        if rollout.reward is None:
            self._rollout_seconds.labels(rollout.source).observe(rollout.seconds)
            self._rollouts.labels(rollout.source, "no").inc()
        else:
            seconds, scored, reward = self._of_source(rollout.source)
            seconds.observe(rollout.seconds)
            scored.inc()
            reward.inc(rollout.reward)  # a gauge, because rewards may be negative

    def _session(self, session: facts.SessionEnded) -> None:
        self._sessions.inc()
        for counter, number in (
            (self._branches, session.num_branches),
            (self._rewritten, session.num_rewritten),
            (self._mismatches, session.num_mismatches),
        ):
            if number:
                counter.inc(number)
        for labelled, counts in (
            (self._masked_by, session.masked_by),
            (self._replaced, session.replaced),
        ):
            for field, number in counts.items():
                labelled.labels(field).inc(number)

    def _resumed(self, resumed: facts.Resumed) -> None:
        """Lets the counters go on from the last values of the process that died."""
        for counts, scored in ((resumed.scored, "yes"), (resumed.failed, "no")):
            for source, number in counts.items():
                self._rollouts.labels(source, scored).inc(number)
        for source, total in resumed.rewards.items():
            self._reward.labels(source).inc(total)
        for reason, number in resumed.accounts.dropped.items():
            self._dropped.labels(reason).inc(number)
        self._trained.inc(resumed.accounts.trained_tokens)

    def _trained_on(self, fact: facts.Leased | facts.Stepped) -> None:
        match fact:
            case facts.Leased():
                for age, tokens in fact.staleness.items():
                    self._age.labels(str(age)).inc(tokens)
            case facts.Stepped():
                self._trained.inc(fact.num_tokens)
                self._version.set(fact.version)
                self._trainer_steps.observe(fact.ended - fact.started)
                self._skipped.inc(fact.skipped)

    def _serves(self, fact: facts.WeightsCommitted | facts.Quarantined | facts.Rejoined) -> None:
        match fact:
            case facts.WeightsCommitted():
                self._served.labels(fact.engine).set(fact.version)
                self._pause.observe(fact.pause_seconds)
                self._staging.observe(fact.stage_seconds)
                self._handovers.labels(fact.engine).inc()
            case facts.Quarantined():
                self._quarantined.labels(fact.engine).set(1)
                self._quarantines.labels(fact.engine).inc()
            case facts.Rejoined():
                self._quarantined.labels(fact.engine).set(0)
                self._served.labels(fact.engine).set(fact.version)
