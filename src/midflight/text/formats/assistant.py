"""An assistant's message in its parts, whole or piece by piece, and what a format of tool calls
is.
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
    """Whether no part of a call is told before it is complete."""
    strict: bool = False
    """Whether the arguments of a call must match `parameters`, also of one that the model is free
    to make.
    """

    def as_json(self) -> dict[str, Json]:
        """As chat templates read it (OpenAI's form)."""
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
    """`content` is what is left when reasoning and tool calls are taken out."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ContentPiece(msgspec.Struct, frozen=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A call, held back until it is known to be well formed. One that `begins` is told by its name;
    its arguments follow.
    """

    index: int
    """From 0 in its message."""
    call: ToolCall
    begins: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the arguments of the call that has begun."""

    index: int
    text: str
    last: bool = False
    """Whether the call is complete."""


Piece: TypeAlias = ContentPiece | ReasoningPiece | CallPiece | ArgumentsPiece


class MessageParser(Protocol):
    """Takes the text of one message as it grows. However the text is cut, the pieces joined are the
    same message.
    """

    @property
    def num_calls(self) -> int:
        """Calls that have ended."""
        ...

    def feed(self, text: str) -> tuple[Piece, ...]:
        """The pieces that became certain with this text."""
        ...

    def finish(self) -> tuple[Piece, ...]:
        """The rest, when the text has ended. What looked like a call and is none is content."""
        ...


def joined(pieces: tuple[Piece, ...]) -> AssistantMessage:
    """The message that these pieces make."""
    if len(pieces) == 1 and isinstance(pieces[0], ContentPiece):
        return AssistantMessage(pieces[0].text)
    arguments = [(p.index, p.text) for p in pieces if isinstance(p, ArgumentsPiece)]
    begun = [p for p in pieces if isinstance(p, CallPiece)]
    return AssistantMessage(
        content="".join(p.text for p in pieces if isinstance(p, ContentPiece)),
        reasoning="".join(p.text for p in pieces if isinstance(p, ReasoningPiece)),
        tool_calls=tuple(
            ToolCall(p.call.name, "".join(text for index, text in arguments if index == p.index))
            if p.begins
            else p.call
            for p in begun
        ),
    )


class Calls(Protocol):
    """Who is told of calls while a text is read."""

    def begin(self, name: str) -> None:
        """What the cursor takes from here on are arguments of a call, an object, as long as it is
        well formed.
        """
        ...

    def end(self) -> None:
        """The arguments that began are whole; what follows belongs to the form of the call."""
        ...

    def give(self, call: ToolCall) -> None:
        """A call that is certain: what the cursor took until then is that call and no content."""
        ...


class ToolFormat(Protocol):
    """One way to write calls. Stateless."""

    @property
    def opening(self) -> str:
        """The marker that calls begin with."""
        ...

    @property
    def announces(self) -> bool:
        """Whether the opening marker stands before all calls."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker that may be a special token, the opening one too."""
        ...

    def read(self, cursor: Cursor, calls: Calls, tools: Sequence[Tool]) -> Reading[None]:
        """Reads on after the opening marker, says where arguments begin and end, and gives each
        call that is complete. Ends by itself or by `NotACall`; what was taken after the last call
        given is content."""
        ...

    def read_bare(self, cursor: Cursor, calls: Calls) -> Reading[None] | None:
        """Reads a message whose first letter is `{`, in formats that write calls without a marker
        too; `None` in others.
        """
        ...

    def rules(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Rules of a grammar in which `calls` is one call, or with `parallel` one or more, as this
        format writes them.
        """
        ...
