"""The parts of an assistant's message, whole or in pieces, with the interfaces of parsers and of
tool formats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

from midflight.text.formats.cursor import Cursor, Reading
from midflight.text.formats.lark import Lark
from midflight.types import Json


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Json] = field(default_factory=dict[str, Json])
    told_whole: bool = False
    """True if no part of a call is given out before the call is complete."""
    strict: bool = False
    """True if the arguments of every call must match `parameters`, even if the call is optional."""

    def as_json(self) -> dict[str, Json]:
        """The tool as chat templates read it (OpenAI's form)."""
        function: dict[str, Json] = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON text of an object, as the model wrote it."""


class AssistantMessage(msgspec.Struct, frozen=True):
    """A message of the assistant. `content` is the text without reasoning and tool calls."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ContentPiece(msgspec.Struct, frozen=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A call. It is held back until it is known to be well formed. If it `begins`, only its name is
    known, and its arguments follow in other pieces.
    """

    index: int
    """Its number in its message, from 0."""
    call: ToolCall
    begins: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the arguments of the call that has begun."""

    index: int
    text: str
    last: bool = False
    """True if the call is complete."""


Piece: TypeAlias = ContentPiece | ReasoningPiece | CallPiece | ArgumentsPiece


class MessageParser(Protocol):
    """Reads the text of one message as it grows. However the text is cut, the joined pieces are the
    same message.
    """

    @property
    def num_calls(self) -> int:
        """The number of calls that have ended."""
        ...

    def feed(self, text: str) -> tuple[Piece, ...]:
        """The pieces that became certain with this text."""
        ...

    def finish(self) -> tuple[Piece, ...]:
        """The rest, when the text has ended. An incomplete call is content."""
        ...


def joined(pieces: tuple[Piece, ...]) -> AssistantMessage:
    """The message that these pieces make."""
    if len(pieces) == 1 and isinstance(pieces[0], ContentPiece):
        return AssistantMessage(pieces[0].text)
    arguments: dict[int, str] = {}
    for piece in pieces:
        if isinstance(piece, ArgumentsPiece):
            arguments[piece.index] = arguments.get(piece.index, "") + piece.text
    calls: list[ToolCall] = []
    for piece in pieces:
        if isinstance(piece, CallPiece) and piece.begins:
            calls.append(ToolCall(piece.call.name, arguments.get(piece.index, "")))
        elif isinstance(piece, CallPiece):
            calls.append(piece.call)
    return AssistantMessage(
        content="".join(p.text for p in pieces if isinstance(p, ContentPiece)),
        reasoning="".join(p.text for p in pieces if isinstance(p, ReasoningPiece)),
        tool_calls=tuple(calls),
    )


class Calls(Protocol):
    """The listener that a format notifies of calls while it reads a text."""

    def begin(self, name: str) -> None:
        """The text that the cursor takes from here on is the arguments of a call, an object, as
        long as it is well formed.
        """
        ...

    def end(self) -> None:
        """The arguments that began are complete. The text that follows belongs to the form of the
        call.
        """
        ...

    def give(self, call: ToolCall) -> None:
        """A call is certain. The text that the cursor has taken is that call and no content."""
        ...


class ToolFormat(Protocol):
    """One format of tool calls. Stateless."""

    @property
    def opening(self) -> str:
        """The marker that calls begin with."""
        ...

    @property
    def announces(self) -> bool:
        """True if the opening marker comes before all calls."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker that may be a special token, including the opening one."""
        ...

    def read(self, cursor: Cursor, calls: Calls, tools: Sequence[Tool]) -> Reading[None]:
        """Reads on after the opening marker, reports where arguments begin and end, and gives each
        call that is complete. Ends by itself or by `NotACall`. Text that was taken after the last
        given call is content.
        """
        ...

    def read_bare(self, cursor: Cursor, calls: Calls) -> Reading[None] | None:
        """Reads a message whose first letter is `{`, if the format also writes calls without a
        marker. Returns `None` for other formats.
        """
        ...

    def rules(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Grammar rules in which `calls` is one call in this format, or with `parallel` one or
        more.
        """
        ...
