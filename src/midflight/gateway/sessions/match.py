"""Whether a rendered conversation goes on from a recorded turn, token by token (DECISIONS 16).

A template may write a reply otherwise than the model did: arguments serialised anew, blanks trimmed. Read back by the model's own
message format it must mean the same, reasoning included; then the sampled ids stand, and only what follows is tokenised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from midflight.errors import MidflightError
from midflight.gateway.sessions.history import meaning
from midflight.gateway.sessions.node import Node, text_digest, unpacked
from midflight.text import Message, Tokenizer
from midflight.text.formats import MessageFormat, Tool
from midflight.types import Json

_PROBE = "Zq7x"
"""Content that no template writes of its own accord."""

_MAX_TWINS = 64
"""Turns with the same messages that are read back: beyond a usual best-of-n that said the same, and some milliseconds."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be continued, and how the template wrote it."""

    text: str
    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def tools_as_json(self) -> Sequence[Message] | None:
        return [tool.as_json() for tool in self.tools] or None


class Matcher:
    """One serves all sessions: it knows the tokenizer, the message format and the template's end of turn, and no session."""

    def __init__(self, tokenizer: Tokenizer, message_format: MessageFormat | None = None) -> None:
        self.tokenizer = tokenizer
        self._given_format = message_format

    @cached_property
    def _format(self) -> MessageFormat:
        """Made only when it is needed: a session that asks once never reads anything back."""
        return self._given_format or MessageFormat(self.tokenizer)

    @cached_property
    def end_of_turn(self) -> str:
        """What the template writes after an assistant's content, without the blanks around it; empty if that is not known."""
        probe: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self.tokenizer.render(probe)
        except MidflightError:  # a template may insist on another conversation
            return ""
        return text.rpartition(_PROBE)[2].strip() if _PROBE in text else ""

    def verbatim(self, nodes: Iterable[Node], text: str) -> tuple[Node, str] | None:
        """The turn whose reply follows its prompt in the text as it was said, and the text after it."""
        for node in nodes:
            end = node.num_letters + node.num_reply_letters
            if text_digest(text[node.num_letters : end]) == node.reply_digest and self._ends_there(node, text[end:]):
                return node, self._rest(node, text[end:])
        return None

    def reworded(self, nodes: Sequence[Node], chat: Chat, place: int) -> tuple[Node, str] | None:
        """The turn whose reply the template wrote at this place in other words, and the text after it."""
        for node in nodes[-_MAX_TWINS:]:
            end = self._end_of_message(node, chat, place)
            if end is not None and self._means_the_same(node, chat, end):
                return node, self._rest(node, chat.text[end:])
        return None

    def respelled(self, node: Node, text: str, rest: str, rest_ids: tuple[int, ...]) -> bool:
        """Whether `text`, which goes on from `node` with `rest`, has other ids when it is tokenised anew.

        Tokenisers cut at special tokens first. So it is enough to tokenise from the last one before the output to the next after
        it: the output once more, and never the whole history.
        """
        specials = self.tokenizer.special_token_ids
        tail, output = unpacked(node.tail), unpacked(node.output)
        start = next((k for k in reversed(range(len(tail))) if tail[k] in specials), None)
        if start is None:
            return self.tokenizer.encode(text) != unpacked(node.packed_ids) + rest_ids
        ended = bool(output) and output[-1] in specials
        stop = 0 if ended else next((k for k, i in enumerate(rest_ids) if i in specials), len(rest_ids))
        lead, head = tail[start:], rest_ids[:stop]
        first = node.num_letters - len(self.tokenizer.decode(lead))
        last = len(text) - len(rest) + (len(self.tokenizer.decode(head)) if head else 0)
        return self.tokenizer.encode(text[first:last]) != lead + output + head

    def _ends_there(self, node: Node, tail: str) -> bool:
        """Whether the message ends where the reply did, as far as that can be told."""
        tail, own = tail.lstrip(), self._own_end(node)
        return tail.startswith(self.end_of_turn) or (bool(own) and tail.startswith(own))

    def _end_of_message(self, node: Node, chat: Chat, place: int) -> int | None:
        """Where the end of turn begins that follows the reply, in letters of the text."""
        if self.end_of_turn:
            at = chat.text.find(self.end_of_turn, node.num_letters)
            return None if at < 0 else at
        try:
            written = self.tokenizer.render(chat.messages[: place + 1], tools=chat.tools_as_json, options=chat.options)
        except MidflightError:  # the template takes the whole conversation, but none that ends here
            return None
        return len(written) if chat.text.startswith(written) and len(written) >= node.num_letters else None

    def _means_the_same(self, node: Node, chat: Chat, end: int) -> bool:
        """Compared with all that was sampled, which may be more than the agent saw; calls count, whether the agent saw them so
        or as content."""
        prompt, written = chat.text[: node.num_letters], chat.text[node.num_letters : end]
        said = self.tokenizer.decode(unpacked(node.output), skip_special=True, keep=self._format.kept_token_ids)
        texts = (written, said[: node.num_reply_letters])
        parsed = [self._format.parse(each, prompt, calls=True, forced=True, tools=chat.tools) for each in texts]
        return meaning(parsed[0]) == meaning(parsed[1])

    def _rest(self, node: Node, tail: str) -> str:
        """What is context after the reply. The end of turn that the model gave itself is not repeated."""
        own = self._own_end(node)
        return tail.lstrip().removeprefix(own) if own and tail.lstrip().startswith(own) else tail

    def _own_end(self, node: Node) -> str:
        """Text of the special token that the output ends with."""
        last = unpacked(node.output[-4:])
        return self.tokenizer.decode(last) if last and last[0] in self.tokenizer.special_token_ids else ""
