"""The requests of Anthropic's Messages API. Their messages are lists of blocks, which become the
chat messages that templates read.

An assistant message that an agent sends back becomes the same message that stands for the recorded
answer, so that its tokens are found again (I4).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, JsonValue

from midflight.errors import RequestRejected
from midflight.gateway.dialects import chat_messages, fields, unread_fields
from midflight.gateway.dialects.constraints import schema_grammar
from midflight.gateway.dialects.resent import SentMessages
from midflight.gateway.dialects.sampling_fields import SamplingFields
from midflight.gateway.dialects.schemas import check_schema
from midflight.gateway.dialects.tool_bodies import (
    MAX_TOOLS,
    check_known,
    left_out,
    placed,
    tools_of,
)
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.request import Asked, CompletionCall, Messages, ToolChoice
from midflight.text import Message
from midflight.text.formats import Tool
from midflight.types import Grammar, Json
from midflight.types.generation import MAX_STOPS, Api

Block: TypeAlias = Mapping[str, JsonValue]

_RESULTS = ("text", "document", "search_result", "tool_reference")
_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The types of blocks that a message of each role may hold."""

BLOCK_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text"}),
    "document": frozenset({"type", "source", "title", "context"}),
    "search_result": frozenset({"type", "source", "title", "content"}),
    "tool_reference": frozenset({"type", "tool_name"}),
    "thinking": frozenset({"type", "thinking", "signature"}),
    "redacted_thinking": frozenset({"type", "data"}),
    "tool_use": frozenset({"type", "id", "name", "input", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error"}),
}
"""The fields that a block of each type may hold."""
_KINDS: Mapping[str, type] = {
    "title": str,
    "context": str,
    "signature": str,
    "data": str,
    "is_error": bool,
}
_OF_MESSAGE = frozenset({"role", "content"})


class BlockReader:
    """Reads one conversation, and notes its fields that have no effect."""

    def __init__(self, unread: UnreadFields) -> None:
        self._unread = unread

    def system(self, system: JsonValue) -> tuple[Message, ...]:
        """The message of the system text, if there is one."""
        if system is None:
            return ()
        text = _text(self._blocks(system, _BLOCKS["system"], "system"))
        return ({"role": "system", "content": text},) if text else ()

    def conversation(self, messages: Sequence[Block], first: int) -> tuple[Message, ...]:
        """The conversation without the system text. `first` is the place of its first message.
        Raises `RequestRejected` that names the block.
        """
        found: list[Message] = []
        for place, message in enumerate(messages, first):
            found += self._messages(message, f"messages.{place}")
        return tuple(found)

    def _messages(self, message: Block, param: str) -> list[Message]:
        role = message.get("role")
        if not isinstance(role, str) or role not in _BLOCKS:
            raise RequestRejected(
                f"{param}.role is {role!r:.80}: send one of {', '.join(_BLOCKS)}.",
                param=f"{param}.role",
            )
        if len(message) > len(_OF_MESSAGE):
            self._unread.rest(message, _OF_MESSAGE, param)
        blocks = self._blocks(message.get("content"), _BLOCKS[role], f"{param}.content")
        match role:
            case "assistant":
                return [_assistant(blocks, f"{param}.content")]
            case "user":
                return self._user(blocks, f"{param}.content")
            case _:
                return [{"role": role, "content": _text(blocks)}]

    def _user(self, blocks: Sequence[Block], param: str) -> list[Message]:
        """The messages of a user's message. Each result of a tool is a message of its own, before
        the user's text.
        """
        found: list[Message] = []
        for place, block in enumerate(blocks):
            if block["type"] == "tool_result":
                found.append(self._result(block, f"{param}.{place}"))
        text = _text(blocks)
        if text or not found:
            found.append({"role": "user", "content": text})
        return found

    def _result(self, block: Block, param: str) -> Message:
        """A failed result (`is_error`) is treated like any other: its text says what failed."""
        content = block.get("content")
        text = "" if content is None else _text(self._blocks(content, _RESULTS, f"{param}.content"))
        return chat_messages.tool_result(
            text, call_id=fields.filled(block.get("tool_use_id"), f"{param}.tool_use_id")
        )

    def _blocks(self, content: JsonValue, kinds: Sequence[str], param: str) -> list[Block]:
        """Blocks of these types. A string is one block of text. Documents and references become
        blocks of text too.
        """
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise RequestRejected(
                f"{param} is {content!r:.80}: send a text, or a list of blocks.", param=param
            )
        return [
            self._block(value, kinds, f"{param}.{place}") for place, value in enumerate(content)
        ]

    def _block(self, value: JsonValue, kinds: Sequence[str], param: str) -> Block:
        kind = value.get("type") if isinstance(value, dict) else value
        if not isinstance(value, dict) or not isinstance(kind, str) or kind not in kinds:
            raise RequestRejected(
                f"{param} is a block of type {kind!r:.80}: send {' or '.join(kinds)} here.",
                param=param,
            )
        if not value.keys() <= BLOCK_FIELDS[kind]:
            self._unread.rest(value, BLOCK_FIELDS[kind], param)
        fields.typed(value, param, _KINDS)
        match kind:
            case "text":
                fields.text_of(value, "text", param)
            case "tool_reference":
                return {"type": "text", "text": fields.text_of(value, "tool_name", param)}
            case "document" | "search_result":
                return {"type": "text", "text": self._document(value, param)}
            case _:
                pass
        return value

    def _document(self, block: Block, param: str) -> str:
        """The text of a document or of a search result: title, origin and text, each on lines of
        its own.
        """
        source = block.get("source")
        content = block.get("content")
        place = f"{param}.content"
        if block["type"] == "document":
            if not isinstance(source, dict) or source.get("type") not in ("text", "content"):
                kind = source.get("type") if isinstance(source, dict) else source
                remedy = "the model reads text, send a source of type text or content"
                raise RequestRejected(
                    f"{param}.source is of type {kind!r:.80}: {remedy}.", param=f"{param}.source"
                )
            fields.typed(source, f"{param}.source", {"media_type": str})
            held = "data" if source["type"] == "text" else "content"
            content = source.get(held)
            place = f"{param}.source.{held}"
            source = block.get("context")
        elif source is not None and not isinstance(source, str):
            raise RequestRejected(
                f"{param}.source is {source!r:.80}: send a text.", param=f"{param}.source"
            )
        heading = [block.get("title"), source]
        lines = [line for line in heading if isinstance(line, str) and line]
        lines.append(_text(self._blocks(content, ("text",), place)))
        return "\n".join(lines)


def _conversation(
    messages: Sequence[Block], unread: UnreadFields, first: int = 0
) -> tuple[Message, ...]:
    return BlockReader(unread).conversation(messages, first)


def _assistant(blocks: Sequence[Block], param: str) -> Message:
    """Joins the texts, the thinking and the calls, because a chat message has no order between
    them.
    """
    placed_blocks = [(f"{param}.{place}", block) for place, block in enumerate(blocks)]
    calls = [_call(block, place) for place, block in placed_blocks if block["type"] == "tool_use"]
    thinking = "".join(
        fields.text_of(block, "thinking", place)
        for place, block in placed_blocks
        if block["type"] == "thinking"
    )
    return chat_messages.assistant(_text(blocks), reasoning=thinking, calls=calls)


def _call(block: Block, param: str) -> Json:
    given = block.get("input")
    if not isinstance(given, dict):
        raise RequestRejected(
            f"{param}.input is {given!r:.80}: send an object.", param=f"{param}.input"
        )
    return chat_messages.tool_call(
        call_id=fields.filled(block.get("id"), f"{param}.id"),
        name=fields.filled(block.get("name"), f"{param}.name"),
        arguments=chat_messages.arguments_text(given, f"{param}.input"),
    )


def _text(blocks: Sequence[Block]) -> str:
    """The texts of all text blocks, joined without anything between them."""
    return "".join(str(b["text"]) for b in blocks if b["type"] == "text")


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class ThreadRefused(RequestRejected):
    """Raised for a thread. Anthropic's SDK knows the code, and sends the whole conversation
    instead.
    """

    code = "thread_unsupported_request"


class ClientTool(fields.Body):
    """A tool that the client runs."""

    ignored: ClassVar[Mapping[str, str]] = {
        "allowed_callers": "the model calls tools itself",
        "cache_control": unread_fields.IGNORED["cache_control"],
        "defer_loading": "all tools are in the prompt",
        "eager_input_streaming": "every call is streamed as it comes",
        "input_examples": "templates have no place for them: write them into the description",
    }
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "input_examples": ([],),
    }

    type: str | None = None
    name: ToolName | None = None
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = None
    strict: bool | None = None
    """See `tool_bodies.FunctionBody`."""

    def passed_over(self) -> str | None:
        return None if self.type is None else left_out(self.type, ("custom",))

    def tool(self, place: str) -> Tool:
        if self.name is None or self.input_schema is None:
            lacking = f"{place}.{'name' if self.name is None else 'input_schema'}"
            raise RequestRejected(f"{lacking} is missing: send it.", param=lacking)
        schema = check_schema(self.input_schema, f"{place}.input_schema", of_object=True)
        return Tool(self.name, self.description or "", schema, strict=bool(self.strict))


class MessagesToolChoice(fields.Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(fields.Body):
    harmless: ClassVar[Mapping[str, str]] = {
        "budget_tokens": "`max_tokens` bounds thinking and text together"
    }
    ignored: ClassVar[Mapping[str, str]] = {
        "display": "thinking is shown as it is",
        "block_binding": "thinking that is sent back is read as it is",
    }
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(fields.Body):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, JsonValue], Field(alias="schema")]


class OutputConfig(fields.Body):
    ignored: ClassVar[Mapping[str, str]] = {
        "task_budget": "`max_tokens` bounds each answer, and nothing bounds several together"
    }

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class PromptBody(fields.RequestBody):
    """The fields that the prompt is made from. They are the whole body of `count_tokens`."""

    harmless = unread_fields.HARMLESS_MESSAGES
    refused = unread_fields.REFUSED_MESSAGES

    model: str
    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]
    system: JsonValue = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def prompt(self, unread: UnreadFields, sent: SentMessages | None = None) -> Messages:
        """The prompt. `sent` says which messages were read before. Raises `RequestRejected` that
        names the field at fault.
        """
        tools = tools_of(placed(self.tools)) if self.tools else ()
        head = BlockReader(unread).system(self.system)
        num_left = 0
        messages: Sequence[Message]
        if sent is None:
            messages = (*head, *_conversation(self.messages, unread))
        else:
            messages, num_left = sent.read(self.messages, _conversation, unread, head=head)
        options = self._options()
        opens = messages[-1]["role"] == "assistant"
        ending = chat_messages.ending(messages, opens=opens)
        return Messages(messages, tools, options, ending, num_left)

    def _options(self) -> dict[str, Json]:
        """Options for the chat template. A template that does not read them writes the same text as
        without them.
        """
        options: dict[str, Json] = {}
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            options["enable_thinking"] = self.thinking.type == "enabled"
        if self.output_config is not None and self.output_config.effort is not None:
            options["reasoning_effort"] = self.output_config.effort
        return options


_ANTHROPIC = SamplingFields(Api.ANTHROPIC)


class MessagesBody(_ANTHROPIC.on(PromptBody)):
    max_tokens: fields.Tokens
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None
    ) = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    thread: JsonValue = None
    """Refused, because conversations are not kept for the client."""

    def asked(self) -> Asked:
        return _ANTHROPIC.asked(self, grammar=self._grammar())

    def choice(self, tools: Sequence[Tool]) -> tuple[ToolChoice, str | None]:
        """Returns whether a tool must be called, and the name of the only tool that may be."""
        choosing = self.tool_choice
        if choosing is None or choosing.type == "auto":
            return (ToolChoice.AUTO if tools else ToolChoice.NONE), None
        if choosing.type == "none":
            return ToolChoice.NONE, None
        if not tools:
            raise RequestRejected(
                f"tool_choice is {choosing.type!r} without tools: send tools, or leave it out.",
                param="tool_choice",
            )
        if choosing.type == "any":
            return ToolChoice.REQUIRED, None
        if choosing.name is None:
            raise RequestRejected(
                "tool_choice.name is missing: send the name of a tool.", param="tool_choice.name"
            )
        check_known(choosing.name, tools, param="tool_choice.name")
        return ToolChoice.REQUIRED, choosing.name

    @property
    def format_param(self) -> str:
        """The field in which the client constrains the answer."""
        return "output_format" if self.output_format is not None else "output_config.format"

    def _grammar(self) -> Grammar | None:
        newer = self.output_config.format if self.output_config is not None else None
        if self.output_format is not None and newer is not None:
            both = "output_format and output_config.format both say what the answer must match"
            raise RequestRejected(f"{both}: send one of them.", param="output_format")
        form = self.output_format or newer
        param = self.format_param
        if form is None:
            return None
        return schema_grammar(form.json_schema, f"{param}.schema")


def messages_call(
    body: MessagesBody,
    unread: UnreadFields,
    sent: SentMessages | None = None,
) -> CompletionCall:
    """The call that a body asks for. `sent` says which messages were read before. Raises
    `RequestRejected` if its fields contradict each other.
    """
    if body.thread is not None:
        raise ThreadRefused(
            (
                "thread is not supported here: leave it out, and send the whole conversation as "
                "messages."
            ),
            param="thread",
        )
    prompt = body.prompt(unread, sent)
    choice, forced = body.choice(prompt.tools)
    one_call = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    return CompletionCall(
        sources=(prompt,),
        asked=body.asked(),
        stream=bool(body.stream),
        model=body.model,
        prompt_param="messages",
        tool_choice=choice,
        forced_tool=forced,
        parallel_tool_calls=not one_call,
        names={**_ANTHROPIC.names, "grammar": body.format_param},
    )
