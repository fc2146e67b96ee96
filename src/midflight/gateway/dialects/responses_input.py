"""The requests of OpenAI's responses. Their input items become the chat messages that templates
read.

The items of one answer (reasoning, message, calls) become the same message that stands for the
recorded answer, so that its tokens are found again (I4).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal, TypeAlias, cast

from pydantic import Field, JsonValue, WithJsonSchema

from midflight.errors import RequestRejected
from midflight.gateway.dialects import fields, tool_bodies, unread_fields
from midflight.gateway.dialects.chat_messages import (
    arguments_text,
    assistant,
    tool_call,
    tool_result,
)
from midflight.gateway.dialects.constraints import ANY_OBJECT, schema_grammar
from midflight.gateway.dialects.fields import Body, Tokens, TopLogprobs, filled, text_of
from midflight.gateway.dialects.options import ReasoningEffort, template_options
from midflight.gateway.dialects.sampling_body import SamplingBody
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.gateway.sessions.responses import Conversation, KeptResponses
from midflight.text import Message
from midflight.types import Grammar, Json

Item: TypeAlias = Mapping[str, JsonValue]

_ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
"""Roles, with the names that templates know."""

_TEXTS = ("input_text", "output_text")
_OF_ALL = frozenset({"type", "id", "status"})
"""The fields that are read of any item, or that the gateway itself wrote."""
FIELDS: Mapping[str, frozenset[str]] = {
    "message": _OF_ALL | {"role", "content"},
    "function_call": _OF_ALL | {"call_id", "name", "namespace", "arguments"},
    "function_call_output": _OF_ALL | {"call_id", "name", "namespace", "output"},
    "custom_tool_call": _OF_ALL | {"call_id", "name", "namespace", "input"},
    "custom_tool_call_output": _OF_ALL | {"call_id", "output"},
    "reasoning": _OF_ALL | {"content", "summary", "encrypted_content"},
}
"""The types of items, and the fields that are read of each."""


def conversation(
    given: JsonValue,
    *,
    before: Sequence[Message],
    unread: UnreadFields,
    kept: KeptResponses,
    param: str = "input",
) -> tuple[Message, ...]:
    """The whole conversation, with the messages `before` first. Raises `RequestRejected` that names
    the item. `param` is the client's name for the items.
    """
    reader = _ItemReader(unread, kept)
    reader.messages += before
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestRejected(
            f"{param} is {given!r:.80}: send a text, or a list of at least one item.", param=param
        )
    for place, item in enumerate(given):
        if not isinstance(item, dict):
            raise RequestRejected(
                f"{param}.{place} is {item!r:.80}: send an object.", param=f"{param}.{place}"
            )
        reader.read(item, f"{param}.{place}")
    reader.end_turn()
    return tuple(reader.messages)


class _ItemReader:
    """Reads items one by one. The assistant's items are collected in a turn until it ends.

    A turn ends with any item of another role. A message or reasoning right after a message belongs
    to the next turn. After a call it does not, because the next turn needs the call's output first.
    """

    def __init__(self, unread: UnreadFields, kept: KeptResponses) -> None:
        self._unread = unread
        self._kept = kept
        self.messages: list[Message] = []
        self._reasoning = ""
        self._content = ""
        self._calls: list[Json] = []
        self._begun = False
        self._after_message = False

    def read(self, item: Item, param: str) -> None:
        fields.typed(item, param, {"type": str, "id": str, "status": str})
        kind = item.get("type")
        if not kind and "role" in item:
            kind = "message"
        elif not kind:
            kind = "item_reference" if "id" in item else None
        read = FIELDS.get(kind) if isinstance(kind, str) else None
        if read is not None and not item.keys() <= read:
            self._unread.rest(item, read, param)
        match kind:
            case "message":
                self._message(item, param)
            case "function_call" | "custom_tool_call":
                self._calls.append(_call(item, param))
                self._begun = True
                self._after_message = False
            case "function_call_output" | "custom_tool_call_output":
                output = _text(item, "output", param)
                called = filled(item.get("call_id"), f"{param}.call_id")
                self._say(tool_result(output, call_id=called))
            case "reasoning":
                self._next(message=False)
                self._reasoning += _thought(item, param)
            case "item_reference":
                self.read(self._kept.item(filled(item.get("id"), f"{param}.id"), param), param)
            case _:
                raise RequestRejected(
                    f"{param} is an item of type {kind!r:.80}: send {', '.join(FIELDS)} only.",
                    param=param,
                )

    def end_turn(self) -> None:
        if not self._begun:
            return
        self.messages.append(assistant(self._content, reasoning=self._reasoning, calls=self._calls))
        self._reasoning = ""
        self._content = ""
        self._calls = []
        self._begun = False
        self._after_message = False

    def _message(self, item: Item, param: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RequestRejected(
                f"{param}.role is {role!r:.80}: send one of {', '.join(_ROLES)}.",
                param=f"{param}.role",
            )
        text = _text(item, "content", param)
        if role == "assistant":
            self._next(message=True)
            self._content += text
        else:
            self._say({"role": _ROLES[role], "content": text})

    def _next(self, *, message: bool) -> None:
        if self._after_message:
            self.end_turn()
        self._begun = True
        self._after_message = message

    def _say(self, message: Message) -> None:
        self.end_turn()
        self.messages.append(message)


def _call(item: Item, param: str) -> Json:
    if item["type"] == "custom_tool_call":
        return tool_bodies.custom_call(
            dict(item), param, call_id=filled(item.get("call_id"), f"{param}.call_id")
        )
    return tool_call(
        call_id=filled(item.get("call_id"), f"{param}.call_id"),
        name=tool_bodies.called(item, param),
        arguments=arguments_text(item.get("arguments"), f"{param}.arguments"),
    )


def _thought(item: Item, param: str) -> str:
    """The reasoning itself, or its summary if there is nothing else. Encrypted reasoning cannot be
    read.
    """
    fields.typed(item, param, {"content": list, "summary": list})
    summary = _parts(item.get("summary") or [], ("summary_text",), f"{param}.summary")
    return _parts(item.get("content") or [], ("reasoning_text",), f"{param}.content") or summary


def _text(item: Item, name: str, param: str) -> str:
    """A text. Parts of text are joined without anything between them."""
    value = item.get(name)
    return value if isinstance(value, str) else _parts(value, _TEXTS, f"{param}.{name}")


def _parts(value: JsonValue, kinds: Sequence[str], param: str) -> str:
    if not isinstance(value, list):
        raise RequestRejected(
            (
                f"{param} is {value!r:.80}: send a text, or a list of parts of type "
                f"{' or '.join(kinds)}."
            ),
            param=param,
        )
    return "".join(_part(part, kinds, f"{param}.{place}") for place, part in enumerate(value))


def _part(part: JsonValue, kinds: Sequence[str], param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if not isinstance(part, dict) or kind not in kinds:
        raise RequestRejected(
            (
                f"{param} is a part of type {kind!r:.80}: send parts of type {' or '.join(kinds)} "
                "only."
            ),
            param=param,
        )
    fields.typed(part, param, {"annotations": list, "logprobs": list})
    return text_of(part, "text", param)


def input_items(response: Mapping[str, Json], messages: Sequence[Message]) -> list[Json]:
    """The items of the kept conversation before a response, oldest first, as a request could have
    sent them.
    """
    items = _all_items(messages, response["tools"])
    return [
        {"id": f"in_{response['id']}_{place}_{number}", "status": "completed", **item}
        for place, number, item in items
    ]


def conversation_items(found: Conversation) -> tuple[list[Json], list[int]]:
    """The items of a conversation, oldest first, and the place of the message that each is of."""
    items: list[Json] = []
    places: list[int] = []
    for place, _, item in _all_items(found.messages, found.tools):
        items.append({"status": "completed", **item})
        places.append(place)
    named: list[Json] = []
    for name, item in zip(found.ids(len(items)), items, strict=True):
        named.append({"id": name, **cast("dict[str, Json]", item)})
    return named, places


def _all_items(
    messages: Sequence[Message], sent: Json
) -> Iterator[tuple[int, int, dict[str, Json]]]:
    """The items of messages, each with the place of its message and its number in it. `sent` are
    the tools as the client sent them.
    """
    bodies = [tool_bodies.FunctionTool.model_validate(tool) for tool in cast("list[Json]", sent)]
    tools = {str(each.body.name): each for each in tool_bodies.offered(bodies)}
    calls: dict[Json, str] = {}
    for place, message in enumerate(messages):
        for number, item in enumerate(_items_of(message, tools, calls)):
            yield place, number, item


def _items_of(
    message: Message, tools: Mapping[str, tool_bodies.OfferedTool], calls: dict[Json, str]
) -> Iterator[dict[str, Json]]:
    """The items of one message. `calls` holds the kinds of the calls so far, by their ids; this
    function adds to it.
    """
    if message["role"] == "tool":
        told = message["tool_call_id"]
        yield {
            "type": f"{calls.get(told, 'function_call')}_output",
            "call_id": told,
            "output": message["content"],
        }
        return
    if message.get("reasoning_content"):
        thought: Json = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        yield {"type": "reasoning", "summary": [], "content": thought}
    if message["role"] != "assistant":
        yield {
            "type": "message",
            "role": message["role"],
            "content": [{"type": "input_text", "text": message["content"]}],
        }
    elif message["content"]:
        text: Json = {"type": "output_text", "text": message["content"], "annotations": []}
        yield {"type": "message", "role": "assistant", "content": [text]}
    for call in cast("list[dict[str, Json]]", message.get("tool_calls") or []):
        function = cast("dict[str, Json]", call["function"])
        name = str(function["name"])
        arguments = str(function["arguments"])
        tool = tools.get(name)
        names: dict[str, Json] = {"name": name} if tool is None else tool.names
        if tool is not None and tool.body.type == tool_bodies.CUSTOM:
            kind = "custom_tool_call"
            part: dict[str, Json] = {"input": tool_bodies.custom_input(arguments)}
        else:
            kind = "function_call"
            part = {"arguments": arguments}
        calls[call["id"]] = kind
        yield {"type": kind, "call_id": call["id"], **names, **part}


_LOGPROBS = "message.output_text.logprobs"


_Input = Annotated[
    JsonValue,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "object"}, "minItems": 1},
            ]
        }
    ),
]
_Refused = Annotated[JsonValue, WithJsonSchema({"type": "null"})]
"""A field that is refused with a remedy of its own."""


class FormatBody(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: JsonValue = Field(default=None, alias="schema")
    strict: bool | None = None
    """Makes no difference, because answers always match the schema."""


class TextBody(Body):
    format: FormatBody | None = None
    verbosity: str | None = None


class ReasoningBody(Body):
    ignored: ClassVar[Mapping[str, str]] = {
        "generate_summary": "the reasoning is told in full",
        "encrypted_content": "the reasoning is told in full",
        "context": "the model's template says which thinking it is shown again",
        "mode": "there is one mode",
    }

    effort: ReasoningEffort | None = None
    summary: str | None = None
    """Only sent back with the response, because the reasoning is sent in full."""


class ConversationBody(Body):
    id: str


class ResponsesBody(SamplingBody):
    refused = unread_fields.REFUSED_RESPONSES

    input: _Input = None
    """It may be left out where a conversation is gone on with."""
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    tools: (
        Annotated[list[tool_bodies.FunctionTool], Field(max_length=tool_bodies.MAX_TOOLS)] | None
    ) = None
    tool_choice: tool_bodies.ToolChoiceBody = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Tokens | None = None
    """Ignored, because it counts calls of hosted tools and there are none."""
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationBody | None = None
    store: bool | None = None
    prompt: _Refused = None
    """Refused before anything else, because requests with it have no `input`."""
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    """Ignored, because engines find common prefixes by themselves."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    enable_thinking: bool | None = None

    @cached_property
    def offered(self) -> list[tool_bodies.OfferedTool]:
        return tool_bodies.offered(self.tools)

    @property
    def conversation_name(self) -> str | None:
        if isinstance(self.conversation, ConversationBody):
            return self.conversation.id
        return self.conversation

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def format(self) -> FormatBody | None:
        return self.text and self.text.format

    @cached_property
    def grammar(self) -> tuple[str, Grammar] | None:
        """OpenAI's field is `text.format`. The other fields are extensions, as in chats."""
        other = super().grammar
        own = self.format and _grammar(self.format)
        if own is None:
            return other
        if other is not None:
            raise RequestRejected(
                "text.format and another field both say what the answer must match: send one.",
                param="text.format",
            )
        return "text.format", own


def responses_call(
    body: ResponsesBody, unread: UnreadFields, kept: KeptResponses
) -> tuple[CompletionCall, tuple[Message, ...]]:
    """The call that a request asks for, and its conversation without the instructions, which hold
    for one response only. Raises `RequestRejected` if its fields contradict each other or have
    values that are not supported.
    """
    _refuse_unkept(body)
    _note(body, unread)
    tools = tool_bodies.tools_of((each.place, each.body) for each in body.offered)
    chosen = tool_bodies.choice_of(body.tool_choice, tools)
    options = template_options(
        body.chat_template_kwargs,
        body.reasoning and body.reasoning.effort,
        verbosity=body.text and body.text.verbosity,
        thinks=body.enable_thinking,
    )
    before = _before(body, kept)
    if body.input is None and not before:
        raise RequestRejected("input is missing: send it.", param="input")
    said = before
    if body.input is not None:
        said = conversation(body.input, before=before, unread=unread, kept=kept)
    messages = said
    if body.instructions:
        messages = ({"role": "system", "content": body.instructions}, *said)
    call = CompletionCall(
        sources=(Messages(messages, chosen.tools, options),),
        asked=body.asked(body.max_output_tokens, top_logprobs=body.top_logprobs),
        stream=bool(body.stream),
        model=body.model,
        prompt_param="input",
        names=body.names("max_output_tokens"),
        tool_choice=chosen.choice,
        forced_tool=chosen.forced,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
    return call, said


def _before(body: ResponsesBody, kept: KeptResponses) -> tuple[Message, ...]:
    """The conversation that the request continues."""
    if body.previous_response_id is not None and body.conversation_name is not None:
        fault = (
            "previous_response_id and conversation both say what to go on from: send one of them"
        )
        raise RequestRejected(f"{fault}.", param="previous_response_id")
    if body.previous_response_id is not None:
        return kept.said(body.previous_response_id, "previous_response_id").whole
    if body.conversation_name is None:
        return ()
    said = kept.conversation(body.conversation_name, "conversation").said
    return () if said is None else said.whole


def _refuse_unkept(body: ResponsesBody) -> None:
    """Refuses, by name and with a remedy, the fields of OpenAI that the gateway does not
    support.
    """
    if body.prompt is not None:
        raise RequestRejected(
            (
                f"prompt is {body.prompt!r:.80}, a template that the vendor keeps, and no templates "
                "are kept here: send the whole input, and its text as instructions."
            ),
            param="prompt",
        )
    if body.background:
        raise RequestRejected(
            "background is true: wait for the response, or stream it; it is kept when it is whole.",
            param="background",
        )
    if body.n not in (None, 1):
        raise RequestRejected(
            f"n is {body.n}, and a response is one answer: send several requests.", param="n"
        )
    if body.response_format is not None:
        raise RequestRejected(
            "response_format is a field of chat completions: send text.format instead.",
            param="response_format",
        )


def _note(body: ResponsesBody, unread: UnreadFields) -> None:
    """Notes values without effect in fields that are read. They could not change the text."""
    if body.truncation == "auto":
        unread.note(
            "truncation",
            "truncation is 'auto', and the input is never cut here: send the input that fits",
        )
    for place, name in enumerate(body.include or ()):
        if name not in (_LOGPROBS, "reasoning.encrypted_content"):
            unread.note(
                f"include.{name}",
                f"include.{place} is {name[:80]!r}, which no answer here has: leave it out",
                known=False,
            )


def _grammar(given: FormatBody) -> Grammar | None:
    if given.type == "text":
        return None
    if given.type == "json_object":
        return ANY_OBJECT
    param = "text.format.schema"
    if given.schema_ is None:
        raise RequestRejected(f"{param} is missing: send a JSON schema.", param=param)
    return schema_grammar(given.schema_, param)
