"""Tools as OpenAI's clients send them: functions, and tools of type `custom`, which stand as
functions with one text for an argument.

Functions of a namespace stand as functions whose names begin with its name, and their calls are
told apart again. Tools of other types run on servers of the vendor's, or are interfaces that a
model has to know; they are left out of the prompt.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, NamedTuple, Protocol, TypeVar

from pydantic import Field, JsonValue, WithJsonSchema

from midflight.errors import RequestRejected
from midflight.gateway.dialects import policy
from midflight.gateway.dialects.constraints import check_schema
from midflight.gateway.dialects.fields import Body, filled, text_of, tool_call, typed
from midflight.gateway.sessions.request import ToolChoice
from midflight.text.formats import Tool
from midflight.types import Json

MAX_TOOLS = 1024
"""Tools of one request, at most; each is written into the prompt."""

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ToolChoiceBody = Annotated[
    JsonValue,
    WithJsonSchema(
        {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}
    ),
]
"""OpenAI's `tool_choice`."""


class Describes(Protocol):
    """The body of a tool."""

    def passed_over(self) -> str | None: ...
    def tool(self, place: str) -> Tool: ...


D = TypeVar("D", bound=Describes)

FUNCTION = "function"
CUSTOM = "custom"
NAMESPACE = "namespace"

_DATED = re.compile(r"_(?:[0-9]{6,8}|[0-9]{4}_[0-9]{2}_[0-9]{2})$")


def left_out(kind: str, read: Sequence[str]) -> str | None:
    """The type of a tool that no local model can call, without its date; `None` if the type is one
    of `read`.
    """
    if kind in read:
        return None
    if close := difflib.get_close_matches(kind[:40], read, n=1, cutoff=0.75):
        raise RequestRejected(
            f"a tool has the type {kind[:80]!r}, which is none. Did you mean {close[0]!r}?",
            param="tools",
        )
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
    """Whether a call that may come is sampled under its schema, as one that must come is."""

    def tool(self, place: str) -> Tool:
        return function_tool(
            self.name, self.description, self.parameters, place=place, strict=self.strict
        )


def function_tool(
    name: str, description: str | None, parameters: JsonValue, *, place: str, strict: bool | None
) -> Tool:
    """A tool without `parameters` takes no arguments."""
    schema: JsonValue = {"type": "object", "properties": {}} if parameters is None else parameters
    return Tool(
        name,
        description or "",
        check_schema(schema, f"{place}.parameters", of_object=True),
        strict=bool(strict),
    )


class CustomBody(Body):
    """A tool that takes a text."""

    ignored: ClassVar[Mapping[str, str]] = {
        "format": (
            "no engine has a grammar inside an argument; the model reads it in the description"
        ),
        "defer_loading": "all tools are in the prompt",
    }

    name: ToolName
    description: str | None = None

    def tool(self, place: str) -> Tool:
        """A function with one argument, which is a text. A grammar of that text is told in
        words.
        """
        written = (self.model_extra or {}).get("format")
        return custom_tool(
            self.name, self.description, written if isinstance(written, dict) else {}
        )


def custom_tool(name: str, description: str | None, form: Mapping[str, JsonValue]) -> Tool:
    grammar = form.get("grammar", form)
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    syntax = grammar.get("syntax") if isinstance(grammar, dict) else None
    told = [description or ""] + [
        f"The {INPUT} must match this {syntax} grammar:\n{definition}"
    ] * isinstance(definition, str)
    return Tool(name, "\n\n".join(filter(None, told)), CUSTOM_SCHEMA, told_whole=True)


INPUT = "input"
"""The one argument of a function that stands for a tool of type `custom`."""
CUSTOM_SCHEMA: Mapping[str, Json] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
}


def custom_arguments(text: str) -> str:
    """The arguments of the function that a custom call stands for."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_call(given: JsonValue, param: str, *, call_id: str) -> Json:
    """A call of a custom tool that was sent back, as the call of the function that stands for
    it.
    """
    held = given if isinstance(given, dict) else {}
    text = text_of(held, INPUT, param)
    return tool_call(call_id=call_id, name=called(held, param), arguments=custom_arguments(text))


def called(call: Mapping[str, JsonValue], param: str) -> str:
    """The name of the function that a call means, with its namespace if it has one."""
    name = filled(call.get("name"), f"{param}.name")
    namespace = call.get(NAMESPACE)
    return name if namespace is None else full_name(filled(namespace, f"{param}.{NAMESPACE}"), name)


def full_name(namespace: str, name: str) -> str:
    """What the model calls a function of a namespace. Names of some namespaces end with the two
    strokes already.
    """
    return f"{namespace.removesuffix('__')}__{name}"


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
            raise RequestRejected(
                f"{place}.{self.type} is missing: send it.", param=f"{place}.{self.type}"
            )
        return body.tool(f"{place}.{self.type}")


class FunctionTool(Body):
    """A tool as the responses route has it."""

    ignored: ClassVar[Mapping[str, str]] = {
        **FunctionBody.ignored,
        "format": CustomBody.ignored["format"],
        "allowed_callers": "the model calls tools itself",
        "async": "the client sends a result when it has it",
        "output_schema": "templates have no place for it: write it into the description",
    }

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    """As in `FunctionBody`."""
    tools: Annotated[list["FunctionTool"], Field(max_length=MAX_TOOLS)] | None = None
    """What a namespace holds."""

    def passed_over(self) -> str | None:
        return left_out(self.type, (FUNCTION, CUSTOM, NAMESPACE))

    def tool(self, place: str) -> Tool:
        name = self.called(place)
        if self.type == CUSTOM:
            form = (self.model_extra or {}).get("format")
            return custom_tool(name, self.description, form if isinstance(form, dict) else {})
        return function_tool(
            name, self.description, self.parameters, place=place, strict=self.strict
        )

    def called(self, place: str) -> str:
        if self.name is None:
            raise RequestRejected(f"{place}.name is missing: send it.", param=f"{place}.name")
        return self.name


class Offered(NamedTuple):
    """A tool of a responses request as the model calls it."""

    place: str
    body: FunctionTool
    """Its name is the one that the model calls."""
    namespace: str | None = None
    name: str | None = None
    """Its name inside the namespace."""

    @property
    def names(self) -> dict[str, Json]:
        """How the client calls it."""
        return (
            {"name": self.body.name}
            if self.namespace is None
            else {"name": self.name, "namespace": self.namespace}
        )


def offered(bodies: Sequence[FunctionTool] | None) -> list[Offered]:
    """The tools in order, those of namespaces one by one. The words about a namespace stand before
    those of its first function.
    """
    found: list[Offered] = []
    for place, body in placed(bodies):
        found += _within(body, place) if body.type == NAMESPACE else [Offered(place, body)]
        if len(found) > MAX_TOOLS:
            raise RequestRejected(
                f"tools hold more than {MAX_TOOLS} functions: send {MAX_TOOLS} at most.",
                param="tools",
            )
    return found


def _within(body: FunctionTool, place: str) -> Iterator[Offered]:
    namespace = body.called(place)
    words = body.description
    for number, inner in enumerate(body.tools or ()):
        where = f"{place}.tools.{number}"
        if inner.type == NAMESPACE:
            raise RequestRejected(
                f"{where} is a namespace in a namespace: send it beside the other one.",
                param=f"{where}.type",
            )
        if inner.passed_over() is None:
            name = inner.called(where)
            told = "\n\n".join(filter(None, (words, inner.description)))
            words = None
            renamed = inner.model_copy(
                update={"name": full_name(namespace, name), "description": told}
            )
            yield Offered(where, renamed, namespace, name)


def tools_of(bodies: Iterable[tuple[str, Describes]]) -> tuple[Tool, ...]:
    """The tools, in order, without those that no local model can call. Each body comes with its
    place in the request. Two tools of one name are refused."""
    found: dict[str, Tool] = {}
    for place, body in bodies:
        if body.passed_over() is not None:
            continue
        tool = body.tool(place)
        if tool.name in found:
            param = f"{place}.{body.type}.name" if isinstance(body, ToolBody) else f"{place}.name"
            raise RequestRejected(
                f"{param} is {tool.name!r}, as that of another tool: rename one.", param=param
            )
        found[tool.name] = tool
    return tuple(found.values())


def placed(bodies: Sequence[D] | None) -> Iterable[tuple[str, D]]:
    return ((f"tools.{place}", body) for place, body in enumerate(bodies or ()))


def custom_names(bodies: Sequence[ToolBody]) -> frozenset[str]:
    return frozenset(
        body.custom.name for body in bodies if body.type == CUSTOM and body.custom is not None
    )


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
        raise RequestRejected(
            f"tool_choice is {value!r:.80}: send none, auto, required or a function.",
            param="tool_choice",
        )
    choice = ToolChoice(str(value))
    if choice is ToolChoice.REQUIRED and not tools:
        raise RequestRejected(
            "tool_choice is 'required' without tools: send tools, or leave it out.",
            param="tool_choice",
        )
    return Chosen(choice if tools else ToolChoice.NONE, tools)


def _allowed(value: Mapping[str, JsonValue], tools: tuple[Tool, ...]) -> Chosen:
    """Some of the tools, of which the model may or must call one. Those that no local model can
    call do not count.
    """
    at = "tool_choice.allowed_tools" if "allowed_tools" in value else "tool_choice"
    inner = value.get("allowed_tools", value)
    listed = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(listed, list):
        raise RequestRejected(
            f"{at}.tools is {listed!r:.80}: send a list of tools.", param=f"{at}.tools"
        )
    names: set[str] = set()
    for place, each in enumerate(listed):
        if not isinstance(each, dict):
            raise RequestRejected(
                f"{at}.tools.{place} is {each!r:.80}: send a tool.", param=f"{at}.tools.{place}"
            )
        typed(each, f"{at}.tools.{place}", {"type": str})
        if each.get("type", FUNCTION) in (FUNCTION, CUSTOM):
            name, param = _named(each, f"{at}.tools.{place}")
            check_known(name, tools, param=param)
            names.add(name)
    mode = inner.get("mode", ToolChoice.AUTO.value)
    if mode not in (ToolChoice.AUTO.value, ToolChoice.REQUIRED.value):
        raise RequestRejected(
            f"{at}.mode is {mode!r:.80}: send auto or required.", param=f"{at}.mode"
        )
    return choice_of(mode, tuple(tool for tool in tools if tool.name in names))


def check_known(name: str, tools: Sequence[Tool], *, param: str) -> None:
    """Refuses the choice of a tool that was not sent."""
    if name not in [tool.name for tool in tools]:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise RequestRejected(
            (
                f"{param} is {name!r:.80}, which is none of the tools: send one of them "
                f"({known:.200})."
            ),
            param=param,
        )


def _named(value: Mapping[str, JsonValue], param: str) -> tuple[str, str]:
    """The tool that an object names, and where its name stands: `{"type": T, "name": N}` or
    `{"type": T, T: {"name": N}}`.
    """
    kind = value.get("type")
    if kind not in (FUNCTION, CUSTOM):
        remedy = "send none, auto, required, or a tool of type function or custom"
        raise RequestRejected(
            f"{param}.type is {kind!r:.80}, which no local model can call: {remedy}.",
            param=f"{param}.type",
        )
    inner = value.get(str(kind))
    name, place = (
        (inner.get("name"), f"{param}.{kind}.name")
        if isinstance(inner, dict)
        else (value.get("name"), f"{param}.name")
    )
    if not isinstance(name, str):
        raise RequestRejected(f"{place} is {name!r:.80}: send the name of a tool.", param=place)
    namespace = value.get(NAMESPACE)
    return (full_name(namespace, name) if isinstance(namespace, str) else name), place
