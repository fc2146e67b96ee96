"""Chat templates: the Jinja program of a model folder that writes a conversation as one text.

The environment offers what `transformers` offers its templates (the same filters, globals and block handling), so the text
is the same; templates come from strangers and run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn, TypeAlias, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from midflight.errors import ModelNotFound, RequestRejected
from midflight.types import Json

Message: TypeAlias = Mapping[str, Json]
"""One message of a conversation: `role`, `content` and whatever else the template reads."""

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

_MAX_SAID = 500
"""Letters of a template's message that are passed on: it may quote the conversation."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for training tools; here it renders its body and nothing else."""

    tags = {"generation"}  # noqa: RUF012  (the class attribute Jinja reads)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `special_tokens` are the texts it may name: `bos_token`, `eos_token`, ..."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._compiled = _ENVIRONMENT.from_string(source)
        except Exception as error:  # a stranger's program: compiling it may fail in any way
            raise ModelNotFound(f"compiling the chat template failed: {error}. Correct chat_template in the model folder.") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = False,
        options: Mapping[str, Json] | None = None,
    ) -> str:
        """The conversation as one text. A template that refuses it (`raise_exception`) or fails in any other way raises
        `RequestRejected`, and so does a conversation that holds half a surrogate pair, which no tokenizer can read.

        `options` are names of the template's own, such as `enable_thinking`.
        """
        chat = [as_templates_read(message) for message in messages]
        try:
            text = self._compiled.render(
                **{**(options or {}), **self._special_tokens},
                messages=chat,
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
            text.encode("utf-8")
        except Exception as error:  # a stranger's program: it may fail in any way, and that costs one request
            raise RequestRejected(
                f"the model's chat template refused the messages: {_told(error)}. Change them to what it expects.", param="messages"
            ) from error
        return text


def as_templates_read(message: Message) -> dict[str, Json]:
    """A message in the form that templates expect, from the form that clients send.

    Arguments of tool calls are objects where their text is one (templates write them with `tojson`); reasoning stands under
    each name that templates know; an assistant's content is a text, never `None`. All else is as sent.
    """
    read = _with_reasoning_names(message)
    if read.get("role") == "assistant" and read.get("content") is None:
        read["content"] = ""
    calls = read.get("tool_calls")
    if isinstance(calls, list):
        read["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return read


def _with_parsed_arguments(call: Json) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = cast(Json, json.loads(cast(str, function["arguments"])))
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _with_reasoning_names(message: Message) -> dict[str, Json]:
    """The message with its reasoning under each name that templates read (`reasoning_content`, and gpt-oss's `thinking`)."""
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _told(error: Exception) -> str:
    """What the template says, as it can be written; the name of what went wrong inside it."""
    said = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    return said[:_MAX_SAID].encode("utf-8", "replace").decode()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Json, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which a model never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    """The calendar date some templates print in their system message."""
    return datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControls])
    environment.filters["tojson"] = _to_json
    names = cast(dict[str, object], environment.globals)
    names.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


_ENVIRONMENT = _environment()
