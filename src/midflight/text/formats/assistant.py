"""An assistant's message in its parts, whole or piece by piece, and what a format of tool calls is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from midflight.text.formats.cursor import Cursor, Reading
from midflight.text.formats.lark import Lark
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


Give: TypeAlias = Callable[[ToolCall], None]
"""Takes a call that is certain: what the cursor took until then is that call and no content."""


class ToolFormat(Protocol):
    """One way to write calls. Stateless."""

    @property
    def opening(self) -> str:
        """The marker that calls begin with."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker that may be a special token, the opening one too."""
        ...

    def read(self, cursor: Cursor, give: Give, tools: Sequence[Tool]) -> Reading[None]:
        """Reads on after the opening marker, and gives each call that is complete. Ends by itself or by `NotACall`;
        what was taken after the last call given is content."""
        ...

    def read_bare(self, cursor: Cursor, give: Give) -> Reading[None] | None:
        """Reads a message whose first letter is `{`, in formats that write calls without a marker too; `None` in others."""
        ...

    def rules(self, lark: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """Rules of a grammar in which `calls` is one call, or with `parallel` one or more, as this format writes them."""
        ...
