"""What a session's tree is made of: prompts in tokens, and recorded turns in few bytes.

A turn keeps what is new beyond its parent, as packed arrays: four bytes for each id and each log-probability. Texts are kept as
lengths and digests, because whoever asks sends the text again.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from midflight.types import FinishReason, Segment, Turn

_ID_BYTES = 4


def packed(token_ids: Sequence[int]) -> bytes:
    """Ids as little-endian int32: prefixes of ids are prefixes of bytes."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def unpacked(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // _ID_BYTES}i", data)


def text_digest(text: str) -> bytes:
    """Names a text: 16 bytes, so that two texts do not share one by chance."""
    return hashlib.blake2b(_bytes(text), digest_size=16).digest()


def beginnings(text: str, lengths: Iterable[int]) -> dict[int, bytes]:
    """`text_digest` of the first n letters for each n that the text has, in one pass over it."""
    state, start = hashlib.blake2b(digest_size=16), 0
    found: dict[int, bytes] = {}
    for length in sorted(n for n in set(lengths) if n <= len(text)):
        state.update(_bytes(text[start:length]))
        found[length], start = state.copy().digest(), length
    return found


@dataclass(frozen=True, eq=False)
class Prompt:
    """A request's prompt in tokens, and the recorded turn it continues. It lives as long as its request."""

    ids: tuple[int, ...]
    text: str | None
    """As rendered or sent; `None` for a prompt of ids."""
    history: bytes | None = None
    """Digest of its messages, for a chat."""
    parent: Node | None = None
    respelled: bool = False
    """Whether its text, tokenised anew, would have other ids."""
    rewritten: bool = False
    """Whether it holds a recorded reply, or one in its place, that it does not continue token by token."""

    @cached_property
    def tail(self) -> bytes:
        """Its ids beyond those of the turn it continues, packed; choices of one request share the object."""
        return packed(self.ids[self.parent.end if self.parent is not None else 0 :])

    @cached_property
    def digest(self) -> bytes | None:
        return None if self.text is None else text_digest(self.text)


@dataclass(slots=True, eq=False)
class Node:
    """One recorded turn. Its ids are those of its parent, then `tail`, then `output`."""

    parent: Node | None
    request: int
    """Choices of one request (n > 1) share this number."""
    start: int
    """Tokens of the parent's ids."""
    tail: bytes
    """Prompt ids beyond the parent's."""
    output: bytes
    logprobs: bytes
    """float32, one for each output id."""
    segments: tuple[Segment, ...]
    reason: FinishReason
    policy_sampled: bool
    num_overshoot: int
    respelled: bool
    """Of its prompt."""
    prompt_digest: bytes | None
    """Of the prompt's text, if it had one."""
    num_letters: int
    """Of the prompt's text."""
    reply_digest: bytes
    """Of the text the agent saw."""
    num_reply_letters: int
    children: list[Node] = field(default_factory=list["Node"])

    @classmethod
    def of(cls, prompt: Prompt, turn: Turn, *, reply: str, request: int) -> Node:
        return cls(
            parent=prompt.parent,
            request=request,
            start=prompt.parent.end if prompt.parent is not None else 0,
            tail=prompt.tail,
            output=packed(turn.output_ids),
            logprobs=struct.pack(f"<{len(turn.logprobs)}f", *turn.logprobs),
            segments=turn.segments,
            reason=turn.finish.reason,
            policy_sampled=turn.policy_sampled,
            num_overshoot=turn.num_overshoot,
            respelled=prompt.respelled,
            prompt_digest=prompt.digest,
            num_letters=len(prompt.text or ""),
            reply_digest=text_digest(reply),
            num_reply_letters=len(reply),
        )

    @property
    def num_prompt(self) -> int:
        """Tokens of its whole prompt."""
        return self.start + len(self.tail) // _ID_BYTES

    @property
    def num_output(self) -> int:
        return len(self.output) // _ID_BYTES

    @property
    def end(self) -> int:
        """Tokens of prompt and output."""
        return self.num_prompt + self.num_output

    @property
    def path(self) -> list[Node]:
        """From the root to this turn."""
        found: list[Node] = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]

    @property
    def packed_ids(self) -> bytes:
        """Ids of prompt and output."""
        return b"".join(part for node in self.path for part in (node.tail, node.output))


def _bytes(text: str) -> bytes:
    """A client may send half of a surrogate pair, which is no UTF-8."""
    return text.encode("utf-8", "surrogatepass")
