"""Tools as OpenAI's clients send them.

The model sees a tool of type `custom` as a function with one text argument. It sees the functions
of a namespace as functions whose names begin with the namespace's name; their calls are translated
back. Tools of other types run on the vendor's servers, or are interfaces that a model has to know.
They are left out of the prompt.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, NamedTuple, Protocol, TypeVar

from pydantic import Field, JsonValue, WithJsonSchema

from midflight.errors import RequestRejected
from midflight.gateway.dialects import unread_fields
from midflight.gateway.dialects.chat_messages import tool_call
from midflight.gateway.dialects.fields import Body, filled, text_of, typed
from midflight.gateway.dialects.schemas import check_schema
from midflight.gateway.sessions.request import ToolChoice
from midflight.text.formats import Tool
from midflight.types import Json

MAX_TOOLS = 1024
"""The most tools of one request. Each is written into the prompt."""

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ToolChoiceBody = Annotated[
    JsonValue,
    WithJsonSchema(
        {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}
    ),
]
"""OpenAI's `tool_choice`."""


class ToolBodyLike(Protocol):
    """The body of a tool."""

    def passed_over(self) -> str | None: ...
    def tool(self, place: str) -> Tool: ...


D = TypeVar("D", bound=ToolBodyLike)

FUNCTION = "function"
CUSTOM = "custom"
NAMESPACE = "namespace"

_DATED = re.compile(r"_(?:[0-9]{6,8}|[0-9]{4}_[0-9]{2}_[0-9]{2})$")


def left_out(kind: str, read: Sequence[str]) -> str | None:
    """The type of a tool that no local model can call, without its date. `None` if the type is one
    of `read`.
    """
    if kind in read:
        return None
    close = difflib.get_close_matches(kind[:40], read, n=1, cutoff=0.75)
    if close:
        raise RequestRejected(
            f"a tool has the type {kind[:80]!r}, which is none. Did you mean {close[0]!r}?",
            param="tools",
        )
    return _DATED.sub("", kind)


class FunctionBody(Body):
    ignored: ClassVar[Mapping[str, str]] = {
        "defer_loading": "all tools are in the prompt",
        "cache_control": unread_fields.IGNORED["cache_control"],
    }

    name: ToolName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    """True if an optional call is sampled under its schema, as a required call always is."""

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
        """A function with one argument, which is a text. The description tells the model the
        grammar of that text.
        """
        form = (self.model_extra or {}).get("format")
        return custom_tool(self.name, self.description, form if isinstance(form, dict) else {})


def custom_tool(name: str, description: str | None, form: Mapping[str, JsonValue]) -> Tool:
    """The function that stands for a custom tool. `form` may hold a grammar of its text."""
    grammar = form.get("grammar", form)
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    syntax = grammar.get("syntax") if isinstance(grammar, dict) else None
    paragraphs: list[str] = []
    if description:
        paragraphs.append(description)
    if isinstance(definition, str):
        paragraphs.append(f"The {INPUT} must match this {syntax} grammar:\n{definition}")
    return Tool(name, "\n\n".join(paragraphs), CUSTOM_SCHEMA, told_whole=True)


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
    """Reads a call of a custom tool that was sent back. Returns the call of the function that
    stands for the tool.
    """
    held = given if isinstance(given, dict) else {}
    text = text_of(held, INPUT, param)
    return tool_call(call_id=call_id, name=called(held, param), arguments=custom_arguments(text))


def called(call: Mapping[str, JsonValue], param: str) -> str:
    """The name of the function that is called, with its namespace if it has one."""
    name = filled(call.get("name"), f"{param}.name")
    namespace = call.get(NAMESPACE)
    if namespace is None:
        return name
    return full_name(filled(namespace, f"{param}.{NAMESPACE}"), name)


def full_name(namespace: str, name: str) -> str:
    """The model's name for a function of a namespace. The names of some namespaces already end with
    the two underscores.
    """
    return f"{namespace.removesuffix('__')}__{name}"


def custom_input(arguments: str) -> str:
    """The text of a custom call. If the model wrote other arguments, the text is these
    arguments.
    """
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
    """See `FunctionBody`."""
    tools: Annotated[list["FunctionTool"], Field(max_length=MAX_TOOLS)] | None = None
    """The functions of a namespace."""

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


class OfferedTool(NamedTuple):
    """A tool of a responses request as the model sees it."""

    place: str
    body: FunctionTool
    """Its name is the model's name for the tool."""
    namespace: str | None = None
    name: str | None = None
    """Its name inside the namespace."""

    @property
    def names(self) -> dict[str, Json]:
        """The client's names for it."""
        if self.namespace is None:
            return {"name": self.body.name}
        return {"name": self.name, "namespace": self.namespace}


def offered(bodies: Sequence[FunctionTool] | None) -> list[OfferedTool]:
    """The tools in order, those of namespaces one by one. The description of a namespace is put
    before that of its first function.
    """
    found: list[OfferedTool] = []
    for place, body in placed(bodies):
        if body.type == NAMESPACE:
            found += _within(body, place)
        else:
            found.append(OfferedTool(place, body))
        if len(found) > MAX_TOOLS:
            raise RequestRejected(
                f"tools hold more than {MAX_TOOLS} functions: send {MAX_TOOLS} at most.",
                param="tools",
            )
    return found


def _within(body: FunctionTool, place: str) -> Iterator[OfferedTool]:
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
            yield OfferedTool(where, renamed, namespace, name)


def tools_of(bodies: Iterable[tuple[str, ToolBodyLike]]) -> tuple[Tool, ...]:
    """The tools in order, without those that no local model can call. Each body comes with its
    place in the request. Two tools of one name are refused.
    """
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


class ToolSelection(NamedTuple):
    """The meaning of a `tool_choice`."""

    choice: ToolChoice
    tools: tuple[Tool, ...]
    """The tools that may be called. Only they are in the prompt."""
    forced: str | None = None
    """The one tool that must be called."""


NONE = ToolSelection(ToolChoice.NONE, ())


def choice_of(value: JsonValue, tools: tuple[Tool, ...]) -> ToolSelection:
    """Reads OpenAI's `tool_choice`, in the form of chats or of responses."""
    if value is None:
        return ToolSelection(ToolChoice.AUTO if tools else ToolChoice.NONE, tools)
    if isinstance(value, dict):
        if value.get("type") == "allowed_tools":
            return _allowed(value, tools)
        name, param = _named(value, "tool_choice")
        check_known(name, tools, param=param)
        return ToolSelection(ToolChoice.REQUIRED, tools, name)
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
    return ToolSelection(choice if tools else ToolChoice.NONE, tools)


def _allowed(value: Mapping[str, JsonValue], tools: tuple[Tool, ...]) -> ToolSelection:
    """Reads a choice of some of the tools, of which the model may or must call one. Tools that no
    local model can call do not count.
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
    """The tool that an object names, and the place of the name. The object is `{"type": T, "name":
    N}` or `{"type": T, T: {"name": N}}`.
    """
    kind = value.get("type")
    if kind not in (FUNCTION, CUSTOM):
        remedy = "send none, auto, required, or a tool of type function or custom"
        raise RequestRejected(
            f"{param}.type is {kind!r:.80}, which no local model can call: {remedy}.",
            param=f"{param}.type",
        )
    inner = value.get(str(kind))
    if isinstance(inner, dict):
        name = inner.get("name")
        place = f"{param}.{kind}.name"
    else:
        name = value.get("name")
        place = f"{param}.name"
    if not isinstance(name, str):
        raise RequestRejected(f"{place} is {name!r:.80}: send the name of a tool.", param=place)
    namespace = value.get(NAMESPACE)
    if isinstance(namespace, str):
        name = full_name(namespace, name)
    return name, place
