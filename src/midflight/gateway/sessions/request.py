"""A request of an agent, free of any wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import msgspec

from midflight.text import Ending, Message
from midflight.text.formats import Tool
from midflight.types import Grammar, Json


class Messages(msgspec.Struct, frozen=True):
    """A prompt to be written by the chat template."""

    messages: Sequence[Message]
    tools: tuple[Tool, ...] = ()
    options: Mapping[str, Json] = {}
    """Options of the template itself, such as `enable_thinking`."""
    ending: Ending = Ending.TURN
    num_left: int = 0
    """So many of the last messages may come in another form when the conversation goes on."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    ids: tuple[int, ...]


Source: TypeAlias = Messages | Text | TokenIds


@dataclass(frozen=True, slots=True, init=False)
class Asked:
    """The sampling parameters that the client set, by their names in `SamplingParams`. The
    session's defaults hold for the others.
    """

    given: Mapping[str, object]

    def __init__(self, **given: object) -> None:
        """A parameter that is `None` was not set."""
        there = {name: value for name, value in given.items() if value is not None}
        object.__setattr__(self, "given", there)

    @property
    def grammar(self) -> Grammar | None:
        grammar = self.given.get("grammar")
        return grammar if isinstance(grammar, Grammar) else None

    def number(self, name: str) -> int | None:
        """A whole number, such as `max_tokens` or `seed`."""
        value = self.given.get(name)
        return value if isinstance(value, int) else None

    def constrained(self, grammar: Grammar | None) -> Asked:
        """The same parameters with this grammar."""
        return Asked(**{**self.given, "grammar": grammar})


class ToolChoice(StrEnum):
    """Says if the answer may, must or must not call a tool. With `NONE` the answer is not searched
    for calls: text that looks like a call is content.
    """

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


class CompletionCall(msgspec.Struct, frozen=True):
    """A request for `n` answers to each of `sources`. Choices are numbered source by source."""

    sources: tuple[Source, ...]
    asked: Asked = Asked()
    n: int = 1
    prompt_logprobs: int | None = None
    """The number of alternatives that are reported for each token of a prompt. With `None` prompts
    are not scored.
    """
    stream: bool = False
    """True if the client wants parts of the answers before they are complete."""
    default_max_tokens: int | None = None
    """The dialect's default. It holds if neither the client nor the session sets a limit. `None`
    means all the room there is.
    """
    model: str | None = None
    request_id: str | None = None
    """The client's own name for the request. The client may abort the request by this name."""
    may_abort: bool = False
    """True if the operator's abort ends the request with the tokens so far. Otherwise the request
    is resumed.
    """
    prompt_param: str = "prompt"
    """The client's name for the prompt."""
    names: Mapping[str, str] = {}
    """The client's names for fields of `Asked`, if they differ."""
    tool_choice: ToolChoice = ToolChoice.NONE
    forced_tool: str | None = None
    """The only tool that may be called with `REQUIRED`; `None` for any tool."""
    parallel_tool_calls: bool = True
    """If false, the answer ends with its first call."""

    def name_of(self, asked: str) -> str:
        """The client's name for a parameter, for refusals. With `REQUIRED` the gateway itself adds
        a grammar, so the client is referred to `tool_choice`.
        """
        if asked == "grammar" and self.tool_choice is ToolChoice.REQUIRED:
            asked = "tool_choice"
        return self.names.get(asked, asked)
