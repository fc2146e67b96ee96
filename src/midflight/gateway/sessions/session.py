"""A session: one rollout's address, its token tree and its turns. Synchronous; it never waits."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from dataclasses import dataclass, field

from midflight.gateway.sessions.call import Messages, Source, Text
from midflight.gateway.sessions.match import Matcher
from midflight.gateway.sessions.node import Prompt, packed
from midflight.gateway.sessions.replay import RecordedTurns
from midflight.gateway.sessions.rows import harvest
from midflight.gateway.sessions.tree import TokenTree
from midflight.text import Tokenizer
from midflight.text.formats import AssistantMessage
from midflight.types import Chunk, Finish, FinishReason, Kind, Reason, RolloutKey, SamplingParams, Segment, SessionRecord, Turn, Version

SEED_SPACE = 2**64


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A choice while it is generated: what the gateway has received of it."""

    prompt: Prompt
    policy_sampled: bool
    request: int
    """Number of the request in its session; its choices share it."""
    output_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    segments: list[Segment] = field(default_factory=list[Segment])
    num_overshoot: int = 0
    """Tokens received and cut so far."""
    finish: Finish | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])

    def add(self, chunk: Chunk) -> None:
        """I6: every token comes with a log-probability and the version that the engine attests, with it or at the end."""
        assert len(chunk.token_ids) == len(chunk.logprobs), "I6: a chunk's arrays agree in length"
        self.output_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.finish = chunk.finish
        self.top_logprobs += chunk.top_logprobs
        self._label(chunk.version, chunk.kv_version, end=len(self.output_ids))
        if chunk.attested:
            self._relabel(chunk.attested)

    @property
    def oldest_version(self) -> Version | None:
        return min((segment.version for segment in self.segments), default=None)

    def _label(self, version: Version, kv_version: Version, *, end: int) -> None:
        """Tokens before `end` that have no label get this one."""
        last = self.segments[-1] if self.segments else None
        start = 0 if last is None else last.end
        if start == end:
            return
        if last is not None and (last.version, last.kv_version) == (version, kv_version):
            start = self.segments.pop().start
        self.segments.append(Segment(version, kv_version, start, end))

    def _relabel(self, attested: tuple[Segment, ...]) -> None:
        """The last tokens, those of one attempt, get the labels that its engine gave at the end."""
        start = len(self.output_ids) - attested[-1].end
        before, self.segments = self.segments, []
        for segment in before:
            if segment.start < start:
                self._label(segment.version, segment.kv_version, end=min(segment.end, start))
        for segment in attested:
            self._label(segment.version, segment.kv_version, end=start + segment.end)

    def closed(self, *, num_resumes: int) -> Turn:
        assert self.finish is not None, "I5: a generation ends with a finish"
        return Turn(
            prompt_ids=self.prompt.ids,
            output_ids=tuple(self.output_ids),
            logprobs=tuple(self.logprobs),
            segments=tuple(self.segments),
            finish=self.finish,
            policy_sampled=self.policy_sampled,
            num_overshoot=self.num_overshoot,
            num_resumes=num_resumes,
        )


class Session:
    """State of one session. `key` and `sampling` are `None` for anonymous, untracked use, which keeps no tree."""

    def __init__(
        self,
        session_id: str,
        tokenizer: Tokenizer,
        *,
        key: RolloutKey | None,
        sampling: SamplingParams | None,
        tracked: bool,
        matcher: Matcher | None = None,
        count_all_choices: bool = False,
    ) -> None:
        """`matcher`: one for all sessions of a gateway. `count_all_choices`: choices (n > 1) that the agent did not continue are
        trained too; by default they are dropped(unchosen) where it continued another."""
        self.session_id = session_id
        self.key = key
        self.sampling = sampling
        self.tracked = tracked
        self.count_all_choices = count_all_choices
        self.tree = TokenTree(tokenizer, matcher=matcher)
        self.recorded = RecordedTurns()
        self.closed = False
        self.failed_requests = 0
        self._open: set[OpenTurn] = set()
        self._versions: set[Version] = set()
        """Of the tokens of turns that are over, those of abandoned turns too."""
        self._asked: Counter[bytes] = Counter()
        """How often each prompt was asked, by the digest of its ids."""
        self._dropped: Counter[Reason] = Counter()
        self._num_requests = 0

    def plan(self, source: Source) -> Prompt:
        match source:
            case Messages():
                return self.tree.plan_chat(source.messages, tools=source.tools, options=source.options)
            case Text(text):
                return self.tree.plan_text(text)
            case _:
                return self.tree.plan_ids(source.ids)

    @property
    def oldest_version(self) -> Version | None:
        """Among all its tokens. It changes both ways where an engine says at the end what it was unsure of before."""
        return _oldest(*self._versions, *(turn.oldest_version for turn in self._open))

    @property
    def num_requests(self) -> int:
        """Since it was opened."""
        return self._num_requests

    @property
    def num_running(self) -> int:
        """Choices under way."""
        return len(self._open)

    def next_request(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def seed(self, run_name: str, run_seed: int, prompt_ids: tuple[int, ...], *, asked: int | None, choice: int) -> int:
        """An explicit seed, offset by the choice; else the next of the session's own for these prompt ids (anonymous: any)."""
        digest = hashlib.blake2b(packed(prompt_ids), digest_size=16).digest()
        occurrence = self._asked[digest]
        self._asked[digest] += 1
        if asked is not None:
            return (asked + choice) % SEED_SPACE
        if self.key is None:
            return secrets.randbits(64)
        return request_seed(run_name, run_seed, self.key, occurrence=occurrence, prompt_ids=prompt_ids)

    def begin(self, prompt: Prompt, *, policy_sampled: bool, request: int) -> OpenTurn:
        turn = OpenTurn(prompt, policy_sampled, request)
        self._open.add(turn)
        return turn

    def received(self, turn: OpenTurn, chunk: Chunk, *, num_overshoot: int) -> None:
        turn.add(chunk)
        turn.num_overshoot = num_overshoot

    def finished(self, open_turn: OpenTurn, turn: Turn, *, reply: str, message: AssistantMessage) -> None:
        self._end(open_turn)
        if self.key is not None:
            self.tree.record(open_turn.prompt, turn, reply=reply, request=open_turn.request, message=message)

    def abandoned(self, turn: OpenTurn) -> None:
        """The request was cancelled or failed: its tokens are dropped(abandoned), once (I3). After `finished` it does nothing."""
        if turn in self._open:
            self._end(turn)
            self._dropped[Reason.ABANDONED] += len(turn.output_ids)
            self._dropped[Reason.OVERSHOOT] += turn.num_overshoot

    def close(self) -> SessionRecord:
        """Ends the session and hands its tokens over (I3): what is still running is abandoned."""
        for turn in list(self._open):
            self.abandoned(turn)
        self.closed = True
        nodes = self.tree.nodes
        result = harvest(nodes, count_all_choices=self.count_all_choices)
        return SessionRecord(
            session_id=self.session_id,
            rows=result.rows,
            num_turns=len(nodes),
            num_branches=self.tree.num_branches,
            truncated=any(node.reason is FinishReason.LENGTH for node in nodes),
            masked=dict(result.masked),
            dropped=dict(result.dropped + +self._dropped),
            failed_requests=self.failed_requests,
            num_rewritten=self.tree.num_rewritten,
            num_mismatches=self.tree.num_mismatches,
            versions=frozenset(self._versions),
        )

    def _end(self, turn: OpenTurn) -> None:
        self._open.discard(turn)
        self._versions.update(segment.version for segment in turn.segments)

    def __repr__(self) -> str:
        return f"<Session {self.session_id}>"


def _oldest(*versions: Version | None) -> Version | None:
    return min((version for version in versions if version is not None), default=None)


def request_seed(run_name: str, run_seed: int, key: RolloutKey, *, occurrence: int, prompt_ids: tuple[int, ...]) -> int:
    """Seed of a rollout's request: who asks for what and how often before, never the order of arrival (DECISIONS 7)."""
    group = key.group
    kind = "" if key.kind is Kind.TRAINING else f"{key.kind}|"
    label = f"{run_name}|{run_seed}|{kind}{group.epoch}|{group.index}|{group.attempt}|{key.sample}|{occurrence}|"
    digest = hashlib.blake2b(label.encode("ascii", "backslashreplace") + packed(prompt_ids), digest_size=8).digest()
    return int.from_bytes(digest, "little")
