"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from collections.abc import Iterable, Sequence
from typing import Annotated, cast

import msgspec
from pydantic import Field, JsonValue, WithJsonSchema

from midflight.errors import RequestRejected
from midflight.gateway.answers.answer import Answer, Event, News
from midflight.gateway.dialects import exchange, options, tool_bodies
from midflight.gateway.dialects.chat_messages import (
    arguments_text,
    assistant,
    ending,
    tool_call,
    tool_result,
)
from midflight.gateway.dialects.fields import PromptTop, Tokens, TopLogprobs, filled, parse
from midflight.gateway.dialects.resent import ResentBody, SentMessages
from midflight.gateway.dialects.sampling_body import SamplingBody
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.request import CompletionCall, Messages
from midflight.text import Ending, Message, Tokenizer
from midflight.text.formats import (
    ArgumentsPiece,
    AssistantMessage,
    ContentPiece,
    Piece,
    ReasoningPiece,
    ToolCall,
)
from midflight.types import FinishReason, Json
from midflight.wire.edge import sse

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles, with the names that templates know."""

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which clients send reasoning back. The first one that holds text counts."""

_READ = {"role", "content", "tool_calls", "tool_call_id", "refusal", *_REASONING}
_PART = frozenset({"type", "text", "refusal"})

JsonObject = dict[str, JsonValue]

_MessageBody = Annotated[
    dict[str, JsonValue],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "role": {"enum": list(ROLES)},
                "content": {
                    "type": ["string", "array", "null"],
                    "items": {"type": "object", "required": ["type", "text"]},
                },
            },
            "required": ["role"],
        }
    ),
]


class ChatBody(SamplingBody):
    messages: Annotated[list[_MessageBody], Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[tool_bodies.ToolBody], Field(max_length=tool_bodies.MAX_TOOLS)] | None = (
        None
    )
    tool_choice: tool_bodies.ToolChoiceBody = None
    parallel_tool_calls: bool | None = None
    prompt_logprobs: PromptTop | None = None
    reasoning_effort: options.ReasoningEffort | None = None
    verbosity: str | None = None
    enable_thinking: bool | None = None
    thinking: bool | dict[str, JsonValue] | None = None
    reasoning: dict[str, JsonValue] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None


def chat_call(
    body: ChatBody,
    unread: UnreadFields,
    sent: SentMessages | None = None,
) -> CompletionCall:
    """The call that a chat asks for. `sent` says which of its messages were read before. Raises
    `RequestRejected` if its fields contradict each other.
    """
    if body.top_logprobs and not body.logprobs:
        raise RequestRejected(
            f"top_logprobs is {body.top_logprobs} without logprobs: send logprobs true with it.",
            param="top_logprobs",
        )
    chosen = tool_bodies.NONE
    if body.tools or body.tool_choice is not None:
        tools = tool_bodies.tools_of(tool_bodies.placed(body.tools))
        chosen = tool_bodies.choice_of(body.tool_choice, tools)
    num_left = 0
    messages: Sequence[Message]
    if sent is None:
        messages = conversation(body.messages, unread)
    else:
        messages, num_left = sent.read(body.messages, conversation, unread)
    template = _options(body, unread)
    prompt = Messages(messages, chosen.tools, template, _ending(body, messages), num_left)
    return CompletionCall(
        sources=(prompt,),
        asked=body.asked(_max_tokens(body), top_logprobs=body.top_logprobs),
        n=body.n or 1,
        prompt_logprobs=body.prompt_logprobs,
        stream=bool(body.stream),
        model=body.model,
        prompt_param="messages",
        names=body.names(
            "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        ),
        tool_choice=chosen.choice,
        forced_tool=chosen.forced,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )


def _options(body: ChatBody, unread: UnreadFields) -> dict[str, Json]:
    if options.FIELDS.isdisjoint(body.model_fields_set):
        return {}
    effort, enabled = options.reasoning(body.reasoning, unread)
    thinks = options.thinks(body.enable_thinking, body.thinking, unread)
    return options.template_options(
        body.chat_template_kwargs,
        body.reasoning_effort or effort,
        verbosity=body.verbosity,
        thinks=enabled if thinks is None else thinks,
    )


def _ending(body: ChatBody, messages: Sequence[Message]) -> Ending:
    if body.continue_final_message and body.add_generation_prompt:
        fault = "continue_final_message and add_generation_prompt are both true: send one of them"
        raise RequestRejected(f"{fault}.", param="continue_final_message")
    if body.continue_final_message:
        return ending(messages, opens=True)
    return Ending.PLAIN if body.add_generation_prompt is False else Ending.TURN


def _max_tokens(body: ChatBody) -> int | None:
    old = body.max_tokens
    new = body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestRejected(
            f"max_tokens is {old} and max_completion_tokens is {new}: send one of them.",
            param="max_completion_tokens",
        )
    return old if new is None else new


def conversation(
    messages: Sequence[JsonObject], unread: UnreadFields, first: int = 0
) -> tuple[Message, ...]:
    """Checks every message. A refusal names the place, such as
    `messages.2.tool_calls.0.function.name`; `first` is that of the first message.
    """
    return tuple(
        [
            _plain(message) or _read_message(message, f"messages.{place}", unread)
            for place, message in enumerate(messages, first)
        ]
    )


def _plain(message: JsonObject) -> Message | None:
    """Reads a message that has only a role and a text, as most have. Such a message needs no
    further check. Returns `None` for any other message.
    """
    role = message.get("role")
    content = message.get("content")
    if len(message) != 2 or not isinstance(role, str) or not isinstance(content, str):
        return None
    if role == "tool" or role not in ROLES:
        return None
    return {"role": ROLES[role], "content": content}


def _read_message(message: JsonObject, param: str, unread: UnreadFields) -> Message:
    """Reads one message. Fields without a value are dropped; unknown fields are left to the
    template.
    """
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        remedy = "send role tool" if role == "function" else f"send one of {', '.join(ROLES)}"
        raise RequestRejected(f"{param}.role is {role!r:.80}: {remedy}.", param=f"{param}.role")
    _check_fields(message, role, param)
    kept: dict[str, Json] = {
        name: value
        for name, value in message.items()
        if name not in _READ and value not in (None, [], {})
    }
    content = _read_content(message, role, param, unread)
    match role:
        case "tool":
            return kept | tool_result(
                content, call_id=filled(message.get("tool_call_id"), f"{param}.tool_call_id")
            )
        case "assistant":
            return kept | assistant(
                content, reasoning=_read_reasoning(message), calls=_read_calls(message, param)
            )
        case _:
            return kept | {"role": ROLES[role], "content": content}


def _check_fields(message: JsonObject, role: str, param: str) -> None:
    """Refuses fields that no message, or no message of this role, may hold."""
    for name in ("function_call", "audio"):
        if message.get(name):
            remedy = (
                "send tool_calls instead"
                if name == "function_call"
                else "send its meaning as content"
            )
            raise RequestRejected(
                f"{param}.{name} is not supported here: {remedy}.", param=f"{param}.{name}"
            )
    for name in ("name", "refusal", *_REASONING):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise RequestRejected(
                f"{param}.{name} is {value!r:.80}: send a text, or leave it out.",
                param=f"{param}.{name}",
            )
    if message.get("tool_calls") and role != "assistant":
        raise RequestRejected(
            (
                f"{param}.tool_calls stands in a message of role {role}: send it in one of role "
                "assistant."
            ),
            param=f"{param}.tool_calls",
        )


def _read_content(message: JsonObject, role: str, param: str, unread: UnreadFields) -> str:
    """The text of a message. Only an assistant's text may be missing; then its refusal is the
    text.
    """
    content = message.get("content")
    if content is None and role != "assistant":
        raise RequestRejected(
            f"{param}.content is missing: send a text, or a list of text parts.",
            param=f"{param}.content",
        )
    if not content and role == "assistant":
        return str(message.get("refusal") or "")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRejected(
            f"{param}.content is {content!r:.80}: send a text, or a list of text parts.",
            param=f"{param}.content",
        )
    return "".join(
        _read_part(part, f"{param}.content.{place}", unread) for place, part in enumerate(content)
    )


def _read_part(part: JsonValue, param: str, unread: UnreadFields) -> str:
    text: JsonValue = None
    if isinstance(part, dict) and part.get("type") in ("text", "refusal"):
        text = part.get(str(part["type"]))
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else part
        raise RequestRejected(
            f'{param} is a part of type {kind!r:.80}: send parts of type "text" only.', param=param
        )
    if isinstance(part, dict) and len(part) > 2:
        unread.rest(part, _PART, param)
    return text


def _read_reasoning(message: JsonObject) -> str:
    for name in _REASONING:
        if message.get(name):
            return str(message[name])
    return ""


def _read_calls(message: JsonObject, param: str) -> list[Json]:
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise RequestRejected(
            f"{param}.tool_calls is {calls!r:.80}: send a list of calls.",
            param=f"{param}.tool_calls",
        )
    return [_read_call(call, f"{param}.tool_calls.{place}") for place, call in enumerate(calls)]


def _read_call(call: JsonValue, param: str) -> Json:
    if not isinstance(call, dict):
        raise RequestRejected(
            f"{param} is {call!r:.80}: send an object with id, type and function.", param=param
        )
    if call.get("type") == tool_bodies.CUSTOM:
        return tool_bodies.custom_call(
            call.get("custom"), f"{param}.custom", call_id=filled(call.get("id"), f"{param}.id")
        )
    if call.get("type", "function") != "function":
        raise RequestRejected(
            f'{param}.type is {call["type"]!r:.80}: send "function" or "custom".',
            param=f"{param}.type",
        )
    function = call.get("function")
    if not isinstance(function, dict):
        raise RequestRejected(
            f"{param}.function is {function!r:.80}: send an object with name and arguments.",
            param=f"{param}.function",
        )
    return tool_call(
        call_id=filled(call.get("id"), f"{param}.id"),
        name=filled(function.get("name"), f"{param}.function.name"),
        arguments=arguments_text(function.get("arguments"), f"{param}.function.arguments"),
    )


_Object = dict[str, Json]
_encode = msgspec.json.encode


class ChatExchange:
    """One chat request."""

    def __init__(self, body: bytes, resent: ResentBody | None = None) -> None:
        """`resent` says that the body begins as an earlier one did."""
        self.unread = UnreadFields()
        parsed = parse(ChatBody, resent.short if resent else body, unread=self.unread)
        self.sent = SentMessages.of(body, resent, lambda: ChatExchange(body).messages)
        self.call = chat_call(parsed, self.unread, self.sent)
        self._custom = tool_bodies.custom_names(parsed.tools) if parsed.tools else frozenset[str]()
        """Tools whose calls are sent as a text."""
        self._logprobs = bool(parsed.logprobs)
        self._token_ids = bool(parsed.return_token_ids)
        self._names_as_ids = bool(parsed.return_tokens_as_token_ids)
        self._include_usage = parsed.include_usage
        self._usage_so_far = parsed.continuous_usage
        self._num_streamed = 0
        """Tokens streamed so far, of all choices."""
        self._is_plain = not (self._logprobs or self._token_ids or self._usage_so_far)
        """True if two frames with content differ only in their text."""

    @property
    def messages(self) -> Sequence[Message]:
        """Its conversation."""
        source = self.call.sources[0]
        assert isinstance(source, Messages), "a chat is made of messages"
        return source.messages

    def whole(self, reply: exchange.Reply, answers: Sequence[Answer]) -> Json:
        body = _envelope(
            reply, "chat.completion", [self._choice(reply, answer) for answer in answers]
        )
        body["usage"] = exchange.usage(answers)
        return body | self._of_prompt(reply, answers[0])

    def opening(self, reply: exchange.Reply) -> Iterable[Json]:
        for answer in reply.job.answers:
            chunk = self._chunk(reply, answer.index, {"role": "assistant", "content": ""})
            if answer is reply.job.answers[0]:
                chunk |= self._of_prompt(reply, answer)
            yield chunk

    def frames(self, reply: exchange.Reply, event: Event) -> "Iterable[Json | bytes]":
        if (
            self._is_plain
            and isinstance(event, News)
            and len(event.pieces) == 1
            and isinstance(event.pieces[0], ContentPiece)
        ):
            before, after = reply.around.get(event.index) or self._template(reply, event.index)
            return (before + _encode(event.pieces[0].text) + after,)
        frames: list[Json] = []
        if isinstance(event, Answer):
            for delta in self._deltas(event.tail_pieces, event.request_id):
                frames.append(self._chunk(reply, event.index, delta))
            frames.append(self._chunk(reply, event.index, {}, **self._finish(event)))
            return frames
        self._num_streamed += len(event.token_ids)
        deltas = self._deltas(event.pieces, reply.job.answers[event.index].request_id)
        told = self._of_tokens(reply.tokenizer, event)
        if told and not deltas:
            deltas = [{}]
        for delta in deltas:
            frames.append(self._chunk(reply, event.index, delta, **told))
            told = {}
        return frames

    def closing(self, reply: exchange.Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        if self._include_usage:
            body = _envelope(reply, "chat.completion.chunk", [])
            body["usage"] = exchange.usage(answers)
            yield body

    def _of_prompt(self, reply: exchange.Reply, answer: Answer) -> _Object:
        """The fields about the prompt, which are sent once for all choices."""
        told: _Object = {}
        if self._token_ids:
            told["prompt_token_ids"] = list(answer.prompt.ids)
        if self.call.prompt_logprobs is not None:
            told["prompt_logprobs"] = exchange.prompt_logprobs(
                reply.tokenizer, answer.prompt_logprobs
            )
        return told

    def _choice(self, reply: exchange.Reply, answer: Answer) -> Json:
        turn = answer.turn
        choice: _Object = {
            "index": answer.index,
            "message": self._message(answer.message, answer.request_id),
            "logprobs": self._content(
                reply.tokenizer, turn.output_ids, turn.logprobs, answer.top_logprobs
            ),
            **self._finish(answer),
        }
        if self._token_ids:
            choice["token_ids"] = list(turn.output_ids)
        return choice

    def _finish(self, answer: Answer) -> _Object:
        finish = answer.turn.finish
        called = bool(answer.message.tool_calls) and finish.reason is FinishReason.STOP
        ended: _Object = {"finish_reason": "tool_calls" if called else finish.reason.value}
        if isinstance(finish.matched, str):
            ended["stop_reason"] = finish.matched
        if self._token_ids:
            ended["weight_versions"] = exchange.weight_versions(answer.turn)
        return ended

    def _of_tokens(self, tokenizer: Tokenizer, event: News) -> _Object:
        """The fields about the tokens themselves. They are sent with the tokens, even while the
        text is held back.
        """
        told: _Object = {}
        if self._logprobs:
            told["logprobs"] = self._content(
                tokenizer, event.token_ids, event.logprobs, event.top_logprobs
            )
        if self._token_ids:
            told["token_ids"] = list(event.token_ids)
        return told

    def _content(
        self,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top: exchange.Alternatives,
    ) -> Json:
        if not self._logprobs:
            return None
        return {
            "content": exchange.logprob_entries(
                tokenizer, token_ids, logprobs, top, as_ids=self._names_as_ids
            ),
            "refusal": None,
        }

    def _chunk(self, reply: exchange.Reply, index: int, delta: _Object, **more: Json) -> _Object:
        choice: _Object = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            **more,
        }
        chunk = _envelope(reply, "chat.completion.chunk", [choice])
        if self._usage_so_far:
            chunk["usage"] = exchange.usage_so_far(reply.job.answers, self._num_streamed)
        elif self._include_usage:
            chunk["usage"] = None
        return chunk

    def _template(self, reply: exchange.Reply, index: int) -> tuple[bytes, bytes]:
        """The bytes before and after the text in an event of content."""
        event = sse(self._chunk(reply, index, {"content": ""}))
        before, content, after = event.partition(b'"content":""')
        reply.around[index] = (before + content[:-2], after)
        return reply.around[index]

    def _message(self, message: AssistantMessage, request_id: str) -> Json:
        """A whole message. The content is null in a message that only calls tools."""
        written: _Object = {
            "role": "assistant",
            "content": message.content or (None if message.tool_calls else ""),
            "refusal": None,
        }
        if message.reasoning:
            written |= _reasoning(message.reasoning)
        if message.tool_calls:
            written["tool_calls"] = [
                self._call(call, request_id, index) for index, call in enumerate(message.tool_calls)
            ]
        return written

    def _deltas(self, pieces: Sequence[Piece], request_id: str) -> list[_Object]:
        """The deltas of some pieces. A call is first announced without its arguments, because
        clients that collect streams expect that. The arguments follow as they are read.
        """
        deltas: list[_Object] = []
        for piece in pieces:
            if isinstance(piece, ContentPiece):
                deltas.append({"content": piece.text})
            elif isinstance(piece, ReasoningPiece):
                deltas.append(_reasoning(piece.text))
            elif isinstance(piece, ArgumentsPiece):
                if piece.text:
                    deltas.append(_of_call(piece.index, {"function": {"arguments": piece.text}}))
            else:
                announced = self._call(piece.call, request_id, piece.index, told=False)
                deltas.append(_of_call(piece.index, announced))
                if not piece.begins:
                    written = self._call(piece.call, request_id, piece.index)
                    kind = str(written["type"])
                    part = "input" if kind == tool_bodies.CUSTOM else "arguments"
                    text = cast(_Object, written[kind])[part]
                    deltas.append(_of_call(piece.index, {kind: {part: text}}))
        return deltas

    def _call(self, call: ToolCall, request_id: str, index: int, *, told: bool = True) -> _Object:
        """A call as JSON. With `told` its arguments are included."""
        if call.name in self._custom:
            written: _Object = {
                "name": call.name,
                "input": tool_bodies.custom_input(call.arguments) if told else "",
            }
            return {
                "id": exchange.call_id(request_id, index),
                "type": tool_bodies.CUSTOM,
                tool_bodies.CUSTOM: written,
            }
        function: _Object = {"name": call.name, "arguments": call.arguments if told else ""}
        return {"id": exchange.call_id(request_id, index), "type": "function", "function": function}


def _of_call(index: int, news: _Object) -> _Object:
    """A delta with news of one call."""
    return {"tool_calls": [{"index": index, **news}]}


def _reasoning(text: str) -> _Object:
    """The reasoning, under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _envelope(reply: exchange.Reply, kind: str, choices: list[Json]) -> _Object:
    return {
        "id": f"chatcmpl-{reply.job.request_id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
    }
