"""A session keeps the end of each prompt. If the next prompt begins with the same messages, only
its new messages are rendered and tokenised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from midflight.gateway.sessions.history import HashState, History, Node
from midflight.text import Message
from midflight.text.formats import Tool
from midflight.text.template_loop import GoneItem, LoopPlace
from midflight.types import Json

_ROLES = ("system", "user", "assistant", "tool")
_NUM_FIRST = 2
"""Templates look at so many of the first messages at any time."""


@dataclass(frozen=True, slots=True, eq=False)
class Seam:
    """The end of a conversation that was a prompt. It holds digests, what the template needs to go
    on, and the last messages, but not the conversation.
    """

    owner: object
    """Stands for the tree of its session."""
    tools: tuple[Tool, ...]
    options: Mapping[str, Json]
    history: History
    """The digest of its messages, up to those that may come in another form."""
    place: LoopPlace
    """Where the template goes on."""
    text_state: HashState
    """The digest of the text before that place."""
    messages: ShownMessages
    """The messages that `history` has."""
    parent: Node | None
    tail: bytes
    """The prompt's ids beyond those of its parent. This and its parent name a prompt."""
    states: dict[bytes, HashState] = field(default_factory=dict[bytes, HashState])
    """The digests of the prompt's ids, by what comes before them. They go on with the ids that
    follow.
    """

    @property
    def num_messages(self) -> int:
        return len(self.messages)

    def is_of(self, node: Node) -> bool:
        """True if the node's prompt was this one."""
        return node.parent is self.parent and node.tail is self.tail


class ShownMessages(Sequence[Message]):
    """A conversation as a template needs it that goes on: the role of each message, and the first
    and the last messages themselves.
    """

    __slots__ = ("_known", "_roles")

    def __init__(self, roles: bytes, known: Mapping[int, Message]) -> None:
        self._roles = roles
        self._known = known

    @classmethod
    def of(cls, messages: Sequence[Message], *, last: int) -> ShownMessages | None:
        """The conversation with its messages from number `last` on. `None` if it has roles that are
        not known here.
        """
        roles = _codes(messages)
        if roles is None:
            return None
        known = {place: messages[place] for place in range(min(_NUM_FIRST, len(messages)))}
        known |= {place: messages[place] for place in range(last, len(messages))}
        return cls(roles, known)

    def grown(self, messages: Sequence[Message]) -> ShownMessages | None:
        """The conversation with more messages."""
        more = _codes(messages)
        if more is None:
            return None
        known = {**self._known, **dict(enumerate(messages, len(self)))}
        return ShownMessages(self._roles + more, known)

    def between(self, last: int, end: int) -> ShownMessages:
        """The same up to message `end`, without the messages before number `last`."""
        known = {
            place: message
            for place, message in self._known.items()
            if place < end and (place < _NUM_FIRST or place >= last)
        }
        return ShownMessages(self._roles[:end], known)

    def __len__(self) -> int:
        return len(self._roles)

    def __getitem__(self, index: Any) -> Any:
        place: int = index
        found = self._known.get(place)
        return GoneItem(_ROLES[self._roles[place]]) if found is None else found


def _codes(messages: Sequence[Message]) -> bytes | None:
    roles = [message.get("role") for message in messages]
    if not all(role in _ROLES for role in roles):
        return None
    return bytes([_ROLES.index(str(role)) for role in roles])


class ResentMessages(Sequence[Message]):
    """The messages of a request that begins as an earlier one of its session did. Those that came
    before are read again only if somebody looks at one of them.
    """

    def __init__(
        self,
        seam: Seam,
        new: Sequence[Message],
        read: Callable[[], Sequence[Message]],
    ) -> None:
        """`read` reads all messages."""
        self.seam = seam
        self.new = tuple(new)
        self._read = read
        self._whole: Sequence[Message] | None = None

    def __len__(self) -> int:
        return self.seam.num_messages + len(self.new)

    def __getitem__(self, index: Any) -> Any:
        first = self.seam.num_messages
        if isinstance(index, int):
            place = index + len(self) if index < 0 else index
            if place >= first:
                return self.new[place - first]
        found: Any = self.whole[index]
        return found

    @property
    def whole(self) -> Sequence[Message]:
        """All messages, read from the body."""
        if self._whole is None:
            self._whole = self._read()
        return self._whole
