"""A session: one rollout's address, its token tree and its turns. Synchronous; it never waits."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Protocol

from midflight.gateway.sessions.call import Messages, Source, Text
from midflight.gateway.sessions.match import Matcher
from midflight.gateway.sessions.node import Prompt, packed
from midflight.gateway.sessions.rows import harvest
from midflight.gateway.sessions.tree import TokenTree
from midflight.text import Tokenizer
from midflight.text.formats import AssistantMessage
from midflight.types import FinishReason, GenerateRequest, Kind, Reason, RolloutKey, SamplingParams, SessionRecord, Turn, Version

SEED_SPACE = 2**64


class UnderWay(Protocol):
    """An answer that is being generated, as far as its session looks at it."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def number(self) -> int:
        """Of its request in the session; the choices of n > 1 share it."""
        ...

    @property
    def output_ids(self) -> Sequence[int]: ...
    @property
    def num_overshoot(self) -> int: ...
    @property
    def versions(self) -> Set[Version]:
        """Of its tokens so far."""
        ...


class RecordedTurns:
    """The turns of one rollout that were complete before a crash (I8). Each is given once, to the first request with its prompt that
    has room for it."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns = list(turns)

    def take(self, request: GenerateRequest) -> Turn | None:
        for place, turn in enumerate(self._turns):
            if turn.prompt_ids == request.input_ids and len(turn.output_ids) <= request.sampling.max_tokens:
                return self._turns.pop(place)
        return None


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
        self._open: set[UnderWay] = set()
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
        return min(self._versions.union(*(answer.versions for answer in self._open)), default=None)

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

    def begin(self, answer: UnderWay) -> None:
        """Its tokens count from now on; `finished` or `abandoned` must follow."""
        self._open.add(answer)

    def finished(self, answer: UnderWay, turn: Turn, *, reply: str, message: AssistantMessage) -> None:
        self._end(answer)
        if self.key is not None:
            self.tree.record(answer.prompt, turn, reply=reply, request=answer.number, message=message)

    def abandoned(self, answer: UnderWay) -> None:
        """The request was cancelled or failed: its tokens are dropped(abandoned), once (I3). After `finished` it does nothing."""
        if answer in self._open:
            self._end(answer)
            self._dropped[Reason.ABANDONED] += len(answer.output_ids)
            self._dropped[Reason.OVERSHOOT] += answer.num_overshoot

    def close(self) -> SessionRecord:
        """Ends the session and hands its tokens over (I3): what is still running is abandoned."""
        for answer in list(self._open):
            self.abandoned(answer)
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

    def _end(self, answer: UnderWay) -> None:
        self._open.discard(answer)
        self._versions |= answer.versions

    def __repr__(self) -> str:
        return f"<Session {self.session_id}>"


def request_seed(run_name: str, run_seed: int, key: RolloutKey, *, occurrence: int, prompt_ids: tuple[int, ...]) -> int:
    """Seed of a rollout's request: who asks for what and how often before, never the order of arrival."""
    group = key.group
    kind = "" if key.kind is Kind.TRAINING else f"{key.kind}|"
    label = f"{run_name}|{run_seed}|{kind}{group.epoch}|{group.index}|{group.attempt}|{key.sample}|{occurrence}|"
    digest = hashlib.blake2b(label.encode("ascii", "backslashreplace") + packed(prompt_ids), digest_size=8).digest()
    return int.from_bytes(digest, "little")
