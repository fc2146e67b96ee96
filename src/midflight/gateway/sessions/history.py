"""The memory of a session: its turns in few bytes. Digests recognise a conversation that is sent
again. Pure.

A turn keeps only what is new beyond its parent, as packed arrays: four bytes for each id and each
log-probability. Texts are kept as lengths and digests, because the client sends the text again.

Clients send a reply back in another form than they got it: they add empty fields, split texts into
parts, serialise arguments anew, give tool calls new ids, or leave out the reasoning. None of that
changes a digest. The tokens decide whether it changes the text that the model reads.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias, cast

import msgspec

from midflight.errors import RequestRejected
from midflight.text import Ending, Message
from midflight.text.formats import AssistantMessage
from midflight.types import (
    Finish,
    GenerateRequest,
    Json,
    OlderKeys,
    SamplingParams,
    Segment,
    Turn,
    digests,
)
from midflight.types.rollouts import TurnRecord
from midflight.types.token_ids import ID_BYTES as _ID_BYTES
from midflight.types.token_ids import AnyIds, SharedIds, packed, unpacked

_id = struct.Struct("<i").pack
"""One id, in the form of `packed`."""

HashState: TypeAlias = "hashlib.blake2b"
"""A digest that can go on with more bytes."""


def text_digest(text: str) -> bytes:
    """The name of a text. It has 16 bytes, so that no two texts share one by chance."""
    return hashlib.blake2b(_bytes(text), digest_size=16).digest()


class NotAtHand(Exception):
    """A part of a conversation is needed that was not written again."""


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """The text of a conversation, from letter `start` on. Places count from the first letter of the
    whole text. Whoever needs a letter before `start` gets `NotAtHand`.
    """

    tail: str
    start: int = 0
    state: HashState | None = None
    """The digest of the text before `start`, if it has any."""

    def __len__(self) -> int:
        """The length of the whole text."""
        return self.start + len(self.tail)

    @property
    def whole(self) -> str:
        return self.after(0)

    def after(self, place: int) -> str:
        if place < self.start:
            raise NotAtHand
        return self.tail[place - self.start :]

    def between(self, first: int, last: int) -> str:
        if first < self.start:
            raise NotAtHand
        return self.tail[first - self.start : max(first, last) - self.start]

    def ending(self, place: int) -> str:
        """The end of the text before this place, at least as much of it as is not blank."""
        found = self.tail[: max(0, place - self.start)]
        if self.start and not found.strip():
            raise NotAtHand
        return found

    def find(self, part: str, place: int) -> int:
        """The first place of a part from `place` on; -1 if there is none."""
        if place < self.start:
            raise NotAtHand
        at = self.tail.find(part, place - self.start)
        return at if at < 0 else at + self.start

    def beginnings(self, lengths: Iterable[int]) -> dict[int, bytes]:
        """`text_digest` of the first n letters, for each n of `lengths` that is not beyond the
        text. It takes one pass over the text.
        """
        state = self._before()
        start = self.start
        found: dict[int, bytes] = {}
        for length in sorted(n for n in set(lengths) if n <= len(self)):
            if length < self.start:
                raise NotAtHand
            state.update(_bytes(self.between(start, length)))
            found[length] = state.copy().digest()
            start = length
        return found

    def state_at(self, place: int) -> HashState:
        """The digest of the text before this place, which can go on."""
        if place < self.start:
            raise NotAtHand
        state = self._before()
        state.update(_bytes(self.tail[: place - self.start]))
        return state

    @property
    def digest(self) -> bytes:
        """`text_digest` of the whole text."""
        return self.state_at(len(self)).digest()

    def _before(self) -> HashState:
        return hashlib.blake2b(digest_size=16) if self.state is None else self.state.copy()


class PromptSeam(Protocol):
    """The part of a seam that a prompt fills."""

    @property
    def states(self) -> dict[bytes, HashState]:
        """The digests of the prompt's ids, by what comes before them."""
        ...


@dataclass(frozen=True, eq=False)
class Prompt:
    """A request's prompt in tokens, and the recorded turn that it continues. Requests that begin
    alike may share a prompt.
    """

    ids: AnyIds
    text: str | None
    """The text as rendered or sent. `None` for a prompt of ids, and for one of which only the end
    was written (`written`).
    """
    history: bytes | None = None
    """The digest of its messages, for a chat."""
    parent: Node | None = None
    respelled: bool = False
    """True if its text would have other ids if it were tokenised anew."""
    rewritten: bool = False
    """True if it holds a recorded reply that it does not continue token by token, or another
    message in place of such a reply.
    """
    begun: str = ""
    """The content of its last message, if the answer continues that message. `history` then covers
    only the messages before it.
    """
    own_tail: bytes | None = None
    """Its `tail`, if it is known by itself."""
    written: Written | None = None
    """The end of its text, if the beginning was not written again."""
    before: Mapping[bytes, HashState] = field(default_factory=dict[bytes, HashState])
    """The digests of the ids of the parent's prompt, by what comes before the ids."""
    seam: PromptSeam | None = None
    """The end of the prompt, from which the next prompt goes on (`seams.Seam`)."""

    @cached_property
    def name(self) -> bytes:
        """The digest of its ids."""
        return self.digest_after(b"", size=16)

    def digest_after(self, label: bytes, *, size: int) -> bytes:
        """The digest of `label` and then the ids, in so many bytes. If the parent's prompt was
        asked for the same, only what came since is digested.
        """
        before = self.before.get(label)
        if before is None or self.parent is None:
            state = hashlib.blake2b(label, digest_size=size)
            state.update(self.packed)
        else:
            state = before.copy()
            state.update(self.parent.output)
            state.update(self.tail)
        if self.seam is not None:
            self.seam.states[label] = state
        return state.digest()

    def is_like(self, other: Prompt) -> bool:
        """True if both are the prompt of one conversation."""
        return (
            self.ids == other.ids
            and self.digest == other.digest
            and self.history == other.history
            and self.parent is other.parent
            and self.respelled == other.respelled
            and self.rewritten == other.rewritten
        )

    @property
    def packed(self) -> bytes:
        return self.ids.packed if isinstance(self.ids, SharedIds) else self._packed

    @cached_property
    def _packed(self) -> bytes:
        return packed(self.ids)

    @cached_property
    def tail(self) -> bytes:
        """Its ids beyond those of the turn that it continues, packed. The choices of one request
        share the object.
        """
        if self.own_tail is not None:
            return self.own_tail
        start = 0 if self.parent is None else self.parent.end * _ID_BYTES
        return self.packed[start:]

    @property
    def new_ids(self) -> Sequence[int]:
        """Its ids beyond those of the turn that it continues, or all."""
        return self.ids if self.own_tail is None else unpacked(self.own_tail)

    @property
    def ending(self) -> str | None:
        """The end of its text, by which an answer is read. `None` for a prompt of ids."""
        return self.text if self.written is None else self.written.tail

    @property
    def num_letters(self) -> int:
        """The length of its text. It is 0 for a prompt of ids."""
        return len(self.text or "") if self.written is None else len(self.written)

    @cached_property
    def digest(self) -> bytes | None:
        """The digest of its text, if it has one."""
        if self.written is not None:
            return self.written.digest
        return None if self.text is None else text_digest(self.text)


@dataclass(slots=True, eq=False)
class Node:
    """One recorded turn. Its ids are the ids of its parent, then `tail`, then `output`."""

    parent: Node | None
    request: int
    """Choices of one request (n > 1) share this number."""
    start: int
    """The number of the parent's ids."""
    tail: bytes
    """Prompt ids beyond the parent's."""
    output: bytes
    logprobs: bytes
    """One float32 for each output id."""
    segments: tuple[Segment, ...]
    finish: Finish
    policy_sampled: bool
    masked_by: tuple[str, ...]
    num_overshoot: int
    respelled: bool
    """True if its prompt's text would have other ids if it were tokenised anew."""
    prompt_digest: bytes | None
    """The digest of the prompt's text, if it had one."""
    num_letters: int
    """The length of the prompt's text."""
    reply_digest: bytes
    """The digest of the text that the agent saw."""
    num_reply_letters: int
    kept: bytes = b""
    """The records of truncation for all output tokens, joined."""
    kept_lengths: bytes = b""
    """The number of bytes of each of these records, as int32."""
    experts: bytes = b""
    """The engines' records of experts for the tokens from `first_recorded` to the end. Empty if
    engines record none.
    """
    older_keys: tuple[OlderKeys, ...] = ()
    """As in `Turn`."""
    conditions: bytes = b""
    """The way in which it was sampled, as `digests.conditions` writes it."""
    digest: bytes = digests.NOTHING
    """The digest of the turn and of all turns before it."""
    children: list[Node] = field(default_factory=list["Node"])
    number: int = 0
    """Its place among all turns of its rollout."""

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        turn: Turn,
        *,
        reply: str,
        request: int,
        sampling: SamplingParams | None = None,
    ) -> Node:
        """The node of a finished turn. `sampling` are the parameters of its request."""
        output = packed(turn.output_ids)
        logprobs = struct.pack(f"<{len(turn.logprobs)}f", *turn.logprobs)
        conditions = digests.conditions(turn, sampling)
        experts = b""
        if turn.experts:
            experts = turn.experts[_first_recorded(prompt.parent) * turn.num_expert_bytes :]
        return cls(
            parent=prompt.parent,
            request=request,
            start=prompt.parent.end if prompt.parent is not None else 0,
            tail=prompt.tail,
            output=output,
            logprobs=logprobs,
            segments=turn.segments,
            finish=turn.finish,
            policy_sampled=turn.policy_sampled,
            masked_by=turn.masked_by,
            num_overshoot=turn.num_overshoot,
            respelled=prompt.respelled,
            prompt_digest=prompt.digest,
            num_letters=prompt.num_letters,
            reply_digest=text_digest(reply),
            num_reply_letters=len(reply),
            kept=b"".join(turn.kept),
            kept_lengths=packed([len(left) for left in turn.kept]) if turn.kept else b"",
            experts=experts,
            older_keys=turn.older_keys,
            conditions=conditions,
            digest=digests.turn_digest(
                digests.NOTHING if prompt.parent is None else prompt.parent.digest,
                tail=prompt.tail,
                output=output,
                logprobs=logprobs,
                segments=turn.segments,
                conditions=conditions,
            ),
        )

    @property
    def record(self) -> TurnRecord:
        """Its record in the rows that it is in."""
        return TurnRecord(self.start, self.num_prompt, self.end, self.conditions, self.digest)

    @property
    def turn(self) -> Turn:
        """The turn as it was recorded, except that `num_resumes` is lost."""
        prompt = unpacked(self.packed_ids[: self.num_prompt * _ID_BYTES])
        output = unpacked(self.output)
        logprobs = struct.unpack(f"<{len(output)}f", self.logprobs)
        ends = accumulate(unpacked(self.kept_lengths), initial=0)
        kept = tuple(self.kept[begin:end] for begin, end in pairwise(ends))
        return Turn(
            prompt,
            output,
            logprobs,
            self.segments,
            self.finish,
            self.policy_sampled,
            self.num_overshoot,
            kept=kept,
            masked_by=self.masked_by,
            older_keys=self.older_keys,
        )

    @property
    def num_prompt(self) -> int:
        """The number of tokens of its whole prompt."""
        return self.start + len(self.tail) // _ID_BYTES

    @property
    def num_output(self) -> int:
        return len(self.output) // _ID_BYTES

    @property
    def end(self) -> int:
        """The number of tokens of prompt and output."""
        return self.num_prompt + self.num_output

    @property
    def num_expert_bytes(self) -> int:
        """The number of bytes of each token's record of experts."""
        return len(self.experts) // (self.end - self.first_recorded)

    @property
    def first_recorded(self) -> int:
        return _first_recorded(self.parent)

    @property
    def path(self) -> list[Node]:
        """The turns from the root to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def parts(self) -> list[bytes]:
        """The ids of prompt and output, packed, in the parts that the turns of the path have."""
        return [part for node in self.path for part in (node.tail, node.output)]

    @property
    def packed_ids(self) -> bytes:
        """The ids of prompt and output, packed."""
        return b"".join(self.parts)

    def columns(self, *, trained: bool, turn: int) -> tuple[bytes, ...]:
        """Its part of each column of a row, without the ids: zeros for the tokens that the model
        read, then the values of its output.
        """
        number = self.num_output
        read = bytes(len(self.tail))
        short = bytes(len(self.tail) // _ID_BYTES)
        versions, kv_versions = digests.labels(self.segments)
        return (
            short + b"\1" * number,
            short + (b"\1" if trained else b"\0") * number,
            read + self.logprobs,
            read + versions,
            read + kv_versions,
            read + _id(turn) * number,
        )


def _first_recorded(parent: Node | None) -> int:
    """The first token of a turn with this parent that has a record of experts. It is the parent's
    last token, because that was sent to experts only when a later turn was computed.
    """
    return 0 if parent is None else max(0, parent.end - 1)


class RecordedTurns:
    """The turns of one rollout that were complete before a crash (I8). Each is given once, to the
    first request with its prompt that has room for it.
    """

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns = list(turns)
        self.in_session = False
        """True if the session itself generated and counted these turns. A turn that is not given
        again is then lost.
        """

    def after(self, turns: Iterable[Turn]) -> RecordedTurns:
        """The turns of a session whose agent starts over, followed by these."""
        every = RecordedTurns([*turns, *self._turns])
        every.in_session = True
        return every

    @property
    def num_lost(self) -> int:
        """Tokens of the session that have not been given again."""
        if not self.in_session:
            return 0
        return sum(len(turn.output_ids) + turn.num_overshoot for turn in self._turns)

    def take(self, request: GenerateRequest, role: str = "") -> Turn | None:
        """Removes and returns the first turn that answers the request, if there is one."""
        for place, turn in enumerate(self._turns):
            if (
                turn.prompt_ids == request.input_ids
                and turn.role == role
                and len(turn.output_ids) <= request.sampling.max_tokens
            ):
                return self._turns.pop(place)
        return None


def _bytes(text: str) -> bytes:
    """The text in UTF-8. A client may send half of a surrogate pair, which strict UTF-8 refuses."""
    return text.encode("utf-8", "surrogatepass")


EMPTY = b""
"""The digest of a conversation without messages."""

Meaning: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...]]
"""Content, reasoning, and the name and canonical arguments of each tool call."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=True, separators=(",", ":"))
_REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class History:
    """A conversation in digests."""

    chain: tuple[bytes, ...]
    """Entry k names the messages up to the k-th one from `start` on."""
    replies: dict[int, bytes]
    """The digest of each assistant message from `start` on by itself, by its place."""
    start: int = 0
    opening: bytes = b""
    """The digest of the messages before `start`."""
    calls: Mapping[str, int] = field(default_factory=dict[str, int])
    """The positions, by id, of the calls of the last assistant message."""

    def through(self, place: int) -> bytes:
        """The digest of the messages up to this one."""
        return self.chain[place - self.start]

    def before(self, place: int) -> bytes:
        """The digest of the messages before a place."""
        return self.chain[place - 1 - self.start] if place > self.start else self.opening

    def begun(self, messages: Sequence[Message], ending: Ending) -> tuple[History, str]:
        """The history that an answer is recorded under, and the content that its message already
        has.
        """
        if ending is not Ending.OPEN:
            return self, ""
        last = len(messages) - 1
        replies = {place: own for place, own in self.replies.items() if place < last}
        content = str(messages[last].get("content") or "")
        return History(self.chain[:last], replies), content

    @property
    def end(self) -> bytes:
        return self.before(self.start + len(self.chain))

    def then(self, more: History) -> History:
        """This conversation and what was read after it."""
        return History(
            self.chain + more.chain,
            self.replies | more.replies,
            self.start,
            self.opening,
            more.calls,
        )

    @property
    def closed(self) -> History:
        """Its end alone, from which a longer history goes on."""
        return History((), {}, self.start + len(self.chain), self.end, self.calls)


def read(messages: Sequence[Message], *, since: History | None = None) -> History:
    """Digests a conversation. A tool's result names the call that it answers by its position, since
    clients choose their own ids. With `since`, the messages are those after that conversation.
    """
    before = since or History((), {})
    first = before.start + len(before.chain)
    opening = before.end
    chain: list[bytes] = []
    replies: dict[int, bytes] = {}
    calls = before.calls
    for place, message in enumerate(messages, first):
        own = digest(message, calls)
        chain.append(linked(chain[-1] if chain else opening, own))
        if message.get("role") == "assistant":
            replies[place] = own
            calls = _positions(message.get("tool_calls"))
    return History(tuple(chain), replies, first, opening, calls)


def assistant_reply(message: AssistantMessage) -> dict[str, Json]:
    """The message that represents an answer in the requests that follow."""
    calls: list[Json] = [
        {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in message.tool_calls
    ]
    return {"role": "assistant", "content": message.content, "tool_calls": calls}


def digest(message: Message, calls: Mapping[str, int] | None = None) -> bytes:
    """The name of one message. `calls` holds the positions, by id, of the tool calls that the
    message may answer.
    """
    if message.get("role") == "assistant":
        meant = _reply_meaning(message)
    else:
        meant = _context_meaning(message, calls or {})
    return _hashed(_named(meant))


def linked(before: bytes, own: bytes) -> bytes:
    """The digest of a conversation with one more message."""
    return _hashed(before + own)


def meaning(message: AssistantMessage) -> Meaning:
    """The value that two texts of one message share. Blanks around content and reasoning do not
    count, because the template adds or trims them.
    """
    calls = tuple((call.name, canonical_arguments(call.arguments)) for call in message.tool_calls)
    return message.content.strip(), message.reasoning.strip(), calls


def canonical_arguments(arguments: Json) -> str:
    """The arguments of a call in one spelling, however they were serialised: sorted keys, no
    blanks, 1.0 as 1. A text that is not JSON stays as it is.
    """
    text = arguments if isinstance(arguments, str) else _dumped(arguments).decode()
    try:
        return _dumped(cast(Json, json.loads(text.strip() or "{}", parse_float=_number))).decode()
    except (ValueError, RecursionError):
        return text.strip()


def _reply_meaning(message: Message) -> Json:
    """Only the model's content and calls count. Many clients drop the reasoning and add fields of
    their own.
    """
    content = _text(message.get("content"))
    calls: list[Json] = [_call_meaning(call) for call in _listed(message.get("tool_calls"))]
    return ["assistant", content.strip() if isinstance(content, str) else content, calls]


def _call_meaning(call: Json) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return [function.get("name"), canonical_arguments(function.get("arguments"))]


def _context_meaning(message: Message, calls: Mapping[str, int]) -> Json:
    """A message that the agent wrote. Fields without a value do not count."""
    found: dict[str, Json] = {
        name: value for name, value in message.items() if value not in (None, "", [], {})
    }
    if "content" in found:
        found["content"] = _text(found["content"])
    answered = found.get("tool_call_id")
    if isinstance(answered, str) and answered in calls:
        found["tool_call_id"] = calls[answered]
    return found


def _text(content: Json) -> Json:
    """The content as one text, if it is text. Parts that hold reasoning are left out."""
    if not isinstance(content, list):
        return content or ""
    parts: list[Json] = []
    texts: list[Json] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _REASONING_PARTS:
            continue
        parts.append(part)
        if isinstance(part, dict) and kind in _TEXT_PARTS and "text" in part:
            texts.append(part["text"])
    if len(texts) < len(parts):
        return parts
    return "".join(text for text in texts if isinstance(text, str))


def _listed(calls: Json) -> list[Json]:
    return calls if isinstance(calls, list) else []


def _positions(calls: Json) -> dict[str, int]:
    """The positions of tool calls by their ids."""
    found: dict[str, int] = {}
    for place, call in enumerate(_listed(calls)):
        call_id = call.get("id") if isinstance(call, dict) else None
        if isinstance(call_id, str):
            found[call_id] = place
    return found


def _number(text: str) -> float | int:
    """A float as JSON has it. Clients whose language has one kind of number write 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _named(value: Json) -> bytes:
    """One spelling of a value. The fast encoder refuses half surrogate pairs and huge numbers; the
    slow one writes them.
    """
    try:
        return msgspec.json.encode(value, order="sorted")
    except (ValueError, OverflowError, RecursionError):
        return _dumped(value)


def _dumped(value: Json) -> bytes:
    try:
        return _CANONICAL.encode(value).encode()
    except RecursionError as error:
        raise RequestRejected(
            "a message is nested too deeply to be read: send flatter JSON.", param="messages"
        ) from error


def _hashed(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
