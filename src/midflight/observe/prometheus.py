"""Counters for `GET /metrics`, as an observer: facts in, the text format out."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from midflight.observe.observers import Silent
from midflight.types import GroupKey, Reason, RolloutKey, Version

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)


class Metrics(Silent):
    """One registry of its own, so that two gateways in one process (or test) don't share counters."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = r = CollectorRegistry()
        self._engine_tokens = Counter("midflight_engine_tokens", "Output tokens of an engine.", ["engine"], registry=r)
        self._running = Gauge("midflight_engine_running", "Requests decoding together.", ["engine"], registry=r)
        self._step_seconds = Histogram(
            "midflight_engine_step_seconds", "Length of one decode step.", ["engine"], buckets=SECONDS, registry=r
        )
        self._sessions = Counter("midflight_sessions_closed", "Sessions that ended.", registry=r)
        self._branches = Counter("midflight_branches", "Turns that did not go on from the newest end of their session.", registry=r)
        self._rewritten = Counter(
            "midflight_rewritten_histories", "Chats whose recorded history was sent or written otherwise.", registry=r
        )
        self._mismatches = Counter("midflight_retokenisation_mismatches", "Prompts that tokenising anew would have changed.", registry=r)
        self._steps: dict[str, tuple[Counter, Gauge, Histogram]] = {}
        self._turns = Counter("midflight_turns", "Answers given to agents.", registry=r)
        self._prompt_tokens = Counter("midflight_prompt_tokens", "Prompt tokens of those answers.", registry=r)
        self._output_tokens = Histogram("midflight_turn_output_tokens", "Output tokens of one answer.", buckets=TOKENS, registry=r)
        self._turn_seconds = Histogram("midflight_turn_seconds", "Time one answer took.", buckets=SECONDS, registry=r)
        self._resumes = Counter("midflight_resumes", "Generations that were interrupted and resumed.", registry=r)
        self._spanning = Counter("midflight_turns_spanning_versions", "Answers whose tokens come from several versions.", registry=r)
        self._failed = Counter("midflight_failed_requests", "Requests that ended in an error at the agent's edge.", ["status"], registry=r)
        self._rollouts = Counter(
            "midflight_rollouts", "Rollouts finished, by source and whether they were scored.", ["source", "scored"], registry=r
        )
        self._reward = Counter("midflight_reward_sum", "Sum of rewards; divide by the scored rollouts.", ["source"], registry=r)
        self._dropped = Counter("midflight_dropped_groups", "Groups dropped, by reason.", ["reason"], registry=r)
        self._waited = Counter("midflight_waited_seconds", "Idle time, by who waited for whom.", ["who", "for_whom"], registry=r)
        self._trained = Counter("midflight_trained_tokens", "Tokens the loss was taken over.", registry=r)
        self._age = Counter("midflight_trained_tokens_by_age", "The same by age in versions.", ["age"], registry=r)
        self._version = Gauge("midflight_version", "Newest version made by the trainer.", registry=r)
        self._served = Gauge("midflight_engine_version", "Version an engine serves.", ["engine"], registry=r)
        self._pause = Histogram("midflight_commit_pause_seconds", "Pause of an engine for a commit.", buckets=SECONDS, registry=r)
        self._quarantined = Gauge("midflight_engine_quarantined", "1 while an engine is in quarantine.", ["engine"], registry=r)

    def _of_engine(self, engine: str) -> tuple[Counter, Gauge, Histogram]:
        """The metrics of every step; to look their labels up costs more than to count."""
        found = self._steps.get(engine)
        if found is None:
            labelled = self._engine_tokens.labels(engine), self._running.labels(engine), self._step_seconds.labels(engine)
            found = self._steps[engine] = labelled
        return found

    def text(self) -> bytes:
        """The body of `/metrics`; its content type is `CONTENT_TYPE`."""
        return generate_latest(self.registry)

    def engine_stepped(self, *, engine: str, started: float, ended: float, num_tokens: int, num_running: int) -> None:
        tokens, running, seconds = self._of_engine(engine)
        tokens.inc(num_tokens)
        running.set(num_running)
        seconds.observe(ended - started)

    def turn_finished(
        self, *, session_id: str, num_prompt_tokens: int, num_output_tokens: int, num_versions: int, num_resumes: int, seconds: float
    ) -> None:
        self._turns.inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._output_tokens.observe(num_output_tokens)
        self._turn_seconds.observe(seconds)
        if num_resumes:
            self._resumes.inc(num_resumes)
        if num_versions > 1:
            self._spanning.inc()

    def session_closed(self, *, num_turns: int, num_branches: int, num_rewritten: int, num_mismatches: int) -> None:
        self._sessions.inc()
        self._branches.inc(num_branches)
        self._rewritten.inc(num_rewritten)
        self._mismatches.inc(num_mismatches)

    def request_failed(self, *, session_id: str | None, status: int, error: str) -> None:
        self._failed.labels(str(status)).inc()

    def rollout_finished(
        self, *, key: RolloutKey, source: str, reward: float | None, num_tokens: int, num_versions: int, seconds: float, error: str | None
    ) -> None:
        self._rollouts.labels(source, "no" if reward is None else "yes").inc()
        if reward is not None and reward > 0:  # a counter can't fall; negative rewards are in the journal
            self._reward.labels(source).inc(reward)

    def group_dropped(self, *, key: GroupKey, reason: Reason, num_tokens: int) -> None:
        self._dropped.labels(reason.value).inc()

    def waited(self, *, who: str, for_whom: str, seconds: float) -> None:
        self._waited.labels(who, for_whom).inc(max(0.0, seconds))

    def batch_taken(self, *, train_version: Version, num_groups: int, num_tokens: int, staleness: Mapping[int, int]) -> None:
        for age, tokens in staleness.items():
            self._age.labels(str(age)).inc(tokens)

    def step_finished(self, *, version: Version, started: float, ended: float, num_tokens: int, metrics: Mapping[str, float]) -> None:
        self._trained.inc(num_tokens)
        self._version.set(version)

    def weights_committed(self, *, engine: str, version: Version, stage_seconds: float, pause_seconds: float) -> None:
        self._served.labels(engine).set(version)
        self._pause.observe(pause_seconds)

    def engine_quarantined(self, *, engine: str, error: str) -> None:
        self._quarantined.labels(engine).set(1)

    def engine_rejoined(self, *, engine: str, version: Version) -> None:
        self._quarantined.labels(engine).set(0)
        self._served.labels(engine).set(version)
