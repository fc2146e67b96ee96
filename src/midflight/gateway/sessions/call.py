"""A request of an agent, free of any wire format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from midflight.text import Message
from midflight.text.formats import Tool
from midflight.types import Grammar, Json


@dataclass(frozen=True, slots=True)
class Messages:
    """A prompt to be written by the chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Options of the template itself, such as `enable_thinking`."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    ids: tuple[int, ...]


Source: TypeAlias = Messages | Text | TokenIds


@dataclass(frozen=True, slots=True, init=False)
class Asked:
    """Sampling as far as the client asked for it: parameters of `SamplingParams` by name. The others are the session's defaults."""

    given: Mapping[str, object]

    def __init__(self, **given: object) -> None:
        """What is `None` was not asked for."""
        object.__setattr__(self, "given", {name: value for name, value in given.items() if value is not None})

    @property
    def grammar(self) -> Grammar | None:
        grammar = self.given.get("grammar")
        return grammar if isinstance(grammar, Grammar) else None

    def number(self, name: str) -> int | None:
        """A whole number, such as `max_tokens` or `seed`."""
        value = self.given.get(name)
        return value if isinstance(value, int) else None

    def constrained(self, grammar: Grammar | None) -> Asked:
        """The same under this grammar."""
        return Asked(**{**self.given, "grammar": grammar})


class ToolChoice(StrEnum):
    """Whether the answer may, must or must not call a tool. With `NONE` nothing is looked for: what looks like a call is content."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """`n` answers to each of `sources`. Choices are numbered source by source."""

    sources: tuple[Source, ...]
    asked: Asked = Asked()
    n: int = 1
    stream: bool = False
    """Whether news are wanted before the answers are whole."""
    default_max_tokens: int | None = None
    """The dialect's default, used if neither client nor session gives one. `None` means all the room there is."""
    model: str | None = None
    request_id: str | None = None
    """The client's own name for the request, by which it may abort it."""
    may_abort: bool = False
    """Whether an abort of the operator ends the request with what there is; otherwise it is resumed."""
    prompt_param: str = "prompt"
    """What the client calls the prompt."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the client calls fields of `Asked`, where the names differ."""
    tool_choice: ToolChoice = ToolChoice.NONE
    forced_tool: str | None = None
    """With `REQUIRED`: the one tool that must be called."""
    parallel_tool_calls: bool = True
    """False shows the agent the first call only."""

    def name_of(self, asked: str) -> str:
        """What the client calls a parameter, for refusals. The gateway itself adds the grammar of a call that must come, because of `tool_choice`."""
        if asked == "grammar" and self.tool_choice is ToolChoice.REQUIRED:
            return "tool_choice"
        return self.names.get(asked, asked)
