"""Requests of Anthropic's Messages API: the bodies, and their messages, which are lists of blocks, as the chat messages that templates read.

There is one form for what an agent sends back: an assistant message becomes the same message that stands for the recorded answer,
so that its tokens are found again (I4).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field, JsonValue

from midflight.errors import RequestRejected
from midflight.gateway.dialects import fields
from midflight.gateway.dialects.constraints import MAX_TOOLS, check_known, check_schema, schema_grammar, tools_of
from midflight.gateway.sessions.session import Asked, CompletionCall, Messages, ToolChoice
from midflight.text import Message
from midflight.text.formats import Tool
from midflight.types import Grammar, Json
from midflight.types.generation import Api

Block: TypeAlias = Mapping[str, JsonValue]

_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""What a message of each role may hold."""

_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text", "citations"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
}
_FIELDS_OF_ALL = frozenset({"type", "cache_control"})


def conversation(system: JsonValue, messages: Sequence[Block]) -> tuple[Message, ...]:
    """The whole conversation, the system text first. Raises `RequestRejected` that names the block."""
    said = _text(_blocks(system, _BLOCKS["system"], "system")) if system is not None else ""
    first: list[Message] = [{"role": "system", "content": said}] if said else []
    if messages[-1].get("role") == "assistant":
        raise RequestRejected(
            "the last message is the assistant's: continuing it is not supported here, end with a message of the user.", param="messages"
        )
    return (*first, *(m for place, message in enumerate(messages) for m in _messages(message, f"messages.{place}")))


def _messages(message: Block, param: str) -> list[Message]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _BLOCKS:
        raise RequestRejected(f"{param}.role is {role!r:.80}: send one of {', '.join(_BLOCKS)}.", param=f"{param}.role")
    _only(message, frozenset({"role", "content"}), param)
    blocks = _blocks(message.get("content"), _BLOCKS[role], f"{param}.content")
    match role:
        case "assistant":
            return [_assistant(blocks, f"{param}.content")]
        case "user":
            return _user(blocks, f"{param}.content")
        case _:
            return [{"role": role, "content": _text(blocks)}]


def _user(blocks: Sequence[Block], param: str) -> list[Message]:
    """Each result of a tool is a message of its own. They come before what the user says in the same message."""
    results = [_result(b, f"{param}.{place}") for place, b in enumerate(blocks) if b["type"] == "tool_result"]
    text = _text(blocks)
    return [*results, {"role": "user", "content": text}] if text or not results else results


def _assistant(blocks: Sequence[Block], param: str) -> Message:
    """Joins the texts, the thinking and the calls, because a chat message has no order between them."""
    calls = [_call(b, f"{param}.{place}") for place, b in enumerate(blocks) if b["type"] == "tool_use"]
    thinking = "".join(fields.text_of(b, "thinking", param) for b in blocks if b["type"] == "thinking")
    return fields.assistant(_text(blocks), reasoning=thinking, calls=calls)


def _call(block: Block, param: str) -> Json:
    given = block.get("input")
    if not isinstance(given, dict):
        raise RequestRejected(f"{param}.input is {given!r:.80}: send an object.", param=f"{param}.input")
    return fields.tool_call(
        call_id=fields.filled(block.get("id"), f"{param}.id"),
        name=fields.filled(block.get("name"), f"{param}.name"),
        arguments=fields.arguments_text(given, f"{param}.input"),
    )


def _result(block: Block, param: str) -> Message:
    """A failed result (`is_error`) is treated like any other: its text says what failed."""
    content = block.get("content")
    text = "" if content is None else _text(_blocks(content, ("text",), f"{param}.content"))
    return fields.tool_result(text, call_id=fields.filled(block.get("tool_use_id"), f"{param}.tool_use_id"))


def _blocks(content: JsonValue, kinds: Sequence[str], param: str) -> list[Block]:
    """Blocks of these kinds; a string is one block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestRejected(f"{param} is {content!r:.80}: send a text, or a list of blocks.", param=param)
    return [_block(value, kinds, f"{param}.{place}") for place, value in enumerate(content)]


def _block(value: JsonValue, kinds: Sequence[str], param: str) -> Block:
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in kinds:
        raise RequestRejected(f"{param} is a block of type {kind!r:.80}: send {' or '.join(kinds)} here.", param=param)
    _only(value, _FIELDS[kind] | _FIELDS_OF_ALL, param)
    if kind == "text":
        fields.text_of(value, "text", param)
    return value


def _text(blocks: Sequence[Block]) -> str:
    """The text blocks, joined as they are."""
    return "".join(str(b["text"]) for b in blocks if b["type"] == "text")


def _only(value: Block, known: frozenset[str], param: str) -> None:
    """Refuses a field that nothing would read. Fields without a value are passed over."""
    lost = next((name for name, given in value.items() if name not in known and given is not None), None)
    if lost is not None:
        raise RequestRejected(f"unknown field {f'{param}.{lost}'[:80]!r}: leave it out.", param=f"{param}.{lost}"[:80])


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class ThreadRefused(RequestRejected):
    """Anthropic's SDK knows this code, and sends the whole conversation instead."""

    code = "thread_unsupported_request"


def _of_client(kind: str) -> str:
    if kind != "custom":
        raise ValueError("a tool of Anthropic's own, send one that the client runs, with an input_schema")
    return kind


class ClientTool(fields.Body):
    """A tool that the client runs. `type` is checked first, so that a tool of Anthropic's own is refused by its name."""

    type: Annotated[str, AfterValidator(_of_client)] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, JsonValue]
    strict: bool | None = None
    """Ignored: a call is shown only when it is well formed. One that must come is sampled under its schema."""
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    eager_input_streaming: bool | None = None
    """Ignored: a call is streamed once it is known to be one."""
    cache_control: JsonValue = None

    def tool(self, place: str) -> Tool:
        return Tool(self.name, self.description or "", check_schema(self.input_schema, f"{place}.input_schema", of_object=True))


class Choosing(fields.Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(fields.Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: fields.Tokens | None = None
    """Not enforced: `max_tokens` bounds thinking and text together."""
    display: Literal["summarized"] | None = None


class OutputFormat(fields.Body):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, JsonValue], Field(alias="schema")]


class OutputConfig(fields.Body):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class PromptBody(fields.Body):
    """What the prompt is written from. It is the whole body of `count_tokens`."""

    harmless: ClassVar[Mapping[str, str]] = {
        "metadata": "the client's own labels",
        "cache_control": "engines find common prefixes by themselves",
        "diagnostics": "asks about the cache of prompts",
        "service_tier": "there is one tier",
        "speed": "there is one speed",
        "inference_geo": "names a place of Anthropic's",
        "user_profile_id": "names the client's own user",
        "workspace_id": "names the client's account",
    }
    neutral: ClassVar[Mapping[str, tuple[JsonValue, ...]]] = {"mcp_servers": ([],)}

    model: str
    messages: Annotated[list[dict[str, JsonValue]], Field(min_length=1)]
    system: JsonValue = None
    tools: Annotated[list[ClientTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choosing | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def prompt(self) -> Messages:
        """Raises `RequestRejected` that names what cannot be a prompt."""
        tools = tools_of((f"tools.{place}", tool) for place, tool in enumerate(self.tools or ()))
        return Messages(conversation(self.system, self.messages), tools, self._options())

    def _options(self) -> dict[str, Json]:
        """Options for the chat template. Templates that do not read them write what they always write."""
        options: dict[str, Json] = {}
        if self.thinking is not None and self.thinking.type != "adaptive":
            options["enable_thinking"] = self.thinking.type == "enabled"
        if self.output_config is not None and self.output_config.effort is not None:
            options["reasoning_effort"] = self.output_config.effort
        return options


_ANTHROPIC = fields.SamplingFields(Api.ANTHROPIC)


class MessagesBody(_ANTHROPIC.on(PromptBody)):
    max_tokens: fields.Tokens
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=fields.MAX_STOPS)] | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    thread: JsonValue = None
    """Refused: conversations are not kept for the client."""

    def asked(self) -> Asked:
        return _ANTHROPIC.asked(self, grammar=self._grammar())

    def choice(self, tools: Sequence[Tool]) -> tuple[ToolChoice, str | None]:
        """Whether a tool must be called, and which."""
        choosing = self.tool_choice
        if choosing is None or choosing.type == "auto":
            return (ToolChoice.AUTO if tools else ToolChoice.NONE), None
        if choosing.type == "none":
            return ToolChoice.NONE, None
        if not tools:
            raise RequestRejected(f"tool_choice is {choosing.type!r} without tools: send tools, or leave it out.", param="tool_choice")
        if choosing.type == "any":
            return ToolChoice.REQUIRED, None
        if choosing.name is None:
            raise RequestRejected("tool_choice.name is missing: send the name of a tool.", param="tool_choice.name")
        check_known(choosing.name, tools, param="tool_choice.name")
        return ToolChoice.REQUIRED, choosing.name

    @property
    def format_param(self) -> str:
        """Where the client says what the answer must match."""
        return "output_format" if self.output_format is not None else "output_config.format"

    def _grammar(self) -> Grammar | None:
        newer = self.output_config.format if self.output_config is not None else None
        if self.output_format is not None and newer is not None:
            both = "output_format and output_config.format both say what the answer must match"
            raise RequestRejected(f"{both}: send one of them.", param="output_format")
        form, param = self.output_format or newer, self.format_param
        if form is None:
            return None
        return schema_grammar(form.json_schema, f"{param}.schema")


def messages_call(body: MessagesBody) -> CompletionCall:
    """The call that a body means; raises `RequestRejected` where its fields contradict each other."""
    if body.thread is not None:
        raise ThreadRefused("thread is not supported here: leave it out, and send the whole conversation as messages.", param="thread")
    prompt = body.prompt()
    choice, forced = body.choice(prompt.tools)
    return CompletionCall(
        sources=(prompt,),
        asked=body.asked(),
        stream=bool(body.stream),
        model=body.model,
        prompt_param="messages",
        tool_choice=choice,
        forced_tool=forced,
        parallel_tool_calls=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        names={**_ANTHROPIC.names, "grammar": body.format_param},
    )
