"""Tools as OpenAI's clients send them: functions, and tools of type `custom`, which stand as functions with one text for an argument.

Tools of other types run on servers of the vendor's, or are interfaces that a model has to know; they are left out of the prompt.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, NamedTuple, Protocol

from pydantic import Field, JsonValue, WithJsonSchema

from midflight.errors import RequestRejected
from midflight.gateway.dialects import policy
from midflight.gateway.dialects.constraints import check_schema
from midflight.gateway.dialects.fields import Body, filled, text_of, tool_call
from midflight.gateway.sessions.session import ToolChoice
from midflight.text.formats import Tool
from midflight.types import Json

MAX_TOOLS = 1024
"""Tools of one request, at most; each is written into the prompt."""

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ToolChoiceBody = Annotated[
    JsonValue, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]})
]
"""OpenAI's `tool_choice`."""


class Describes(Protocol):
    """The body of a tool."""

    def passed_over(self) -> str | None: ...
    def tool(self, place: str) -> Tool: ...


FUNCTION, CUSTOM = "function", "custom"

_DATED = re.compile(r"_(?:[0-9]{6,8}|[0-9]{4}_[0-9]{2}_[0-9]{2})$")


def left_out(kind: str, read: Sequence[str]) -> str | None:
    """The type of a tool that no local model can call, without its date; `None` if the type is one of `read`."""
    if kind in read:
        return None
    if close := difflib.get_close_matches(kind[:40], read, n=1, cutoff=0.75):
        raise RequestRejected(f"a tool has the type {kind[:80]!r}, which is none. Did you mean {close[0]!r}?", param="tools")
    return _DATED.sub("", kind)


class FunctionBody(Body):
    ignored: ClassVar[Mapping[str, str]] = {
        "defer_loading": "all tools are in the prompt",
        "cache_control": policy.IGNORED["cache_control"],
    }

    name: ToolName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    """Ignored: a call is shown only when it is well formed. One that must come is sampled under its schema."""

    def tool(self, place: str) -> Tool:
        """A tool without `parameters` takes no arguments."""
        parameters: JsonValue = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return Tool(self.name, self.description or "", check_schema(parameters, f"{place}.parameters", of_object=True))


class CustomBody(Body):
    """A tool that takes a text."""

    ignored: ClassVar[Mapping[str, str]] = {
        "format": "no engine has a grammar inside an argument; the model reads it in the description",
        "defer_loading": "all tools are in the prompt",
    }

    name: ToolName
    description: str | None = None

    def tool(self, place: str) -> Tool:
        """A function with one argument, which is a text. A grammar of that text is told in words."""
        written = (self.model_extra or {}).get("format")
        return custom_tool(self.name, self.description, written if isinstance(written, dict) else {})


def custom_tool(name: str, description: str | None, form: Mapping[str, JsonValue]) -> Tool:
    grammar = form.get("grammar", form)
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    syntax = grammar.get("syntax") if isinstance(grammar, dict) else None
    told = [description or ""] + [f"The {INPUT} must match this {syntax} grammar:\n{definition}"] * isinstance(definition, str)
    return Tool(name, "\n\n".join(filter(None, told)), CUSTOM_SCHEMA)


INPUT = "input"
"""The one argument of a function that stands for a tool of type `custom`."""
CUSTOM_SCHEMA: Mapping[str, Json] = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


def custom_arguments(text: str) -> str:
    """The arguments of the function that a custom call stands for."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_call(given: JsonValue, param: str, *, call_id: str) -> Json:
    """A call of a custom tool that was sent back, as the call of the function that stands for it."""
    held = given if isinstance(given, dict) else {}
    text = text_of(held, INPUT, param)
    return tool_call(call_id=call_id, name=filled(held.get("name"), f"{param}.name"), arguments=custom_arguments(text))


def custom_input(arguments: str) -> str:
    """The text of a custom call. A model that wrote other arguments is quoted."""
    read: JsonValue = json.loads(arguments)
    text = read.get(INPUT) if isinstance(read, dict) and len(read) == 1 else None
    return text if isinstance(text, str) else arguments


class ToolBody(Body):
    type: str
    function: FunctionBody | None = None
    custom: CustomBody | None = None

    def passed_over(self) -> str | None:
        return left_out(self.type, (FUNCTION, CUSTOM))

    def tool(self, place: str) -> Tool:
        body = self.function if self.type == FUNCTION else self.custom
        if body is None:
            raise RequestRejected(f"{place}.{self.type} is missing: send it.", param=f"{place}.{self.type}")
        return body.tool(f"{place}.{self.type}")


class FunctionTool(Body):
    """A tool as the responses route has it."""

    ignored: ClassVar[Mapping[str, str]] = {
        **FunctionBody.ignored,
        "format": CustomBody.ignored["format"],
        "allowed_callers": "the model calls tools itself",
    }

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    """As in `FunctionBody`."""

    def passed_over(self) -> str | None:
        return left_out(self.type, (FUNCTION, CUSTOM))

    def tool(self, place: str) -> Tool:
        if self.name is None:
            raise RequestRejected(f"{place}.name is missing: send it.", param=f"{place}.name")
        if self.type == CUSTOM:
            form = (self.model_extra or {}).get("format")
            return custom_tool(self.name, self.description, form if isinstance(form, dict) else {})
        return FunctionBody(name=self.name, description=self.description, parameters=self.parameters).tool(place)


def tools_of(bodies: Iterable[tuple[str, Describes]]) -> tuple[Tool, ...]:
    """The tools, in order, without those that no local model can call. Each body comes with its place in the request. Two tools of one
    name are refused."""
    found: dict[str, Tool] = {}
    for place, body in bodies:
        if body.passed_over() is not None:
            continue
        tool = body.tool(place)
        if tool.name in found:
            param = f"{place}.{body.type}.name" if isinstance(body, ToolBody) else f"{place}.name"
            raise RequestRejected(f"{param} is {tool.name!r}, as that of another tool: rename one.", param=param)
        found[tool.name] = tool
    return tuple(found.values())


def placed(bodies: Sequence[Describes] | None) -> Iterable[tuple[str, Describes]]:
    return ((f"tools.{place}", body) for place, body in enumerate(bodies or ()))


def custom_names(bodies: Sequence[ToolBody]) -> frozenset[str]:
    return frozenset(body.custom.name for body in bodies if body.type == CUSTOM and body.custom is not None)


class Chosen(NamedTuple):
    """What a `tool_choice` means."""

    choice: ToolChoice
    tools: tuple[Tool, ...]
    """Those that may be called: only they are in the prompt."""
    forced: str | None = None
    """The one tool that must be called."""


NONE = Chosen(ToolChoice.NONE, ())


def choice_of(value: JsonValue, tools: tuple[Tool, ...]) -> Chosen:
    """Reads OpenAI's `tool_choice`, as chats write it and as responses do."""
    if value is None:
        return Chosen(ToolChoice.AUTO if tools else ToolChoice.NONE, tools)
    if isinstance(value, dict):
        if value.get("type") == "allowed_tools":
            return _allowed(value, tools)
        name, param = _named(value, "tool_choice")
        check_known(name, tools, param=param)
        return Chosen(ToolChoice.REQUIRED, tools, name)
    if value not in [choice.value for choice in ToolChoice]:
        raise RequestRejected(f"tool_choice is {value!r:.80}: send none, auto, required or a function.", param="tool_choice")
    choice = ToolChoice(str(value))
    if choice is ToolChoice.REQUIRED and not tools:
        raise RequestRejected("tool_choice is 'required' without tools: send tools, or leave it out.", param="tool_choice")
    return Chosen(choice if tools else ToolChoice.NONE, tools)


def _allowed(value: Mapping[str, JsonValue], tools: tuple[Tool, ...]) -> Chosen:
    """Some of the tools, of which the model may or must call one. Those that no local model can call do not count."""
    inner = value.get("allowed_tools", value)
    listed = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(listed, list):
        raise RequestRejected(f"tool_choice.tools is {listed!r:.80}: send a list of tools.", param="tool_choice.tools")
    names: set[str] = set()
    for place, each in enumerate(listed):
        if isinstance(each, dict) and each.get("type", FUNCTION) in (FUNCTION, CUSTOM):
            name, param = _named(each, f"tool_choice.tools.{place}")
            check_known(name, tools, param=param)
            names.add(name)
    return choice_of(inner.get("mode", ToolChoice.AUTO.value), tuple(tool for tool in tools if tool.name in names))


def check_known(name: str, tools: Sequence[Tool], *, param: str) -> None:
    """Refuses the choice of a tool that was not sent."""
    if name not in [tool.name for tool in tools]:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise RequestRejected(f"{param} is {name!r:.80}, which is none of the tools: send one of them ({known:.200}).", param=param)


def _named(value: Mapping[str, JsonValue], param: str) -> tuple[str, str]:
    """The tool that an object names, and where its name stands: `{"type": T, "name": N}` or `{"type": T, T: {"name": N}}`."""
    kind = value.get("type")
    if kind not in (FUNCTION, CUSTOM):
        remedy = "send none, auto, required, or a tool of type function or custom"
        raise RequestRejected(f"{param}.type is {kind!r:.80}, which no local model can call: {remedy}.", param=f"{param}.type")
    inner = value.get(str(kind))
    name, place = (inner.get("name"), f"{param}.{kind}.name") if isinstance(inner, dict) else (value.get("name"), f"{param}.name")
    if not isinstance(name, str):
        raise RequestRejected(f"{place} is {name!r:.80}: send the name of a tool.", param=place)
    return name, place
