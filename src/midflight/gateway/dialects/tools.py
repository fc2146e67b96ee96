"""Tools of a conversation, and whether the answer may, must or must not call them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Protocol

from pydantic import Field, JsonValue, WithJsonSchema

from midflight.errors import RequestRejected
from midflight.gateway.dialects.fields import Body
from midflight.gateway.dialects.grammars import check_schema
from midflight.gateway.sessions.call import ToolChoice
from midflight.text.formats import Tool

MAX_TOOLS = 1024
"""Tools of one request, at most; each is written into the prompt."""

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ToolChoiceBody = Annotated[
    JsonValue, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]})
]
"""OpenAI's `tool_choice`."""


class Describes(Protocol):
    """The body of a tool."""

    def tool(self, place: str) -> Tool: ...


class FunctionBody(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    """Ignored: a call is shown only when it is well formed. One that must come is sampled under its schema."""

    def tool(self, place: str) -> Tool:
        """A tool without `parameters` takes no arguments."""
        parameters: JsonValue = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return Tool(self.name, self.description or "", check_schema(parameters, f"{place}.parameters", of_object=True))


class OfFunction(Body):
    type: Literal["function"]


class ToolBody(OfFunction):
    function: FunctionBody


class FunctionTool(FunctionBody, OfFunction):
    """A tool as the responses route has it. The order of the bases makes `type` the first field checked: it tells hosted tools apart."""


def tools_of(bodies: Iterable[tuple[str, Describes]]) -> tuple[Tool, ...]:
    """The tools, in order. Each body comes with its place in the request. Two tools of one name are refused."""
    found: dict[str, Tool] = {}
    for place, body in bodies:
        tool = body.tool(place)
        if tool.name in found:
            raise RequestRejected(f"{place}.name is {tool.name!r}, as that of another tool: rename one.", param=f"{place}.name")
        found[tool.name] = tool
    return tuple(found.values())


def choice_of(value: JsonValue, tools: Sequence[Tool]) -> tuple[ToolChoice, str | None]:
    """Reads OpenAI's `tool_choice`; also the one tool that it forces, if it does."""
    if value is None:
        return (ToolChoice.AUTO if tools else ToolChoice.NONE), None
    if isinstance(value, dict):
        forced = _forced(value)
        check_known(forced, tools, param="tool_choice.function.name")
        return ToolChoice.REQUIRED, forced
    if value not in [choice.value for choice in ToolChoice]:
        raise RequestRejected(f"tool_choice is {value!r:.80}: send none, auto, required or a function.", param="tool_choice")
    choice = ToolChoice(str(value))
    if choice is ToolChoice.REQUIRED and not tools:
        raise RequestRejected("tool_choice is 'required' without tools: send tools, or leave it out.", param="tool_choice")
    return (choice if tools else ToolChoice.NONE), None


def check_known(name: str, tools: Sequence[Tool], *, param: str) -> None:
    """Refuses the choice of a tool that was not sent."""
    if name not in [tool.name for tool in tools]:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise RequestRejected(f"{param} is {name!r:.80}, which is none of the tools: send one of them ({known:.200}).", param=param)


def _forced(value: dict[str, JsonValue]) -> str:
    if value.get("type") != "function":
        raise RequestRejected(
            f'tool_choice.type is {value.get("type")!r:.80}, which is not supported here: send "function", and only the tools allowed.',
            param="tool_choice.type",
        )
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestRejected(f"tool_choice.function.name is {name!r:.80}: send the name of a tool.", param="tool_choice.function.name")
    return name
