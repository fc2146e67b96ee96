"""Canonical messages: the form in which a conversation sent again is recognised (DECISIONS 16).

A client that sends a reply back may add empty fields or split the text into parts; that changes nothing. The chain of digests
names every prefix of a conversation, so that finding the longest recorded one costs one pass.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from midflight.text import Message
from midflight.text.formats import AssistantMessage
from midflight.types import Json

EMPTY = b""
"""Digest of a conversation without messages."""


def assistant_reply(message: AssistantMessage) -> dict[str, Json]:
    """The message that stands for an answer in the requests that follow."""
    return {"role": "assistant", "content": message.content}


def extended(digest: bytes, message: Message) -> bytes:
    """Digest of the conversation with one message more. Fields without a value do not count."""
    meaning = {name: value for name, value in message.items() if value not in (None, [], {})}
    canonical = json.dumps(meaning, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()
    return hashlib.blake2b(digest + canonical, digest_size=16).digest()


def digests(messages: Sequence[Message]) -> list[bytes]:
    """Entry k names the first k + 1 messages."""
    chain: list[bytes] = []
    digest = EMPTY
    for message in messages:
        digest = extended(digest, message)
        chain.append(digest)
    return chain
