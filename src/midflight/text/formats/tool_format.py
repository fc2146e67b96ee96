"""What a format of tool calls is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from midflight.text.formats.assistant import Tool, ToolCall
from midflight.text.formats.cursor import Cursor, Reading
from midflight.text.formats.lark import Lark

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
