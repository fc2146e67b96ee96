"""An assistant's message in its parts, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from midflight.types import Json


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Json] = field(default_factory=dict[str, Json])

    def as_json(self) -> dict[str, Json]:
        """As chat templates read it (OpenAI's form)."""
        function: dict[str, Json] = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text of an object, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """`content` is what is left when reasoning and tool calls are taken out."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class ContentPiece:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A whole call: it is held back until it is known to be well formed."""

    index: int
    """From 0 in its message."""
    call: ToolCall


Piece: TypeAlias = ContentPiece | ReasoningPiece | CallPiece


class MessageParser(Protocol):
    """Takes the text of one message as it grows. However the text is cut, the pieces joined are the same message."""

    def feed(self, text: str) -> tuple[Piece, ...]:
        """The pieces that became certain with this text."""
        ...

    def finish(self) -> tuple[Piece, ...]:
        """The rest, when the text has ended. What looked like a call and is none is content."""
        ...


def joined(pieces: tuple[Piece, ...]) -> AssistantMessage:
    """The message that these pieces make."""
    return AssistantMessage(
        content="".join(p.text for p in pieces if isinstance(p, ContentPiece)),
        reasoning="".join(p.text for p in pieces if isinstance(p, ReasoningPiece)),
        tool_calls=tuple(p.call for p in pieces if isinstance(p, CallPiece)),
    )
