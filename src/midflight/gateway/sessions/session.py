"""The session of one rollout: its token tree, its turns, and the fate of its tokens.
Synchronous.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Protocol

import msgspec

from midflight.errors import RequestRejected
from midflight.gateway.sessions.history import Prompt, RecordedTurns

# The tests of the invariants import these two from here.
from midflight.gateway.sessions.request import Asked as Asked
from midflight.gateway.sessions.request import CompletionCall as CompletionCall
from midflight.gateway.sessions.request import Messages, Source, Text, TokenIds
from midflight.gateway.sessions.request_clock import RequestClock
from midflight.gateway.sessions.responses import KeptResponses
from midflight.gateway.sessions.tree import Matcher, TokenTree, counted, harvest
from midflight.text import Tokenizer
from midflight.text.formats import AssistantMessage
from midflight.types import (
    FinishReason,
    GenerateRequest,
    Kind,
    Reason,
    RolloutKey,
    SamplingParams,
    SessionRecord,
    Turn,
    TurnTimes,
    Version,
)
from midflight.types.names import part_of
from midflight.types.rollouts import RoleRecord

SEED_SPACE = 2**64


class AnswerInProgress(Protocol):
    """An answer that is being generated, as its session sees it."""

    @property
    def prompt(self) -> Prompt: ...
    @property
    def request(self) -> GenerateRequest: ...
    @property
    def number(self) -> int:
        """The number of its request in the session. The choices of n > 1 share it."""
        ...

    @property
    def output_ids(self) -> Sequence[int]: ...
    @property
    def room(self) -> int:
        """Tokens that its own limit still allows."""
        ...

    @property
    def num_overshoot(self) -> int: ...
    @property
    def versions(self) -> Set[Version]:
        """The versions of its tokens so far."""
        ...


MAX_ROLES = 64
"""The most roles of one rollout. Each has a tree of its own."""
_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Session:
    """State of one session. `key` and `sampling` are `None` for anonymous, untracked use, which
    keeps no tree.

    A session may have roles. Each role is a session with a tree of its own, ends together with the
    main session, and is part of its record.
    """

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
        kept: KeptResponses | None = None,
    ) -> None:
        """`matcher` is shared by all sessions of a gateway. With `count_all_choices` choices (n >
        1) that the agent did not continue are trained too; by default they are dropped(unchosen) if
        the agent continued another. `kept` holds the responses of the anonymous clients that share
        one key.
        """
        self.session_id = session_id
        self.key = key
        self.sampling = sampling
        self.tracked = tracked
        self.count_all_choices = count_all_choices
        self.is_apart = False
        """True if the requests come from a judge or a simulated user. Engines of their own answer
        these.
        """
        self.role_name = ""
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._apart: Session | None = None
        self._main: Session | None = None
        """The main session, for a role. A main session holds no reference to itself, so that its
        end frees it at once, without a garbage collection.
        """
        self._roles: dict[str, Session] = {}
        self.tree = TokenTree(tokenizer, matcher=matcher)
        self.recorded = RecordedTurns()
        self._kept = kept
        self.closed = False
        self.failed_requests = 0
        self.times: list[TurnTimes] = []
        self.clock = RequestClock()
        """The clock of the rollout. All parts of the session share it."""
        self._open: set[AnswerInProgress] = set()
        self._versions: set[Version] = set()
        """The versions of the tokens of all turns that are over, abandoned turns included."""
        self._asked: dict[bytes, int] = {}
        """The number of times that each prompt was requested, by `Prompt.name`."""
        self._dropped: dict[Reason, int] = {}
        self._replaced: Counter[str] = Counter()
        self._num_requests = 0
        self._num_answered = 0
        self._room: int | None = None

    def apart(self) -> Session:
        """The part of the session whose turns are not recorded. It ends with the session."""
        if self._apart is None:
            self._apart = Session(
                self.session_id, self._tokenizer, key=None, sampling=None, tracked=False
            )
            self._apart.is_apart = True
            self._apart.clock = self.clock
        return self._apart

    def role(self, name: str) -> Session:
        """The session of a role. The first call with a name opens it."""
        if name not in self._roles:
            if not _ROLE.fullmatch(name) or len(self._roles) >= MAX_ROLES:
                raise RequestRejected(
                    f"the role {name[:80]!r} of session {self.session_id}: take letters, digits, "
                    f"'-' and '_', 64 at most, and {MAX_ROLES} roles."
                )
            made = Session(
                self.session_id,
                self._tokenizer,
                key=self.key,
                sampling=self.sampling,
                tracked=self.tracked,
                matcher=self._matcher,
                count_all_choices=self.count_all_choices,
            )
            made.role_name = name
            made.recorded = self.recorded
            made._main = self
            made.clock = self.clock
            self._roles[name] = made
        return self._roles[name]

    @property
    def _all(self) -> dict[str, Session]:
        """The session itself, whose name is empty, and its roles."""
        main = self._main or self
        return {"": main, **main._roles}

    @property
    def trains(self) -> bool:
        """True if its turns are for training, by the run or by the session's owner."""
        return self.key is not None and self.key.kind is not Kind.EVALUATION

    @property
    def known_as(self) -> str:
        """The name that identifies the requests of this session and role."""
        return part_of(self.session_id, self.role_name) if self.role_name else self.session_id

    @property
    def num_recorded(self) -> int:
        """Recorded turns of the rollout, over all roles."""
        return sum(len(session.tree.nodes) for session in self._all.values())

    def keep_seams(self) -> None:
        """From now on the prompts of chats keep what the next one needs if it begins alike."""
        self.tree.keeps_seams = True

    def plan(self, source: Source) -> Prompt:
        match source:
            case Messages():
                return self.tree.plan_chat(
                    source.messages,
                    tools=source.tools,
                    options=source.options,
                    ending=source.ending,
                    num_left=source.num_left,
                )
            case Text(text):
                return self.tree.plan_text(text)
            case TokenIds(ids):
                return self.tree.plan_ids(ids)

    @property
    def kept(self) -> KeptResponses:
        """The responses that the agent may refer to by id."""
        if self._kept is None:
            self._kept = KeptResponses()
        return self._kept

    @property
    def oldest_version(self) -> Version | None:
        """The oldest version among all its tokens, roles included. It may rise or fall, because an
        engine may correct versions at the end of an attempt.
        """
        found = set[Version]()
        for session in self._all.values():
            found |= session._versions
            for answer in session._open:
                found |= answer.versions
        return min(found, default=None)

    @property
    def num_requests(self) -> int:
        """Requests since it was opened, over all its parts."""
        return sum(session._num_requests for session in self._everyone)

    @property
    def num_running(self) -> int:
        """Choices under way, over all its parts."""
        return sum(len(session._open) for session in self._everyone)

    @property
    def num_growing(self) -> int:
        """Tokens of the answers under way, over all its parts."""
        return sum(len(answer.output_ids) for session in self._everyone for answer in session._open)

    @property
    def awaits(self) -> bool:
        """True if the agent's last request has not been answered."""
        return any(session._num_requests > session._num_answered for session in self._everyone)

    @property
    def _everyone(self) -> list[Session]:
        """The session itself, its roles, and its unrecorded part."""
        everyone = list(self._all.values())
        if self._apart is not None:
            everyone.append(self._apart)
        return everyone

    def begin_again(self) -> None:
        """Prepares for an agent that starts over: it gets its completed turns again as they were
        (I8). Requests that still run are abandoned.
        """
        turns = [
            msgspec.structs.replace(node.turn, role=name)
            for name, session in self._all.items()
            for node in session.tree.nodes
        ]
        recorded = self.recorded.after(turns)
        for session in self._everyone:
            for answer in list(session._open):
                session.abandoned(answer)
            session.tree = session.tree.emptied()
            session.recorded = recorded
            session._kept = None
            session._room = None
            session._asked.clear()
            session._num_requests = 0
            session._num_answered = 0
        self.clock.begin_again()

    def count_replaced(self, fields: Iterable[str]) -> None:
        """Counts a request in which the session's own sampling replaced these fields."""
        self._replaced.update(tuple(fields))

    def next_request(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def seed(
        self, run_name: str, run_seed: int, prompt: Prompt, *, asked: int | None, choice: int
    ) -> int:
        """The seed of one choice. `asked` is the client's seed, and the choice is added to it.
        Without it the seed is the session's next one for these prompt ids; in an anonymous session
        it is random.
        """
        occurrence = self._asked.get(prompt.name, 0)
        self._asked[prompt.name] = occurrence + 1
        if asked is not None:
            return (asked + choice) % SEED_SPACE
        if self.key is None:
            return secrets.randbits(64)
        return request_seed(
            run_name,
            run_seed,
            self.key,
            occurrence=occurrence,
            prompt_ids=prompt,
            role=self.role_name,
        )

    def begin(self, answer: AnswerInProgress) -> None:
        """The answer's tokens count from now on. `finished` or `abandoned` must follow."""
        self._open.add(answer)

    def finished(
        self, answer: AnswerInProgress, turn: Turn, *, reply: str, message: AssistantMessage
    ) -> bool:
        """Records the answer as a turn; says whether it did. An answer is no turn if `begin_again`
        has abandoned it, or if the client wanted no token.
        """
        if answer not in self._open:
            return False
        self._end(answer)
        self._num_answered = max(self._num_answered, answer.number)
        if not turn.output_ids and answer.room == 0:
            return False
        if turn.policy_sampled:
            self._room = answer.room if self._room is None else min(self._room, answer.room)
        if self.key is not None:
            node = self.tree.record(
                answer.prompt,
                turn,
                reply=reply,
                request=answer.number,
                message=message,
                sampling=answer.request.sampling,
            )
            node.number = self.num_recorded - 1
        return True

    def abandoned(self, answer: AnswerInProgress) -> None:
        """The request was cancelled or failed: its tokens are dropped(abandoned), once (I3). After
        `finished` this does nothing.
        """
        if answer in self._open:
            self._end(answer)
            self._drop(Reason.ABANDONED, len(answer.output_ids))
            self._drop(Reason.OVERSHOOT, answer.num_overshoot)

    def close(self) -> SessionRecord:
        """Ends the session and its roles, and hands over their tokens (I3). Requests that still run
        are abandoned.
        """
        if self._apart is not None:
            self._apart.closed = True
        return together({name: session._close() for name, session in self._all.items()})

    def _close(self) -> SessionRecord:
        for answer in list(self._open):
            self.abandoned(answer)
        self.closed = True
        nodes = self.tree.nodes
        result = harvest(nodes, count_all_choices=self.count_all_choices)
        dropped = list(result.dropped.items())
        dropped += self._dropped.items()
        if not self.role_name:  # the roles share `recorded`, so its loss counts once
            dropped.append((Reason.ABANDONED, self.recorded.num_lost))
        return SessionRecord(
            session_id=self.session_id,
            rows=result.rows,
            num_turns=len(nodes),
            num_branches=self.tree.num_branches,
            truncated=any(node.finish.reason is FinishReason.LENGTH for node in nodes),
            room=self._room,
            masked=result.masked,
            masked_by=result.masked_by,
            replaced=dict(self._replaced),
            dropped=counted(dropped),
            failed_requests=self.failed_requests,
            num_rewritten=self.tree.num_rewritten,
            num_mismatches=self.tree.num_mismatches,
            versions=frozenset(self._versions),
            num_answers=len({node.request for node in nodes}),
            times=tuple(self.times),
        )

    def _drop(self, reason: Reason, number: int) -> None:
        self._dropped[reason] = self._dropped.get(reason, 0) + number

    def _end(self, answer: AnswerInProgress) -> None:
        self._open.discard(answer)
        self._versions |= answer.versions

    def __repr__(self) -> str:
        return f"<Session {self.session_id}>"


def together(records: Mapping[str, SessionRecord]) -> SessionRecord:
    """Merges the records of a rollout's sessions into one. `records` is keyed by role; the main
    session has the empty name.
    """
    own = records[""]
    if len(records) == 1:
        return own
    every = records.values()
    rows = [replace(row, role=name) for name, record in records.items() for row in record.rows]
    times = [each for record in every for each in record.times]
    answered = {
        name: RoleRecord(None, record.truncated, record.room)
        for name, record in records.items()
        if record.num_answers
    }
    has_roles = bool(answered.keys() - {""})
    return msgspec.structs.replace(
        own,
        rows=tuple(rows),
        num_turns=sum(record.num_turns for record in every),
        num_branches=sum(record.num_branches for record in every),
        masked=sum((Counter(record.masked) for record in every), Counter[Reason]()),
        masked_by=sum((Counter(record.masked_by) for record in every), Counter[str]()),
        replaced=sum((Counter(record.replaced) for record in every), Counter[str]()),
        dropped=sum((Counter(record.dropped) for record in every), Counter[Reason]()),
        failed_requests=sum(record.failed_requests for record in every),
        num_rewritten=sum(record.num_rewritten for record in every),
        num_mismatches=sum(record.num_mismatches for record in every),
        versions=frozenset[Version]().union(*(record.versions for record in every)),
        times=tuple(sorted(times, key=lambda each: each.ended)),
        roles=answered if has_roles else {},
    )


def request_seed(
    run_name: str,
    run_seed: int,
    key: RolloutKey,
    *,
    occurrence: int,
    prompt_ids: tuple[int, ...] | Prompt,
    role: str = "",
) -> int:
    """The seed of a rollout's request. It depends on the rollout, the role, the ids of the prompt
    and the number of its earlier requests, never on the order of arrival.
    """
    group = key.group
    kind = ("" if key.kind is Kind.TRAINING else f"{key.kind}|") + (f"{role}|" if role else "")
    label = f"{run_name}|{run_seed}|{kind}{group.epoch}|{group.index}|{group.attempt}|{key.sample}|{occurrence}|"
    prompt = prompt_ids if isinstance(prompt_ids, Prompt) else Prompt(prompt_ids, None)
    digest = prompt.digest_after(label.encode("ascii", "backslashreplace"), size=8)
    return int.from_bytes(digest, "little")
