"""An agent's request, free of any wire format. And its session: one rollout's token tree and its
turns. Synchronous.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, TypeAlias

import msgspec

from midflight.errors import RequestRejected
from midflight.gateway.sessions.history import Prompt, RecordedTurns, packed
from midflight.gateway.sessions.kept import KeptResponses
from midflight.gateway.sessions.request_clock import RequestClock
from midflight.gateway.sessions.tree import Matcher, TokenTree, counted, harvest
from midflight.text import Ending, Message, Tokenizer
from midflight.text.formats import AssistantMessage, Tool
from midflight.types import (
    FinishReason,
    Grammar,
    Json,
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


class Messages(msgspec.Struct, frozen=True):
    """A prompt to be written by the chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    options: Mapping[str, Json] = {}
    """Options of the template itself, such as `enable_thinking`."""
    ending: Ending = Ending.TURN


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    ids: tuple[int, ...]


Source: TypeAlias = Messages | Text | TokenIds


@dataclass(frozen=True, slots=True, init=False)
class Asked:
    """Sampling as far as the client asked for it: parameters of `SamplingParams` by name. The
    others are the session's defaults.
    """

    given: Mapping[str, object]

    def __init__(self, **given: object) -> None:
        """What is `None` was not asked for."""
        object.__setattr__(
            self, "given", {name: value for name, value in given.items() if value is not None}
        )

    @property
    def grammar(self) -> Grammar | None:
        grammar = self.given.get("grammar")
        return grammar if isinstance(grammar, Grammar) else None

    def number(self, name: str) -> int | None:
        """A whole number, such as `max_tokens` or `seed`."""
        value = self.given.get(name)
        return value if isinstance(value, int) else None

    def constrained(self, grammar: Grammar | None) -> Asked:
        """The same under this grammar."""
        return Asked(**{**self.given, "grammar": grammar})


class ToolChoice(StrEnum):
    """Whether the answer may, must or must not call a tool. With `NONE` nothing is looked for: what
    looks like a call is content.
    """

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class CompletionCall(msgspec.Struct, frozen=True):
    """`n` answers to each of `sources`. Choices are numbered source by source."""

    sources: tuple[Source, ...]
    asked: Asked = Asked()
    n: int = 1
    prompt_logprobs: int | None = None
    """Alternatives to tell of each token of a prompt; `None`: prompts are not scored."""
    stream: bool = False
    """Whether news are wanted before the answers are whole."""
    default_max_tokens: int | None = None
    """The dialect's default, used if neither client nor session gives one. `None` means all the
    room there is.
    """
    model: str | None = None
    request_id: str | None = None
    """The client's own name for the request, by which it may abort it."""
    may_abort: bool = False
    """Whether an abort of the operator ends the request with what there is; otherwise it is
    resumed.
    """
    prompt_param: str = "prompt"
    """What the client calls the prompt."""
    names: Mapping[str, str] = {}
    """What the client calls fields of `Asked`, where the names differ."""
    tool_choice: ToolChoice = ToolChoice.NONE
    forced_tool: str | None = None
    """With `REQUIRED`: the one tool that must be called."""
    parallel_tool_calls: bool = True
    """False ends the answer with its first call."""

    def name_of(self, asked: str) -> str:
        """What the client calls a parameter, for refusals. The gateway itself adds the grammar of a
        call that must come, because of `tool_choice`.
        """
        if asked == "grammar" and self.tool_choice is ToolChoice.REQUIRED:
            return "tool_choice"
        return self.names.get(asked, asked)


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
    def room(self) -> int:
        """Tokens left of its own limit."""
        ...

    @property
    def num_overshoot(self) -> int: ...
    @property
    def versions(self) -> Set[Version]:
        """Of its tokens so far."""
        ...


MAX_ROLES = 64
"""Of one rollout: each has a tree of its own."""
_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class Session:
    """State of one session. `key` and `sampling` are `None` for anonymous, untracked use, which
    keeps no tree.

    A rollout may have several: the roles of one, each with a tree of its own, which end with it and
    are part of its record.
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
        """`matcher`: one for all sessions of a gateway. `count_all_choices`: choices (n > 1) that
        the agent did not continue are trained too; by default they are dropped(unchosen) where it
        continued another. `kept`: of anonymous clients with one key."""
        self.session_id = session_id
        self.key = key
        self.sampling = sampling
        self.tracked = tracked
        self.count_all_choices = count_all_choices
        self.is_apart = False
        """Whether it is of a judge or simulated user, which engines of its own answer."""
        self.role_name = ""
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._apart: Session | None = None
        self._main: Session | None = None
        """Of a role: the session that it is a part of. No session holds itself: its end frees it at
        once, and no collection has to find it.
        """
        self._roles: dict[str, Session] = {}
        self.tree = TokenTree(tokenizer, matcher=matcher)
        self.recorded = RecordedTurns()
        self._kept = kept
        self.closed = False
        self.failed_requests = 0
        self.times: list[TurnTimes] = []
        self.clock = RequestClock()
        """Of the rollout: its parts have the same."""
        self._open: set[UnderWay] = set()
        self._versions: set[Version] = set()
        """Of the tokens of turns that are over, those of abandoned turns too."""
        self._asked: dict[bytes, int] = {}
        """How often each prompt was asked, by its name."""
        self._dropped: dict[Reason, int] = {}
        self._num_requests = self._num_answered = 0
        self._room: int | None = None

    def apart(self) -> Session:
        """The part of its rollout that leaves no trace. It ends with the session."""
        if self._apart is None:
            self._apart = Session(
                self.session_id, self._tokenizer, key=None, sampling=None, tracked=False
            )
            self._apart.is_apart = True
            self._apart.clock = self.clock
        return self._apart

    def role(self, name: str) -> Session:
        """The session of a role, opened where it is asked for first."""
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
    def known_as(self) -> str:
        """By which its requests are told from those of others."""
        return part_of(self.session_id, self.role_name) if self.role_name else self.session_id

    @property
    def num_recorded(self) -> int:
        """Turns of the rollout."""
        return sum(len(session.tree.nodes) for session in self._all.values())

    def plan(self, source: Source) -> Prompt:
        match source:
            case Messages():
                return self.tree.plan_chat(
                    source.messages,
                    tools=source.tools,
                    options=source.options,
                    ending=source.ending,
                )
            case Text(text):
                return self.tree.plan_text(text)
            case _:
                return self.tree.plan_ids(source.ids)

    @property
    def kept(self) -> KeptResponses:
        """Responses that its agent may name."""
        if self._kept is None:
            self._kept = KeptResponses()
        return self._kept

    @property
    def oldest_version(self) -> Version | None:
        """Among all its tokens, those of roles too. It changes both ways where an engine says at
        the end what it was unsure of before.
        """
        found = [
            session._versions.union(*(answer.versions for answer in session._open))
            for session in self._all.values()
        ]
        return min(set[Version]().union(*found), default=None)

    @property
    def num_requests(self) -> int:
        """Since it was opened, those of its parts too."""
        return sum(session._num_requests for session in self._everyone)

    @property
    def num_running(self) -> int:
        """Choices under way, in its parts too."""
        return sum(len(session._open) for session in self._everyone)

    @property
    def num_growing(self) -> int:
        """Tokens of the answers under way, in its parts too."""
        return sum(len(answer.output_ids) for session in self._everyone for answer in session._open)

    @property
    def awaits(self) -> bool:
        """Whether the last request of its agent has had no answer."""
        return any(session._num_requests > session._num_answered for session in self._everyone)

    @property
    def _everyone(self) -> list[Session]:
        return [*self._all.values(), *([] if self._apart is None else [self._apart])]

    def begin_again(self) -> None:
        """For an agent that begins again: it is given its completed turns as they were (I8). What
        still runs is abandoned.
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
            session._kept = session._room = None
            session._asked.clear()
            session._num_requests = session._num_answered = 0
        self.clock.begin_again()

    def next_request(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def seed(
        self, run_name: str, run_seed: int, prompt: Prompt, *, asked: int | None, choice: int
    ) -> int:
        """An explicit seed, offset by the choice; else the next of the session's own for these
        prompt ids (anonymous: any).
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
            prompt_ids=prompt.packed,
            role=self.role_name,
        )

    def begin(self, answer: UnderWay) -> None:
        """Its tokens count from now on; `finished` or `abandoned` must follow."""
        self._open.add(answer)

    def finished(
        self, answer: UnderWay, turn: Turn, *, reply: str, message: AssistantMessage
    ) -> bool:
        """False if it was abandoned before, in `begin_again`, or if no token was wanted: it belongs
        to no turn.
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
            self.tree.record(
                answer.prompt, turn, reply=reply, request=answer.number, message=message
            )
        return True

    def abandoned(self, answer: UnderWay) -> None:
        """The request was cancelled or failed: its tokens are dropped(abandoned), once (I3). After
        `finished` it does nothing.
        """
        if answer in self._open:
            self._end(answer)
            for reason, number in (
                (Reason.ABANDONED, len(answer.output_ids)),
                (Reason.OVERSHOOT, answer.num_overshoot),
            ):
                self._dropped[reason] = self._dropped.get(reason, 0) + number

    def close(self) -> SessionRecord:
        """Ends the session and its roles, and hands their tokens over (I3): what is still running
        is abandoned.
        """
        if self._apart is not None:
            self._apart.closed = True
        return together({name: session._close() for name, session in self._all.items()})

    def _close(self) -> SessionRecord:
        for answer in list(self._open):
            self.abandoned(answer)
        self.closed = True
        nodes = self.tree.nodes
        result = harvest(self.tree.nodes, count_all_choices=self.count_all_choices)
        dropped = [
            *result.dropped.items(),
            *self._dropped.items(),
            (Reason.ABANDONED, 0 if self.role_name else self.recorded.num_lost),
        ]
        return SessionRecord(
            session_id=self.session_id,
            rows=result.rows,
            num_turns=len(nodes),
            num_branches=self.tree.num_branches,
            truncated=any(node.finish.reason is FinishReason.LENGTH for node in nodes),
            room=self._room,
            masked=result.masked,
            dropped=counted(dropped),
            failed_requests=self.failed_requests,
            num_rewritten=self.tree.num_rewritten,
            num_mismatches=self.tree.num_mismatches,
            versions=frozenset(self._versions),
            num_answers=len({node.request for node in nodes}),
            times=tuple(self.times),
        )

    def _end(self, answer: UnderWay) -> None:
        self._open.discard(answer)
        self._versions |= answer.versions

    def __repr__(self) -> str:
        return f"<Session {self.session_id}>"


def together(records: Mapping[str, SessionRecord]) -> SessionRecord:
    """The record of a rollout from those of its sessions, by role; that of the session itself has
    an empty name.
    """
    own = records[""]
    if len(records) == 1:
        return own
    every = records.values()
    asked = {
        name: RoleRecord(None, record.truncated, record.room)
        for name, record in records.items()
        if record.num_answers
    }
    return msgspec.structs.replace(
        own,
        rows=tuple(
            replace(row, role=name) for name, record in records.items() for row in record.rows
        ),
        num_turns=sum(record.num_turns for record in every),
        num_branches=sum(record.num_branches for record in every),
        masked=sum((Counter(record.masked) for record in every), Counter[Reason]()),
        dropped=sum((Counter(record.dropped) for record in every), Counter[Reason]()),
        failed_requests=sum(record.failed_requests for record in every),
        num_rewritten=sum(record.num_rewritten for record in every),
        num_mismatches=sum(record.num_mismatches for record in every),
        versions=frozenset[Version]().union(*(record.versions for record in every)),
        times=tuple(
            sorted((each for record in every for each in record.times), key=lambda each: each.ended)
        ),
        roles=asked if asked.keys() - {""} else {},
    )


def request_seed(
    run_name: str,
    run_seed: int,
    key: RolloutKey,
    *,
    occurrence: int,
    prompt_ids: tuple[int, ...] | bytes,
    role: str = "",
) -> int:
    """Seed of a rollout's request. It depends on the rollout, its role, the prompt and how often
    the prompt was asked before, never on the order of arrival. The ids may be packed already."""
    group = key.group
    kind = ("" if key.kind is Kind.TRAINING else f"{key.kind}|") + (f"{role}|" if role else "")
    label = f"{run_name}|{run_seed}|{kind}{group.epoch}|{group.index}|{group.attempt}|{key.sample}|{occurrence}|"
    ids = prompt_ids if isinstance(prompt_ids, bytes) else packed(prompt_ids)
    return int.from_bytes(
        hashlib.blake2b(label.encode("ascii", "backslashreplace") + ids, digest_size=8).digest(),
        "little",
    )
