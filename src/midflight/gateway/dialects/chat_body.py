"""The body of a chat completion, and the call that it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, JsonValue, WithJsonSchema

from midflight.errors import RequestRejected
from midflight.gateway.dialects.chat_input import ROLES, conversation
from midflight.gateway.dialects.fields import SamplingBody, Tokens, TopLogprobs
from midflight.gateway.dialects.tools import MAX_TOOLS, ToolBody, ToolChoiceBody, choice_of, tools_of
from midflight.gateway.sessions.call import CompletionCall, Messages
from midflight.types import Json

_RESERVED_OPTIONS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {f"{kind}_token" for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")}
    | {"additional_special_tokens"}
)
"""Names that a template reads and that the gateway fills in itself."""

_MessageBody = Annotated[
    dict[str, JsonValue],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {"type": ["string", "array", "null"], "items": {"type": "object", "required": ["type", "text"]}},
            },
            "required": ["role"],
        }
    ),
]

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(SamplingBody):
    messages: Annotated[list[_MessageBody], Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceBody = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None


def chat_call(body: ChatBody) -> CompletionCall:
    """The call that a chat means; raises `RequestRejected` where its fields contradict each other."""
    if body.top_logprobs and not body.logprobs:
        raise RequestRejected(f"top_logprobs is {body.top_logprobs} without logprobs: send logprobs true with it.", param="top_logprobs")
    tools = tools_of((f"tools.{place}.function", tool.function) for place, tool in enumerate(body.tools or ()))
    choice, forced = choice_of(body.tool_choice, tools)
    return CompletionCall(
        sources=(Messages(conversation(body.messages), tools, template_options(body.chat_template_kwargs, body.reasoning_effort)),),
        asked=body.asked(_max_tokens(body), top_logprobs=body.top_logprobs),
        n=body.n or 1,
        stream=bool(body.stream),
        model=body.model,
        prompt_param="messages",
        names=body.names("max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"),
        tool_choice=choice,
        forced_tool=forced,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestRejected(f"max_tokens is {old} and max_completion_tokens is {new}: send one of them.", param="max_completion_tokens")
    return old if new is None else new


def template_options(given: Mapping[str, JsonValue] | None, effort: str | None) -> dict[str, Json]:
    """Names for the template. What it fills with its own values is refused."""
    options: dict[str, Json] = dict(given or {})
    if reserved := next((f"chat_template_kwargs.{name}" for name in options if name in _RESERVED_OPTIONS), None):
        raise RequestRejected(f"{reserved} is set by the gateway: leave it out.", param=reserved)
    if effort is not None:
        options["reasoning_effort"] = effort
    return options
