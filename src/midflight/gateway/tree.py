"""The token tree of a session: what was asked and answered, by tokens. Synchronous; it never waits.

I4: a prompt that continues a recorded turn holds that turn's ids verbatim; only what is new is tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from midflight.gateway.history import assistant_reply, digests, extended
from midflight.text import Message, Tokenizer
from midflight.text.formats import AssistantMessage, Tool
from midflight.types import Json, Turn


def packed(token_ids: Sequence[int]) -> bytes:
    """Ids as little-endian int32: prefixes of ids are prefixes of bytes."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A request's prompt in tokens, and the recorded turn it continues."""

    ids: tuple[int, ...]
    text: str | None
    """As rendered or sent; `None` for a prompt of ids."""
    history: bytes | None = None
    """Digest of its messages, for a chat."""
    parent: Node | None = None


@dataclass(slots=True, eq=False)
class Node:
    """One recorded turn. `reply` is the text the agent saw, `spoken` that of all output ids, special tokens too."""

    turn: Turn
    parent: Node | None
    prompt_text: str | None
    reply: str
    spoken: str
    request: int
    """Choices of one request (n > 1) share this number."""
    children: list[Node] = field(default_factory=list["Node"])
    ids: tuple[int, ...] = ()
    key: bytes = b""

    def __post_init__(self) -> None:
        self.ids = self.turn.prompt_ids + self.turn.output_ids
        self.key = packed(self.ids)


class TokenTree:
    """The turns of one session. `plan_*` turns a prompt into tokens, `record` adds the finished turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_history: dict[bytes, Node] = {}
        self.nodes: list[Node] = []
        self.num_branches = 0
        """Turns that do not continue the newest end of what came before: a new start, or a second way on from a turn."""
        self.num_rewritten = 0
        """Chats whose history was recorded but which the template writes differently now: they start a branch."""
        self.num_mismatches = 0
        """Prompts whose text, tokenised anew, would have had other ids than those reused."""

    def plan_chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), options: Mapping[str, Json] | None = None) -> Prompt:
        """The prompt of a conversation: the longest recorded prefix verbatim, the rest tokenised."""
        written = [tool.as_json() for tool in tools] or None
        text = self._tokenizer.render(messages, tools=written, add_generation_prompt=True, options=options)
        chain = digests(messages)
        known = [node for digest in reversed(chain) if (node := self._by_history.get(digest)) is not None]
        for node in known:
            ids = self._continued(node, text)
            if ids is not None:
                return Prompt(ids, text, chain[-1], node)
        self.num_rewritten += bool(known)
        ids = self._tokenizer.encode(text)
        return Prompt(ids, text, chain[-1], self._longest_prefix(ids))

    def plan_text(self, text: str) -> Prompt:
        """The prompt of a text completion: a text that goes on from a recorded one reuses its ids."""
        starts = [(len(start), node) for node in self.nodes if (start := _full_text(node)) is not None and text.startswith(start)]
        if not starts:
            ids = self._tokenizer.encode(text)
            return Prompt(ids, text, parent=self._longest_prefix(ids))
        length, node = max(starts, key=lambda pair: pair[0])
        ids = node.ids + self._tokenizer.encode(text[length:])
        self.num_mismatches += ids != self._tokenizer.encode(text)
        return Prompt(ids, text, parent=node)

    def plan_ids(self, token_ids: Sequence[int]) -> Prompt:
        ids = tuple(token_ids)
        return Prompt(ids, None, parent=self._longest_prefix(ids))

    def record(self, prompt: Prompt, turn: Turn, *, reply: str, request: int, message: AssistantMessage | None = None) -> Node:
        """Adds a finished turn. `turn.prompt_ids` are the ids of `prompt`."""
        assert turn.prompt_ids == prompt.ids, "I4: the turn was sampled from the ids that were planned"
        spoken = self._tokenizer.decode(turn.output_ids)
        node = Node(turn, prompt.parent, prompt.text, reply, spoken, request)
        siblings = self.nodes if prompt.parent is None else prompt.parent.children
        self.num_branches += any(other.request != request and other.parent is prompt.parent for other in siblings)
        if prompt.parent is not None:
            prompt.parent.children.append(node)
        self.nodes.append(node)
        if prompt.history is not None:
            self._by_history.setdefault(extended(prompt.history, assistant_reply(message or AssistantMessage(reply))), node)
        return node

    def _continued(self, node: Node, text: str) -> tuple[int, ...] | None:
        """Ids of a rendered conversation that goes on from `node`; `None` if its text does not begin as the node's did."""
        start = (node.prompt_text or "") + node.reply
        if not text.startswith(start):
            return None
        rest = text[len(start) :].removeprefix(self._end_text(node))
        ids = node.ids + self._tokenizer.encode(rest)
        self.num_mismatches += ids != self._tokenizer.encode(text)
        return ids

    def _end_text(self, node: Node) -> str:
        """Text of the end-of-turn token the model gave itself; the template's own would be a second one."""
        output = node.turn.output_ids
        return self._tokenizer.decode(output[-1:]) if output and output[-1] in self._tokenizer.special_token_ids else ""

    def _longest_prefix(self, ids: tuple[int, ...]) -> Node | None:
        """The longest recorded turn that these ids go on from."""
        key = packed(ids)
        found = [node for node in self.nodes if len(node.key) < len(key) and key.startswith(node.key)]
        return max(found, key=lambda node: len(node.key), default=None)


def _full_text(node: Node) -> str | None:
    return None if node.prompt_text is None else node.prompt_text + node.spoken
