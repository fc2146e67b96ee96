"""The token tree of a session: what was asked and answered, by tokens. Synchronous; it never waits.

I4: a prompt that continues a recorded turn holds that turn's ids verbatim; only what is new is tokenised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from midflight.gateway.sessions.history import History, assistant_reply, digest, linked, read
from midflight.gateway.sessions.match import Chat, Matcher
from midflight.gateway.sessions.node import Node, Prompt, beginnings, packed, unpacked
from midflight.text import Message, Tokenizer
from midflight.text.formats import AssistantMessage, Tool
from midflight.types import Json, Turn

_MAX_READ = 8
"""Replies of one prompt, newest first, that are read back to see whether they mean the same. A template that cuts thoughts writes
every reply otherwise, and reading all of them for each prompt would be quadratic in the turns."""


class TokenTree:
    """The turns of one session. `plan_*` turns a prompt into tokens and changes nothing, `record` adds the finished turn."""

    def __init__(self, tokenizer: Tokenizer, *, matcher: Matcher | None = None) -> None:
        """`matcher`: one for all trees of a gateway."""
        self._tokenizer = tokenizer
        self._matcher = matcher or Matcher(tokenizer)
        self._roots: list[Node] = []
        self._by_history: dict[bytes, list[Node]] = {}
        """The turns that a conversation may end with, by its digest; several where choices differ in their reasoning only."""
        self._replies: set[bytes] = set()
        """Digests of the replies by themselves."""
        self._answered: set[bytes] = set()
        """Digests of the conversations that were answered."""
        self.nodes: list[Node] = []
        self.num_branches = 0
        """Turns that do not continue the newest end of what came before: a new start, or a second way on from a turn."""
        self.num_rewritten = 0
        """Answered chats that hold a recorded reply, or another message in its place, and could not continue it token by token:
        the client edited the history, or the template writes it otherwise. They start a branch."""
        self.num_mismatches = 0
        """Answered prompts whose text, tokenised anew, would have had other ids than those reused."""

    def plan_chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), options: Mapping[str, Json] | None = None) -> Prompt:
        """The prompt of a conversation: the longest recorded prefix verbatim, the rest tokenised."""
        written = [tool.as_json() for tool in tools] or None
        text = self._tokenizer.render(messages, tools=written, add_generation_prompt=True, options=options)
        history = read(messages)
        found = self._continued(Chat(text, messages, tools, options or {}), history)
        if found is None:
            ids = self._tokenizer.encode(text)
            return Prompt(ids, text, history.chain[-1], self._longest_prefix(ids), rewritten=self._is_rewritten(history, since=0))
        node, rest, place = found
        return self._going_on(node, text, rest, history=history.chain[-1], rewritten=self._is_rewritten(history, since=place + 1))

    def plan_text(self, text: str) -> Prompt:
        """The prompt of a text completion: a text that goes on from a recorded one reuses its ids."""
        starts = beginnings(text, (node.num_letters for node in self.nodes))
        begun = [node for node in self.nodes if node.prompt_digest is not None and starts.get(node.num_letters) == node.prompt_digest]
        spoken = [(node, self._tokenizer.decode(unpacked(node.output))) for node in begun]
        ends = [(node.num_letters + len(said), node) for node, said in spoken if text.startswith(said, node.num_letters)]
        if not ends:
            ids = self._tokenizer.encode(text)
            return Prompt(ids, text, parent=self._longest_prefix(ids))
        length, node = max(ends, key=lambda pair: pair[0])
        return self._going_on(node, text, text[length:])

    def plan_ids(self, token_ids: Sequence[int]) -> Prompt:
        ids = tuple(token_ids)
        return Prompt(ids, None, parent=self._longest_prefix(ids))

    def record(self, prompt: Prompt, turn: Turn, *, reply: str, request: int, message: AssistantMessage | None = None) -> Node:
        """Adds a finished turn. `turn.prompt_ids` are the ids of `prompt`."""
        assert turn.prompt_ids == prompt.ids, "I4: the turn was sampled from the ids that were planned"
        node = Node.of(prompt, turn, reply=reply, request=request)
        siblings = self._roots if prompt.parent is None else prompt.parent.children
        self._count(prompt, request, siblings)
        siblings.append(node)
        self.nodes.append(node)
        if prompt.history is not None:
            own = digest(assistant_reply(message or AssistantMessage(reply)))
            self._by_history.setdefault(linked(prompt.history, own), []).append(node)
            self._replies.add(own)
            self._answered.add(prompt.history)
        return node

    def _count(self, prompt: Prompt, request: int, siblings: Sequence[Node]) -> None:
        """A prompt counts once, with the first of its choices."""
        self.num_branches += any(other.request != request for other in siblings)
        if all(other.request != request for other in siblings):
            self.num_rewritten += prompt.rewritten
            self.num_mismatches += prompt.respelled

    def _continued(self, chat: Chat, history: History) -> tuple[Node, str, int] | None:
        """The turn that the conversation goes on from, the text after it, and the place of its reply."""
        known = [(place, nodes) for place in reversed(history.replies) if (nodes := self._by_history.get(history.chain[place]))]
        starts = beginnings(chat.text, (node.num_letters for _, nodes in known for node in nodes))
        for rank, (place, nodes) in enumerate(known):
            begun = [node for node in nodes if starts.get(node.num_letters) == node.prompt_digest]
            found = self._matcher.verbatim(begun, chat.text)
            if found is None and rank < _MAX_READ:
                found = self._matcher.reworded(begun, chat, place)
            if found is not None:
                return *found, place
        return None

    def _is_rewritten(self, history: History, *, since: int) -> bool:
        """Whether a message from place `since` on repeats a recorded reply, or stands where one was recorded."""
        return any(
            own in self._replies or history.before(place) in self._answered for place, own in history.replies.items() if place >= since
        )

    def _going_on(self, node: Node, text: str, rest: str, *, history: bytes | None = None, rewritten: bool = False) -> Prompt:
        last = unpacked((node.output or node.tail)[-4:])
        rest_ids = self._tokenizer.encode_after(last[0], rest) if last else self._tokenizer.encode(rest)
        respelled = node.respelled or self._matcher.respelled(node, text, rest, rest_ids)
        return Prompt(unpacked(node.packed_ids) + rest_ids, text, history, node, respelled, rewritten)

    def _longest_prefix(self, ids: tuple[int, ...]) -> Node | None:
        """The longest recorded turn that these ids go on from; it looks only at the children of turns that they do."""
        key = packed(ids) if self._roots else b""
        best, best_end, ends = None, 0, [(0, self._roots)]
        while ends:
            start, nodes = ends.pop()
            for node in nodes:
                middle = start + len(node.tail)
                end = middle + len(node.output)
                if end < len(key) and key.startswith(node.tail, start) and key.startswith(node.output, middle):
                    ends.append((end, node.children))
                    best, best_end = (node, end) if end > best_end else (best, best_end)
        return best
