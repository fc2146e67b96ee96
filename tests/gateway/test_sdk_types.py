"""What is inside the fields of the SDKs, and what they read: blocks, items and tools that they can send; answers and events by their types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import anthropic.types as claude
import pydantic
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk, chat_completion_message_param
from openai.types.responses import Response, ResponseStreamEvent, response_input_item_param, tool_param
from tests.gateway.asked import frames
from tests.gateway.offered import ScriptedGenerator, offered

from midflight.errors import RequestRejected
from midflight.gateway.answers.plan import EngineLimits
from midflight.gateway.dialects.chat import ChatExchange
from midflight.gateway.dialects.messages import MessagesExchange
from midflight.gateway.dialects.responses import ResponsesExchange
from midflight.gateway.dialects.unread_fields import TOOLS
from midflight.testing.virtual_time import run_virtual
from midflight.types import Feature

HI = [{"role": "user", "content": "hi"}]


def kinds(union: Any) -> Iterator[str]:
    """The `type` of every member of a union of typed dictionaries."""
    if get_origin(union) is Annotated:
        yield from kinds(get_args(union)[0])
    elif (arguments := get_args(union)) and not isinstance(union, type):
        for argument in arguments:
            yield from kinds(argument)
    elif hasattr(union, "__annotations__"):
        hint = get_type_hints(union, include_extras=False).get("type")
        yield from (kind for kind in get_args(hint) or () if isinstance(kind, str))


def asked(dialect: Any, body: dict[str, Any]) -> Any:
    """What becomes of a body: the exchange, or the refusal."""
    try:
        return dialect(json.dumps({"model": "m", **body}).encode())
    except RequestRejected as refused:
        return refused


def test_every_tool_of_the_sdks_is_read_or_left_out_under_a_name_that_is_listed() -> None:
    """Whoever upgrades an SDK lists its new tools in `policy.TOOLS`."""
    found = set(kinds(tool_param.ToolParam)) | set(kinds(claude.ToolUnionParam))
    assert {"web_search", "namespace", "custom"} <= found and len(found) > 20
    for kind in found - {"function", "custom", "namespace"}:
        tool = {"type": kind, "name": "t"}
        for dialect, body in ((ResponsesExchange, {"input": "hi"}), (MessagesExchange, {"messages": HI, "max_tokens": 2})):
            exchange = asked(dialect, {**body, "tools": [tool]})
            (name,) = exchange.unread.fields
            assert name.removeprefix("tools.") in TOOLS and exchange.call.sources[0].tools == (), kind


@pytest.mark.parametrize("union", [claude.ContentBlockParam], ids=["messages"])
def test_every_block_of_anthropics_sdk_is_read_or_refused_by_its_name(union: Any) -> None:
    found = set(kinds(union))
    assert {"text", "image", "document"} <= found
    for kind in found:
        for role in ("user", "assistant"):
            messages = [{"role": role, "content": [{"type": kind}]}, *HI]
            refused = asked(MessagesExchange, {"messages": messages, "max_tokens": 2})
            if isinstance(refused, RequestRejected):
                assert refused.param is not None and refused.param.startswith("messages.0.content.0")


def test_every_item_of_openais_sdk_is_read_or_refused_by_its_name() -> None:
    found = set(kinds(response_input_item_param.ResponseInputItemParam))
    assert {"message", "function_call", "custom_tool_call"} <= found
    for kind in found:
        refused = asked(ResponsesExchange, {"input": [{"type": kind}, {"role": "user", "content": "hi"}]})
        if isinstance(refused, RequestRejected):
            assert refused.param is not None and refused.param.startswith("input.0"), kind


def test_every_field_of_a_message_of_openais_sdk_is_read_handed_on_or_refused() -> None:
    for member in get_args(chat_completion_message_param.ChatCompletionMessageParam):
        role = get_args(get_type_hints(member)["role"])[0]
        for name in get_type_hints(member).keys() - {"role", "content"}:
            message = {"role": role, "content": "x", "tool_call_id": "c", name: {"odd": 1}}
            outcome = asked(ChatExchange, {"messages": [message]})
            if isinstance(outcome, RequestRejected):
                assert outcome.param is not None and outcome.param.startswith("messages.0.")
            else:
                assert name in outcome.call.sources[0].messages[0] or name in outcome.unread.fields or name == "tool_call_id"


def test_counting_takes_what_a_message_takes() -> None:
    counted = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
    assert counted <= set(message_create_params.MessageCreateParamsBase.__annotations__)


# --- Answers ----------------------------------------------------------------------------------------------------------

TEXT = 'so\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|end|>'
CUSTOM = '<tool_call>\n{"name": "patch", "arguments": {"input": "x"}}\n</tool_call><|end|>'
F = {"name": "f", "parameters": {"type": "object"}}
CALLS: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": HI, "tools": [{"type": "function", "function": F}], "logprobs": True},
        ChatCompletion,
        ChatCompletionChunk,
    ),
    "completions": ("/v1/completions", {"prompt": "hi", "logprobs": 1}, Completion, Completion),
    "responses": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "function", **F}, {"type": "custom", "name": "patch"}], "top_logprobs": 1},
        Response,
        ResponseStreamEvent,
    ),
    "messages": (
        "/v1/messages",
        {"messages": HI, "tools": [{"name": "f", "input_schema": {"type": "object"}}], "max_tokens": 200},
        claude.Message,
        claude.RawMessageStreamEvent,
    ),
}


@pytest.mark.parametrize("dialect", CALLS)
@pytest.mark.parametrize("text", [TEXT, CUSTOM, "plain<|end|>"], ids=["call", "custom", "text"])
def test_answers_and_events_are_of_the_sdks_own_types(dialect: str, text: str) -> None:
    """By pydantic, which takes no event and no block of a type that the SDK does not list."""
    path, fields, whole, event = CALLS[dialect]

    async def main() -> None:
        generator = ScriptedGenerator(texts=[text, text])
        async with offered(generator, limits=EngineLimits(2048, 262, features=frozenset(Feature))) as it:
            body = {"model": "policy", "max_tokens": 200, **fields}
            if dialect == "responses":
                del body["max_tokens"]
            answer = await it.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            pydantic.TypeAdapter[Any](whole).validate_json(answer.content, strict=False)
            streamed = await it.http.post(path, json=body | {"stream": True})
            adapter = pydantic.TypeAdapter[Any](event)
            found = frames(streamed.text)
            assert len(found) > 2
            for frame in found:
                for choice in frame["choices"] if dialect == "completions" else ():
                    choice["finish_reason"] = choice["finish_reason"] or "stop"  # the SDK has one type for frames and whole answers
                adapter.validate_python(frame)

    run_virtual(main())
