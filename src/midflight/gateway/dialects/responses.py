"""The answers of OpenAI's responses, `POST /v1/responses`, whole or as events. A session keeps them
(`sessions.responses`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import cast

from midflight.gateway.answers.answer import Answer, Event, News
from midflight.gateway.dialects.chat_messages import assistant, tool_call
from midflight.gateway.dialects.exchange import (
    Alternatives,
    Exchange,
    Reply,
    call_id,
    logprob_entries,
    weight_versions,
)
from midflight.gateway.dialects.fields import parse
from midflight.gateway.dialects.responses_input import FormatBody, ResponsesBody, responses_call
from midflight.gateway.dialects.tool_bodies import (
    CUSTOM,
    NAMESPACE,
    FunctionTool,
    OfferedTool,
    custom_input,
)
from midflight.gateway.dialects.unread_fields import UnreadFields
from midflight.gateway.sessions.request import ToolChoice
from midflight.gateway.sessions.responses import KeptResponses
from midflight.text import Message, Tokenizer
from midflight.text.formats import ArgumentsPiece, CallPiece, ContentPiece, Piece, ReasoningPiece
from midflight.types import FinishReason, Json
from midflight.wire.edge import Fault


class ResponsesExchange:
    """One request for a response."""

    def __init__(self, body: bytes, kept: KeptResponses | None = None) -> None:
        """`kept` holds the earlier responses of the session."""
        self.unread = UnreadFields()
        self._body = parse(ResponsesBody, body, unread=self.unread)
        self._kept = KeptResponses() if kept is None else kept
        self.call, self._said = responses_call(self._body, self.unread, self._kept)
        self._tools = {str(each.body.name): each for each in self._body.offered}
        self._items: OutputItems | None = None
        self._untold: list[Json] = []
        """Log-probabilities of tokens whose text has not been sent yet."""

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        (answer,) = answers
        items = self._growing(reply)
        for _ in items.add(answer.pieces):
            pass  # the events are only for streams
        for _ in self._end(items, reply, answer):
            pass
        return self._finished(reply, items, answer)

    def opening(self, reply: Reply) -> Iterable[Json]:
        started = self._response(reply, "in_progress", [])
        yield {"type": "response.created", "sequence_number": 0, "response": started}
        yield {"type": "response.in_progress", "sequence_number": 1, "response": started}

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        items = self._growing(reply)
        if isinstance(event, News):
            self._untold += self._logprobs(
                reply.tokenizer, event.token_ids, event.logprobs, event.top_logprobs
            )
            yield from items.add(event.pieces, self._told_with(event.pieces))
        else:
            yield from items.add(event.tail_pieces, self._told_with(event.tail_pieces))
            yield from self._end(items, reply, event)

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        (answer,) = answers
        items = self._growing(reply)
        response = self._finished(reply, items, answer)
        yield items.event(f"response.{response['status']}", response=response)

    def broken(self, error: Json) -> Json:
        """The last event of a stream that failed. It holds `error` twice, because the SDK reads it
        from another place when it raises it.
        """
        assert isinstance(error, dict)
        items = self._items or OutputItems("")
        return items.event(
            "error", code=error["code"], message=error["message"], param=error["param"], error=error
        )

    def _growing(self, reply: Reply) -> OutputItems:
        self._items = self._items or OutputItems(reply.job.request_id, tools=self._tools)
        return self._items

    def _end(self, items: OutputItems, reply: Reply, answer: Answer) -> Iterable[Json]:
        turn = answer.turn
        logprobs = self._logprobs(
            reply.tokenizer, turn.output_ids, turn.logprobs, answer.top_logprobs
        )
        return items.end(complete=not _cut(answer), logprobs=logprobs)

    def _finished(self, reply: Reply, items: OutputItems, answer: Answer) -> dict[str, Json]:
        turn = answer.turn
        body = self._response(
            reply, "incomplete" if _cut(answer) else "completed", list(items.items)
        )
        body["usage"] = _usage(len(turn.prompt_ids), len(turn.output_ids))
        if _cut(answer):
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._body.return_token_ids:
            body["prompt_token_ids"] = list(turn.prompt_ids)
            body["token_ids"] = list(turn.output_ids)
            body["weight_versions"] = weight_versions(turn)
        if self._body.store is not False:
            messages = (*self._said, _reply(answer))
            self._kept.keep(
                body, messages, conversation=self._body.conversation_name, deltas=items.deltas
            )
        return body

    def _told_with(self, pieces: Sequence[Piece]) -> list[Json]:
        """Log-probabilities to send with these pieces. Reasoning and calls carry none."""
        if not any(isinstance(piece, ContentPiece) for piece in pieces):
            return []
        told = self._untold
        self._untold = []
        return told

    def _logprobs(
        self,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top: Alternatives,
    ) -> list[Json]:
        if not self._body.wants_logprobs:
            return []
        return logprob_entries(
            tokenizer, token_ids, logprobs, top, as_ids=bool(self._body.return_tokens_as_token_ids)
        )

    def _response(self, reply: Reply, status: str, output: list[Json]) -> dict[str, Json]:
        """The response, with the parameters of the request and of the sampling."""
        body = self._body
        sampling = reply.job.answers[0].request.sampling
        reasoning = body.reasoning
        text: dict[str, Json] = {"format": _format(body.format)}
        if body.text and body.text.verbosity:
            text["verbosity"] = body.text.verbosity
        conversation: Json = None
        if body.conversation_name is not None:
            conversation = {"id": body.conversation_name}
        return {
            "id": f"resp_{reply.job.request_id}",
            "object": "response",
            "created_at": reply.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": reply.model,
            "output": output,
            "usage": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": sampling.top_logprobs,
            "tools": [_tool(tool) for tool in body.tools or () if tool.passed_over() is None],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.call.parallel_tool_calls,
            "text": text,
            "reasoning": {
                "effort": reasoning and reasoning.effort,
                "summary": reasoning and reasoning.summary,
            },
            "truncation": "disabled",
            "metadata": dict(body.metadata or {}),
            "user": body.user,
            "safety_identifier": body.safety_identifier,
            "prompt_cache_key": body.prompt_cache_key,
            "service_tier": "default",
            "store": body.store is not False,
            "background": False,
            "previous_response_id": body.previous_response_id,
            "conversation": conversation,
        }

    def _tool_choice(self) -> Json:
        if self.call.forced_tool is not None:
            tool = self._tools[self.call.forced_tool]
            return {"type": tool.body.type, **tool.names}
        given = self._body.tool_choice
        return ToolChoice.AUTO.value if given is None else cast(Json, given)


def repeated(
    response: dict[str, Json], deltas: Sequence[Sequence[int]], *, after: int = -1
) -> Iterator[Json]:
    """The events of a kept response, in the texts that it came in, after the one with the number
    `after`.
    """
    items = OutputItems("")
    started = {name: value for name, value in response.items() if name not in _AT_THE_END}
    started |= {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Json]] = [
        {"type": "response.created", "sequence_number": 0, "response": started},
        {"type": "response.in_progress", "sequence_number": 1, "response": started},
    ]
    output = cast("list[dict[str, Json]]", response["output"])
    for item, lengths in zip(output, deltas, strict=True):
        events += items.repeat(item, lengths)
    events.append(items.event(f"response.{response['status']}", response=response))
    return (event for event in events if cast(int, event["sequence_number"]) > after)


_AT_THE_END = ("prompt_token_ids", "token_ids", "weight_versions")
"""Fields that a response gets when it is complete, beside those that are null before."""


def _said(item: Mapping[str, Json]) -> tuple[str, Sequence[Json]]:
    """The text of an item that is complete, and its log-probabilities."""
    match item["type"]:
        case "message" | "reasoning":
            (part,) = cast("list[dict[str, Json]]", item["content"])
            return str(part["text"]), cast("list[Json]", part.get("logprobs") or [])
        case "custom_tool_call":
            return str(item["input"]), ()
        case _:
            return str(item["arguments"]), ()


def broken(exchange: Exchange, fault: Fault) -> Json:
    """The last frame of a stream of this dialect that failed."""
    assert isinstance(exchange, ResponsesExchange) and isinstance(fault.body, dict)
    return exchange.broken(fault.body["error"])


def _reply(answer: Answer) -> Message:
    """The message that its items would become if they were sent back."""
    said = answer.message
    calls = [
        tool_call(
            call_id=call_id(answer.request_id, index), name=call.name, arguments=call.arguments
        )
        for index, call in enumerate(said.tool_calls)
    ]
    return assistant(said.content, reasoning=said.reasoning, calls=calls)


def _cut(answer: Answer) -> bool:
    return answer.turn.finish.reason is FinishReason.LENGTH


def _tool(tool: FunctionTool) -> Json:
    if tool.type == NAMESPACE:
        inner = [_tool(each) for each in tool.tools or () if each.passed_over() is None]
        return {
            "type": NAMESPACE,
            "name": tool.name,
            "description": tool.description or "",
            "tools": inner,
        }
    if tool.type == CUSTOM:
        return {"type": CUSTOM, "name": tool.name, "description": tool.description}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


def _format(given: FormatBody | None) -> Json:
    if given is None or given.type != "json_schema":
        return {"type": "text" if given is None else given.type}
    return {
        "type": given.type,
        "name": given.name,
        "description": given.description,
        "schema": given.schema_,
        "strict": bool(given.strict),
    }


def _usage(input_tokens: int, output_tokens: int) -> Json:
    """Token counts. Cached tokens and reasoning are not counted separately."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


_NO_TOOLS: Mapping[str, OfferedTool] = {}
OPENING_EVENTS = 2
"""`response.created` and `response.in_progress` come before all events of items."""


class OutputItems:
    """The items of one answer. Each event has the next sequence number."""

    def __init__(self, request_id: str, *, tools: Mapping[str, OfferedTool] = _NO_TOOLS) -> None:
        """`tools` holds the tools by the model's names for them. Calls are sent under the client's
        names.
        """
        self.items: list[dict[str, Json]] = []
        """The items so far. They grow with each piece, and are complete after `end`."""
        self.deltas: list[list[int]] = []
        """The lengths of the texts that each item came in."""
        self.num_events = OPENING_EVENTS
        self._request_id = request_id
        self._tools = tools
        self._text: str | None = None
        """The text of the open item. It is None if all items are done."""
        self._logprobs: list[Json] = []
        """Log-probabilities of the open item's tokens."""

    def event(self, kind: str, **fields: Json) -> dict[str, Json]:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}

    def add(
        self, pieces: Iterable[Piece], logprobs: Sequence[Json] = ()
    ) -> Iterator[dict[str, Json]]:
        """Adds pieces of the answer. `logprobs` belong to tokens that were not sent yet. They go
        with the first new text of a message.
        """
        for piece in pieces:
            match piece:
                case ContentPiece(text):
                    yield from self._grow("message", text, logprobs)
                    logprobs = ()
                case ReasoningPiece(text):
                    yield from self._grow("reasoning", text)
                case CallPiece():
                    yield from self._add_call(piece)
                case ArgumentsPiece():
                    yield from self._argue(piece.text, last=piece.last)

    def end(self, *, complete: bool, logprobs: Sequence[Json] = ()) -> Iterator[dict[str, Json]]:
        """Ends the last item. An answer without any piece is an empty message. `logprobs` belong to
        all tokens of the answer. The first message carries them.
        """
        if not self.items:
            yield from self._open("message")
        kinds = [item["type"] for item in self.items]
        first = kinds.index("message") if "message" in kinds else None
        if first == len(self.items) - 1 and self._text is not None:
            self._logprobs = list(logprobs)
        yield from self._close("completed" if complete else "incomplete")
        if first is not None:
            part = self.items[first]["content"]
            assert isinstance(part, list) and isinstance(part[0], dict)
            self.items[first] = {
                **self.items[first],
                "content": [{**part[0], "logprobs": list(logprobs)}],
            }

    def _grow(
        self, kind: str, text: str, logprobs: Sequence[Json] = ()
    ) -> Iterator[dict[str, Json]]:
        if self._text is None or self.items[-1]["type"] != kind:
            yield from self._close()
            yield from self._open(kind)
        self._text = (self._text or "") + text
        self.deltas[-1].append(len(text))
        if kind == "message":
            self._logprobs += logprobs
            yield self._of_part("response.output_text.delta", delta=text, logprobs=list(logprobs))
        else:
            yield self._of_part("response.reasoning_text.delta", delta=text)

    def _open(self, kind: str, *, name: str | None = None) -> Iterator[dict[str, Json]]:
        """Begins an item. `name` is its id if it has one already."""
        self._text = ""
        self._logprobs = []
        place = len(self.items)
        if kind == "message":
            item: dict[str, Json] = {
                "id": name or f"msg_{self._request_id}_{place}",
                "type": kind,
                "role": "assistant",
                "content": [],
            }
        else:
            item = {
                "id": name or f"rs_{self._request_id}_{place}",
                "type": kind,
                "summary": [],
                "content": [],
            }
        self.items.append({**item, "status": "in_progress"})
        self.deltas.append([])
        yield self._of_item("response.output_item.added")
        yield self._of_part("response.content_part.added", part=self._part())

    def _close(self, status: str = "completed") -> Iterator[dict[str, Json]]:
        """Ends the open item, if there is one. A call that is still open was cut off."""
        if self._text is not None and self.items[-1]["type"] == "function_call":
            yield from self._end_call("incomplete")
        if self._text is None:
            return
        text = self._text
        part = self._part()
        if self.items[-1]["type"] == "message":
            yield self._of_part(
                "response.output_text.done", text=text, logprobs=list(self._logprobs)
            )
        else:
            yield self._of_part("response.reasoning_text.done", text=text)
        yield self._of_part("response.content_part.done", part=part)
        self._text = None
        self.items[-1] = {**self.items[-1], "content": [part], "status": status}
        yield self._of_item("response.output_item.done")

    def _add_call(self, piece: CallPiece) -> Iterator[dict[str, Json]]:
        yield from self._close()
        tool = self._tools.get(piece.call.name)
        custom = tool is not None and tool.body.type == CUSTOM
        if custom:
            prefix = "ctc"
            kind = "custom_tool_call"
            part = "input"
        else:
            prefix = "fc"
            kind = "function_call"
            part = "arguments"
        names: dict[str, Json] = {"name": piece.call.name} if tool is None else tool.names
        item: dict[str, Json] = {
            "id": f"{prefix}_{self._request_id}_{len(self.items)}",
            "type": kind,
            "call_id": call_id(self._request_id, piece.index),
            **names,
            part: "",
            "status": "in_progress",
        }
        yield from self._begin_call(item)
        if not piece.begins:
            arguments = piece.call.arguments
            yield from self._argue(custom_input(arguments) if custom else arguments, last=True)

    def _begin_call(self, item: dict[str, Json]) -> Iterator[dict[str, Json]]:
        self.items.append(item)
        self.deltas.append([])
        yield self._of_item("response.output_item.added")
        self._text = ""

    def repeat(self, item: dict[str, Json], lengths: Sequence[int]) -> Iterator[dict[str, Json]]:
        """Writes an item that is complete once more, in the texts that it came in."""
        kind = str(item["type"])
        status = str(item["status"])
        text, logprobs = _said(item)
        ends = list(accumulate(lengths))
        texts = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        if kind in ("message", "reasoning"):
            yield from self._open(kind, name=str(item["id"]))
            for part in texts:
                yield from self._grow(kind, part, logprobs)
                logprobs = ()
            yield from self._close(status)
            return
        place = "input" if kind == "custom_tool_call" else "arguments"
        yield from self._begin_call({**item, place: "", "status": "in_progress"})
        for part in texts:
            yield from self._argue(part, last=False)
        yield from self._end_call(status)

    def _argue(self, text: str, *, last: bool) -> Iterator[dict[str, Json]]:
        """Adds to the arguments of the open call, or to the text of a custom call."""
        written = "function_call_arguments"
        if self.items[-1]["type"] == "custom_tool_call":
            written = "custom_tool_call_input"
        self._text = (self._text or "") + text
        if text:
            self.deltas[-1].append(len(text))
            yield self._of_last(f"response.{written}.delta", delta=text)
        if last:
            yield from self._end_call("completed")

    def _end_call(self, status: str) -> Iterator[dict[str, Json]]:
        item = self.items[-1]
        text = self._text
        self._text = None
        if item["type"] == "custom_tool_call":
            yield self._of_last("response.custom_tool_call_input.done", input=text)
            self.items[-1] = {**item, "input": text, "status": status}
        else:
            yield self._of_last(
                "response.function_call_arguments.done", name=item["name"], arguments=text
            )
            self.items[-1] = {**item, "arguments": text, "status": status}
        yield self._of_item("response.output_item.done")

    def _part(self) -> Json:
        """The only part of the open item."""
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def _of_item(self, kind: str) -> dict[str, Json]:
        return self.event(kind, output_index=len(self.items) - 1, item=dict(self.items[-1]))

    def _of_last(self, kind: str, **fields: Json) -> dict[str, Json]:
        return self.event(
            kind, item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields
        )

    def _of_part(self, kind: str, **fields: Json) -> dict[str, Json]:
        return self._of_last(kind, content_index=0, **fields)
