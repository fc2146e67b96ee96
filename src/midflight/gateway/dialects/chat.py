"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from midflight.gateway.dialects.chat_body import ChatBody, chat_call
from midflight.gateway.dialects.exchange import Reply
from midflight.gateway.dialects.fields import parse
from midflight.gateway.dialects.wording import Alternatives, call_id, logprob_entries, usage, usage_so_far, weight_versions
from midflight.gateway.sessions.call import Answer, Delta, Event
from midflight.text import Tokenizer
from midflight.text.formats import AssistantMessage, ContentPiece, Piece, ReasoningPiece, ToolCall
from midflight.types import FinishReason, Json

_Object = dict[str, Json]


class ChatExchange:
    """One chat request."""

    def __init__(self, body: bytes) -> None:
        parsed = parse(ChatBody, body)
        self.call = chat_call(parsed)
        self._logprobs = bool(parsed.logprobs)
        self._token_ids = bool(parsed.return_token_ids)
        self._names_as_ids = bool(parsed.return_tokens_as_token_ids)
        self._include_usage = parsed.include_usage
        self._usage_so_far = parsed.continuous_usage
        self._num_streamed = 0
        """Tokens of all choices."""

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        body = _envelope(reply, "chat.completion", [self._choice(reply, answer) for answer in answers])
        body["usage"] = usage(answers)
        if self._token_ids:
            body["prompt_token_ids"] = list(answers[0].prompt.ids)
        return body

    def opening(self, reply: Reply) -> Iterable[Json]:
        for choice in reply.job.choices:
            chunk = self._chunk(reply, choice.index, {"role": "assistant", "content": ""})
            if choice is reply.job.choices[0] and self._token_ids:
                chunk["prompt_token_ids"] = list(choice.prompt.ids)
            yield chunk

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        if isinstance(event, Delta):
            self._num_streamed += len(event.token_ids)
            deltas = self._deltas(reply, event.choice, event.pieces)
            of_tokens = self._of_tokens(reply.tokenizer, event)
            if of_tokens and not deltas:
                deltas = [{}]
            for place, delta in enumerate(deltas):
                yield self._chunk(reply, event.choice, delta, **(of_tokens if place == 0 else {}))
        else:
            for delta in self._deltas(reply, event.choice, event.tail_pieces):
                yield self._chunk(reply, event.choice, delta)
            yield self._chunk(reply, event.choice, {}, **self._finish(event))

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        if self._include_usage:
            body = _envelope(reply, "chat.completion.chunk", [])
            body["usage"] = usage(answers)
            yield body

    def _choice(self, reply: Reply, answer: Answer) -> Json:
        turn = answer.turn
        choice: _Object = {
            "index": answer.choice,
            "message": _message(answer.message, answer.request_id),
            "logprobs": self._content(reply.tokenizer, turn.output_ids, turn.logprobs, answer.top_logprobs),
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
            ended["weight_versions"] = weight_versions(answer.turn)
        return ended

    def _deltas(self, reply: Reply, choice: int, pieces: Sequence[Piece]) -> list[_Object]:
        request_id = reply.job.choices[choice].request.request_id
        return [delta for piece in pieces for delta in _piece(piece, request_id)]

    def _of_tokens(self, tokenizer: Tokenizer, event: Delta) -> _Object:
        """What is told of tokens themselves: it comes with them, even while their text is held back."""
        told: _Object = {}
        if self._logprobs:
            told["logprobs"] = self._content(tokenizer, event.token_ids, event.logprobs, event.top_logprobs)
        if self._token_ids:
            told["token_ids"] = list(event.token_ids)
        return told

    def _content(self, tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[float], top: Alternatives) -> Json:
        if not self._logprobs:
            return None
        return {"content": logprob_entries(tokenizer, token_ids, logprobs, top, as_ids=self._names_as_ids), "refusal": None}

    def _chunk(self, reply: Reply, index: int, delta: _Object, **more: Json) -> _Object:
        choice: _Object = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        chunk = _envelope(reply, "chat.completion.chunk", [choice])
        if self._usage_so_far:
            chunk["usage"] = usage_so_far(reply.job.choices, self._num_streamed)
        elif self._include_usage:
            chunk["usage"] = None
        return chunk


def _message(message: AssistantMessage, request_id: str) -> Json:
    """Content is null where the message is calls and nothing else."""
    written: _Object = {"role": "assistant", "content": message.content or (None if message.tool_calls else ""), "refusal": None}
    if message.reasoning:
        written |= _reasoning(message.reasoning)
    if message.tool_calls:
        written["tool_calls"] = [_call(call, request_id, index) for index, call in enumerate(message.tool_calls)]
    return written


def _piece(piece: Piece, request_id: str) -> list[_Object]:
    """A call is announced without arguments first, which is how clients that gather streams know it."""
    if isinstance(piece, ContentPiece):
        return [{"content": piece.text}]
    if isinstance(piece, ReasoningPiece):
        return [_reasoning(piece.text)]
    announced = _call(ToolCall(piece.call.name, ""), request_id, piece.index)
    arguments: _Object = {"index": piece.index, "function": {"arguments": piece.call.arguments}}
    return [{"tool_calls": [{"index": piece.index, **announced}]}, {"tool_calls": [arguments]}]


def _call(call: ToolCall, request_id: str, index: int) -> _Object:
    return {"id": call_id(request_id, index), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reasoning(text: str) -> _Object:
    """Under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _envelope(reply: Reply, kind: str, choices: list[Json]) -> _Object:
    return {
        "id": f"chatcmpl-{reply.job.request_id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
    }
