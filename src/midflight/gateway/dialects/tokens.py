"""vLLM's tokens-in, tokens-out dialect: `POST /inference/v1/generate`. It uses neither the
tokenizer nor the template, except for stop strings.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from midflight.gateway.answers.answer import Answer, Event, News
from midflight.gateway.dialects.completions import PROMPT_IDS, sources
from midflight.gateway.dialects.constraints import grammar_of
from midflight.gateway.dialects.exchange import (
    Alternatives,
    Reply,
    alternatives,
    prompt_logprobs,
    token_name,
    usage,
    weight_versions,
)
from midflight.gateway.dialects.fields import PromptTop, RequestBody, TopLogprobs, parse
from midflight.gateway.dialects.sampling_body import StreamOptions
from midflight.gateway.dialects.sampling_fields import SamplingFields
from midflight.gateway.dialects.unread_fields import HARMLESS, UnreadFields
from midflight.gateway.sessions.request import CompletionCall
from midflight.types import Json
from midflight.types.generation import Api

_PREFIX = "sampling_params."
_TOKENS = SamplingFields(Api.OPENAI, prefix=_PREFIX)
_NO_EFFECT: Mapping[str, str] = {
    **HARMLESS,
    "flat_logprobs": "a way to keep them in memory",
    "output_kind": "`stream` says whether news are wanted",
    "extra_args": "for plugins of a server",
    "skip_reading_prefix_cache": "a hint for speed",
}


class TokensSampling(_TOKENS.on(RequestBody)):
    harmless = _NO_EFFECT
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: TopLogprobs | None = None
    prompt_logprobs: PromptTop | None = None
    structured_outputs: dict[str, JsonValue] | None = None
    detokenize: bool | None = None
    """This and the next three have no effect, because the answer has no text."""
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


class TokensBody(RequestBody):
    token_ids: PROMPT_IDS
    sampling_params: TokensSampling
    model: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens"] | None = None


class TokensExchange:
    """One request. In log-probabilities a token is named `token_id:` and its number."""

    def __init__(self, body: bytes) -> None:
        self.unread = UnreadFields()
        parsed = parse(TokensBody, body, unread=self.unread)
        sampling = parsed.sampling_params
        self._logprobs = sampling.logprobs is not None
        self._prompt_ids = bool(parsed.return_token_ids)
        self._include_usage = parsed.stream_options is not None and bool(
            parsed.stream_options.include_usage
        )
        param, grammar = grammar_of(sampling, prefix=_PREFIX) or ("grammar", None)
        names = {
            "max_tokens": "max_tokens",
            "top_logprobs": "logprobs",
            "prompt_logprobs": "prompt_logprobs",
        }
        self.call = CompletionCall(
            sources=sources(parsed.token_ids, param="token_ids"),
            asked=_TOKENS.asked(
                sampling,
                max_tokens=sampling.max_tokens,
                top_logprobs=sampling.logprobs,
                grammar=grammar,
            ),
            n=sampling.n or 1,
            prompt_logprobs=sampling.prompt_logprobs,
            stream=bool(parsed.stream),
            model=parsed.model,
            request_id=parsed.request_id,
            may_abort=True,
            prompt_param="token_ids",
            names={
                **_TOKENS.names,
                **{own: _PREFIX + name for own, name in names.items()},
                "grammar": param,
            },
        )

    def whole(self, reply: Reply, answers: Sequence[Answer]) -> Json:
        prompt = answers[0].prompt
        scores: Json = None
        if self.call.prompt_logprobs is not None:
            scores = prompt_logprobs(reply.tokenizer, answers[0].prompt_logprobs)
        body = self._envelope(reply, [self._choice(reply, answer) for answer in answers])
        body["prompt_logprobs"] = scores
        body["prompt_token_ids"] = list(prompt.ids) if self._prompt_ids else None
        body["usage"] = usage(answers)
        body["kv_transfer_params"] = None
        return body

    def opening(self, reply: Reply) -> Iterable[Json]:
        if self._prompt_ids:
            yield {
                **self._envelope(reply, []),
                "prompt_token_ids": list(reply.job.answers[0].prompt.ids),
            }

    def frames(self, reply: Reply, event: Event) -> Iterable[Json]:
        if isinstance(event, Answer):
            last: Json = {"index": event.index, "token_ids": [], "logprobs": None, **_ended(event)}
            yield self._envelope(reply, [last])
        elif event.token_ids:
            choice: Json = {
                "index": event.index,
                "token_ids": list(event.token_ids),
                "logprobs": self._spread(reply, event),
                "finish_reason": None,
            }
            yield self._envelope(reply, [choice])

    def closing(self, reply: Reply, answers: Sequence[Answer]) -> Iterable[Json]:
        if self._include_usage:
            yield {**self._envelope(reply, []), "usage": usage(answers)}

    def _envelope(self, reply: Reply, choices: list[Json]) -> dict[str, Json]:
        return {
            "request_id": self.call.request_id or reply.job.request_id,
            "model": reply.model,
            "created": reply.created,
            "output_mode": "tokens",
            "choices": choices,
        }

    def _choice(self, reply: Reply, answer: Answer) -> Json:
        ids: list[Json] = list(answer.turn.output_ids)
        return {
            "index": answer.index,
            "token_ids": ids,
            "logprobs": self._spread(reply, answer),
            **_ended(answer),
        }

    def _spread(self, reply: Reply, event: Event) -> Json:
        """The log-probabilities of an event. Older clients of vLLM read `token`, newer ones
        `token_id`.
        """
        if not self._logprobs:
            return None
        if isinstance(event, News):
            ids = event.token_ids
            logprobs = event.logprobs
        else:
            ids = event.turn.output_ids
            logprobs = event.turn.logprobs
        top: Alternatives = alternatives(event.top_logprobs, len(ids))

        def entry(token_id: int, logprob: float) -> dict[str, Json]:
            return {
                "token": token_name(reply.tokenizer, token_id, as_id=True),
                "token_id": token_id,
                "logprob": logprob,
            }

        content: list[Json] = []
        for token_id, logprob, others in zip(ids, logprobs, top, strict=True):
            own = entry(token_id, logprob)
            own["top_logprobs"] = [entry(*other) for other in others]
            content.append(own)
        return {"content": content}


def _ended(answer: Answer) -> dict[str, Json]:
    """The fields that say how an answer ended."""
    finish = answer.turn.finish
    stop_ids = answer.request.sampling.stop_token_ids
    stopped = None
    if isinstance(finish.matched, str) or finish.matched in stop_ids:
        stopped = finish.matched
    return {
        "finish_reason": finish.reason.value,
        "stop_reason": stopped,
        "weight_versions": weight_versions(answer.turn),
    }
