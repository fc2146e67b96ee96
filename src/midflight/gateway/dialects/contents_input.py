"""The requests of Google's generateContent. Their contents are lists of parts, which become the chat
messages that templates read.

Contents of the model that follow each other are one message, because SDKs keep each piece of a
stream as a content of its own. So an answer that is sent back is found in the session's record (I4).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field, JsonValue, field_validator
from pydantic.alias_generators import to_camel

from midflight.errors import RequestRejected
from midflight.gateway.dialects import chat_messages, fields, unread_fields
from midflight.gateway.dialects.constraints import ANY_JSON, choice_grammar, schema_grammar
from midflight.gateway.dialects.contents_schemas import json_schema
from midflight.gateway.dialects.sampling_fields import SamplingFields
from midflight.gateway.dialects.schemas import check_schema
from midflight.gateway.dialects.tool_bodies import (
    MAX_TOOLS,
    ToolBodyLike,
    check_known,
    tools_of,
)
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.request import CompletionCall, Messages, ToolChoice
from midflight.text import Message
from midflight.text.formats import Tool
from midflight.types import Grammar, Json
from midflight.types.generation import Api

Part: TypeAlias = Mapping[str, JsonValue]

_READ = ("text", "functionCall", "functionResponse")
"""The fields of a part that are read."""
_OTHERS = (
    "inlineData",
    "fileData",
    "executableCode",
    "codeExecutionResult",
    "toolCall",
    "toolResponse",
)
"""The other fields of a part in Google's API. They are refused."""
_OF_ROLE: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "functionResponse"),
    "function": ("functionResponse",),
    "model": ("text", "functionCall"),
    "system": ("text",),
}
PART_FIELDS = frozenset({*_READ, "thought", "thoughtSignature"})
CALL_FIELDS = frozenset({"id", "name", "args"})
RESULT_FIELDS = frozenset({"id", "name", "response"})
_OF_CONTENT = frozenset({"role", "parts"})
_WRAPPED = ("output", "result", "error")
"""Names under which clients wrap the one value that a function returned."""


class _PlacedPart(NamedTuple):
    place: str
    """Where it is in the request, for refusals."""
    kind: str
    part: Part

    @property
    def inner(self) -> str:
        return f"{self.place}.{self.kind}"


class _OpenCall(NamedTuple):
    """A call whose result has not come yet."""

    call_id: str
    name: str


class ContentReader:
    """Reads one conversation, and notes its fields that have no effect."""

    def __init__(self, unread: UnreadFields) -> None:
        self._unread = unread
        self._num_calls = 0
        self._open: list[_OpenCall] = []

    def conversation(
        self, system: JsonValue, contents: Sequence[dict[str, JsonValue]]
    ) -> tuple[Message, ...]:
        """The whole conversation, the system text first. Raises `RequestRejected` that names the
        part.
        """
        found: list[Message] = []
        if system is not None:
            text = _text(self._parts(system, "system", "systemInstruction"))
            if text:
                found.append({"role": "system", "content": text})
        said: list[_PlacedPart] | None = None
        for place, content in enumerate(contents):
            param = f"contents.{place}"
            role = self._role(content, param)
            parts = self._parts(content, role, param)
            if role == "model":
                said = [*(said or ()), *parts]
                continue
            if said is not None:
                found.append(self._of_model(said))
                said = None
            found += self._of_user(parts)
        if said is not None:
            found.append(self._of_model(said))
        return tuple(found)

    def _role(self, content: Part, param: str) -> str:
        """The role. A content without one is the user's."""
        role = content.get("role") or "user"
        parts = content.get("parts")
        if content.get("role") is None and isinstance(parts, list) and any(map(_calls, parts)):
            raise RequestRejected(
                f"{param}.role is missing: send model, because the content holds a functionCall.",
                param=f"{param}.role",
            )
        if role not in ("user", "model", "function"):
            raise RequestRejected(
                f"{param}.role is {role!r:.80}: send one of user, model.", param=f"{param}.role"
            )
        return str(role)

    def _parts(self, content: JsonValue, role: str, param: str) -> list[_PlacedPart]:
        if not isinstance(content, dict):
            raise RequestRejected(
                f"{param} is {content!r:.80}: send an object with parts.", param=param
            )
        self._unread.rest(content, _OF_CONTENT, param)
        parts = content.get("parts")
        if parts is None:
            parts = []
        if not isinstance(parts, list):
            raise RequestRejected(
                f"{param}.parts is {parts!r:.80}: send a list of parts.", param=f"{param}.parts"
            )
        return [
            self._part(part, role, f"{param}.parts.{place}") for place, part in enumerate(parts)
        ]

    def _part(self, given: JsonValue, role: str, param: str) -> _PlacedPart:
        if not isinstance(given, dict):
            raise RequestRejected(f"{param} is {given!r:.80}: send a part.", param=param)
        part = {to_camel(name): value for name, value in given.items() if value is not None}
        held = [name for name in (*_READ, *_OTHERS) if name in part]
        if len(held) != 1 or held[0] not in _OF_ROLE[role]:
            shown = " and ".join(held) or "nothing that is read"
            raise RequestRejected(
                f"{param} holds {shown}: send {' or '.join(_OF_ROLE[role])} here.", param=param
            )
        self._unread.rest(part, PART_FIELDS, param)
        fields.typed(part, param, {"text": str, "thought": bool, "thoughtSignature": str})
        return _PlacedPart(param, held[0], part)

    def _of_user(self, parts: Sequence[_PlacedPart]) -> list[Message]:
        """The messages of a user's content. Each result of a function is a message of its own,
        before the user's text.
        """
        found: list[Message] = [
            self._result(each) for each in parts if each.kind == "functionResponse"
        ]
        text = _text(parts)
        if text or not found:
            found.append({"role": "user", "content": text})
        return found

    def _of_model(self, parts: Sequence[_PlacedPart]) -> Message:
        """Joins the texts, the thoughts and the calls, because a chat message has no order between
        them.
        """
        self._open = []
        calls = [self._call(each) for each in parts if each.kind == "functionCall"]
        thoughts = _text(parts, thought=True)
        return chat_messages.assistant(_text(parts), reasoning=thoughts, calls=calls)

    def _call(self, each: _PlacedPart) -> Json:
        call = self._inside(each, CALL_FIELDS)
        self._num_calls += 1
        call_id = str(call.get("id") or f"call_{self._num_calls}")
        name = fields.filled(call.get("name"), f"{each.inner}.name")
        args = call.get("args")
        if not isinstance(args, dict | None):
            raise RequestRejected(
                f"{each.inner}.args is {args!r:.80}: send an object.", param=f"{each.inner}.args"
            )
        self._open.append(_OpenCall(call_id, name))
        return chat_messages.tool_call(
            call_id=call_id,
            name=name,
            arguments=chat_messages.arguments_text(args or {}, f"{each.inner}.args"),
        )

    def _result(self, each: _PlacedPart) -> Message:
        """The result of a function. If it names no call, it answers the first open one of its
        function.
        """
        result = self._inside(each, RESULT_FIELDS)
        name = fields.filled(result.get("name"), f"{each.inner}.name")
        response = result.get("response")
        if not isinstance(response, dict | None):
            raise RequestRejected(
                f"{each.inner}.response is {response!r:.80}: send an object.",
                param=f"{each.inner}.response",
            )
        own_id = result.get("id")
        answered = [call for call in self._open if call.call_id == own_id]
        answered += [call for call in self._open if call.name == name]
        if answered:
            self._open.remove(answered[0])
        call_id = answered[0].call_id if answered else str(own_id or name)
        return chat_messages.tool_result(
            _told(response or {}, f"{each.inner}.response"), call_id=call_id
        )

    def _inside(self, each: _PlacedPart, read: frozenset[str]) -> Part:
        """The object that a part holds."""
        held = each.part[each.kind]
        if not isinstance(held, dict):
            raise RequestRejected(
                f"{each.inner} is {held!r:.80}: send an object.", param=each.inner
            )
        if held.get("parts"):
            raise RequestRejected(
                f"{each.inner}.parts is not supported here: the model reads text, send it as "
                "`response`.",
                param=f"{each.inner}.parts",
            )
        fields.typed(held, each.inner, {"id": str})
        self._unread.rest(held, read, each.inner)
        return held


def _calls(part: JsonValue) -> bool:
    return isinstance(part, dict) and ("functionCall" in part or "function_call" in part)


def _text(parts: Sequence[_PlacedPart], *, thought: bool = False) -> str:
    """The texts, or the thoughts, joined without anything between them."""
    return "".join(
        str(each.part["text"])
        for each in parts
        if each.kind == "text" and bool(each.part.get("thought")) == thought
    )


def _told(response: Mapping[str, JsonValue], param: str) -> str:
    """The text of what a function returned. A single value under a usual name stands alone."""
    value: JsonValue = dict(response)
    for name in _WRAPPED:
        if list(response) == [name]:
            value = response[name]
    return value if isinstance(value, str) else chat_messages.json_text(value, param)


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class FunctionDeclaration(fields.CamelBody):
    ignored: ClassVar[Mapping[str, str]] = {
        "behavior": "the client sends a result when it has it",
        "response": "templates have no place for it: write it into the description",
        "responseJsonSchema": "templates have no place for it: write it into the description",
    }

    name: ToolName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    parameters_json_schema: dict[str, JsonValue] | None = None

    def tool(self, place: str) -> Tool:
        """A function without `parameters` takes no arguments."""
        schema: JsonValue = {"type": "object", "properties": {}}
        param = f"{place}.parameters"
        if self.parameters is not None:
            schema = json_schema(self.parameters)
        if self.parameters_json_schema is not None:
            if self.parameters is not None:
                raise RequestRejected(
                    f"{param} and parametersJsonSchema are both there: send one of them.",
                    param=param,
                )
            schema = self.parameters_json_schema
            param = f"{place}.parametersJsonSchema"
        return Tool(self.name, self.description or "", check_schema(schema, param, of_object=True))


class DeclaredTools(fields.CamelBody):
    """An entry of `tools`: functions that the client runs. What Google's servers would run is left
    out.
    """

    ignored: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "codeExecution",
            "computerUse",
            "enterpriseWebSearch",
            "exaAiSearch",
            "fileSearch",
            "googleMaps",
            "googleSearch",
            "googleSearchRetrieval",
            "mcpServers",
            "parallelAiSearch",
            "retrieval",
            "urlContext",
        ),
        "no local model can call it",
    )

    function_declarations: (
        Annotated[list[FunctionDeclaration], Field(max_length=MAX_TOOLS)] | None
    ) = None


class FunctionCallingConfig(fields.CamelBody):
    ignored: ClassVar[Mapping[str, str]] = {
        "streamFunctionCallArguments": "a call is told when it is whole"
    }
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {
        "streamFunctionCallArguments": (False,)
    }

    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] | None = None
    allowed_function_names: list[str] | None = None


class ToolConfig(fields.CamelBody):
    ignored: ClassVar[Mapping[str, str]] = {
        "retrievalConfig": "no server searches here: give the model a function of your own",
        "includeServerSideToolInvocations": "no server runs tools here",
    }

    function_calling_config: FunctionCallingConfig | None = None


class ThinkingConfig(fields.CamelBody):
    include_thoughts: bool | None = None
    thinking_budget: Annotated[int, Field(ge=-1)] | None = None
    """0: the model should not think; -1 leaves it to the template."""
    thinking_level: (
        Literal["THINKING_LEVEL_UNSPECIFIED", "MINIMAL", "LOW", "MEDIUM", "HIGH"] | None
    ) = None


_GOOGLE = SamplingFields(Api.GOOGLE, prefix="generationConfig.")
_JSON = "application/json"
_ENUM = "text/x.enum"


class GenerationConfig(_GOOGLE.on(fields.CamelBody)):
    ignored: ClassVar[Mapping[str, str]] = {
        "audioTimestamp": "the model reads text",
        "enableAffectiveDialog": "the model reads and writes text",
        "enableEnhancedCivicAnswers": "there is one model",
        "mediaResolution": "the model reads text",
        "modelConfig": "there is one model",
        "modelSelectionConfig": "there is one model",
        "routingConfig": "there is one model",
    }
    refused = unread_fields.REFUSED_GENERATION
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {
        **unread_fields.NEUTRAL,
        "responseModalities": (["TEXT"], ["Text"], ["text"], []),
    }
    samples = True

    candidate_count: Annotated[int, Field(ge=1)] | None = None
    response_mime_type: str | None = None
    response_schema: JsonValue = None
    response_json_schema: JsonValue = None
    response_logprobs: bool | None = None
    logprobs: fields.TopLogprobs | None = None
    thinking_config: ThinkingConfig | None = None

    @field_validator("top_k", mode="before")
    @classmethod
    def _whole(cls, value: object) -> object:
        """Google's SDKs write this whole number as a float."""
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @property
    def format_param(self) -> str:
        """The field in which the client constrains the answer."""
        for name in ("response_schema", "response_json_schema"):
            if getattr(self, name) is not None:
                return f"generationConfig.{self.written(name)}"
        return "generationConfig.responseMimeType"

    def grammar(self) -> Grammar | None:
        """The grammar that the answer must match. Raises `RequestRejected` if its fields contradict
        each other.
        """
        kind = self.response_mime_type or "text/plain"
        param = self.format_param
        if kind not in ("text/plain", _JSON, _ENUM):
            raise RequestRejected(
                f"generationConfig.responseMimeType is {kind!r:.80}: send text/plain, {_JSON} or "
                f"{_ENUM}.",
                param="generationConfig.responseMimeType",
            )
        if self.response_schema is not None and self.response_json_schema is not None:
            raise RequestRejected(
                "generationConfig.responseSchema and responseJsonSchema both say what the answer "
                "must match: send one of them.",
                param="generationConfig.responseJsonSchema",
            )
        schema = self.response_json_schema
        if self.response_schema is not None:
            schema = json_schema(self.response_schema)
        if schema is None:
            return self._without_schema(kind)
        if kind == "text/plain":
            raise RequestRejected(
                f"generationConfig.responseMimeType is {self.response_mime_type!r} beside {param}: "
                f"send {_JSON}.",
                param="generationConfig.responseMimeType",
            )
        if kind == _ENUM:
            choices = schema.get("enum") if isinstance(schema, dict) else None
            return choice_grammar(choices, f"{param}.enum")
        return schema_grammar(schema, param)

    def _without_schema(self, kind: str) -> Grammar | None:
        if kind == _ENUM:
            raise RequestRejected(
                f"generationConfig.responseMimeType is {_ENUM} without a responseSchema: send one "
                "with an enum.",
                param="generationConfig.responseSchema",
            )
        return ANY_JSON if kind == _JSON else None


class ContentsBody(fields.CamelBody):
    """The body of a request, which `countTokens` takes too."""

    harmless = unread_fields.HARMLESS_GOOGLE
    ignored = unread_fields.IGNORED
    refused = unread_fields.REFUSED_GOOGLE
    samples = True

    model: str | None = None
    """The model's name, if it is in the address too."""
    contents: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]
    system_instruction: dict[str, JsonValue] | None = None
    tools: Annotated[list[DeclaredTools], Field(max_length=MAX_TOOLS)] | None = None
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig | None = None
    return_token_ids: bool | None = None

    def prompt(self, unread: UnreadFields) -> Messages:
        """The prompt. Raises `RequestRejected` that names the field at fault."""
        messages = ContentReader(unread).conversation(self.system_instruction, self.contents)
        last = messages[-1]
        opens = last["role"] == "assistant"
        if opens and last.get("tool_calls"):
            param = f"contents.{len(self.contents) - 1}"
            raise RequestRejected(
                f"{param} ends with a call, which can't be continued: send its result.",
                param=param,
            )
        ending = chat_messages.ending(messages, opens=opens)
        return Messages(messages, tools_of(self._declared()), self._options(), ending)

    def _declared(self) -> Iterator[tuple[str, ToolBodyLike]]:
        number = 0
        for place, entry in enumerate(self.tools or ()):
            for inner, declared in enumerate(entry.function_declarations or ()):
                number += 1
                if number > MAX_TOOLS:
                    raise RequestRejected(
                        f"tools hold more than {MAX_TOOLS} functions: send {MAX_TOOLS} at most.",
                        param="tools",
                    )
                yield f"tools.{place}.functionDeclarations.{inner}", declared

    def _options(self) -> dict[str, Json]:
        """Options for the chat template. A template that does not read them writes the same text as
        without them.
        """
        config = self.generation_config
        thinking = config.thinking_config if config is not None else None
        options: dict[str, Json] = {}
        if thinking is None:
            return options
        if thinking.thinking_budget not in (None, -1):
            options["enable_thinking"] = thinking.thinking_budget != 0
        if thinking.thinking_level not in (None, "THINKING_LEVEL_UNSPECIFIED"):
            options["reasoning_effort"] = thinking.thinking_level.lower()
        return options


class CountContentsBody(ContentsBody):
    """The body of `countTokens`: contents alone, or a whole request in `generateContentRequest`."""

    contents: Annotated[list[dict[str, JsonValue]], Field(min_length=1)] | None = None  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]
    generate_content_request: ContentsBody | None = None

    def prompt(self, unread: UnreadFields) -> Messages:
        whole = self.generate_content_request
        if (self.contents is None) == (whole is None):
            raise RequestRejected(
                "contents and generateContentRequest: send exactly one of them.", param="contents"
            )
        return super().prompt(unread) if whole is None else whole.prompt(unread)


def _choice(
    config: FunctionCallingConfig | None, tools: tuple[Tool, ...], unread: UnreadFields
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Returns whether a function must be called, and those that may be. Only they are in the
    prompt.
    """
    place = "toolConfig.functionCallingConfig"
    mode: str | None = None
    names: Sequence[str] = ()
    if config is not None:
        mode = config.mode
        names = config.allowed_function_names or ()
    for name in names:
        check_known(name, tools, param=f"{place}.allowedFunctionNames")
    if mode == "NONE" or (not tools and mode != "ANY"):
        return ToolChoice.NONE, tools
    if not tools:
        raise RequestRejected(
            f"{place}.mode is 'ANY' without tools: send tools, or leave it out.",
            param=f"{place}.mode",
        )
    if mode == "VALIDATED":
        unread.note(
            f"{place}.mode",
            f"{place}.mode is 'VALIDATED', which is sampled as AUTO here: send AUTO or ANY",
        )
    if names:
        tools = tuple(tool for tool in tools if tool.name in names)
    choice = ToolChoice.REQUIRED if mode == "ANY" else ToolChoice.AUTO
    return choice, tools


def contents_call(
    body: ContentsBody, unread: UnreadFields, *, model: str | None, stream: bool
) -> CompletionCall:
    """The call that a body asks for. Raises `RequestRejected` if its fields contradict each
    other.
    """
    prompt = body.prompt(unread)
    config = body.generation_config or GenerationConfig()
    calling = None if body.tool_config is None else body.tool_config.function_calling_config
    choice, tools = _choice(calling, prompt.tools, unread)
    if config.logprobs is not None and not config.response_logprobs:
        raise RequestRejected(
            f"generationConfig.logprobs is {config.logprobs} without responseLogprobs: send "
            "responseLogprobs true with it.",
            param="generationConfig.logprobs",
        )
    return CompletionCall(
        sources=(Messages(prompt.messages, tools, prompt.options, prompt.ending),),
        asked=_GOOGLE.asked(config, grammar=config.grammar(), top_logprobs=config.logprobs),
        n=config.candidate_count or 1,
        stream=stream,
        model=model,
        prompt_param="contents",
        tool_choice=choice,
        names={
            **_GOOGLE.names,
            "grammar": config.format_param,
            "tool_choice": "toolConfig.functionCallingConfig.mode",
            "top_logprobs": "generationConfig.logprobs",
        },
    )
