"""The responses that a session keeps by id. Synchronous.

A response is kept together with its items and with the messages as templates read them. A later
request that names a response continues the conversation up to it. So its recorded tokens are found
like those of any conversation that is sent again (I4). A response holds only what is new beyond the
response that it continues. A named conversation grows with every response.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import msgspec

from midflight.errors import Overloaded, UnknownResponse
from midflight.gateway.sessions import history
from midflight.text import Message
from midflight.types import Json
from midflight.types.token_ids import packed, unpacked

MAX_RESPONSES = 1024
MAX_BYTES = 8 * 2**20
"""The most responses of one session, and their most bytes. The oldest response is forgotten first.
The longest tasks of coding agents have some hundred turns; a response with its tools has some
kilobytes.
"""
MAX_CONVERSATIONS = 64
"""The most conversations of one session. An agent has one, and one for each of its sub-agents."""


@dataclass(frozen=True, slots=True, eq=False)
class ConversationPrefix:
    """A conversation up to some message: an earlier conversation, and the messages after it."""

    before: ConversationPrefix | None
    messages: tuple[Message, ...]
    digest: bytes
    """The name of the whole conversation."""

    @property
    def whole(self) -> tuple[Message, ...]:
        """All its messages."""
        parts = [self.messages]
        before = self.before
        while before is not None:
            parts.append(before.messages)
            before = before.before
        return tuple(message for part in reversed(parts) for message in part)


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation that a client made by name. Every response in it continues the one before."""

    name: str
    created: int
    metadata: Json
    said: ConversationPrefix | None = None
    tools: Json = field(default_factory=list[Json])
    """The tools of its last response, by which calls are told as the client knows them."""
    item_ids: list[str] = field(default_factory=list[str])
    """The ids of its items, as far as they were told."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return () if self.said is None else self.said.whole

    def put(self, messages: Sequence[Message]) -> None:
        """Sets all its messages."""
        self.said = ConversationPrefix(None, tuple(messages), history.EMPTY) if messages else None

    def ids(self, number: int) -> list[str]:
        """The ids of its first `number` items. An item keeps its id."""
        while len(self.item_ids) < number:
            self.item_ids.append(f"item_{secrets.token_hex(12)}")
        return self.item_ids[:number]


@dataclass(frozen=True, slots=True, eq=False)
class _KeptResponse:
    body: bytes
    """The response, as JSON."""
    said: ConversationPrefix
    item_ids: tuple[str, ...]
    deltas: tuple[bytes, ...]
    """The lengths of the texts that each item came in, packed. A stream of the response again has
    the same events.
    """
    size: int


@dataclass(slots=True, eq=False)
class KeptResponses:
    """The kept responses of one session. Methods raise `UnknownResponse` for an id that this
    session does not know, even if another session knows it.
    """

    _responses: OrderedDict[str, _KeptResponse] = field(
        default_factory=OrderedDict[str, _KeptResponse]
    )
    _items: dict[str, str] = field(default_factory=dict[str, str])
    """The response that each item belongs to."""
    _said: dict[bytes, ConversationPrefix] = field(default_factory=dict[bytes, ConversationPrefix])
    _conversations: dict[str, Conversation] = field(default_factory=dict[str, Conversation])
    _num_bytes: int = 0

    def __len__(self) -> int:
        return len(self._responses)

    def response(self, response_id: str, param: str | None = None) -> Json:
        return cast(Json, msgspec.json.decode(self._find(response_id, param).body))

    def deltas(self, response_id: str) -> list[tuple[int, ...]]:
        """The lengths of the texts that each of its items came in."""
        kept = self._find(response_id, None)
        return [unpacked(lengths) for lengths in kept.deltas]

    def said(self, response_id: str, param: str) -> ConversationPrefix:
        """The conversation up to the end of a response."""
        return self._find(response_id, param).said

    def item(self, item_id: str, param: str) -> Mapping[str, Json]:
        """An item of a response, as the client received it."""
        owner = self._items.get(item_id)
        if owner is not None:
            body = cast("dict[str, list[dict[str, Json]]]", self.response(owner, param))
            return next(item for item in body["output"] if item["id"] == item_id)
        raise UnknownResponse(
            (
                f"{param} refers to the item {item_id[:80]!r}, which this session does not keep: "
                "send the item itself."
            ),
            param=param,
        )

    def keep(
        self,
        response: Mapping[str, Json],
        messages: Sequence[Message],
        *,
        conversation: str | None,
        deltas: Sequence[Sequence[int]] = (),
    ) -> None:
        """Keeps a response. `messages` is the whole conversation, the reply included. `deltas` are
        the lengths of the texts that each item came in. Keeping a response again changes only its
        body.
        """
        name = str(response["id"])
        output = cast("list[dict[str, Json]]", response["output"])
        self.forget(name)
        said = self._grown(messages)
        body = msgspec.json.encode(response)
        lengths = tuple([packed(each) for each in deltas])
        size = len(body) + len(msgspec.json.encode(said.messages)) + sum(map(len, lengths))
        item_ids = tuple([str(item["id"]) for item in output])
        kept = _KeptResponse(body, said, item_ids, lengths, size)
        self._responses[name] = kept
        self._num_bytes += kept.size
        for item_id in kept.item_ids:
            self._items[item_id] = name
        if conversation is not None and conversation in self._conversations:
            found = self._conversations[conversation]
            found.said = said
            found.tools = response.get("tools") or []
        while self._is_full:
            self.forget(next(iter(self._responses)))

    @property
    def _is_full(self) -> bool:
        """True if the oldest response must go. The newest one stays, however large it is."""
        if len(self._responses) <= 1:
            return False
        return len(self._responses) > MAX_RESPONSES or self._num_bytes > MAX_BYTES

    def forget(self, response_id: str) -> bool:
        """Removes a response; says whether it was there."""
        kept = self._responses.pop(response_id, None)
        if kept is None:
            return False
        self._num_bytes -= kept.size
        for item_id in kept.item_ids:
            del self._items[item_id]
        if self._said.get(kept.said.digest) is kept.said:
            del self._said[kept.said.digest]
        return True

    def begin(self, messages: Sequence[Message], *, created: int, metadata: Json) -> Conversation:
        """Makes a conversation that begins with these messages."""
        if len(self._conversations) >= MAX_CONVERSATIONS:
            raise Overloaded(
                f"{MAX_CONVERSATIONS} conversations are kept in this session, the most allowed: "
                "delete some."
            )
        found = Conversation(f"conv_{secrets.token_hex(16)}", created, metadata)
        found.put(messages)
        self._conversations[found.name] = found
        return found

    def conversation(self, name: str, param: str | None = None) -> Conversation:
        found = self._conversations.get(name)
        if found is None:
            raise UnknownResponse(
                (
                    f"this session has no conversation {name[:80]!r}: make one by POST "
                    "/v1/conversations."
                ),
                param=param,
            )
        return found

    def end(self, name: str) -> None:
        """Deletes a conversation; its responses stay."""
        self.conversation(name)
        del self._conversations[name]

    def _find(self, response_id: str, param: str | None) -> _KeptResponse:
        found = self._responses.get(response_id)
        if found is None:
            remedy = (
                "it was made in another session, with store false, or long ago; send the "
                "whole input"
            )
            raise UnknownResponse(
                f"there is no response {response_id[:80]!r} here: {remedy}.", param=param
            )
        return found

    def _grown(self, messages: Sequence[Message]) -> ConversationPrefix:
        """The conversation, on top of the longest known conversation that it continues. So a client
        that sends the whole conversation each time costs no more memory.
        """
        digests = [history.text_digest(msgspec.json.encode(m).decode()) for m in messages]
        chain = list(accumulate(digests, history.linked))
        start = 0
        before = None
        for place in reversed(range(len(chain))):
            before = self._said.get(chain[place])
            if before is not None:
                start = place + 1
                break
        if before is not None and start == len(chain):
            return before
        said = ConversationPrefix(before, tuple(messages[start:]), chain[-1])
        self._said[chain[-1]] = said
        return said
